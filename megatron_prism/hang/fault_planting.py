"""Plant faults in the programs of a healthy world.

In : Programs and ``fault_plan.Fault``s.  Out: ``PlantedFaults``: the programs as the ranks would
then run them, the stalled job's own faults (hosts that stop, devices that hang), edits of times,
and the truth: which op of which rank is hit.  Verdicts never see the truth; tests and people
compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.groups import Membership, named_group, short_names
from megatron_prism.core.ops import CODE, IS_CALL, Op
from megatron_prism.core.program import Program, Programs
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships
from megatron_prism.hang.fault_plan import (
    CHANGES,
    FIX,
    Fault,
    FaultMatcher,
    changed_call,
    truth_line,
)
from megatron_prism.replay import whatif
from megatron_prism.replay.whatif import Edit

Groups = Mapping[str, Membership]


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


def _group(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    to = [n for n in groups if named_group(fault.params["to"], n)]
    if not to or not len(groups[to[0]].group(rank)):
        raise UsageError(f"{fault}: rank {rank} is in no such group", fix="to=tp")
    ops[at] = dataclasses.replace(ops[at], group=to[0])


def _dup(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    ops.insert(at, dataclasses.replace(ops[at], handle=-1))


def _late(groups: Groups, fault: Fault, rank: int, ops: list[Op], at: int) -> None:
    """The call waits for a segment that was not there."""
    op, ns = ops[at], 1_000_000 * (fault.late_ms or 0)
    late = Op("compute", stream=op.stream, phase=op.phase, microbatch=op.microbatch,
              chunk=op.chunk, ns=ns, note="planted")  # fmt: skip
    ops.insert(at, late)


EDITS: dict[str, Callable[[Groups, Fault, int, list[Op], int], None]] = {
    "drop": _drop,
    "p2p_lost": _drop,
    "skip_microbatch": _skip,
    "swap": _swap,
    "group": _group,
    "p2p_dup": _dup,
    "delay": _late,
    "data_stall": _late,
}

_SILENT = ("exception", "exit", "sigkill", "segfault", "sigstop", "data_end", "nan", "oom")
_HOST = (*_SILENT, "gil", "data_stall")
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
        before = len(planter.hits)
        ranks = fault.ranks(programs.world, seed)
        for rank in ranks:
            planter.one(fault, rank)
        if fault.kind == "nic":
            latency = 1000 * (fault.number("latency_us", 0) or 0)
            planter.edits.append(whatif.slow_nic(ranks, fault.factor("bw_factor"), latency))
        elif fault.kind == "slow":
            factor, meant = fault.factor("factor", 2), partial(_segments, fault)
            planter.edits.append(whatif.slow_ranks(ranks, factor, meant))
        if len(planter.hits) == before:
            raise UsageError(
                f"{fault} never fires: no such call on {_few(ranks)}",
                fix=_known_group(fault, programs.of(ranks[0])) or FIX,
            )
    return planter.result()


def _known_group(fault: Fault, program: Program) -> str:
    """Which groups there are, if ``fault`` names another."""
    groups = sorted({op.group for op in program if op.group})
    wanted = fault.select.group
    if not wanted or any(named_group(wanted, name) for name in groups):
        return ""
    return f"group= one of {', '.join(groups)}, or {', '.join(short_names())}"


def _few(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} others" if len(ranks) > 1 else "")


class _Planter:
    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.groups = memberships(programs)
        self.edited: dict[int, list[Op]] = {}
        self.stops: dict[int, stall.RankFault] = {}
        self.hits: list[FaultedCall] = []
        self.edits: list[Edit] = []

    def ops(self, rank: int) -> list[Op]:
        if rank not in self.edited:
            self.edited[rank] = list(self.programs.of(rank))
        return self.edited[rank]

    def one(self, fault: Fault, rank: int) -> None:
        if fault.kind == "nic":
            what = "every call between nodes"
            self.hits.append(FaultedCall(str(fault), "nic", rank, -1, what, "", (), 0, "-", ""))
            return
        ops = self.ops(rank)
        of_bytes = fault.kind == "oom" and "at_bytes" in fault.params
        at = self._oom(fault, rank) if of_bytes else self._find(fault, ops)
        if at is None:
            return
        self._note(fault, rank, ops, at)
        if fault.kind == "nan" and "int" in ops[at].dtype:
            raise UsageError(f"{fault}: {ops[at].name} of {ops[at].group} moves {ops[at].dtype}, "
                             "which cannot be NaN", fix="another call: op=all_reduce")  # fmt: skip
        if not fault.only_time and fault.kind in (*_HOST, "delay"):  # beyond all patience
            self._stop(rank, host=at, silent=fault.kind in _SILENT)
        elif fault.kind == "gpu_hang":
            self._stop(rank, device=at)
        elif fault.kind == "gpu_error":
            self._stop(rank, blind=at, host=min(at + 5, len(ops)))
        elif fault.kind == "slow":
            program = self.programs.of(rank)
            chosen = program.ops[_segments(fault, program)]
            if not any((chosen[key] > 0).any() for key in ("ns", "flops", "traffic")):
                raise UsageError(f"{fault}: the programs do not say how long segments take",
                                 fix="capture them: prism capture")  # fmt: skip
        elif fault.kind in CHANGES:
            group = self.groups[ops[at].group]
            place, size = int(group.position[rank]), len(group.group(rank))
            ops[at] = changed_call(fault, ops[at], place, size)
        else:
            EDITS[fault.kind](self.groups, fault, rank, ops, at)

    def _stop(self, rank: int, **how: object) -> None:
        self.stops[rank] = stall.RankFault(**how)  # type: ignore[arg-type]

    def _find(self, fault: Fault, ops: list[Op]) -> int | None:
        finder = FaultMatcher(fault)
        anything = bool(fault.select.op) or fault.kind not in ("gpu_hang", "slow")
        for index, op in enumerate(ops):
            talks = bool(IS_CALL[CODE[op.name]])
            if not talks and (op.name != fault.select.op and anything):
                continue
            if finder.hit(op.call_label):
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
            FaultedCall(str(fault), fault.kind, rank, at, op.name, op.group, members, _seq(ops, at),
                op.label, op.site)
        )  # fmt: skip

    def result(self) -> PlantedFaults:
        base = self.programs
        of, made = base.program_of.copy(), list(base.programs)
        for rank, ops in self.edited.items():
            if ops != list(base.of(rank)):
                of[rank] = len(made)
                made.append(Program.from_ops(rank, ops))
        programs = dataclasses.replace(base, programs=tuple(made), program_of=of)
        return PlantedFaults(programs, dict(self.stops), tuple(self.hits), tuple(self.edits))


def _seq(ops: list[Op], at: int) -> int:
    """Place among the collectives, or the messages, of the group: batches are one launch."""
    pair, group = ops[at].name in ("send", "recv"), ops[at].group
    seen: set[object] = set()
    for i, op in enumerate(ops[: at + 1]):
        if op.group == group and IS_CALL[CODE[op.name]] and (op.name in ("send", "recv")) == pair:
            seen.add(("batch", op.batch) if op.batch >= 0 else i)
    return len(seen)
