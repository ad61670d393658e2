"""The guard between a local rank and its groups: plants faults, checks calls against programs.

The guard is the first of the world's listeners and gets every call before a recorder does; without
one of the flags there is no guard, and the calls do not know of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core.errors import HangError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.core.world import World, format_ranks
from megatron_prism.features.faults.call_check import (
    CallCheck,
    LocalCallCheck,
    differences,
    frames,
    gloo_does,
    nccl_lets_through,
)
from megatron_prism.features.faults.fault_injector import Injector
from megatron_prism.features.faults.options import FaultOptions
from megatron_prism.features.hang.fault_plan import Fault
from megatron_prism.runtime.listeners import LabelledCalls
from megatron_prism.runtime.recorder.recorder import details

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run
    from megatron_prism.features.hang.planting import FaultedCall
    from megatron_prism.graph.stall import StalledJob
    from megatron_prism.runtime.process_group import PrismGroup

_MAX_OPS = 8_000_000  # ops of all ranks that are run to a standstill before the job

Fifo = tuple[str, str, int]  # group, "" or send or recv, the peer


def _fifo(op: Op) -> Fifo:
    """Return the FIFO in which a call is."""
    if op.name in ("send", "recv"):
        return op.group, op.name, op.peer
    return op.group, "", 0


class ProgramPeers:
    """What programs say of the groups of a rank.

    Attributes:
        programs: Of the world.
        rank: The local rank.
        groups: Description -> memberships.
    """

    def __init__(self, programs: Programs, rank: int) -> None:
        from megatron_prism.graph.classes import memberships

        self.programs = programs
        self.rank = rank
        self.groups = memberships(programs)
        for name in ("_of_program", "expected", "collectives", "_counterparts"):  # asked again
            setattr(self, name, functools.cache(getattr(self, name)))

    def _members(self, desc: str) -> list[int]:
        if desc not in self.groups:
            return []
        members: list[int] = self.groups[desc].group(self.rank).tolist()
        return members

    def _collectives_of(self, rank: int, desc: str) -> list[Op]:
        return self._of_program(int(self.programs.program_of[rank]), desc, False)

    def _of_program(self, number: int, desc: str, are_messages: bool) -> list[Op]:
        """Return the messages, or the collectives, of a program in a group."""
        program = self.programs.programs[number]
        is_meant = IS_PAIR if are_messages else IS_COLLECTIVE
        calls: list[Op] = []
        for index in program.groups().get(desc, ()):
            if is_meant[program.ops["name"][index]]:
                calls.append(program[int(index)])
        return calls

    def own(self, desc: str) -> list[Op]:
        """Return the collectives of the local rank itself."""
        return self._collectives_of(self.rank, desc)

    def order(self) -> list[Op]:
        """Return all calls of the local rank, as it issues them."""
        return [op for op in self.programs.of(self.rank) if op.group]

    def expected(self) -> dict[Fifo, list[Op]]:
        """Return what the local rank calls in an iteration, by FIFO; not in groups of one."""
        calls_of_fifo: dict[Fifo, list[Op]] = {}
        for op in self.order():
            if len(self._members(op.group)) > 1:
                calls_of_fifo.setdefault(_fifo(op), []).append(op)
        return calls_of_fifo

    def collectives(self, desc: str) -> list[tuple[int, int, list[Op]]]:
        """Return (a member, how many call like it, its collectives) for all other members."""
        ranks_of_program: dict[int, list[int]] = {}
        for rank in self._members(desc):
            if rank != self.rank:
                number = int(self.programs.program_of[rank])
                ranks_of_program.setdefault(number, []).append(rank)
        rows: list[tuple[int, int, list[Op]]] = []
        for ranks in ranks_of_program.values():
            rows.append((ranks[0], len(ranks), self._collectives_of(ranks[0], desc)))
        return rows

    def position(self, desc: str, rank: int) -> int:
        """Return the group rank of ``rank``."""
        return int(self.groups[desc].position[rank])

    def messages(self, desc: str, offset: int, name: str) -> tuple[int, list[Op]]:
        """Return (the rank ``offset`` places further, its counterparts of our ``name``)."""
        members = self._members(desc)
        if not members:
            return -1, []
        # programs say peers as places further in the group
        peer = members[(self.position(desc, self.rank) + offset) % len(members)]
        counterpart_name = "recv" if name == "send" else "send"
        return peer, self._counterparts(desc, peer, counterpart_name)

    def _counterparts(self, desc: str, peer: int, name: str) -> list[Op]:
        """Return messages ``name`` of ``peer`` with the local rank."""
        size = len(self._members(desc))
        own_position = self.position(desc, self.rank)
        peer_position = self.position(desc, peer)
        messages = self._of_program(int(self.programs.program_of[peer]), desc, True)
        counterparts: list[Op] = []
        for op in messages:
            if op.name == name and (peer_position + op.peer) % size == own_position:
                counterparts.append(op)
        return counterparts


class ExpectedCalls:
    """Healthy peers, and those of the plan with the call at which its world stands still.

    Attributes:
        healthy_peers: Peers without faults.
        faulty_peers: Peers as faults of virtual ranks make them.
        rank: The local rank.
        faults: Those of virtual ranks.
        iteration: In which they happen (None: the first checked).
        first_endless_call: FIFO and number of this rank's first call without an end.
        stalled_job: The job at its standstill, if it comes to one.
        hits: What the faults hit.
    """

    def __init__(
        self,
        path: str | Path,
        world: World,
        rank: int,
        faults: Sequence[Fault],
        seed: int,
        dry: bool = False,
    ) -> None:
        """Read programs, and plant faults in them.

        Args:
            path: The programs.
            world: Of the job.
            rank: The local rank.
            faults: Those of virtual ranks.
            seed: Of ranks that are drawn.
            dry: Plant them, so that one knows what they would hit, and leave peers healthy.

        Raises:
            UsageError: The programs are of another world, or the faults of several iterations.
        """
        programs = open_programs(path)
        _check_world(path, programs.world, world)
        # without planted faults, peers do what their programs say
        self.healthy_peers = self.faulty_peers = ProgramPeers(programs, rank)
        self.rank = rank
        self.faults = tuple(faults)
        self.iteration = _single_iteration(faults)
        self.first_endless_call: tuple[str, str, int, int] | None = None
        self.stalled_job: StalledJob | None = None
        self.hits: tuple[FaultedCall, ...] = ()
        if faults:
            self._plant(programs, seed, dry)

    def _plant(self, programs: Programs, seed: int, dry: bool) -> None:
        """Plant the faults, and run the world until nobody can go on."""
        from megatron_prism.features.hang import planting
        from megatron_prism.graph import stall

        planted = planting.plant(programs, self.faults, seed)
        self.hits = planted.hits
        if dry:
            return
        self.faulty_peers = ProgramPeers(planted.programs, self.rank)
        # a large world takes too long to run before the job starts
        lengths = [len(program) for program in planted.programs.programs]
        if sum(lengths[number] for number in planted.programs.program_of) > _MAX_OPS:
            return
        state = stall.run_until_stalled(planted.programs, planted.faults)
        # the faults cost time and stop nobody
        if state.finished:
            return
        self.stalled_job = state

        # the first that does not end: a call, or a wait of the host, which is no call
        program = planted.programs.of(self.rank)
        is_done = state.done[self.rank]
        for index, op in enumerate(program):
            waits = op.group or op.name == "host_wait"
            if waits and not is_done[index]:
                if op.group:
                    self.first_endless_call = (*_fifo(op), int(program.sequence[index]))
                return

    def standstill(self, key: tuple[str, str, int, int]) -> None:
        """Raise HangError if a call is the first of this rank's that never ends.

        Args:
            key: FIFO and number of the call.
        """
        if key != self.first_endless_call or self.stalled_job is None:
            return
        from megatron_prism.features.hang import diagnose

        verdict = diagnose.diagnose_stall(self.stalled_job, self.healthy_peers.programs)
        text = f"nobody can go on: rank {self.rank} stands in the first call that never ends"
        raise HangError(f"{text}\n{verdict}")


def _check_world(path: str | Path, of_programs: World, of_job: World) -> None:
    """Raise UsageError if programs are of another world than the job."""
    if of_programs.same_places(of_job):
        return
    fix = "capture the same job"
    if of_programs.size != of_job.size:
        fix = f"--prism-world-size {of_programs.size}, or {fix}"
    text = f"--prism-world {path} is of {of_programs}, this job is {of_job}"
    raise UsageError(text, fix=fix)


def _single_iteration(faults: Iterable[Fault]) -> int | None:
    """Return the iteration of all faults that name one; UsageError if there are several."""
    numbers: set[int] = set()
    for fault in faults:
        # a fault without iter= happens in whichever is checked
        if fault.select.iteration is not None:
            numbers.add(fault.select.iteration)
    if len(numbers) > 1:
        text = f"faults of virtual ranks in iterations {sorted(numbers)}: their programs are "
        raise UsageError(f"{text}planted once", fix="the same iter= for all")
    return min(numbers, default=None)


@dataclass(frozen=True)
class CallDifference:
    """A call that does not fit.

    Attributes:
        rank: The rank that makes the call, or that left it out.
        iteration: In which.
        kind: In which way: a field, missing, unmatched send, unmatched recv, divergence.
        call: The call.
        number: Among those of its group, or of the iteration.
        theirs: What the peer calls there.
        texts: What differs.
        peer: The peer, if there is one.
        own: What the rank's derived program has there; without it nobody is named.
    """

    rank: int
    iteration: int
    kind: str
    call: Op
    number: int
    theirs: Op | None
    texts: Sequence[str]
    peer: int | None
    own: Op | None

    @property
    def is_left_out(self) -> bool:
        """Whether the rank's derived program has the call and the rank did not make it."""
        return self.kind == "missing" and self.peer is None

    @property
    def place(self) -> str:
        """The call in words."""
        if self.kind == "divergence":
            return f"{self.call.name} of {self.call.group}, call {self.number + 1} of the iteration"
        return f"{self.call.name} #{self.number + 1} of {self.call.group}"


def disagreement(difference: CallDifference) -> HangError:
    """Return the verdict on a call that does not fit; the prediction votes."""
    from megatron_prism.features.hang.verdict import Culprit, Diagnosis, Waiting

    rank, peer, call = difference.rank, difference.peer, difference.call
    program = ""
    if difference.is_left_out:
        program = "'s derived program"
    evidence = [f"iteration {difference.iteration}, rank {rank}{program} {_text(call)}"]
    if peer is not None and difference.theirs is not None:
        evidence.append(f"rank {peer} {_text(difference.theirs)}")
    evidence += difference.texts
    suspects = _suspects(difference)
    # the rank's derived program says which of two sides is right
    has_two_sides = difference.kind != "divergence" and not difference.is_left_out
    if has_two_sides and difference.own is not None:
        relation = "otherwise" if suspects == [rank] else "the same"
        evidence.append(f"the derived program of this rank calls {relation}")

    kind = difference.kind
    # only one of two makes the call
    if kind == "missing":
        is_extra = suspects == [rank] and peer is not None
        kind = "extra call" if is_extra else "skipped call"
    reason = difference.texts[0] if difference.texts else kind
    culprits = tuple(Culprit(suspect, kind, reason) for suspect in suspects)
    victims: list[Waiting] = []
    # whoever is not suspected waits in the call
    for side in (rank, peer):
        if side is not None and side not in suspects:
            victims.append(Waiting(side, (), call.name, call.group, difference.number + 1))
    verdict = Diagnosis(
        "mismatch",
        culprits,
        tuple(victims),
        call.group,
        call.name,
        difference.number + 1,
        "likely" if suspects else "possible",
        tuple(evidence),
    )
    # two ranks differ, and nothing says which is right
    named = "who is wrong is undetermined"
    if suspects:
        named = f"rank {format_ranks(suspects)} differs"
    text = f"{difference.place}, {kind}: {named}\n{verdict}"
    return HangError(text, fix="--prism-mismatch off goes on, as far as it can")


def _suspects(difference: CallDifference) -> list[int]:
    """Return the rank that is to blame, if the prediction says it."""
    rank, peer, own = difference.rank, difference.peer, difference.own
    # the rank left its own order
    if difference.kind == "divergence":
        return [rank]
    # without a derived program both sides stay possible
    if own is None:
        return []
    # the rank calls otherwise than its program, or left the call out
    if differences(difference.call, own) or difference.is_left_out:
        return [rank]
    return [] if peer is None else [peer]


def _text(op: Op) -> str:
    """Say what a rank calls."""
    text = f"calls {op.name}"
    if op.name != "barrier":
        text += f" {op.dtype} in={op.num_in} out={op.num_out}"
    return f"{text} at {op.site}" if op.site else text


_LIBRARY = {"nccl": "NCCL", "gloo": "gloo"}


def add_to(run: Run, asked: FaultOptions) -> None:
    """Guard the calls of ``run`` as ``asked``; prints what is wrong on purpose."""
    guard = CallGuard(run.options, asked, run.tier, run.store)
    guard.steps = lambda: run.monitor.iterations
    sys.stderr.write(guard.banner())
    run.on_arguments.append(guard.is_of)
    run.follow_calls(guard)
    run.follow_training(guard)


class CallGuard(LabelledCalls):
    """Makes the calls of one rank, and follows in which train step and phase they are made.

    Attributes:
        rank: The local rank.
        asked: What the flags say.
        local: All local ranks.
        injector: Makes faults of this rank happen.
        steps: Train steps, as the monitor has them.
        expected_calls: What programs expect, if calls are compared with them.
        call_check: Compares calls with programs.
        local_call_check: Compares calls with those of other local ranks.
    """

    def __init__(self, options: Any, asked: FaultOptions, tier: Any, store: Any) -> None:
        super().__init__()
        self.rank = options.rank
        self.asked = asked
        self.local = options.ranks
        own_faults: list[Fault] = []
        virtual_faults: list[Fault] = []
        for fault in asked.faults:
            ranks = fault.ranks(options.world, asked.seed)
            if self.rank in ranks:
                own_faults.append(fault)
            # faults of ranks without a process are planted in their programs
            virtual_ranks = set(ranks) - set(self.local)
            if virtual_ranks and not fault.only_time:
                virtual_faults.append(fault.of(virtual_ranks))
        self._is_first = self.rank == self.local[0]
        # one of the local ranks empties the file that all append to
        if asked.truth is not None and self._is_first:
            asked.truth.write_text("", encoding="utf-8")
        self.injector = Injector(
            own_faults, self.rank, tier.name, tier.live, asked.dry_run, asked.truth
        )
        self.steps: Callable[[], Sequence[Any]] = lambda: ()
        self.expected_calls: ExpectedCalls | None = None
        self.call_check: CallCheck | None = None
        if asked.strict and asked.programs is not None:
            self.expected_calls = ExpectedCalls(
                asked.programs, options.world, self.rank, virtual_faults, asked.seed, asked.dry_run
            )
            self.call_check = CallCheck(self.expected_calls.healthy_peers, self._fail)
        self.local_call_check: LocalCallCheck | None = None
        if asked.strict and store is not None:
            self.local_call_check = LocalCallCheck(store, self.rank, self._fail)
        self._is_inside_call = False
        self._skips_next = False  # whether the next iteration is not a steady one
        self._compared_with_faulty_peers = False
        self._other_arguments: list[str] = []  # that the programs are of other arguments
        self._compared_calls = 0  # with the programs of the world
        self._compared_iterations: list[int] = []
        self._write_virtual_truth()

    def _write_virtual_truth(self) -> None:
        """Write what faults of virtual ranks hit."""
        if self.asked.truth is None or self.expected_calls is None or not self._is_first:
            return
        with self.asked.truth.open("a", encoding="utf-8") as file:
            for hit in self.expected_calls.hits:
                file.write(hit.truth("virtual", self.expected_calls.iteration) + "\n")

    def banner(self) -> str:
        """Say what is wrong on purpose, in a frame that nobody overlooks."""
        lines = [f"FAULT INJECTION: {fault}" for fault in self.asked.faults]
        # a dry run says which calls would be hit
        if self.asked.dry_run:
            if self.expected_calls is not None:
                lines += [f"would fire: {hit}" for hit in self.expected_calls.hits]
            lines.append("dry run: none of them happens")
        if not lines:
            return ""
        width = max(map(len, lines))
        frame = "!" * (width + 6)
        framed = [f"!! {line:{width}} !!" for line in lines]
        return "\n".join([frame, *framed, frame, ""])

    def is_of(self, arguments: str) -> None:
        """Say it if the programs are of other arguments, now and in every verdict.

        It may be the programs that are wrong then, and not a rank.
        """
        self._other_arguments = []
        if self.expected_calls is None:
            return
        of_programs = self.expected_calls.healthy_peers.programs.source.get("arguments")
        if not of_programs:
            return
        differing = job_settings.differences("arguments", of_programs, arguments)
        if differing:
            text = f"{self.asked.programs} was captured with other arguments than this job: "
            text += "; ".join(differing)
            self._other_arguments.append(text)
            sys.stderr.write(f"prism: warning: {text}\n")

    # -- training ---------------------------------------------------------------------------------
    def iteration_started(
        self, number: int, wanted: int, model: Any = None, optimizer: Any = None
    ) -> None:
        """Train step ``number`` (from 1) of ``wanted`` starts."""
        if self.call_check is not None:
            self.call_check.end()
            is_skipped = self._skips_next
            self._skips_next = False
            if not is_skipped and _is_steady(number, wanted):
                self._begin_comparison(self.call_check, number)
        super().iteration_started(number, wanted, model, optimizer)
        self.injector.begin(model, lambda: self.label("forward", "", ""))

    def _begin_comparison(self, call_check: CallCheck, number: int) -> None:
        """Compare the calls of a train step with programs: faulty ones if faults happen in it."""
        assert self.expected_calls is not None
        peers = self.expected_calls.healthy_peers
        # without an iteration of its own a fault happens in each
        if self.expected_calls.iteration in (None, 0, number):
            peers = self.expected_calls.faulty_peers
        self._compared_with_faulty_peers |= peers is self.expected_calls.faulty_peers
        self._compared_iterations.append(number)
        call_check.begin(peers, peers.order() if self.asked.check_order else None)

    def outside_step(self, gathered: bool, begun: bool = False) -> None:
        """An evaluation follows, which programs need not have.

        Nothing is compared until the next train step; nor in that one if its parameters are
        gathered before it.
        """
        if self.call_check is not None:
            self.call_check.open = False
            self._skips_next = gathered

    def finished(self) -> None:
        """Say what was compared and what faults led to.

        Raises:
            UsageError: A fault never fired, also a virtual rank's.
            HangError: A fault fired that the real job would not have survived.
        """
        self.injector.check_fired()
        self._check_survived()
        self._say_survived()
        if self.expected_calls is None:
            return
        if self.expected_calls.faults and not self.asked.dry_run:
            raise self._was_not_met(self.expected_calls)
        sys.stderr.write(
            f"prism: {self._compared_calls:,} calls of rank {self.rank} in "
            f"{len(self._compared_iterations)} iterations were compared with "
            f"{self.asked.programs}\n"
        )

    def _was_not_met(self, expected_calls: ExpectedCalls) -> UsageError:
        """Return the error of faults of virtual ranks that stopped nothing."""
        reason = "it changes no call of this rank"
        fix = "another iter=, or another rank"
        if not self._compared_with_faulty_peers:
            reason = (
                f"{self._compared_text()}: neither the first nor the last, and none whose "
                "parameters an evaluation gathered before it"
            )
            if self._compared_iterations:
                fix = f"iter= one of {format_ranks(self._compared_iterations)}"
        texts = ", ".join(map(str, expected_calls.faults))
        return UsageError(f"{texts} was not met: {reason}", fix=fix)

    def _compared_text(self) -> str:
        """Say which iterations were compared, of how many."""
        compared = "none"
        if self._compared_iterations:
            compared = format_ranks(self._compared_iterations)
        return f"of {self.iteration} iterations {compared} were compared"

    def _check_survived(self) -> None:
        """Raise HangError if the run went on only because virtual ranks answer at once."""
        if self.asked.dry_run:
            # a dry run lets no fault happen
            return
        for fault, call in self.injector.survived.items():
            # without the programs of the world nothing compared the rank's calls
            consequence = "its peers would wait for good"
            fix = "--prism-world DIR (prism capture) stops where the job would, with the verdict"
            # calls are compared: the fault was in an iteration that is not, or changed the order
            # alone
            if self.asked.programs is not None:
                consequence = (
                    f"it fired where calls are not compared ({self._compared_text()}, each up to "
                    "an evaluation that follows it), or changed their order alone"
                )
                fix = "an iter= of these that no evaluation follows"
                if not self.asked.check_order:
                    fix = f"--prism-check-order for the order; else {fix}"
            text = f"{fault} fired at {call} on rank {self.rank}; this run went on only because "
            text += f"virtual ranks answer at once: in the real job {consequence}"
            raise HangError(text, fix=fix)

    def _say_survived(self) -> None:
        """Say what became of training after faults that the job survives."""
        if self.asked.dry_run:
            return
        for fault, number in self.injector.first.items():
            text_of_step: dict[int, str] = {}
            skipped_steps = 0
            for step in self.steps():
                text_of_step[step.number] = _step_text(step)
                skipped_steps += step.skipped
            step_count = len(text_of_step)
            # the step in which it fired, and the last one
            shown_steps = sorted({number, step_count} & text_of_step.keys())
            outcomes = [f"in step {shown} {text_of_step[shown]}" for shown in shown_steps]
            sys.stderr.write(
                f"prism: {fault} fired on rank {self.rank}, and the job went on: {skipped_steps} "
                f"of {step_count} steps skipped; {'; '.join(outcomes)}\n"
            )

    # -- calls ------------------------------------------------------------------------------------
    def record(
        self, group: Any, op: str, answer: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Make the call, after faults and checks."""
        is_before_training = self.iteration == 0 and self.local_call_check is None
        # start-up, and calls that another call makes, pass unchanged
        if self._is_inside_call or is_before_training:
            self.injector.sequence[group.desc, op in ("send", "recv")] += 1
            self.injector.groups.setdefault(group.desc, group)
            return self.through(group, op, answer, args, kwargs)
        site = self.sites.find(sys._getframe(2), foreign=True)

        def make(made_op: str, made_answer: Callable[..., Any]) -> Callable[..., Any]:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                self._check(group, made_op, args, kwargs, site)
                was_inside = self._is_inside_call
                # a call that stands for another one may make calls itself
                self._is_inside_call = was_inside or made_op != op
                try:
                    return self.through(group, made_op, made_answer, args, kwargs)
                finally:
                    self._is_inside_call = was_inside

            return call

        label = self.label(op, group.desc, site)
        return self.injector.record(group, op, make, answer, args, kwargs, label)

    def _check(self, group: Any, op: str, args: Sequence[Any], kwargs: Any, site: str) -> None:
        """Compare a call with programs, and with those of other local ranks."""
        if self.call_check is None and self.local_call_check is None:
            return
        fields: dict[str, Any] = dict(details(group, op, args, kwargs))
        fields.pop("shape", None)
        call = Op(op, group=group.desc, site=site, **fields)
        if self.call_check is not None and self.call_check.open:
            self._compare_with_programs(self.call_check, group, call)
        local_positions = {
            rank: group.ranks.index(rank) for rank in self.local if rank in group.ranks
        }
        # several local ranks of the group compare with each other; messages have one peer
        if self.local_call_check is None or len(local_positions) < 2 or op in ("send", "recv"):
            return
        self._is_inside_call = True
        try:
            ranks = ",".join(map(str, sorted(local_positions)))
            self.local_call_check.check(call, f"{group.desc}:{ranks}", local_positions, site)
        finally:
            self._is_inside_call = False

    def _compare_with_programs(self, call_check: CallCheck, group: PrismGroup, call: Op) -> None:
        """Compare a call with what programs expect."""
        assert self.expected_calls is not None
        self._compared_calls += 1
        fifo = _fifo(call)
        if call_check.peers is self.expected_calls.faulty_peers and group.size() > 1:
            self.expected_calls.standstill((*fifo, call_check.counts[fifo]))
        call_check.check(call, group.rank(), group.size())

    def _outcome(self, call: Op, theirs: Op | None) -> str:
        """Say what the library of the policy does with two calls that differ; strict: stops."""
        if self.asked.policy == "gloo":
            is_root: bool | None = None
            if self.expected_calls is not None and call.name == "broadcast":
                position = self.expected_calls.healthy_peers.position(call.group, self.rank)
                is_root = position == call.root
            return gloo_does(call, theirs, is_root)
        passes = self.asked.policy == "nccl" and nccl_lets_through(call, theirs)
        return "passes" if passes else "hangs"

    def _fail(
        self,
        kind: str,
        call: Op,
        number: int,
        theirs: Op | None,
        differing: Sequence[str],
        peer: int | None = None,
        own: Op | None = None,
    ) -> None:
        """Raise the verdict on a call that does not fit, unless the library lets it through."""
        texts = list(differing)
        # but for calls that its own program lacks, the library may let a difference pass
        if kind != "divergence":
            outcome = self._outcome(call, theirs)
            if outcome == "passes":
                sys.stderr.write(
                    f"prism: {_LIBRARY[self.asked.policy]} would not notice: {call.name} "
                    f"#{number + 1} of {call.group}, rank {self.rank} against rank {peer}: "
                    f"{'; '.join(texts)}; the data is wrong now\n"
                )
                return
            if self.asked.policy == "gloo":
                texts.append(f"gloo {outcome}")
            # what this rank's own program has there
            if self.expected_calls is not None and call.name not in ("send", "recv"):
                own_calls = self.expected_calls.healthy_peers.own(call.group)
                own = own_calls[number] if number < len(own_calls) else None
        # a program of other arguments may be the reason
        if texts:
            texts += self._other_arguments
        stack = frames()
        # where the rank stands, unless the comparison has said so
        if stack and not any("stands at" in text for text in texts):
            texts.append(f"rank {self.rank} stands at")
            texts += [f"  {frame}" for frame in stack]
        raise disagreement(
            CallDifference(self.rank, self.iteration, kind, call, number, theirs, texts, peer, own)
        )


def _is_steady(number: int, count: int) -> bool:
    """Tell whether a train step is one of those that programs have.

    The first and the last of a long job are none.
    """
    if count > 2:
        return 1 < number < count
    return number == count


def _step_text(step: Any) -> str:
    """Say what came of a train step."""
    losses = ", ".join(f"{name} {value:.6g}" for name, value in step.losses.items())
    norm = "unknown" if step.grad_norm is None else f"{step.grad_norm:.6g}"
    return f"{losses or 'no loss here'}, gradient norm {norm}"
