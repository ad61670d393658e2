"""What torch's own check of collectives says: whose call differs.

In : ``Differ``, one for each rank that says it.  Out: the calls by rank, and the few among them.

With TORCH_DISTRIBUTED_DEBUG=DETAIL all ranks exchange the calls that they are about to make, and
each that finds another one than its own says so.  It looks in the order of ranks and stops at the
first: so all ranks before that one agree with it (torch's ProcessGroupWrapper.cpp).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_prism.core.world import ranks_text
from megatron_prism.features.hang.log_lines import Differ, Fingerprint

_ASPECTS = (("operation", "op"), ("shape", "shape"), ("dtype", "dtype"), ("sequence", "seq"))


@dataclass(frozen=True)
class Disagreement:
    """A call that ranks make differently.

    calls : rank -> what it calls; ranks as the group numbers them where ``whole`` is False
    kind  : operation, shape, dtype, or skipped call and extra call, where only numbers differ
    odd   : the few; empty where there is no majority
    whole : whether the numbers are global ranks
    """

    calls: Mapping[int, Fingerprint]
    kind: str
    odd: tuple[int, ...]
    whole: bool

    @property
    def usual(self) -> Fingerprint:
        """The call that most make."""
        usual_calls = [call for rank, call in self.calls.items() if rank not in self.odd]
        return usual_calls[0]

    def __str__(self) -> str:
        alike: dict[str, list[int]] = {}
        for rank, call in sorted(self.calls.items()):
            alike.setdefault(str(call), []).append(rank)
        sides: list[str] = []
        for call_text, ranks in alike.items():
            verb = "makes"
            if len(ranks) > 1:
                verb = "make"
            sides.append(f"{ranks_text(ranks)} {verb} {call_text}")
        text = "torch's own check of collectives: " + ", ".join(sides)
        if not self.whole:
            text += " (ranks as their group numbers them)"
        if not self.odd:
            text += "; no majority decides"
        return text


def disagreement(reports: Iterable[Differ]) -> Disagreement | None:
    """Find who differs from the others, by what ranks say first; None if nobody says anything."""
    first: dict[tuple[int | None, int], Differ] = {}
    for report in reports:
        first.setdefault((report.speaker, report.rank), report)
    if not first:
        return None
    # the rank that speaks is a global one, the ranks of which it speaks are the group's
    whole = all(report.rank == report.speaker for report in first.values())
    calls: dict[int, Fingerprint] = {}
    for report in first.values():
        calls[report.rank] = report.call
    for report in first.values():
        if report.other >= 0:
            calls.setdefault(report.other, report.others)
        for rank in range(report.other):
            calls.setdefault(rank, report.call)
    kind, values = _difference(calls)
    votes = Counter(values.values())
    usual, count = votes.most_common(1)[0]
    odd: tuple[int, ...] = ()
    if len(votes) > 1 and 2 * count > len(calls):
        odd_ranks = [rank for rank, value in values.items() if value != usual]
        odd = tuple(sorted(odd_ranks))

    # only the numbers differ: a rank with a smaller one left out a call
    if kind == "sequence":
        usual_number = int(str(usual))
        kind = "extra call"
        if all(calls[rank].seq < usual_number for rank in odd):
            kind = "skipped call"
    return Disagreement(calls, kind, odd, whole)


def _difference(calls: Mapping[int, Fingerprint]) -> tuple[str, dict[int, object]]:
    """(the first aspect in which calls differ, its value by rank)."""
    for kind, aspect in _ASPECTS:
        values = {rank: getattr(call, aspect) for rank, call in calls.items()}
        # a call without a tensor prints no shape, and no number that counts
        printed_values = {value for value in values.values() if value not in ("", -1)}
        if len(printed_values) > 1:
            return kind, values
    return "operation", dict.fromkeys(calls)
