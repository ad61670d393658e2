"""Flags of a job that its Megatron does not know: of older releases, of forks, or misspelt.

``removed_flags.json``: flag -> (last release that had it, what replaced it), from the tags of
Megatron-LM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from unittest import mock

from megatron_prism.core.errors import UsageError, did_you_mean
from megatron_prism.emulate.preflight import stand_ins
from megatron_prism.emulate.preflight.obstacles import Obstacle, ObstaclesError

if TYPE_CHECKING:
    from megatron_prism.emulate.preflight.first_look import FirstLook

IGNORE = "--prism-ignore-unknown"
ARGUMENTS_ALONE = Path(__file__).with_name("arguments_alone.py")  # stands for a script
_MOST_REFUSALS = 40  # of one command line
_UNKNOWN = "unrecognized arguments: "  # argparse.py, parse_args


class UnknownFlagsError(ObstaclesError):
    """Words of a command line that Megatron's parser does not know, each with its fix."""


class BadOptionError(UsageError):
    """An option whose value Megatron's parser refuses, or that has none."""

    def __init__(self, message: str, fix: str, option: str, lacks_value: bool) -> None:
        super().__init__(message, fix)
        self.args = (message, fix, option, lacks_value)
        self.option, self.lacks_value = option, lacks_value


def parse(
    original: Callable[..., argparse.Namespace], provider: object, *rest: object, **kwargs: object
) -> argparse.Namespace:
    """Return the arguments that Megatron's ``parse_args`` returns.

    Args:
        original: Megatron's function.
        provider: of the script's own arguments.
        *rest: further arguments of the function.
        **kwargs: further arguments of the function.

    Raises:
        UsageError: one or two lines in place of argparse's usage text.
    """
    if IGNORE in sys.argv:
        rest, kwargs = (), {"ignore_unknown_args": True}
    with mock.patch.object(argparse.ArgumentParser, "error", _raise_error):
        return original(provider, *rest, **kwargs)


def parse_all(
    original: Callable[..., argparse.Namespace],
    provider: object,
    *rest: object,
    look: FirstLook,
    **kwargs: object,
) -> argparse.Namespace:
    """Return the arguments as ``parse`` does; what is refused is noted and left out.

    Args:
        original: Megatron's function.
        provider: of the script's own arguments.
        *rest: further arguments of the function.
        look: gets the obstacles, and names of files that have no value.
        **kwargs: further arguments of the function.

    Raises:
        UsageError: something is refused that cannot be left out.
    """
    for _ in range(_MOST_REFUSALS):
        try:
            return parse(original, provider, *rest, **kwargs)
        except UnknownFlagsError as error:
            look.obstacles.note(error)
            rest, kwargs = (), {"ignore_unknown_args": True}
        except BadOptionError as error:
            script, *words = sys.argv
            if error.lacks_value and error.option in stand_ins.WRITTEN_OPTIONS:
                # nothing is written here anyway
                words = without_option(error.option, words)
                look.options_without_value.append(error.option)
            elif error.lacks_value and error.option in stand_ins.READ_OPTIONS:
                # a variable of the script is empty: a file that is not here
                words = _with_value(error.option, stand_ins.NO_FILE, words)
                look.options_without_value.append(error.option)
            else:
                look.obstacles.note(error)
                words = without_option(error.option, words)
            sys.argv[:] = [script, *words]
        except UsageError as error:
            look.obstacles.note(error)
            break
    look.finish()
    raise UsageError("the job's command line cannot be read", fix="correct it")


def _raise_error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise UsageError with argparse's message, in place of ``ArgumentParser.error``."""
    if message.startswith(_UNKNOWN):
        words = message.removeprefix(_UNKNOWN).split()
        raise unknown(words, parser._option_string_actions)
    text = f"{Path(sys.argv[0]).name}: {message}"
    if sys.argv[0] == str(ARGUMENTS_ALONE):
        text = message
    named = re.match(r"argument (--[\w-]+)(?:/[\w-]+)*: (expected .*argument)?", message)
    if named is None:
        raise UsageError(text, fix="correct the job's command line")
    option, lacks_value = named[1], named[2] is not None
    fix = f"--prism-job-flags '{option} VALUE'"
    if lacks_value:
        fix += "; is a variable empty, or an argument of the script missing?"
    raise BadOptionError(text, fix, option, lacks_value)


def without_option(
    option: str, words: Sequence[str], is_no_value: Callable[[str], bool] | None = None
) -> list[str]:
    """Leave an option of a command line out, with its values: all words up to the next option.

    Args:
        option: to leave out.
        words: of the command line.
        is_no_value: tells of a word behind the first value that it belongs to no option.
    """
    kept_words = []
    drops = False
    previous_word = ""
    for word in words:
        is_behind_value = not previous_word.startswith("--")
        if word.startswith("--"):
            drops = word.partition("=")[0] == option
        elif is_no_value is not None and is_behind_value and is_no_value(word):
            drops = False
        previous_word = word
        if not drops:
            kept_words.append(word)
    return kept_words


def _with_value(option: str, value: str, words: Sequence[str]) -> list[str]:
    """Give an option of a command line a value where it has none."""
    changed = []
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        changed.append(word)
        if word == option and following.startswith("--"):
            changed.append(value)
    return changed


def unknown(words: Sequence[str], known: Collection[str]) -> UnknownFlagsError:
    """The error of a command line with ``words`` left over.

    Args:
        words: that the parser could not use, values among them.
        known: its options.
    """
    table = json.loads(Path(__file__).with_name("removed_flags.json").read_text())
    obstacles: list[Obstacle] = []
    ignore = f"{IGNORE} runs the job without it; options of prism itself stand before the job's "
    ignore += "line"
    for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        dashed = flag.replace("_", "-")
        near = did_you_mean(flag, known, "", cutoff=0.85)
        if dashed in known:
            obstacles.append(Obstacle(f"{flag} has dashes", f"{dashed} in its place"))
        elif dashed in table:
            release, replaced = table[dashed]
            text = f"{flag} was in Megatron until {release}"
            if replaced:
                text += f", replaced by {replaced}"
            obstacles.append(Obstacle(text, ignore))
        # an option that a part of this Megatron has, which the script adds where it can
        elif _of_post_training(dashed):
            obstacles.append(
                Obstacle(
                    f"{flag} is an option of megatron.post_training, which the script adds where "
                    "nvidia-modelopt is installed",
                    f"pip install nvidia-modelopt, or {ignore}",
                )
            )
        else:
            text = f"{flag} is in no release of Megatron"
            if near:
                text += f", {near}"
            obstacles.append(Obstacle(text, ignore))
    # values without a flag
    if not obstacles:
        obstacles.append(_stray_words(words))
    return UnknownFlagsError(tuple(obstacles))


def _of_post_training(flag: str) -> bool:
    """Tell whether Megatron's part for quantized and distilled models has an option."""
    megatron = sys.modules.get("megatron")
    # megatron/post_training/arguments.py:146 @0.19.0
    for folder in getattr(megatron, "__path__", ()):
        file = Path(folder, "post_training", "arguments.py")
        if file.is_file() and re.search(rf"[\"']{re.escape(flag)}[\"']", file.read_text()):
            return True
    return False


def _stray_words(words: Sequence[str]) -> Obstacle:
    """Return the obstacle of words behind an option that takes fewer, as of a value in parts."""
    message = f"words that belong to no option: {' '.join(words)}"
    place = sys.argv.index(words[0]) if words and words[0] in sys.argv else 0
    options = [word for word in sys.argv[:place] if word.startswith("--")]
    if not options:
        return Obstacle(message, "correct the job's command line")
    return Obstacle(f"{message}, behind {options[-1]}", f"quotes around the value of {options[-1]}")
