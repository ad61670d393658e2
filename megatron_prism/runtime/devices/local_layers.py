"""The norm of Megatron's local layers without apex; ``emulate.patches.without_cuda`` puts it in
place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class ModelConfig(Protocol):
    """What a norm asks of Megatron's TransformerConfig."""

    normalization: str
    layernorm_zero_centered_gamma: bool
    use_cpu_initialization: bool
    params_dtype: torch.dtype
    sequence_parallel: bool


class SequenceParallelNorm(torch.nn.Module):
    """Stands in for apex's FusedLayerNorm / TE's norms under sequence parallelism.

    Input and output ``[tokens, micro-batch, hidden]``.  Weights carry ``sequence_parallel``, so
    that finalize_model_grads reduces their gradients over tensor-parallel ranks, as for the real
    ones.
    """

    def __init__(self, config: ModelConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = torch.cuda.current_device() if not config.use_cpu_initialization else "cpu"
        # with layernorm_zero_centered_gamma Megatron stores gamma - 1
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(
            start(hidden_size, device=device, dtype=config.params_dtype)
        )
        self.bias = None
        if not self.rms:
            self.bias = torch.nn.Parameter(
                torch.zeros(hidden_size, device=device, dtype=config.params_dtype)
            )
        # Megatron sums gradients of parameters with this mark over the tensor parallel group
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.rms:
            return functional.rms_norm(hidden, self.shape, weight, self.eps)
        return functional.layer_norm(hidden, self.shape, weight, self.bias, self.eps)
