"""Dumps that are cut in the middle: read to the cut, and said."""

import pytest
from helpers import random_hangs
from helpers.random_hangs import dumps_of, named

from megatron_prism.core.world import World
from megatron_prism.graph import stall
from megatron_prism.hang import analyze
from megatron_prism.hang.dumps import DumpSet

WORLD = World(16, tp=2, pp=2, ep=2)


def stalled(kind):
    programs, faults, culprits = random_hangs.draw(kind, WORLD, 3)
    return stall.run_until_stalled(programs, faults), culprits


@pytest.mark.parametrize("kind", ["operation", "drop", "shape"])
def test_what_others_call_is_their_call(kind):
    """Where no other member left a dump the siblings vote: the text says what they called, and the
    call is one of the culprit's group."""
    state, culprits = stalled(kind)
    (culprit,) = culprits
    odd_ranks = {rank: dump for rank, dump in dumps_of(state).dumps.items() if rank % 2}
    verdict = analyze.diagnose_dumps(DumpSet(odd_ranks))
    assert named(verdict) == culprits
    own_words, others_words = verdict.evidence[0].partition(f"rank {culprit} calls ")[2].split(", ")
    assert others_words.startswith("3 others all_reduce 64 ")
    assert own_words not in others_words
    assert verdict.op == "all_reduce"
