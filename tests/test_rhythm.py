"""A rank that is captured again pauses where the replay says that its device has nothing to do."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prism import costs, graph
from megatron_prism.costs.collective import Calibration
from megatron_prism.costs.machine import machine
from megatron_prism.errors import UsageError
from megatron_prism.ops import NAMES
from megatron_prism.plugin import rhythm
from megatron_prism.program_parse import parse
from megatron_prism.replay import timeline
from megatron_prism.slicer.recorder import Recorder
from megatron_prism.slicer.rhythm import Rhythm, _without, pauses
from megatron_prism.slices import SliceStore

US = 1000

WORLD = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0
0F compute ns=10us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
0F compute ns=20us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=100000000 reduce=sum handle=3
0F compute ns=5us
0F wait handle=3
0F compute ns=5us
0B compute ns=5us
program rank=1 ranks=1
0F compute ns={late}ns
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
0F compute ns=20us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=100000000 reduce=sum handle=3
0F compute ns=5us
0F wait handle=3
0F compute ns=5us
0B compute ns=5us
"""


def names(program):
    return [NAMES[name] for name in program.ops["name"].tolist()]


class Slept(list):
    """Stands for ``torch.cuda._sleep``."""

    def __call__(self, cycles):
        self.append(cycles)


def test_pauses_are_behind_their_ops_and_short_ones_are_none():
    slept = Slept()
    one = Rhythm(["compute", "all_reduce", "compute", "wait"], np.array([0, 10_000, 0, 900]), slept)
    one.after(1, "all_reduce")
    assert slept == []  # no iteration has begun
    one.begin()
    one.after(1, "all_reduce")
    one.after(3, "wait")
    one.end()
    one.after(1, "all_reduce")
    assert slept == [17_000]
    assert (one.begun, one.paused_ns) == (1, 10_000)
    one.paused_ns = 2_540_000
    assert str(one) == "in the job's rhythm, 2.5 ms of pauses an iteration"


def test_an_iteration_of_other_ops_goes_on_without_pauses():
    slept = Slept()
    one = Rhythm(["all_reduce", "barrier", "all_gather"], np.full(3, 10_000), slept)
    for ops in (["all_reduce", "all_gather", "all_gather"], ["all_reduce"] * 4, ["all_reduce"]):
        one.begin()
        for number, op in enumerate(ops):
            one.after(number, op)
        one.end()
    assert slept == [17_000] * 3
    assert (one.begun, one.strayed) == (3, 2)
    assert "2 of 3 iterations paused until they differed" in str(one)


def test_a_recorder_tells_the_ops_of_its_trace():
    heard = []
    one = Recorder(0, "cpu")
    one.rhythm = SimpleNamespace(after=lambda number, op: heard.append((number, op)))
    group = SimpleNamespace(desc="tp", size=lambda: 2, ranks=(0, 1))
    one.start(quick=True)
    one.record(group, "barrier", lambda group: None, (), {})
    one.aside(lambda: None)
    with one.scope(phase="forward"):
        one.record(group, "barrier", lambda group: None, (), {})
    one.host_waited("item")
    trace = one.stop().trace
    assert heard == [(i, op) for i, op in enumerate(trace) if op != "compute"]
    assert [op for _, op in heard] == ["barrier", "barrier", "host_wait"]


def replayed(programs):
    """(rank 0's program, its spans, the lane of its segments)."""
    made = graph.build(programs)
    prices = costs.price(made, machine("h200"), Calibration())
    line = timeline.replay(made, prices, iterations=3)
    index = int(made.classes.of[0])
    return made.program_list[index], line.spans(index), line.lanes.index("main")


@pytest.mark.parametrize("late", [0, 20 * US])
def test_waiting_for_others_between_segments_is_a_pause(late):
    program, spans, main = replayed(parse(WORLD.format(late=10 * US + late)))
    found = pauses(program, spans, main)
    assert found.names == names(program)
    # a call that moves data is no rest, neither between segments nor beyond the one beside it
    assert np.flatnonzero(found.ns).tolist() == ([1] if late else [])
    assert found.ns[1] == late


def test_pauses_are_on_the_stream_of_the_segments():
    text = WORLD.format(late=90 * US)
    assert found_places(text) == [1]
    # the call of another stream is no place for a pause, a wait is: here for the call behind it
    other = text.replace("bf16 n=1024 reduce=sum", "bf16 n=1024 reduce=sum stream=s1")
    assert found_places(other) == [5]
    # behind a host_wait the host is not on yet
    held = text.replace("0F compute ns=20us", "0F host_wait note=device\n0F compute ns=20us")
    assert found_places(held.replace("handle=3", "handle=4")) == [1]


def found_places(text):
    program, spans, main = replayed(parse(text))
    return np.flatnonzero(pauses(program, spans, main).ns).tolist()


TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6)


@given(TIMES, TIMES)
def test_what_calls_cover_is_left_out_once(calls, gaps):
    spans = np.array([(a, a + n) for a, n in calls], dtype=[("start", "i8"), ("end", "i8")])
    begin = np.array([a for a, _ in gaps], dtype=np.int64)
    end = begin + np.array([n for _, n in gaps], dtype=np.int64)
    naive = [sum(not any(a <= t < a + n for a, n in calls) for t in range(b, e))
             for b, e in zip(begin, end, strict=True)]  # fmt: skip
    assert _without(begin, end, spans).tolist() == naive


def test_pauses_are_those_of_the_slices_replay(tmp_path):
    source = {"arguments": "a", "device": "NVIDIA H200"}
    programs = parse(WORLD.format(late=90 * US))
    store = SliceStore(tmp_path, programs.world, source)
    for rank in (0, 1):
        store.put(dataclasses.replace(programs.programs[rank], rank=rank))
    options = SimpleNamespace(
        pace=tmp_path, world=programs.world, rank=0, ranks=(0,), slow="", draw=""
    )
    found = rhythm.of_slices(options, source)
    alike = pauses(*replayed(programs))
    assert found.ns[: len(alike.ns)].tolist() == alike.ns.tolist()
    assert found.names == [*alike.names, "mark"]  # what sets this rank apart is its last op
    assert found.ns[1] == 80 * US
    with pytest.raises(UsageError, match="another job"):
        rhythm.of_slices(options, source | {"arguments": "b"})


def test_a_capture_in_rhythm_is_answered_at_once(monkeypatch, tmp_path):
    """Stages that the slices lack are captured first; the rank itself is not paced."""
    from megatron_prism.plugin import launch, pace, pace_capture

    heard = []
    monkeypatch.setattr(pace, "check", lambda options: heard.append("checked"))
    monkeypatch.setattr(
        pace_capture, "capture_missing", lambda options, job, store: heard.append("captured")
    )
    monkeypatch.setattr(pace, "Pace", lambda *words: "paced")
    for capture, found in ((tmp_path, None), (None, "paced")):
        assert launch._pace(SimpleNamespace(capture=capture), "0.19", None) == found
    assert heard == ["checked", "captured"] * 2
