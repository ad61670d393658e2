"""Plant faults in the programs of a healthy world.

In : Programs and ``fault_plan.Fault``s.  Out: ``PlantedFaults``: the programs as the ranks would
then run them, the stalled job's own faults (hosts that stop, devices that hang), edits of times,
and the truth: which op of which rank is hit.  Verdicts never see the truth; tests and people
compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.fault_plan import (
    CHANGES,
    FIX,
    Fault,
    FaultMatcher,
    changed_call,
    truth_line,
)
from megatron_prism.core.groups import named_group, short_names
from megatron_prism.core.ops import CODE, IS_CALL, IS_NCCL, Op
from megatron_prism.core.program import Program, Programs
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships
from megatron_prism.replay import whatif
from megatron_prism.replay.whatif import Edit


def without(ops: Sequence[Op], gone: Collection[int]) -> list[Op]:
    """Without the ops at these places and the waits for them."""
    handles = {ops[i].handle for i in gone} - {-1}
    return [op for i, op in enumerate(ops)
            if i not in gone and not (op.name == "wait" and op.handle in handles)]  # fmt: skip


def twice(ops: Sequence[Op], at: int) -> list[Op]:
    """With op ``at`` made once more before it."""
    return [*ops[:at], dataclasses.replace(ops[at], handle=-1), *ops[at:]]


def exchanged(ops: Sequence[Op], at: int, other: int) -> list[Op]:
    """With two ops in each other's places."""
    new = list(ops)
    new[at], new[other] = ops[other], ops[at]
    return new


_SILENT = ("exception", "exit", "sigkill", "segfault", "sigstop", "data_end", "nan", "oom")
_ELSEWHERE = {  # what programs know nothing of
    "inf": "programs have no values", "bitflip": "programs have no values",
    "env": "programs do not say what a variable would change",
}  # fmt: skip


def _segments(fault: Fault, program: Program) -> np.ndarray:
    """bool [ops]: the segments that the selector means."""
    finder = FaultMatcher(fault)
    return np.array(
        [op.name == "compute" and finder.matches(op.call_label) for op in program], bool
    )


@dataclass(frozen=True)
class FaultedCall:
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
        if self.kind == "slow":
            return f"{self.fault}: rank {self.rank}, segments, first op {self.index} ({self.label})"
        alone = " (in a group of one nobody waits for it)" if len(self.members) == 1 else ""
        return f"{self.fault}: rank {self.rank}, op {self.index} ({self.label}), {call}{at}{alone}"

    def truth(self, where: str, iteration: int | None = None) -> str:
        """A line of ``--prism-fault-truth``; where: programs, or a virtual rank."""
        fields = dataclasses.asdict(self) | {"iteration": iteration, "where": where}
        return truth_line(**{key: value for key, value in fields.items() if key != "index"})


@dataclass(frozen=True)
class PlantedFaults:
    """programs and faults to run with ``graph.stall.run_until_stalled``; hits is the truth.

    edits : what takes longer, which programs cannot say
    """

    programs: Programs
    faults: dict[int, stall.RankFault]
    hits: tuple[FaultedCall, ...]
    edits: tuple[Edit, ...] = ()

    @property
    def culprits(self) -> set[int]:
        """The ranks that are to blame."""
        return {hit.rank for hit in self.hits}


def plant(programs: Programs, faults: Iterable[Fault], seed: int = 0) -> PlantedFaults:
    """Plant every fault.  UsageError for one that hits nothing: it would never fire."""
    planter = _Planter(programs)
    for fault in faults:
        if fault.kind in _ELSEWHERE:
            raise UsageError(f"{fault}: {_ELSEWHERE[fault.kind]}",
                             fix=f"on a run: --prism-fault {fault}")  # fmt: skip
        before, ranks = len(planter.hits), fault.ranks(programs.world, seed)
        for rank in ranks:
            planter.one(fault, rank)
        if fault.kind == "nic":
            latency = 1000 * fault.number("latency_us")
            planter.edits.append(whatif.slow_nic(ranks, fault.factor("bw_factor"), latency))
        elif fault.kind == "slow":
            factor, meant = fault.factor("factor", 2), partial(_segments, fault)
            planter.edits.append(whatif.slow_ranks(ranks, factor, meant))
        if len(planter.hits) == before:
            others = f" and {len(ranks) - 1} others" if len(ranks) > 1 else ""
            groups, wanted = programs.of(ranks[0]).groups(), fault.select.group
            known = f"group= one of {', '.join(sorted(groups))}, or {', '.join(short_names())}"
            named = not wanted or any(named_group(wanted, name) for name in groups)
            raise UsageError(f"{fault} never fires: no such call on rank {ranks[0]}{others}",
                             fix=FIX if named else known)  # fmt: skip
    edited = {r: ops for r, ops in planter.edited.items() if ops != list(programs.of(r))}
    changed = with_ops(programs, edited)
    return PlantedFaults(changed, planter.stops, tuple(planter.hits), tuple(planter.edits))


def with_ops(programs: Programs, edited: Mapping[int, Sequence[Op]]) -> Programs:
    """``programs`` where each rank of ``edited`` has those ops."""
    of, made = programs.program_of.copy(), list(programs.programs)
    for rank, ops in edited.items():
        of[rank] = len(made)
        made.append(Program.from_ops(rank, ops))
    return dataclasses.replace(programs, programs=tuple(made), program_of=of)


class _Planter:
    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.groups = memberships(programs)
        self.edited: dict[int, list[Op]] = {}
        self.stops: dict[int, stall.RankFault] = {}
        self.hits: list[FaultedCall] = []
        self.edits: list[Edit] = []

    def one(self, fault: Fault, rank: int) -> None:
        kind, program = fault.kind, self.programs.of(rank)
        if kind == "nic":
            what = "every call between nodes"
            self.hits.append(FaultedCall(str(fault), kind, rank, -1, what, "", (), 0, "-", ""))
            return
        ops = self.edited.setdefault(rank, list(program))
        of_bytes = kind == "oom" and "at_bytes" in fault.params
        at = _out_of_memory(fault, program) if of_bytes else _place(fault, ops)
        if at is None:
            return
        op = ops[at]
        members = tuple(map(int, self.groups[op.group].group(rank))) if op.group else ()
        self.hits.append(FaultedCall(str(fault), kind, rank, at, op.name, op.group, members,
                                     _seq(ops, at), op.label, op.site))  # fmt: skip
        if kind == "nan" and "int" in op.dtype:
            raise UsageError(f"{fault}: {op.name} of {op.group} moves {op.dtype}, "
                             "which cannot be NaN", fix="another call: op=all_reduce")  # fmt: skip
        if kind in _SILENT:
            self.stops[rank] = stall.RankFault(host=at, silent=True)
        elif kind == "gil" or kind in ("delay", "data_stall") and not fault.only_time:
            self.stops[rank] = stall.RankFault(host=at)
        elif kind == "gpu_hang":
            self.stops[rank] = stall.RankFault(device=at)
        elif kind == "gpu_error":
            self.stops[rank] = stall.RankFault(blind=at, host=min(at + 5, len(ops)))
        elif kind == "slow":
            chosen = program.ops[_segments(fault, program)]
            if not any((chosen[key] > 0).any() for key in ("ns", "flops", "traffic")):
                raise UsageError(f"{fault}: the programs do not say how long segments take",
                                 fix="capture them: prism capture")  # fmt: skip
        elif kind in CHANGES:
            ops[at] = changed_call(fault, op, members.index(rank), len(members))
        else:
            ops[:] = self._moved(fault, rank, ops, at)

    def _moved(self, fault: Fault, rank: int, ops: list[Op], at: int) -> list[Op]:
        """``ops`` with call ``at`` left out, repeated, elsewhere, later or in another group."""
        kind, op = fault.kind, ops[at]
        if kind in ("drop", "p2p_lost"):
            return without(ops, {at})
        if kind == "skip_microbatch":
            return without(ops, {i for i, one in enumerate(ops) if one.microbatch == op.microbatch})
        if kind == "p2p_dup":
            return twice(ops, at)
        if kind == "swap":
            return exchanged(ops, at, _other_call(fault, rank, ops, at))
        if kind == "group":
            to = next((n for n in self.groups if named_group(fault.params["to"], n)), "")
            if not to or not len(self.groups[to].group(rank)):
                raise UsageError(f"{fault}: rank {rank} is in no such group", fix="to=tp")
            return [*ops[:at], dataclasses.replace(op, group=to), *ops[at + 1 :]]
        late = Op("compute", stream=op.stream, phase=op.phase, microbatch=op.microbatch,
                  chunk=op.chunk, ns=1_000_000 * (fault.late_ms or 0), note="planted")  # fmt: skip
        return [*ops[:at], late, *ops[at:]]


def _other_call(fault: Fault, rank: int, ops: Sequence[Op], at: int) -> int:
    """The place of the call with which ``swap`` exchanges call ``at``."""
    group, name, *nth = fault.params["with"].split(":")
    wanted = int(nth[0]) - 1 if nth else 0
    found = [i for i, op in enumerate(ops)
             if op.name == name and op.group and named_group(group, op.group)]  # fmt: skip
    if not 0 <= wanted < len(found) or found[wanted] == at:
        raise UsageError(f"{fault}: rank {rank} has no such other call", fix="with=ep:all_to_all:1")
    return found[wanted]


def _place(fault: Fault, ops: list[Op]) -> int | None:
    """The op that ``fault`` hits: a call, unless its selector names another op."""
    finder = FaultMatcher(fault)
    anything = not fault.select.op and fault.kind in ("gpu_hang", "slow")
    for index, op in enumerate(ops):
        meant = anything or bool(IS_CALL[CODE[op.name]]) or op.name == fault.select.op
        if meant and finder.hit(op.call_label):
            return index
    return None


def _out_of_memory(fault: Fault, program: Program) -> int | None:
    """The first op at which more lives than there is memory."""
    if not len(program.allocations):
        raise UsageError(f"{fault}: the programs say nothing of memory",
                         fix="capture them on tier meta")  # fmt: skip
    over = np.flatnonzero(program.live_bytes() > fault.number("at_bytes"))
    if not over.size:
        return None
    return min(int(program.allocations["before"][over[0]]), len(program) - 1)


def _seq(ops: list[Op], at: int) -> int:
    """Place among the collectives, or the messages, of the group: batches are one launch."""
    pair, group = ops[at].name in ("send", "recv"), ops[at].group
    mine = [(op.batch, -1 if op.batch >= 0 else i) for i, op in enumerate(ops[: at + 1])
            if op.group == group and IS_NCCL[CODE[op.name]]
            and (op.name in ("send", "recv")) == pair]  # fmt: skip
    return len(set(mine))
