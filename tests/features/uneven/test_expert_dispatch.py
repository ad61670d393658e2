"""What the flex dispatcher does with other counts of tokens, on programs by hand."""

import numpy as np
import pytest

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.uneven.between_lengths import op_between
from megatron_prism.features.uneven.expert_dispatch import (
    DispatchRule,
    dispatch_rule,
    unequal_dispatches,
)

TP_EP = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "exchanged"),
        ({"moe_token_dispatcher_type": "flex"}, "exchanged"),
        ({"moe_flex_dispatcher_backend": "hybridep"}, "exchanged"),
        ({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}, "equal"),
        (
            {
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "hybridep",
                "moe_hybridep_pad_uneven_dispatch_inputs": "true",
            },
            "padded",
        ),
    ],
)
def test_the_backend_has_the_rule(settings, rule):
    assert dispatch_rule(settings) is DispatchRule(rule)


def dispatches(*tokens_of_programs, program_of):
    programs = []
    for number, tokens in enumerate(tokens_of_programs):
        ops = [Op("dispatch", TP_EP, "bf16", 4 * count, 6 * count) for count in tokens]
        programs.append(Program.from_ops(number, ops))
    world = World(4, ep=2)
    return Programs(world, tuple(programs), np.array(program_of, dtype=np.int32))


def test_the_first_dispatch_of_other_counts_is_named():
    programs = dispatches((8, 8, 8), (8, 4, 2), program_of=(0, 0, 0, 1))
    (finding,) = unequal_dispatches(programs)
    assert (finding.kind, finding.group, finding.ranks, finding.number) == (
        "shape", TP_EP, (2, 3), 2,
    )  # fmt: skip
    assert "rank 2 dispatches 32 elements and rank 3 dispatches 16 elements" in finding.likely


def test_groups_of_their_own_lengths_are_equal():
    programs = dispatches((8, 8), (4, 4), program_of=(0, 0, 1, 1))
    assert list(unequal_dispatches(programs)) == []


def test_rounded_loads_between_lengths_are_rounded():
    ops = {4: [Op("dispatch", TP_EP, num_in=16, num_out=7)]}
    ops[8] = [Op("dispatch", TP_EP, num_in=32, num_out=14)]
    between = op_between(ops, 0, 5)
    assert (between.num_in, between.num_out) == (20, 9)
