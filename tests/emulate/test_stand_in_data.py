"""Mock data where Megatron has none: what its own data sets hand over, name by name."""

import inspect
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import patching

from megatron_prism.emulate.patches import stand_in_data

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron
LENGTH, DECODED, WORDS = 64, 16, 100
MASKING = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


@pytest.fixture
def samples():
    """(data set of Megatron, its configuration, more settings) -> three samples for training."""
    from megatron.core.datasets import blended_megatron_dataset_builder as builders
    from megatron.core.datasets import t5_dataset

    context = patching.context()
    patching.apply("mock-data", builders, context)
    patching.apply("no-sentinels", t5_dataset, context)

    def of(cls, config, **settings):
        tokenizer = SimpleNamespace(vocab_size=WORDS, additional_special_tokens_ids=None)
        made = config(
            random_seed=1, sequence_length=LENGTH, blend=None, split="8,1,1", tokenizer=tokenizer,
            **settings,
        )  # fmt: skip
        assert made.tokenizer is tokenizer
        build = builders.BlendedMegatronDatasetBuilder(cls, [3, 2, 1], lambda: True, made).build
        train, valid, test = build()
        assert (len(train), len(valid), len(test)) == (3, 2, 1)
        again = build()[0]
        assert all(np.array_equal(train[0][key], again[0][key]) for key in train[0])
        return [train[index] for index in range(3)]

    yield of
    context.changes.undo()


def fields(cls):
    """The names in the sample that Megatron's own data set returns."""
    source = inspect.getsource(cls.__getitem__)
    return set(re.findall(r'^ *"(\w+)":', source[source.rindex("return {") :], re.MULTILINE))


def test_bert(samples):
    from megatron.core.datasets import bert_dataset as bert

    made = samples(bert.BERTMaskedWordPieceDataset, bert.BERTMaskedWordPieceDatasetConfig,
                   classification_head=True, masking_max_ngram=3, **MASKING)  # fmt: skip
    for sample in made:
        assert set(sample) == fields(bert.BERTMaskedWordPieceDataset)
        assert {sample[key].shape for key in sample if key not in ("is_random", "truncated")} == {
            (LENGTH,)
        }
        assert sample["text"].min() >= 0
        assert sample["text"].max() < WORDS
        assert np.array_equal(sample["labels"] >= 0, sample["loss_mask"] == 1)
    torch.utils.data.default_collate(made)


def test_t5(samples):
    from megatron.core.datasets import t5_dataset as t5

    made = samples(t5.T5MaskedWordPieceDataset, t5.T5MaskedWordPieceDatasetConfig,
                   sequence_length_decoder=DECODED, masking_max_ngram=10, **MASKING)  # fmt: skip
    for sample in made:
        assert set(sample) == fields(t5.T5MaskedWordPieceDataset)
        encoded = {"text_enc", "enc_mask"}
        for key in set(sample) - {"truncated"}:
            assert sample[key].shape == ((LENGTH if key in encoded else DECODED),), key
    torch.utils.data.default_collate(made)


@pytest.mark.parametrize("cp", [1, 4])
def test_fine_tuning(samples, cp, monkeypatch):
    from megatron.core import utils
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    monkeypatch.setattr(utils, "flatten_batch_for_packed_sequences", print, raising=False)
    cls = type("SFTDataset", (), {})  # that of megatron.training
    made = samples(cls, GPTDatasetConfig, reset_position_ids=False, reset_attention_mask=False,
                   eod_mask_loss=False, create_attention_mask=False,
                   context_parallel_size=cp)  # fmt: skip
    several = 0
    for sample in made:
        ends = sample["cu_seqlens"]
        assert ends.shape == (LENGTH + 1,)
        assert ends.dtype == torch.int32
        lengths = ends.diff()[ends.diff() > 0]
        assert lengths.sum() == LENGTH
        assert lengths.max() == sample["max_seqlen"]
        assert not (lengths % (2 * cp)).any()
        assert (sample["position_ids"] == 0).sum() == len(lengths)
        assert torch.equal(sample["labels"][:-1], sample["tokens"][1:])
        several += len(lengths) > 1
    assert several
    torch.utils.data.default_collate(made)


class _Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {name: torch.zeros(1 << 20) for name in ("tokens", "labels", "loss_mask")}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_mask_of_a_million_tokens_takes_a_byte_on_the_host(num_workers):
    dataset = _Tokens()
    dataset.config = SimpleNamespace(mask_is_a_shape=True)

    def build(dataset, consumed):
        return torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=num_workers)

    loader = stand_in_data._masks_are_shapes(None, build, dataset, 0)
    batch = next(iter(loader))
    assert list(batch) == ["tokens", "labels", "attention_mask", "loss_mask"]
    mask = batch["attention_mask"]
    assert (mask.shape, mask.dtype) == ((2, 1, 1 << 20, 1 << 20), torch.bool)
    assert mask.untyped_storage().nbytes() == 1
    dataset.config.mask_is_a_shape = False
    loader = stand_in_data._masks_are_shapes(None, build, dataset, 0)
    assert "attention_mask" not in next(iter(loader))


@pytest.mark.parametrize("meta", [True, False])
def test_only_shapes_need_no_mask_of_their_samples(meta):
    config = SimpleNamespace(mock=True, create_attention_mask=True)
    builder = SimpleNamespace(cls=object, config=config)
    stand_in_data._mock_data(SimpleNamespace(meta=meta), lambda builder: None, builder)
    assert config.create_attention_mask is not meta
    assert getattr(config, "mask_is_a_shape", False) is meta
