"""Put stand-ins in place of a job's files that are not on this machine.

In : Megatron's parsed arguments, before it has validated them.  Data become mock data, a tokenizer
a NullTokenizer of the same vocabulary, a checkpoint none.  Sizes and times of an iteration stay:
they follow from the vocabulary.  Where only a name tells that, the answer says what a tenth more
would change; where nobody knows, it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs.megatron_flags import DATA_FILES
from megatron_prism.core.jobs.megatron_source import megatron_release
from megatron_prism.core.units import format_bytes
from megatron_prism.emulate.preflight.obstacles import Obstacles
from megatron_prism.runtime.listeners import TrainingListener

if TYPE_CHECKING:
    import torch

_TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file", "tokenizer_metadata")
_CHECKPOINTS = ("load", "pretrained_checkpoint")
_WRITTEN = ("save", "tensorboard_dir", "data_cache_path", "wandb_save_dir", "log_dir")
NO_FILE = "no-file"  # stands where the name of a file is empty
_HUB = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")  # name or folder
_GUESSED = "that of "  # how a source begins that is a name alone
_PLACEHOLDER = 32000  # tokens, where the number is an obstacle
_OF_TYPE = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 131072}
_OF_MODEL = (  # pattern of a tokenizer's name -> entries of its config.json, unchecked
    (r"llama-?3|llama-4-tokenizer", 128256),
    (r"llama-?4", 202048),
    (r"phi-.*moe", 32064),
    (r"llama|vicuna|alpaca|mixtral|mistral-7b-v0\.[12]|mistral-7b-instruct-v0\.[12]|phi-?3", 32000),
    (r"mistral-nemo|mistral-small|nemotron-?[3h]|nemotron-nano", 131072),
    (r"mistral", 32768),
    (r"qwen-?1\.5|qwen-?2|qwen-?3|qwq|qwen", 151936),
    (r"deepseek-?(v3|r1)", 129280),
    (r"deepseek", 102400),
    (r"gpt-?oss|o200k", 201088),
    (r"gpt-?2|pythia|gpt-?neox", 50257),
    (r"gemma-?3", 262208),
    (r"gemma", 256000),
    (r"kimi|moonlight", 163840),
    (r"glm-?4", 151552),
    (r"falcon", 65024),
    (r"bloom", 250880),
    (r"nemotron-?4", 256000),
    (r"phi-?4", 100352),
)


def _option(name: str) -> str:
    """Return the option of an argument."""
    return f"--{name.replace('_', '-')}"


# options that name files: such as are replaced where they are not here, and such as are written
READ_OPTIONS = frozenset(map(_option, (*DATA_FILES, *_TOKENIZER, *_CHECKPOINTS)))
WRITTEN_OPTIONS = frozenset(map(_option, _WRITTEN))
# places of these change neither the memory nor the time of an iteration
PLACE_OPTIONS = frozenset(map(_option, (*DATA_FILES, *_CHECKPOINTS, *_WRITTEN)))


@dataclass(frozen=True)
class StandIns:
    """What stands in for files that are not here.

    Attributes:
        text: one line that says so; empty if all files are here.
        vocabulary: "32,000 tokens, that of …", where the number is a guess; else empty.
        without_checkpoint: whether the real job reads parameters and optimizer states first.
    """

    text: str
    vocabulary: str = ""
    without_checkpoint: bool = False


def put(
    args: argparse.Namespace,
    obstacles: Obstacles | None = None,
    *,
    loads_own_layout: bool = False,
) -> StandIns:
    """Change ``args`` to do without the files that are not here, and without writing any.

    Args:
        args: of Megatron, before it has validated them.
        obstacles: gets what stops the job; without it the first of that is raised.
        loads_own_layout: whether a checkpoint of the job's own layout is loaded for one that is not
            here.

    Raises:
        UsageError: ``--prism-strict`` and something is missing, all of which it names; a missing
            checkpoint has sizes of the job; or nobody says how large the vocabulary is.
    """
    # all that is missing in one list, also where only the first is raised
    collected = Obstacles()
    stand_ins = _put(args, collected, loads_own_layout)
    if obstacles is None:
        collected.raise_all()
    else:
        for obstacle in collected:
            obstacles.add(obstacle.message, obstacle.fix)
    return stand_ins


def _put(args: argparse.Namespace, obstacles: Obstacles, loads_own_layout: bool) -> StandIns:
    """Change ``args`` as ``put`` does; ``obstacles`` gets what stops the job."""
    # the default of pretrain_gpt.py, which it sets later
    if not args.tokenizer_type and getattr(args, "merge_file", None):
        args.tokenizer_type = "GPT2BPETokenizer"
    missing = list(_missing(args))
    if missing and getattr(args, "prism_strict", False):
        names = ", ".join(f"{_option(name)} {value}" for name, value in missing)
        obstacles.add(f"not on this machine: {names}", "leave --prism-strict out")
        return StandIns("")
    for name, file in missing:
        if name in _CHECKPOINTS:
            _note_needs_of_checkpoint(args, file, obstacles)
    missing_names = {name for name, _ in missing}
    replaced = list[str]()

    # data
    if missing_names & set(DATA_FILES) or args.mock_data:
        args.mock_data = True
        _drop(args, DATA_FILES)
    missing_data = [_option(name) for name, _ in missing if name in DATA_FILES]
    if missing_data:
        replaced.append(f"mock data for {', '.join(missing_data)}")

    guessed_vocabulary = ""
    if {"tokenizer_type", *_TOKENIZER} & missing_names:
        guessed_vocabulary = _replace_tokenizer(args, obstacles, replaced)
    if args.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer"):
        _drop(args, _TOKENIZER)

    # Megatron divides by the interval (training.py:3307 @0.16.1)
    if getattr(args, "eval_interval", 0) is None:
        args.eval_interval = 1000
        replaced.append("--eval-interval 1000, the default until 0.15")

    checkpoints = [name for name, _ in missing if name in _CHECKPOINTS]
    without_checkpoint = _replace_checkpoints(args, checkpoints, loads_own_layout, replaced)
    if not replaced:
        return StandIns("")

    text = f"stand-ins: {', '.join(replaced)}; "
    if guessed_vocabulary:
        text += "memory and time are those of that many tokens"
    else:
        text += "memory and time of an iteration are the same"
    if without_checkpoint:
        text += "; reading the checkpoint takes more, before the first iteration"
    return StandIns(text, guessed_vocabulary, without_checkpoint)


def _replace_tokenizer(args: argparse.Namespace, obstacles: Obstacles, replaced: list[str]) -> str:
    """Set a NullTokenizer: only the number of tokens matters.

    Returns:
        The number and its source where it is a guess, else empty.
    """
    entries, source = _PLACEHOLDER, "a placeholder"
    # without a known number of tokens the placeholder stays
    with obstacles.noting():
        entries, source = _vocabulary(args)
    # the NullTokenizer of 0.16 adds an entry, the end of a text
    adds_entry = megatron_release().startswith("0.16") and source != "--vocab-size"
    args.vocab_size = entries - 1 if adds_entry else entries
    args.tokenizer_type = "NullTokenizer"
    replaced.append(f"a NullTokenizer of {entries:,} tokens ({source})")
    if source.startswith(_GUESSED):
        return f"{entries:,} tokens, {source}"
    return ""


def _replace_checkpoints(
    args: argparse.Namespace,
    checkpoints: list[str],
    loads_own_layout: bool,
    replaced: list[str],
) -> bool:
    """Settle that no checkpoint is read, and none is written, in the background neither.

    Returns:
        Whether the real job reads optimizer states that are missing here.
    """
    # its reading is planned from a layout like the job's own
    if loads_own_layout and "load" in checkpoints and args.ckpt_format == "torch_dist":
        checkpoints.remove("load")
        replaced.append("a checkpoint of the job's own layout for --load")
    without_checkpoint = bool(checkpoints) and not _leaves_optimizer(args, checkpoints)
    _drop(args, checkpoints)
    replaced += [f"new parameters for {_option(name)}" for name in checkpoints]
    args.exit_on_missing_checkpoint = False
    # its writer would be a process of its own, with nothing to write
    if getattr(args, "async_save", None):
        args.prism_async_save = True
        args.async_save = args.use_persistent_ckpt_worker = False
        replaced.append("no writer for --async-save")
    return without_checkpoint


def _leaves_optimizer(args: argparse.Namespace, checkpoints: Sequence[str]) -> bool:
    """Whether the real job reads no optimizer states from ``checkpoints``."""
    flags = ("finetune", "no_load_optim")
    only_pretrained = "load" not in checkpoints  # it is read as --finetune reads
    return only_pretrained or any(getattr(args, flag, False) for flag in flags)


class Remarks(TrainingListener):
    """Say at the first train step what the stand-ins of a job may change on this rank."""

    def __init__(
        self,
        stand_ins: StandIns,
        args: Callable[[], argparse.Namespace],
        say: Callable[[str], None],
    ) -> None:
        self._stand_ins, self._args, self._say = stand_ins, args, say

    def iteration_started(self, number: int, wanted: int, model: object, optimizer: object) -> None:
        """Model and optimizer are there: weigh them."""
        if number > 1:
            return
        args = self._args()
        # a rank without an optimizer reads no states
        if self._stand_ins.without_checkpoint and optimizer is not None:
            text = _weigh_reading(args, optimizer)
            if text:
                self._say(text)
        if self._stand_ins.vocabulary:
            text = _weigh_vocabulary(args, model)
            if text:
                self._say(f"a guess: {self._stand_ins.vocabulary}; {text}")


def _weigh_reading(args: argparse.Namespace, optimizer: object) -> str:
    """Say how much more memory the reading of optimizer states takes; "" if nobody knows.

    Megatron allocates empty states to read into, and the optimizer allocates its own beside them
    (distrib_optimizer.py:773 @0.16.1, NVIDIA/Megatron-LM#7288).
    """
    numbers = 0
    for group in getattr(optimizer, "param_groups", None) or ():
        numbers += sum(parameter.numel() for parameter in group["params"])
    bytes_each = 0
    precise = getattr(args, "use_precision_aware_optimizer", False)
    names = ["exp_avg_dtype", "exp_avg_sq_dtype"]
    if precise:  # the optimizer holds the main parameters, too
        names.append("main_params_dtype")
    for name in names:
        dtype = getattr(args, name, None)
        bytes_each += getattr(dtype, "itemsize", 4)
    if not numbers or "adam" not in str(getattr(args, "optimizer", "adam")):
        return ""
    size = format_bytes(numbers * bytes_each)
    return (
        f"--load: while the checkpoint is read, the optimizer's states may exist twice: {size} "
        "beside parameters, gradients and states, before the first iteration; it is in no peak"
    )


def _weigh_vocabulary(args: argparse.Namespace, model: object) -> str:
    """What a tenth more tokens would take on this rank; empty if it has no part of them."""
    several = model if isinstance(model, list | tuple) else [model]
    chunks = cast("Sequence[torch.nn.Module]", several)
    parameters_bytes = logits_bytes = 0.0
    replicas = getattr(args, "data_parallel_size", 1)
    replicas *= getattr(args, "context_parallel_size", 1)
    # states are shared out among replicas, or each has them whole
    shards = replicas if getattr(args, "use_distributed_optimizer", False) else 1
    rows = args.padded_vocab_size // args.tensor_model_parallel_size
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            # a layer of that name without the rows of this rank is another
            if not is_vocabulary or parameter.shape[0] != rows:
                continue
            gradient = getattr(parameter, "main_grad", parameter)
            # main parameters and two moments of fp32; of fp32 parameters the moments alone
            states = 8 if parameter.element_size() == 4 else 12
            each = parameter.element_size() + gradient.element_size() + states / shards
            parameters_bytes += parameter.numel() * each
        # the stage of the loss has logits
        if getattr(_unwrapped(chunk), "post_process", False):
            tokens = args.micro_batch_size * args.seq_length
            tokens /= getattr(args, "context_parallel_size", 1)
            logits_bytes += tokens * rows * (2 + 4)  # in bf16, and as the loss reads them
    if not parameters_bytes + logits_bytes:
        return ""
    text = "a tenth more takes "
    text += f"{format_bytes(round(parameters_bytes / 10))} more of parameters, gradients and states"
    if logits_bytes:
        text += f", {format_bytes(round(logits_bytes / 10))} of a microbatch's logits"
    share = _computing_of_vocabulary(args)
    if share is not None:
        text += f", and {share / 10:.1%} more computing"
    return f"{text}; --vocab-size N says what it is"


def _unwrapped(chunk: object) -> object:
    """The model in its wrappers (DDP, Float16Module)."""
    while not hasattr(chunk, "post_process"):
        inner = getattr(chunk, "module", None)
        if inner is None:
            break
        chunk = inner
    return chunk


def _computing_of_vocabulary(args: argparse.Namespace) -> float | None:
    """The part of the model's floating-point operations that grows with the vocabulary."""
    training = sys.modules.get("megatron.training.training")
    if training is None:
        return None
    # Megatron's own count, of twice the vocabulary
    more = copy.copy(args)
    more.padded_vocab_size = 2 * args.padded_vocab_size
    count = training.num_floating_point_operations
    operations = count(args, args.global_batch_size)
    return float(count(more, args.global_batch_size) / operations - 1)


def _drop(args: argparse.Namespace, names: Iterable[str]) -> None:
    vars(args).update(dict.fromkeys(vars(args).keys() & set(names)))


def _missing(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(argument, its value) of every file that is not here."""
    if not args.mock_data:
        for name in DATA_FILES:
            missing_file = _missing_data(getattr(args, name, None))
            if missing_file:
                yield name, missing_file
    kind = args.tokenizer_type or ""
    if kind in _HUB:
        model = args.tokenizer_model or ""
        if not _in_cache(model) or importlib.util.find_spec("transformers") is None:
            yield ("tokenizer_model", model) if model else ("tokenizer_type", kind)
    elif kind and not kind.startswith("Null"):
        yield from _missing_tokenizer_files(args, kind)
    for name in _CHECKPOINTS:
        value = getattr(args, name, None)
        if value and not _is_here(value):
            yield name, value


def _missing_tokenizer_files(args: argparse.Namespace, kind: str) -> Iterator[tuple[str, str]]:
    """(argument, its value) of files of a tokenizer of ``kind`` that are not here."""
    has_files = False
    for name in _TOKENIZER:
        file = str(getattr(args, name, None) or "")
        if file:
            has_files = True
            if not _is_here(file):
                yield name, file
    if not has_files:
        yield "tokenizer_type", kind


def _missing_data(value: str | Sequence[str] | None) -> str:
    """Return the first file of a data option that is not here; empty if all are, or none is named.

    Args:
        value: of the option: files, perhaps with weights before them.
    """
    if value is None or value == "":
        return ""
    words = [value] if isinstance(value, str) else value
    if not any(words):  # --data-path $(find …) that finds nothing, perhaps in quotes
        return "without a value"
    for word in words:
        is_weight = word.replace(".", "", 1).isdigit()
        if not is_weight and not _is_here(word):
            return word
    return ""


def _note_needs_of_checkpoint(
    args: argparse.Namespace, checkpoint: str, obstacles: Obstacles
) -> None:
    """Note what a job cannot do without its checkpoint."""
    what = f"{checkpoint} is not on this machine"
    if getattr(args, "use_checkpoint_args", False):
        obstacles.add(
            f"--use-checkpoint-args reads the sizes of the model, and {what}",
            "--num-layers, --hidden-size and their like in its place",
        )
        args.use_checkpoint_args = False  # Megatron would read it
    if getattr(args, "prism_iteration", None):
        obstacles.add(f"--prism-iteration goes on from a checkpoint, and {what}", "--load CKPT")


def _is_here(word: str) -> bool:
    return "://" in word or os.path.exists(word) or os.path.exists(f"{word}.idx")


def _in_cache(name: str) -> bool:
    """Whether a tokenizer of the hub lies on this machine."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = home / "hub" / f"models--{name.replace('/', '--')}"
    return os.path.exists(name) or os.path.exists(cached)


def _vocabulary(args: argparse.Namespace) -> tuple[int, str]:
    """(entries of the job's vocabulary, who says so)."""
    for name in _TOKENIZER[:2]:
        place = Path(getattr(args, name, None) or "")
        file = (place if place.is_dir() else place.parent) / "config.json"
        if place.name and file.is_file() and (found := _in_config(file)):
            return found, str(file)
    if args.vocab_size:
        return args.vocab_size, "--vocab-size"
    names = [str(getattr(args, name, None) or "") for name in _TOKENIZER]
    named = " ".join(name for name in names if name != NO_FILE).strip()
    for pattern, entries in _OF_MODEL:
        if model := re.search(pattern, named, re.IGNORECASE):
            return entries, f"{_GUESSED}{model[0]}"
    if args.tokenizer_type in _OF_TYPE:
        return _OF_TYPE[args.tokenizer_type], f"{_GUESSED}{args.tokenizer_type}"
    problem = f"the tokenizer {named or args.tokenizer_type} is not on this machine"
    if not named and NO_FILE in names:  # of a variable that is empty
        problem = f"the {args.tokenizer_type} has no name and no file"
    raise UsageError(
        f"{problem}, and nothing says how many tokens it has",
        fix="--prism-job-flags '--vocab-size N'",
    )


def _in_config(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = json.loads(file.read_text()).get("vocab_size")
        return size if isinstance(size, int) else None
    return None
