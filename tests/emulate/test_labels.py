"""Forwards and backwards that run beside each other are labelled, too."""

import contextlib
import dataclasses
from types import ModuleType

import pytest

pytest.importorskip("torch")
from helpers import patching

from megatron_prism.emulate.rank.monitor import TrainingMonitor


def test_combined_steps_are_the_forwards_microbatches(monkeypatch):
    """combined_1f1b.py: a forward alone, then one's forward beside another's backward."""
    monitor, seen = TrainingMonitor(), []
    monkeypatch.setattr(monitor, "phase", lambda phase, **labels: _kept(seen, phase, labels))
    module = ModuleType("combined_1f1b")

    def combined_forward_backward_step(
        forward_step_func, data_iterator, f_model, num_microbatches, input_tensor,
        forward_data_store, b_model, b_input_tensor, b_output_tensor, b_output_tensor_grad,
        config, f_model_chunk_id=None,
    ):  # fmt: skip
        return (object() if f_model else None), 0, None

    module.combined_forward_backward_step = combined_forward_backward_step
    context = dataclasses.replace(patching.context(), monitor=monitor)
    patching.apply("label-combined", module, context)

    def step(forward, backward, chunk=None):
        given = [None, None, forward, 4, None, [], backward is not None or None, None, backward]
        return module.combined_forward_backward_step(*given, None, None, f_model_chunk_id=chunk)[0]

    first = step(True, None)
    second = step(True, first)
    step(None, second)
    step(True, None, chunk=1)
    assert seen == [
        ("forward", {"microbatch": 0}),
        ("backward", {"microbatch": 0}), ("forward", {"microbatch": 1}),
        ("backward", {"microbatch": 1}),
        ("forward", {"microbatch": 0, "chunk": 1}),
    ]  # fmt: skip


def _kept(seen, phase, labels):
    seen.append((phase, labels))
    return contextlib.nullcontext()
