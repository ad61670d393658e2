"""What a job needs of its hosts' memory, from what slices keep of their ranks."""

import numpy as np
import pytest

from megatron_prism.core.programs.program import WHAT_IF, Program, Programs
from megatron_prism.core.programs.slices import HOST_MEMORY
from megatron_prism.core.world import World
from megatron_prism.memory.host_need import HostNeed, host_need

GIB = 1 << 30


def job(size, stages, source, **world):
    """``size`` ranks of which each stage has as many, with the program of its first one."""
    first = range(0, size, size // stages)
    programs = tuple(Program.from_ops(rank, []) for rank in first)
    place = np.arange(size) // (size // stages)
    return Programs(World(size, **world), programs, place.astype(np.int32), source=source)


@pytest.mark.parametrize(
    ("size", "world", "node", "ranks"),
    [
        (32, {}, 8 * 5 * GIB, 8),  # the host that needs most, of the second stage
        (32, {"gpus_per_node": 4}, 4 * 5 * GIB, 4),
        (2, {}, 8 * GIB, 2),
    ],
    ids=["eight a host", "four a host", "fewer ranks than a host has"],
)
def test_a_host_needs_what_its_ranks_keep_there(size, world, node, ranks):
    source = {HOST_MEMORY: f"0={3 * GIB} {size // 2}={5 * GIB}"}
    need = host_need(job(size, 2, source, **world))
    assert need == HostNeed(5 * GIB, node, ranks)


@pytest.mark.parametrize("text", ["", "0=many", "-1=5", "7=5"], ids=["", "text", "-1", "other"])
def test_nothing_is_said_where_nothing_is_known(text):
    assert host_need(job(2, 2, {HOST_MEMORY: text})) is None


def test_another_data_parallel_size_is_named_and_microbatches_are_not():
    changes = "8 microbatches instead of 4: captured steps; data-parallel size 2 instead of 1: new"
    need = host_need(job(2, 1, {HOST_MEMORY: "0=5", WHAT_IF: changes}))
    assert need.what_if == "data-parallel size 2 instead of 1"
