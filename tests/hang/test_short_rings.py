"""A short ring holds the end of what a longer one holds, and the same counters."""

import pytest
from helpers import random_hangs

from megatron_prism.graph import stall
from megatron_prism.hang import export


@pytest.mark.parametrize("kind", ["drop", "lost", "gpu_error", "gpu_hang"])
@pytest.mark.parametrize("last", [1, 5])
def test_the_last_calls_are_those_of_the_whole_dump(kind, last):
    programs, faults, _ = random_hangs.draw(kind, random_hangs.WORLDS[1], seed=3)
    state, shorter = stall.run_until_stalled(programs, faults), 0
    for rank in range(programs.world.size):
        whole = export.dump_of(state, rank, timing=True)
        short = export.dump_of(state, rank, timing=True, last=last)
        count = len(short["entries"])
        assert short["pg_status"] == whole["pg_status"]
        assert short["entries"] == whole["entries"][len(whole["entries"]) - count :]
        shorter += count < len(whole["entries"])
    assert shorter or programs.programs[0].ops.size < 2 * export._STEP
