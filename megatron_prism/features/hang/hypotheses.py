"""Hold dumps and their verdict against the job's programs: every hypothesis is simulated.

In : a DumpSet, the verdict on it, and the job's Programs.  Out: the Diagnosis, with a culprit where
nobody was named and all hypotheses that fit are one rank's, and ``Confirmation``: where every rank
stood, and whether what the verdict says leads to these dumps.

A hypothesis is one rank and one thing that went wrong with it: a host or a device that stands
still, a call that differs, was left out, made twice or changed places.  It fits if afterwards every
rank has the outstanding calls of its dump, and the counters inside every group differ by as much.
Absolute counters say nothing where captures do not say how many calls came before their iteration,
but ranks of one program made as many.  Several ranks fit, or none: the verdict stays as it was,
with them in its evidence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import IS_COLLECTIVE, IS_NCCL, NAMES, Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.features.hang.alignment import Alignment, Place, as_dumped, key, recorded, seen
from megatron_prism.features.hang.calls import Entry
from megatron_prism.features.hang.dumps import DumpSet
from megatron_prism.features.hang.mismatch import find_mismatches
from megatron_prism.features.hang.planting import exchanged, twice, with_ops, without
from megatron_prism.features.hang.siblings import (
    MessageBatch,
    MessageStep,
    Way,
    batches_of,
    kind_of_change,
    way_text,
)
from megatron_prism.features.hang.state import NOT_COME, NOT_POSTED, JobState, call_text
from megatron_prism.features.hang.verdict import Culprit, Diagnosis, Waiting
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships

_MAX_OPS_RUN = 12_000_000  # for all hypotheses: about a minute
_MAX_SUSPECTS = 32


@dataclass(frozen=True)
class _Hypothesis:
    """What may have gone wrong with one rank.

    Attributes:
        rank: The rank.
        kind: As in Culprit.
        text: What it does, in words.
        index: The op of its program at which it goes wrong.
        ops: Its calls then; None if they are those of its program.
        fault: What stops it there; None if nothing does.
    """

    rank: int
    kind: str
    text: str
    index: int = -1
    ops: Sequence[Op] | None = None
    fault: stall.RankFault | None = None


@dataclass(frozen=True)
class _Outcome:
    """What hypotheses lead to.

    Attributes:
        same: Ranks that then have the outstanding calls of their dumps.
        issued: Rank -> number of calls of its iteration.
        counts: (Group, rank) -> number of collectives.
        complete: Whether all ranks are the same and the counters of groups differ by as much.
    """

    same: frozenset[int]
    issued: dict[int, int]
    counts: dict[tuple[str, int], int]
    complete: bool


@dataclass(frozen=True)
class _Trial:
    """Hypotheses that were tried together, and what they led to."""

    hypotheses: tuple[_Hypothesis, ...]
    outcome: _Outcome


@dataclass(frozen=True)
class _Fit:
    """A hypothesis that leads to the dumps.

    Attributes:
        hypothesis: The hypothesis.
        disagreement: Number of counters that it does not explain.
    """

    hypothesis: _Hypothesis
    disagreement: int


class _PlannedCall(NamedTuple):
    """A call of a program, as a dump would have it.

    Attributes:
        op_index: Its op.
        batch: What is issued in one batch ends in one.
        call: What is called.
    """

    op_index: int
    batch: int
    call: tuple[object, ...]


class _SinceCapture(NamedTuple):
    """Calls of a group since the iteration that was captured began.

    Attributes:
        desc: Description of the group.
        calls: Number of calls of a rank.
        calls_of_iteration: Number of calls in an iteration.
    """

    desc: str
    calls: int
    calls_of_iteration: int


@dataclass(frozen=True)
class Confirmation:
    """A verdict that was held against the programs.

    Attributes:
        places: Per rank.
        confirmed: Whether the verdict fits; None where nothing could be driven.
        lines: What was found, in words.
        stops: Culprit -> the op of its program at which it went wrong, where that is known.
    """

    places: tuple[Place, ...]
    confirmed: bool | None
    lines: tuple[str, ...]
    stops: dict[int, int] = field(default_factory=dict)


class _Edit(NamedTuple):
    """A change of a program.

    Attributes:
        kind: As in Culprit.
        text: What the rank then does, in words.
        op_index: The op at which it does it.
        ops: Its calls then.
    """

    kind: str
    text: str
    op_index: int
    ops: Sequence[Op]


def explain(observed: DumpSet, verdict: Diagnosis, programs: Programs) -> Diagnosis:
    """Return the verdict, with a culprit if the programs leave one choice."""
    if verdict.culprits or verdict.verdict == "healthy":
        return verdict
    state = JobState(observed)
    if state.missing or max(observed.dumps) >= programs.world.size:
        return verdict
    explainer = _Explainer(state, programs)
    if not explainer.healthy:
        return verdict

    # what was recorded of messages is compared with the programs, without a simulation
    hypotheses = list(explainer.messages_otherwise())
    if len({hypothesis.rank for hypothesis in hypotheses}) == 1:
        text = "all other ranks posted the messages of their programs, in their order"
        return explainer.named(verdict, hypotheses[0], text)
    return explainer.verdict(verdict)


def confirm_verdict(observed: DumpSet, verdict: Diagnosis, programs: Programs) -> Confirmation:
    """Lay the dumps over the programs, and try the verdict on them.

    Raises:
        UsageError: The dumps are of a larger world.
    """
    last = max(observed.dumps)
    if last >= programs.world.size:
        raise UsageError(
            f"rank {last} left a dump, and the programs are of {programs.world}",
            fix="name the programs of the same job",
        )
    return _Explainer(JobState(observed), programs).confirmation(verdict)


_VERDICTS = {"device stuck": "device stuck", "order": "order"}  # of kinds; else a mismatch


class _Explainer:
    """The programs of a job, run with hypotheses, and what its dumps say.

    Attributes:
        state: The job.
        programs: Its programs.
        overlay: The dumps over the programs.
        groups: Description -> members.
        wanted: Rank -> its outstanding calls in the order of issue.
        counts: By how many collectives ranks are behind each other.
        healthy: Whether the programs come to their end without a fault.
        calls: Number of a program -> its calls.
        ops: Number of calls of all ranks.
        tried: Number of simulations.
    """

    def __init__(self, state: JobState, programs: Programs) -> None:
        self.state, self.programs = state, programs
        self.overlay = Alignment(state, programs)
        self.groups = memberships(programs)
        self.wanted = {rank: self._outstanding(rank) for rank in state.dumps}
        self.counts = self._relative(state.enqueued)
        self.healthy = stall.run_until_stalled(programs).finished
        self.calls = [self._calls_of(program) for program in programs.programs]
        self.ops = sum(len(self.calls[number]) for number in programs.program_of.tolist())
        self.tried = 0

    @property
    def spent(self) -> bool:
        """Whether enough was run."""
        return self.tried * self.ops > _MAX_OPS_RUN

    def verdict(self, verdict: Diagnosis) -> Diagnosis:
        """Try single faults, and name the rank of those that lead to the dumps, if it is one."""
        # those that agree with the rank's absolute counters come first: if all counters agree with
        # one of them, they agree with none of the others
        likely: list[_Hypothesis] = []
        unlikely: list[_Hypothesis] = []
        for hypothesis in self._hypotheses():
            if self._agrees_with_counters(hypothesis):
                likely.append(hypothesis)
            else:
                unlikely.append(hypothesis)

        fits: list[_Fit] = []
        for number, hypothesis in enumerate([*likely, *unlikely]):
            if number >= len(likely) and any(fit.disagreement == 0 for fit in fits):
                break
            if self.spent:
                text = f"{self.tried} hypotheses were tried on the programs, and there are more"
                return dataclasses.replace(verdict, evidence=(*verdict.evidence, text))
            outcome = self._outcome([hypothesis])
            if outcome.complete:
                fits.append(_Fit(hypothesis, self._disagreement(outcome.counts)))
        text = f"of {self.tried} single faults tried on the programs {len(fits)} leave these dumps"

        # of those that fit, the ones that explain most counters
        lowest = min((fit.disagreement for fit in fits), default=0)
        best_fits = [fit for fit in fits if fit.disagreement == lowest]
        if len(best_fits) < len(fits):
            text += f", {len(best_fits)} of them also by the calls since the job began"

        # all are one rank's
        ranks = sorted({fit.hypothesis.rank for fit in best_fits})
        if len(ranks) == 1:
            text += f", all of rank {ranks[0]}"
            return self.named(verdict, best_fits[0].hypothesis, text)
        if ranks:
            text += f", of ranks {format_ranks(ranks)}"
        return dataclasses.replace(
            verdict,
            evidence=(*verdict.evidence, text),
            candidates=tuple(ranks) or verdict.candidates,
        )

    def named(self, verdict: Diagnosis, hypothesis: _Hypothesis, text: str) -> Diagnosis:
        """Return the verdict with the rank of ``hypothesis`` as culprit, by the reason ``text``."""
        rank = hypothesis.rank
        victims = [victim for victim in verdict.victims if victim.rank != rank]

        # where the verdict named nobody that waits: all that wait
        if not victims:
            for waiting_rank in sorted(self.state.outstanding):
                head = self.state.head(waiting_rank)
                if head is not None and waiting_rank != rank:
                    waits_for = tuple(self.state.waits(waiting_rank)[1])
                    victim = Waiting(waiting_rank, waits_for, head.op, head.desc, head.seq)
                    victims.append(victim)
        return dataclasses.replace(
            verdict,
            verdict=_VERDICTS.get(hypothesis.kind, "mismatch"),
            victims=tuple(victims),
            confidence="likely",
            culprits=(Culprit(rank, hypothesis.kind, hypothesis.text),),
            evidence=(*verdict.evidence, f"rank {rank} {hypothesis.text}", text),
        )

    # -- a verdict on the programs ----------------------------------------------------------------
    def confirmation(self, verdict: Diagnosis) -> Confirmation:
        """Run the world with the culprits as the verdict has them, and without."""
        places = self.overlay.places()
        single_places = sum(place.index >= 0 for place in places.values())
        lines = [
            f"{single_places} of {counted(len(places), 'rank')} have one place in their programs"
        ]
        if self.healthy:
            lines.append("without a fault the programs come to their end")
        else:
            lines.append("the programs hang by themselves: see prism check")

        trials = self._trials(verdict)
        if not trials:
            lines.append("the verdict was not tried on the programs")
            return Confirmation(tuple(places.values()), None, tuple(lines))

        # the best of them
        kind_of_culprit = {culprit.rank: culprit.kind for culprit in verdict.culprits}
        innocent = places.keys() - kind_of_culprit.keys()
        best = max(
            trials,
            key=lambda trial: (trial.outcome.complete, len(trial.outcome.same & innocent)),
        )
        outcome, hypotheses = best.outcome, best.hypotheses
        manner = "stopped there"
        if any(hypothesis.ops for hypothesis in hypotheses):
            manner = "calling what its dump says"
        culprits_text = format_ranks(hypothesis.rank for hypothesis in hypotheses)
        same_count = len(outcome.same & innocent)
        lines.append(
            f"with rank {culprits_text} {manner}, {same_count} of {len(innocent)} "
            "other ranks stand where their dumps say"
        )
        for hypothesis in hypotheses:
            if hypothesis.ops and hypothesis.kind != kind_of_culprit[hypothesis.rank]:
                lines.append(f"rank {hypothesis.rank} then {hypothesis.text}")

        # only one fits: the simulation says where each rank stood
        complete_trials = [trial for trial in trials if trial.outcome.complete]
        if len(complete_trials) == 1 and not self.spent:
            for rank in places:
                if outcome.issued[rank]:
                    places[rank] = self.overlay.place(rank, [outcome.issued[rank] - 1])
        stops = {hypothesis.rank: hypothesis.index for hypothesis in hypotheses}
        return Confirmation(tuple(places.values()), outcome.complete, tuple(lines), stops)

    def _trials(self, verdict: Diagnosis) -> list[_Trial]:
        """Try what the verdict may mean, until two of its meanings lead to the dumps."""
        if not verdict.culprits:
            return []
        meanings = [list(self._of_culprit(culprit, verdict)) for culprit in verdict.culprits]
        trials: list[_Trial] = []
        complete_count = 0
        for hypotheses in itertools.product(*meanings):
            outcome = self._outcome(hypotheses)
            trials.append(_Trial(hypotheses, outcome))
            if outcome.complete:
                complete_count += 1
            if self.spent or complete_count > 1:
                break
        return trials

    def _of_culprit(self, culprit: Culprit, verdict: Diagnosis) -> Iterator[_Hypothesis]:
        """Find what the verdict may mean by what it says of one rank."""
        rank, kind = culprit.rank, culprit.kind
        if kind == "host stuck":
            for step in self.overlay.fits(rank):
                for index in self.overlay.stops(rank, step):
                    fault = stall.RankFault(host=index)
                    yield _Hypothesis(rank, kind, "", index, fault=fault)
        elif kind == "device stuck":
            yield from self._devices(rank)
        elif kind == "missing dump":
            for index in self._awaited(rank, verdict):
                fault = stall.RankFault(host=index, silent=True)
                yield _Hypothesis(rank, kind, "", index, fault=fault)
        else:
            yield from self._of_unlike_calls(culprit, verdict)

    def _of_unlike_calls(self, culprit: Culprit, verdict: Diagnosis) -> Iterator[_Hypothesis]:
        """Find calls that a rank may have made otherwise than its program."""
        rank = culprit.rank
        for hypothesis in self.messages_otherwise():
            if hypothesis.rank == rank and hypothesis.ops:
                yield hypothesis

        # the verdict's call, where it is outstanding
        entries: list[Entry] = []
        for entry in self.state.outstanding.get(rank, ()):
            if not entry.pair and entry.desc == verdict.group and entry.seq == verdict.seq:
                entries.append(entry)
        places = self._awaited(rank, verdict)
        edits: list[_Edit] = []
        for edit in self._edits(rank, list(self.programs.of(rank)), entries):
            if not places or edit.op_index in places:
                edits.append(edit)

        # one of another kind may look like it: a rank that leaves out a call makes the next one
        for edit in sorted(edits, key=lambda edit: edit.kind != culprit.kind):
            yield _Hypothesis(rank, edit.kind, edit.text, edit.op_index, edit.ops)

    def _awaited(self, rank: int, verdict: Diagnosis) -> set[int]:
        """Find the ops of ``rank`` that may be the verdict's call.

        They are counted by the member of its group with fewest places.
        """
        if verdict.group not in self.groups:
            return set()
        program = self.programs.of(rank)
        own_calls: list[int] = []
        for index in program.collectives(verdict.group).tolist():
            if recorded(program[index]):
                own_calls.append(index)

        fewest: set[int] = set()
        members = set(self.groups[verdict.group].group(rank).tolist())
        for member in members & self.state.dumps.keys() - {rank}:
            name = self._group_of(member, verdict.group)
            later_calls = self.state.enqueued.get((name, member), verdict.seq) - verdict.seq
            steps = self.overlay.steps[int(self.programs.program_of[member])]
            places: set[int] = set()
            for step in self.overlay.fits(member):
                count = steps[step][1].get((verdict.group, False), 0) - later_calls
                if 0 < count <= len(own_calls):
                    places.add(own_calls[count - 1])
            if places and (not fewest or len(places) < len(fewest)):
                fewest = places
            if len(fewest) == 1:
                break
        return fewest

    def _group_of(self, rank: int, desc: str) -> str:
        """Return the name of the group of ``rank`` that has that description."""
        for name, group in self.state.groups.items():
            if group.desc == desc and rank in group.ranks:
                return name
        raise LookupError(f"rank {rank} is in no group {desc}")

    def messages_otherwise(self) -> Iterator[_Hypothesis]:
        """Find ranks whose messages, where all are recorded, are not those of their programs."""
        for rank, dump in self.state.dumps.items():
            if not dump.messages:
                continue
            for name, batches in batches_of(self.state, rank).items():
                if name in self.state.groups:
                    yield from self._first_batch_otherwise(rank, name, list(batches.values()))

    def _first_batch_otherwise(
        self, rank: int, name: str, batches: Sequence[MessageBatch]
    ) -> Iterator[_Hypothesis]:
        """Compare the batches of a rank in a group with its program, which repeats.

        Yields:
            One hypothesis, for the first batch that differs; none if all are alike.
        """
        ops = list(self.programs.of(rank))
        planned_batches = _planned_batches(
            ops, self.state.groups[name].desc, len(self.state.groups[name].ranks)
        )
        if not planned_batches:
            return
        for batch, planned in zip(batches, itertools.cycle(planned_batches), strict=False):
            planned_steps = tuple(sorted(planned.values()))
            if batch.steps == planned_steps:
                continue

            # an op of the program for each message: of this batch before those of others
            op_of_step: dict[MessageStep, Op] = {}
            for other_batch in planned_batches:
                for place, step in other_batch.items():
                    op_of_step[step] = dataclasses.replace(ops[place], handle=-1)
            for place, step in planned.items():
                op_of_step[step] = ops[place]

            # in the order in which the program issues such a batch elsewhere
            issued_steps = batch.steps
            for other_batch in planned_batches:
                if tuple(sorted(other_batch.values())) == batch.steps:
                    issued_steps = tuple(other_batch.values())
                    break
            messages = [op_of_step.get(step) for step in issued_steps]
            edited = _with_messages(ops, sorted(planned), messages)
            yield self._break(rank, batch, planned_steps, min(planned), edited)
            return

    def _break(
        self, rank: int, batch: MessageBatch, planned: Way, place: int, ops: list[Op] | None
    ) -> _Hypothesis:
        """Blame a batch of messages that is not the planned one of the program, at op ``place``."""
        kind = kind_of_change(batch.steps, planned)
        text = f"posts {way_text(batch.steps)} in batch #{batch.first.seq}, its program "
        text += way_text(planned)
        microbatches = {op.microbatch for op in self.programs.of(rank) if op.microbatch >= 0}
        if kind == "extra call" and microbatches:
            text += f": it runs more than the {len(microbatches)} microbatches of its program; "
            text += "compare the batch flags of the ranks"
        return _Hypothesis(rank, kind, text, place, ops)

    # -- what the dumps say -----------------------------------------------------------------------
    def _outstanding(self, rank: int) -> list[tuple[object, ...]]:
        """Return the outstanding calls of ``rank`` in the order of issue."""
        calls: list[tuple[object, ...]] = []
        for entry in self.state.outstanding[rank]:
            step = -1
            if entry.pair:
                step = self.state.step(rank, entry)
            calls.append((entry.desc, step, *seen(entry)))
        return calls

    def _relative(self, counts: dict[tuple[str, int], int]) -> dict[object, dict[int, int]]:
        """Return by how many collectives each rank is behind the first.

        Compared are members of a group, and ranks that run one program: they started up alike.
        """
        counts_of_unit: dict[object, dict[int, int]] = defaultdict(dict)
        for (name, rank), count in counts.items():
            if name not in self.state.groups or name in self.state.pairs:
                continue
            issued = max(0, count)  # -1 is none yet, and the first has number 1
            counts_of_unit[name][rank] = issued
            number = int(self.programs.program_of[rank])
            counts_of_unit[self.state.groups[name].desc, number][rank] = issued

        behind: dict[object, dict[int, int]] = {}
        for unit, count_of_rank in counts_of_unit.items():
            first = max(count_of_rank.values())
            behind[unit] = {rank: first - count for rank, count in count_of_rank.items()}
        return behind

    # -- what hypotheses lead to ------------------------------------------------------------------
    def _outcome(self, hypotheses: Sequence[_Hypothesis]) -> _Outcome:
        """Run all ranks until nobody can go on."""
        faults: dict[int, stall.RankFault] = {}
        edited: dict[int, Sequence[Op]] = {}
        for hypothesis in hypotheses:
            if hypothesis.fault is not None:
                faults[hypothesis.rank] = hypothesis.fault
            if hypothesis.ops is not None:
                edited[hypothesis.rank] = hypothesis.ops
        programs = with_ops(self.programs, edited)
        new_calls = [self._calls_of(program) for program in programs.programs[len(self.calls) :]]
        calls = [*self.calls, *new_calls]
        stalled = stall.run_until_stalled(programs, faults)
        self.tried += 1

        ends = list(stalled.issued)
        same: set[int] = set()
        issued: dict[int, int] = {}
        for rank, wanted in self.wanted.items():
            # the oldest calls that did not end are those of its dump
            outstanding = self._outstanding_of(rank, calls[int(programs.program_of[rank])], stalled)
            first_calls = [planned.call for planned in outstanding[: len(wanted)]]
            if first_calls == wanted and (wanted or not outstanding):
                same.add(rank)
                # its host may wait for a copy, which no program shows
                if len(outstanding) > len(wanted):
                    ends[rank] = outstanding[len(wanted)].op_index
            issued_ops = programs.of(rank).ops["name"][: ends[rank]]
            issued[rank] = int(IS_NCCL[issued_ops].sum())
        counts = self._collective_counts(stalled, ends)
        are_all_same = len(same) == len(self.wanted)
        complete = are_all_same and self._relative(counts) == self.counts
        return _Outcome(frozenset(same), issued, counts, complete)

    def _outstanding_of(
        self, rank: int, calls: Sequence[_PlannedCall], stalled: stall.StalledJob
    ) -> list[_PlannedCall]:
        """Return the calls of ``rank`` that did not end, and all of their batches."""
        done, end = stalled.done[rank], stalled.issued[rank]
        waiting_batches: set[int] = set()
        for planned in calls:
            if planned.op_index < end and not done[planned.op_index]:
                waiting_batches.add(planned.batch)

        # calls of a rank with itself are in no dump
        outstanding: list[_PlannedCall] = []
        for planned in calls:
            members = self.groups[str(planned.call[0])].group(rank)
            is_issued = planned.op_index < end
            if is_issued and planned.batch in waiting_batches and len(members) > 1:
                outstanding.append(planned)
        return outstanding

    def _disagreement(self, counts: dict[tuple[str, int], int]) -> int:
        """Count the counters in which the number of iterations is not that of most.

        Only those are looked at of which captures say how many calls came before the iteration that
        they hold.
        """
        iterations: Counter[int] = Counter()
        for rank in dict.fromkeys(rank for _, rank in counts):
            before = self.programs.of(rank).calls_before().get("", 0)
            for name, since in self._since_capture(rank).items():
                earlier_calls = since.calls - counts[name, rank]
                iteration, remainder = divmod(earlier_calls, since.calls_of_iteration)
                if remainder:
                    iterations[-1] += 1
                else:
                    iterations[iteration + before] += 1
        usual_count = max(iterations.values(), default=0)
        return iterations.total() - usual_count

    def _since_capture(self, rank: int) -> dict[str, _SinceCapture]:
        """Return group -> calls since the capture, where it knows how many came before it."""
        calls_before = self.programs.of(rank).calls_before()
        fifos = self.overlay.fifos[int(self.programs.program_of[rank])]
        since: dict[str, _SinceCapture] = {}
        for name in self.state.groups_of[rank]:
            desc = self.state.groups[name].desc
            count = self.state.enqueued.get((name, rank))
            fifo = fifos.get((desc, False))
            if count is None or not fifo or name in self.state.pairs or desc not in calls_before:
                continue
            since[name] = _SinceCapture(desc, max(0, count) - calls_before[desc], len(fifo))
        return since

    def _agrees_with_counters(self, hypothesis: _Hypothesis) -> bool:
        """Tell whether the counters of the rank are those behind one of the calls it then makes.

        Counters say nothing where captures do not know how many calls came before.
        """
        since_of_desc = {
            since.desc: since for since in self._since_capture(hypothesis.rank).values()
        }
        if not since_of_desc:
            return True
        ops: Iterable[Op] = self.programs.of(hypothesis.rank)
        if hypothesis.ops is not None:
            ops = hypothesis.ops

        # the groups of its collectives, in the order of issue; a batch is one
        group_of_launch: dict[tuple[str, int], str] = {}
        for index, op in enumerate(ops):
            if op.group in since_of_desc and recorded(op) and op.name not in ("send", "recv"):
                batch = op.batch
                if batch < 0:
                    batch = -1 - index
                group_of_launch[op.group, batch] = op.group
        order = list(group_of_launch.values())

        # in the iteration that its counters say, or at the end of the one before
        busiest = max(since_of_desc.values(), key=lambda since: since.calls_of_iteration)
        iteration = busiest.calls // busiest.calls_of_iteration
        for whole_iterations in (iteration, iteration - 1):
            remaining: dict[str, int] = {}
            for desc, since in since_of_desc.items():
                remaining[desc] = since.calls - whole_iterations * since.calls_of_iteration
            if min(remaining.values()) < 0:
                continue
            if Counter(order[: sum(remaining.values())]) == Counter(remaining):
                return True
        return False

    def _calls_of(self, ops: Iterable[Op]) -> list[_PlannedCall]:
        """Return the calls of a program that dumps would have."""
        calls: list[_PlannedCall] = []
        for index, op in enumerate(ops):
            if recorded(op):
                batch = op.batch
                if batch < 0:
                    batch = -1 - index
                calls.append(_PlannedCall(index, batch, self._key(op)))
        return calls

    def _key(self, op: Op) -> tuple[object, ...]:
        """Return what is called, with the way of a message, comparable with a dump."""
        if op.name not in ("send", "recv"):
            return (op.group, -1, *key(op))
        return (op.group, op.peer % self._size(op.group), *key(op))

    def _size(self, desc: str) -> int:
        """Return the number of members of groups of a description."""
        start = self.groups[desc].start
        return int(start[1] - start[0])

    def _collective_counts(
        self, stalled: stall.StalledJob, ends: list[int]
    ) -> dict[tuple[str, int], int]:
        """Count the collectives that ranks issued: (group, rank) -> number.

        Args:
            stalled: The job.
            ends: Rank -> number of ops that it issued.
        """
        # ranks of one program that came equally far made the same calls
        counts_of_prefix: dict[tuple[int, int], Counter[str]] = {}
        counts: dict[tuple[str, int], int] = {}
        for name, rank in self.state.enqueued:
            if name not in self.state.groups:
                continue
            prefix = int(stalled.programs.program_of[rank]), ends[rank]
            if prefix not in counts_of_prefix:
                counts_of_prefix[prefix] = _collectives_of(stalled.programs.of(rank), ends[rank])
            counts[name, rank] = counts_of_prefix[prefix][self.state.groups[name].desc]
        return counts

    # -- which hypotheses -------------------------------------------------------------------------
    def _hypotheses(self) -> Iterator[_Hypothesis]:
        """Find single faults of suspects that may lead to the dumps."""
        for rank in self._suspects():
            yield from self._devices(rank)
            entries = self.state.outstanding[rank][:2]
            tried_calls: set[tuple[tuple[object, ...], ...]] = set()
            for edit in self._edits(rank, list(self.programs.of(rank)), entries):
                calls = tuple(self._key(op) for op in edit.ops if recorded(op))
                if calls not in tried_calls and self._may_stand(rank, calls):
                    tried_calls.add(calls)
                    yield _Hypothesis(rank, edit.kind, edit.text, edit.op_index, edit.ops)

    def _may_stand(self, rank: int, calls: tuple[tuple[object, ...], ...]) -> bool:
        """Tell whether the outstanding calls of ``rank`` come in that order in ``calls``."""
        remaining_calls = iter(calls)
        return all(wanted in remaining_calls for wanted in self.wanted[rank])

    def _suspects(self) -> list[int]:
        """Find ranks that may have made the job hang, the likelier ones first.

        These are ranks between which a call differs; ranks that entered a call that nobody leaves;
        both sides of a message that one side did not post.
        """
        state = self.state
        suspects: dict[int, None] = {}
        behind: dict[int, None] = {}
        for mismatch in find_mismatches(state):
            suspects |= dict.fromkeys(mismatch.among)
        for rank in sorted(state.outstanding):
            head = state.head(rank)
            if head is None:
                continue
            reason, awaited = state.waits(rank)

            # it waits for nobody
            if not reason:
                suspects[rank] = None
            elif head.pair and reason == NOT_POSTED:
                suspects |= dict.fromkeys([rank, *awaited])
            elif reason == NOT_COME:
                suspects |= dict.fromkeys(awaited)
            # other reasons say least
            else:
                behind |= dict.fromkeys([rank, *awaited])
        suspects |= behind
        with_dumps = [rank for rank in suspects if rank in state.dumps]
        return with_dumps[:_MAX_SUSPECTS]

    def _devices(self, rank: int) -> Iterator[_Hypothesis]:
        """Let the device of ``rank`` never come to a call at which its dump may stand."""
        if not self.state.outstanding[rank]:
            return
        first_calls = {self.overlay.first_open(rank, step) for step in self.overlay.fits(rank)}
        for index in sorted(first_calls):
            text = f"device never came to op {index}"
            fault = stall.RankFault(device=index)
            yield _Hypothesis(rank, "device stuck", text, index, fault=fault)

    def _edits(self, rank: int, ops: list[Op], entries: Iterable[Entry]) -> Iterator[_Edit]:
        """Change one call of a program.

        It is as the dump has it (of ``entries``), left out, made twice, with the other neighbour,
        or exchanged with the next.  Or the rank has fewer microbatches.
        """
        calls: list[int] = []
        for index, op in enumerate(ops):
            if recorded(op) and len(self.groups[op.group].group(rank)) > 1:
                calls.append(index)
        for entry in entries:
            yield from _as_in_dump(ops, calls, entry)

        yield from _fewer_turns(ops, calls)

        # each call left out, then each made twice, then each exchanged with the next
        for index in calls:
            op = ops[index]
            text = f"left out op {index} of its program, {op.name} of {op.group}"
            yield _Edit("skipped call", text, index, without(ops, {index}))
        for index in calls:
            op = ops[index]
            text = f"makes op {index} of its program twice, {op.name} of {op.group}"
            yield _Edit("extra call", text, index, twice(ops, index))

            # a message; in a group of two, both neighbours are one
            if op.name in ("send", "recv") and 2 * op.peer % self._size(op.group):
                text = f"makes op {index} of its program, {op.name}, with the other neighbour"
                turned = dataclasses.replace(op, peer=-op.peer)
                yield _Edit("order", text, index, [*ops[:index], turned, *ops[index + 1 :]])
        for index, next_index in itertools.pairwise(calls):
            if self._key(ops[index]) != self._key(ops[next_index]):
                yield _order(ops, index, next_index)


def _fewer_turns(ops: list[Op], calls: Sequence[int]) -> Iterator[_Edit]:
    """Leave out the last microbatches, as a loop does whose data ended.

    Where a microbatch makes one call alone, a call that was left out looks the same, so nothing is
    said of turns.
    """
    calls_of_microbatch: dict[int, list[int]] = defaultdict(list)
    for index in calls:
        microbatch = ops[index].microbatch
        if microbatch >= 0:
            calls_of_microbatch[microbatch].append(index)
    turns = sorted(calls_of_microbatch)
    removed_calls: list[int] = []
    for remaining in range(len(turns) - 1, 0, -1):
        last_turn = turns[remaining]
        removed_calls += calls_of_microbatch[last_turn]
        if len(removed_calls) < 2:
            continue
        counts = Counter((ops[index].name, ops[index].group) for index in removed_calls)
        ((name, group), count), *_ = counts.most_common(1)
        text = f"issued {count} {name} of {group} less"
        other_count = len(removed_calls) - count
        if other_count:
            text += f", and {counted(other_count, 'other call')}"
        text += f": its loop over microbatches had {counted(remaining, 'turn')}, "
        text += f"its program has {len(turns)}"
        removed: set[int] = set()
        for index, op in enumerate(ops):
            if op.microbatch >= last_turn:
                removed.add(index)
        yield _Edit("skipped call", text, min(removed_calls), without(ops, removed))


def _collectives_of(program: Program, end: int) -> Counter[str]:
    """Count the collectives among the first ``end`` ops of a program, by description of group."""
    rows = program.ops[:end]
    collectives = rows[(IS_COLLECTIVE & IS_NCCL)[rows["name"]]]
    groups, batches = collectives["group"].tolist(), collectives["batch"].tolist()

    # a batch is one call
    launches: set[tuple[int, ...]] = set()
    for place, (group, batch) in enumerate(zip(groups, batches, strict=True)):
        if batch >= 0:
            launches.add((group, batch))
        else:
            launches.add((group, batch, place))
    return Counter(program.strings[launch[0]] for launch in launches)


def _planned_batches(ops: Sequence[Op], desc: str, size: int) -> list[dict[int, MessageStep]]:
    """Collect the messages of a program in a group of ``size`` ranks, by batch: place -> step."""
    batches: dict[int, dict[int, MessageStep]] = defaultdict(dict)
    for place, op in enumerate(ops):
        if op.name in ("send", "recv") and op.group == desc:
            batch = op.batch
            if batch < 0:
                batch = -1 - place
            batches[batch][place] = MessageStep(op.name, op.peer % size)
    return list(batches.values())


def _with_messages(
    ops: list[Op], places: Sequence[int], messages: Sequence[Op | None]
) -> list[Op] | None:
    """Return ``ops`` with one batch of ``messages`` in place of those at ``places``.

    Returns:
        None if one of the messages is like none of the program.
    """
    posted = [message for message in messages if message is not None]
    if len(posted) < len(messages):
        return None
    batch = ops[places[0]].batch
    if batch < 0:
        batch = 1 + max(op.batch for op in ops)
    new_messages = [dataclasses.replace(op, batch=batch) for op in posted]
    remaining = [op for place, op in enumerate(ops) if place not in places]
    return [*remaining[: places[0]], *new_messages, *remaining[places[0] :]]


def _order(ops: list[Op], earlier: int, later: int) -> _Edit:
    """Exchange two ops."""
    text = f"makes ops {earlier} and {later} of its program the other way round"
    return _Edit("order", text, earlier, exchanged(ops, earlier, later))


def _as_in_dump(ops: list[Op], calls: list[int], entry: Entry) -> Iterator[_Edit]:
    """Make an outstanding call as the dump has it.

    It takes the place of one of its group, or is exchanged with it; a call that the program has
    nowhere is made before any of its calls.
    """
    # the operation of a log's or a counter's call may not be known
    if entry.op not in NAMES:
        return
    calls_of_group: list[int] = []
    for index in calls:
        is_message = ops[index].name in ("send", "recv")
        if ops[index].group == entry.desc and is_message == entry.pair:
            calls_of_group.append(index)

    for place, index in enumerate(calls_of_group):
        op = ops[index]
        if key(op) == seen(entry) or entry.pair and op.name != entry.op:
            continue
        text = f"calls {call_text(entry)} where its program has {op.name} (op {index})"
        edited = [*ops[:index], as_dumped(op, entry), *ops[index + 1 :]]
        yield _Edit(_first_difference(op, entry), text, index, edited)
        for later in calls_of_group[place + 1 :]:
            if key(ops[later]) == seen(entry):
                yield _order(ops, index, later)

    # the program has it nowhere
    is_planned = any(key(ops[index]) == seen(entry) for index in calls_of_group)
    if calls_of_group and not entry.pair and not is_planned:
        like = as_dumped(ops[calls_of_group[0]], entry)
        added = dataclasses.replace(like, handle=-1, batch=-1)
        text = f"calls {call_text(entry)}, which its program has nowhere"
        for index in calls:
            yield _Edit("extra call", text, index, [*ops[:index], added, *ops[index:]])


def _first_difference(op: Op, entry: Entry) -> str:
    """Name the first aspect in which a call of a dump is not that of the program."""
    for place, aspect in enumerate(("operation", "dtype")):
        if key(op)[place] != seen(entry)[place]:
            return aspect
    return "shape"
