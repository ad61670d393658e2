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
from megatron_prism.core.megatron_source import fields_of_class
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
    "position_embedding_type": Flag(Literal["learned_absolute", "rope", "none"],
                                    "learned_absolute"),
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
}  # fmt: skip
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
_COUNTS = (*_REQUIRED, "micro_batch_size", "global_batch_size", "train_iters", "seed")
_MOST = {"num_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS}
# what Megatron's annotations are made of
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "tuple": tuple,
          "List": list, "Tuple": tuple, "Optional": Optional, "Union": Union,
          "Literal": Literal}  # fmt: skip


@lru_cache(maxsize=1)
def known_flags() -> Mapping[str, Flag]:
    """Every flag that a recipe may set."""
    found = dict[str, Flag]()
    for module, name in _CONFIGURATIONS:
        for one, (kind, default) in fields_of_class(f"megatron.core.{module}", name).items():
            if not (one[0] == "_" or _NO_FIELD.search(kind) or _BEYOND.search(one)):
                found.setdefault(one, Flag(_type(kind), default))
    for name in FIELD.values():
        found.pop(name, None)
    return {**found, **_TRAINING}


def _type(annotation: str) -> object:
    try:
        return eval(annotation, {"__builtins__": {}}, dict(_TYPES))
    except (NameError, TypeError):  # a type of Megatron's
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
    """What the job is meant for: the GPU of a machine that prism replay knows (H200), whose times
    its ops get; another one, for which prism replay asks; CPU or nothing: the default machine.
    ``network``: between its nodes, as ``network=`` of prism replay, which has the last word.
    """

    name: str = ""
    network: str = ""


# settings that change nothing of what an iteration does
_OF_A_RUN = ("ranks", "out", "all_microbatches", "flags")
_SECTIONS: dict[str, type[Prism | Hardware]] = {"prism": Prism, "hardware": Hardware}
_NETWORK = re.compile(r"(?:rails|fat-tree(?::\d{1,3}(?:\.\d{1,3})?)?)?")


@dataclass(frozen=True)
class Recipe:
    """One job: what is given of Megatron's flags, by their names; a flag that is not given has its
    default as an attribute, too (``recipe.seq_length``).

    Building it checks it: RecipeError or WorldError, with arithmetic and fix.
    """

    flags: Mapping[str, Any]
    prism: Prism = field(default_factory=Prism)
    hardware: Hardware = field(default_factory=Hardware)
    name: str = ""

    def __post_init__(self) -> None:
        check(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in known_flags():
            raise AttributeError(name)
        return self.flags.get(name, known_flags()[name].default)

    def changed(self, given: Mapping[str, object] | None = None, **more: object) -> Recipe:
        """The same job with other flags, which may have their short names: ``changed(tp=4)``,
        ``changed({"prism.tier": "meta"})``.  A value may be text.

        ``dp`` is of the world: world_size = dp x tp x cp x pp.
        """
        given = {**(given or {}), **more}
        replicas = given.pop("dp", None)
        values = dict(self.flags)
        sections: dict[str, Any] = {"prism": self.prism, "hardware": self.hardware}
        for name, value in given.items():
            key = full_name(name)
            section, dot, leaf = key.partition(".")
            if dot:
                read = {leaf: _read_as(kind_of(key), value, key)}
                sections[section] = dataclasses.replace(sections[section], **read)
            else:
                values[key] = _read_as(kind_of(key), value, key)
        if replicas is not None:
            sizes = [values.get(SHORT[axis]) or 1 for axis in ("tp", "cp", "pp")]
            size = math.prod(sizes) * cast(int, _read_as(int, replicas, "dp"))
            sections["prism"] = dataclasses.replace(sections["prism"], world_size=size)
        return dataclasses.replace(self, flags=values, **sections)

    @property
    def world(self) -> World:
        """The job's ranks.  WorldError when the sizes do not fit."""
        sizes = {axis: getattr(self, SHORT[axis]) for axis in _AXES}
        size = self.prism.world_size
        if size is None:
            size = implied_size(**{axis: sizes[axis] for axis in _AXES if axis != "vpp"})
        order = "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else DEFAULT_ORDER
        return World(size, order=order, gpus_per_node=self.prism.gpus_per_node, **sizes)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one rank in one iteration."""
        return int(self.global_batch_size // (self.micro_batch_size * self.world.dp))

    @property
    def ffn_size(self) -> int:
        return int(self.ffn_hidden_size or 4 * self.hidden_size)

    @property
    def head_size(self) -> int:
        return int(self.kv_channels or self.hidden_size // self.num_attention_heads)

    @property
    def groups(self) -> int:
        return int(self.num_query_groups or self.num_attention_heads)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding (training/tokenizer/tokenizer.py _vocab_size_with_padding)."""
        multiple = self.make_vocab_size_divisible_by * self.world.tp
        return int(-(-self.vocab_size // multiple) * multiple)

    def derived(self) -> dict[str, str]:
        """What follows from the recipe, each with its arithmetic, for people."""
        world, tokens = self.world, self.global_batch_size * self.seq_length
        split = f"(tp {world.tp} x cp {world.cp} x pp {world.pp})"
        rows = {"dp": f"{world.dp} = {world.size} / {split}"}
        if self.num_experts:
            rows["expert dp"] = (
                f"{world.edp} = {world.size} / (etp {world.etp} x ep {world.ep} x pp {world.pp})"
            )
        rows["microbatches"] = (
            f"{self.num_microbatches} = {self.global_batch_size} / "
            f"(micro batch {self.micro_batch_size} x dp {world.dp})"
        )
        rows["vocabulary"] = f"{self.padded_vocab_size:,} (padded from {self.vocab_size:,})"
        rows["tokens per iteration"] = f"{tokens:,} = {self.global_batch_size} x {self.seq_length}"
        return rows

    def settings(self, text: Callable[[Any], str]) -> dict[str, str]:
        """Every flag that is not the default, but which ranks to run and where to, as ``text``."""
        known = known_flags()
        found = {k: text(v) for k, v in self.flags.items() if v != known[k].default}
        for section in _SECTIONS:
            for one in dataclasses.fields(part := getattr(self, section)):
                value = getattr(part, one.name)
                if value != one.default and one.name not in _OF_A_RUN:
                    found[f"{section}.{one.name}"] = text(value)
        return found

    def words(self) -> list[str]:
        """The command line of the recipe's script: the name and ``flag=value`` words, those that
        decide which ranks there are as Megatron's options.
        """
        given = self.settings(json.dumps)
        mapping = given.pop("use_tp_pp_dp_mapping", None)
        words = [f"{option_of(k) if k in _SIZES else k}={text}" for k, text in given.items()]
        return [self.name, *words, *(["--use-tp-pp-dp-mapping"] if mapping else [])]

    @staticmethod
    def of_words(words: Sequence[str]) -> Recipe:
        """The recipe whose ``words`` they are."""
        given = (_override(word if "=" in word else f"{word}=true") for word in words[1:])
        return Recipe(dict.fromkeys(_REQUIRED, 1), name=words[0]).changed(dict(given))

    def megatron_words(self) -> list[str]:
        """Megatron's command line of this job."""
        values = {name: flag.default for name, flag in _TRAINING.items() if name in _COUNTS}
        values |= {"lr": self.lr, "max_position_embeddings": self.seq_length, **self.flags}
        if values.pop("pipeline_model_parallel_layout", None) is not None:
            values.pop("num_virtual_stages_per_pipeline_rank", None)  # it says so itself
            values["pipeline_model_parallel_layout"] = self.pipeline_model_parallel_layout
        values["group_query_attention"] = self.num_query_groups is not None
        values["is_hybrid_model"] = self.hybrid_override_pattern is not None
        if self.data_path is None:
            values |= {"mock_data": True, "tokenizer_type": "NullTokenizer"}
        found: list[str] = []
        for name, value in values.items():
            if name in _NEGATED:
                found += [] if value else [_NEGATED[name]]
            elif isinstance(value, list) and not name.endswith("_freq"):
                found += [option_of(name), *map(str, value)]
            elif value is not None and value is not False:
                found += [option_of(name)] if value is True else [option_of(name), str(value)]
        return found


_NEGATED = {  # flag that is on by default -> the option that turns it off
    "add_bias_linear": "--disable-bias-linear",
    "apply_rope_fusion": "--no-rope-fusion",
    **{name: f"--no-{name.replace('_', '-')}" for name in (
        "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm",
        "gradient_accumulation_fusion")},
}  # fmt: skip


def option_of(flag: str) -> str:
    """``--seq-length`` of ``seq_length``, as on a command line; of ``prism.tier`` ours."""
    return "--fp8-format" if flag == "fp8" else f"--{re.sub('[_.]', '-', flag)}"


# -- checks ---------------------------------------------------------------------------------------
def check(recipe: Recipe) -> None:
    """RecipeError or WorldError for the first rule that the recipe breaks."""
    for name in _REQUIRED:
        if name not in recipe.flags:
            raise RecipeError(f"{name} is missing", fix=f"add {name}=VALUE")
    for name, value in recipe.flags.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        most = 1e38 if isinstance(value, float) else _MOST.get(name, (1 << 31) - 1)
        least = int(name in _COUNTS)
        if not math.isfinite(value) or not least <= value <= most:
            raise RecipeError(f"{name} is {value}", fix=f"use a number from {least} to {most}")
    if (values := recipe.prism.values) not in ("mirror", "noise"):  # recordings are of scripts
        raise RecipeError(f"prism.values={values} is of a script", fix="use mirror or noise")
    if not _NETWORK.fullmatch(network := recipe.hardware.network):
        raise RecipeError(f"hardware.network: {network!r} is no network",
                          fix="use rails, or fat-tree:2")  # fmt: skip
    try:
        world = recipe.world
    except WorldError as error:
        fix = re.sub(r"\bsize=", "world_size=", error.fix or "")
        raise WorldError(error.message, fix=fix) from None
    _check_batches(recipe, world)


def _check_batches(recipe: Recipe, world: World) -> None:
    micro, batch, dp, pp = recipe.micro_batch_size, recipe.global_batch_size, world.dp, world.pp
    one, count = micro * dp, batch // (micro * dp)
    said, use = f"micro_batch_size {micro} x dp {dp}", "use global_batch_size="
    if batch % one:
        fix = f"{use}{max(one, round(batch / one) * one)}"
        raise RecipeError(f"global_batch_size {batch} is not divisible by {said} = {one}", fix=fix)
    if count > MOST_MICROBATCHES:
        fix = f"{use}{MOST_MICROBATCHES * one} or less"
        raise RecipeError(f"{count:,} microbatches an iteration", fix=fix)
    if world.vpp is not None and count % pp:  # core/pipeline_parallel/schedules.py:1007
        rounds = f"the interleaved schedule takes microbatches in rounds of pp {pp}"
        fix = f"{use}{max(1, round(count / pp)) * pp * one}, or vpp=null"
        raise RecipeError(f"{rounds}, but there are {count} = {batch} / ({said})", fix=fix)


# -- reading --------------------------------------------------------------------------------------
def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply ``flag=value`` overrides, check everything.

    ``path`` is a file, or the name of a shipped recipe with or without ``.yaml``.  A relative
    ``data_path`` is looked up beside the recipe, then here.  Raises RecipeError or WorldError.
    """
    file = find(path)
    given = {**_read(file), **dict(map(_override, overrides))}
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise RecipeError(f"{file}: {missing[0]} is missing", fix=f"add {missing[0]}=VALUE")
    blank = Recipe(dict.fromkeys(_REQUIRED, 1), name=file.stem)
    recipe = blank.changed(given)
    if recipe.data_path is not None:
        return recipe.changed(data_path=_data_file(recipe.data_path, file))
    return recipe


def load_prism_section(path: str | Path) -> dict[str, object]:
    """What a file says for the --prism-* flags: the keys of its ``prism:``.  Raises RecipeError."""
    given = _read(find(path))
    return {
        key.removeprefix("prism."): _read_as(kind_of(key), value, key)
        for key, value in given.items()
        if key.startswith("prism.")
    }


def given(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """``recipe`` itself, or the one of that name or file."""
    return recipe if isinstance(recipe, Recipe) else load(os.fspath(recipe))


def shipped() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package, installed or in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if files := sorted(folder.glob("*.yaml")):
            return {file.stem: file for file in files}
    return {}


def summary(path: str | Path) -> str:
    """The first comment line of a recipe: what it shows."""
    first = Path(path).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find(path: str | Path) -> Path:
    """The file meant: itself, or a shipped recipe by name.  RecipeError naming the closest ones."""
    file = Path(path)
    with contextlib.suppress(ValueError, OSError):  # a name too long, a null byte in it
        if file.is_file():
            return file
    known = shipped()
    if (name := file.name.removesuffix(".yaml")) in known and file.parent.name in ("", "recipes"):
        return known[name]
    otherwise = "see the shipped ones: prism recipes"
    fix = did_you_mean(name, known, otherwise, most=2, cutoff=0.4)
    raise RecipeError(f"there is no recipe {path}", fix=fix)


def full_name(name: str) -> str:
    """``tensor_model_parallel_size`` of ``tp``, ``--tensor-model-parallel-size`` and its own name.

    RecipeError for what is no flag of a recipe, naming the closest one.
    """
    key = name.lstrip("-").replace("-", "_")
    key = OTHER_NAMES.get(key, key)
    if kind_of(key) is not None:
        return key
    every = [*known_flags(), *SHORT, *(f"{s}.{one}" for s in _SECTIONS for one in _hints(s))]
    fix = "for more than a plain GPT, run the job's own script: prism run -- pretrain_gpt.py …"
    fix = fix if _BEYOND.search(key) else did_you_mean(key, every, fix, most=2)
    raise RecipeError(f"a recipe has no flag {name}", fix=fix)


def kind_of(key: str) -> object:
    """The type of a flag's values, of ``prism.tier`` as well; None: there is no such flag."""
    section, dot, leaf = key.partition(".")
    if dot:
        return _hints(section).get(leaf) if section in _SECTIONS else None
    return known_flags()[key].kind if key in known_flags() else None


@lru_cache(maxsize=2)
def _hints(section: str) -> dict[str, Any]:
    return get_type_hints(_SECTIONS[section])


def _read_as(kind: object, value: object, key: str) -> object:
    """``value``, which may be text, as a ``kind``.  RecipeError."""
    if str(value).lower() in ("null", "none") and type(None) in get_args(kind):
        return None
    try:
        return foreign.shaped(value, cast(type, kind), strict=False)
    except ValueError as error:
        with contextlib.suppress(ValueError):  # --recompute-modules mlp core_attn
            if isinstance(value, str):
                words = value.replace(",", " ").split()
                return foreign.shaped(words, cast(type, kind), strict=False)
        fix = f"use {' or '.join(foreign.choices(kind)) or 'a value of that type'}"
        raise RecipeError(f"{key}={value}: {error}", fix=fix) from None


def _read(file: Path) -> dict[str, object]:
    """What a file gives, with names like ``seq_length`` and ``prism.tier``."""
    fix = "give the path of a YAML file of Megatron's flags: num_layers: 80"
    with foreign.reading(file, "a recipe", fix, error=RecipeError):
        given = _mapping(foreign.read_yaml(file))
    found = dict[str, object]()
    for key, value in given.items():
        if isinstance(value, dict) and key in _SECTIONS:
            found |= {f"{key}.{leaf}": one for leaf, one in value.items()}
        else:
            found[key] = value
    return {full_name(name): value for name, value in found.items() if name != "dp"}


def _mapping(text: str) -> dict[str, object]:
    """A YAML mapping whose scalars are text: what they mean is their flag's to say."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        made = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it has no flags")
    names = [key.value for key, _ in root.value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is there twice")
    return dict(made)


def _override(word: str) -> tuple[str, object]:
    name, equals, text = word.partition("=")
    if not equals or not name.strip():
        fix = f"write {name.strip() or 'seq_length'}=VALUE"
        raise RecipeError(f"{word!r}: an override is flag=value", fix=fix)
    try:
        made = yaml.load(text, Loader=yaml.BaseLoader) if text[:1] in {*"[{\"'"} else text
    except yaml.YAMLError as error:
        fix = "quote the value for YAML and for the shell"
        raise RecipeError(f"{word!r} is no YAML: {error}", fix=fix) from None
    return name.strip(), made


def _data_file(data: str, file: Path) -> str:
    for place in (file.parent / data, Path(data)):
        with contextlib.suppress(ValueError, OSError):  # a name too long, a null byte in it
            if place.is_file():
                return str(place.resolve())
    raise RecipeError(
        f"data_path: there is no file {data}, neither beside {file.name} nor here",
        fix="give the path of a text file, or data_path=null",
    )
