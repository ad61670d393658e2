"""Ranks are compared with siblings by what both can know: made-up dumps of few ranks."""

import random

import pytest
from helpers.dump_values import Dump

from megatron_prism.features.hang import siblings
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.siblings import Conflict
from megatron_prism.features.hang.state import CallKey, JobState

TP, DP = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"


def state_of(dumps):
    return JobState(DumpSet({rank: of_value(dump.value(), rank) for rank, dump in dumps.items()}))


def messages(dump, kind, words, first):
    """Each word a batch of one message, numbered from ``first`` on."""
    for number, word in enumerate(words, first):
        dump.call(kind, word, done=True, p2p_seq_id=number)


ITERATION = ["send 0->1", "recv 0<-1"]


def pipelines(of_rank_0, of_sibling, of_other_group):
    """The state of ranks 0 and 2, siblings, by their batches of messages in their pipelines, and by
    those of the sibling in its tensor-parallel group."""
    dumps = {}
    for rank, words in ((0, of_rank_0), (2, of_sibling)):
        dump = Dump({"pp": [rank, rank + 1], "tp": [rank, rank + 1], "mp": [0, 1, 2, 3]})
        dump.call("mp", done=True, count=8)
        messages(dump, "pp", words, 1)
        if rank == 2:
            messages(dump, "tp", of_other_group, 1)
        dump.call("mp")
        dumps[rank] = dump
    state = state_of(dumps)
    assert state.siblings_of(0) == [0, 2]
    return state


@pytest.mark.parametrize("other_group", [[], ["recv 0<-1"] * 12], ids=["alone", "beside others"])
def test_the_first_rank_in_an_evaluation_has_not_lost_its_rhythm(other_group):
    """Its sibling, of which messages of another group have the same numbers, has not come there,
    and may come to change its messages as well."""
    state = pipelines([*ITERATION * 4, *["send 0->1"] * 2], ITERATION * 4, other_group)
    assert siblings.find_broken_rhythms(state) == []


@pytest.mark.parametrize("other_group", [[], ["send 0->1"] * 12], ids=["alone", "beside others"])
def test_messages_of_another_group_excuse_no_lost_rhythm(other_group):
    """The sibling made its usual message at that number, whatever it sends in another group."""
    state = pipelines([*ITERATION * 4, *["send 0->1"] * 2], ITERATION * 5, other_group)
    assert [odd.ranks for odd in siblings.find_broken_rhythms(state)] == [(0,)]


def test_a_rank_is_named_with_the_calls_of_its_own_stage():
    """One rank of each stage errs, in other calls: each is named with its own."""
    dumps = {}
    for replica in range(4):
        for stage, calls in enumerate((("tp", "dp"), ("tp", "mp"))):
            rank = 2 * replica + stage
            members = {"tp": [rank], "dp": [rank], "mp": [rank]}
            pipeline = [2 * replica, 2 * replica + 1]
            groups = {kind: [*ranks, 100 + rank] for kind, ranks in members.items()}
            dumps[rank] = Dump(groups | {"pp": pipeline})
            if replica == 3:
                calls = calls[::-1]
            for kind in calls:
                dumps[rank].call(kind)
    found = siblings.find_order_conflicts(state_of(dumps))
    assert found.opponent_counts == {6: 3, 7: 3}
    assert DP in found.conflict_of_rank[6].text
    assert "MODEL_PARALLEL_GROUP" in found.conflict_of_rank[7].text
    assert DP not in found.conflict_of_rank[7].text


@pytest.mark.parametrize("count", [60, 70, 100])
@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
def test_the_odd_one_of_many_unlike_siblings_is_named(count, odd):
    """Each sibling has made another number of calls; one made two of them the other way round."""
    odd %= count
    dumps = {}
    for rank in range(count):
        dump = Dump({"tp": [rank, 1000 + rank], "dp": [*range(count)], "mp": [rank, 2000 + rank]})
        for kind in ("dp", "tp") if rank == odd else ("tp", "dp"):
            dump.call(kind)
        dump.call("mp", count=1 + rank)
        dumps[rank] = dump
    found = siblings.find_order_conflicts(state_of(dumps))
    assert found.opponent_counts.keys() == {odd}
    assert bool(found.uncompared) == (count > 64)


def test_records_of_one_coalesced_call_that_another_separates_exchange_nothing():
    """Two siblings that differ in two later calls are compared, though a call that ended has a
    second record behind another one."""
    dumps = {}
    for rank in range(8):
        dump = Dump({"tp": [rank, 10 + rank], "dp": [rank, 20 + rank], "mp": [rank, 30 + rank]})
        dump.call("tp", done=True)
        dump.call("dp", done=True)
        dump.call("tp", done=True, collective_seq_id=1)  # the same call, issued as one
        dump.made["tp"], dump.ended["tp"] = 1, 1
        for kind in ("mp", "dp") if rank == 7 else ("dp", "mp"):
            dump.call(kind)
        dumps[rank] = dump
    found = siblings.find_order_conflicts(state_of(dumps))
    assert found.opponent_counts == {7: 7}


def test_a_call_of_unknown_time_is_not_the_oldest():
    """The oldest outstanding call stands for one that nobody recorded: of those with a time."""
    dumps = {}
    for rank in range(2):
        dumps[rank] = Dump({"tp": [rank, 10 + rank]})
    dumps[0].call("tp", "all_gather", time_created_ns=None)
    dumps[1].call("tp", "all_reduce", time_created_ns=5000)
    conflict = Conflict(CallKey(TP, False, 99), "")
    call = siblings.call_of(state_of(dumps), conflict, 0)
    assert call.op == "all_reduce"


@pytest.mark.parametrize(
    ("odd", "agreeing", "lost"),
    [(1, 2, 1), (1, 3, 1), (1, 3, 4), (1, 15, 48), (1, 6, 1), (2, 6, 2), (0, 3, 1), (1, 3, 0)],
)
def test_lost_dumps_turn_a_vote_as_often_as_drawn_losses_do(odd, agreeing, lost):
    """Half of the siblings agree: how often does a loss leave no more odd ones than there are?"""
    rng = random.Random(0)
    total = odd + agreeing + lost
    opinions = [place < total // 2 for place in range(total)]
    draws = [rng.sample(opinions, odd + agreeing).count(False) for _ in range(20_000)]
    share = sum(odd_left <= odd for odd_left in draws) / len(draws)
    # nothing to decide
    if not odd or not lost:
        share = 0
    assert abs(share - 0.05) > 0.01, "drawn too close to the bound to tell"
    assert siblings._may_be_turned(odd, agreeing, lost) == (share > 0.05)
