"""Hosts that wait for nobody in the dumps: do they wait for one of them outside NCCL?

In : State, and those ranks.  Out: words, or the ranks that need no fault of their own; ``hang``
then doubts.  Neither communicators that are being created nor gloo and the store leave records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from megatron_prism.core.selectors import format_ranks
from megatron_prism.hang.outstanding import State

__all__ = ["UNSEEN", "ahead", "together", "with_the_dead"]

UNSEEN = (
    "what hosts wait for outside NCCL (gloo, the store, files, data) or while a communicator "
    "is made: if the job stands still all the same, take its stacks: py-spy dump"
)


def together(state: State, idle: Collection[int], ahead: Collection[int]) -> str:
    """Why hosts that wait for nobody in the dumps may wait for one of them all the same; "" if
    nothing says so.

    A communicator is created at its first call: its members wait there without a record.  And calls
    outside NCCL (DeepEP, gloo, the store) leave none.
    """
    if ahead:
        return (f"ranks {format_ranks(sorted(ahead))} wait for nobody either, further on than a "
                "sibling: perhaps for it, while a communicator is created")  # fmt: skip
    shown = format_ranks(sorted(idle))
    groups = Counter(g.desc for g in state.groups.values())
    for desc in sorted(desc for desc, count in groups.items() if count > 1):
        if _lacking(state, desc, idle):
            return (f"ranks {shown} may wait in the first call of a group that others have "
                    f"({desc}), in which its communicator is created: that is not recorded, and "
                    "any of its members may be the one who does not come")  # fmt: skip
    whole = [g for g in state.groups.values() if set(g.ranks) <= set(idle)]
    if not whole:
        return ""
    group = max(whole, key=lambda g: len(g.ranks))
    return (f"ranks {shown} are all members of {group.desc}, or of several: they may wait for one "
            "of them outside NCCL (DeepEP, gloo, the store), which is not recorded")  # fmt: skip


def ahead(state: State, idle: Collection[int]) -> set[int]:
    """Those of ``idle`` who stand together further on than a sibling among them."""
    found = set[int]()
    for role in {state.role.get(r, 0) for r in idle}:
        counts = {r: state.counts(r) for r in state.siblings[role] if r in idle}
        places = list(counts.values())
        found |= {rank for rank, mine in counts.items()
                  if places.count(mine) > 1 and any(_behind(o, mine) for o in places)}  # fmt: skip
    return found


def _behind(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    common = one.keys() & other.keys()
    return any(one[k] < other[k] for k in common) and all(one[k] <= other[k] for k in common)


def with_the_dead(state: State, idle: Collection[int], dead: Collection[int]) -> set[int]:
    """Those of ``idle`` who may wait outside NCCL for a rank without a dump: members of groups of
    which nobody else is.  One death explains them, and they need no fault of their own."""
    whole = [set(g.ranks) for g in state.groups.values() if {*idle, *dead}.issuperset(g.ranks)]
    reached = set(dead)
    while more := [g for g in whole if not g.isdisjoint(reached) and not g <= reached]:
        reached.update(*more)
    return reached & set(idle)


def _lacking(state: State, desc: str, idle: Collection[int]) -> bool:
    """Whether others have a group of this description and some of ``idle`` do not have it yet."""
    has = {r for r, d in state.dumps.items() if any(g.desc == desc for g in d.groups.values())}
    without = [r for r in idle if r not in has]
    roles = {state.role.get(r, 0) for r in without}
    alike = [r for role in roles for r in state.siblings[role] if r not in idle]
    if not without or not has:
        return False
    if not alike:  # nobody tells whether these ranks are of such a group; few are, of these
        return len(without) > 1 and "EMBEDDING" not in desc
    return 2 * sum(r in has for r in alike) > len(alike)
