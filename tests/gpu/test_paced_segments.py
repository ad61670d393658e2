"""Segments of a rank that is recorded among paced ranks, on a real GPU: no wait is in them."""

from types import SimpleNamespace

import pytest
import torch
from helpers.answer_tables import one_interaction

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.pacing.device import Streams
from megatron_prism.runtime.pacing.pacer import PacedCall, Pacer
from megatron_prism.runtime.process_group import CompletedWork
from megatron_prism.runtime.recorder.recorder import PacedRecorder, report_to

OWN_NS = 20_000_000  # of the call
GROUP = SimpleNamespace(desc="TP", local=(0,), rank=lambda: 0, size=lambda: 2)


@pytest.fixture
def recorder():
    from megatron_prism.runtime.pacing.device import Launcher

    device = torch.device("cuda", torch.cuda.current_device())
    launcher = Launcher(one_interaction(OWN_NS), [[0]], device)
    pacer = Pacer([PacedCall("all_reduce", "TP", 0)], launcher, Streams(launcher.driver, device))
    made = PacedRecorder(0, "cuda", pacer)
    changes = ProcessChanges()
    report_to(made, changes)
    yield made
    changes.undo()


def ask(recorder):
    opts, answer = (
        SimpleNamespace(asyncOp=True),
        lambda group, tensors, opts: CompletedWork(tensors),
    )
    tensors = [torch.zeros(8, device="cuda")]
    return recorder.record(GROUP, "all_reduce", answer, (tensors, opts), {})


def direct(recorder, other):
    ask(recorder).wait()


def batched(recorder, other):
    with recorder.batch():
        work = ask(recorder)
    work.wait()


def on_a_side_stream(recorder, other):
    event, main = torch.cuda.Event(), torch.cuda.current_stream()
    with torch.cuda.stream(other):
        ask(recorder).wait()
        event.record()
    main.wait_event(event)


@pytest.mark.parametrize("call", [direct, batched, on_a_side_stream])
def test_a_segment_begins_behind_the_wait(recorder, call):
    torch.cuda.set_sync_debug_mode("default")
    other = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        recorder.pacer.begin()
        super(torch.cuda.Event, begin).record(torch.cuda.current_stream())
        recorder.start()
        torch.cuda._sleep(1_000_000)
        call(recorder, other)
        torch.cuda._sleep(1_000_000)
        found = recorder.stop()
        super(torch.cuda.Event, end).record(torch.cuda.current_stream())
        torch.cuda.synchronize()
    assert begin.elapsed_time(end) * 1e6 > OWN_NS
    assert found.segments_ns().max() < OWN_NS / 4
    assert (found.segments_ns() > 300_000).sum() == 2  # the two that compute
