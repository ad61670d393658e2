"""Which microbatch of which model chunk runs, and is it its forward or its backward?

Same form as ``seams``: what Megatron's schedules call for each step is wrapped, and the proof (with
it the memory tracker and the recorder) is told.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prism.emulate.patch import Context, Patch

__all__ = ["PATCHES"]


def _label_phases(module: ModuleType, context: Context) -> None:
    """Tell the proof (and through it the memory tracker) which microbatch runs."""
    proof = context.proof

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            labels = proof.forward_labels(kwargs.get("vp_stage"))
            with proof.step(labels):
                result = original(*args, **kwargs)
            proof.remember_output(result[0], labels)
            return result

        return call

    def backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(input_tensor: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            with proof.step(proof.backward_labels(output)):
                return original(input_tensor, output, *args, **kwargs)

        return call

    context.replace(module, "forward_step", forward)
    context.replace(module, "backward_step", backward)

    def schedule(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            proof.new_schedule(kwargs)
            return original(*args, **kwargs)

        return call

    for name in (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ):
        context.replace(module, name, schedule)


def _label_combined(module: ModuleType, context: Context) -> None:
    """The same for a forward and a backward that run layer by layer beside each other: what they
    do counts as the forward's."""
    proof = context.proof

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        order = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = order.bind(*args, **kwargs).arguments
            steps, forward = contextlib.ExitStack(), None
            with steps:
                if given["b_model"] is not None:
                    steps.enter_context(proof.step(proof.backward_labels(given["b_output_tensor"])))
                if given["f_model"] is not None:
                    forward = proof.forward_labels(given.get("f_model_chunk_id"))
                    steps.enter_context(proof.step(forward))
                result = original(*args, **kwargs)
            if forward is not None:
                proof.remember_output(result[0], forward)
            return result

        return call

    context.replace(module, "combined_forward_backward_step", make)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "label-phases",
        "megatron.core.pipeline_parallel.schedules",
        "the summary says in which phase and microbatch a peak occurred",
        "core/pipeline_parallel/schedules.py:311, :446 @0.16.1",
        _label_phases,
        targets=(
            "forward_step",
            "backward_step",
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_without_interleaving",
            "forward_backward_pipelining_with_interleaving",
        ),
    ),
    Patch(
        "label-combined",
        "megatron.core.pipeline_parallel.combined_1f1b",
        "the same with --overlap-moe-expert-parallel-comm",
        "core/pipeline_parallel/combined_1f1b.py:237 @0.16.1; :281 @0.19.0",
        _label_combined,
        targets=("combined_forward_backward_step",),
    ),
)
