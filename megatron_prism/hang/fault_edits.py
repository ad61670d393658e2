"""What does a fault do to the ops of one rank?  ``EDITS``: kind -> what changes their list.

In : who is in which group, the fault, the rank, its ops and which of them is hit.  The list is
changed in place.  Faults that stop hosts and devices change no op: those are ``faults``' own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from megatron_prism.core.errors import UsageError
from megatron_prism.core.membership import Membership, named_group
from megatron_prism.core.ops import SLOWER, Op
from megatron_prism.hang.fault_plan import Call, Fault, Finder

__all__ = ["EDITS"]

Groups = Mapping[str, Membership]


def _change(ops: list[Op], at: int, **fields: object) -> None:
    ops[at] = dataclasses.replace(ops[at], **fields)  # type: ignore[arg-type]


def _drop(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    gone = ops.pop(at)
    if gone.handle >= 0:
        ops[:] = [op for op in ops if not (op.name == "wait" and op.handle == gone.handle)]


def _skip(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    number = ops[at].microbatch
    gone = {op.handle for op in ops if op.microbatch == number and op.handle >= 0}
    ops[:] = [op for op in ops if op.microbatch != number
              and not (op.name == "wait" and op.handle in gone)]  # fmt: skip


def _swap(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    group, name, *nth = fault.params["with"].split(":")
    wanted = int(nth[0]) if nth else 0
    found = [i for i, op in enumerate(ops)
             if op.name == name and op.group and named_group(group, op.group)]  # fmt: skip
    if wanted >= len(found) or found[wanted] == at:
        raise UsageError(f"{fault}: rank {rank} has no such other call", fix="with=ep:all_to_all:0")
    other = found[wanted]
    ops[at], ops[other] = ops[other], ops[at]


def _shape(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    op = ops[at]
    whole = max(op.num_in, op.num_out)
    new = fault.number("n", whole // 2 if whole > 1 else whole + 1)
    assert new is not None
    # what grows in a gather shrinks with its part
    sides = {}
    for side in ("num_in", "num_out"):
        now = getattr(op, side)
        if now >= 0:
            sides[side] = max(0, new * now // whole) if whole else new
    _change(ops, at, **sides)


def _dtype(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    _change(ops, at, dtype=fault.params.get("to", "bf16" if ops[at].dtype == "fp32" else "fp32"))


def _splits(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    """Rows move from one member's part to another's: the totals stay as they are."""
    splits = ops[at].splits
    size = len(groups[ops[at].group].group(rank))
    if splits is None or size < 2:
        raise UsageError(f"{fault}: that all-to-all says nothing of splits", fix="another nth")
    sent, rows = list(splits[0]), fault.number("rows", 1)
    assert rows is not None
    giver = max(range(size), key=lambda i: sent[i])
    taker = (giver + 1) % size
    sent[giver], sent[taker] = sent[giver] - rows, sent[taker] + rows
    _change(ops, at, splits=(tuple(sent), splits[1]))


def _root(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    size = len(groups[ops[at].group].group(rank))
    _change(ops, at, root=fault.number("to", (ops[at].root + 1) % max(1, size)))


def _reduce(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    _change(ops, at, reduce=fault.params.get("to", "sum" if ops[at].reduce == "max" else "max"))


def _op(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    new = fault.params.get("to", "all_reduce" if ops[at].name == "broadcast" else "broadcast")
    rooted = new in ("broadcast", "reduce", "gather", "scatter")
    reduces = new in ("all_reduce", "reduce_scatter", "reduce")
    _change(ops, at, name=new, root=0 if rooted else -1, reduce="sum" if reduces else "")


def _group(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    to = [n for n in groups if named_group(fault.params["to"], n)]
    if not to or not len(groups[to[0]].group(rank)):
        raise UsageError(f"{fault}: rank {rank} is in no such group", fix="to=tp")
    _change(ops, at, group=to[0])


def _dup(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    ops.insert(at, dataclasses.replace(ops[at], handle=-1))


def _other_side(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    if 2 * ops[at].peer % len(groups[ops[at].group].group(rank)) == 0:
        raise UsageError(f"{fault}: previous and next of rank {rank} are one rank there",
                         fix="a pipeline of three stages, or p2p_lost")  # fmt: skip
    _change(ops, at, peer=-ops[at].peer)


def _late(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    """The call waits for a segment that was not there."""
    op, ns = ops[at], 1_000_000 * (fault.late_ms or 0)
    late = Op("compute", stream=op.stream, phase=op.phase, microbatch=op.microbatch,
              chunk=op.chunk, ns=ns, note="planted")  # fmt: skip
    ops.insert(at, late)


def _slow(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    """All segments that the selector means."""
    finder, factor, known = Finder(fault), fault.factor("factor", 2), 0
    for i, op in enumerate(ops):
        call = Call(op.name, op.group, -1, op.microbatch, op.chunk, op.phase, op.site)
        if op.name == "compute" and finder.matches(call):
            known += op.ns > 0 or op.flops > 0 or op.traffic > 0
            if op.ns >= 0:
                _change(ops, i, ns=math.ceil(op.ns * factor))
            else:  # a machine says how long its kernels take: no sum of flops makes them longer
                _change(ops, i, note=f"{SLOWER}{factor}; {op.note}")
    if not known:
        raise UsageError(f"{fault}: the programs do not say how long segments take",
                         fix="capture them: prism capture")  # fmt: skip


EDITS: dict[str, Callable[[Groups, Fault, int, list[Op], int], None]] = {
    "drop": _drop,
    "p2p_lost": _drop,
    "skip_microbatch": _skip,
    "swap": _swap,
    "shape": _shape,
    "dtype": _dtype,
    "splits": _splits,
    "root": _root,
    "reduce_op": _reduce,
    "op": _op,
    "group": _group,
    "p2p_dup": _dup,
    "p2p_swap": _other_side,
    "delay": _late,
    "data_stall": _late,
    "slow": _slow,
}
