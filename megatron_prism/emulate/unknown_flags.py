"""Flags of a job that its Megatron does not know: of older releases, of forks, or misspelt.

``removed_flags.json``: flag -> (last release that had it, what replaced it), from the tags of
Megatron-LM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn
from unittest import mock

from megatron_prism.core.errors import UsageError, did_you_mean

IGNORE = "--prism-ignore-unknown"
_UNKNOWN = "unrecognized arguments: "  # argparse.py, parse_args


def parse(
    original: Callable[..., argparse.Namespace], provider: object, *rest: object, **kwargs: object
) -> argparse.Namespace:
    """The arguments that Megatron's ``parse_args`` returns.

    Raises:
        UsageError: one or two lines in place of argparse's usage text.
    """
    if IGNORE in sys.argv:
        rest, kwargs = (), {"ignore_unknown_args": True}

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            words = message.removeprefix(_UNKNOWN).split()
            raise unknown(words, parser._option_string_actions)
        raise UsageError(
            f"{Path(sys.argv[0]).name}: {message}", fix="correct the job's command line"
        )

    with mock.patch.object(argparse.ArgumentParser, "error", error):
        return original(provider, *rest, **kwargs)


def unknown(words: Sequence[str], known: Collection[str]) -> UsageError:
    """The error of a command line with ``words`` left over.

    Args:
        words: that the parser could not use, values among them.
        known: its options.
    """
    table = json.loads(Path(__file__).with_name("removed_flags.json").read_text())
    texts, spelt = list[str](), list[str]()
    for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        dashed = flag.replace("_", "-")
        if dashed in known:
            texts.append(f"{flag} has dashes")
            spelt.append(dashed)
        elif dashed in table:
            release, replaced = table[dashed]
            by = f", replaced by {replaced}" if replaced else ""
            texts.append(f"{flag} was in Megatron until {release}{by}")
        else:
            near = did_you_mean(flag, known, "", cutoff=0.85)
            texts.append(f"{flag} is in no release of Megatron{f', {near}' if near else ''}")
    if not texts:
        return UsageError(f"words that belong to no option: {' '.join(words)}",
                          fix="correct the job's command line")  # fmt: skip
    fix = f"{IGNORE} runs the job without {'it' if len(texts) == 1 else 'them'}"
    fix += "; options of prism itself stand before the job's line"
    return UsageError("; ".join(texts), fix=" ".join(spelt) or fix)
