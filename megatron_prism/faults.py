"""What does a fault do to programs?  A healthy world with faults planted in it.

In : Programs and ``fault_plan.Fault``s.  Out: ``Planted``: the programs as the ranks would then run
them, the standstill's own faults (hosts that stop, devices that hang), and the truth: which op of
which rank is hit.  Verdicts never see the truth; tests and people compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism import quiescence
from megatron_prism.classes import memberships
from megatron_prism.errors import UsageError
from megatron_prism.fault_plan import FIX, Call, Fault, Finder, named_group
from megatron_prism.ops import CODE, IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.program import Program
from megatron_prism.programs import Programs

__all__ = ["Hit", "Planted", "plant"]

_TALK = IS_COLLECTIVE | IS_PAIR
_SILENT = ("exception", "exit", "sigkill", "segfault", "sigstop", "data_end", "nan", "oom")
_HOST = (*_SILENT, "gil", "data_stall")
_TIMES = ("delay", "inf")  # nothing hangs


@dataclass(frozen=True)
class Hit:
    """One op that a fault hits: the truth that a verdict is compared with.

    op is the call as it should have been; seq counts its group's calls (messages of a pair) from 1,
    as the Flight Recorder does
    """

    fault: str
    kind: str
    rank: int
    index: int
    op: str
    group: str
    members: tuple[int, ...]
    seq: int
    label: str
    site: str

    def __str__(self) -> str:
        who = f"{self.group}{list(self.members)}" if len(self.members) < 9 else self.group
        call = f"{self.op} #{self.seq} of {who}" if self.group else self.op
        at = f" at {self.site}" if self.site else ""
        return f"{self.fault}: rank {self.rank}, op {self.index} ({self.label}), {call}{at}"


@dataclass(frozen=True)
class Planted:
    """programs and faults to run with ``quiescence.run``; hits is the truth."""

    programs: Programs
    faults: dict[int, quiescence.Fault]
    hits: tuple[Hit, ...]

    @property
    def culprits(self) -> set[int]:
        """The ranks that are to blame."""
        return {hit.rank for hit in self.hits}


def plant(programs: Programs, faults: Iterable[Fault], seed: int = 0) -> Planted:
    """Plant every fault.  UsageError for one that hits nothing: it would never fire."""
    planter = _Planter(programs)
    for fault in faults:
        if fault.kind in _TIMES:
            raise UsageError(
                f"{fault}: nothing hangs of it, and programs have no values",
                fix="--prism-fault on a run, or prism predict slow=1.2",
            )
        before = len(planter.hits)
        ranks = fault.ranks(programs.world, seed)
        for rank in ranks:
            planter.one(fault, rank)
        if len(planter.hits) == before:
            raise UsageError(f"{fault} never fires: no such call on {_few(ranks)}", fix=FIX)
    return planter.result()


def _few(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} others" if len(ranks) > 1 else "")


class _Planter:
    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.groups = memberships(programs)
        self.edited: dict[int, list[Op]] = {}
        self.stops: dict[int, quiescence.Fault] = {}
        self.hits: list[Hit] = []

    def ops(self, rank: int) -> list[Op]:
        if rank not in self.edited:
            self.edited[rank] = list(self.programs.of(rank))
        return self.edited[rank]

    def one(self, fault: Fault, rank: int) -> None:
        ops = self.ops(rank)
        at = self._oom(fault, rank) if fault.kind == "oom" else self._find(fault, ops)
        if at is None:
            return
        self._note(fault, rank, ops, at)
        if fault.kind == "nan" and "int" in ops[at].dtype:
            raise UsageError(f"{fault}: {ops[at].name} of {ops[at].group} moves {ops[at].dtype}, "
                             "which cannot be NaN", fix="another call: op=all_reduce")  # fmt: skip
        if fault.kind in _HOST:
            self._stop(rank, host=at, silent=fault.kind in _SILENT)
        elif fault.kind == "gpu_hang":
            self._stop(rank, device=at)
        elif fault.kind == "gpu_error":
            self._stop(rank, blind=at, host=min(at + 5, len(ops)))
        else:
            _EDITS[fault.kind](self, fault, rank, ops, at)

    def _stop(self, rank: int, **how: object) -> None:
        self.stops[rank] = quiescence.Fault(**how)  # type: ignore[arg-type]

    def _find(self, fault: Fault, ops: list[Op]) -> int | None:
        finder = Finder(fault)
        anything = "op" in fault.select or not fault.kind.startswith("gpu_hang")
        for index, op in enumerate(ops):
            talks = bool(_TALK[CODE[op.name]])
            if not talks and (op.name != fault.select.get("op") and anything):
                continue
            call = Call(op.name, op.group, -1, op.microbatch, op.chunk, op.phase, op.site)
            if finder.hit(call):
                return index
        return None

    def _oom(self, fault: Fault, rank: int) -> int | None:
        """Before the first op at which more lives than there is memory."""
        program, limit = self.programs.of(rank), fault.number("at_bytes")
        if not len(program.allocations):
            raise UsageError(f"{fault}: the programs say nothing of memory",
                             fix="capture them on tier meta")  # fmt: skip
        over = np.flatnonzero(program.live_bytes() > limit)
        if not over.size:
            return None
        return min(int(program.allocations["before"][over[0]]), len(program) - 1)

    def _note(self, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
        op = ops[at]
        members: tuple[int, ...] = ()
        if op.group:
            members = tuple(map(int, self.groups[op.group].group(rank)))
        self.hits.append(
            Hit(str(fault), fault.kind, rank, at, op.name, op.group, members, _seq(ops, at),
                op.label, op.site)
        )  # fmt: skip

    def result(self) -> Planted:
        base = self.programs
        of, made = base.program_of.copy(), list(base.programs)
        for rank, ops in self.edited.items():
            if ops != list(base.of(rank)):
                of[rank] = len(made)
                made.append(Program.from_ops(rank, ops))
        programs = dataclasses.replace(base, programs=tuple(made), program_of=of)
        return Planted(programs, dict(self.stops), tuple(self.hits))


def _seq(ops: list[Op], at: int) -> int:
    """Place among the collectives, or the messages, of the group: batches are one launch."""
    pair, group = ops[at].name in ("send", "recv"), ops[at].group
    seen: set[object] = set()
    for i, op in enumerate(ops[: at + 1]):
        if op.group == group and _TALK[CODE[op.name]] and (op.name in ("send", "recv")) == pair:
            seen.add(("batch", op.batch) if op.batch >= 0 else i)
    return len(seen)


def _change(ops: list[Op], at: int, **fields: object) -> None:
    ops[at] = dataclasses.replace(ops[at], **fields)  # type: ignore[arg-type]


def _drop(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    gone = ops.pop(at)
    if gone.handle >= 0:
        ops[:] = [op for op in ops if not (op.name == "wait" and op.handle == gone.handle)]


def _skip(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    number = ops[at].microbatch
    gone = {op.handle for op in ops if op.microbatch == number and op.handle >= 0}
    ops[:] = [op for op in ops if op.microbatch != number
              and not (op.name == "wait" and op.handle in gone)]  # fmt: skip


def _swap(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    group, name, *nth = fault.params["with"].split(":")
    wanted = int(nth[0]) if nth else 0
    found = [i for i, op in enumerate(ops)
             if op.name == name and op.group and named_group(group, op.group)]  # fmt: skip
    if wanted >= len(found) or found[wanted] == at:
        raise UsageError(f"{fault}: rank {rank} has no such other call", fix="with=ep:all_to_all:0")
    other = found[wanted]
    ops[at], ops[other] = ops[other], ops[at]


def _shape(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
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


def _dtype(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    _change(ops, at, dtype=fault.params.get("to", "bf16" if ops[at].dtype == "fp32" else "fp32"))


def _splits(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    """Rows move from one member's part to another's: the totals stay as they are."""
    splits = ops[at].splits
    size = len(planter.groups[ops[at].group].group(rank))
    if splits is None or size < 2:
        raise UsageError(f"{fault}: that all-to-all says nothing of splits", fix="another nth")
    sent, rows = list(splits[0]), fault.number("rows", 1)
    assert rows is not None
    giver = max(range(size), key=lambda i: sent[i])
    taker = (giver + 1) % size
    sent[giver], sent[taker] = sent[giver] - rows, sent[taker] + rows
    _change(ops, at, splits=(tuple(sent), splits[1]))


def _root(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    size = len(planter.groups[ops[at].group].group(rank))
    _change(ops, at, root=fault.number("to", (ops[at].root + 1) % max(1, size)))


def _reduce(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    _change(ops, at, reduce=fault.params.get("to", "sum" if ops[at].reduce == "max" else "max"))


def _op(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    new = fault.params.get("to", "all_reduce" if ops[at].name == "broadcast" else "broadcast")
    rooted = new in ("broadcast", "reduce", "gather", "scatter")
    reduces = new in ("all_reduce", "reduce_scatter", "reduce")
    _change(ops, at, name=new, root=0 if rooted else -1, reduce="sum" if reduces else "")


def _group(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    to = [n for n in planter.groups if named_group(fault.params["to"], n)]
    if not to or not len(planter.groups[to[0]].group(rank)):
        raise UsageError(f"{fault}: rank {rank} is in no such group", fix="to=tp")
    _change(ops, at, group=to[0])


def _dup(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    ops.insert(at, dataclasses.replace(ops[at], handle=-1))


def _other_side(planter: _Planter, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    _change(ops, at, peer=-ops[at].peer)


_EDITS: dict[str, Callable[[_Planter, Fault, int, list[Op], int], None]] = {
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
}
