"""What is written down again is what running it records, byte for byte."""

import contextlib
import dataclasses
import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.programs import without_host

from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.programs.program import load
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.emulate.capture import capture
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.features.sweep import recipe_server
from megatron_prism.features.sweep.recipe_server import CaptureServer
from megatron_prism.runtime.devices.moe_dispatch import ExpertLoads

TINY = ["num_layers=8", "hidden_size=64", "num_attention_heads=4",
        "seq_length=64", "vocab_size=256", "pp=4", "bf16=true",
        "use_distributed_optimizer=true", "data_path=null", "micro_batch_size=1",
        "prism.tier=meta"]  # fmt: skip
PLAIN = ["world_size=8", "tp=1", "global_batch_size=12"]
INTERLEAVED = ["world_size=8", "tp=2", "sequence_parallel=true",
               "vpp=2", "global_batch_size=8", "overlap_grad_reduce=true",
               "overlap_param_gather=true",
               "transformer_impl=transformer_engine"]  # fmt: skip
# dispatchers of tokens hold tensors from one microbatch to the next
EXPERTS = ["world_size=8", "tp=1", "ep=2", "num_experts=4", "moe_router_topk=2",
           "moe_ffn_hidden_size=64", "moe_token_dispatcher_type=alltoall", "vpp=2",
           "add_bias_linear=false", "global_batch_size=16",
           "transformer_impl=transformer_engine"]  # fmt: skip
RECOMPUTED = [*EXPERTS, "recompute_granularity=full", "recompute_method=uniform",
              "recompute_num_layers=1"]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(CaptureServer()) as started:
        yield started


def captured(server, tmp_path, settings, stage, alike=(), repeat=True, more=None):
    recipe = recipes.load("tiny-gpt_1cpu", [*TINY, *settings])
    folder = tmp_path / str(repeat)
    rank = recipe.world.rank_at(pp=stage)
    if more is not None:
        many = recipes.load("tiny-gpt_1cpu", [*TINY, *more])
        more, folder = (many, folder), tmp_path / "few"
    if repeat:
        assert server._ask(recipe_server._repeat, recipe, rank, folder, alike, more)
    else:
        server._ask(recipe_server._capture, recipe, rank, folder)
    store = SliceStore(folder if more is None else more[1], recipe.world, {})
    return {place: without_host(load(store.path(recipe.world.rank_at(pp=place))).programs[0])
            for place in (stage, *alike)}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [pytest.param(PLAIN, id="plain", marks=pytest.mark.ci), pytest.param(INTERLEAVED, id="vpp")],
)
def test_what_is_written_again_is_what_running_it_records(server, tmp_path, settings):
    written = captured(server, tmp_path, settings, 1, alike=(2,))
    (ran,) = captured(server, tmp_path, settings, 1, repeat=False).values()
    assert written[1] == ran
    assert np.array_equal(written[1].history, ran.history[:-1])  # the next iteration has begun
    assert np.array_equal(written[1].streams, ran.streams)
    (ran,) = captured(server, tmp_path, settings, 2, repeat=False).values()
    assert not written[2].allocations.size
    assert written[2] == dataclasses.replace(ran, allocations=ran.allocations[:0])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "stage"), [(EXPERTS, 1), (RECOMPUTED, 3)], ids=["kept", "recomputed"]
)
def test_what_dispatchers_hold_goes_in_the_middle_of_the_next_microbatch(
    server, tmp_path, settings, stage
):
    """On the last stage, too, where backwards come between."""
    written = captured(server, tmp_path, settings, stage)[stage]
    (ran,) = captured(server, tmp_path, settings, stage, repeat=False).values()
    assert written == ran
    assert np.array_equal(written.history, ran.history[:-1])


@pytest.mark.ci
@pytest.mark.parametrize("settings", [PLAIN, INTERLEAVED])
def test_losses_are_written_again(server, tmp_path, settings, monkeypatch):
    """Of the last stage, with what its steps report, in two iterations one behind the other."""
    few = [*settings, "global_batch_size=4"]
    beside = captured(server, tmp_path, few, 3, more=settings)[3]
    (alone,) = captured(server, tmp_path, settings, 3).values()
    (ran,) = captured(server, tmp_path, settings, 3, repeat=False).values()
    assert alone == ran
    assert np.array_equal(alone.history, ran.history[:-1])
    assert np.array_equal(beside.live_bytes(), ran.live_bytes())
    bare = (dataclasses.replace(one, allocations=one.allocations[:0]) for one in (beside, ran))
    assert next(bare) == next(bare)  # storages are numbered from the process' start


@pytest.mark.parametrize("settings", [PLAIN, INTERLEAVED])
def test_another_number_of_microbatches_beside_is_what_running_it_records(
    server, tmp_path, settings
):
    few = [*settings, "global_batch_size=4"]  # the last one counts
    beside = captured(server, tmp_path, few, 1, alike=(2,), more=settings)
    alone = captured(server, tmp_path / "alone", settings, 1, alike=(2,))
    assert np.array_equal(beside[1].live_bytes(), alone[1].live_bytes())
    for one in (*beside.values(), *alone.values()):  # storages are numbered from the process' start
        object.__setattr__(one, "allocations", one.allocations[:0])
    assert beside == alone


def test_experts_get_the_tokens_of_a_repeated_step_again():
    ran, written = ExpertLoads(), ExpertLoads()
    layers = [object(), object()]
    for _ in range(4):
        for layer in layers:
            ran.add(layer, np.array([3, 5]), 2)
    for layer in layers * 2:
        first = written.turns()
        written.add(layer, np.array([3, 5]), 2)
        written.repeat(first, written.turns())
    assert dict(written.calls) == dict(ran.calls)
    assert written.turns() == ran.turns()


@pytest.mark.parametrize(
    "flag",
    [
        "overlap_moe_expert_parallel_comm",
        "defer_embedding_wgrad_compute",
        "fine_grained_activation_offloading",
    ],
)
def test_steps_that_leave_work_to_others_all_run(flag):
    monitor = TrainingMonitor(shapes_only=True)
    for value, kept in ((False, True), (True, False)):
        monitor.repeats = Mock()
        monitor.new_schedule({"num_microbatches": 8}, SimpleNamespace(**{flag: value}))
        assert (monitor.repeats is not None) == kept


def test_a_worker_whose_steps_differ_starts_over(monkeypatch):
    """It is the same command, told to run every step; its parent still hears of it."""
    begun, events = Mock(), os.pipe()[1]
    monkeypatch.setenv(workers.EVENTS, str(events))
    monkeypatch.setenv(capture._RUNS, "")
    monkeypatch.setattr(os, "execv", begun)
    reported = object.__new__(capture._Reported)
    reported.run, reported.emit = SimpleNamespace(claims=Mock(), short_layers=None), Mock()
    reported.start_over(capture._EVERY_STEP)
    begun.assert_called_once_with(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    reported.run.claims.close.assert_called_once()
    assert os.environ[capture._RUNS] == capture._EVERY_STEP
    assert os.get_inheritable(events)
    assert not reported.emit.called
    reported.start_over(capture._ALL, "they differ")
    reported.emit.assert_called_once_with("note", text="all microbatches run: they differ")


def test_a_worker_with_few_layers_does_not_start_over(monkeypatch):
    """The new process would be one of the whole job."""
    monkeypatch.setattr(os, "execv", Mock(side_effect=AssertionError))
    told = Mock(side_effect=SystemExit)
    monkeypatch.setattr(capture.exit_status, "end_without_estimate", told)
    reported = object.__new__(capture._Reported)
    reported.run, reported.emit = SimpleNamespace(claims=Mock(), short_layers=(1, 8)), Mock()
    with pytest.raises(SystemExit):
        reported.start_over(capture._ALL, "they differ")
    told.assert_called_once_with("few layers have to run anew: they differ")
