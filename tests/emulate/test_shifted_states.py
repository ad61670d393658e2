"""States that Megatron saves in the wrong place, of buffers by hand."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_prism.emulate.patches import shifted_states

JOB = Namespace(dist_ckpt_optim_fully_reshardable=True)


class Chunk(torch.nn.Module):
    """A model whose parameters have the names of Megatron's."""

    def __init__(self, *names):
        super().__init__()
        self.by_name = {name: torch.nn.Parameter(torch.empty(4)) for name in names}

    def named_parameters(self):
        return [(f"module.module.{name}", value) for name, value in self.by_name.items()]


def optimizer(chunk, *buckets):
    """One whose buffer has buckets of (names of parameters, elements with padding)."""
    index = {}
    made = []
    for number, (names, padded) in enumerate(buckets):
        for name in names:
            index[chunk.by_name[name]] = (0, 0, number)
        bucket = SimpleNamespace(grad_data=torch.empty(padded), numel_unpadded=4 * len(names))
        made.append(bucket)
    buffer = SimpleNamespace(param_index_map=index, buckets=made)
    return SimpleNamespace(model_chunks=[chunk], buffers=[buffer])


@pytest.fixture(autouse=True)
def release(monkeypatch):
    """Megatron 0.19.2, unless a test says otherwise."""
    monkeypatch.setattr(shifted_states, "megatron_release", lambda: "0.19.2")


def test_what_is_behind_a_padded_bucket_is_shifted_by_all_padding_before_it():
    chunk = Chunk("a", "b", "c")
    made = optimizer(chunk, (["a"], 10), (["b"], 5), (["c"], 4))
    assert shifted_states.shifted_states(made, JOB) == {"b": 6, "c": 7}


def test_padding_behind_the_last_bucket_shifts_nothing():
    made = optimizer(Chunk("a", "b"), (["a"], 4), (["b"], 128))
    assert shifted_states.shifted_states(made, JOB) == {}


def test_each_optimizer_of_a_chain_counts():
    first = optimizer(Chunk("a", "b"), (["a"], 6), (["b"], 4))
    second = optimizer(Chunk("expert", "other"), (["expert"], 8), (["other"], 4))
    chain = SimpleNamespace(chained_optimizers=[first, second])
    assert shifted_states.shifted_states(chain, JOB) == {"b": 2, "other": 4}


def test_the_last_stages_copy_of_tied_embeddings_is_not_saved():
    chunk = Chunk("a", "output_layer.weight")
    made = optimizer(chunk, (["a"], 6), (["output_layer.weight"], 4))
    assert shifted_states.shifted_states(made, JOB) == {"output_layer.weight": 2}
    chunk.by_name["output_layer.weight"].shared_embedding = True
    assert shifted_states.shifted_states(made, JOB) == {}


@pytest.mark.parametrize("number", ["0.20.0", "0.21", "unknown"])
def test_a_megatron_that_is_corrected_shifts_nothing(number, monkeypatch):
    monkeypatch.setattr(shifted_states, "megatron_release", lambda: number)
    made = optimizer(Chunk("a", "b"), (["a"], 6), (["b"], 4))
    assert shifted_states.shifted_states(made, JOB) == {}


def test_other_formats_and_optimizers_shift_nothing():
    made = optimizer(Chunk("a", "b"), (["a"], 6), (["b"], 4))
    assert shifted_states.shifted_states(made, Namespace()) == {}
    assert shifted_states.shifted_states(torch.optim.SGD([torch.zeros(1)], lr=1), JOB) == {}
