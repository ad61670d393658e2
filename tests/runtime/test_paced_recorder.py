"""A rank that is recorded among paced ranks: the same program, and no wait in any segment."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from megatron_prism.core.ops import CODE
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.recorder.recorder import PacedRecorder, Recorder
from megatron_prism.runtime.values import Values

RANK, SIZE, LATE = 3, 8, 0.2


@pytest.fixture
def world(monkeypatch):
    # as on the tiers without a device, which cannot be undone in this process
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    found = virtual_world.start(
        virtual_world.VirtualWorld(SIZE, RANK, (RANK,), Values(), torch.device("cpu"))
    )
    yield found
    virtual_world.stop()


class Late(dist.Work):
    """A call whose waits take LATE seconds."""

    def wait(self, timeout=None):
        time.sleep(LATE)
        return True


class Pacer:
    """Keeps calls, batches and waits for LATE seconds each."""

    def __init__(self):
        self.heard = []

    def record(self, group, op, answer, args, kwargs):
        self.heard.append(op)
        answer(group, *args, **kwargs)
        time.sleep(LATE)
        return Late()

    @contextlib.contextmanager
    def batch(self):
        yield
        self.heard.append("issued")
        time.sleep(LATE)


def talk():
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    messages = [dist.P2POp(dist.isend, torch.ones(2), 4), dist.P2POp(dist.irecv, torch.ones(2), 2)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    dist.barrier()


def recorded(world, recorder):
    world.listen(recorder)
    recorder.start()
    talk()
    return recorder.stop()


def test_the_program_is_the_same_and_waits_are_no_part_of_it(world):
    pacer = Pacer()
    plain = recorded(world, Recorder(RANK, "cpu")).program()
    paced = recorded(world, PacedRecorder(RANK, "cpu", pacer)).program()
    assert pacer.heard == ["all_reduce", "all_reduce", "send", "recv", "issued", "barrier"]
    segments = paced.ops["ns"][paced.ops["name"] == CODE["compute"]]
    assert len(segments) > 5
    assert segments.max() < LATE * 1e9 / 2
    assert list(untimed(paced)) == list(untimed(plain))


def untimed(program):
    program.ops["ns"] = 0
    return program


def test_calls_are_paced_while_nothing_is_recorded(world):
    pacer = Pacer()
    recorder = PacedRecorder(RANK, "cpu", pacer)
    world.listen(recorder)
    talk()
    recorder.clock.running = True
    recorder.clock._aside = True  # no device to wait for here
    talk()
    assert pacer.heard == 2 * ["all_reduce", "all_reduce", "send", "recv", "issued", "barrier"]


def test_a_batch_within_a_batch_is_issued_once(world):
    pacer = Pacer()
    recorder = PacedRecorder(RANK, "cpu", pacer)
    with recorder.batch(), recorder.batch():
        pass
    assert pacer.heard == ["issued"]


def test_what_recording_costs_is_measured_without_paced_calls(world):
    pacer = Pacer()
    made = PacedRecorder(RANK, "cpu", pacer).record(None, "barrier", lambda group: None, (), {})
    assert made is None
    assert not pacer.heard
