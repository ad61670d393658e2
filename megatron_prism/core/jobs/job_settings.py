"""A job's settings as a line of text, and how those of two jobs differ.

A setting is a name as people type it (``--seq-length``, ``seq_length``) with its value as
text, "" where the name alone says it (``--bf16``).  What has its default is left out.  Which of
them were ``given`` is kept too, for these are named first where jobs differ: others follow from
them (``--encoder-seq-length``).  Order, and what was given, are no part of the job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

# environment variable of a process whose OMP_NUM_THREADS is our choice, not the job's
THREADS_UNKNOWN = "PRISM_THREADS_UNKNOWN"
KEYS = ("arguments", "settings")  # of a source: of a stock job, of a recipe
_SHOWN = 4  # differences that a message names


@dataclass(frozen=True)
class _Line:
    """A line of settings, taken apart.

    Attributes:
        chosen: settings that somebody gave.
        derived: settings that are not the default and were not given.
    """

    chosen: dict[str, str]
    derived: dict[str, str]

    @property
    def values(self) -> dict[str, str]:
        """Every setting."""
        return {**self.derived, **self.chosen}


def as_text(chosen: Mapping[str, str], derived: Mapping[str, str] | None = None) -> str:
    """Write settings as the line that is kept.

    Args:
        chosen: settings that somebody gave.
        derived: settings that are not the default.
    """
    parts = {"given": dict(sorted(chosen.items())), "others": dict(sorted((derived or {}).items()))}
    return json.dumps(parts, separators=(",", ":"))


def _read(text: str) -> _Line | None:
    """Take a line apart; None for words of a person."""
    if not text.startswith("{"):
        return None
    # words of a person may begin like JSON
    try:
        parts = json.loads(text)
        return _Line(dict(parts["given"]), dict(parts["others"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def values(text: str) -> dict[str, str]:
    """Return every setting in a line; none of words of a person."""
    line = _read(text)
    if line is None:
        return {}
    return line.values


def plain(text: str) -> dict[str, str]:
    """Return the settings by Megatron's names: ``--num-experts`` and ``num_experts`` are one; a
    flag is ``True``.
    """
    settings = {}
    for name, value in values(text).items():
        words = name.removeprefix("--").replace("-", "_")
        # a recipe's names have their section in front: "prism.tier"
        last_word = words.rpartition(".")[2]
        settings[last_word] = value or "True"
    return settings


def line_of(source: Mapping[str, str]) -> str:
    """Return the line of a job's settings; "" where its source has none."""
    for key in KEYS:
        if key in source:
            return source[key]
    return ""


def of_source(source: Mapping[str, str]) -> dict[str, str]:
    """Return a job's settings by Megatron's names, as ``plain``; none where nobody knows them.

    Args:
        source: what slices say of their job.
    """
    return plain(line_of(source))


def job_name(source: Mapping[str, str]) -> str:
    """Say what a job trains: its recipe's model, else its layers; "" if its source does not say."""
    # a recipe's name begins with its model
    recipe = source.get("recipe")
    if recipe:
        return recipe.partition("_")[0]
    settings = of_source(source)
    if "num_layers" not in settings or "hidden_size" not in settings:
        return ""
    name = f"{settings['num_layers']} layers of {settings['hidden_size']}"
    experts = settings.get("num_experts", "None")
    if experts == "None":
        return name
    return f"{name}, {experts} experts"


def title(source: Mapping[str, str], world: object) -> str:
    """Name a job in a line: ``llama3-70b, 1,024 ranks = tp 8 x …``."""
    return ", ".join(filter(None, (job_name(source), str(world))))


def differences(key: str, old_text: str | None, new_text: str) -> list[str]:
    """Say in which words the job of ``old_text`` is another one than that of ``new_text``.

    Args:
        key: what the settings are, for those of which nobody knows them.
        old_text: the other job's line; None where it is unknown.
        new_text: this job's line.

    Returns:
        A phrase for each of the first differences, and how many more there are; empty: the jobs
        are one.
    """
    if old_text is None:
        return [f"{key} unknown there"]
    old_line = _read(old_text)
    new_line = _read(new_text)
    # words of a person are compared as they are
    if old_line is None or new_line is None:
        if old_text == new_text:
            return []
        return [f"{key} {old_text}, not {new_text}"]

    # settings that somebody gave come first
    old = old_line.values
    new = new_line.values
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    shown = [name for name in names if name in new_line.chosen or name in old_line.chosen]

    # others follow, but for those that repeat the values of one that was given
    repeated = {(old.get(name), new.get(name)) for name in shown}
    for name in names:
        if (old.get(name), new.get(name)) not in repeated:
            shown.append(name)

    phrases = [_difference(name, old.get(name), new.get(name)) for name in shown[:_SHOWN]]
    if len(shown) > _SHOWN:
        phrases.append(f"and {len(shown) - _SHOWN} more")
    return phrases


def _difference(name: str, old: str | None, new: str | None) -> str:
    """Say how a setting differs; None: the job has its default."""
    if old and new:
        return f"{name} {old} there, {new} here"
    # one of them has the default, or "" for a flag
    value, place, other_place = new, "here", "there"
    if old is not None:
        value, place, other_place = old, "there", "here"
    if value:
        return f"{name} {value} {place}, its default {other_place}"
    return f"{name} {place}, not {other_place}"


def short(text: str) -> str:
    """Return a word in place of a line of settings, the same for the same job; other texts as they
    are.
    """
    line = _read(text)
    if line is None:
        return text
    content = json.dumps(line.values, sort_keys=True)
    return hashlib.sha1(content.encode()).hexdigest()[:16]
