"""A recording gives back what steered sizes, in order, and refuses what it does not fit."""

import types

import numpy as np
import pytest
import torch
from helpers import patching

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.runtime.recorded_values import ValueRecorder, ValueReplayer

GROUP = types.SimpleNamespace(desc="TENSOR_AND_EXPERT", size=lambda: 4)
HEADER = {"world": "4 ranks"}
ARGUMENTS = job_settings.as_text({"--lr": "1.0"})


def counts(seed):
    return torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path):
    recorder = ValueRecorder(tmp_path, 2, HEADER)
    for seed in range(12):  # more than ten: order is by number, not by name
        recorder.observe(GROUP, "all_gather", (), (counts(seed),))
        recorder.route(3, counts(seed) > 50)
    recorder.observe(GROUP, "all_gather", (), (torch.rand(4),))  # payload
    recorder.observe(GROUP, "all_reduce", (), (counts(0),))
    recorder.is_of(ARGUMENTS)
    recorder.save()
    return tmp_path


def test_values_come_back_in_order(folder):
    replayer = ValueReplayer(folder, 2, HEADER)
    for seed in range(12):
        out, routing = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.bool)
        replayer.observe(GROUP, "all_gather", (), (out,))
        assert torch.equal(out, counts(seed))
        assert torch.equal(replayer.route(3, routing), counts(seed) > 50)
    assert (replayer.replayed, replayer.missing) == (24, 0)


def test_a_run_may_begin_with_any_iteration(tmp_path):
    recorder = ValueRecorder(tmp_path, 2, HEADER)
    for number in (1, 2, 3):
        recorder.iteration_started(number, 3, None, None)
        recorder.observe(GROUP, "all_gather", (), (counts(number),))
        recorder.route(3, counts(number) > 50)
    recorder.save()
    replayer, out = ValueReplayer(tmp_path, 2, HEADER), torch.zeros(4, 8, dtype=torch.int64)
    replayer.resumed(2)
    replayer.iteration_started(1, 1, None, None)
    replayer.observe(GROUP, "all_gather", (), (out,))
    assert torch.equal(out, counts(3))
    assert torch.equal(replayer.route(3, out > 200), counts(3) > 50)
    replayer.iteration_started(2, 2, None, None)
    replayer.observe(GROUP, "all_gather", (), (out,))
    assert (replayer.replayed, replayer.missing) == (2, 1)


def test_what_was_not_recorded_stays_and_is_counted(folder):
    replayer = ValueReplayer(folder, 2, HEADER)
    routing = torch.ones(4, 8, dtype=torch.bool)
    assert replayer.route(9, routing).all()
    other = torch.ones(5, dtype=torch.int64)  # another size: a different call
    replayer.observe(GROUP, "all_gather", (), (other,))
    assert other.sum() == 5
    assert replayer.missing == 2
    payload = torch.ones(4)
    replayer.observe(GROUP, "all_gather", (), (payload,))
    assert payload.sum() == 4


@pytest.mark.parametrize(
    ("rank", "header", "words"),
    [
        (1, HEADER, "cannot read a recording of ours"),
        (2, {**HEADER, "world": "8 ranks"}, "recorded with world 4 ranks"),
    ],
)
def test_another_run_is_refused(folder, rank, header, words):
    with pytest.raises(UsageError, match=words):
        ValueReplayer(folder, rank, header)


def test_another_jobs_recording_is_refused(folder):
    replayer = ValueReplayer(folder, 2, HEADER)
    replayer.is_of(ARGUMENTS)
    with pytest.raises(UsageError, match="of another job: --lr 1.0 there, 2.0 here"):
        replayer.is_of(job_settings.as_text({"--lr": "2.0"}))
    ValueRecorder(folder, 2, {**HEADER, "arguments": "--lr 1"}).save()  # no text of settings
    with pytest.raises(UsageError, match="was recorded of another job"):
        ValueReplayer(folder, 2, HEADER).is_of(ARGUMENTS)


@pytest.mark.parametrize("damage", ["cut", "text", "foreign"])
def test_a_damaged_file_is_refused(folder, damage):
    file = folder / "rank-000002.npz"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "text":
        file.write_text("hello")
    else:
        np.savez(file, x=np.arange(3))
    with pytest.raises(UsageError, match="not a recording of ours"):
        ValueReplayer(folder, 2, HEADER)


def test_every_router_asks_the_recording():
    class TopKRouter:
        layer_number = 3

        def routing(self, logits):
            return "probabilities", "map of experts"

    recording = types.SimpleNamespace(route=lambda layer, routed: (layer, routed))
    context = patching.context(recording=recording)
    patching.apply("recorded-routing", types.SimpleNamespace(TopKRouter=TopKRouter), context)
    assert TopKRouter().routing("logits") == ("probabilities", (3, "map of experts"))
