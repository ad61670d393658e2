"""Recipes: jobs as YAML files of Megatron's own flags.

In : a path or the name of a shipped recipe, and ``flag=value`` overrides.  Out: a Recipe.  A flag
is a field of one of megatron-core's configurations, whose type is read from the source of the
installed release, or one of ``_TRAINING``, which ``megatron.training`` has beside these.  Which
values fit together is Megatron's to say, when its configurations are built of them; what is checked
here are the sizes that decide which ranks there are, and how many microbatches each of them has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional, Union, cast, get_args, get_type_hints

import yaml

from megatron_prism.core import foreign
from megatron_prism.core.errors import RecipeError, WorldError, did_you_mean
from megatron_prism.core.jobs.megatron_source import fields_of_class
from megatron_prism.core.world import (
    DEFAULT_ORDER,
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_MICROBATCHES,
    World,
    implied_size,
)

# -- flags ----------------------------------------------------------------------------------------
_CONFIGURATIONS = (  # modules of megatron-core, and classes in them
    ("model_parallel_config", "ModelParallelConfig"),
    ("transformer.transformer_config", "TransformerConfig"),
    ("transformer.transformer_config", "MLATransformerConfig"),
    ("distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    ("optimizer.optimizer_config", "OptimizerConfig"),
)
FIELD = {  # flag -> the field that it becomes, where that has another name
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
}
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "recompute": "recompute_granularity",
    "world_size": "prism.world_size",
}
_AXES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_SIZES = {SHORT[axis] for axis in _AXES if axis != "vpp"}
OTHER_NAMES = {**SHORT, **{name: flag for flag, name in FIELD.items()}}
_BEYOND = re.compile(  # fields that need more than the model and the loop that a recipe stands for
    "cuda_graph|fine_grained|heterogeneous|hybrid_context|fsdp|optimizer_instances|sharding_strategy"
    "|layer_wise|align_param_gather|gather_with_optimizer"
)
_NO_FIELD = re.compile(r"Callable|dtype|Context\w*Manager")  # types of what is no flag


class Flag(NamedTuple):
    """What a flag may be, as a type, and its default."""

    kind: object
    default: object


_Embedding = Literal["learned_absolute", "rope", "none"]
_TRAINING = {  # flags of megatron.training, and where its default is another than the field's
    "num_layers": Flag(int, None),
    "hidden_size": Flag(int, None),
    "num_attention_heads": Flag(int, None),
    "seq_length": Flag(int, None),
    "vocab_size": Flag(int, None),
    "make_vocab_size_divisible_by": Flag(int, 128),
    "max_position_embeddings": Flag(int | None, None),  # None: seq_length
    "num_virtual_stages_per_pipeline_rank": Flag(int | None, None),
    "decoder_first_pipeline_num_layers": Flag(int | None, None),
    "decoder_last_pipeline_num_layers": Flag(int | None, None),
    "use_tp_pp_dp_mapping": Flag(bool, False),
    "num_experts": Flag(int | None, None),
    "norm_epsilon": Flag(float, 1e-5),
    "swiglu": Flag(bool, False),
    "position_embedding_type": Flag(_Embedding, "learned_absolute"),
    "rotary_base": Flag(int, 10000),
    "rotary_percent": Flag(float, 1.0),
    "use_rope_scaling": Flag(bool, False),
    "rope_scaling_factor": Flag(float, 8.0),
    "untie_embeddings_and_output_weights": Flag(bool, False),
    "q_lora_rank": Flag(int | None, None),
    "kv_lora_rank": Flag(int, 32),
    "hybrid_override_pattern": Flag(str | None, None),
    "micro_batch_size": Flag(int, 1),
    "global_batch_size": Flag(int, 1),
    "train_iters": Flag(int, 3),
    "seed": Flag(int, 1234),
    "lr": Flag(float, 1e-4),
    "grad_reduce_in_bf16": Flag(bool, False),
    "mock_data": Flag(bool, False),
    "data_path": Flag(str | None, None),  # a text file, read as bytes
    "transformer_impl": Flag(Literal["transformer_engine", "local"], "transformer_engine"),
}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
_COUNTS = (*_REQUIRED, "micro_batch_size", "global_batch_size", "train_iters", "seed")
_MOST = {"num_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS}
# what Megatron's annotations are made of
_TYPES = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list": list,
    "tuple": tuple,
    "List": list,
    "Tuple": tuple,
    "Optional": Optional,
    "Union": Union,
    "Literal": Literal,
}


@lru_cache(maxsize=1)
def known_flags() -> Mapping[str, Flag]:
    """Return every flag that a recipe may set."""
    flags: dict[str, Flag] = {}
    for module, class_name in _CONFIGURATIONS:
        fields = fields_of_class(f"megatron.core.{module}", class_name)
        for name, (annotation, default) in fields.items():
            is_private = name.startswith("_")
            if is_private or _NO_FIELD.search(annotation) or _BEYOND.search(name):
                continue
            flags.setdefault(name, Flag(_type(annotation), default))
    for name in FIELD.values():
        flags.pop(name, None)
    return {**flags, **_TRAINING}


def _type(annotation: str) -> object:
    """Return the type that an annotation says; Any for a type of Megatron's."""
    try:
        return eval(annotation, {"__builtins__": {}}, dict(_TYPES))
    except (NameError, TypeError):
        return Any


@dataclass(frozen=True)
class Prism:
    """What to emulate, and where: the same as the --prism-* flags."""

    world_size: int | None = None  # None: the least that the parallel sizes imply
    gpus_per_node: int | None = None  # ranks on each host; None: as many as the machine has
    ranks: str | None = None  # a selector; None: one representative rank per stage
    tier: Literal["auto", "cuda", "cpu", "meta"] = "auto"
    values: str = "mirror"
    out: str | None = None  # artefact folder
    te_version: str | None = None  # the Transformer Engine that must be installed; None: any
    all_microbatches: bool = False  # of a capture: none follows from others
    flags: str = ""  # further flags of each rank, such as --prism-streams


@dataclass(frozen=True)
class Hardware:
    """What the job is meant for.

    Attributes:
        name: The GPU of a machine that prism replay knows (H200), whose times its ops get; another
            one, for which prism replay asks; CPU or nothing: the default machine.
        network: Between its nodes, as ``network=`` of prism replay, which has the last word.
    """

    name: str = ""
    network: str = ""


# settings that change nothing of what an iteration does
_OF_A_RUN = ("ranks", "out", "all_microbatches", "flags")
_SECTIONS: dict[str, type[Prism | Hardware]] = {"prism": Prism, "hardware": Hardware}
_NETWORK = re.compile(r"(?:rails|fat-tree(?::\d{1,3}(?:\.\d{1,3})?)?)?")


@dataclass(frozen=True)
class Recipe:
    """One job: what is given of Megatron's flags, by their names.

    A flag that is not given has its default as an attribute, too (``recipe.seq_length``).  Building
    a recipe checks it: RecipeError or WorldError, with arithmetic and fix.

    Attributes:
        flags: Name -> value of those that are given.
        prism: What to emulate.
        hardware: What the job is meant for.
        name: Of the file.
    """

    flags: Mapping[str, Any]
    prism: Prism = field(default_factory=Prism)
    hardware: Hardware = field(default_factory=Hardware)
    name: str = ""

    def __post_init__(self) -> None:
        """Check the recipe."""
        check(self)

    def __getattr__(self, name: str) -> Any:
        """Return a flag, or its default."""
        if name.startswith("_") or name not in known_flags():
            raise AttributeError(name)
        return self.flags.get(name, known_flags()[name].default)

    def changed(self, given: Mapping[str, object] | None = None, **more: object) -> Recipe:
        """Return the same job with other flags.

        Args:
            given: Flag -> value, which may be text.  Flags may have their short names, and those of
                sections a dot: ``changed({"prism.tier": "meta"})``.  ``dp`` is of the world:
                world_size = dp x tp x cp x pp.
            more: The same: ``changed(tp=4)``.
        """
        changes = {**(given or {}), **more}
        replicas = changes.pop("dp", None)
        flags = dict(self.flags)
        sections: dict[str, Any] = {"prism": self.prism, "hardware": self.hardware}
        for name, text in changes.items():
            key = full_name(name)
            value = _read_as(kind_of(key), text, key)
            section, dot, leaf = key.partition(".")
            # a section's setting, or a flag of Megatron
            if dot:
                sections[section] = dataclasses.replace(sections[section], **{leaf: value})
            else:
                flags[key] = value
        if replicas is not None:
            sizes = [flags.get(SHORT[axis]) or 1 for axis in ("tp", "cp", "pp")]
            world_size = math.prod(sizes) * cast(int, _read_as(int, replicas, "dp"))
            sections["prism"] = dataclasses.replace(sections["prism"], world_size=world_size)
        return dataclasses.replace(self, flags=flags, **sections)

    @property
    def is_hybrid(self) -> bool:
        """Whether its layers are of several kinds: attention, Mamba, MLP."""
        return bool(self.hybrid_override_pattern)

    @property
    def world(self) -> World:
        """The job's ranks.  WorldError when the sizes do not fit."""
        sizes = {axis: getattr(self, SHORT[axis]) for axis in _AXES}
        world_size = self.prism.world_size
        if world_size is None:
            sizes_of_ranks = {axis: size for axis, size in sizes.items() if axis != "vpp"}
            world_size = implied_size(**sizes_of_ranks)
        order = "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else DEFAULT_ORDER
        return World(world_size, order=order, gpus_per_node=self.prism.gpus_per_node, **sizes)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one rank in one iteration."""
        return int(self.global_batch_size // (self.micro_batch_size * self.world.dp))

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        return int(self.ffn_hidden_size or 4 * self.hidden_size)

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return int(self.kv_channels or self.hidden_size // self.num_attention_heads)

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return int(self.num_query_groups or self.num_attention_heads)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding (training/tokenizer/tokenizer.py _vocab_size_with_padding)."""
        multiple = self.make_vocab_size_divisible_by * self.world.tp
        return int(-(-self.vocab_size // multiple) * multiple)

    def derived(self) -> dict[str, str]:
        """Say what follows from the recipe, each with its arithmetic, for people."""
        world = self.world
        tokens = self.global_batch_size * self.seq_length
        split = f"(tp {world.tp} x cp {world.cp} x pp {world.pp})"
        rows = {"dp": f"{world.dp} = {world.size} / {split}"}
        # experts are divided in their own way
        if self.num_experts:
            split = f"(etp {world.etp} x ep {world.ep} x pp {world.pp})"
            rows["expert dp"] = f"{world.edp} = {world.size} / {split}"
        batch = f"(micro batch {self.micro_batch_size} x dp {world.dp})"
        rows["microbatches"] = f"{self.num_microbatches} = {self.global_batch_size} / {batch}"
        rows["vocabulary"] = f"{self.padded_vocab_size:,} (padded from {self.vocab_size:,})"
        rows["tokens per iteration"] = f"{tokens:,} = {self.global_batch_size} x {self.seq_length}"
        return rows

    def settings(self, text: Callable[[Any], str]) -> dict[str, str]:
        """Return every flag that is not the default, but which ranks to run and where to.

        Args:
            text: Writes a value.
        """
        flags = known_flags()
        texts: dict[str, str] = {}
        for name, value in self.flags.items():
            if value != flags[name].default:
                texts[name] = text(value)
        for section_name in _SECTIONS:
            section = getattr(self, section_name)
            for section_field in dataclasses.fields(section):
                value = getattr(section, section_field.name)
                if value != section_field.default and section_field.name not in _OF_A_RUN:
                    texts[f"{section_name}.{section_field.name}"] = text(value)
        return texts

    def words(self) -> list[str]:
        """Return the command line of the recipe's script.

        It is the name and ``flag=value`` words, those that decide which ranks there are as
        Megatron's options.
        """
        settings = self.settings(json.dumps)
        mapping = settings.pop("use_tp_pp_dp_mapping", None)
        words = [self.name]
        for name, text in settings.items():
            option = option_of(name) if name in _SIZES else name
            words.append(f"{option}={text}")
        if mapping:
            words.append("--use-tp-pp-dp-mapping")
        return words

    @staticmethod
    def of_words(words: Sequence[str]) -> Recipe:
        """Return the recipe whose ``words`` they are."""
        name, *settings = words
        changes: dict[str, object] = {}
        for word in settings:
            # an option without a value
            setting = word if "=" in word else f"{word}=true"
            flag, value = _override(setting)
            changes[flag] = value
        return Recipe(dict.fromkeys(_REQUIRED, 1), name=name).changed(changes)

    def megatron_words(self) -> list[str]:
        """Return Megatron's command line of this job."""
        words: list[str] = []
        for name, value in self._megatron_flags().items():
            # a flag whose absence means True in Megatron
            if name in _NEGATED:
                if not value:
                    words.append(_NEGATED[name])
            # several words; patterns of frequencies are one word
            elif isinstance(value, list) and not name.endswith("_freq"):
                words += [option_of(name), *map(str, value)]
            elif value is True:
                words.append(option_of(name))
            elif value is not None and value is not False:
                words += [option_of(name), str(value)]
        return words

    def _megatron_flags(self) -> dict[str, object]:
        """Return the flags of Megatron's command line, with defaults that it has not."""
        flags: dict[str, object] = {}
        for name, flag in _TRAINING.items():
            if name in _COUNTS:
                flags[name] = flag.default
        flags |= {"lr": self.lr, "max_position_embeddings": self.seq_length, **self.flags}
        # a layout says itself how many stages there are
        if flags.pop("pipeline_model_parallel_layout", None) is not None:
            flags.pop("num_virtual_stages_per_pipeline_rank", None)
            flags["pipeline_model_parallel_layout"] = self.pipeline_model_parallel_layout
        flags["group_query_attention"] = self.num_query_groups is not None
        flags["is_hybrid_model"] = self.is_hybrid
        # without a text Megatron makes samples itself
        if self.data_path is None:
            flags |= {"mock_data": True, "tokenizer_type": "NullTokenizer"}
        return flags


# flag that is on by default -> the option that turns it off
_NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "apply_rope_fusion": "--no-rope-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "persist_layer_norm": "--no-persist-layer-norm",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
}


def option_of(flag: str) -> str:
    """Write a flag as on a command line: ``--seq-length``; of ``prism.tier`` ours."""
    # the field's name is not the option's
    if flag == "fp8":
        return "--fp8-format"
    return f"--{re.sub('[_.]', '-', flag)}"


# -- checks ---------------------------------------------------------------------------------------
def check(recipe: Recipe) -> None:
    """Check a recipe.

    Raises:
        RecipeError: The first rule that the recipe breaks.
        WorldError: Its sizes do not fit.
    """
    for name in _REQUIRED:
        if name not in recipe.flags:
            raise RecipeError(f"{name} is missing", fix=f"add {name}=VALUE")
    for name, value in recipe.flags.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value)
    # recordings are of scripts
    values = recipe.prism.values
    if values not in ("mirror", "noise"):
        raise RecipeError(f"prism.values={values} is of a script", fix="use mirror or noise")
    network = recipe.hardware.network
    if not _NETWORK.fullmatch(network):
        text = f"hardware.network: {network!r} is no network"
        raise RecipeError(text, fix="use rails, or fat-tree:2")
    try:
        world = recipe.world
    except WorldError as error:
        # as recipes name the size of the world
        fix = re.sub(r"\bsize=", "world_size=", error.fix or "")
        raise WorldError(error.message, fix=fix) from None
    _check_batches(recipe, world)


def _check_number(name: str, value: float) -> None:
    """Raise RecipeError for a number that a flag cannot be."""
    most = 1e38 if isinstance(value, float) else _MOST.get(name, (1 << 31) - 1)
    least = 1 if name in _COUNTS else 0
    if not math.isfinite(value) or not least <= value <= most:
        raise RecipeError(f"{name} is {value}", fix=f"use a number from {least} to {most}")


def _check_batches(recipe: Recipe, world: World) -> None:
    """Raise RecipeError for a batch that does not make whole microbatches for each rank."""
    batch = recipe.global_batch_size
    step = recipe.micro_batch_size * world.dp  # of the batch: a microbatch more for each rank
    count = batch // step
    arithmetic = f"micro_batch_size {recipe.micro_batch_size} x dp {world.dp}"
    if batch % step:
        # at least one microbatch for each rank
        nearest = max(step, round(batch / step) * step)
        text = f"global_batch_size {batch} is not divisible by {arithmetic} = {step}"
        raise RecipeError(text, fix=f"use global_batch_size={nearest}")
    if count > MOST_MICROBATCHES:
        fix = f"use global_batch_size={MOST_MICROBATCHES * step} or less"
        raise RecipeError(f"{count:,} microbatches an iteration", fix=fix)
    # Megatron refuses it when it trains (core/pipeline_parallel/schedules.py:1007)
    if world.vpp is not None and count % world.pp:
        text = f"the interleaved schedule takes microbatches in rounds of pp {world.pp}, "
        text += f"but there are {count} = {batch} / ({arithmetic})"
        nearest = max(1, round(count / world.pp)) * world.pp * step
        raise RecipeError(text, fix=f"use global_batch_size={nearest}, or vpp=null")


# -- reading --------------------------------------------------------------------------------------
def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides, check everything.

    Args:
        path: A file, or the name of a shipped recipe with or without ``.yaml``.  A relative
            ``data_path`` is looked up beside the recipe, then here.
        overrides: ``flag=value`` words.

    Raises:
        RecipeError: It is no recipe, or breaks a rule.
        WorldError: Its sizes do not fit.
    """
    file = find(path)
    settings = _read(file)
    for word in overrides:
        name, value = _override(word)
        settings[name] = value
    for name in _REQUIRED:
        if name not in settings:
            raise RecipeError(f"{file}: {name} is missing", fix=f"add {name}=VALUE")
    # a recipe of valid flags, so that all settings are read and checked in one way
    blank = Recipe(dict.fromkeys(_REQUIRED, 1), name=file.stem)
    recipe = blank.changed(settings)
    if recipe.data_path is not None:
        return recipe.changed(data_path=_data_file(recipe.data_path, file))
    return recipe


def load_prism_section(path: str | Path) -> dict[str, object]:
    """Return what a file says for the --prism-* flags: the keys of its ``prism:``.

    Raises:
        RecipeError: It is no recipe.
    """
    settings: dict[str, object] = {}
    for key, value in _read(find(path)).items():
        section, _, leaf = key.partition(".")
        if section == "prism":
            settings[leaf] = _read_as(kind_of(key), value, key)
    return settings


def given(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """Return ``recipe`` itself, or the one of that name or file."""
    return recipe if isinstance(recipe, Recipe) else load(os.fspath(recipe))


def shipped() -> dict[str, Path]:
    """Return the recipes that come with the package, installed or in a checkout: name -> file."""
    package = Path(__file__).parents[2]
    # in a wheel beside the code, in a checkout above it
    for folder in (package / "recipes", package.parent / "recipes"):
        files = sorted(folder.glob("*.yaml"))
        if files:
            return {file.stem: file for file in files}
    return {}


def summary(path: str | Path) -> str:
    """Return the first comment line of a recipe: what it shows."""
    first_line, _, _ = Path(path).read_text(encoding="utf-8").partition("\n")
    return first_line.removeprefix("#").strip() if first_line.startswith("#") else ""


def find(path: str | Path) -> Path:
    """Return the file meant: itself, or a shipped recipe by name.

    Raises:
        RecipeError: There is none; names the closest ones.
    """
    file = Path(path)
    with contextlib.suppress(ValueError, OSError):  # a name too long, a null byte in it
        if file.is_file():
            return file
    recipes = shipped()
    name = file.name.removesuffix(".yaml")
    if name in recipes and file.parent.name in ("", "recipes"):
        return recipes[name]
    otherwise = "see the shipped ones: prism recipes"
    fix = did_you_mean(name, recipes, otherwise, most=2, cutoff=0.4)
    raise RecipeError(f"there is no recipe {path}", fix=fix)


def full_name(name: str) -> str:
    """Return the name of a flag by its short name, its option or its own name.

    ``tensor_model_parallel_size`` is that of ``tp`` and ``--tensor-model-parallel-size``.

    Raises:
        RecipeError: It is no flag of a recipe; names the closest one.
    """
    key = name.lstrip("-").replace("-", "_")
    key = OTHER_NAMES.get(key, key)
    if kind_of(key) is not None:
        return key
    fix = "for more than a plain GPT, run the job's own script: prism run -- pretrain_gpt.py …"
    # a flag that is misspelt; others are of jobs that recipes do not describe
    if not _BEYOND.search(key):
        candidates = [*known_flags(), *SHORT]
        for section in _SECTIONS:
            candidates += [f"{section}.{leaf}" for leaf in _hints(section)]
        fix = did_you_mean(key, candidates, fix, most=2)
    raise RecipeError(f"a recipe has no flag {name}", fix=fix)


def kind_of(key: str) -> object:
    """Return the type of a flag's values, of ``prism.tier`` as well; None: no such flag."""
    section, dot, leaf = key.partition(".")
    if dot:
        return _hints(section).get(leaf) if section in _SECTIONS else None
    return known_flags()[key].kind if key in known_flags() else None


@lru_cache(maxsize=2)
def _hints(section: str) -> dict[str, Any]:
    return get_type_hints(_SECTIONS[section])


def _read_as(kind: object, value: object, key: str) -> object:
    """Read a value, which may be text, as a type.

    Raises:
        RecipeError: It is none.
    """
    is_nothing = str(value).lower() in ("null", "none")
    # null turns off what may be off
    if is_nothing and type(None) in get_args(kind):
        return None
    try:
        return foreign.shaped(value, cast(type, kind), strict=False)
    except ValueError as error:
        # --recompute-modules mlp core_attn
        with contextlib.suppress(ValueError):
            if isinstance(value, str):
                words = value.replace(",", " ").split()
                return foreign.shaped(words, cast(type, kind), strict=False)
        choices = " or ".join(foreign.choices(kind)) or "a value of that type"
        raise RecipeError(f"{key}={value}: {error}", fix=f"use {choices}") from None


def _read(file: Path) -> dict[str, object]:
    """Return what a file gives, with names like ``seq_length`` and ``prism.tier``."""
    fix = "give the path of a YAML file of Megatron's flags: num_layers: 80"
    with foreign.reading(file, "a recipe", fix, error=RecipeError):
        mapping = _mapping(foreign.read_yaml(file))
    settings: dict[str, object] = {}
    for key, value in mapping.items():
        # a section is flattened: ``prism.tier``
        if isinstance(value, dict) and key in _SECTIONS:
            for leaf, leaf_value in value.items():
                settings[f"{key}.{leaf}"] = leaf_value
        else:
            settings[key] = value
    return {full_name(name): value for name, value in settings.items() if name != "dp"}


def _mapping(text: str) -> dict[str, object]:
    """Read a YAML mapping whose scalars are text: what they mean is their flag's to say."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        mapping = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it has no flags")
    # PyYAML keeps the last of equal keys, and says nothing
    names = [key.value for key, _ in root.value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice")
    return dict(mapping)


def _override(word: str) -> tuple[str, object]:
    """Read a ``flag=value`` word; a value in brackets or quotes is YAML."""
    name, equals, text = word.partition("=")
    name = name.strip()
    if not equals or not name:
        fix = f"write {name or 'seq_length'}=VALUE"
        raise RecipeError(f"{word!r}: an override is flag=value", fix=fix)
    # plain text: its flag says what it means
    if not text.startswith(("[", "{", '"', "'")):
        return name, text
    try:
        return name, yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        fix = "quote the value for YAML and for the shell"
        raise RecipeError(f"{word!r} is no YAML: {error}", fix=fix) from None


def _data_file(data: str, file: Path) -> str:
    """Return the path of a data file, which is named as seen from the recipe or from here."""
    for place in (file.parent / data, Path(data)):
        with contextlib.suppress(ValueError, OSError):  # a name too long, a null byte in it
            if place.is_file():
                return str(place.resolve())
    raise RecipeError(
        f"data_path: there is no file {data}, neither beside {file.name} nor here",
        fix="give the path of a text file, or data_path=null",
    )
