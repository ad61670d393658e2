"""A short dump holds the first calls that wait, what is before them, and the same counters."""

import pytest
from helpers import random_hangs

from megatron_prism.features.hang import export
from megatron_prism.features.hang.dumps import of_value
from megatron_prism.graph import stall


@pytest.mark.parametrize("kind", ["drop", "lost", "gpu_error", "gpu_hang"])
@pytest.mark.parametrize("last", [1, 5])
def test_what_waits_first_is_that_of_the_whole_dump(kind, last):
    programs, faults, _ = random_hangs.draw(kind, random_hangs.WORLDS[1], seed=3)
    state, shorter = stall.run_until_stalled(programs, faults), 0
    for rank in range(programs.world.size):
        whole = export.dump_of(state, rank, timing=True)
        short = export.dump_of(state, rank, timing=True, last=last)
        assert short["pg_status"] == whole["pg_status"]
        assert all(entry in whole["entries"] for entry in short["entries"])
        waits = [[e for e in of_value(dump, rank).entries if not e.done][:last]
                 for dump in (whole, short)]  # fmt: skip
        assert waits[0] == waits[1]
        shorter += len(short["entries"]) < len(whole["entries"])
    assert shorter
