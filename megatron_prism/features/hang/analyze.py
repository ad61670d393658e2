"""Judge dumps: a verdict with culprits, victims, evidence and what is missing.

In : Flight Recorder dumps (``diagnose_dumps``).
Out: Diagnosis.  What a rank did needs no wait that leads to it, so all of these are named:

1. who makes a call otherwise than most of its members, or than its siblings
2. who did not complete a call that the others completed: its device, or its watchdog, is stuck
3. for whom others wait and who waits for nobody, or who stopped where its siblings with the same
   calls outstanding went on: its host is stuck
4. who issued calls in another order than its siblings, or left out a message: the fewest that
   explain it

Where somebody waits for none of them: whose device never started its call, and who left no dump.
Otherwise nobody is named: the cycle of waits is shown, or the call that nobody leaves.

A culprit is never also a victim.  Who is late because he waits for someone else is no culprit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from megatron_prism.core.collectives import BY_NAME
from megatron_prism.core.files import no_collector
from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import consistency, fingerprints, siblings, waits
from megatron_prism.features.hang.dumps import UNNAMED, DumpSet, Entry, Launch, RankEvent
from megatron_prism.features.hang.fingerprints import Disagreement
from megatron_prism.features.hang.logs import op_type
from megatron_prism.features.hang.mismatch import Mismatch, find_mismatches, is_batched
from megatron_prism.features.hang.state import JobState, call_text, issue_order
from megatron_prism.features.hang.verdict import JOB, Culprit, Diagnosis, Waiting


def first_watchdog(state: JobState) -> str:
    """Whose watchdog fires first, and what it prints; "" where no call has a time."""
    waits = [(e.created_ns + e.timeout_ms * 10**6, rank, e)
             for rank, calls in state.outstanding.items() for e in calls
             if e.created_ns > consistency.EPOCH_NS and e.timeout_ms > 0]  # fmt: skip
    if not waits:
        return ""
    due, rank, entry = min(waits, key=lambda wait: wait[:2])
    after = (due - min(e.created_ns for _, _, e in waits)) / 1e9
    return (f"rank {rank}, {after:.1f} s after the first call that waits was issued: "
            + _message(rank, entry, bool(is_batched(state, rank, entry)))
            + _audit(state))  # fmt: skip


def _audit(state: JobState) -> str:
    """Which groups have another time-out than most, by the calls in the dumps."""
    limits = {e.desc: e.timeout_ms for dump in state.dumps.values() for e in dump.entries
              if e.timeout_ms > 0}  # fmt: skip
    usual = Counter(limits.values()).most_common(1)[0][0]
    odd = [f"{desc} has {ms / 1e3:,.0f} s" for desc, ms in sorted(limits.items()) if ms != usual]
    return f" ({'; '.join(odd)}; the others {usual / 1e3:,.0f} s)" if odd else ""


def breakpoint_at(call: str, site: str) -> str:
    """A call as ``--prism-break`` takes it; sites are those inside Megatron's folder."""
    return f"{call} at {site.rpartition('megatron/')[2]}" if site else call


def stop_command(calls: Mapping[int, str], size: int | str) -> str:
    """The command that runs ranks of a world of ``size`` and stops each at its call."""
    alike: dict[str, list[int]] = {}
    for rank, call in calls.items():
        alike.setdefault(call, []).append(rank)
    text = "; ".join(f"rank={format_ranks(ranks)} {call}" for call, ranks in alike.items())
    flags = f"--prism-world-size {size} --prism-ranks {','.join(map(str, calls))} --prism-break "
    if len(calls) == 1:
        return f"prism run {flags}'{next(iter(calls.values()))}' -- {JOB}"
    flags = f"{flags}'{text}' --prism-debugger debugpy:5678"  # they would share one terminal
    return f"torchrun --nproc-per-node {len(calls)} {JOB} --prism-emulate {flags}"


def _message(rank: int, entry: Entry, batched: bool) -> str:
    """What the watchdog of ``rank`` prints about ``entry``, or the batch in which it is."""
    ins, outs = (0, 0) if batched and entry.pair else (sum(side) for side in entry.numbers)
    kind = "COALESCED" if batched else op_type(entry.op)
    return (f"[Rank {rank}] Watchdog caught collective operation timeout: "
            f"WorkNCCL(SeqNum={entry.seq}, OpType={kind}, NumelIn={ins}, NumelOut={outs}, "
            f"Timeout(ms)={entry.timeout_ms}) of {entry.desc} ran for {entry.timeout_ms} "
            "milliseconds before timing out.")  # fmt: skip


_CALLED_OTHERWISE = {
    "operation", "dtype", "shape", "splits", "coalescing", "extra call", "skipped call"
}  # fmt: skip
_STOPPED = 8  # culprits that one command stops: those of a host
_WHERE = ("outside", "in a call", "at work")  # events that say where a rank stands
_HANDLED = ("handled", "logged")  # events of exceptions that ended nothing, or perhaps nothing


def diagnose_dumps(found: DumpSet, then: DumpSet | None = None) -> Diagnosis:
    """The verdict from dumps alone.

    then : dumps of the same job, written some seconds later: what moved between the two is alive,
           and where nothing moved the job stands still, whatever the first set looks like
    """
    with no_collector():  # there are millions of entries, and no cycles
        parted = consistency.consistent_dumps(found if then is None else then)
        judge = _Judge(parted)
        made = replace(judge.verdict(), watchdog=first_watchdog(judge.state))
        if then is not None:
            made = consistency.unless_moved(made, found, then)
        elif not (_stands_still(found) and len(made.culprits) == 1):
            # several that look late may wait for one another outside NCCL, also in a job that hangs
            made = consistency.unless_running(made, parted, judge.differ, judge.excused)
        return replace(made, decides=what_decides(made, judge.state))


def _stands_still(observed: DumpSet) -> bool:
    """Whether all that is known is of logs in which watchdogs fired: such a job does not run."""
    only_logs = all(dump.version == "log" for dump in observed.dumps.values())
    return only_logs and bool(observed.waits)


def what_decides(verdict: Diagnosis, state: JobState, programs: bool = False) -> str:
    """The one command or setting that would tell who it is; "" where somebody is named.

    programs : whether the verdict was held against the job's programs already
    """
    if verdict.exit_code != 3:
        return ""
    suspects = verdict.candidates or [culprit.rank for culprit in verdict.culprits]
    suspects = suspects or waits.last_waited_for(state) or state.missing or [0]
    if any("--then DIR" in line for line in verdict.evidence):
        return "prism hang DIR --then DIR2: dumps of the same job some seconds later"
    if any("outside NCCL" in line for line in verdict.evidence):
        return _log_or_stack(state, suspects, stack_too=True)
    if verdict.verdict == "missing dump" or any("and no dump" in x for x in verdict.evidence):
        return _log_or_stack(state, suspects)
    only_logs = all(dump.version == "log" for dump in state.dumps.values())
    unknown_members = any(group.partial for group in state.groups.values())
    nothing_known = not any(dump.entries or dump.status for dump in state.dumps.values())
    if nothing_known or only_logs and unknown_members:
        return "TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 in the job: dumps"
    if not programs:
        return ("prism hang DIR -- pretrain_gpt.py <the job's arguments>: its programs, captured "
                "on tier meta, tell who left the order")  # fmt: skip
    if not state.history:
        return "TORCH_INCLUDE_ONLY_ACTIVE=0 in the job: dumps with the calls that ended"
    return "TORCH_NCCL_ENABLE_TIMING=1 in the job: which device started its call"


def _log_or_stack(state: JobState, suspects: Collection[int], stack_too: bool = False) -> str:
    """What to ask for of ranks: their logs, where these are not there; else their stacks.

    In a log of several ranks one that says nothing has no log of its own to give.
    """
    logged = state.observed.logged
    without_log = [rank for rank in suspects if rank not in logged]
    if without_log and not logged:
        text = f"what {ranks_text(without_log)} printed: prism hang DIR with its log in DIR"
        if stack_too:
            text = (f"the log of {ranks_text(without_log)}, or its stack: prism hang DIR with the "
                    "logs in DIR, py-spy dump")  # fmt: skip
        return text
    stacks = f"py-spy dump > DIR/rank{min(suspects)}.txt"
    if without_log:
        stacks = f"py-spy dump > DIR/rank{min(without_log)}.txt"
        return (f"the log of {ranks_text(without_log)}, if there is one, or a stack ({stacks}): "
                "prism hang DIR")  # fmt: skip
    return f"the stack of {ranks_text(suspects)} ({stacks}): prism hang DIR"


class _Judge:
    def __init__(self, parted: consistency.ConsistentDumps) -> None:
        self.parted, self.state = parted, parted.state
        self.evidence: list[str] = [*parted.stale.values()][:4] + [*parted.new.values()][:4]
        self.first: Entry | None = None
        self.excused = set(parted.new)  # who is not named though others wait for it
        self.differ: set[Launch] = set()
        self.split = False  # whether a call differs and no majority decides
        self.among: tuple[int, ...] = ()  # where nobody is named, who may be the culprit
        self.sure = False  # whether a majority made the very call that differs
        self.uncompared = ""  # which siblings were not compared by the order of their calls
        self.doubt = False  # whether who is named may be a victim of something that dumps lack

    def verdict(self) -> Diagnosis:
        state = self.state
        if self.parted.strangers:
            self.evidence.append(self.parted.strangers)
            return Diagnosis("undetermined", confidence="possible", evidence=tuple(self.evidence),
                             missing=("the dumps of one hang alone", *state.lacks()))  # fmt: skip
        if self.parted.otherwise:
            return self._result("mismatch", self._grouped())
        self.evidence += state.said
        differ = fingerprints.disagreement(state.observed.differ)
        if differ is not None:
            return self._by_torch(differ)
        known = any(dump.entries or dump.status for dump in state.dumps.values())
        stacks = {r: e.text for r, events in state.events.items() for e in events
                  if e.kind in _WHERE[1:]}  # fmt: skip
        if stacks and not known:
            return self._by_stacks(stacks)
        if not any(state.outstanding.values()) and not state.lates and not self._eventful():
            return self._idle()
        odds = find_mismatches(state)
        self.differ = {odd.entry.launch for odd in odds}
        self.split = any(not odd.ranks for odd in odds)
        found: dict[int, Culprit] = {}
        self._add(found, self._ended)  # what a rank did needs no wait that leads to it
        self._add(found, self._outside)
        self._add(found, self._absent)
        self._add(found, lambda: self._odd(odds))
        self._add(found, self._stuck)
        self._add(found, lambda: self._ordered(odds))
        self._add(found, lambda: self._odd(siblings.find_broken_rhythms(state)))
        self._add(found, lambda: self._few() if not odds or found else [])
        for step in (self._never_started, self._gone):
            if not found or self._held(found):
                self._add(found, step, self._held(found))
        if not found:
            self._add(found, lambda: self._ordered(odds, queued=True))
        if not found:
            return self._nobody(odds)
        named = sorted(found.values(), key=lambda c: (
            c.kind != "device stuck", c.kind == "missing dump", c.rank))  # fmt: skip
        beside = [o for o in odds if not any(o.text in line for line in self.evidence)]
        self.evidence += [f"besides, {odd}" for odd in beside[:3]]
        return self._result(named[0].kind, named)

    def _add(
        self, found: dict[int, Culprit], step: Callable[[], list[Culprit]],
        left: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Add whom ``step`` names, with its evidence; beside others only who holds some of those
        ``left``, if there are any, and ranks without a dump only where they explain all waits.
        """
        kept, first = len(self.evidence), self.first
        named = step()
        new = [c for c in named if c.rank not in found]
        if left and found:
            new = [c for c in new if len(self._held({*found, c.rank})) < len(left)]
        elif step == self._gone and self._held({c.rank for c in new}):
            new = []
        if named and not new:
            self.first = first
            del self.evidence[kept:]
        found |= {c.rank: c for c in new}

    def _held(self, culprits: Collection[int]) -> set[int]:
        """Who waits for something else than ``culprits``, and those of whom dumps say nothing."""
        return waits.held(self.state, {*culprits, *self.excused, *self.state.mute()})

    # -- 0: what logs say -------------------------------------------------------------------------
    def _eventful(self) -> bool:
        """Whether logs say of a rank more than that it handled an exception or came to no
        barrier.
        """
        events = self.state.events.values()
        kinds = {event.kind for of_rank in events for event in of_rank}
        return bool(kinds - {*_HANDLED}) or bool(self.state.observed.absent)

    def _by_torch(self, differ: Disagreement) -> Diagnosis:
        """The verdict by torch's own check of collectives, which is taken at its word."""
        self.evidence.append(str(differ))
        call, desc = differ.usual, UNNAMED
        self.first = Entry(0, desc, desc, call.op or "call", call.seq, call.seq, -1, ((), ()), (),
                           "scheduled", False, "", -1, -1)  # fmt: skip
        culprits = []
        if differ.whole:
            for rank in differ.odd:
                why = f"makes {differ.calls[rank]}, where the others make {call}"
                culprits.append(Culprit(rank, differ.kind, why))
        if differ.whole and not culprits:
            self.among = tuple(sorted(differ.calls))
        self.doubt = True  # ranks behind the first that differs are not in the log
        verdict = self._result("mismatch" if not culprits else differ.kind, culprits)
        blamed = {culprit.rank for culprit in culprits}
        waiting = {wait.rank: wait for wait in verdict.victims}
        for rank, own in differ.calls.items() if differ.whole else ():
            if rank not in blamed and rank not in waiting:
                others = tuple(sorted(blamed))
                waiting[rank] = Waiting(rank, others, own.op or "call", desc, own.seq)
        return replace(verdict, victims=tuple(waiting[rank] for rank in sorted(waiting)))

    def _ended(self) -> list[Culprit]:
        """Whose process failed by itself; where half of them did, that is the job's error."""
        found: dict[int, RankEvent] = {}
        for rank, events in sorted(self.state.events.items()):
            for event in events:
                if event.kind in _WHERE or rank in found:
                    continue
                if event.kind == "handled" or self._waits_like_others(rank, event):
                    self.evidence.append(f"rank {rank} went on after an exception: {event.text}")
                elif event.kind == "logged":
                    self.evidence.append(f"rank {rank} logged an exception, which perhaps ended "
                                         f"nothing: {event.text}")  # fmt: skip
                else:
                    found[rank] = event
        self.evidence += [f"rank {r}: {e.kind}: {e.text}" for r, e in sorted(found.items())[:4]]
        ranks = max(len(self.state.dumps), self.state.observed.world)
        if len(found) > 1 and 2 * len(found) > ranks:
            return []
        # of one rank alone nobody knows whether the others failed alike
        self.doubt |= bool(found) and ranks < 2
        return [Culprit(r, e.kind, e.text) for r, e in sorted(found.items())]

    def _waits_like_others(self, rank: int, event: RankEvent) -> bool:
        """Whether a rank of which an exception is printed waits in a call as the others do.

        It handled the exception then, unless others wait for this rank, and would go on with it.
        """
        state = self.state
        of_python = event.kind in ("exception", "out of memory", "logged")
        if not of_python or "NCCL watchdog" in event.text:
            return False
        if not state.outstanding.get(rank) and rank not in state.hidden:
            return False
        awaited = {late for _, late in state.lates}
        for other in state.outstanding:
            head = state.head(other)
            if head is not None and head.pair:
                awaited.update(state.waits(other)[1])
        waiting = {other for other, calls in state.outstanding.items() if calls} - {rank}
        helps = len(self._held({rank}) - {rank}) < len(waiting)
        return rank not in awaited or not helps

    def _absent(self) -> list[Culprit]:
        """Who did not come to a monitored barrier, as gloo says it."""
        absent = self.state.observed.absent
        if not absent:
            return []
        text = "did not come to a monitored barrier"
        self.evidence.append(f"{ranks_text(absent)} {text}, as another rank prints")
        if len(absent) > 1:
            # the barrier names all who are late, also those that wait for one of them
            self.among = tuple(sorted({*self.among, *absent}))
            return []
        return [Culprit(absent[0], "host stuck", text)]

    def _outside(self) -> list[Culprit]:
        """Who did not come to a call outside NCCL, in which others time out by their logs."""
        state = self.state
        kinds = {r: ("outside", "in a call")[: 1 + (not calls)]  # a call may be that of its dump
                 for r, calls in state.outstanding.items()}  # fmt: skip
        texts = {rank: e.text for rank, events in state.events.items() for e in events
                 if e.kind in kinds.get(rank, ("outside",))}  # fmt: skip
        self.excused |= texts.keys()
        blamed: set[int] = set()
        for rank, text in texts.items():
            groups = [state.groups[name] for name in state.groups_of[rank]]
            groups = [g for g in groups if g.desc.startswith("DATA_PARALLEL")] or groups
            group = max(groups, key=lambda g: len(g.ranks), default=None)
            others = set(group.ranks) - texts.keys() if group else set()
            self.evidence.append(f"rank {rank} waits outside NCCL, in {text}")
            self.among = tuple(sorted({*self.among, *others}))
            blamed |= others if len(others) == 1 else set()
        where = next(iter(texts.values()), "").partition(":")[0]
        return [Culprit(r, "skipped call", f"did not come to {where}) outside NCCL")
                for r in sorted(blamed)]  # fmt: skip

    def _by_stacks(self, stacks: Mapping[int, str]) -> Diagnosis:
        """Where hosts stand, without a dump: who stands elsewhere than most may be the culprit."""
        places: dict[str, list[int]] = defaultdict(list)
        for rank, text in sorted(stacks.items()):
            places[text].append(rank)
        rows = sorted(places.items(), key=lambda row: -len(row[1]))
        self.evidence += [f"{ranks_text(ranks)}: {text}" for text, ranks in rows[:8]]
        if 2 * len(rows[0][1]) > len(stacks):
            self.among = tuple(rank for _, ranks in rows[1:] for rank in ranks)
        missing = "dumps: a stack is of one moment, and says nothing of what the device waits for"
        return replace(self._result("undetermined", []), missing=(missing,))

    def _grouped(self) -> list[Culprit]:
        """Who was started with other parallel sizes than most."""
        found = [Culprit(rank, "groups", f"has other members in {group.desc} than the rest list: "
                         "compare its parallel sizes and world size")
                 for rank, group in self.parted.otherwise.items()]  # fmt: skip
        self.evidence += [f"rank {c.rank} {c.why}" for c in found[:4]]
        self.doubt = True  # or dumps of another job
        return found

    # -- 1: signatures ----------------------------------------------------------------------------
    def _odd(self, odds: Iterable[Mismatch]) -> list[Culprit]:
        decided = [odd for odd in odds if odd.ranks]  # the same in other groups is one fault
        same = [odd for odd in decided if odd.call == decided[0].call or odd.voted]
        if same:
            self.first = same[0].entry
            self.sure = all(odd.voted for odd in same)
        self.evidence += map(str, same[:4])
        return [Culprit(rank, odd.kind, odd.text) for odd in same for rank in odd.ranks]

    # -- 2, 3, 4: stuck ranks ---------------------------------------------------------------------
    def _stuck(self) -> list[Culprit]:
        return [*{b.rank: b for step in (self._hosts, self._devices) for b in step()}.values()]

    def _devices(self) -> Iterable[Culprit]:
        """Complete-late: the others saw the end of a call that needs everybody."""
        late = list(waits.incomplete_calls(self.state))
        unpaired = {e.launch: {r for r, other, _ in late if other.launch == e.launch}
                    for _, e, _ in late if e.op == "all_to_all"}  # fmt: skip
        for rank, entry, last in late:
            if len(ranks := unpaired.get(entry.launch, ())) > 1:  # each waits for its pairs only
                self.among = tuple(sorted({*self.among, *ranks}))
                self._note(entry, f"{call_text(entry)} ended on all members but {ranks_text(ranks)}"
                           ": what one of them sends another does not expect (splits), or their "
                           "link stands still")  # fmt: skip
                continue
            why = (f"{call_text(entry)} ended on the others (up to #{last}), not on it: its device,"
                   " its watchdog or the link to it")  # fmt: skip
            self._note(entry, f"rank {rank}: {why}")
            yield Culprit(rank, "device stuck", why)

    def _hosts(self) -> list[Culprit]:
        """Enqueue-late, and not because of its own waits."""
        state, found = self.state, dict[int, Entry]()
        away = self.excused - self.parted.new.keys()  # their logs say where they wait
        for (_, rank), entry in sorted(state.lates.items(), key=lambda late: issue_order(late[1])):
            if rank in found or rank not in state.dumps:
                continue
            calls = state.outstanding[rank]
            differ = any(e.launch in self.differ for e in calls)  # whoever differs holds it
            if not calls or (not differ and siblings.is_behind_replicas(state, rank)):
                found[rank] = entry
        for rank, entry in waits.ranks_without_message(state):
            found.setdefault(rank, entry)
        for rank in (*state.mute(), *state.hidden, *away):
            found.pop(rank, None)
        idle = {rank for rank in found if not state.outstanding[rank]}
        if extra := self._extra(idle):
            return extra
        work = {rank: e.text for rank, events in state.events.items() for e in events
                if e.kind == "at work"}  # fmt: skip
        excused, blamed = self._excuse(idle, work), list[Culprit]()
        for rank, entry in found.items():
            if rank in excused:
                continue
            kind, what, why = "host stuck", "never came to", "it waits for nobody"
            if rank not in idle:
                why = "ranks with the same calls outstanding went on"
                if state.skipped(rank, entry):
                    kind, what, why = "skipped call", "skips", "its siblings made it before others"
                if len(state.siblings_of(rank)) == 2:
                    self._doubt(f"rank {rank} has one sibling: either of them may err")
            text = f"{what} {call_text(entry)}; {why}"
            text += f"; its stack: {work[rank]}" if rank in work else ""
            self._note(entry, f"rank {rank} {text}")
            blamed.append(Culprit(rank, kind, text))
        return [b for b in blamed if b.rank not in self.parted.new] or blamed

    def _excuse(self, idle: set[int], work: Collection[int]) -> set[int]:
        """Those of ``idle`` who may wait for another outside NCCL; ``work``: whose stacks say
        that they do not.
        """
        state = self.state
        ahead = siblings.ranks_ahead(state, idle - self.parted.new.keys())
        apart = waits.waiting_for_dead(state, idle - ahead, waits.dead_ranks(state, ()))
        if len(apart) > 1:  # one may as well be stuck, and the other's file be lost
            text = f"ranks {format_ranks(sorted(apart))} may wait outside NCCL (gloo, the store)"
            self.evidence.append(f"{text} for {format_ranks(state.missing)}")
        else:
            apart = set()
        uncreated = {r: desc for r in idle - apart - self.parted.new.keys()
                     if (desc := siblings.uncreated_group(state, r))}  # fmt: skip
        if uncreated.keys() < idle:  # who else stands there is late
            self.evidence += [f"rank {rank} may wait while the communicator of {desc} is created"
                              for rank, desc in uncreated.items()]  # fmt: skip
            self.among = (*self.among, *uncreated)
            apart |= uncreated.keys()
        # who enters a save alone errs, as who gets no data
        alone = 2 * sum(not calls for calls in state.outstanding.values()) < len(state.dumps)
        for rank in sorted(idle - ahead - apart - set(work)):
            if siblings.is_between_iterations(state, rank):
                self.evidence.append(f"rank {rank} waits outside NCCL (gloo, the store, files, "
                                     "data), or is stuck: it stands between two "
                                     "iterations")  # fmt: skip
                self.among = (*self.among, *[rank] * (not alone))
                apart |= set() if alone else {rank}
        excused, idle = ahead | apart, idle - apart
        self.excused |= excused
        if idle and (text := waits.why_hosts_wait(state, idle, excused)):
            self._doubt(text)
        if one := waits.lacking_member(state, idle):
            text = (
                f"ranks {format_ranks(sorted(idle))} wait for nobody, and rank {one.rank} went on"
            )
            self.evidence.append(f"{text}: they may wait for it in {one.desc}, outside NCCL")
            self.among = (*self.among, one.rank, *idle)
            self.excused |= idle
            return excused | idle
        return excused

    def _doubt(self, text: str) -> None:
        """Who is named may be a victim of something that dumps lack."""
        self.doubt = True
        self.evidence.append(text)

    def _extra(self, idle: set[int]) -> list[Culprit]:
        """A few who wait in a call that most, done with all of theirs, never make."""
        state = self.state
        calls = {(e.group, e.seq): e for (_, r), e in state.lates.items() if r in idle}
        came = {r: e for e in calls.values() for r in state.groups[e.group].ranks
                if r in state.dumps and state.arrived(r, e)}  # fmt: skip
        free = {r for r, calls in state.outstanding.items() if not calls}
        lost = {r for e in calls.values() for r in state.groups[e.group].ranks}.intersection(
            state.missing)  # fmt: skip
        if not came or len(idle | lost) <= 2 * len(came) or 2 * len(free) <= len(state.dumps):
            return []
        for rank, entry in came.items():
            self._note(entry, f"rank {rank} waits in {call_text(entry)}, which nobody else makes")
        self._doubt(f"or ranks {format_ranks(sorted(idle))} are held up before it (files, data, "
                    "gloo): they wait for nobody")  # fmt: skip
        return [Culprit(r, "extra call", f"makes {call_text(e)} alone") for r, e in came.items()]

    def _gone(self) -> list[Culprit]:
        """Ranks without a dump at which waits end."""
        state = self.state
        found = waits.dead_ranks(state, self.parted.stale)
        silent = {rank: entry for rank, entry in found.items() if rank not in state.observed.logged}
        if silent and len(silent) < len(found):
            spoke = sorted(found.keys() - silent.keys())
            self.evidence.append(f"{ranks_text(spoke)} printed something, though nothing of their "
                                 "calls")  # fmt: skip
            self.excused.update(spoke)
            found = silent
        # others contradict each other, or most are not here: it says nothing of them
        if self.split or not self._most_are_here():
            return []
        for entry, text in waits.missing_dump_lines(found):
            self._note(entry, text)
        if len(found) > 1:
            self.evidence.append("who only lost its dump looks like who died: some of these may be "
                                 "victims")  # fmt: skip
        return [Culprit(r, "missing dump", f"left no dump; {call_text(e)} waits for it")
                for r, e in found.items()]  # fmt: skip

    def _most_are_here(self) -> bool:
        """Whether a rank without a dump is an exception."""
        return len(self.state.missing) <= len(self.state.dumps)

    # -- 5, 6: no source --------------------------------------------------------------------------
    def _ordered(self, odds: list[Mismatch], queued: bool = False) -> list[Culprit]:
        """Name the ranks that issued calls in another order than their siblings.

        Args:
            odds: Calls that members of their group make differently.
            queued: Also compare calls that one sibling queued and another has not yet issued.
        """
        state = self.state

        # all members stand in a call: it may end, and the job go on, whatever the order
        if not odds and waits.complete_calls(state):
            return []
        conflicts = siblings.find_order_conflicts(state, queued)
        self.uncompared = conflicts.uncompared
        opponent_counts = conflicts.opponent_counts
        if not opponent_counts:
            return []

        # the ranks between which no vote decided: that all of them are at odds with others, or
        # none of them, says nothing about the call
        undecided: set[int] = set()
        for odd in odds:
            if not odd.ranks:
                undecided |= set(odd.among)
        if undecided and undecided <= opponent_counts.keys():
            return []
        if undecided and undecided.isdisjoint(opponent_counts):
            return []

        ranks = waits.ranks_where_waits_end(state, sorted(opponent_counts))
        if not ranks:
            return []
        texts: dict[int, str] = {}
        for rank in ranks:
            conflict = conflicts.conflict_of_rank[rank]
            texts[rank] = f"issues {conflict.text} otherwise than its siblings"
            odds_text = f"(at odds with {opponent_counts[rank]})"
            self.evidence.append(f"rank {rank} {texts[rank]} {odds_text}")

        # each may differ because of the other: counters do not say whose call came first
        if not state.history and self._are_of_one_pipeline(ranks):
            self.among = self.among or tuple(ranks)
            return []

        for doubt in waits.supporting_evidence(state, ranks):
            self._doubt(doubt)
        if odds:
            self.first = odds[0].entry
        else:
            conflict = conflicts.conflict_of_rank[ranks[0]]
            self.first = siblings.call_of(state, conflict, ranks[0])
        if self.first is not None:
            self.evidence.append(f"first: {call_text(self.first)}")
        return [Culprit(rank, "order", texts[rank]) for rank in ranks]

    def _are_of_one_pipeline(self, ranks: Collection[int]) -> bool:
        """Tell whether two of the ranks send each other messages."""
        for name in self.state.pairs & self.state.groups.keys():
            if len(set(ranks).intersection(self.state.groups[name].ranks)) > 1:
                return True
        return False

    def _never_started(self) -> list[Culprit]:
        """With timing on: whose device never started its oldest call, though nothing is before?"""
        heads = {r: calls[0] for r, calls in self.state.outstanding.items() if calls}
        found = {r: e for r, e in heads.items() if e.state == "scheduled"}
        if 2 * len(found) >= len(heads):
            return []
        for rank, entry in found.items():
            self._note(entry, f"the device of rank {rank} never started {call_text(entry)}")
        return [Culprit(r, "device stuck", f"never started {call_text(e)}")
                for r, e in found.items()]  # fmt: skip

    def _complete_text(self, calls: Sequence[Entry]) -> str:
        """What is said where calls have everybody, as far as logs and dumps know it."""
        state, call = self.state, calls[0]
        members = state.groups[call.group].ranks
        assumed = [rank for rank in members
                   if rank in state.dumps and call.group in state.dumps[rank].assumed]  # fmt: skip
        several = len({entry.launch for entry in calls}) > 1
        if several and any(state.groups[entry.group].partial for entry in calls):
            # each is said with its own ranks: one call is not counted into another
            return ("none of these calls ended, and the log does not say who else belongs to their "
                    "groups: ranks that did not come, a device, the network or NCCL")  # fmt: skip
        if not assumed:
            return waits.complete_call_lines(state)
        came = [rank for rank in members if rank not in assumed]
        return (f"{ranks_text(came)} wait in {call_text(call)}, and the logs do not say whether "
                f"{ranks_text(assumed)} came to it: a rank that did not come, a device, the "
                "network or NCCL")  # fmt: skip

    def _logged_waits(self) -> list[str]:
        """The calls that watchdogs name, each with all its ranks."""
        ranks: dict[str, list[int]] = defaultdict(list)
        for wait in self.state.observed.waits:
            ranks[f"{wait.op} #{wait.seq} of {wait.desc}"].append(wait.rank)
        return [f"{ranks_text(waiting)} {'wait' if len(waiting) > 1 else 'waits'} in {call}, by "
                f"{'their watchdogs' if len(waiting) > 1 else 'its watchdog'}"
                for call, waiting in list(ranks.items())[:4]]  # fmt: skip

    def _nobody(self, odds: list[Mismatch]) -> Diagnosis:
        self.evidence += self._logged_waits()
        self.evidence += map(str, odds[:3])
        if odds:
            self.first, self.among = odds[0].entry, self.among or odds[0].among
        state, cycle = self.state, waits.smallest_cycle(self.state)
        ends = waits.last_waited_for(state)
        unknown = [rank for rank in ends if not state.head(rank)]
        if cycle:
            ranks = ", ".join(map(str, cycle))
            self.evidence.append(f"ranks {ranks} wait for each other in a circle")
            self.among = self.among or tuple(cycle)
        elif odds:
            return self._result("mismatch", [])
        elif unknown:
            self.evidence.append(f"waited for: {format_ranks(unknown)}, and no dump that can be "
                                 "judged says where that is")  # fmt: skip
            self.among = self.among or tuple(unknown)
        elif calls := waits.complete_calls(state):
            self.evidence.append(self._complete_text(calls))
            group = state.groups[calls[0].group] if len(calls) == 1 else None
            if group is not None and not group.partial:
                self.among = self.among or group.ranks
        elif not ends:
            self.evidence += [] if self.evidence else ["no dump or log holds a call that waits"]
        else:
            self.among = self.among or tuple(ends)
            self.evidence.append(f"waited for: {format_ranks(ends)}, and these wait for nobody")
        hard = cycle and all("behind" not in state.waits(r)[0] for r in cycle)
        verdict = "undetermined"
        if odds:
            verdict = "mismatch"
        elif hard:
            verdict = "deadlock"
        # all waits end at ranks without a dump, though a cut dump may hide another end
        elif unknown and set(unknown) <= set(state.missing) and self._most_are_here():
            verdict = "missing dump"
        return self._result(verdict, [], cycle)

    def _few(self) -> list[Culprit]:
        """Who left out a message, by what siblings did; else who waits where most never come."""
        found = waits.lone_waiters(self.state, waits.smallest_cycle(self.state))
        if found is None:
            return []
        self.first = found.call
        self.evidence.append(f"rank {format_ranks(found.ranks)} {found.text}")
        return [Culprit(r, found.kind, found.text) for r in found.ranks]

    # -- results ----------------------------------------------------------------------------------
    def _note(self, entry: Entry, text: str) -> None:
        if self.first is None or issue_order(entry) < issue_order(self.first):
            self.first = entry
        if text not in self.evidence:
            self.evidence.append(text)

    def _idle(self) -> Diagnosis:
        state, missing, lost = self.state, self.state.lacks(), self.state.missing
        if state.observed.waits or state.events:
            self._ended()
            self.evidence += self._logged_waits()
            if state.hidden:
                self.evidence.append(f"{ranks_text(sorted(state.hidden))} may wait for any other "
                                     "member: the log does not say to whom its message goes, or "
                                     "from whom it comes")  # fmt: skip
            return self._result("undetermined", [])
        if off := not any(d.entries or d.status for d in state.dumps.values()):
            self.evidence.append("no dump or log holds a call or a counter: the recorders were off")
        elif lost or state.unreadable or state.hidden:
            self.evidence.append("no call is outstanding in the dumps that are there")
        if off or lost or state.unreadable or state.hidden:
            return Diagnosis("undetermined", (), (), confidence="possible",
                             evidence=tuple(self.evidence), missing=missing)  # fmt: skip
        return Diagnosis("healthy", missing=(*missing, waits.UNSEEN))

    def _result(
        self, verdict: str, culprits: list[Culprit], cycle: Collection[int] = ()
    ) -> Diagnosis:
        state, blamed = self.state, {c.rank for c in culprits}
        waiting = waits.waiting_ranks(state, blamed, cycle)
        victims, chain = self._with_logged(waiting.victims, blamed), waiting.chain
        heads = [(bool(state.waits(r)[0]), e) for r in sorted(state.outstanding)
                 if (e := state.head(r)) is not None]  # fmt: skip
        first = self.first or next((e for _, e in sorted(heads, key=lambda h: h[0])), None)
        unsure = not blamed - self.parted.new.keys() or self.doubt  # or nobody
        unsure |= all(c.kind == "missing dump" for c in culprits)  # a file is lost more easily
        unsure |= len({c.rank for c in culprits if c.kind == "device stuck"}) > 1  # or their links
        confidence = "possible" if unsure else "likely"
        if (self.sure or verdict == "order" and state.history) and not (
            state.missing or self.doubt
        ):
            confidence = "certain"
        group, op, seq = (first.desc, first.op, first.seq) if first else ("", "", -1)
        if victims and not first:
            group, op, seq = victims[0].group, victims[0].op, victims[0].seq
        elif op == "call":
            # counters alone say only its number
            named = [wait.op for wait in victims if (wait.group, wait.seq) == (group, seq)]
            op = next(iter(named), op)
        return Diagnosis(
            "mismatch" if verdict in _CALLED_OTHERWISE else verdict,
            tuple(sorted(culprits, key=lambda c: c.rank)),
            victims,
            group,
            op,
            seq,
            confidence,
            tuple(self.evidence[:20]),
            chain,
            self.state.lacks(),
            candidates=tuple(sorted({*self.among})),
            stop=self._stop(first, sorted(blamed)) if first and blamed else "",
        )

    def _with_logged(
        self, victims: tuple[Waiting, ...], blamed: Collection[int]
    ) -> tuple[Waiting, ...]:
        """Victims, with those that only a log says wait, and its words where dumps know none."""
        logged = {(wait.rank, wait.desc, wait.seq): wait for wait in self.state.observed.waits}
        found = {}
        for victim in victims:
            wait = logged.get((victim.rank, victim.group, victim.seq))
            plain = victim.op == "call" and wait is not None
            found[victim.rank] = replace(victim, op=wait.op) if plain and wait else victim
        for wait in self.state.observed.waits:
            if wait.rank not in found and wait.rank not in blamed:
                found[wait.rank] = Waiting(wait.rank, (), wait.op, wait.desc, wait.seq)
        return tuple(found[rank] for rank in sorted(found))

    def _stop(self, call: Entry, ranks: Sequence[int]) -> str:
        """The command that stops ``ranks`` at ``call``.  Its number since the job began is known,
        and is one of the first iteration's, where the recorder still holds the first call.
        """
        if call.op not in BY_NAME or call.desc == UNNAMED:
            return ""
        calls = {}
        for rank in ranks[:_STOPPED]:
            entries = self.state.dumps[rank].entries if rank in self.state.dumps else ()
            whole = not call.pair and bool(entries) and entries[0].record == 0
            number = f" #{call.seq}" if whole else ""
            calls[rank] = breakpoint_at(f"{call.op}{number} of {call.desc}", call.site)
        groups = [g for g in self.state.groups.values() if g.desc == "default_pg" and not g.partial]
        world = [rank for group in groups for rank in group.ranks]
        if self.state.has_logs and not world:  # a log does not say how many ranks there are
            return stop_command(calls, "N")
        return stop_command(calls, 1 + max(*world, *self.state.dumps, *self.state.missing, 0))
