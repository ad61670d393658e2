"""The guard between a local rank and its groups: plants faults, checks calls against programs.

The guard is the first of the world's listeners and gets every call before a recorder does; without
one of the flags there is no guard, and the calls do not know of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core import job_settings
from megatron_prism.core.errors import HangError, UsageError
from megatron_prism.core.fault_plan import Fault
from megatron_prism.core.ops import IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.core.program import Programs
from megatron_prism.core.slices import open_programs
from megatron_prism.core.world import World, format_ranks
from megatron_prism.features.faults.fault_injector import Injector
from megatron_prism.features.faults.options import FaultOptions
from megatron_prism.runtime.call_check import (
    CallCheck,
    LocalCallCheck,
    frames,
    gloo_does,
    nccl_lets_through,
)
from megatron_prism.runtime.listeners import LabelledCalls
from megatron_prism.runtime.recorder.recorder import details

if TYPE_CHECKING:
    from megatron_prism.emulate.session import Run
    from megatron_prism.features.hang.planting import FaultedCall
    from megatron_prism.graph.stall import StalledJob

_MOST = 8_000_000  # ops of all ranks that are run to a standstill before the job


def _key(op: Op) -> tuple[str, str, int]:
    """The FIFO in which a call is: its group, "" or send or recv, the peer."""
    pair = op.name in ("send", "recv")
    return op.group, op.name if pair else "", op.peer if pair else 0


class ProgramPeers:
    """What ``programs`` say of the groups of ``rank``."""

    def __init__(self, programs: Programs, rank: int) -> None:
        from megatron_prism.graph.classes import memberships

        self.programs, self.rank = programs, rank
        self.groups = memberships(programs)
        for name in ("_of_program", "expected", "collectives", "_counterparts"):  # asked again
            setattr(self, name, functools.cache(getattr(self, name)))

    def _members(self, desc: str) -> list[int]:
        return self.groups[desc].group(self.rank).tolist() if desc in self.groups else []

    def _ops(self, rank: int, desc: str, pair: bool) -> list[Op]:
        return self._of_program(int(self.programs.program_of[rank]), desc, pair)

    def _of_program(self, number: int, desc: str, pair: bool) -> list[Op]:
        program, wanted = self.programs.programs[number], IS_PAIR if pair else IS_COLLECTIVE
        there = program.groups().get(desc, ())
        return [program[int(i)] for i in there if wanted[program.ops["name"][i]]]

    def own(self, desc: str) -> list[Op]:
        """The collectives of the local rank itself."""
        return self._ops(self.rank, desc, False)

    def order(self) -> list[Op]:
        """All calls of the local rank, as it issues them."""
        return [op for op in self.programs.of(self.rank) if op.group]

    def expected(self) -> dict[tuple[str, str, int], list[Op]]:
        """(group, "" or send or recv, peer) -> what the local rank calls there in an iteration."""
        found: dict[tuple[str, str, int], list[Op]] = {}
        for op in self.order():
            if len(self._members(op.group)) > 1:
                found.setdefault(_key(op), []).append(op)
        return found

    def collectives(self, desc: str) -> list[tuple[int, int, list[Op]]]:
        """(a member, how many call like it, its collectives) for all other members."""
        by_program: dict[int, list[int]] = {}
        for rank in self._members(desc):
            if rank != self.rank:
                by_program.setdefault(int(self.programs.program_of[rank]), []).append(rank)
        alike = by_program.values()
        return [(ranks[0], len(ranks), self._ops(ranks[0], desc, False)) for ranks in alike]

    def position(self, desc: str, rank: int) -> int:
        """Group rank of ``rank``."""
        return int(self.groups[desc].position[rank])

    def messages(self, desc: str, offset: int, name: str) -> tuple[int, list[Op]]:
        """(the rank ``offset`` places further, its counterparts of our ``name``)."""
        members = self._members(desc)
        if not members:
            return -1, []
        peer = members[(self.position(desc, self.rank) + offset) % len(members)]
        return peer, self._counterparts(desc, peer, "recv" if name == "send" else "send")

    def _counterparts(self, desc: str, peer: int, name: str) -> list[Op]:
        """Messages ``name`` of ``peer`` with the local rank."""
        size, mine = len(self._members(desc)), self.position(desc, self.rank)
        theirs = self.position(desc, peer)
        every = self._ops(peer, desc, True)
        return [op for op in every if op.name == name and (theirs + op.peer) % size == mine]


class ExpectedCalls:
    """Healthy peers, and those of the plan with the call at which its world stands still.

    faults : those of virtual ranks;  iteration : in which they happen (None: the first checked);
    dry : they are planted, so that one knows what they would hit, and peers stay healthy
    """

    def __init__(
        self, path: str | Path, world: World, rank: int, faults: Sequence[Fault], seed: int,
        dry: bool = False,
    ) -> None:  # fmt: skip
        programs = open_programs(path)
        if not programs.world.same_places(world):
            size, same = programs.world.size, "capture the same job"
            fix = same if size == world.size else f"--prism-world-size {size}, or {same}"
            what = f"--prism-world {path} is of {programs.world}, this job is {world}"
            raise UsageError(what, fix=fix)
        self.healthy = self.faulty = ProgramPeers(programs, rank)
        self.rank, self.faults = rank, tuple(faults)
        numbers = {f.select.iteration for f in faults if f.select.iteration is not None}
        if len(numbers) > 1:
            raise UsageError(f"faults of virtual ranks in iterations {sorted(numbers)}: their "
                             "programs are planted once", fix="the same iter= for all")  # fmt: skip
        self.iteration = min(numbers, default=None)
        self.never: tuple[str, str, int, int] | None = None  # this rank's first call without an end
        self.state: StalledJob | None = None
        self.hits: tuple[FaultedCall, ...] = ()  # what faults of virtual ranks hit
        if faults:
            self._plant(programs, seed, dry)

    def _plant(self, programs: Programs, seed: int, dry: bool) -> None:
        from megatron_prism.features.hang import planting as faults
        from megatron_prism.graph import stall

        self.planted = faults.plant(programs, self.faults, seed)
        self.hits = self.planted.hits
        if dry:
            return
        self.faulty = ProgramPeers(self.planted.programs, self.rank)
        lengths = [len(program) for program in self.planted.programs.programs]
        if sum(lengths[i] for i in self.planted.programs.program_of) > _MOST:
            return
        state = stall.run_until_stalled(self.planted.programs, self.planted.faults)
        if state.finished:
            return
        self.state = state
        program = self.planted.programs.of(self.rank)
        waits = (
            (index, op)
            for index, op in enumerate(program)
            if (op.group or op.name == "host_wait") and not state.done[self.rank][index]
        )
        index, first = next(waits, (0, None))
        if first is not None and first.group:
            self.never = (*_key(first), int(program.sequence[index]))

    def standstill(self, key: tuple[str, str, int, int]) -> None:
        """HangError if the call ``key`` is the first of this rank's that never ends."""
        if key == self.never and self.state is not None:
            from megatron_prism.features.hang import diagnose

            found = diagnose.diagnose_stall(self.state, self.healthy.programs)
            raise HangError(f"nobody can go on: rank {self.rank} stands in the first call that "
                            f"never ends\n{found}")  # fmt: skip


def disagreement(
    rank: int, iteration: int, kind: str, call: Op, number: int, theirs: Op | None,
    found: Sequence[str], peer: int | None, own: Op | None,
) -> HangError:  # fmt: skip
    """The verdict on a call that does not fit; the prediction votes.

    own : what this rank's derived program has there; without it nobody is named
    """
    from megatron_prism.features.hang.verdict import Culprit, Diagnosis, Waiting
    from megatron_prism.runtime.call_check import differences

    here = f"{call.name} #{number + 1} of {call.group}"
    if kind == "divergence":
        here = f"{call.name} of {call.group}, call {number + 1} of the iteration"
    evidence = [f"iteration {iteration}, rank {rank} {_text(call)}"]
    if peer is not None and theirs is not None:
        evidence.append(f"rank {peer} {_text(theirs)}")
    evidence += list(found)
    suspects: list[int] = []
    if kind == "divergence":
        suspects = [rank]
    elif own is not None:
        mine = differences(call, own) or kind == "missing" and theirs is None and peer is None
        evidence.append("the derived program of this rank "
                        + ("calls otherwise" if mine else "calls the same"))  # fmt: skip
        suspects = [rank] if mine else [peer] if peer is not None else []
    if kind == "missing":  # only one of two makes it
        kind = "extra call" if suspects == [rank] and peer is not None else "skipped call"
    culprits = tuple(Culprit(r, kind, found[0] if found else kind) for r in suspects)
    victims = tuple(Waiting(r, (), call.name, call.group, number + 1)
                    for r in (rank, peer) if r is not None and r not in suspects)  # fmt: skip
    verdict = Diagnosis("mismatch", culprits, victims, call.group, call.name, number + 1,
                        "likely" if suspects else "possible", tuple(evidence))  # fmt: skip
    who = f"rank {format_ranks(suspects)} differs" if suspects else "who is wrong is undetermined"
    return HangError(f"{here}, {kind}: {who}\n{verdict}",
                     fix="--prism-mismatch off goes on, as far as it can")  # fmt: skip


def _text(op: Op) -> str:
    size = "" if op.name == "barrier" else f" {op.dtype} in={op.num_in} out={op.num_out}"
    return f"calls {op.name}{size}" + (f" at {op.site}" if op.site else "")


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
    """Makes the calls of one rank, and follows in which train step and phase they are made."""

    def __init__(self, options: Any, asked: FaultOptions, tier: Any, store: Any) -> None:
        super().__init__()
        self.rank, self.asked, self.local = options.rank, asked, options.ranks
        seeds = [(f, f.ranks(options.world, asked.seed)) for f in asked.faults]
        mine = [f for f, ranks in seeds if self.rank in ranks]
        virtual = [f.of(rest) for f, ranks in seeds if (rest := set(ranks) - set(self.local))
                   and not f.only_time]  # fmt: skip
        if asked.truth is not None and self.rank == self.local[0]:
            asked.truth.write_text("", encoding="utf-8")
        self.injector = Injector(mine, self.rank, tier.name, tier.live, asked.dry_run, asked.truth)
        self.steps: Callable[[], Sequence[Any]] = lambda: ()  # train steps, as the monitor has them
        self.strict = None
        self.call_check: CallCheck | None = None
        if asked.strict and asked.programs is not None:
            self.strict = ExpectedCalls(
                asked.programs, options.world, self.rank, virtual, asked.seed, asked.dry_run
            )
            self.call_check = CallCheck(self.strict.healthy, self._fail)
        self.neighbours = None
        if asked.strict and store is not None:
            self.neighbours = LocalCallCheck(store, self.rank, self._fail)
        self._inside = False
        self._skip = False  # whether the next iteration is not a steady one
        self._checked_faulty = False
        self._other: list[str] = []  # that the programs are of other arguments
        self._compared = 0  # calls, with the programs of the world
        self._begun: list[int] = []  # iterations of which calls are compared
        if asked.truth is not None and self.strict is not None and self.rank == self.local[0]:
            with asked.truth.open("a", encoding="utf-8") as file:
                lines = (hit.truth("virtual", self.strict.iteration) for hit in self.strict.hits)
                file.writelines(line + "\n" for line in lines)

    def banner(self) -> str:
        """What is wrong on purpose, in a frame that nobody overlooks."""
        lines = [f"FAULT INJECTION: {f}" for f in self.asked.faults]
        if self.asked.dry_run:
            lines += [f"would fire: {hit}" for hit in (self.strict.hits if self.strict else ())]
            lines.append("dry run: none of them happens")
        if not lines:
            return ""
        width = max(map(len, lines))
        frame = "!" * (width + 6)
        return "\n".join([frame, *(f"!! {line:{width}} !!" for line in lines), frame, ""])

    def is_of(self, arguments: str) -> None:
        """Say it if the programs are of other arguments, now and in every verdict: then it may be
        the programs that are wrong, and not a rank.
        """
        there = self.strict and self.strict.healthy.programs.source.get("arguments")
        differ = job_settings.differences("arguments", there, arguments) if there else []
        what = f"{self.asked.programs} was captured with other arguments than this job"
        self._other = [f"{what}: {'; '.join(differ)}"] if differ else []
        for line in self._other:
            sys.stderr.write(f"prism: warning: {line}\n")

    # -- training ---------------------------------------------------------------------------------
    def iteration_started(
        self, number: int, wanted: int, model: Any = None, optimizer: Any = None
    ) -> None:
        """Train step ``number`` (from 1) of ``wanted`` starts.

        Programs are of a steady iteration: the first and the last of a long job are not compared.
        """
        if self.call_check is not None:
            self.call_check.end()
            assert self.strict is not None
            skip, self._skip = self._skip, False
            if not skip and ((1 < number < wanted) if wanted > 2 else number == wanted):
                hit = self.strict.iteration or number
                peers = self.strict.faulty if hit == number else self.strict.healthy
                self._checked_faulty |= peers is self.strict.faulty
                self._begun.append(number)
                self.call_check.begin(peers, peers.order() if self.asked.check_order else None)
        super().iteration_started(number, wanted, model, optimizer)
        self.injector.begin(model, lambda: self.label("forward", "", ""))

    def outside_step(self, gathered: bool, begun: bool = False) -> None:
        """An evaluation follows, which programs need not have: nothing is compared until the next
        train step; nor in that one if its parameters are gathered before it.
        """
        if self.call_check is not None:
            self.call_check.open = False
            self._skip = gathered

    def finished(self) -> None:
        """A fault that never fired is an error, also a virtual rank's, and one that the real job
        would not have survived; says what was compared and what faults led to.
        """
        self.injector.check_fired()
        self._survived()
        if self.strict is not None and self.strict.faults and not self.asked.dry_run:
            texts = ", ".join(map(str, self.strict.faults))
            why, fix = "it changes no call of this rank", "another iter=, or another rank"
            if not self._checked_faulty:
                why = (
                    f"{self._past()}: neither the first nor the last, and none whose parameters "
                    "an evaluation gathered before it"
                )
                fix = f"iter= one of {format_ranks(self._begun)}" if self._begun else fix
            raise UsageError(f"{texts} was not met: {why}", fix=fix)
        if self.strict is not None:
            sys.stderr.write(
                f"prism: {self._compared:,} calls of rank {self.rank} in {len(self._begun)} "
                f"iterations were compared with {self.asked.programs}\n"
            )

    def _past(self) -> str:
        """Which iterations were compared, of how many."""
        these = format_ranks(self._begun) if self._begun else "none"
        return f"of {self.iteration} iterations {these} were compared"

    def _survived(self) -> None:
        """Nobody shall take a run for a pass because virtual ranks answer at once."""
        if self.asked.dry_run:
            return
        for fault, call in self.injector.survived.items():
            others = "its peers would wait for good" if self.asked.programs is None else (
                f"it fired where calls are not compared ({self._past()}, each up to an evaluation "
                "that follows it), or changed their order alone")  # fmt: skip
            fix = "--prism-world DIR (prism capture) stops where the job would, with the verdict"
            if self.asked.programs is not None:
                fix = "an iter= of these that no evaluation follows"
                if not self.asked.check_order:
                    fix = f"--prism-check-order for the order; else {fix}"
            what = f"{fault} fired at {call} on rank {self.rank}; this run went on only because "
            what += f"virtual ranks answer at once: in the real job {others}"
            raise HangError(what, fix=fix)
        for fault, number in self.injector.first.items():
            steps = {step.number: _step_text(step) for step in self.steps()}
            skipped = sum(step.skipped for step in self.steps())
            then = [f"in step {n} {steps[n]}" for n in sorted({number, len(steps)} & steps.keys())]
            sys.stderr.write(
                f"prism: {fault} fired on rank {self.rank}, and the job went on: {skipped} of "
                f"{len(steps)} steps skipped; {'; '.join(then)}\n"
            )

    # -- calls ------------------------------------------------------------------------------------
    def record(
        self, group: Any, op: str, answer: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Make the call, after faults and checks."""
        if self._inside or self.iteration == 0 and self.neighbours is None:
            self.injector.sequence[group.desc, op in ("send", "recv")] += 1
            self.injector.groups.setdefault(group.desc, group)
            return self.through(group, op, answer, args, kwargs)
        site = self.sites.find(sys._getframe(2), foreign=True)

        def make(op: str, answer: Callable[..., Any]) -> Callable[..., Any]:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                self._check(group, op, args, kwargs, site)
                before, self._inside = self._inside, self._inside or op != name
                try:
                    return self.through(group, op, answer, args, kwargs)
                finally:
                    self._inside = before

            return call

        name, call = op, self.label(op, group.desc, site)
        return self.injector.record(group, op, make, answer, args, kwargs, call)

    def _check(self, group: Any, op: str, args: Sequence[Any], kwargs: Any, site: str) -> None:
        if self.call_check is None and self.neighbours is None:
            return
        fields: dict[str, Any] = {
            k: v for k, v in details(group, op, args, kwargs).items() if k != "shape"
        }
        call = Op(op, group=group.desc, site=site, **fields)
        if self.call_check is not None and self.call_check.open:
            assert self.strict is not None
            self._compared += 1
            fifo = _key(call)
            if self.call_check.peers is self.strict.faulty and group.size() > 1:
                self.strict.standstill((*fifo, self.call_check.counts[fifo]))
            self.call_check.check(call, group.rank(), group.size())
        local = {r: group.ranks.index(r) for r in self.local if r in group.ranks}
        if self.neighbours is not None and len(local) > 1 and op not in ("send", "recv"):
            self._inside = True
            try:
                key = f"{group.desc}:{','.join(map(str, sorted(local)))}"
                self.neighbours.check(call, key, local, site)
            finally:
                self._inside = False

    def _does(self, call: Op, theirs: Op | None) -> str:
        """What the library of the policy does with two calls that differ; strict: stops."""
        if self.asked.policy == "gloo":
            sends = None
            if self.strict is not None and call.name == "broadcast":
                sends = self.strict.healthy.position(call.group, self.rank) == call.root
            return gloo_does(call, theirs, sends)
        passes = self.asked.policy == "nccl" and nccl_lets_through(call, theirs)
        return "passes" if passes else "hangs"

    def _fail(
        self, kind: str, call: Op, number: int, theirs: Op | None, found: Sequence[str],
        peer: int | None = None, own: Op | None = None,
    ) -> None:  # fmt: skip
        if kind != "divergence":
            does = self._does(call, theirs)
            if does == "passes":
                sys.stderr.write(
                    f"prism: {_LIBRARY[self.asked.policy]} would not notice: {call.name} "
                    f"#{number + 1} of {call.group}, rank {self.rank} against rank {peer}: "
                    f"{'; '.join(found)}; the data is wrong now\n"
                )
                return
            found = [*found, *([f"gloo {does}"] if self.asked.policy == "gloo" else [])]
        if self.strict is not None and kind != "divergence" and call.name not in ("send", "recv"):
            fifo = self.strict.healthy.own(call.group)
            own = fifo[number] if number < len(fifo) else None
        found = [*found, *self._other] if found else found
        stack = [f"rank {self.rank} stands at", *(f"  {frame}" for frame in frames())]
        if len(stack) > 1 and not any("stands at" in line for line in found):
            found = [*found, *stack]
        raise disagreement(self.rank, self.iteration, kind, call, number, theirs, found, peer, own)


def _step_text(step: Any) -> str:
    losses = ", ".join(f"{name} {value:.6g}" for name, value in step.losses.items())
    norm = "unknown" if step.grad_norm is None else f"{step.grad_norm:.6g}"
    return f"{losses or 'no loss here'}, gradient norm {norm}"
