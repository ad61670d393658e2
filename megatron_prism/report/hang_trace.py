"""How does ui.perfetto.dev show a verdict on a hang?  As a Chrome trace, one track per rank.

In : Diagnosis.  Out: text.  A standstill has no clock: every rank named is one span of the same
length, the call it stands in or, for a culprit, its class.
Arrows go from who waits to whom it waits for, where that rank has a track; to culprits first, and
at most ``_MOST`` from one rank (the span's arguments name them all).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron_prism.core.selectors import format_ranks
from megatron_prism.hang.verdict import Diagnosis, Waiting

__all__ = ["render"]

_MOST = 4
_LENGTH = 1_000_000.0  # us


def render(found: Diagnosis) -> str:
    """The Chrome trace (JSON); format as in ``perfetto``."""
    about = {"made_by": "prism hang", "verdict": found.headline(), "confidence": found.confidence,
             "evidence": list(found.evidence), "missing": list(found.missing)}  # fmt: skip
    events = [*_tracks(found), *_arrows(found)]
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}) + "\n"


def _tracks(found: Diagnosis) -> Iterator[dict[str, object]]:
    """Culprits above victims, each in the order of ranks."""
    culprits = {culprit.rank: culprit for culprit in found.culprits}
    victims = {victim.rank: victim for victim in found.victims}
    for place, rank in enumerate([*sorted(culprits), *sorted(victims.keys() - culprits)]):
        name = f"rank {rank}" + " (culprit)" * (rank in culprits)
        for what, args in (("thread_name", {"name": name}),
                           ("thread_sort_index", {"sort_index": place})):  # fmt: skip
            yield {"ph": "M", "name": what, "pid": 0, "tid": rank, "args": args}
        if rank in culprits:
            culprit = culprits[rank]
            yield _span(rank, culprit.kind, "culprit", {"why": culprit.why})
        else:
            victim = victims[rank]
            args = {"group": victim.group, "waits for": format_ranks(sorted(victim.waits_for))}
            yield _span(rank, _call(victim), "victim", args)
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "ranks"}}


def _call(victim: Waiting) -> str:
    return f"{victim.op} #{victim.seq} of {victim.group}"


def _span(rank: int, name: str, kind: str, args: dict[str, str]) -> dict[str, object]:
    return {"ph": "X", "pid": 0, "tid": rank, "ts": 0.0, "dur": _LENGTH, "name": name, "cat": kind,
            "args": args}  # fmt: skip


def _arrows(found: Diagnosis) -> Iterator[dict[str, object]]:
    culprits = {culprit.rank for culprit in found.culprits}
    shown = culprits | {victim.rank for victim in found.victims}
    number = 0
    for victim in found.victims:
        others = [rank for rank in victim.waits_for if rank in shown]
        for other in sorted(others, key=lambda rank: (rank not in culprits, rank))[:_MOST]:
            number += 1
            for phase, rank, at in (("s", victim.rank, 0.4), ("f", other, 0.6)):
                yield {"ph": phase, "pid": 0, "tid": rank, "ts": at * _LENGTH, "id": number,
                       "name": "waits for", "cat": "waits", "bp": "e"}  # fmt: skip
