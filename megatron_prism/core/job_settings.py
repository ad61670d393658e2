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

KEYS = ("arguments", "settings")  # of a source: of a stock job, of a recipe
_SHOWN = 4
_Settings = Mapping[str, str]


def as_text(given: _Settings, others: _Settings | None = None) -> str:
    """The line that is kept: settings that were given, and others that are not the default."""
    parts = {"given": dict(sorted(given.items())), "others": dict(sorted((others or {}).items()))}
    return json.dumps(parts, separators=(",", ":"))


def _read(text: str) -> tuple[dict[str, str], dict[str, str]] | None:
    """(given, others), or None for words of a person."""
    try:
        parts = json.loads(text) if text.startswith("{") else None
        return (dict(parts["given"]), dict(parts["others"])) if parts is not None else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def values(text: str) -> dict[str, str]:
    """Every setting in a line; none of words of a person."""
    parts = _read(text)
    return {} if parts is None else {**parts[1], **parts[0]}


def plain(text: str) -> dict[str, str]:
    """The settings by Megatron's names: ``--num-experts`` and ``num_experts`` are one; a flag
    is ``True``.
    """
    return {
        name.removeprefix("--").replace("-", "_").rpartition(".")[2]: value or "True"
        for name, value in values(text).items()
    }


def line_of(source: Mapping[str, str]) -> str:
    """The line of a job's settings; "" where its source has none."""
    return next((source[key] for key in KEYS if key in source), "")


def job_name(source: Mapping[str, str]) -> str:
    """What a job trains: its recipe's model, else its layers; "" if its source does not say."""
    if recipe := source.get("recipe"):
        return recipe.partition("_")[0]
    known = plain(line_of(source))
    if not {"num_layers", "hidden_size"} <= known.keys():
        return ""
    experts = known.get("num_experts", "None")
    more = "" if experts == "None" else f", {experts} experts"
    return f"{known['num_layers']} layers of {known['hidden_size']}{more}"


def title(source: Mapping[str, str], world: object) -> str:
    """``llama3-70b, 1,024 ranks = tp 8 x …``: a job in a line."""
    return ", ".join(filter(None, (job_name(source), str(world))))


def differences(key: str, there: str | None, here: str) -> list[str]:
    """In which words the job ``there`` is another one than that ``here``; empty: they are one.

    key : what the settings are, for those of which nobody knows them
    """
    if there is None:
        return [f"{key} unknown there"]
    theirs, ours = _read(there), _read(here)
    if theirs is None or ours is None:
        return [] if there == here else [f"{key} {there}, not {here}"]
    old, new = {**theirs[1], **theirs[0]}, {**ours[1], **ours[0]}
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    first = [name for name in names if name in ours[0] or name in theirs[0]]
    known = {(old.get(name), new.get(name)) for name in first}  # which others repeat
    rest = [name for name in names if (old.get(name), new.get(name)) not in known]
    shown = first + [name for name in rest if name not in first]
    more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return [_said(name, old.get(name), new.get(name)) for name in shown[:_SHOWN]] + more


def _said(name: str, old: str | None, new: str | None) -> str:
    if old and new:
        return f"{name} {old} there, {new} here"
    places = (old, "there", "here") if old is not None else (new, "here", "there")
    value, with_it, without = places
    lacking = f"its default {without}" if value else f"not {without}"
    return f"{name}{' ' if value else ''}{value} {with_it}, {lacking}"


def short(text: str) -> str:
    """A word in place of a line of settings, the same for the same job; other texts as they are."""
    parts = _read(text)
    if parts is None:
        return text
    content = json.dumps({**parts[1], **parts[0]}, sort_keys=True)
    return hashlib.sha1(content.encode()).hexdigest()[:16]
