"""Counts of what a host does, read back from the time that constants made of them."""

import numpy as np
import pytest

from benchmarks.accuracy.host_constants import HOLD, TODAY, best_step, counted, with_constants
from megatron_prism.core.programs.program_text import parse

# of two grouped products of four experts, and of one segment of the optimizer
TEXT = """prism-program 1
world size=1
program ranks=0
F0 compute flops=9 kernels=11 host=1us lead=1us note="grouped_gemm(8x4,4x4)bfloat16:9:9*2; {}"
O compute flops=1 kernels=7 host=1us lead=1us note="add(4)float32:0:9*7"
- mark
"""
OTHERS = "fp8_quantize(4)bfloat16:0:9*2; add(4)bfloat16:0:9"
# calls, kernels by Python, looped, products, unseen; nothing of the mark
COUNTS = np.array([[40, 30, 0], [3, 0, 0], [2, 7, 0], [6, 0, 0], [8, 0, 0]], dtype=float)
EXPERTS = {"local_experts": 4, "unseen_share": 1.0}


def program():
    return parse(TEXT.format(OTHERS)).programs[0]


def test_counts_follow_from_the_time_that_they_take():
    priced = with_constants(program(), COUNTS, np.array(TODAY, dtype=float))
    assert priced.ops["kernels"].tolist()[:2] == [11, 7]
    assert np.array_equal(counted(priced, EXPERTS, TODAY), COUNTS)
    assert priced.ops["host"][0] == sum(COUNTS[:, 0] * TODAY)


def test_slices_of_which_no_product_was_counted():
    """Their grouped products were a kernel each, so the segment had five."""
    earlier = (1_400, 47_000, 2_300, 0, 0)
    before = program()
    ops = before.ops
    ops["kernels"][:2] = [5, 7]
    ops["host"][:2] = [40 * 1_400 + 3 * 47_000 + 2 * 2_300, 30 * 1_400 + 7 * 2_300]
    assert np.array_equal(counted(before, EXPERTS, earlier), COUNTS)


@pytest.mark.parametrize("outlier", [0.0, 3.0])
def test_one_row_does_not_decide_the_constants(outlier):
    """Errors of 0.1 that one constant explains, and one that nothing does."""
    gradient = np.zeros((8, len(HOLD)))
    gradient[:, 0] = 1.0
    errors = np.full(8, 0.1)
    errors[3] += outlier
    assert best_step(gradient, errors)[0] == pytest.approx(-0.1, abs=0.02)
