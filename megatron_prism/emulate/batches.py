"""Which tokens does a rank train on?  Mock data, or the bytes of a text file.

Yields microbatches of shape ``[micro_batch_size, seq_length / cp]``: tokens, labels (the next
token), positions, loss mask.  Data-parallel ranks read disjoint samples; context-parallel ranks the
chunks r and 2*cp-1-r of each, as Megatron deals them (core/utils.py get_batch_on_this_cp_rank
@0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from megatron_prism.core.errors import RecipeError
from megatron_prism.core.recipe_schema import Recipe

__all__ = ["batches"]


def batches(
    recipe: Recipe, device: torch.device, dp_rank: int, cp_rank: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches for one rank, the same on every run.  RecipeError for a short text."""
    size, tokens, cp = recipe.train.micro_batch_size, recipe.model.seq_length, recipe.world.cp
    keep = _chunks(tokens, cp, cp_rank)
    positions = torch.arange(tokens)[keep].expand(size, -1)
    if device.type == "meta":
        shape = (size, len(keep))
        ids = torch.empty(shape, dtype=torch.int64, device=device)
        mask = torch.empty(shape, dtype=torch.float32, device=device)
        while True:
            yield {
                "tokens": torch.empty_like(ids),
                "labels": torch.empty_like(ids),
                "positions": torch.empty_like(ids),
                "mask": torch.empty_like(mask),
            }
    sample = _samples(recipe)
    number = dp_rank * size
    while True:
        rows = np.stack([sample(number + i) for i in range(size)])
        number += size * recipe.world.dp
        ids = torch.from_numpy(rows)
        yield {
            "tokens": ids[:, :-1][:, keep].contiguous().to(device),
            "labels": ids[:, 1:][:, keep].contiguous().to(device),
            "positions": positions.contiguous().to(device),
            "mask": torch.ones(size, len(keep), device=device),
        }


def _chunks(tokens: int, cp: int, cp_rank: int) -> torch.Tensor:
    """Positions that a context-parallel rank holds."""
    if cp == 1:
        return torch.arange(tokens)
    part = torch.arange(tokens).view(2 * cp, -1)
    return torch.cat([part[cp_rank], part[2 * cp - 1 - cp_rank]])


def _samples(recipe: Recipe) -> Callable[[int], np.ndarray]:
    """A function sample number -> ``[seq_length + 1]`` token ids, reproducible."""
    tokens, vocabulary, seed = recipe.model.seq_length, recipe.model.vocab_size, recipe.train.seed
    if recipe.train.data == "mock":

        def mock(number: int) -> np.ndarray:
            return np.random.default_rng((seed, number)).integers(0, vocabulary, tokens + 1)

        return mock
    text = np.frombuffer(Path(recipe.train.data).read_bytes(), dtype=np.uint8).astype(np.int64)
    if len(text) <= tokens + 1 or text.max() >= vocabulary:
        raise RecipeError(
            f"{recipe.train.data} has {len(text):,} bytes up to value {text.max(initial=0)}; "
            f"samples need {tokens + 1} bytes below vocab_size {vocabulary}",
            fix="use a longer text, a shorter model.seq_length, or model.vocab_size=256",
        )

    def read(number: int) -> np.ndarray:
        start = np.random.default_rng((seed, number)).integers(0, len(text) - tokens - 1)
        return text[start : start + tokens + 1]

    return read
