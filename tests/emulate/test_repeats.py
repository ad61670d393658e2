"""What is written down again is what running it records, byte for byte."""

import contextlib
import dataclasses

import numpy as np
import pytest
from helpers.programs import without_host

from megatron_prism.core import recipe as recipes
from megatron_prism.core.program import load
from megatron_prism.core.slices import SliceStore
from megatron_prism.emulate import recipe_server
from megatron_prism.emulate.recipe_server import CaptureServer

TINY = ["num_layers=8", "hidden_size=64", "num_attention_heads=4",
        "seq_length=64", "vocab_size=256", "pp=4", "bf16=true",
        "use_distributed_optimizer=true", "data_path=null", "micro_batch_size=1",
        "prism.tier=meta"]  # fmt: skip
PLAIN = ["world_size=8", "tp=1", "global_batch_size=12"]
INTERLEAVED = ["world_size=8", "tp=2", "sequence_parallel=true",
               "vpp=2", "global_batch_size=8", "overlap_grad_reduce=true",
               "overlap_param_gather=true",
               "transformer_impl=transformer_engine"]  # fmt: skip


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


@pytest.mark.parametrize("settings", [PLAIN, INTERLEAVED])
def test_what_is_written_again_is_what_running_it_records(server, tmp_path, settings):
    written = captured(server, tmp_path, settings, 1, alike=(2,))
    (ran,) = captured(server, tmp_path, settings, 1, repeat=False).values()
    assert written[1] == ran
    assert np.array_equal(written[1].history, ran.history[:-1])  # the next iteration has begun
    assert np.array_equal(written[1].streams, ran.streams)
    (ran,) = captured(server, tmp_path, settings, 2, repeat=False).values()
    assert not written[2].allocations.size
    assert written[2] == dataclasses.replace(ran, allocations=ran.allocations[:0])


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
