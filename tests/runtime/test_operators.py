"""What CUDA's kernels take while they run, and what they change in place, on tier meta."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron_prism.runtime.devices import cuda_choices
from megatron_prism.runtime.devices.live_bytes import Engine, LiveBytes
from megatron_prism.runtime.devices.operators import reduction_bytes

KIB = 1 << 10


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "dims", "taken"),
    [
        ((4096, 4096), (0,), (128 << 20, 128)),  # measured on an H100, as a bias's gradient
        ((2048, 2, 4096), (0, 1), (128 << 20, 128)),
        ((16, 4096), (0,), ()),  # one block adds up all of a column
        ((0, 8), (0,), ()),
        ((8,), (), ()),
    ],
)
def test_blocks_that_share_a_sum(shape, dims, taken):
    assert reduction_bytes(empty(*shape, dtype=torch.bfloat16), dims) == taken


def test_a_single_batch_of_logits_above_2_gib_is_split_where_it_is_long():
    """Its first dimension has one element and the largest stride, and cannot be halved."""
    logits = empty(1, 4096, 152064, dtype=torch.float32)
    assert logits.nbytes > 1 << 31
    assert reduction_bytes(logits, (0, 1)) == reduction_bytes(logits[0], (0,))


@pytest.mark.parametrize(
    ("run", "dtype", "bytes_each"),
    [
        (lambda x: x.sum(dim=0), torch.bool, 8),  # tokens of each expert: to int64 first
        (lambda x: x.sum(), torch.int32, 8),
        (lambda x: x.cumsum(0), torch.bool, 8),
        (lambda x: x.sum(dim=0, dtype=torch.float64), torch.float32, 8),
        (lambda x: x.sum(dim=0, dtype=torch.float32), torch.bfloat16, 0),  # as they are read
        (lambda x: x.sum(dim=0), torch.bfloat16, 0),
        (lambda x: x.amax(0), torch.bool, 0),
    ],
    ids=["bool", "int", "scan", "fp64", "bf16 in fp32", "bf16", "amax"],
)
def test_a_reduction_to_another_type_copies_its_input_first(run, dtype, bytes_each):
    live = LiveBytes("meta", cublas=True)
    with live:
        x = empty(64, 32, dtype=dtype)
        before = live.now
        result = run(x)
        peak = live.peak() - before
    assert peak == result.nbytes + bytes_each * x.numel()


def peak_of_backward(start, held: bool) -> int:
    """Bytes above those before, of the gradient of a tensor that is used twice."""
    live = LiveBytes("meta", cublas=True)
    with live:
        x, other = empty(KIB).requires_grad_(), empty(KIB)
        y = x * other
        out = y * other + y * other
        kept = []
        if held:
            y.register_hook(lambda grad: kept.append(grad))
        before = live.now
        live.reset_peak()
        start(out, empty(KIB))
        return live.peak() - before


def by_megatron(out, grad):
    """As custom_backward does (core/pipeline_parallel/schedules.py:220 @0.19.0)."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((out,), (grad,), False, False, (), True, True)


@pytest.fixture
def _engine(monkeypatch):
    """That of tier meta."""
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine())


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("start", [torch.Tensor.backward, by_megatron])
def test_gradients_are_added_up_in_place(start):
    # the result's, one of each use; their sum is one of the two
    assert peak_of_backward(start, held=False) == 3 * 4 * KIB
    assert peak_of_backward(start, held=True) >= 3 * 4 * KIB


def test_a_tensor_that_is_used_elsewhere_is_not_changed():
    """x + y, whose gradient is one tensor for both: CUDA may not write into it."""
    live = LiveBytes("meta", cublas=True)
    with live:
        x = empty(KIB).requires_grad_()
        y = x * empty(KIB)
        z = y * 1
        grad = empty(KIB)
        out = (y + z) + y.view(KIB)
        found = torch.autograd.grad(out, (y, z), grad)
    assert found[0].untyped_storage()._cdata != found[1].untyped_storage()._cdata
    assert grad.untyped_storage()._cdata != found[0].untyped_storage()._cdata


def test_only_what_a_wrapper_holds_has_memory():
    live = LiveBytes("meta", cublas=True)
    with live:
        both = TwoTensor(empty(KIB), empty(KIB))
        assert live.now == 2 * 4 * KIB
        doubled = torch.zeros_like(both * 2)
        assert live.now == 4 * 4 * KIB
        del doubled, both
        assert live.now == 0


def test_a_compiled_function_is_one_node(monkeypatch):
    live = LiveBytes("meta", cublas=True)
    monkeypatch.setattr(cuda_choices, "_live", live)

    @cuda_choices._compile
    def biased(pair, residual, scale):
        x, bias = pair
        return ((x + bias) * scale).sigmoid() * 2 + residual, residual * 2

    with live:
        x, bias, residual = empty(64, KIB).requires_grad_(), empty(KIB).requires_grad_(), empty(1)
        first, second = biased((x, bias), residual, scale=2.0)
        assert first.grad_fn is not None
        assert second.grad_fn is None
        before = live.now
        live.reset_peak()
        first.backward(empty(64, KIB))
        # the gradients of the result, of x and of the bias, beside what was kept
        assert live.peak() - before == 2 * 256 * KIB + 4 * KIB
        assert x.grad.shape == x.shape
        assert bias.grad.shape == bias.shape
        with torch.no_grad():
            assert biased((x, bias), residual, scale=2.0)[0].grad_fn is None
