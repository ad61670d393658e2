"""The size of a call's message, found quickly, is the larger side of its tensors."""

import pytest
import torch

from megatron_prism.runtime.process_group import arguments, message_size, size_of


def t(count):
    return torch.zeros(count)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("all_reduce", ([t(3)], object())),
        ("all_reduce", ([t(3)],)),
        ("all_reduce", ([t(3), t(5)], object())),
        ("broadcast", ([t(7)], object())),
        ("reduce", ([t(7)], object())),
        ("all_gather", (t(8), t(2), object())),
        ("all_gather", ([t(8), t(4)], [t(2), t(1)], object())),
        ("all_gather", ([[t(2)] * 4], [t(2)], object())),
        ("reduce_scatter", (t(2), t(8), object())),
        ("reduce_scatter", ([t(2)], [[t(2)] * 4], object())),
        ("all_to_all", (t(6), t(8), [3, 3], [4, 4], object())),
        ("all_to_all", ([t(1)] * 4, [t(2)] * 4, object())),
        ("gather", ([], [t(2)], object())),
        ("gather", ([[t(2)] * 4], [t(2)], object())),
        ("scatter", ([t(2)], [], object())),
        ("scatter", ([t(2)], [[t(2)] * 4], object())),
        ("send", ([t(9)], 1, 0)),
        ("recv", ([t(9)], 1, 0)),
    ],
)
def test_the_larger_side(op, args):
    ins, outs = arguments(op, args)
    assert message_size(args) == max(size_of(ins), size_of(outs)) > 0
