"""Quick answers on meta against torch's own: shape, strides, type and storage, or none at all."""

import itertools

import pytest

torch = pytest.importorskip("torch")
from megatron_prism.runtime.devices import operators  # noqa: E402

aten = torch.ops.aten


def quick(func, args, kwargs):
    """The result, None if torch is to be asked."""
    found = operators.answer(func)
    return None if found is None else found(args, kwargs)


def tensors(shape, dtype):
    """Laid out in several ways; all of ``shape``."""
    made = torch.empty(*shape, dtype=dtype, device="meta")
    wide = torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype, device="meta")
    turned = torch.empty(*reversed(shape), dtype=dtype, device="meta")
    return [
        made,
        wide[..., : shape[-1]],
        turned.permute(*reversed(range(len(shape)))),
        torch.empty(shape[-1], dtype=dtype, device="meta").expand(*shape),
    ]


def described(tensor):
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type,
            tensor.untyped_storage().nbytes())  # fmt: skip


SHAPES = [(4, 6), (3, 1, 5), (2, 3, 4, 5)]
TYPES = [torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_torchs_own(shape):
    answered = 0
    for one, two in itertools.product(TYPES, TYPES):
        for a, b in itertools.product(tensors(shape, one), tensors(shape, two)):
            for func, args, kwargs in (
                (aten.add.Tensor, (a, b), {}), (aten.add.Tensor, (a, b), {"alpha": 2}),
                (aten.mul.Tensor, (a, 2.5), {}), (aten.div.Tensor, (a, b), {}),
                (aten.mul.Tensor, (a, b[:1]), {}), (aten.silu.default, (a,), {}),
                (aten.pow.Tensor_Scalar, (a, 2), {}), (aten.cat.default, ([a, b], 1), {}),
                (aten.cat.default, ([a, b], -1), {}), (aten.cat.default, ([a],), {}),
                (aten.new_empty.default, (a, [3, 2]), {}),
                (aten.new_empty.default, (a, [3, 2]), {"dtype": torch.float16}),
                (aten.new_empty.default, (a, [3]), {"device": torch.device("cpu")}),
                (aten.silu_backward.default, (a, b), {}),
            ):  # fmt: skip
                found = quick(func, args, kwargs)
                if found is None:
                    continue
                answered += 1
                assert described(found) == described(func(*args, **kwargs)), (func, args)
    assert answered > 100


def test_in_place_is_the_first_itself():
    a, b = (torch.empty(3, 4, dtype=t, device="meta") for t in (torch.float32, torch.bfloat16))
    assert quick(aten.add_.Tensor, (a, b), {"alpha": 2}) is a
    assert quick(aten.mul_.Tensor, (a, 0.5), {}) is a
    assert quick(aten.add_.Tensor, (a, b[:1]), {}) is None


def test_what_is_left_to_torch():
    a = torch.empty(3, 4, device="meta")
    for func, args in (
        (aten.mm.default, (a, a.t())), (aten.eq.Tensor, (a, a)),
        (aten.add.Tensor, (a, torch.ones(3, 4))), (aten.cat.default, ([a, a[:2]], 1)),
        (aten.add.Tensor, (torch.ones(3, 4), a)), (aten.mul.Tensor, (a, 1j)),
    ):  # fmt: skip
        assert quick(func, args, {}) is None
