"""The verdict on a hang: culprits, victims, evidence, confidence, what is missing.

Plain values with a text form (one line first, then the picture) and a JSON form.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks, ranks_text

SCHEMA = "prism.diagnosis/1"
OUTSIDE = "a group outside NCCL"  # gloo, the store: no recorder and no watchdog knows its calls
JOB = "pretrain_gpt.py …"  # in a command, where the job's own line is not known


@dataclass(frozen=True)
class Culprit:
    """A culprit: ``kind`` is host stuck, device stuck, missing dump, order, extra call, skipped
    call, groups (it has others than the rest) or the field in which its call differs.
    """

    rank: int
    kind: str
    why: str


def _call_text(op: str, seq: int, group: str) -> str:
    if not op:
        return ""
    # neither torch's own check nor a time-out outside NCCL says a number
    if seq < 0:
        return f"{op} of {group}"
    return f"{op} #{seq} of {group}"


@dataclass(frozen=True)
class Waiting:
    """A victim: its oldest outstanding call and the ranks it waits for."""

    rank: int
    waits_for: tuple[int, ...]
    op: str
    group: str
    seq: int

    @property
    def call(self) -> str:
        """Its call in words."""
        return _call_text(self.op, self.seq, self.group)


@dataclass(frozen=True)
class Diagnosis:
    """verdict: healthy, mismatch, device stuck, host stuck, missing dump, order, deadlock,
    undetermined; group, op and seq are those of the first call that cannot end.

    seq counts from 1 as the Flight Recorder does.
    """

    verdict: str
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[Waiting, ...] = ()
    group: str = ""
    op: str = ""
    seq: int = -1
    confidence: str = "certain"
    evidence: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    watchdog: str = ""  # which fires first, and what it prints
    tried: tuple[str, ...] = ()  # what the programs, and the culprit's real code, say to it
    confirmed: bool | None = None  # by them; None: not tried, or it says nothing
    candidates: tuple[int, ...] = ()  # where nobody is named: among whom the culprit is, if known
    decides: str = ""  # where nobody is named: the command or setting that would tell
    stop: str = ""  # the command in which the culprits' ranks stop at that call, in a debugger

    @property
    def exit_code(self) -> int:
        """0 no fault, 1 a culprit is named, 3 nobody is, or only ranks whose dumps are missing:
        several explanations remain.
        """
        if self.verdict == "healthy":
            return 0
        # a script that acts on code 1 must not drain a host for a file that was lost
        return 3 if len(self.possibly) == len(self.culprits) else 1

    @property
    def possibly(self) -> tuple[Culprit, ...]:
        """Culprits that only left no dump, where a file may be lost or others explain the hang."""
        # beside a culprit with proof a missing dump is a guess, even in a certain verdict
        lost = tuple(c for c in self.culprits if c.kind == "missing dump")
        return lost if self.confidence == "possible" or len(lost) < len(self.culprits) else ()

    def to_json(self) -> dict[str, object]:
        """``prism.diagnosis/1``.  Ranks that possibly are culprits are candidates there."""
        value = {"schema": SCHEMA, **asdict(self)}
        # who reads culprits alone must not take a lost file for a fault
        if self.possibly:
            named = [asdict(c) for c in self.culprits if c not in self.possibly]
            value |= {"culprits": named, "candidates": [c.rank for c in self.possibly]}
        return value

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every culprit, candidate and victim."""
        roles = {id(one): "candidate" for one in self.possibly}
        rows = [{"role": roles.get(id(one), "culprit"), **asdict(one)} for one in self.culprits]
        return [*rows, *({"role": "victim", **asdict(one)} for one in self.victims)]

    def to_html(self) -> str:
        """One self-contained page."""
        page: str = renderer_of(self).page(self)
        return page

    def to_markdown(self) -> str:
        """The verdict for an issue."""
        markdown: str = renderer_of(self).markdown(self)
        return markdown

    def to_chrome_trace(self) -> str:
        """A track per rank named, arrows to whom it waits for, for ui.perfetto.dev."""
        trace: str = renderer_of(self).trace(self)
        return trace

    def __str__(self) -> str:
        """One line first, then the picture."""
        lines = [self.headline()]
        for title, rows in (
            ("evidence", self.evidence),
            ("waits", self.chain),
            ("places", self.places),
            ("tried on the programs", self.tried),
            ("first watchdog", (self.watchdog,) if self.watchdog else ()),
            ("stop there", (self.stop,) if self.stop else ()),
            ("missing", self.missing),
        ):
            lines += [f"\n{title}:"] * bool(rows) + [f"  {row}" for row in rows]
        # a job without a fault has no culprit to be confident of
        if self.verdict != "healthy":
            lines.append(f"\nconfidence: {self.confidence}")
        if self.decides:
            lines.append(f"\nnext: {self.decides}")
        return "\n".join(lines)

    @property
    def call(self) -> str:
        """The first call that cannot end, in words; empty if none is known."""
        return _call_text(self.op, self.seq, self.group)

    def headline(self) -> str:
        """The verdict in one line."""
        if self.verdict == "healthy":
            moved = self.evidence[0] if self.evidence else "nobody waits for anybody"
            return f"HEALTHY: {moved}"
        where = self.call or "no known call"
        if not self.culprits:
            # the first thing to know where no rank is named is which ranks are left to look at
            among = f", among {ranks_text(self.candidates)}" if self.candidates else ""
            tail = f"{counted(len(self.victims), 'rank')} waiting, nobody is named"
            return f"{self.verdict.upper()} at {where}{among}; {tail}"
        named = [c for c in self.culprits if c not in self.possibly]
        # certain and likely verdicts name their culprits without reserve
        unsure = "possibly " * (self.confidence == "possible")
        parts = [_ranks_and_kinds(named, unsure), _ranks_and_kinds(self.possibly, "possibly ")]
        tail = f"{counted(len(self.victims), 'victim')}"
        return f"HANG at {where}: {', '.join(filter(None, parts))}; {tail}"


def _ranks_and_kinds(culprits: Collection[Culprit], unsure: str) -> str:
    if not culprits:
        return ""
    # 64 ranks that are stuck alike are one fault: its kind is written once
    kinds = ", ".join(dict.fromkeys(c.kind for c in culprits))
    several = "ranks" if len(culprits) > 1 else "rank"
    return f"{unsure}{several} {format_ranks([c.rank for c in culprits])} ({kinds})"
