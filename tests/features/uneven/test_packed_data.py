"""Documents of samples are those that Megatron's own data set reads from the files."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.features.uneven.packed_data import DataJob, read_index

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

JOB = DataJob(32, dp=2, microbatches=3, samples_per_microbatch=2, seed=7, split="80,20,0")
ITERATIONS = 9


def write_data(folder, lengths):
    """A data set in which each token is its place in its document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = folder / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for length in lengths:
        builder.add_document(np.arange(length), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_by_megatron(prefix, job, samples):
    """Lengths of the documents of samples, from the tokens that Megatron's data set returns."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=job.seed,
        sequence_length=job.sequence_length,
        blend=([str(prefix)], None),
        split=job.split,
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=SimpleNamespace(unique_identifiers={}, eod=10**6, pad=10**6 + 1, vocab_size=None),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [samples, 0, 0]
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    for number in range(samples):
        tokens = dataset[number]["tokens"].numpy()
        begins = np.flatnonzero(np.diff(tokens) != 1) + 1
        yield np.diff([0, *begins, job.sequence_length])


# all documents that are long enough, very short ones, and several epochs
@pytest.mark.parametrize("documents", [400, 90, 12])
@pytest.mark.parametrize("longest", [9, 100])
def test_documents_are_those_of_megatrons_own_data_set(tmp_path, documents, longest):
    lengths = np.random.default_rng(documents).integers(1, longest, documents)
    prefix = write_data(tmp_path, lengths)
    batches = read_index(f"{prefix}.idx", JOB, ITERATIONS)
    samples = ITERATIONS * JOB.samples_per_iteration
    squares = [int((own**2).sum()) for own in read_by_megatron(prefix, JOB, samples)]
    # one microbatch after the other, of each dp rank its samples in a row
    expected = np.array(squares).reshape(ITERATIONS, JOB.microbatches, JOB.dp, -1).mean(axis=-1)
    assert np.array_equal(batches.squares, expected.swapaxes(1, 2))
    assert len(set(squares)) > 10
    assert (batches.tokens == JOB.sequence_length).all()
    assert batches.is_packed


def test_no_token_is_read(tmp_path):
    prefix = write_data(tmp_path, [20] * 200)
    (tmp_path / "text.bin").unlink()
    batches = read_index(f"{prefix}.idx", JOB, ITERATIONS)
    assert batches.squares.shape == (ITERATIONS, JOB.dp, JOB.microbatches)


def test_samples_are_dealt_as_megatrons_sampler_does():
    samplers = pytest.importorskip("megatron.training.datasets.data_samplers")
    numbers = np.arange(ITERATIONS * JOB.samples_per_iteration)
    shape = ITERATIONS, JOB.microbatches, JOB.dp, JOB.samples_per_microbatch
    dealt = numbers.reshape(shape)
    for dp_rank in range(JOB.dp):
        sampler = samplers.MegatronPretrainingSampler(
            len(numbers), 0, JOB.samples_per_microbatch, dp_rank, JOB.dp
        )
        assert np.array_equal(list(sampler), dealt[:, :, dp_rank].reshape(-1, shape[-1]))


@pytest.mark.parametrize("damage", ["empty", "header", "cut", "text", "no tokens"])
def test_a_damaged_index_is_refused(tmp_path, damage):
    prefix = write_data(tmp_path, [20] * 200)
    file = tmp_path / "text.idx"
    whole = file.read_bytes()
    if damage == "no tokens":
        write_data(tmp_path, [0, 0])
    else:
        damaged = {"empty": b"", "header": b"X" + whole[1:], "cut": whole[:40], "text": b"a" * 99}
        file.write_bytes(damaged[damage])
    with pytest.raises(UsageError, match="text.idx"):
        read_index(f"{prefix}.idx", JOB, ITERATIONS)
