"""What decides the content of a slice?  Kept in its source, and alike in all slices of a folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

from megatron_prism.core.slices import AGE, PACED, PEERS

__all__ = ["TIMING", "source_of", "versions"]

TIMING = "4"  # goes up when times of a GPU's slices mean something else; 4: no wait for the host


def versions() -> dict[str, str]:
    """What besides Megatron decides the memory: torch, and Transformer Engine if it is there."""
    found = {"torch": importlib.metadata.version("torch")}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformer_engine"] = importlib.metadata.version("transformer-engine")
    return found


def source_of(megatron: str, tier: str, device: str, pace: Path | None = None) -> dict[str, str]:
    """What decides the content of a stock job's slices, besides its arguments, which are not known
    before Megatron has parsed them; ``pace``: --prism-pace while they are recorded."""
    found = {
        "megatron_core": megatron.partition(" ")[0],
        **versions(),
        "tier": tier,
        "device": device,
    }
    if tier == "cuda":
        found[AGE] = TIMING
    return found if pace is None else {**found, PEERS: PACED}
