"""Every point of a sweep is the job captured with its sizes: its time and its memory."""

import pytest
from helpers.metamorphic import MACHINE, TINY, captured, memory, ns
from helpers.needs import MEGATRON

import megatron_prism as prism
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.features.sweep import space
from megatron_prism.memory.recipe_bound import memory_bound

pytestmark = [MEGATRON, pytest.mark.ci, pytest.mark.slow]

SEGMENT = 20 << 20  # bytes of one of PyTorch's allocator: CUDACachingAllocator kLargeBuffer
AXES = {"tp": [1, 2], "pp": [1, 2], "vpp": [1, 2], "dp": [2, 4], "global_batch_size": [32]}


@pytest.fixture(scope="module")
def recipe():
    return recipes.load("tiny-gpt_1cpu", [*TINY, "hidden_size=64"])


@pytest.fixture(scope="module")
def rows(recipe, tmp_path_factory):
    found = prism.sweep(recipe, AXES, tmp_path_factory.mktemp("sweep"), machine="h100", workers=2)
    assert {point.by for point in found.dropped} <= {"no layout"}  # chunks without a pipeline
    return found.rows


def test_every_layout_is_a_point(rows):
    assert len(rows) == 2 * 3 * 2


@pytest.mark.ci
def test_every_point_is_the_job_captured_with_its_sizes(recipe, rows):
    for row in rows:
        real = captured(space.point_of(recipe, row.result["axes"]).layout)
        assert row.result["iteration_ns"] == pytest.approx(ns(real, MACHINE), rel=0.01), row.name
        found = row.result["memory"]
        allocated, reserved = memory(real)[int(found["stage"].removeprefix("stage "))]
        assert found["allocated"] == pytest.approx(allocated, rel=0.003), row.name
        segment = 0 if found["history"] == "as captured" else SEGMENT
        assert abs(found["reserved"] - reserved) <= segment, row.name


FAMILIES = (
    "hidden_size=256 num_layers=4 transformer_impl=local swiglu=true",
    "hidden_size=256 num_layers=4 recompute=full recompute_method=uniform recompute_num_layers=2",
    "hidden_size=256 num_layers=4 recompute=selective pp=2 vpp=2 world_size=2 num_query_groups=2",
    "hidden_size=256 num_layers=2 tp=2 world_size=2 sequence_parallel=true add_bias_linear=false",
    "hidden_size=256 num_layers=2 num_experts=4 moe_router_topk=2 bf16=true",
)


@pytest.mark.parametrize("words", FAMILIES)
def test_the_bound_that_drops_a_point_is_below_its_peak(words):
    given = [*TINY, "global_batch_size=64", "micro_batch_size=8", "world_size=1", *words.split()]
    recipe = recipes.load("tiny-gpt_1cpu", given)
    real = captured(space.point_of(recipe, {}).layout)
    allocated, _ = memory(real)[0]
    assert 0.15 * allocated < memory_bound(recipe) <= allocated
