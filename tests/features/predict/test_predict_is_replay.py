"""One answer: without variation a prediction is the replay, to the nanosecond."""

import pytest
from helpers.one_answer import assert_one_answer
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.naive_replay import random_programs

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.priced_graph import WhatIf, price

TWO_STAGES = """prism-program 1
world size=2 pp=2
program rank=0 ranks=0
0F compute ns=100us
0F send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=8 peer=1
0B recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=8 peer=1
0B compute ns=200us
O  compute ns=50us
program rank=1 ranks=1
0F recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=8 peer=-1
0F compute ns=100us
0B compute ns=200us
0B send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=8 peer=-1
O  compute ns=400us
"""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_without_variation_it_is_the_replay(seed):
    try:
        priced = price(random_programs(seed), machine="h200")
        assert priced.timeline
        found = assert_one_answer(priced)
    except PrismError:  # a world that hangs, or in which nothing takes time
        return
    counts = priced.graph.classes.counts
    for index, p95 in found.slow.items():
        if counts[index] == 1 and found.replicas == 1:  # the slow rank is the whole class
            (rank,) = priced.graph.classes.ranks(index).tolist()
            assert p95 == priced.again(slow={rank: 2}).timeline.iteration_ns


def test_an_iteration_begins_where_the_one_before_lets_it():
    """Stage 1's optimizer runs while stage 0 begins the next iteration."""
    programs = parse(TWO_STAGES)
    found = assert_one_answer(price(programs, machine="h200"))
    alone = price(programs, machine="h200", iterations=1).timeline.iteration_ns
    assert found.steady == alone - 100_000  # one forward of stage 0


@pytest.mark.parametrize(
    "change", [{"slow": {1: 3}}, {"faster": {"send": "1/2"}}, {"moved": "b200"}]
)
def test_what_ifs_are_the_same_for_both(change):
    assert_one_answer(price(parse(TWO_STAGES), machine="h200", what_if=WhatIf(**change)))
