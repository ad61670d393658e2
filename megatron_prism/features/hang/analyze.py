"""Judge dumps: a verdict with culprits, victims, evidence and what is missing.

In : Flight Recorder dumps (``diagnose_dumps``).
Out: Diagnosis.  The rules of ``rules.RULES`` name ranks, in their order.

Where no rule names a rank, the cycle of waits is shown, or the call that nobody leaves.  A culprit
is never also a victim.  A rank that is late because it waits for another is no culprit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_prism.core.files import no_collector
from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import advice, consistency, fingerprints, rules, waits
from megatron_prism.features.hang.calls import Entry, Launch
from megatron_prism.features.hang.dumps import UNNAMED, DumpSet
from megatron_prism.features.hang.fingerprints import Disagreement
from megatron_prism.features.hang.group_names import with_names_apart
from megatron_prism.features.hang.mismatch import find_mismatches
from megatron_prism.features.hang.rules import Judgement, Rule, When
from megatron_prism.features.hang.state import QUEUED, JobState, call_text
from megatron_prism.features.hang.verdict import OUTSIDE, Culprit, Diagnosis, Waiting

_CALLED_OTHERWISE = (
    "operation",
    "dtype",
    "shape",
    "splits",
    "coalescing",
    "extra call",
    "skipped call",
)
_MAX_EVIDENCE = 20
_MAX_SHOWN = 4


def diagnose_dumps(observed: DumpSet, then: DumpSet | None = None) -> Diagnosis:
    """Return the verdict from dumps alone.

    Args:
        observed: The dumps.
        then: Dumps of the same job, written some seconds later: what moved between the two is
            alive, and where nothing moved the job stands still, whatever the first set looks like.
    """
    with no_collector():  # there are millions of entries, and no cycles
        # groups are named apart within one set, so what moved is read from the sets as written
        written, written_then = observed, then
        observed = with_names_apart(observed)
        then = None if then is None else with_names_apart(then)
        parted = consistency.consistent_dumps(observed if then is None else then)
        judgement = _begin(parted)
        verdict = _judge(judgement)
        verdict = replace(verdict, watchdog=advice.first_watchdog(judgement.state))
        if written_then is not None:
            verdict = consistency.unless_moved(verdict, written, written_then)
        # several that look late may wait for one another outside NCCL, also in a job that hangs
        elif not _stands_still(observed) or len(verdict.culprits) != 1:
            verdict = consistency.unless_running(
                verdict, parted, judgement.differ, judgement.excused
            )
        return replace(verdict, decides=advice.what_decides(verdict, judgement.state))


def _stands_still(observed: DumpSet) -> bool:
    """Tell whether all that is known is of logs in which time was out: the job does not run."""
    only_logs = all(dump.version == "log" for dump in observed.dumps.values())
    return only_logs and bool(observed.waits or observed.absent)


def _begin(parted: consistency.ConsistentDumps) -> Judgement:
    """Begin with what was set apart; a rank that was started again is named only if no other is."""
    evidence: list[str] = []
    for apart in (parted.of_other_attempts, parted.stale, parted.new):
        evidence += list(apart.values())[:_MAX_SHOWN]
    return Judgement(parted, evidence, excused=set(parted.new))


def _judge(judgement: Judgement) -> Diagnosis:
    """Return the verdict on a job that stands still."""
    state, parted = judgement.state, judgement.parted

    # there is nothing to judge
    if parted.strangers:
        judgement.evidence.append(parted.strangers)
        return Diagnosis(
            "undetermined",
            confidence="possible",
            evidence=tuple(judgement.evidence),
            missing=("the dumps of one hang alone", *state.lacks()),
        )
    # ranks never met in their groups
    if parted.otherwise:
        return _result(judgement, "mismatch", _started_otherwise(judgement))

    # logs say it
    judgement.evidence += state.evidence
    disagreement = fingerprints.disagreement(state.observed.differ)
    if disagreement is not None:
        return _by_torch(judgement, disagreement)
    has_calls = any(dump.entries or dump.status for dump in state.dumps.values())
    stack_of_rank = _stacks(state)
    if stack_of_rank and not has_calls:
        return _by_stacks(judgement, stack_of_rank)

    # nobody waits
    if not any(state.outstanding.values()) and not state.lates and not _has_events(state):
        return _idle(judgement)
    judgement.mismatches = find_mismatches(state)
    apply_rules(judgement)
    if not judgement.culprits:
        return _nobody(judgement)

    # a device that is stuck gives the verdict its name, a lost dump last
    named = sorted(
        judgement.culprits.values(),
        key=lambda culprit: (
            culprit.kind != "device stuck",
            culprit.kind == "missing dump",
            culprit.rank,
        ),
    )
    besides: list[str] = []
    for mismatch in judgement.mismatches:
        if not any(mismatch.text in line for line in judgement.evidence):
            besides.append(f"besides, {mismatch}")
    judgement.evidence += besides[:3]
    return _result(judgement, named[0].kind, named)


def _stacks(state: JobState) -> dict[int, str]:
    """Return rank -> where its stack stands, in a call or at work."""
    stacks: dict[int, str] = {}
    for rank, events in state.events.items():
        for event in events:
            if event.kind in rules.PLACES[1:]:
                stacks[rank] = event.text
    return stacks


def _has_events(state: JobState) -> bool:
    """Tell whether logs say more of a rank than that it handled an exception."""
    kinds: set[str] = set()
    for events in state.events.values():
        kinds.update(event.kind for event in events)
    return bool(kinds - set(rules.HANDLED)) or bool(state.observed.absent)


# -- rules ----------------------------------------------------------------------------------------
def apply_rules(judgement: Judgement) -> None:
    """Ask the rules for culprits, in the order of the table."""
    for rule in rules.RULES:
        held: set[int] = set()
        if rule.when is When.WAITS_REMAIN and judgement.culprits:
            held = judgement.held(judgement.culprits)
            # what was named explains all waits
            if not held:
                continue
        if rule.when is When.NOBODY_NAMED and judgement.culprits:
            continue
        _apply(judgement, rule, held)


def _apply(judgement: Judgement, rule: Rule, held: Collection[int]) -> None:
    """Add the culprits of a rule; its evidence goes where they are named already.

    Args:
        judgement: What is known.
        rule: The rule.
        held: Ranks that wait for something else than the culprits up to now; beside these a rank is
            named only if it holds some of them.
    """
    evidence_count, first = len(judgement.evidence), judgement.first
    named = rule.find(judgement)
    new: list[Culprit] = []
    for culprit in named:
        earlier_rule = judgement.named_by.get(culprit.rank)
        if earlier_rule is None or earlier_rule in rule.replaces:
            new.append(culprit)
    if held:
        explaining: list[Culprit] = []
        for culprit in new:
            if len(judgement.held({*judgement.culprits, culprit.rank})) < len(held):
                explaining.append(culprit)
        new = explaining
    elif rule.must_explain and judgement.held({culprit.rank for culprit in new}):
        new = []
    if named and not new:
        judgement.first = first
        del judgement.evidence[evidence_count:]
    for culprit in new:
        judgement.culprits[culprit.rank] = culprit
        judgement.named_by[culprit.rank] = rule.name


# -- without rules --------------------------------------------------------------------------------
def _by_torch(judgement: Judgement, disagreement: Disagreement) -> Diagnosis:
    """Return the verdict by torch's own check of collectives, which is taken at its word."""
    judgement.evidence.append(str(disagreement))
    call, desc = disagreement.usual, UNNAMED
    judgement.first = Entry(
        record=0,
        group=desc,
        desc=desc,
        op=call.op or "call",
        seq=call.seq,
        calls=call.seq,
        to=-1,
        numbers=((), ()),
        dtypes=(),
        state="scheduled",
        done=False,
        site="",
        created_ns=-1,
        timeout_ms=-1,
    )
    culprits: list[Culprit] = []
    if disagreement.whole:
        for rank in disagreement.odd:
            reason = f"makes {disagreement.calls[rank]}, where the others make {call}"
            culprits.append(Culprit(rank, disagreement.kind, reason))
        if not culprits:
            judgement.among = tuple(sorted(disagreement.calls))
    judgement.doubt = True  # ranks behind the first that differs are not in the log
    kind = "mismatch"
    if culprits:
        kind = disagreement.kind
    verdict = _result(judgement, kind, culprits)
    if not disagreement.whole:
        return verdict

    # the others wait for those
    blamed = sorted(culprit.rank for culprit in culprits)
    victims = {victim.rank: victim for victim in verdict.victims}
    for rank, own_call in disagreement.calls.items():
        if rank not in blamed and rank not in victims:
            op = own_call.op or "call"
            victims[rank] = Waiting(rank, tuple(blamed), op, desc, own_call.seq)
    return replace(verdict, victims=tuple(victims[rank] for rank in sorted(victims)))


def _by_stacks(judgement: Judgement, stack_of_rank: Mapping[int, str]) -> Diagnosis:
    """Show where hosts stand, without a dump: one that stands elsewhere may be the culprit."""
    ranks_of_place: dict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(stack_of_rank.items()):
        ranks_of_place[text].append(rank)
    places = sorted(ranks_of_place.items(), key=lambda place: -len(place[1]))
    judgement.evidence += [f"{ranks_text(ranks)}: {text}" for text, ranks in places[:8]]
    if 2 * len(places[0][1]) > len(stack_of_rank):
        elsewhere: list[int] = []
        for _, ranks in places[1:]:
            elsewhere += ranks
        judgement.among = tuple(elsewhere)
    verdict = _result(judgement, "undetermined", [])
    text = "dumps: a stack is of one moment, and says nothing of what the device waits for"
    return replace(verdict, missing=(text,))


def _started_otherwise(judgement: Judgement) -> list[Culprit]:
    """Name the ranks that were started with other parallel sizes than most."""
    culprits: list[Culprit] = []
    for rank, group in judgement.parted.otherwise.items():
        reason = f"has other members in {group.desc} than the rest list: compare its parallel "
        culprits.append(Culprit(rank, "groups", reason + "sizes and world size"))
    lines = [f"rank {culprit.rank} {culprit.why}" for culprit in culprits]
    judgement.evidence += lines[:_MAX_SHOWN]
    judgement.doubt = True  # or dumps of another job
    return culprits


def _idle(judgement: Judgement) -> Diagnosis:
    """Return the verdict where no call is outstanding."""
    state = judgement.state
    missing = state.lacks()

    # only logs know that ranks wait
    if state.observed.waits or state.events:
        rules.failed_processes(judgement)
        judgement.evidence += _logged_waits(state)
        if state.hidden:
            text = f"{ranks_text(sorted(state.hidden))} may wait for any other member: the log "
            text += "does not say to whom its message goes, or from whom it comes"
            judgement.evidence.append(text)
        return _result(judgement, "undetermined", [])

    # the dumps are empty, or not all are here
    is_empty = not any(dump.entries or dump.status for dump in state.dumps.values())
    is_partial = bool(state.missing or state.unreadable or state.hidden)
    # watchdogs print counters where something failed: a log of a job in health has none
    if not is_empty and not is_partial and not state.has_only_logs:
        return Diagnosis("healthy", missing=(*missing, waits.UNSEEN))
    text = "no call is outstanding in the dumps that are there"
    if state.has_only_logs:
        text = "no line of the logs names a call that waits"
    if is_empty and state.has_only_logs:
        text = "no line of the logs has the number of a call, or a counter"
    elif is_empty:
        text = "no dump or log holds a call or a counter: the recorders were off"
    judgement.evidence.append(text)
    return Diagnosis(
        "undetermined",
        confidence="possible",
        evidence=tuple(judgement.evidence),
        missing=missing,
    )


def _nobody(judgement: Judgement) -> Diagnosis:
    """Return the verdict where no rule names a rank: where the waits end."""
    state, mismatches, evidence = judgement.state, judgement.mismatches, judgement.evidence
    evidence += _logged_waits(state)
    evidence += map(str, mismatches[:3])
    if mismatches:
        judgement.first = mismatches[0].entry
        judgement.among = judgement.among or mismatches[0].among
    cycle = waits.smallest_cycle(state)
    ends = waits.last_waited_for(state)
    unknown_ends = [rank for rank in ends if not state.head(rank)]
    complete_calls: list[Entry] = []

    # a circle
    if cycle:
        ranks = ", ".join(map(str, cycle))
        evidence.append(f"ranks {ranks} wait for each other in a circle")
        judgement.among = judgement.among or tuple(cycle)
    # a call that differs
    elif mismatches:
        return _result(judgement, "mismatch", [])
    # ranks of which nothing is known
    elif unknown_ends:
        text = f"waited for: {format_ranks(unknown_ends)}, and no dump that can be judged says "
        evidence.append(text + "where that is")
        judgement.among = judgement.among or tuple(unknown_ends)
    else:
        complete_calls = waits.complete_calls(state)
        _show_ends(judgement, complete_calls, ends)

    verdict = "undetermined"
    reasons = [state.waits(rank)[0] for rank in cycle]
    is_deadlock = bool(cycle) and QUEUED not in reasons
    if mismatches:
        verdict = "mismatch"
    elif is_deadlock:
        verdict = "deadlock"
    # all waits end at ranks without a dump, though a cut dump or log may hide another end
    elif state.observed.cut_log:
        verdict = "undetermined"
    elif unknown_ends and set(unknown_ends) <= set(state.missing) and judgement.most_are_here():
        verdict = "missing dump"
    return _result(judgement, verdict, [], cycle)


def _show_ends(judgement: Judgement, complete_calls: Sequence[Entry], ends: Sequence[int]) -> None:
    """Add evidence where waits end at calls that have everybody, or at ranks that do not wait."""
    state = judgement.state
    if complete_calls:
        judgement.evidence.append(_complete_text(state, complete_calls))
        group = state.groups[complete_calls[0].group]
        if len(complete_calls) == 1 and not group.partial:
            judgement.among = judgement.among or group.ranks
    elif ends:
        judgement.among = judgement.among or tuple(ends)
        text = f"waited for: {format_ranks(ends)}, and these wait for nobody"
        judgement.evidence.append(text)
    elif not judgement.evidence:
        judgement.evidence.append("no dump or log holds a call that waits")


def _complete_text(state: JobState, calls: Sequence[Entry]) -> str:
    """Say of the calls at which all known members stand which ranks wait in each.

    Args:
        state: Of the job.
        calls: At least one; entries of one launch are one call.
    """
    call_of_launch: dict[Launch, Entry] = {}
    for call in calls:
        call_of_launch.setdefault(call.launch, call)
    distinct_calls = list(call_of_launch.values())

    # logs do not name all members of these groups
    is_partial = any(state.groups[call.group].partial for call in distinct_calls)
    if is_partial and len(distinct_calls) > 1:
        return (
            "none of these calls ended, and the log does not say who else belongs to their "
            "groups: ranks that did not come, a device, the network or NCCL"
        )

    sentences: list[str] = []
    has_doubt = False
    for call in distinct_calls:
        members = state.groups[call.group].ranks
        # axolotl#3476: the watchdog of rank 0 fired, and no line names its call
        doubtful_ranks = [rank for rank in members if _is_assumed(state, rank, call.group)]
        arrived_ranks = [rank for rank in members if rank not in doubtful_ranks]
        sentence = f"{ranks_text(arrived_ranks)} wait in {call_text(call)}"
        if doubtful_ranks:
            has_doubt = True
            sentence += f", and the logs do not say whether {ranks_text(doubtful_ranks)} came to it"
        sentences.append(sentence)
    # every member surely entered its call: the sentence for all calls says who left
    if not has_doubt:
        return waits.complete_call_lines(state)
    return "; ".join(sentences) + ": a rank that did not come, a device, the network or NCCL"


def _is_assumed(state: JobState, rank: int, group: str) -> bool:
    """Whether logs do not say that a rank came to the waiting call of a group."""
    dump = state.dumps.get(rank)
    return dump is not None and group in dump.assumed


def _logged_waits(state: JobState) -> list[str]:
    """Say which calls watchdogs name, each with all its ranks."""
    ranks_of_call: dict[str, list[int]] = defaultdict(list)
    for wait in state.observed.waits:
        ranks_of_call[f"{wait.op} #{wait.seq} of {wait.desc}"].append(wait.rank)
    lines: list[str] = []
    for call, ranks in ranks_of_call.items():
        if len(ranks) > 1:
            lines.append(f"{ranks_text(ranks)} wait in {call}, by their watchdogs")
        else:
            lines.append(f"{ranks_text(ranks)} waits in {call}, by its watchdog")
    return lines[:_MAX_SHOWN]


# -- results --------------------------------------------------------------------------------------
def _result(
    judgement: Judgement, verdict: str, culprits: list[Culprit], cycle: Collection[int] = ()
) -> Diagnosis:
    """Return the verdict with its victims, its first call and how sure it is."""
    state = judgement.state
    blamed = {culprit.rank for culprit in culprits}
    waiting = waits.waiting_ranks(state, blamed, cycle)
    victims = _with_logged(state, waiting.victims, blamed)
    confidence = _confidence(judgement, verdict, culprits)
    first = judgement.first or _first_call(state)
    group, op, seq, stop = "", "", -1, ""
    if first is not None:
        group, op, seq = first.desc, first.op, first.seq
        if blamed:
            stop = advice.stop_of(state, first, sorted(blamed))
    elif victims:
        group, op, seq = victims[0].group, victims[0].op, victims[0].seq

    # logs say that ranks wait outside NCCL
    if not victims and judgement.outside_ranks:
        victims = _with_outside(judgement, victims, blamed)
        if first is None:
            group, op = OUTSIDE, judgement.outside_call

    # counters alone say only its number
    if first is not None and op == "call":
        for victim in victims:
            if victim.group == group and victim.seq == seq:
                op = victim.op
                break
    if verdict in _CALLED_OTHERWISE:
        verdict = "mismatch"

    # where all of them are named for a call outside NCCL, their own calls are no part of the hang
    rules_of_blamed = {judgement.named_by.get(rank) for rank in blamed}
    if rules_of_blamed == {rules.OUTSIDE_NCCL}:
        group, op, seq, stop = OUTSIDE, judgement.outside_call, -1, ""
        victims = _with_outside(judgement, victims, blamed)
    return Diagnosis(
        verdict,
        tuple(sorted(culprits, key=lambda culprit: culprit.rank)),
        victims,
        group,
        op,
        seq,
        confidence,
        tuple(judgement.evidence[:_MAX_EVIDENCE]),
        waiting.chain,
        state.lacks(),
        candidates=tuple(sorted(set(judgement.among))),
        stop=stop,
    )


def _with_outside(
    judgement: Judgement, victims: Sequence[Waiting], blamed: Collection[int]
) -> tuple[Waiting, ...]:
    """Add the ranks that wait for a blamed one outside NCCL."""
    victim_of_rank = {victim.rank: victim for victim in victims}
    awaited = tuple(sorted(blamed))
    for rank in judgement.outside_ranks:
        if rank in blamed or rank in victim_of_rank:
            continue
        victim_of_rank[rank] = Waiting(rank, awaited, judgement.outside_call, OUTSIDE, -1)
    return tuple(victim_of_rank[rank] for rank in sorted(victim_of_rank))


def _first_call(state: JobState) -> Entry | None:
    """Return the oldest call of the first rank whose call waits for nobody, else of the first."""
    first: Entry | None = None
    for rank in sorted(state.outstanding):
        head = state.head(rank)
        if head is None:
            continue
        if not state.waits(rank)[0]:
            return head
        first = first or head
    return first


def _confidence(judgement: Judgement, verdict: str, culprits: Sequence[Culprit]) -> str:
    """Return "certain", "likely" or "possible"."""
    state = judgement.state
    is_ordered = verdict == "order" and state.history
    if (judgement.sure or is_ordered) and not state.missing and not judgement.doubt:
        return "certain"
    blamed = {culprit.rank for culprit in culprits}
    stuck_devices = {culprit.rank for culprit in culprits if culprit.kind == "device stuck"}

    # nobody is named, or only ranks that were started again; a file is lost more easily than a rank
    # dies; several devices may be one link
    if not blamed - judgement.parted.new.keys() or judgement.doubt or len(stuck_devices) > 1:
        return "possible"
    if all(culprit.kind == "missing dump" for culprit in culprits):
        return "possible"
    return "likely"


def _with_logged(
    state: JobState, victims: Sequence[Waiting], blamed: Collection[int]
) -> tuple[Waiting, ...]:
    """Add victims that only a log says wait, and its words where dumps know none."""
    logged_waits = {(wait.rank, wait.desc, wait.seq): wait for wait in state.observed.waits}
    victim_of_rank: dict[int, Waiting] = {}
    for victim in victims:
        wait = logged_waits.get((victim.rank, victim.group, victim.seq))
        if victim.op == "call" and wait is not None:
            victim = replace(victim, op=wait.op)
        victim_of_rank[victim.rank] = victim
    for wait in state.observed.waits:
        if wait.rank not in victim_of_rank and wait.rank not in blamed:
            victim_of_rank[wait.rank] = Waiting(wait.rank, (), wait.op, wait.desc, wait.seq)
    return tuple(victim_of_rank[rank] for rank in sorted(victim_of_rank))
