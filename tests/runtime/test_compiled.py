"""Compiled functions on tier meta: one kernel each, as on a GPU."""

import pytest
import torch

from megatron_prism.runtime.devices import cuda_choices
from megatron_prism.runtime.devices import kernels as work
from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.recorder.shapes_meter import Meter


@pytest.mark.parametrize(
    ("flops", "kernels", "seen"),
    [
        ((0, 0), 1, "gelu_like(4,4):0:32"),  # what is read and written, not what lies between
        ((0,), 1, "mul(4):0:64"),
        ((0, 8), 2, "mul(4):8:64"),
    ],
)
def test_a_compiled_function_is_one_kernel_unless_it_multiplies_matrices(
    flops, kernels, seen, monkeypatch
):
    meter = Meter()
    monkeypatch.setattr(work, "meter", meter)

    def gelu_like(x):
        for count in flops:
            meter.add("mul", count, 64, [x])
        return x + 1

    x = torch.ones(4)
    assert torch.equal(cuda_choices._compile(gelu_like)(x), x + 1)
    assert torch.equal(cuda_choices._compile(dynamic=True)(gelu_like)(x), x + 1)
    done = meter.take()
    assert done.kernels == 2 * kernels
    assert seen in {text.replace("float32", "") for text in done.calls}
    monkeypatch.setattr(work, "meter", None)
    assert torch.equal(cuda_choices._compile(gelu_like)(x), x + 1)
    assert cuda_choices._compile(torch.nn.Linear) is torch.nn.Linear


def test_what_lies_between_is_never_on_the_device(monkeypatch):
    """A peak sees arguments, results and what autograd keeps, in the right order for the meter."""
    live, moved = LiveBytes("cpu"), []
    live.meter = type("Meter", (), {"moved": lambda self, n, b, t=None: moved.append(b) or "",
                                    "kernel": lambda self, *_: None})()  # fmt: skip
    monkeypatch.setattr(cuda_choices, "_live", live)

    def between(x):
        return ((x + 1) * 2).exp() - 1  # three tensors that no fused kernel writes

    with live:
        x = torch.ones(256)
        before = live.now
        out = cuda_choices._compile(between)(x)
        assert live.now == live.high.bytes == before + 1024
        assert moved[-1] == 1024
        assert sum(moved) == live.now
        del out
        assert moved[-1] == -1024
        nested = cuda_choices._compile(lambda x: cuda_choices._compile(between)(x) + 1)(x)
        assert live.high.bytes == before + 1024
        plain = between(x)
        assert live.high.bytes >= before + 3 * 1024
    del nested, plain
    assert sum(moved) == live.now


class _Manager:
    """Holds what a compiled method leaves behind."""

    def __init__(self):
        self.probabilities = None
        self.scales = {"before": None}


class _Dispatcher:
    """In the manner of Megatron's flex dispatcher: its compiled method keeps tensors elsewhere."""

    def __init__(self):
        self.manager = _Manager()
        self.hidden = None

    def preprocess(self, hidden, probabilities):
        self.hidden = hidden
        self.manager.probabilities = probabilities.exp()
        self.manager.scales["before"] = (probabilities * 3).exp()
        return hidden * hidden, self.manager.probabilities


def _gradients(compiled, monkeypatch):
    """Outputs of a captured layer are results and tensors that its dispatcher holds."""
    live = LiveBytes("cpu")
    monkeypatch.setattr(cuda_choices, "_live", live)
    method = cuda_choices._compile(_Dispatcher.preprocess) if compiled else _Dispatcher.preprocess
    with live:
        hidden = torch.arange(4.0, requires_grad=True)
        probabilities = torch.ones(4, requires_grad=True)
        dispatcher = _Dispatcher()
        results = method(dispatcher, hidden, probabilities)
        kept = dispatcher.manager.probabilities, dispatcher.manager.scales["before"]
        outputs = [*results, *kept]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert dispatcher.hidden is hidden
    assert kept[0] is results[1]
    return hidden.grad, probabilities.grad


def test_what_a_compiled_method_leaves_in_its_objects_comes_from_the_same_node(monkeypatch):
    plain = _gradients(False, monkeypatch)
    fused = _gradients(True, monkeypatch)
    assert all(map(torch.equal, plain, fused))
