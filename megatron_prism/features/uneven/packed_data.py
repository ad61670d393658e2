"""Samples of a data set's index, packed as Megatron packs them.

In : an ``.idx`` file and the settings of a job.  Out: Batches.  The file is read by Megatron's
reader (core/datasets/indexed_dataset.py ``_IndexReader``), shuffled and packed by its
``GPTDataset``; the documents of a sample are those of ``GPTDataset.__getitem__`` with
``inter_document_masking`` (gpt_dataset.py @main), and samples are dealt to dp ranks as
``MegatronPretrainingSampler`` does (training/datasets/data_samplers.py).  No token is read, so the
``.bin`` file is not needed.
"""

from __future__ import annotations

import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import UnsupportedError
from megatron_prism.features.uneven.samples import Batches, collate

_IDX_FIX = "the .idx file that tools/preprocess_data.py wrote"
_EXTRA = 1  # a sample has one token more, of which labels are made


class _PackedDataset(Protocol):
    """What is read of Megatron's ``GPTDataset``.

    Attributes:
        document_index: int32, the documents in the order in which samples have them.
        sample_index: int32 [samples + 1, 2], place in ``document_index`` and token there.
        shuffle_index: Place in ``sample_index`` of each sample.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


@dataclass(frozen=True)
class DataJob:
    """What of a job decides how samples are packed.

    Attributes:
        sequence_length: Tokens of a sample.
        dp: Data-parallel ranks.
        microbatches: Of an iteration.
        samples_per_microbatch: The micro batch size.
        seed: ``--seed``.
        split: ``--split``: shares of training, validation and test.
    """

    sequence_length: int
    dp: int
    microbatches: int
    samples_per_microbatch: int
    seed: int = 1234
    split: str = "969, 30, 1"

    @property
    def samples_per_iteration(self) -> int:
        """The global batch size."""
        return self.dp * self.microbatches * self.samples_per_microbatch


def read_index(path: str | os.PathLike[str], job: DataJob, iterations: int) -> Batches:
    """Pack the documents of a data set into the samples of a run.

    Args:
        path: The ``.idx`` file.
        job: The job that reads it.
        iterations: Of the run.  Megatron shuffles by the number of samples that a run needs, so
            it must be that of the run.

    Raises:
        UsageError: The file is no index, or too small for a sample.
        UnsupportedError: There is no megatron-core here.
    """
    lengths = _document_lengths(Path(path))
    samples_needed = iterations * job.samples_per_iteration
    with foreign.reading(path, "an index with a training sample", _IDX_FIX):
        dataset = _dataset(lengths, job, samples_needed)
        documents = [_documents(dataset, lengths, number) for number in range(samples_needed)]

    # one microbatch after the other, and of each the samples of dp rank 0, 1, …
    shape = iterations, job.microbatches, job.dp, job.samples_per_microbatch
    tokens = np.full(shape, job.sequence_length, dtype=np.int64)
    squares = np.array([int((lengths**2).sum()) for lengths in documents], dtype=np.int64)
    tokens, squares = (column.reshape(shape).swapaxes(1, 2) for column in (tokens, squares))
    source = f"packed from {Path(path).name} as Megatron does, --seed {job.seed}"
    return collate(tokens, squares, True, source)


def _document_lengths(path: Path) -> np.ndarray:
    """Read the tokens of every document, int32 [documents]."""
    try:
        from megatron.core.datasets.indexed_dataset import _IndexReader
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("megatron", "torch"):
            raise
        raise UnsupportedError(
            f"the packing of a data set is Megatron's, and there is no {error.name} here",
            fix="pip install megatron-core torch",
        ) from error
    with foreign.reading(path, "an index of a data set", _IDX_FIX):
        try:
            reader = _IndexReader(str(path), multimodal=False)
            lengths = np.array(reader.sequence_lengths)
        # a bad header, a file that ends too early
        except (AssertionError, TypeError, KeyError, struct.error) as error:
            raise ValueError(str(error) or "it has no header of an index") from error
        if not len(lengths) or int(lengths.min()) < 0:
            raise ValueError("it has no documents")
    return lengths


def _dataset(lengths: np.ndarray, job: DataJob, samples_needed: int) -> _PackedDataset:
    """Let Megatron shuffle and pack the documents of training.

    Args:
        lengths: int32 [documents], their tokens.
        job: The job that reads them.
        samples_needed: Of the run.

    Returns:
        The ``GPTDataset`` of training.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=job.seed,
            sequence_length=job.sequence_length,
            blend=(["data"], None),
            split=job.split,
            path_to_cache=cache,
            tokenizer=SimpleNamespace(unique_identifiers={}, eod=-1, pad=-2, vocab_size=None),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        # documents of training, as BlendedMegatronDatasetBuilder._build_megatron_dataset_splits
        bounds = config.split_matrix[Split.train.value] or (0.0, 0.0)
        first, behind = (round(bound * float(len(lengths))) for bound in bounds)
        indices = np.arange(first, behind, dtype=np.int32)
        # without tokens Megatron looks for epochs for ever
        if not int(lengths[indices].sum()):
            raise ValueError(f"--split {job.split} leaves training no tokens")
        low_level = SimpleNamespace(sequence_lengths=lengths, path_prefix="data")
        dataset = GPTDataset(low_level, "data", indices, samples_needed, Split.train, config)
        if len(dataset) < samples_needed:
            raise ValueError("its documents are shorter than one sample together")
        # the files of the cache are mapped, and go with the folder
        for name in ("document_index", "sample_index", "shuffle_index"):
            setattr(dataset, name, np.array(getattr(dataset, name)))
    packed: _PackedDataset = dataset
    return packed


def _documents(dataset: _PackedDataset, tokens: np.ndarray, number: int) -> np.ndarray:
    """Give the tokens of the documents of a sample, int64 [documents].

    Args:
        dataset: The packed data set.
        tokens: int32 [documents], tokens of each document of the file.
        number: Of the sample.

    Source: ``GPTDataset._query_document_sample_shuffle_indices`` and ``__getitem__``.
    """
    place = dataset.shuffle_index[number]
    first, first_offset = dataset.sample_index[place].tolist()
    last, last_end = dataset.sample_index[place + 1].tolist()
    if first == last:
        return np.array([last_end - first_offset], dtype=np.int64)
    lengths: list[int] = []
    for position in range(first, last + 1):
        end = int(tokens[dataset.document_index[position]])
        if position == last:
            end = last_end + _EXTRA
        begin = first_offset if position == first else 0
        lengths.append(end - begin)
    # the last token is a label alone
    lengths[-1] -= _EXTRA
    return np.array([length for length in lengths if length > 0], dtype=np.int64)
