"""Why Megatron refuses a checkpoint, in its own words and without a traceback."""

import pytest
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron_prism.emulate.patches.planned_reads import refusal_of


def wrapped(error):
    """An error of torch's planner, as it arrives where Megatron loads."""
    try:
        raise error
    except type(error) as caught:
        return CheckpointException("plan", {0: _wrap_exception(caught)})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("(TP, PP) mismatch"), "RuntimeError: (TP, PP) mismatch"),
        (wrapped(KeyError("output_layer.weight")), "KeyError: output_layer.weight"),
        (wrapped(ValueError("Size mismatch")), "ValueError: Size mismatch"),
        (AssertionError(), "AssertionError: without a word"),
    ],
)
def test_the_error_inside_says_why(error, said):
    assert refusal_of(error) == said
