"""A capture that runs few microbatches is the capture of all of them: ops, requests of memory."""

import dataclasses
import io

import numpy as np
import pytest
from helpers import compositions
from helpers.needs import MEGATRON
from rich.console import Console

from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.programs.ops import BEGUN
from megatron_prism.core.world import World
from megatron_prism.emulate import schedule
from megatron_prism.emulate.capture import few_microbatches
from megatron_prism.emulate.jobs import recipe_job
from megatron_prism.memory import blocks, peaks
from megatron_prism.replay.microbatches import order

pytestmark = MEGATRON

GUARD = "guard-gpt_16gpu_tp2pp2vp2_h200"


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """(what was printed, programs) of the few and of all."""
    found = []
    for some in ("false", "true"):
        sizes = ["global_batch_size=96", "train_iters=2", f"prism.all_microbatches={some}"]
        out, folder = io.StringIO(), tmp_path_factory.mktemp("slices")
        made = recipe_job.capture(recipes.load(GUARD, sizes), folder, console=Console(file=out))
        found.append((out.getvalue(), made))
    return found


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.megatron
def test_every_op_is_that_of_all(captured):
    (said, few), (_, whole) = captured
    assert " ".join(said.split()).count("8 of 24 microbatches run") == 1
    for one, other in zip(few.programs, whole.programs, strict=True):
        assert compositions._unlike_ops(one, other) == []
        assert one.live_bytes().max() == other.live_bytes().max()
    differ = {key for key, text in few.source.items() if whole.source.get(key) != text}
    # each microbatch of the process keeps its loss, a block of 512 B
    assert differ - {"memory_parts"} == {"what-if"}
    assert few.source["what-if"].startswith("8 of 24 microbatches ran, whose steps stand for all")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.megatron
def test_every_request_of_the_iteration_is_that_of_all(captured):
    (_, few), (_, whole) = captured
    for one, other in zip(few.programs, whole.programs, strict=True):
        mine, real = (program.history[_begin(program) :, 1:] for program in (one, other))
        assert mine.shape == real.shape  # storages have other numbers
        unlike = np.abs((mine - mine[0]) - (real - real[0]))
        assert not unlike[:, 1:].any()
        assert unlike[:, 0].max() <= 24 * 8  # the mean of the losses reads them all
        assert np.count_nonzero(unlike) <= 2
        assert blocks.reserved(one) == blocks.reserved(other)
        assert peaks.growth(one).num_bytes == peaks.growth(other).num_bytes


def _begin(program):
    return np.flatnonzero(program.history[:, 0] == BEGUN)[-1]


@pytest.mark.parametrize(
    ("settings", "few"),
    [
        ({}, 16),
        ({"overlap_p2p_comm": True, "microbatch_group_size_per_vp_stage": 8}, 32),
        ({"rampup_batch_size": ["8", "8", "100"]}, 64),
        ({"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 4}, 16),
        ({"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 16}, 64),
        ({"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 0}, 64),
    ],
)
def test_megatrons_scheduler_says_how_many_run(settings, few):
    assert few_microbatches.fewest(World(4, pp=4, vpp=2), 64, settings) == few


def test_few_that_save_little_are_not_worth_it():
    world = World(4, pp=4)
    assert [few_microbatches.few_of(world, 0, n, {}) for n in (8, 13, 14, 64)] == [8, 13, 7, 7]
    chunks = dataclasses.replace(world, vpp=2)
    assert few_microbatches.few_of(chunks, 0, 65, {}) == 65  # Megatron refuses it, in its words


@pytest.mark.parametrize(("pp", "vpp", "wanted"), [(2, None, 16), (4, None, 24), (4, 2, 64)])
def test_the_first_stage_alone_says_where_the_search_begins(pp, vpp, wanted):
    """The answer is that of a search from one microbatch on."""
    world = World(pp, pp=pp, vpp=vpp)
    for stage in range(1, pp):
        from_one = order.fewest_microbatches(pp, vpp, wanted, schedule.schedules, {0, stage})
        assert few_microbatches.fewest(world, wanted, {}, (0, stage)) == from_one
