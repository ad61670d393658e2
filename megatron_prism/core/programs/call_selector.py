"""Choose a call of a rank: one grammar for faults, breakpoints and recorded payloads.

In : ``1B2 all_reduce group=tp nth=3 rank=5``, words in any order, with spaces or commas between
them, as ``prism show`` and ``prism hang`` print calls.  Out: ``CallSelector``, which fits calls or
does not, and ``NthCall``, which is told of a rank's calls one by one and says which is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_prism.core.errors import UsageError, did_you_mean, refuse
from megatron_prism.core.groups import named_group, short_names
from megatron_prism.core.programs.collectives import TABLE
from megatron_prism.core.programs.ops import NAMES, PHASES, CallLabel
from megatron_prism.core.world import AXES

_FIELDS = {"rank": "rank", "iter": "iteration", "mb": "microbatch"}
_FIELDS |= {name: name for name in ("chunk", "phase", "group", "op", "nth", "site")}
_KEYS = {**_FIELDS, "iteration": "iteration", "microbatch": "microbatch"}
_NUMBERS = ("iteration", "microbatch", "chunk", "nth")
_PHASE_OF = {letter: phase for phase, letter in PHASES.items()}
_RANKS = re.compile(r"\d+(-\d+(:\d+)?)?|any(:\d+)?")
# a number of GPUs to a node may follow: node=2/4
_HOSTS = re.compile(r"(node|rail)=[0-9]{1,9}(/[1-9][0-9]{0,4})?")
_FIX = "1B2 all_reduce group=tp nth=3, as prism show prints calls"


@dataclass(frozen=True)
class CallSelector:
    """Conditions on a call; what is None or empty fits every call.

    rank       : which ranks (``5``, ``0-7``, ``pp=1,tp=0``, ``any:2``, ``node=3``, ``rail=0/4``)
    iteration  : from 1; fits calls of programs, which know none
    microbatch, chunk, phase, op : as in CallLabel; phase "" is outside all phases
    group      : a description, or a short name (``tp``)
    nth        : how many calls that fit come before it; a text counts them from 1
    site       : regular expression that is searched in ``file.py:line``
    """

    rank: str = ""
    iteration: int | None = None
    microbatch: int | None = None
    chunk: int | None = None
    phase: str | None = None
    group: str = ""
    op: str = ""
    nth: int | None = None
    site: str = ""

    @staticmethod
    def parse(text: str, subject: str = "") -> CallSelector:
        """Read ``[LABEL] [OP] [of GROUP] [at FILE.py:LINE] [key=value …]``.

        Args:
            text: LABEL is ``<microbatch><phase><chunk>`` (``1B2``, ``2F``, ``O``); keys are rank,
                iter, mb, chunk, phase, group, op, nth and site; axes and numbers after ``rank=``
                belong to it (``rank=pp=1,tp=0``).
            subject: begins the text of an error.

        Raises:
            UsageError: a word that is not understood, with the word that was meant.
        """
        subject = subject or repr(text)
        fields: dict[str, str] = {}
        for word in text.replace(",", " ").split():
            for field, value in _read(word, fields, subject):
                # the later of two values would silently win, and a fault hit another call
                if field in fields and field != "rank":
                    raise UsageError(f"{subject}: {field} is named twice", fix=_FIX)
                # several words for ranks are one set of ranks
                if field in fields:
                    value = f"{fields['rank']},{value}"
                fields[field] = value
        _check(fields, subject)
        conditions: dict[str, str | int] = dict(fields)
        for name in fields.keys() & _NUMBERS:
            conditions[name] = int(fields[name])
        # people count from 1
        if "nth" in fields:
            conditions["nth"] = int(fields["nth"]) - 1
        return CallSelector(**conditions)  # type: ignore[arg-type]

    def __str__(self) -> str:
        conditions = {key: getattr(self, field) for key, field in _FIELDS.items()}
        if self.nth is not None:
            conditions["nth"] = self.nth + 1
        words = []
        for key, value in conditions.items():
            if value not in (None, ""):
                words.append(f"{key}={value}")
        return ",".join(words)

    def fits(self, call: CallLabel) -> bool:
        """Whether ``call`` meets every condition but ``rank`` and ``nth``."""
        chunk = call.chunk
        # a stage of one chunk: 2F is 2F0
        if call.phase:
            chunk = max(chunk, 0)
        return (
            # programs are one iteration without a number: a condition on it must not exclude them
            (self.iteration in (None, call.iteration) or call.iteration < 0)
            and self.microbatch in (None, call.microbatch)
            and self.chunk in (None, chunk)
            and self.phase in (None, call.phase)
            and self.op in ("", call.op)
            and (not self.group or named_group(self.group, call.group))
            and (not self.site or bool(re.search(self.site, call.site)))
        )


def _read(word: str, fields: Mapping[str, str], subject: str) -> list[tuple[str, str]]:
    """The fields that a word gives, with their values; ``fields`` are those before it."""
    key, equals, value = word.partition("=")
    # a label of a step: 1B2, 2F, O, or - outside all phases
    step = re.fullmatch(r"(\d*)([FBWOG])(\d*)|-", word)
    if step:
        microbatch, phase, chunk = step.groups()
        conditions = [("phase", _PHASE_OF[phase or "-"])]
        if microbatch:
            conditions.append(("microbatch", microbatch))
        if chunk:
            conditions.append(("chunk", chunk))
        return conditions
    if word in NAMES:
        return [("op", word)]

    # a line of code, of which line 12 is not the begin of 123
    is_line = re.fullmatch(r"\S+\.py:\d+", word)
    if is_line or word.startswith("@"):
        place = re.escape(word.removeprefix("@"))
        return [("site", rf"{place}(?!\d)")]
    # words between the parts of a call, as prism show prints it
    if word in ("of", "at"):
        return []

    # ranks, by a coordinate, by their host or by their numbers
    is_coordinate = key in AXES and key not in fields and value.isdigit()
    if is_coordinate or key in ("node", "rail") or _RANKS.fullmatch(word):
        return [("rank", word)]
    if equals and key in _KEYS and value:
        return [(_KEYS[key], value)]
    # a whole description of a group
    if re.fullmatch(r"[A-Z][A-Z_0-9]{4,}|default_pg", word):
        return [("group", word)]
    # a hint to another key would select calls of any layer
    if key == "layer":
        message = f"{subject}: calls do not say of which layer they are"
        raise UsageError(message, fix="nth=N counts them, site=REGEX is their line")
    raise UsageError(f"{subject}: {word!r} is not understood", fix=_meant(word) or _FIX)


def _check(fields: Mapping[str, str], subject: str) -> None:
    """UsageError for a value that no call has."""
    for name in _NUMBERS:
        if name in fields and not re.fullmatch("[0-9]{1,18}", fields[name]):
            message = f"{subject}: {name}={fields[name]} is no number"
            raise UsageError(message, fix=f"{name}=1")
    op = fields.get("op", "")
    phase = fields.get("phase", "")
    ranks = fields.get("rank", "")
    # nth=0 would become -1, which no call ever reaches: a breakpoint that never stops
    is_zeroth = "nth" in fields and not fields["nth"].strip("0")
    fault_of_pattern = ""
    try:
        # else a traceback of `re` when the first call is looked at
        re.compile(fields.get("site", ""))
    except re.error as error:
        fault_of_pattern = str(error)
    refuse(
        (is_zeroth, f"{subject}: nth= counts from 1", "nth=1"),
        (
            op and op not in NAMES,
            f"{subject}: there is no op {op}",
            _meant(op) or "op=all_reduce, op=send …",
        ),
        (
            phase not in PHASES,
            f"{subject}: there is no phase {phase}",
            f"phase= one of {', '.join(filter(None, PHASES))}",
        ),
        (
            re.search(r"node|rail", ranks) and not _HOSTS.fullmatch(ranks),
            f"{subject}: {ranks} is not understood",
            "node=2, rail=3, node=2/4 with 4 GPUs to a node",
        ),
        (
            fault_of_pattern,
            f"{subject}: site is no pattern: {fault_of_pattern}",
            "@mappings.py:31, or site=mappings",
        ),
    )


def _meant(word: str) -> str:
    """The word of a selector that is closest to ``word``, as a question; "" if none is close."""
    known = [row.name for row in TABLE] + [f"{key}=" for key in _KEYS]
    known += [f"group={name}" for name in short_names()]
    return did_you_mean(word if "=" in word else word.partition("=")[0], known, "")


class NthCall:
    """Counts the calls of a rank that fit ``select``; the one after ``nth`` of them is meant."""

    def __init__(self, select: CallSelector) -> None:
        self.select, self.seen = select, 0

    def matches(self, call: CallLabel) -> bool:
        """Whether ``call`` fits, whichever of those that fit is meant."""
        return self.select.fits(call)

    def hit(self, call: CallLabel) -> bool:
        """Whether ``call`` is meant; to be asked once for every call in the order of issue."""
        if not self.matches(call):
            return False
        self.seen += 1
        return self.seen == (self.select.nth or 0) + 1
