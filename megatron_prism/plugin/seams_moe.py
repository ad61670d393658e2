"""Where a recording meets Megatron: the router's decisions.  Applied only with --prism-record or
--prism-values recorded:PATH.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prism.plugin.seams import Context, Seam, _wrap
from megatron_prism.virtual.recording import Recorder, Replayer

__all__ = ["seams_for_recording"]


def seams_for_recording(recording: Recorder | Replayer) -> tuple[Seam, ...]:
    """The seam that keeps, or gives back, what every MoE layer's router decides."""

    def routing(module: ModuleType, context: Context) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(self, *args, **kwargs)
                # probabilities of experts that only the recording chose stay 0: sizes are what
                # a recording is for
                routed = recording.route(self.layer_number or 0, result[1])
                return (result[0], routed, *result[2:])

            return call

        _wrap(module.TopKRouter, "routing", make)

    return (
        Seam(
            "recorded-routing",
            "megatron.core.transformer.moe.router",
            "how many tokens an expert gets depends on what real peers computed",
            "core/transformer/moe/router.py:545 @0.16.1; :741 @0.19.0",
            routing,
        ),
    )
