"""The work of a verdict grows with the calls in the dumps, not with their square."""

import pickle
import random
import sys

import pytest
from helpers.dump_values import Dump

from megatron_prism.features.hang import analyze, waits
from megatron_prism.features.hang.dumps import DumpSet, of_value
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
