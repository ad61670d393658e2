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
from megatron_prism.core.groups import named_group, short_names
from megatron_prism.core.programs.ops import CODE, IS_CALL, IS_NCCL, Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.features.hang.fault_plan import (
    CHANGES,
    FIX,
    Fault,
    FaultMatcher,
    changed_call,
    truth_line,
)
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships
from megatron_prism.replay import whatif
from megatron_prism.replay.whatif import Edit


def without(ops: Sequence[Op], removed: Collection[int]) -> list[Op]:
    """Return ``ops`` without some of them, by index, and without the waits for these."""
    handles = {ops[index].handle for index in removed} - {-1}
    remaining: list[Op] = []
    for index, op in enumerate(ops):
        is_wait_for_removed = op.name == "wait" and op.handle in handles
        if index not in removed and not is_wait_for_removed:
            remaining.append(op)
    return remaining


def twice(ops: Sequence[Op], index: int) -> list[Op]:
    """Return ``ops`` with one of them made once more before it."""
    return [*ops[:index], dataclasses.replace(ops[index], handle=-1), *ops[index:]]


def exchanged(ops: Sequence[Op], first: int, second: int) -> list[Op]:
    """Return ``ops`` with two of them in each other's places."""
    changed = list(ops)
    changed[first], changed[second] = ops[second], ops[first]
    return changed


# kinds after which a rank leaves no dump
_SILENT = ("exception", "exit", "sigkill", "segfault", "sigstop", "data_end", "nan", "oom")
# kinds of which programs know nothing -> why
_ONLY_ON_RUNS = {
    "inf": "programs have no values",
    "bitflip": "programs have no values",
    "env": "programs do not say what a variable would change",
}
_EVERY_CALL = "every call between nodes"  # what a slow network card hits
_CALLS_UNTIL_BLIND_HOST_STOPS = 5  # a host goes on for a while after its device failed


def _segments(fault: Fault, program: Program) -> np.ndarray:
    """Tell which ops are segments of computing that the selector means: bool [ops]."""
    matcher = FaultMatcher(fault)
    is_meant = [op.name == "compute" and matcher.matches(op.call_label) for op in program]
    return np.array(is_meant, bool)


@dataclass(frozen=True)
class FaultedCall:
    """One op that a fault hits: the truth that a verdict is compared with.

    Attributes:
        fault: The fault, as text.
        kind: Its kind.
        rank: The rank that it hits.
        index: The op in the rank's program; -1 for all calls.
        op: Name of the call as it should have been.
        group: Description of its group; empty for a segment of computing.
        members: Ranks of the group.
        seq: Number of the call in its group from 1, as the Flight Recorder counts; messages are
            counted among messages.
        label: The step of the op.
        site: The line of the op.
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
        """Say in one line what is hit."""
        if self.kind == "slow":
            return f"{self.fault}: rank {self.rank}, segments, first op {self.index} ({self.label})"
        call = self.op
        if self.group:
            members = list(self.members) if len(self.members) < 9 else ""
            call = f"{self.op} #{self.seq} of {self.group}{members}"
        text = f"{self.fault}: rank {self.rank}, op {self.index} ({self.label}), {call}"
        if self.site:
            text += f" at {self.site}"
        if len(self.members) == 1:
            text += " (in a group of one nobody waits for it)"
        return text

    def truth(self, where: str, iteration: int | None = None) -> str:
        """Write a line of ``--prism-fault-truth``.

        Args:
            where: Programs, or a virtual rank.
            iteration: In which the fault happens.
        """
        fields = dataclasses.asdict(self) | {"iteration": iteration, "where": where}
        del fields["index"]
        return truth_line(**fields)


@dataclass(frozen=True)
class PlantedFaults:
    """What remains of a healthy world.

    Attributes:
        programs: To run with ``graph.stall.run_until_stalled``.
        faults: The same, of hosts that stop and devices that hang.
        hits: The truth.
        edits: What takes longer, which programs cannot say.
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
    """Plant every fault.

    Args:
        programs: Of the healthy world.
        faults: What to plant.
        seed: Of ranks that are drawn.

    Raises:
        UsageError: A fault hits nothing: it would never fire; or programs cannot have it.
    """
    planter = _Planter(programs)
    for fault in faults:
        if fault.kind in _ONLY_ON_RUNS:
            fix = f"on a run: --prism-fault {fault}"
            raise UsageError(f"{fault}: {_ONLY_ON_RUNS[fault.kind]}", fix=fix)
        hit_count = len(planter.hits)
        ranks = fault.ranks(programs.world, seed)
        for rank in ranks:
            planter.plant_on_rank(fault, rank)
        planter.add_edit(fault, ranks)
        if len(planter.hits) == hit_count:
            raise _never_fires(programs, fault, ranks)

    # a rank that was asked for and not changed runs what others like it run
    changed_ops: dict[int, list[Op]] = {}
    for rank, ops in planter.edited.items():
        if ops != list(programs.of(rank)):
            changed_ops[rank] = ops
    changed_programs = with_ops(programs, changed_ops)
    hits, edits = tuple(planter.hits), tuple(planter.edits)
    return PlantedFaults(changed_programs, planter.stops, hits, edits)


def _never_fires(programs: Programs, fault: Fault, ranks: Sequence[int]) -> UsageError:
    """Make the error of a fault that hits no call of ``ranks``."""
    others = f" and {len(ranks) - 1} others" if len(ranks) > 1 else ""
    groups = programs.of(ranks[0]).groups()
    selected_group = fault.select.group
    fix = FIX
    if selected_group and not any(named_group(selected_group, name) for name in groups):
        fix = f"group= one of {', '.join(sorted(groups))}, or {', '.join(short_names())}"
    return UsageError(f"{fault} never fires: no such call on rank {ranks[0]}{others}", fix=fix)


def with_ops(programs: Programs, edited: Mapping[int, Sequence[Op]]) -> Programs:
    """Return ``programs`` where each rank of ``edited`` has the given ops."""
    program_of = programs.program_of.copy()
    program_list = list(programs.programs)
    for rank, ops in edited.items():
        program_of[rank] = len(program_list)
        program_list.append(Program.from_ops(rank, ops))
    return dataclasses.replace(programs, programs=tuple(program_list), program_of=program_of)


class _Planter:
    """Plants faults one by one.

    Attributes:
        edited: Rank -> its ops, changed or not.
        stops: Rank -> where its host or its device stops.
        hits: The truth.
        edits: What takes longer.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.groups = memberships(programs)
        self.edited: dict[int, list[Op]] = {}
        self.stops: dict[int, stall.RankFault] = {}
        self.hits: list[FaultedCall] = []
        self.edits: list[Edit] = []

    def add_edit(self, fault: Fault, ranks: Sequence[int]) -> None:
        """Note what takes longer of a fault that only costs time."""
        if fault.kind == "nic":
            latency_ns = 1000 * fault.number("latency_us")
            self.edits.append(whatif.slow_nic(ranks, fault.factor("bw_factor"), latency_ns))
        elif fault.kind == "slow":
            segments = partial(_segments, fault)
            self.edits.append(whatif.slow_ranks(ranks, fault.factor("factor", 2), segments))

    def plant_on_rank(self, fault: Fault, rank: int) -> None:
        """Plant a fault on a rank; without a hit where the rank makes no such call."""
        kind = fault.kind
        if kind == "nic":
            hit = FaultedCall(str(fault), kind, rank, -1, _EVERY_CALL, "", (), 0, "-", "")
            self.hits.append(hit)
            return
        program = self.programs.of(rank)
        ops = self.edited.setdefault(rank, list(program))
        if kind == "oom" and "at_bytes" in fault.params:
            index = _first_op_out_of_memory(fault, program)
        else:
            index = _first_match(fault, ops)
        if index is None:
            return

        op = ops[index]
        members: tuple[int, ...] = ()
        if op.group:
            members = tuple(self.groups[op.group].group(rank).tolist())
        seq = _sequence_number(ops, index)
        hit = FaultedCall(
            str(fault), kind, rank, index, op.name, op.group, members, seq, op.label, op.site
        )
        self.hits.append(hit)
        _check_effect(fault, program, op)
        stop = _stop(fault, index, len(ops))
        if stop is not None:
            self.stops[rank] = stop
        elif kind in CHANGES:
            ops[index] = changed_call(fault, op, members.index(rank), len(members))
        elif kind != "slow":
            ops[:] = self._with_calls_moved(fault, rank, ops, index)

    def _with_calls_moved(self, fault: Fault, rank: int, ops: list[Op], index: int) -> list[Op]:
        """Return ``ops`` with a call left out, repeated, elsewhere, later or in another group."""
        kind = fault.kind
        op = ops[index]
        if kind in ("drop", "p2p_lost"):
            return without(ops, {index})
        if kind == "skip_microbatch":
            skipped = {i for i, other in enumerate(ops) if other.microbatch == op.microbatch}
            return without(ops, skipped)
        if kind == "p2p_dup":
            return twice(ops, index)
        if kind == "swap":
            return exchanged(ops, index, _other_call(fault, rank, ops, index))
        if kind == "group":
            moved = dataclasses.replace(op, group=self._other_group(fault, rank))
            return [*ops[:index], moved, *ops[index + 1 :]]

        # a delay: the rank computes before the call
        delay = Op(
            "compute",
            stream=op.stream,
            phase=op.phase,
            microbatch=op.microbatch,
            chunk=op.chunk,
            ns=1_000_000 * (fault.late_ms or 0),
            note="planted",
        )
        return [*ops[:index], delay, *ops[index:]]

    def _other_group(self, fault: Fault, rank: int) -> str:
        """Return the description of the group into which ``group`` moves a call."""
        for name, membership in self.groups.items():
            if named_group(fault.params["to"], name):
                if len(membership.group(rank)):
                    return name
                break
        raise UsageError(f"{fault}: rank {rank} is in no such group", fix="to=tp")


def _check_effect(fault: Fault, program: Program, op: Op) -> None:
    """Raise UsageError for a fault that would change nothing of what it hits."""
    if fault.kind == "nan" and "int" in op.dtype:
        text = f"{fault}: {op.name} of {op.group} moves {op.dtype}, which cannot be NaN"
        raise UsageError(text, fix="another call: op=all_reduce")
    if fault.kind == "slow":
        segments = program.ops[_segments(fault, program)]
        if not any((segments[column] > 0).any() for column in ("ns", "flops", "traffic")):
            text = f"{fault}: the programs do not say how long segments take"
            raise UsageError(text, fix="capture them: prism capture")


def _stop(fault: Fault, index: int, op_count: int) -> stall.RankFault | None:
    """Return where a fault stops the host or the device; None if it stops neither."""
    kind = fault.kind
    if kind in _SILENT:
        return stall.RankFault(host=index, silent=True)
    if kind == "gil":
        return stall.RankFault(host=index)
    # a short delay is one of time alone
    if kind in ("delay", "data_stall") and not fault.only_time:
        return stall.RankFault(host=index)
    if kind == "gpu_hang":
        return stall.RankFault(device=index)
    if kind == "gpu_error":
        last = min(index + _CALLS_UNTIL_BLIND_HOST_STOPS, op_count)
        return stall.RankFault(blind=index, host=last)
    return None


def _other_call(fault: Fault, rank: int, ops: Sequence[Op], index: int) -> int:
    """Return the index of the call with which ``swap`` exchanges a call."""
    group, name, *numbers = fault.params["with"].split(":")
    nth = int(numbers[0]) - 1 if numbers else 0
    candidates: list[int] = []
    for i, op in enumerate(ops):
        if op.name == name and op.group and named_group(group, op.group):
            candidates.append(i)
    if not 0 <= nth < len(candidates) or candidates[nth] == index:
        raise UsageError(f"{fault}: rank {rank} has no such other call", fix="with=ep:all_to_all:1")
    return candidates[nth]


def _first_match(fault: Fault, ops: Sequence[Op]) -> int | None:
    """Return the op that a fault hits: a call, unless its selector names another op."""
    matcher = FaultMatcher(fault)
    takes_any_op = not fault.select.op and fault.kind in ("gpu_hang", "slow")
    for index, op in enumerate(ops):
        is_call = bool(IS_CALL[CODE[op.name]])
        is_candidate = takes_any_op or is_call or op.name == fault.select.op
        if is_candidate and matcher.hit(op.call_label):
            return index
    return None


def _first_op_out_of_memory(fault: Fault, program: Program) -> int | None:
    """Return the first op at which more lives than there is memory."""
    if not len(program.allocations):
        text = f"{fault}: the programs say nothing of memory"
        raise UsageError(text, fix="capture them on tier meta")
    above = np.flatnonzero(program.live_bytes() > fault.number("at_bytes"))
    if not above.size:
        return None
    following_op = int(program.allocations["before"][above[0]])
    return min(following_op, len(program) - 1)


def _sequence_number(ops: Sequence[Op], index: int) -> int:
    """Return the number of a call in its group since the program's begin, from 1.

    Collectives and messages are counted apart, as the recorder of a process counts them.

    Args:
        ops: Of the program.
        index: The op that is the call.
    """
    call = ops[index]
    is_message = call.name in _MESSAGES
    # calls of one batch are one launch, which the recorder counts once
    launches: set[tuple[int, int]] = set()
    for i, op in enumerate(ops[: index + 1]):
        is_like_call = op.group == call.group and (op.name in _MESSAGES) == is_message
        if is_like_call and IS_NCCL[CODE[op.name]]:
            launches.add((op.batch, -1 if op.batch >= 0 else i))
    return len(launches)


_MESSAGES = ("send", "recv")
