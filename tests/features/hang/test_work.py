"""The work of a verdict grows with the calls in the dumps, not with their square."""

import json
import pickle
import random
import sys

import pytest
from helpers.dump_values import Dump

from megatron_prism.features.hang import analyze, recorded, waits
from megatron_prism.features.hang.calls import Calls
from megatron_prism.features.hang.dumps import DumpSet, of_value, parse
from megatron_prism.features.hang.state import JobState

STAGES = 2


def stalled_job(replicas, rounds):
    """Dumps of pipelines of two stages that queued ``rounds`` messages and calls behind one call
    to which rank 0 never came: all of them are outstanding."""
    size = STAGES * replicas
    dumps = {}
    for rank in range(size):
        replica, stage = divmod(rank, STAGES)
        pipeline = [replica * STAGES + place for place in range(STAGES)]
        dump = Dump({"mp": list(range(size)), "pp": pipeline, "dp": list(range(stage, size, 2))})
        if rank != 0:
            dump.call("mp", "all_reduce")
        for number in range(rounds):
            arrow = f"send {stage}->{1 - stage}" if stage == 0 else f"recv {stage}<-{1 - stage}"
            dump.call("pp", arrow, p2p_seq_id=number + 1)
            dump.call("dp", "all_gather")
        dumps[rank] = of_value(dump.value(), rank)
    return DumpSet(dumps)


def work(dumps):
    """How many steps of Python's interpreter a verdict takes inside ``hang``, and who holds all."""
    steps = 0

    def traced(frame, event, argument):
        nonlocal steps
        if "hang" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return traced

    sys.settrace(traced)
    try:
        verdict = analyze.diagnose_dumps(dumps)
        state = JobState(dumps)
        ends = waits.ranks_where_waits_end(state, [0, 1])
    finally:
        sys.settrace(None)
    assert verdict.victims
    assert 0 in ends
    return steps


@pytest.mark.parametrize("grown", [(4, 32), (8, 16)], ids=["twice the calls", "twice the ranks"])
def test_the_work_of_a_verdict_is_linear(grown):
    """A rank's calls are looked at once, however often somebody asks for one of them."""
    before, after = work(stalled_job(4, 16)), work(stalled_job(*grown))
    assert after < 2.5 * before, f"{after / before:.1f} times the steps for twice the entries"


def test_one_collective_of_each_stretch_is_asked_for_whom_it_waits(monkeypatch):
    """Calls that are queued behind one another wait for the same ranks."""
    asked = []
    ask = JobState._blockers

    def counted(state, rank, entry, first):
        asked.append(entry.pair)
        return ask(state, rank, entry, first)

    monkeypatch.setattr(JobState, "_blockers", counted)
    counts = []
    for rounds in (16, 64):
        asked.clear()
        waits.ranks_where_waits_end(JobState(stalled_job(8, rounds)), [0, 1])
        counts.append(asked.count(False))
    assert counts[0] == counts[1] > 0


def uneven_job(seed):
    """Dumps of ranks that stand, each by itself, anywhere in calls of two groups and messages."""
    draw = random.Random(seed)
    size = 6
    dumps = {}
    for rank in range(size - draw.randrange(2)):
        half = [member for member in range(size) if member % 2 == rank % 2]
        dump = Dump({"mp": list(range(size)), "dp": half})
        for _ in range(draw.randrange(8)):
            dump.call(draw.choice(["mp", "dp"]), "all_reduce", done=draw.random() < 0.3)
        dumps[rank] = of_value(dump.value(), rank)
    return DumpSet(dumps)


@pytest.mark.parametrize("seed", range(40))
def test_a_stretch_waits_for_the_ranks_that_each_of_its_calls_waits_for(seed):
    state = JobState(uneven_job(seed))
    for rank in state.outstanding:
        each_call = set()
        for entry in state.outstanding[rank]:
            reasons = state._blockers(rank, entry, state.heads)
            each_call.update(*reasons.values())
        assert state.blocking_ranks(rank) == each_call


def test_a_dump_goes_between_processes_as_columns():
    """Its calls are not taken apart: twice the calls take twice the bytes of a few numbers."""
    few, many = (stalled_job(2, rounds).dumps[1] for rounds in (100, 200))
    few.entries.places_of_part  # noqa: B018 - what was computed stays behind
    assert pickle.loads(pickle.dumps(few)) == few
    bytes_of_a_call = (len(pickle.dumps(many)) - len(pickle.dumps(few))) / 200
    assert bytes_of_a_call < 6 * 8 * 2  # six numbers, and messages are kept apart, too


def test_a_call_of_a_json_dump_that_is_like_an_earlier_one_is_not_read_again(monkeypatch):
    read = []
    read_part = recorded._new_part

    def counted(call, *rest):
        read.append(call)
        return read_part(call, *rest)

    monkeypatch.setattr(recorded, "_new_part", counted)
    dump = Dump({"mp": [0, 1]})
    for _ in range(50):
        dump.call("mp", "all_reduce", done=True)
    dump.call("mp", "all_reduce")
    of_json = parse(json.dumps(dump.value()).encode(), 0)
    assert len(read) == 2
    assert of_json == of_value(dump.value(), 0)


def test_equal_parts_of_calls_become_one():
    """Groups that a feature gives one description, and calls that follow, may read the same."""
    dump = Dump({"mp": [0, 1], "dp": [0, 1]})
    for group in ("mp", "dp", "mp"):
        dump.call(group, "all_reduce")
    calls = of_value(dump.value(), 0).entries
    other_group = calls.with_parts({1: calls[0].part})
    assert len(calls.parts) == 2
    assert len(other_group.parts) == 1
    assert len(calls.followed_by(list(calls)).parts) == 2
    described = calls.followed_by([calls[0]._replace(desc="x")]).with_descriptions(lambda _: "y")
    assert [part.group for part in described.parts] == [calls[0].group, calls[1].group]


def test_the_place_of_a_call_of_another_rank_is_refused():
    dump = Dump({"mp": [0, 1]})
    dump.call("mp", "all_reduce")
    calls = of_value(dump.value(), 0).entries
    assert calls.place_of(calls[0]) == 0
    with pytest.raises(ValueError, match="record 7 is not among these calls"):
        calls.place_of(calls[0]._replace(record=7))


def test_a_call_is_taken_out_of_its_columns_once_where_calls_end_one_by_one(monkeypatch):
    """Ranks 0 and 2 may still run: all members made their calls.  Rank 1 waits for rank 3."""
    taken = []
    take = Calls.__getitem__

    def counted(calls, place):
        taken.append(place)
        return take(calls, place)

    monkeypatch.setattr(Calls, "__getitem__", counted)
    dumps = {}
    for rank in range(4):
        dump = Dump({"dp": [rank % 2, rank % 2 + 2]})
        for _ in range(0 if rank == 3 else 10):
            dump.call("dp", "all_reduce")
        dumps[rank] = of_value(dump.value(), rank)
    state = JobState(DumpSet(dumps))
    taken.clear()
    assert waits.whom_calls_need(state) == {1: {3}}
    # those of ranks 0 and 2, which end, and the one of rank 1 that waits
    assert len(taken) == 2 * 10 + 1
