"""What of a job's memory nobody has measured: by name, with how far the truth may be from it.

A figure of tier meta is exact where what allocates is known from its source.  Where it is not, the
figure stays and says so: in the summary of a run, in ``prism memory`` and in its baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_prism.core import job_settings

__all__ = ["Estimate", "described", "estimates"]

_Settings = Mapping[str, str]


@dataclass(frozen=True)
class Estimate:
    """``what`` is not known; the truth is between ``low`` and ``high`` percent off the figure."""

    what: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+g} to {self.high:+g} % ({self.what})"


def _has(settings: _Settings, *names: str) -> bool:
    return any(settings.get(name, "0") not in ("0", "None", "False") for name in names)


def _routes(settings: _Settings) -> bool:
    """Whether the router's choices decide how large tensors are."""
    experts = _has(settings, "num_experts", "num_moe_experts")
    return experts and not _has(settings, "moe_pad_expert_input_to_capacity")


def _compiles_loss(settings: _Settings) -> bool:
    fused = _has(settings, "cross_entropy_loss_fusion")
    return fused and settings.get("cross_entropy_fusion_impl", "native") == "native"


def _packs_unfused(settings: _Settings) -> bool:
    packed = _has(settings, "sft", "sequence_packing_scheduler", "use_packed_sequence")
    return packed and settings.get("attention_backend") == "unfused"


_RULES: tuple[tuple[Callable[[_Settings], bool], Estimate], ...] = (
    # of NVIDIA's published peaks of MoE jobs (docs/accuracy.md)
    (_routes, Estimate("routing: other ranks send experts as many tokens as this one", -15, 10)),
    # one more fp32 tensor of logits
    (_compiles_loss, Estimate("--cross-entropy-loss-fusion: compiled, may copy the logits", 0, 27)),
    # scores and their mask, of the longest sequence
    (_packs_unfused, Estimate("unfused attention of packed sequences: counted as fused", 0, 150)),
)


def estimates(arguments: str | None) -> tuple[Estimate, ...]:
    """What is not known of a job with these settings (``job_settings``'s line of text)."""
    found = job_settings.values(arguments or "")
    plain = {name.removeprefix("--").replace("-", "_").rpartition(".")[2]: text or "True"
             for name, text in found.items()}  # fmt: skip
    return tuple(estimate for applies, estimate in _RULES if applies(plain))


def described(provenance: str, found: tuple[Estimate, ...]) -> str:
    """``provenance`` of a figure that ``found`` are part of."""
    return provenance if not found else f"estimated, {'; '.join(map(str, found))}; {provenance}"
