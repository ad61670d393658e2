"""Hangs of kinds that no rule was written for: drawn, with lost dumps and short recorders.

Nobody innocent is named, whatever the recorder holds.  Each kind is planted in jobs of several
iterations at a drawn place; some dumps are lost, and some recorders kept a few calls only.
"""

import random

import pytest
from helpers import production
from helpers.production import DP, EVERYBODY, RankFault, ring_of

from megatron_prism.core.programs.ops import Op
from megatron_prism.features.hang import analyze, export
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.graph import stall

BASES = {"ring": production.ring, "dynamic": production.dynamic}
HOWS = {
    "history": {"active_only": False, "stacks": True},
    "timed": {"timing": True},
    "outstanding": production.ACTIVE,
}


def job(name):
    return production.plain_job(BASES[name]()) if name in BASES else production.job(name)


def draw_part(rng, it):
    """(a rank, one of its iterations)."""
    rank = rng.choice(list(it.parts))
    return rank, rng.choice([part for part, ops in it.parts[rank] if len(ops) > 5])


def ends_in(it, rank, part, *more):
    """The rank does nothing behind that part but ``more``."""
    parts = [name for name, _ in it.parts[rank]]
    it.parts[rank] = it.parts[rank][: parts.index(part) + 1]
    it.of(rank, part).extend(more)


# each takes a job, and returns the culprits with the standstill's faults
def exchanged_groups(rng, it):
    """Two calls of two groups change places."""
    rank, part = draw_part(rng, it)
    ops = it.of(rank, part)
    free = [at for at, op in enumerate(ops) if op.group and op.handle < 0 and op.batch < 0]
    free = [at for at in free if ops[at].name not in ("send", "recv", "wait")]
    pairs = [(a, b) for a, b in zip(free, free[1:], strict=False) if ops[a].group != ops[b].group]
    if pairs:
        first, second = rng.choice(pairs)
        ops[first], ops[second] = ops[second], ops[first]
    return {rank}, {}


def exception_and_teardown(rng, it):
    """An exception in a callback: the rank waits in the barrier of its teardown."""
    rank, part = draw_part(rng, it)
    del it.of(rank, part)[rng.randrange(1, len(it.of(rank, part))) :]
    ends_in(it, rank, part, Op("barrier", EVERYBODY, "uint8", 1, 1, site="train.py:9"))
    return {rank}, {}


def exception_and_silence(rng, it):
    rank, part = draw_part(rng, it)
    del it.of(rank, part)[rng.randrange(1, len(it.of(rank, part))) :]
    ends_in(it, rank, part)
    return {rank}, {}


def evaluation_on_some(rng, it):
    some = set(rng.sample(sorted(it.parts), rng.choice([1, 2, 3, 4])))
    for rank in some:
        it.parts[rank] = [row for row in it.parts[rank] if row[0] != "evaluation"]
    return some, {}


def save_on_some(rng, it):
    """Some ranks save: a barrier, or a gather of their states."""
    some = set(rng.sample(sorted(it.parts), rng.choice([1, 2, 3])))
    barrier = Op("barrier", EVERYBODY, "uint8", 1, 1, site="checkpointing.py:700")
    gather = Op("all_gather", DP, "fp32", 8, 64, site="distrib_optimizer.py:900")
    call, at = rng.choice([barrier, gather]), rng.randrange(1, 3)
    for rank in some:
        it.parts[rank].insert(at, ("saving", [call]))
    return some, {}


def stops_before_its_step(rng, it):
    """A check for NaN ends the rank before gradients are reduced; its process may linger."""
    rank, part = draw_part(rng, it)
    before = 0
    for name, ops in it.parts[rank]:
        if name == part:
            break
        before += len(ops)
    steps = [at for at, op in enumerate(it.of(rank, part)) if op.group == DP]
    at = before + (steps[0] if steps else 1)
    return {rank}, {rank: RankFault(host=at, silent=rng.random() < 0.5)}


def killed_without_a_word(rng, it):
    rank = rng.choice(list(it.parts))
    count = sum(len(ops) for _, ops in it.parts[rank])
    return {rank}, {rank: RankFault(host=rng.randrange(count - 2), silent=True)}


KINDS = (exchanged_groups, exception_and_teardown, exception_and_silence, evaluation_on_some,
         save_on_some, stops_before_its_step, killed_without_a_word)  # fmt: skip


def judged(kind, world, how, seed):
    """(culprits, ranks whose dumps are lost, the verdict)."""
    rng = random.Random(f"{kind.__name__} {world} {how} {seed}")
    it = job(world)
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    culprits, faults = kind(rng, it)
    state = stall.run_until_stalled(it.programs(), faults)
    values = dict(export.dumps_of(state, **HOWS[how]))
    if how != "outstanding" and rng.random() < 0.3:
        ring_of(rng.choice([4, 16, 60]))(values)
    lost = set(rng.sample(sorted(values), rng.choice([0, 0, 1, 2])))
    dumps = {rank: of_value(value, rank) for rank, value in values.items() if rank not in lost}
    return culprits, lost, analyze.diagnose_dumps(DumpSet(dumps))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("world", ["moe", "interleaved", "ring", "dynamic"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nobody_innocent_is_named(kind, world, how):
    for seed in range(2):
        culprits, lost, found = judged(kind, world, how, seed)
        # a lost dump looks like a process that died, and is said to be possible only
        possible = {culprit.rank for culprit in found.possibly} & lost
        named = {culprit.rank for culprit in found.culprits} - possible
        assert named <= culprits, (seed, found)


# -- drawn cases in which an innocent was named, with what corrected it ---------------------------
def verdict_of(kind, world, how, files, *faults_of):
    it = job(world)
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    faults = kind(it) or {}
    values = dict(export.dumps_of(stall.run_until_stalled(it.programs(), faults), **HOWS[how]))
    files(values)
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    return {culprit.rank for culprit in found.culprits}, found


def saves(*ranks, at=2):
    """Ranks enter a barrier of everybody between two iterations."""

    def change(it):
        for rank in ranks:
            barrier = Op("barrier", EVERYBODY, "uint8", 1, 1, site="checkpointing.py:700")
            it.parts[rank].insert(at, ("saving", [barrier]))

    return change


@pytest.mark.parametrize("ranks", [(4, 5, 7), (8, 9, 10), (1, 2, 3)])
def test_most_siblings_do_not_outvote_the_group_that_never_comes(ranks):
    """Three of a stage's four save; the fourth was named for another order than theirs."""
    named, found = verdict_of(saves(*ranks), "interleaved", "outstanding", lambda values: None)
    assert named <= set(ranks), found


@pytest.mark.parametrize(("rank", "how"), [(22, "history"), (4, "outstanding"), (9, "outstanding")])
def test_replicas_with_fewer_microbatches_are_not_named_beside_a_rank_that_saves(rank, how):
    """Replicas of 4, 3, 4 and 2 microbatches: ranks 2 and 3, or 5, were named."""
    for at in (1, 2):
        named, found = verdict_of(saves(rank, at=at), "dynamic", how, lambda values: None)
        assert named <= {rank}, found


@pytest.mark.parametrize("lost", [1, 2])
def test_a_member_without_a_dump_may_have_come(lost):
    """Two of four wait in a barrier, the dump of one is lost: no majority left it out."""
    it = production.plain_job(production.line(4))
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    saves(0, 3)(it)
    values = dict(export.dumps_of(stall.run_until_stalled(it.programs(), {}), **HOWS["history"]))
    del values[lost]
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert found.possibly == found.culprits, found


DRAWN = [
    # rank 1's two siblings save, and the dump of the third is lost: rank 1 was out of their order
    (save_on_some, "interleaved", "timed", 4),
    # four calls of each rank are left: rank 2 was behind replicas by the calls that are
    (save_on_some, "dynamic", "timed", 4),
    # 12 of 15 recorders are too short to say which call is the oldest: three "never started" it
    (killed_without_a_word, "interleaved", "history", 2),
    # rank 19's replica has three microbatches, most have four; the dump of its other rank is lost
    (killed_without_a_word, "dynamic", "timed", 11),
    # rank 15 left out a message that culprit 14 alone had answered
    (evaluation_on_some, "interleaved", "history", 14),
]


@pytest.mark.parametrize(("kind", "world", "how", "seed"), DRAWN)
def test_nobody_innocent_is_named_in_what_was_drawn(kind, world, how, seed):
    culprits, lost, found = judged(kind, world, how, seed)
    possible = {culprit.rank for culprit in found.possibly} & lost
    assert {culprit.rank for culprit in found.culprits} - possible <= culprits, found


@pytest.mark.parametrize("lost", [(18,), (19,), (16, 18), (10, 18)])
def test_a_replica_with_other_microbatches_is_not_odd_for_a_lost_dump(lost):
    """Replicas of 4, 3, 4 and 2 microbatches: of ranks 18 and 19, of 3, one left no dump."""
    it = job("dynamic")
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    killed = {6: RankFault(host=1, silent=True)}
    values = dict(export.dumps_of(stall.run_until_stalled(it.programs(), killed), timing=True))
    for rank in lost:
        del values[rank]
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert {culprit.rank for culprit in found.culprits} <= {6, *lost}, found


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("savers", "lost"), [((0, 2, 9), 1), ((0, 1, 5), 3), ((8, 9, 5), 11), ((12, 14, 5), 13)]
)
def test_a_sibling_without_a_dump_may_turn_the_vote(savers, lost, how):
    """Of a stage's four two save and one is lost: the fourth is not the odd one for it."""

    def lose(values):
        del values[lost]

    named, found = verdict_of(saves(*savers), "interleaved", how, lose)
    assert named <= set(savers), found


@pytest.mark.parametrize("how", HOWS)
def test_of_partners_in_an_exchange_outside_nccl_none_is_named(how):
    """Rank 5's host stops, and rank 4 waits for its experts: both have no call outstanding."""
    it = production.plain_job(production.flex())
    stuck = {5: RankFault(host=len(it.of(5, "1")) + 1)}
    values = dict(export.dumps_of(stall.run_until_stalled(it.programs(), stuck), **HOWS[how]))
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert not {culprit.rank for culprit in found.culprits} - {5}, found
    assert {4, 5} <= set(found.candidates), found
