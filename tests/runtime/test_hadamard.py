"""The stand-in for fast_hadamard_transform against the matrix itself."""

import pytest

torch = pytest.importorskip("torch")

from megatron_prism.runtime.devices import kernels  # noqa: E402


def matrix(size):
    """Entry (i, j) is -1 where i and j have an odd number of bits in common."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(rows)


@pytest.mark.parametrize("size", [1, 2, 6, 8, 32])
def test_a_product_with_hadamards_matrix(size):
    torch.manual_seed(2)
    x = torch.randn(3, 5, size, requires_grad=True)
    out = kernels.transform(x, scale=0.5)
    expected = 0.5 * x @ matrix(32)[:size, :size]
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, x, grad) for y in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_shapes_alone():
    x = torch.empty(4, 2, 8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = kernels.transform(x, scale=0.25)
    assert (out.shape, out.dtype, out.is_meta) == (x.shape, x.dtype, True)
    out.sum().backward()
    assert x.grad.shape == x.shape
