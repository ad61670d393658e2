"""Types of Megatron's objects that we use, and of a rank's summary.

For annotations alone: modules import it where types are checked and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypedDict

import torch

__all__ = [
    "Batch",
    "ModelChunk",
    "MegatronConfig",
    "Json",
    "Loss",
    "Memory",
    "Optimizer",
    "PeakSummary",
    "Report",
    "Summary",
    "Sync",
]

Json = dict[str, Any]  # what becomes JSON, or was: whoever reads a key knows what it wrote there
Report = dict[str, torch.Tensor]  # what a loss function logs
Batch = dict[str, torch.Tensor]  # tokens, labels, positions, mask
Loss = tuple[torch.Tensor, torch.Tensor, Report]  # sum, number of tokens, both for the log
Sync = Callable[..., object]


class ModelChunk(torch.nn.Module):
    """A model chunk, with what Megatron's DDP adds to it (core/distributed @0.16.1)."""

    no_sync: Callable[[], AbstractContextManager[None]]
    zero_grad_buffer: Callable[[], None]
    enable_forward_pre_hook: Callable[[], None]
    disable_forward_pre_hook: Callable[..., None]


class Optimizer(Protocol):
    """Megatron's (core/optimizer @0.16.1)."""

    def zero_grad(self) -> None: ...
    def step(self) -> tuple[bool, float | None, int | None]: ...
    def scale_loss(self, loss: torch.Tensor, /) -> torch.Tensor: ...


class MegatronConfig(Protocol):
    """Of a TransformerConfig what the loop sets and reads (training.py:2547 @0.16.1)."""

    params_dtype: torch.dtype
    moe_grouped_gemm: bool
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None
    no_sync_func: Sync | list[Sync] | None
    grad_sync_func: Sync | list[Sync] | None
    param_sync_func: Sync | list[Sync] | None
    finalize_model_grads_func: Callable[..., None] | None


class PeakSummary(TypedDict):
    """The most bytes of an iteration, and the labels that held then."""

    bytes: int
    at: dict[str, object]


class Memory(TypedDict, total=False):
    """after : live bytes behind the last iteration, where they are tracked"""

    peaks: list[PeakSummary]
    provenance: str
    after: int


class Summary(TypedDict, total=False):
    """What a rank of a recipe says of itself; it is JSON between two processes."""

    rank: int
    stage: int
    coordinates: dict[str, int]
    tier: str
    stand_ins: list[str]
    megatron_core: str
    parameters: int
    steps: int
    master_parameter_moved: bool | None
    losses: list[float | None]
    communication: list[Json]  # of ``tally.Row``
    communication_of: str
    memory: Memory
    build_s: float
    run_s: float
    iteration_s: list[float]
    host_peak_rss: int
    witness: Json
    recording: Json
