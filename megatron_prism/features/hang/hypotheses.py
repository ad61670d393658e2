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

from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import IS_COLLECTIVE, IS_NCCL, NAMES, Op
from megatron_prism.core.program import Programs
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.features.hang.alignment import Alignment, Place, as_dumped, key, recorded, seen
from megatron_prism.features.hang.dumps import DumpSet, Entry
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
from megatron_prism.features.hang.state import JobState, call_text
from megatron_prism.features.hang.verdict import Culprit, Diagnosis, Waiting
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships

_MOST = 12_000_000  # ops that are run for all hypotheses: about a minute
_RANKS = 32  # suspects


@dataclass(frozen=True)
class _Hypothesis:
    """What went wrong with ``rank`` at op ``index`` of its program: ``fault`` stops it there, or
    ``ops`` are its calls then; kind as in Culprit.
    """

    rank: int
    kind: str
    text: str
    index: int = -1
    ops: Sequence[Op] | None = None
    fault: stall.RankFault | None = None


@dataclass(frozen=True)
class _Outcome:
    """What hypotheses lead to: ``same`` are the ranks that then have the outstanding calls of their
    dumps, ``issued`` all ranks' calls, ``counts`` their collectives by (group, rank); complete:
    whether all ranks are the same and the counters of groups differ by as much.
    """

    same: frozenset[int]
    issued: dict[int, int]
    counts: dict[tuple[str, int], int]
    complete: bool


@dataclass(frozen=True)
class Confirmation:
    """places: per rank; confirmed: None where nothing could be driven, else whether it fits.

    stops : culprit -> the op of its program at which it went wrong, where that is known
    """

    places: tuple[Place, ...]
    confirmed: bool | None
    lines: tuple[str, ...]
    stops: dict[int, int] = field(default_factory=dict)


_Edit = tuple[str, str, int, Sequence[Op]]  # kind, what its rank does, at which op, its calls


def explain(found: DumpSet, verdict: Diagnosis, programs: Programs) -> Diagnosis:
    """The verdict, with a culprit if the programs leave one choice."""
    if verdict.culprits or verdict.verdict == "healthy":
        return verdict
    state = JobState(found)
    if state.missing or max(found.dumps) >= programs.world.size:
        return verdict
    explainer = _Explainer(state, programs)
    if not explainer.healthy:
        return verdict
    breaks = list(explainer.messages_otherwise())
    if len({why.rank for why in breaks}) == 1:
        text = "all other ranks posted the messages of their programs, in their order"
        return explainer.named(verdict, breaks[0], text)
    return explainer.verdict(verdict)


def confirm_verdict(found: DumpSet, verdict: Diagnosis, programs: Programs) -> Confirmation:
    """Lay the dumps over the programs, and try the verdict on them.

    UsageError if the dumps are of a larger world.
    """
    last = max(found.dumps)
    if last >= programs.world.size:
        raise UsageError(f"rank {last} left a dump, and the programs are of {programs.world}",
                         fix="name the programs of the same job")  # fmt: skip
    return _Explainer(JobState(found), programs).confirmation(verdict)


class _Explainer:
    def __init__(self, state: JobState, programs: Programs) -> None:
        self.state, self.programs = state, programs
        self.overlay = Alignment(state, programs)
        self.groups = memberships(programs)
        self.wanted = {rank: self._observed(rank) for rank in state.dumps}
        self.counts = self._relative(state.enqueued)
        self.healthy = stall.run_until_stalled(programs).finished
        self.calls = [self._calls_of(p) for p in programs.programs]
        self.ops = sum(len(self.calls[i]) for i in programs.program_of.tolist())
        self.tried = 0

    @property
    def spent(self) -> bool:
        """Whether enough was run."""
        return self.tried * self.ops > _MOST

    def verdict(self, verdict: Diagnosis) -> Diagnosis:
        fits = list[tuple[int, _Hypothesis]]()
        # those that agree with the rank's absolute counters come first: if all counters agree with
        # one of them, they agree with none of the others
        hypotheses = sorted((not self._counted(h), at, h) for at, h in enumerate(
            self._hypotheses()))  # fmt: skip
        for unlike, _, hypothesis in hypotheses:
            if unlike and any(not wrong for wrong, _ in fits):
                break
            if self.spent:
                text = f"{self.tried} hypotheses were tried on the programs, and there are more"
                return dataclasses.replace(verdict, evidence=(*verdict.evidence, text))
            if (after := self._outcome([hypothesis])).complete:
                fits.append((self._disagreement(after.counts), hypothesis))
        text = f"of {self.tried} single faults tried on the programs {len(fits)} leave these dumps"
        least = min((wrong for wrong, _ in fits), default=0)
        if any(wrong > least for wrong, _ in fits):
            fits = [(wrong, h) for wrong, h in fits if wrong == least]
            text += f", {len(fits)} of them also by the calls since the job began"
        ranks = sorted({h.rank for _, h in fits})
        if len(ranks) != 1:
            more = f", of ranks {format_ranks(ranks)}" if ranks else ""
            return dataclasses.replace(verdict, evidence=(*verdict.evidence, text + more),
                                       candidates=tuple(ranks) or verdict.candidates)  # fmt: skip
        return self.named(verdict, fits[0][1], f"{text}, all of rank {ranks[0]}")

    def named(self, verdict: Diagnosis, why: _Hypothesis, text: str) -> Diagnosis:
        victims = tuple(v for v in verdict.victims if v.rank != why.rank) or tuple(
            Waiting(r, tuple(self.state.waits(r)[1]), e.op, e.desc, e.seq)
            for r in sorted(self.state.outstanding)
            if (e := self.state.head(r)) is not None and r != why.rank
        )
        names = {"device stuck": "device stuck", "order": "order"}
        return dataclasses.replace(
            verdict, verdict=names.get(why.kind, "mismatch"), victims=victims, confidence="likely",
            culprits=(Culprit(why.rank, why.kind, why.text),),
            evidence=(*verdict.evidence, f"rank {why.rank} {why.text}", text),
        )  # fmt: skip

    # -- a verdict on the programs ----------------------------------------------------------------
    def confirmation(self, verdict: Diagnosis) -> Confirmation:
        """Run the world with the culprits as the verdict has them, and without."""
        places = self.overlay.places()
        one = sum(place.index >= 0 for place in places.values())
        lines = [f"{one} of {counted(len(places), 'rank')} have one place in their programs",
                 "without a fault the programs come to their end" if self.healthy
                 else "the programs hang by themselves: see prism check"]  # fmt: skip
        others = set(places) - {culprit.rank for culprit in verdict.culprits}
        whys = [list(self._of_culprit(culprit, verdict)) for culprit in verdict.culprits]
        tried = list[tuple[_Outcome, tuple[_Hypothesis, ...]]]()
        for why in itertools.product(*whys) if whys else ():
            tried.append((self._outcome(why), why))
            if self.spent or sum(after.complete for after, _ in tried) > 1:
                break
        if not tried:
            lines.append("the verdict was not tried on the programs")
            return Confirmation(tuple(places.values()), None, tuple(lines))
        after, why = max(tried, key=lambda one: (one[0].complete, len(one[0].same & others)))
        how = "calling what its dump says" if any(w.ops for w in why) else "stopped there"
        lines.append(f"with rank {format_ranks(w.rank for w in why)} {how}, "
                     f"{len(after.same & others)} of {len(others)} other ranks stand where their "
                     "dumps say")  # fmt: skip
        named = {culprit.rank: culprit.kind for culprit in verdict.culprits}
        lines += [f"rank {w.rank} then {w.text}" for w in why if w.ops and w.kind != named[w.rank]]
        if sum(one.complete for one, _ in tried) == 1 and not self.spent:
            places = {rank: self.overlay.place(rank, [after.issued[rank] - 1])
                      if after.issued[rank] else place
                      for rank, place in places.items()}  # fmt: skip
        stops = {w.rank: w.index for w in why}
        return Confirmation(tuple(places.values()), after.complete, tuple(lines), stops)

    def _of_culprit(self, culprit: Culprit, verdict: Diagnosis) -> Iterator[_Hypothesis]:
        """What the verdict may mean by what it says of one rank."""
        rank, kind, overlay = culprit.rank, culprit.kind, self.overlay
        if kind == "host stuck":
            for at in (at for step in overlay.fits(rank) for at in overlay.stops(rank, step)):
                yield _Hypothesis(rank, kind, "", at, fault=stall.RankFault(host=at))
        elif kind == "device stuck":
            yield from self._devices(rank)
        elif kind == "missing dump":
            for at in self._awaited(rank, verdict):
                yield _Hypothesis(rank, kind, "", at, fault=stall.RankFault(host=at, silent=True))
        else:
            call = verdict.group, verdict.seq, False
            entries = [e for e in self.state.outstanding.get(rank, ())
                       if (e.desc, e.seq, e.pair) == call]  # fmt: skip
            yield from (why for why in self.messages_otherwise() if why.rank == rank and why.ops)
            places = self._awaited(rank, verdict)
            edits = [edit for edit in self._edits(rank, list(self.programs.of(rank)), entries)
                     if not places or edit[2] in places]  # fmt: skip
            # one of another kind may look like it: who leaves out a call makes the next one instead
            for what, text, at, ops in sorted(edits, key=lambda edit: edit[0] != kind):
                yield _Hypothesis(rank, what, text, at, ops)

    def _awaited(self, rank: int, verdict: Diagnosis) -> set[int]:
        """The ops of ``rank`` that may be the verdict's call: counted by the member of its group
        with fewest places.
        """
        best: set[int] = set()
        members = self.groups[verdict.group].group(rank).tolist() if verdict.group in (
            self.groups) else []  # fmt: skip
        program = self.programs.of(rank)
        mine = [i for i in program.collectives(verdict.group).tolist() if recorded(program[i])]
        for other in set(members) & self.state.dumps.keys() - {rank}:
            name = next(n for n, g in self.state.groups.items()
                        if g.desc == verdict.group and other in g.ranks)  # fmt: skip
            later = self.state.enqueued.get((name, other), verdict.seq) - verdict.seq
            steps = self.overlay.steps[int(self.programs.program_of[other])]
            counts = {steps[step][1].get((verdict.group, False), 0) - later
                      for step in self.overlay.fits(other)}  # fmt: skip
            found = {mine[count - 1] for count in counts if 0 < count <= len(mine)}
            if found and (not best or len(found) < len(best)):
                best = found
            if len(best) == 1:
                break
        return best

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
        turns = {op.microbatch for op in self.programs.of(rank) if op.microbatch >= 0}
        if kind == "extra call" and turns:
            text += (f": it runs more than the {len(turns)} microbatches of its program; compare "
                     "the batch flags of the ranks")  # fmt: skip
        return _Hypothesis(rank, kind, text, place, ops)

    # -- what the dumps say -----------------------------------------------------------------------
    def _observed(self, rank: int) -> list[tuple[object, ...]]:
        """Its outstanding calls in the order of issue."""
        step = self.state.step
        return [(e.desc, step(rank, e) if e.pair else -1, *seen(e))
                for e in self.state.outstanding[rank]]  # fmt: skip

    def _relative(self, counts: dict[tuple[str, int], int]) -> dict[object, dict[int, int]]:
        """By how many collectives each is behind the first: members of a group, and ranks that run
        the same program (they started up alike).
        """
        found: dict[object, dict[int, int]] = defaultdict(dict)
        for (name, rank), count in counts.items():
            if name in self.state.groups and name not in self.state.pairs:
                count = max(0, count)  # -1 is none yet, and the first has number 1
                found[name][rank] = count
                program = int(self.programs.program_of[rank])
                found[self.state.groups[name].desc, program][rank] = count
        return {n: {r: max(c.values()) - k for r, k in c.items()} for n, c in found.items()}

    # -- what hypotheses lead to ------------------------------------------------------------------
    def _outcome(self, whys: Sequence[_Hypothesis]) -> _Outcome:
        """Run all ranks until nobody can go on."""
        faults = {why.rank: why.fault for why in whys if why.fault is not None}
        edited = {why.rank: why.ops for why in whys if why.ops is not None}
        programs = with_ops(self.programs, edited)
        of, new = programs.program_of, programs.programs[len(self.calls) :]
        calls = [*self.calls, *map(self._calls_of, new)]
        after = stall.run_until_stalled(programs, faults)
        self.tried += 1
        ends, same, issued = list(after.issued), set[int](), dict[int, int]()
        for rank, wanted in self.wanted.items():
            mine, done = calls[int(of[rank])], after.done[rank]
            waits = {b for i, b, _ in mine if i < after.issued[rank] and not done[i]}
            left = [(i, k) for i, b, k in mine if i < after.issued[rank] and b in waits
                    and len(self.groups[str(k[0])].group(rank)) > 1]  # fmt: skip
            if [k for _, k in left[: len(wanted)]] == wanted and (wanted or not left):
                same.add(rank)
                if len(left) > len(wanted):  # its host may wait for a copy, which no program shows
                    ends[rank] = left[len(wanted)][0]
            issued[rank] = int(IS_NCCL[programs.of(rank).ops["name"][: ends[rank]]].sum())
        counts = self._issued(after, ends)
        complete = len(same) == len(self.wanted) and self._relative(counts) == self.counts
        return _Outcome(frozenset(same), issued, counts, complete)

    def _disagreement(self, counts: dict[tuple[str, int], int]) -> int:
        """In how many counters the number of iterations is not that of most, where captures say
        how many calls came before the iteration that they hold.
        """
        turns: Counter[int] = Counter()
        for rank in {rank: None for _, rank in counts}:
            before = self.programs.of(rank).calls_before().get("", 0)
            for name, (_, more, size) in self._since_capture(rank).items():
                whole, rest = divmod(more - counts[name, rank], size)
                turns[-1 if rest else whole + before] += 1
        usual = max(turns.values(), default=0)
        return turns.total() - usual

    def _since_capture(self, rank: int) -> dict[str, tuple[str, int, int]]:
        """Group -> (its description, calls since the iteration that was captured began, calls of an
        iteration), where captures know what came before.
        """
        earlier, found = self.programs.of(rank).calls_before(), dict[str, tuple[str, int, int]]()
        fifos = self.overlay.fifos[int(self.programs.program_of[rank])]
        for name in self.state.groups_of[rank]:
            desc, count = self.state.groups[name].desc, self.state.enqueued.get((name, rank))
            fifo = fifos.get((desc, False))
            if desc in earlier and fifo and count is not None and name not in self.state.pairs:
                found[name] = desc, max(0, count) - earlier[desc], len(fifo)
        return found

    def _counted(self, why: _Hypothesis) -> bool:
        """Whether the counters of its rank, as far as captures know what came before, are those
        behind one of the calls that it then makes.
        """
        known = {desc: (more, size) for desc, more, size in self._since_capture(why.rank).values()}
        if not known:
            return True
        ops = self.programs.of(why.rank) if why.ops is None else why.ops
        launches = {(op.group, op.batch if op.batch >= 0 else -1 - i): op.group
                    for i, op in enumerate(ops) if op.group in known and recorded(op)
                    and op.name not in ("send", "recv")}  # fmt: skip
        order = [*launches.values()]
        more, size = max(known.values(), key=lambda one: one[1])
        for turn in (more // size, more // size - 1):
            here = {desc: n - turn * one for desc, (n, one) in known.items()}
            if min(here.values()) >= 0 and Counter(order[: sum(here.values())]) == Counter(here):
                return True
        return False

    def _calls_of(self, ops: Iterable[Op]) -> list[tuple[int, int, tuple[object, ...]]]:
        """(index, its batch, what is called); what is issued in one ends in one."""
        return [(i, op.batch if op.batch >= 0 else -1 - i, self._key(op))
                for i, op in enumerate(ops) if recorded(op)]  # fmt: skip

    def _key(self, op: Op) -> tuple[object, ...]:
        if op.name not in ("send", "recv"):
            return (op.group, -1, *key(op))
        start = self.groups[op.group].start
        size = int(start[1] - start[0])
        return (op.group, op.peer % size, *key(op))

    def _issued(self, after: stall.StalledJob, issued: list[int]) -> dict[tuple[str, int], int]:
        per: dict[tuple[int, int], Counter[str]] = {}
        found = {}
        for name, rank in self.state.enqueued:
            if name not in self.state.groups:
                continue
            program, end = after.programs.of(rank), issued[rank]
            number = int(after.programs.program_of[rank]), end
            if number not in per:
                rows = program.ops[:end]
                talks = rows[(IS_COLLECTIVE & IS_NCCL)[rows["name"]]]
                seen = zip(talks["group"].tolist(), talks["batch"].tolist(), strict=True)
                launches = {(g, b) if b >= 0 else (g, b, i) for i, (g, b) in enumerate(seen)}
                per[number] = Counter(program.strings[launch[0]] for launch in launches)
            found[name, rank] = per[number][self.state.groups[name].desc]
        return found

    # -- which hypotheses -------------------------------------------------------------------------
    def _hypotheses(self) -> Iterator[_Hypothesis]:
        for rank in self._suspects():
            yield from self._devices(rank)
            entries, known = self.state.outstanding[rank][:2], set[tuple[object, ...]]()
            for kind, text, at, ops in self._edits(rank, list(self.programs.of(rank)), entries):
                said = tuple(self._key(op) for op in ops if recorded(op))
                if said not in known and self._may_stand(rank, said):
                    known.add(said)
                    yield _Hypothesis(rank, kind, text, at, ops)

    def _may_stand(self, rank: int, said: tuple[tuple[object, ...], ...]) -> bool:
        """Whether its outstanding calls come in that order in what it would then call."""
        rest = iter(said)
        return all(wanted in rest for wanted in self.wanted[rank])

    def _suspects(self) -> list[int]:
        """Between whom a call differs; who entered a call that nobody leaves; both sides of a
        message that one side did not post.
        """
        state = self.state
        found: dict[int, None] = {}
        behind: dict[int, None] = {}
        for odd in find_mismatches(state):
            found |= dict.fromkeys(odd.among)
        for rank in sorted(state.outstanding):
            head = state.head(rank)
            if head is None:
                continue
            why, others = state.waits(rank)
            if not why:
                found |= dict.fromkeys([rank])
            elif head.pair and why == "has not posted its side":
                found |= dict.fromkeys([rank, *others])
            elif why == "has not come":
                found |= dict.fromkeys(others)
            else:
                behind |= dict.fromkeys([rank, *others])
        found |= behind
        return [rank for rank in found if rank in state.dumps][:_RANKS]

    def _devices(self, rank: int) -> Iterator[_Hypothesis]:
        firsts = {self.overlay.first_open(rank, step) for step in self.overlay.fits(rank)}
        for first in sorted(firsts) if self.state.outstanding[rank] else ():
            text = f"device never came to op {first}"
            fault = stall.RankFault(device=first)
            yield _Hypothesis(rank, "device stuck", text, first, fault=fault)

    def _edits(self, rank: int, ops: list[Op], entries: Iterable[Entry]) -> Iterator[_Edit]:
        """One call as the dump has it (of ``entries``), left out, made twice, with the other
        neighbour, or exchanged with the next.
        """
        calls = [i for i, op in enumerate(ops)
                 if recorded(op) and len(self.groups[op.group].group(rank)) > 1]  # fmt: skip
        for entry in entries:
            yield from _as_in_dump(ops, calls, entry)
        for i in calls:
            op = ops[i]
            text = f"left out op {i} of its program, {op.name} of {op.group}"
            yield "skipped call", text, i, without(ops, {i})
        for i in calls:
            op = ops[i]
            text = f"makes op {i} of its program twice, {op.name} of {op.group}"
            yield "extra call", text, i, twice(ops, i)
            start = self.groups[op.group].start
            if op.name in ("send", "recv") and 2 * op.peer % int(start[1] - start[0]):
                text = f"makes op {i} of its program, {op.name}, with the other neighbour"
                turned = dataclasses.replace(op, peer=-op.peer)
                yield "order", text, i, [*ops[:i], turned, *ops[i + 1 :]]
        for i, j in itertools.pairwise(calls):
            if self._key(ops[i]) != self._key(ops[j]):
                yield _order(ops, i, j)


def _planned_batches(ops: Sequence[Op], desc: str, size: int) -> list[dict[int, MessageStep]]:
    """Collect the messages of a program in a group of ``size`` ranks, by batch: place -> step."""
    batches: dict[int, dict[int, MessageStep]] = defaultdict(dict)
    for place, op in enumerate(ops):
        if op.name in ("send", "recv") and op.group == desc:
            batch = op.batch if op.batch >= 0 else -1 - place
            batches[batch][place] = MessageStep(op.name, op.peer % size)
    return list(batches.values())


def _with_messages(
    ops: list[Op], places: Sequence[int], messages: Sequence[Op | None]
) -> list[Op] | None:
    """``ops`` with one batch of ``messages`` in place of those at ``places``; None if one of them
    is like none of the program.
    """
    known = [message for message in messages if message is not None]
    if len(known) < len(messages):
        return None
    batch = ops[places[0]].batch
    batch = batch if batch >= 0 else 1 + max(op.batch for op in ops)
    new = [dataclasses.replace(op, batch=batch) for op in known]
    rest = [op for i, op in enumerate(ops) if i not in places]
    return [*rest[: places[0]], *new, *rest[places[0] :]]


def _order(ops: list[Op], i: int, j: int) -> _Edit:
    text = f"makes ops {i} and {j} of its program the other way round"
    return "order", text, i, exchanged(ops, i, j)


def _as_in_dump(ops: list[Op], calls: list[int], entry: Entry) -> Iterator[_Edit]:
    """The outstanding call in place of one of its group, or exchanged with it; a call that the
    program has nowhere, made before any of its calls.
    """
    known = entry.op in NAMES  # of a log's or a counter's call it may not be
    mine = [i for i in calls if known and ops[i].group == entry.desc
            and (ops[i].name in ("send", "recv")) == entry.pair]  # fmt: skip
    for place, i in enumerate(mine):
        op = ops[i]
        if key(op) == seen(entry) or entry.pair and op.name != entry.op:
            continue
        fields = zip(("operation", "dtype", "shape"), key(op), seen(entry), strict=True)
        text = f"calls {call_text(entry)} where its program has {op.name} (op {i})"
        new = [*ops[:i], as_dumped(op, entry), *ops[i + 1 :]]
        yield next(kind for kind, a, b in fields if a != b), text, i, new
        yield from (_order(ops, i, j) for j in mine[place + 1 :] if key(ops[j]) == seen(entry))
    if mine and not entry.pair and all(key(ops[i]) != seen(entry) for i in mine):
        added = dataclasses.replace(as_dumped(ops[mine[0]], entry), handle=-1, batch=-1)
        text = f"calls {call_text(entry)}, which its program has nowhere"
        for i in calls:
            yield "extra call", text, i, [*ops[:i], added, *ops[i:]]
