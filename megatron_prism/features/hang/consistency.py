"""Set dumps apart that are of another job, or of another moment, than the others.

In : a DumpSet.  Out: ``ConsistentDumps``: the dumps that belong together, and why the others do
not.  A dump that somebody asked for by hand, before the job stood still, makes its rank look late;
one that was left in the folder by another job describes other groups.  Neither says who is to
blame.

A call that needs everybody ends nowhere before all have issued it.  So a rank that has not issued a
call which ended elsewhere was written down earlier.  The root of a broadcast may be ahead of the
others: where the calls are not known (outstanding ones only), groups in which Megatron broadcasts
must be ``_AHEAD`` calls apart.

The other way round, a few ranks may say that calls ended in which most members still wait.  So does
who was written down after its communicators were aborted (ProcessGroupNCCL's watchdog then takes
its calls for completed), and a dump that an earlier attempt, which got further, left behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks, ranks_text
from megatron_prism.features.hang import waits
from megatron_prism.features.hang.dumps import Dump, DumpSet, Group, Launch
from megatron_prism.features.hang.siblings import fewest_at_odds
from megatron_prism.features.hang.state import CallKey, JobState, issue_order, key_of
from megatron_prism.features.hang.verdict import Diagnosis

_JOINT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_ROOTLESS = (
    "EXPERT_",
    "DATA_PARALLEL",
    "INTRA_",
    "MODEL_PARALLEL",  # not the tensor-parallel ones, which broadcast batches
)  # groups in which Megatron's iterations are joint
_MIXED = ("PIPELINE", "CONTEXT", "default_pg")  # their counters may count messages too
_AHEAD = 32
_PART = 4  # of so many dumps one may be of another moment,
_MOVED = 6  # or one that was not aborted
_FEW, _EIGHT = 2, 8  # culprits that need nothing in common; and of so many ranks one
EPOCH_NS = 10**18  # 2001: smaller numbers are counters, not clocks
_SHARE = 10  # nothing is stuck before a tenth of its time-out is over
_STILL = {"host stuck", "device stuck"}
_MOVING = {*_STILL, "order", "skipped call", "extra call"}
_PROOF = ("proof that nothing moves: who is late in a job that runs leaves the same dumps; a "
          "second set, some seconds later, tells: --then DIR")  # fmt: skip
_SEVERAL = ("CONTEXT", "HIERARCHICAL", "HYBRID")  # a rank may be in several of these
_FEWER = 4  # times fewer ranks are further on than are behind: those few are the odd ones


@dataclass(frozen=True)
class ConsistentDumps:
    """state : of what can be judged;  stale: rank -> why its dump is of another moment;
    new   : rank -> that its dump has no call yet, though others went on: who was started again
            leaves such a dump, and so does who was written down before its first call
    strangers : why there is nothing to judge; "" if there is
    otherwise : ranks that have other groups than the rest, which never met in them -> one of these
    """

    state: JobState
    stale: Mapping[int, str] = field(default_factory=dict)
    new: Mapping[int, str] = field(default_factory=dict)
    strangers: str = ""
    otherwise: Mapping[int, Group] = field(default_factory=dict)


def consistent_dumps(found: DumpSet) -> ConsistentDumps:
    """The dumps that belong together."""
    found = _told_apart(_named(found))
    state, others = JobState(found), _other_groups(found)
    if others and 2 * len(others) < len(found.dumps) and _never_met(found, others):
        return ConsistentDumps(state, otherwise=others)
    if len(others) > 1:
        rank = min(others)
        text = (f"{ranks_text(others)} describe other groups than the rest (group "
                f"{others[rank].name} on rank {rank}): dumps of two jobs, or of ranks that were "
                "started with other parallel sizes")  # fmt: skip
        return ConsistentDumps(state, strangers=text)
    apart = _aborted(state)
    state = _without(found, apart) if apart else state
    stale, new, ahead = _stale(state)
    if ahead and _FEWER * len(ahead) <= len(stale):
        rest = _without(found, {*apart, *ahead})
        if not _stale(rest)[0]:  # that few explain it is likelier than that most are old
            apart, state, stale, new = apart | ahead, rest, {}, _stale(rest)[1]
    moving = stale.keys() | {r for r in apart if any(not e.done for e in found.dumps[r].entries)}
    several = max(1, len(found.dumps) // _MOVED)
    if _PART * len(stale.keys() | apart) > len(found.dumps) or len(moving) > several:
        ranks = ranks_text({*apart, *stale})
        text = f"the dumps of {ranks} are of {'another' if apart else 'an earlier'} moment"
        return ConsistentDumps(state, strangers=text)
    if stale:
        state = _without(found, {*apart, *stale})
    return ConsistentDumps(state, apart | stale, new)


def unless_running(
    verdict: Diagnosis, parted: ConsistentDumps, differ: Collection[Launch], excused: set[int]
) -> Diagnosis:
    """No verdict on who is behind where the job may have been running when dumps were written.

    What a rank issued it has issued; what it saw end is as old as its watchdog's last look, 100 ms,
    and dumps are of moments up to seconds apart.  So every call to which all have come may have
    ended since (``waits.whom_calls_need``).  A job that stands still is not changed by
    that: whoever waits does so in the end for the culprits.  And few stop by themselves at once.

    Args:
        verdict: what the dumps say if the job stood still.
        parted: the dumps of one moment, and what was set apart.
        differ: calls that members make differently: these do not end.
        excused: ranks that are not named though others wait for them.
    """
    named, state = {c.rank for c in verdict.culprits}, parted.state
    stuck = {c.kind for c in verdict.culprits} & _MOVING
    if not stuck and (verdict.culprits or verdict.verdict != "deadlock"):
        return verdict
    suspects = named or set(verdict.candidates)
    late = f"those who look late ({ranks_text(suspects)})"
    again = "perhaps the job was running: a second set of dumps, --then DIR, tells"
    waits_ns = [(dump.written_ns - e.created_ns, e.timeout_ms * 10**6)
                for rank, dump in state.dumps.items() if dump.written_ns
                for e in state.outstanding[rank] if e.created_ns > EPOCH_NS]  # fmt: skip
    oldest, limit = max(waits_ns, default=(0, 0))
    several = _PART * len({*parted.stale, *parted.new}) > len(state.dumps) + len(parted.stale)
    if 0 <= _SHARE * oldest < limit:
        text = (f"the oldest call waits {oldest / 1e9:.0f} s of its {limit / 1e9:.0f} s; less than "
                f"a tenth is no hang: {again}")  # fmt: skip
    elif free := _free_of(state, suspects | excused, differ):
        text = f"{ranks_text(free)} may wait for others than {late}: {again}"
    elif several or len(named) > 1 and (parted.stale or _by_chance(verdict, state)):
        text = f"nothing in common have {late}, or their dumps are of several moments: {again}"
    else:
        return replace(verdict, missing=(*verdict.missing, *([_PROOF] * bool(stuck & _STILL))))
    return replace(
        verdict,
        verdict="undetermined",
        confidence="possible",
        culprits=(),
        candidates=tuple(sorted(suspects)),
        evidence=(text, *verdict.evidence),
    )


def unless_moved(verdict: Diagnosis, before: DumpSet, after: DumpSet) -> Diagnosis:
    """The verdict on the second of two sets of dumps, by what moved between them.

    Who made a call or saw one end is alive and no culprit; a job all of whose ranks did so runs.
    """
    both = sorted(before.dumps.keys() & after.dumps.keys())
    moved = [rank for rank in both if position(before.dumps[rank]) != position(after.dumps[rank])]
    text = f"{len(moved)} of {counted(len(both), 'rank')} made calls, or saw one end, in between"
    text = text if both else "no rank left a dump in both sets: what moved is not known"
    evidence = (text, *verdict.evidence)
    if both and len(moved) == len(both):
        return Diagnosis("healthy", evidence=evidence, missing=verdict.missing)
    if not moved and both:
        return replace(verdict, evidence=evidence)
    left = tuple(culprit.rank for culprit in verdict.culprits if culprit.rank not in moved)
    return replace(verdict, verdict="undetermined", culprits=(), confidence="possible",
                   candidates=left or verdict.candidates, evidence=evidence)  # fmt: skip


def position(dump: Dump) -> tuple[object, ...]:
    """Where a rank stands: its counters, its last record, and what of its calls ended."""
    last = dump.entries[-1].record if dump.entries else -1
    return dict(dump.status), last, [e.launch for e in dump.entries if not e.done]


def _free_of(state: JobState, ranks: Collection[int], differ: Collection[Launch]) -> list[int]:
    """Who waits, and in the end for none of ``ranks``, nor for somebody of whom dumps do not say
    what it waits for.
    """
    back = waits.reversed_edges(waits.whom_calls_need(state, differ=differ))
    unknown = {*state.hidden, *state.mute(), *(back.keys() - state.dumps.keys())}
    reached = waits.reached_from({*ranks, *unknown}, back)
    return [r for r, calls in state.outstanding.items() if calls and r not in reached]


def _by_chance(verdict: Diagnosis, state: JobState) -> bool:
    """Whether they are too many to have stopped by themselves, or stopped at different calls, and
    are no group or stage as a whole, which may wait for what dumps do not show.  Hosts and devices
    do not stand for one reason.
    """
    stuck = [c for c in verdict.culprits if c.kind in _STILL]
    ranks = {c.rank for c in stuck}
    most = min(_FEW, -(-len(state.dumps) // _EIGHT))
    firsts = dict[int, CallKey]()  # of hosts: the first call that waits for each
    for (_, rank), entry in sorted(state.lates.items(), key=lambda late: issue_order(late[1])):
        firsts.setdefault(rank, key_of(entry))
    hosts = {firsts.get(c.rank) for c in stuck if c.kind == "host stuck"}
    apart = len(ranks) > most or len(hosts) > 1
    units = (*(g.ranks for g in state.groups.values()), *state.siblings.values())
    whole = any(ranks == set(unit) != state.dumps.keys() for unit in units)
    return len({c.kind for c in stuck}) > 1 or apart and not whole


def _named(found: DumpSet) -> DumpSet:
    """Counters that a dump cannot name, as where group names are hashes and it has no calls: ranks
    with groups of the same descriptions made them in the same order, and others' calls tell which
    number is whose.
    """
    if not any(dump.unnamed for dump in found.dumps.values()):
        return found
    known: dict[tuple[str, ...], set[tuple[str, str]]] = defaultdict(set)
    kinds = {rank: tuple(sorted(g.desc for g in d.groups.values()))
             for rank, d in found.dumps.items()}  # fmt: skip
    for rank, dump in found.dumps.items():
        known[kinds[rank]] |= {(i, dump.groups[n].desc) for i, n in dump.ids.items()
                               if n in dump.groups}  # fmt: skip
    dumps = dict(found.dumps)
    for rank, dump in found.dumps.items():
        rows, descs = known[kinds[rank]], dict(known[kinds[rank]])
        names = {group.desc: name for name, group in dump.groups.items()}
        if len(rows) == len(descs) == len(set(descs.values())) and len(names) == len(kinds[rank]):
            more = {names[descs[i]]: s for i, s in dump.unnamed.items() if i in descs}
            notes = tuple(note for note in dump.notes if len(more) < len(dump.unnamed)
                          or "cannot be named" not in note)  # fmt: skip
            dumps[rank] = replace(dump, status={**more, **dump.status}, notes=notes)
    return replace(found, dumps=dumps)


def _told_apart(found: DumpSet) -> DumpSet:
    """Descriptions that a rank's groups share, such as torch's "undefined", with the group's name:
    what ranks call there is compared inside a group, and not with other groups of that word.
    """
    shared = set[str]()
    for dump in found.dumps.values():
        names = {(g.name, g.desc) for g in dump.groups.values() if len(g.ranks) != 1}
        counts = Counter(desc for _, desc in names)  # Megatron's own words stay
        shared |= {desc for desc, n in counts.items() if n > 1 and "_GROUP" not in desc}
    if not shared:
        return found
    dumps = {}
    for rank, dump in found.dumps.items():
        groups = {n: replace(g, desc=f"{g.desc} (group {n})") if g.desc in shared else g
                  for n, g in dump.groups.items()}  # fmt: skip
        entries = tuple(e._replace(desc=f"{e.desc} (group {e.group})") if e.desc in shared else e
                        for e in dump.entries)  # fmt: skip
        dumps[rank] = replace(dump, groups=groups, entries=entries)
    return replace(found, dumps=dumps)


def _counts_collectives(state: JobState, group: Group) -> bool:
    """Whether its counters are of collectives alone."""
    return group.name not in state.pairs and not group.desc.startswith(_MIXED)


def _without(found: DumpSet, apart: Collection[int]) -> JobState:
    kept = {rank: dump for rank, dump in found.dumps.items() if rank not in apart}
    return JobState(replace(found, dumps=kept))


def _aborted(state: JobState) -> dict[int, str]:
    """Ranks that say a call ended in which more of its members, several, still wait -> that."""
    first_calls: dict[str, tuple[int, str]] = {}
    for outstanding in state.outstanding.values():
        for entry in outstanding:
            call = entry.seq, entry.op
            if entry.op in _JOINT and call <= first_calls.get(entry.group, call):
                first_calls[entry.group] = call
    found: dict[int, str] = {}
    for name, (seq, op) in sorted(first_calls.items(), reverse=True):
        group = state.groups[name]
        if not _counts_collectives(state, group):
            continue
        ended = [r for r in group.ranks if state.completed.get((name, r), -1) >= seq]
        wait = [r for r in group.ranks if state.completed.get((name, r), -1) < seq <=
                state.enqueued.get((name, r), -1)]  # fmt: skip
        # an abort leaves nothing outstanding, and who waits elsewhere has not been through one
        absent = [r for r in group.ranks if r in state.dumps
                  and state.enqueued.get((name, r), -1) < seq]  # fmt: skip
        through = ended and not any(state.outstanding[r] for r in ended)
        if not (absent or through) and state.dumps.keys() >= set(group.ranks):
            continue  # all came: it ended, and others' counters are older
        sure = absent or len(wait) >= max(2, len(ended))
        sure = sure or not any(c for r, c in state.outstanding.items() if r not in wait)
        if len(wait) > max(1, len(ended)) or (wait and through and sure):
            text = (f"{op} #{seq} of {group.desc} ended on it, and ranks {format_ranks(wait)} "
                    "still wait in it: written after its communicators were aborted, or left by "
                    "another attempt")  # fmt: skip
            for rank in ended:
                found.setdefault(rank, f"the dump of rank {rank} is of another moment: {text}")
    return found


def _other_groups(found: DumpSet) -> dict[int, Group]:
    """Fewest ranks without whom all agree who is in whose group of a description that Megatron
    gives once to a rank -> one such group; both sides where there are several choices.
    """
    own: dict[str, dict[int, Group]] = defaultdict(dict)
    for rank, dump in found.dumps.items():
        mine = [g for g in dump.groups.values() if rank in g.ranks
                and ("_PARALLEL_GROUP" in g.desc or g.desc == "default_pg")
                and not g.desc.startswith(_SEVERAL)]  # fmt: skip
        several = Counter(group.desc for group in mine)
        for group in mine:
            if several[group.desc] == 1:
                own[group.desc][rank] = group
    at_odds, where = defaultdict[int, set[int]](set), dict[int, Group]()
    for groups in own.values():
        listed: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, group in groups.items():
            listed[group.ranks].append(rank)
        for ranks, listers in listed.items():
            others = {r for r in ranks if r in groups and groups[r].ranks != ranks}
            for rank in listers if others else ():
                where.setdefault(rank, groups[rank])
                at_odds[rank] |= others
                for other in others:
                    at_odds[other].add(rank)
                    where.setdefault(other, groups[other])
    odd = fewest_at_odds(at_odds, dict.fromkeys(at_odds, 1)).opponent_counts
    return {rank: where[rank] for rank in sorted(odd)}


def _never_met(found: DumpSet, where: Mapping[int, Group]) -> bool:
    """Whether no member of the groups about which dumps disagree saw a call of them end: no
    communicator comes of ranks that were started with other parallel sizes.
    """
    names = {group.name for group in where.values()}
    rows = (d.status[n] for d in found.dumps.values() for n in names & d.status.keys())
    done = (e.done for d in found.dumps.values() for e in d.entries if e.group in names)
    return max((row.completed for row in rows), default=0) < 1 and not any(done)


def _stale(state: JobState) -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    """(of an earlier moment, without a call yet, further on than those): rank -> why."""
    fresh = {r for r, dump in state.dumps.items() if not dump.entries
             and all(status.enqueued < 1 for status in dump.status.values())}  # fmt: skip
    found: dict[int, str] = {}
    new: dict[int, str] = {}
    ahead: dict[int, str] = {}
    for name, group in state.groups.items():
        if not _counts_collectives(state, group):
            continue
        done = [(state.completed.get((name, r), -1), r) for r in group.ranks if r in state.dumps]
        last, where = max(done, default=(-1, -1))
        for _, rank in done:
            # of its calls that is not there
            first = max(1, state.enqueued.get((name, rank), last) + 1)
            if first > last or rank in {*found, *new} or not _joint(state, name, first, last):
                continue
            calls = f"#{first}" if first == last else f"#{first} to #{last}"
            ended = f"{calls} of {group.desc} ended on rank {where}"
            if rank in fresh:
                new[rank] = (f"rank {rank} has made no call, though {ended}: it was started again, "
                             "or its dump is of before its first call")  # fmt: skip
            else:
                found[rank] = f"the dump of rank {rank} is of an earlier moment: {ended}"
                for other in (r for calls_done, r in done if calls_done >= first):
                    ahead[other] = (f"the dump of rank {other} is of a later moment, or left by "
                                    f"another attempt: {calls} of {group.desc} ended there, and "
                                    "on few others")  # fmt: skip
    return found, new, ahead


def _joint(state: JobState, name: str, first: int, last: int) -> bool:
    """Whether one of the calls from ``first`` to ``last`` needs everybody."""
    ops: dict[int, str] = {}
    for rank in state.groups[name].ranks:
        if rank in state.dumps and len(ops) <= last - first:
            ops |= {e.seq: e.op for e in state.dumps[rank].entries
                    if e.group == name and not e.pair and first <= e.seq <= last}  # fmt: skip
    desc = state.groups[name].desc
    if not ops:
        return desc.startswith(_ROOTLESS) or last - first >= _AHEAD
    return any(op in _JOINT for op in ops.values())
