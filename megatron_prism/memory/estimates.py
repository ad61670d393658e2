"""What nobody has measured of a job's memory, and by how much the figures may be off.

In : a job's settings.  Out: ``Estimate``, one for each rule that applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_prism.core.jobs import job_settings

_Settings = Mapping[str, str]


@dataclass(frozen=True)
class Estimate:
    """What is not known of a job's memory.

    Attributes:
        what: is not known.
        low: percent by which the truth may be below the figure.
        high: percent by which it may be above it.
    """

    what: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+g} to {self.high:+g} % ({self.what})"


@dataclass(frozen=True)
class _Rule:
    """An estimate, and the jobs that it is about."""

    applies: Callable[[_Settings], bool]
    estimate: Estimate


def _has(settings: _Settings, *names: str) -> bool:
    """Return whether one of the settings is on."""
    return any(settings.get(name, "0") not in ("0", "None", "False", "none") for name in names)


def _routing_decides_sizes(settings: _Settings) -> bool:
    """Return whether the router's choices decide how large tensors are."""
    if not _has(settings, "num_experts", "num_moe_experts"):
        return False
    if _has(settings, "moe_pad_expert_input_to_capacity"):
        return False
    # a rank with all experts keeps every copy, in one tensor for all of them
    has_all_experts = settings.get("expert_model_parallel_size", "1") == "1"
    return not (has_all_experts and _has(settings, "moe_grouped_gemm"))


def _has_graphs(settings: _Settings) -> bool:
    return _has(settings, "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


def _is_mxfp8(settings: _Settings) -> bool:
    return settings.get("fp8_recipe") == "mxfp8"


def _overlaps_tensor_parallelism(settings: _Settings) -> bool:
    return _has(settings, "tp_comm_overlap")


def _has_unfused_packed_sequences(settings: _Settings) -> bool:
    packs = _has(settings, "sft", "sequence_packing_scheduler", "use_packed_sequence")
    return packs and settings.get("attention_backend") == "unfused"


# slices are of the job without graphs: NVIDIA's figures are 1 % above and 13 % below
# (docs/measurements.md)
GRAPHS = Estimate("CUDA graphs: counted as if there were none", -15, 10)
_RULES = (
    # of NVIDIA's published peaks of MoE jobs (docs/measurements.md)
    _Rule(
        _routing_decides_sizes,
        Estimate("routing: other ranks send experts as many tokens as this one", -15, 10),
    ),
    _Rule(_has_graphs, GRAPHS),
    # by the sources; no GPU has run them beside this
    _Rule(_is_mxfp8, Estimate("mxfp8: scales and copies as on Blackwell", -5, 5)),
    # gathered activations are in them on a GPU, and are counted here
    _Rule(
        _overlaps_tensor_parallelism,
        Estimate("--tp-comm-overlap: userbuffers are no part of it", -10, 0),
    ),
    # scores and their mask, of the longest sequence
    _Rule(
        _has_unfused_packed_sequences,
        Estimate("unfused attention of packed sequences: counted as fused", 0, 150),
    ),
)


def estimates(arguments: str | None, graphs: bool = False) -> tuple[Estimate, ...]:
    """Return what is not known of a job.

    Args:
        arguments: its settings, as ``job_settings`` writes them.
        graphs: its CUDA graphs were captured.
    """
    settings = job_settings.plain(arguments or "")
    applying = [rule.estimate for rule in _RULES if rule.applies(settings)]
    if graphs:
        applying = [estimate for estimate in applying if estimate is not GRAPHS]
    return tuple(applying)


def described(provenance: str, unknown: tuple[Estimate, ...]) -> str:
    """Return the provenance of a figure that ``unknown`` are part of."""
    if not unknown:
        return provenance
    return f"estimated, {'; '.join(map(str, unknown))}; {provenance}"
