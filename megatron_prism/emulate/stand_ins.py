"""Put stand-ins in place of a job's files that are not on this machine.

In : Megatron's parsed arguments, before it has validated them.  Data become mock data, a tokenizer
a NullTokenizer of the same vocabulary, a checkpoint none.  Sizes and times stay: they follow from
the vocabulary.  Where nobody knows that, it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_prism.core.errors import UsageError, refuse
from megatron_prism.core.megatron_source import megatron_release

_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
         "per_split_data_args_path")  # fmt: skip
_TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file", "tokenizer_metadata")
_CHECKPOINTS = ("load", "pretrained_checkpoint")
_HUB = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")  # name or folder
_OF_TYPE = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 131072}
_OF_MODEL = (  # pattern of a tokenizer's name -> entries of its config.json, unchecked
    (r"llama-?3|llama-4-tokenizer", 128256), (r"llama-?4", 202048), (r"phi-.*moe", 32064),
    (r"llama|vicuna|alpaca|mixtral|mistral-7b-v0\.[12]|mistral-7b-instruct-v0\.[12]|phi-?3", 32000),
    (r"mistral-nemo|mistral-small|nemotron-?[3h]|nemotron-nano", 131072), (r"mistral", 32768),
    (r"qwen-?1\.5|qwen-?2|qwen-?3|qwq|qwen", 151936), (r"deepseek-?(v3|r1)", 129280),
    (r"deepseek", 102400), (r"gpt-?oss|o200k", 201088), (r"gpt-?2|pythia|gpt-?neox", 50257),
    (r"gemma-?3", 262208), (r"gemma", 256000), (r"kimi|moonlight", 163840), (r"glm-?4", 151552),
    (r"falcon", 65024), (r"bloom", 250880), (r"nemotron-?4", 256000), (r"phi-?4", 100352),
)  # fmt: skip


def put(args: argparse.Namespace) -> str:
    """Change ``args`` to do without what is not here; one line that says so, empty if all is.

    Raises:
        UsageError: ``--prism-strict`` and something is missing, all of which it names; or nobody
            says how large the vocabulary is.
    """
    if not args.tokenizer_type and getattr(args, "merge_file", None):
        args.tokenizer_type = "GPT2BPETokenizer"  # the default of pretrain_gpt.py, set later
    missing = list(_missing(args))
    if missing and getattr(args, "prism_strict", False):
        names = ", ".join(f"{_option(name)} {value}" for name, value in missing)
        raise UsageError(f"not on this machine: {names}", fix="leave --prism-strict out")
    gone, stand_ins = {name for name, _ in missing}, list[str]()
    if gone & set(_DATA) or args.mock_data:
        args.mock_data = True
        _drop(args, _DATA)
    if data := [_option(name) for name, _ in missing if name in _DATA]:
        stand_ins.append(f"mock data for {', '.join(data)}")
    if {"tokenizer_type", *_TOKENIZER} & gone:
        entries, source = _vocabulary(args)
        one_more = megatron_release().startswith("0.16") and source != "--vocab-size"
        args.vocab_size = entries - one_more  # its NullTokenizer has one more, the end of a text
        args.tokenizer_type = "NullTokenizer"
        stand_ins.append(f"a NullTokenizer of {entries:,} tokens ({source})")
    if args.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer"):
        _drop(args, _TOKENIZER)
    checkpoints = gone & set(_CHECKPOINTS)
    _drop(args, checkpoints)
    # Megatron divides by it (training.py:3307 @0.16.1)
    if getattr(args, "eval_interval", 0) is None:
        args.eval_interval = 1000
        stand_ins.append("--eval-interval 1000, the default until 0.15")
    stand_ins += [f"new parameters for {_option(name)}" for name in checkpoints]
    args.exit_on_missing_checkpoint = False
    if not stand_ins:
        return ""
    return f"stand-ins: {', '.join(stand_ins)}; memory and time are the same"


def _drop(args: argparse.Namespace, names: Iterable[str]) -> None:
    vars(args).update(dict.fromkeys(vars(args).keys() & set(names)))


def _missing(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(argument, its value) of every file that is not here."""
    for name in () if args.mock_data else _DATA:
        value = getattr(args, name, None) or ()
        for word in [value] if isinstance(value, str) else value:
            if not word.replace(".", "", 1).isdigit() and not _is_here(word):  # weights of a blend
                yield name, word
                break
    kind = args.tokenizer_type or ""
    if kind and not kind.startswith("Null"):
        if kind in _HUB:
            name = args.tokenizer_model or ""
            if not _in_cache(name) or importlib.util.find_spec("transformers") is None:
                yield "tokenizer_model" if name else "tokenizer_type", name or kind
        else:
            files = {name: str(getattr(args, name, None) or "") for name in _TOKENIZER}
            yield from ((name, file) for name, file in files.items() if file and not _is_here(file))
            if not any(files.values()):
                yield "tokenizer_type", kind
    for name in _CHECKPOINTS:
        value = getattr(args, name, None)
        if value and not _is_here(value):
            what = f"{value} is not on this machine"
            sizes = "--num-layers, --hidden-size and their like in its place"
            refuse(
                (getattr(args, "use_checkpoint_args", False),
                 f"--use-checkpoint-args reads the sizes of the model, and {what}", sizes),
                (getattr(args, "prism_iteration", None),
                 f"--prism-iteration goes on from a checkpoint, and {what}", "--load CKPT"),
            )  # fmt: skip
            yield name, value


def _is_here(word: str) -> bool:
    return "://" in word or Path(word).exists() or Path(f"{word}.idx").exists()


def _in_cache(name: str) -> bool:
    """Whether a tokenizer of the hub lies on this machine."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(name).exists() or (home / "hub" / f"models--{name.replace('/', '--')}").exists()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _vocabulary(args: argparse.Namespace) -> tuple[int, str]:
    """(entries of the job's vocabulary, who says so)."""
    for name in _TOKENIZER[:2]:
        place = Path(getattr(args, name, None) or "")
        file = (place if place.is_dir() else place.parent) / "config.json"
        if place.name and file.is_file() and (found := _in_config(file)):
            return found, str(file)
    if args.vocab_size:
        return args.vocab_size, "--vocab-size"
    named = " ".join(str(getattr(args, name, None) or "") for name in _TOKENIZER).strip()
    for pattern, entries in _OF_MODEL:
        if model := re.search(pattern, named, re.IGNORECASE):
            return entries, f"that of {model[0]}"
    if args.tokenizer_type in _OF_TYPE:
        return _OF_TYPE[args.tokenizer_type], f"that of {args.tokenizer_type}"
    raise UsageError(
        f"the tokenizer {named or args.tokenizer_type} is not on this machine, and nothing "
        "says how many tokens it has",
        fix="--vocab-size N among the job's flags, or --prism-job-flags '--vocab-size N' before it",
    )


def _in_config(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = json.loads(file.read_text()).get("vocab_size")
        return size if isinstance(size, int) else None
    return None
