"""``--mock-data`` of BERT, T5 and ``--sft``: samples of the right shape, which Megatron lacks.

Tokens are random, sequences full; a packed sequence of ``--sft`` holds documents of random lengths.
On tier meta no sample has a mask: a batch gets one that takes no memory on the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.patch import SPEEDS_UP, Original, PatchContext, Patches

PATCHES = Patches()
Sample = dict[str, object]
_DOCUMENTS = 4  # of a packed sequence


class _StandIn(torch.utils.data.Dataset[Sample]):
    """A data set of Megatron whose samples nobody reads from anywhere."""

    def __init__(
        self, rows: object, path: object, indices: object, size: int | None, split: Any, config: Any
    ) -> None:
        self.size, self.config, self.split = size or 1, config, split

    @staticmethod
    def build_low_level_dataset(path: object, config: object) -> range:
        return range(100_000)

    @staticmethod
    def numel_low_level_dataset(rows: range) -> int:
        return len(rows)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        seed = (self.config.random_seed, self.split.value, index)
        return self.sample(np.random.default_rng(seed), self.config.sequence_length)

    def tokens(self, draw: np.random.Generator, length: int) -> np.ndarray:
        return draw.integers(0, self.config.tokenizer.vocab_size, length)

    def sample(self, draw: np.random.Generator, length: int) -> Sample:
        raise NotImplementedError


class _Bert(_StandIn):
    """As BERTMaskedWordPieceDataset (core/datasets/bert_dataset.py:84 @0.16.1)."""

    def sample(self, draw: np.random.Generator, length: int) -> Sample:
        ones = np.ones(length, np.int64)
        masked = draw.random(length) < self.config.masking_probability
        return {
            "text": self.tokens(draw, length),
            "types": (np.arange(length) >= length // 2).astype(np.int64),
            "labels": np.where(masked, self.tokens(draw, length), -1),
            "is_random": int(draw.integers(2)) if self.config.classification_head else 0,
            "padding_mask": ones,
            "loss_mask": masked.astype(np.int64),
            "truncated": 0,
        }


class _T5(_StandIn):
    """As T5MaskedWordPieceDataset (core/datasets/t5_dataset.py:216 @0.16.1)."""

    def sample(self, draw: np.random.Generator, length: int) -> Sample:
        decoded = self.config.sequence_length_decoder
        return {
            "text_enc": self.tokens(draw, length),
            "text_dec": self.tokens(draw, decoded),
            "labels": self.tokens(draw, decoded),
            "loss_mask": np.ones(decoded, np.int64),
            "truncated": 0,
            "enc_mask": np.ones(length, np.int64),
            "dec_mask": np.ones(decoded, np.int64),
        }


class _FineTuning(_StandIn):
    """As SFTDataset (training/datasets/sft_dataset.py:96 @0.16.1): documents in one sequence, cut
    where context parallelism wants them.
    """

    def sample(self, draw: np.random.Generator, length: int) -> Sample:
        from megatron.core import utils

        # context parallelism deals each document out in 2 * cp parts
        part = 2 * getattr(self.config, "context_parallel_size", 1)
        cuts = draw.integers(1, max(length // part, 2), _DOCUMENTS - 1) * part
        ends = np.unique([0, *cuts[cuts < length], length])
        lengths = np.diff(ends)
        # as many ends in every sample: the last document's end is repeated
        padded = np.full(length + 1, length)
        padded[: len(ends)] = ends
        # so that samples of several lengths make a batch, from 0.19 on
        told = padded if hasattr(utils, "flatten_batch_for_packed_sequences") else ends
        tokens = torch.from_numpy(self.tokens(draw, length + 1))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(length),
            "position_ids": torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            "cu_seqlens": torch.tensor(told, dtype=torch.int32),
            "max_seqlen": torch.tensor(lengths.max(), dtype=torch.int32),
        }


_STAND_INS = {
    "BERTMaskedWordPieceDataset": _Bert,
    "T5MaskedWordPieceDataset": _T5,
    "SFTDataset": _FineTuning,
}


@PATCHES.instead(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
    at=":148 @0.16.1; :147 @0.19.0",
)
def _mock_data(
    context: PatchContext, original: Original, builder: Any, *args: object, **kwargs: object
) -> object:
    """Megatron's builder builds a stand-in where its data set needs files; on tier meta its samples
    have no mask, which ``_masks_are_shapes`` gives to each batch.
    """
    config = builder.config
    # --mock-data: no data set may need files
    if config.mock:
        builder.cls = _STAND_INS.get(getattr(builder.cls, "__name__", ""), builder.cls)
        # a mask of a long sequence would take the host's memory: a shape stands for it
        if context.meta and getattr(config, "create_attention_mask", False):
            config.create_attention_mask, config.mask_is_a_shape = False, True
    return original(builder, *args, **kwargs)


@PATCHES.instead(
    "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
    at=":19 @0.16.1 and @0.19.0",
    purpose=SPEEDS_UP,
)
def _masks_are_shapes(
    context: PatchContext, original: Original, dataset: Any, *args: object, **kwargs: object
) -> Any:
    """A mask of sequence x sequence for each sample takes seconds and gigabytes on the host: there
    its one element is repeated, on the device it has all of its bytes.
    """
    loader = original(dataset, *args, **kwargs)
    config = getattr(dataset, "config", None)
    if getattr(config, "mask_is_a_shape", False) and loader.collate_fn is default_collate:
        loader.collate_fn = _with_mask
    return loader


def _with_mask(samples: list[Sample]) -> dict[str, Any]:
    """A batch, with the mask (samples, 1, sequence, sequence) of booleans behind the labels."""
    batch = default_collate(samples)
    if "cu_seqlens" in batch:
        return batch
    rows, length = batch["tokens"].shape
    mask = torch.zeros((), dtype=torch.bool).expand(rows, 1, length, length)
    first = {name: batch.pop(name) for name in ("tokens", "labels")}
    return {**first, "attention_mask": mask, **batch}


@PATCHES.instead(
    "megatron.core.datasets.t5_dataset:T5MaskedWordPieceDatasetConfig.__post_init__",
    at=":46 @0.16.1; :46 @0.19.0",
)
def _no_sentinels(context: PatchContext, original: Original, self: Any) -> None:
    """T5 wants sentinels of its tokenizer, which NullTokenizer lacks; mock data have no spans that
    they stand for.
    """
    ids = "additional_special_tokens_ids"
    # real data, or a tokenizer that has sentinels
    real = self.blend or any(self.blend_per_split or ())
    if real or getattr(self.tokenizer, ids, None):
        original(self)
        return
    with ProcessChanges() as changes:
        changes.set(self, "tokenizer", SimpleNamespace(**{ids: (0,)}))
        original(self)
