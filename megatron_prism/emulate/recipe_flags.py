"""The command line of ``pretrain_gpt.py`` that trains a recipe's job.

Most keys of a recipe are Megatron's names (training/arguments.py @core_v0.16.1); the others are
here.  What has Megatron's default is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron_prism.core.recipe import RENAMED, Model, Parallel, Recipe, Train

__all__ = ["OPTION", "megatron_flags", "option_of"]

# a recipe's key -> Megatron's option, where it is not the key's own name
OPTION = {
    **{key: name.replace("_", "-") for name, key in RENAMED.items() if key.startswith("parallel")},
    "parallel.vpp": "num-virtual-stages-per-pipeline-rank",
    "parallel.num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "parallel.num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "model.norm_epsilon": "norm-epsilon",
    "model.use_rope_scaling": "use-rope-scaling",
    "model.qk_layernorm": "qk-layernorm",
    "model.add_qkv_bias": "add-qkv-bias",
    "train.fp8": "fp8-recipe",
    "train.iterations": "train-iters",
    "train.grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32",
}
_ALWAYS = {  # what pretrain_gpt insists on, or what its default is another for
    "model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.seq_length",
    "model.vocab_size", "train.micro_batch_size", "train.global_batch_size", "train.iterations",
    "train.lr", "train.bf16", "model.attention_dropout", "model.hidden_dropout",
}  # fmt: skip
_NEGATED = {"model.add_bias_linear": "disable-bias-linear"}
_SKIPPED = {"parallel.world_size", "parallel.order", "train.data", "model.extra",
            "train.grad_reduce_in_fp32"}  # fmt: skip


def option_of(key: str) -> str:
    """``--tensor-model-parallel-size`` of ``parallel.tp``: Megatron's option of a recipe's key."""
    return "--" + OPTION.get(key, key.rpartition(".")[2].replace("_", "-"))


def megatron_flags(recipe: Recipe) -> list[str]:
    """Options and values, in the order of the recipe's keys."""
    words: list[str] = []
    sections: tuple[tuple[str, Model | Parallel | Train], ...] = (
        ("model", recipe.model), ("parallel", recipe.parallel), ("train", recipe.train),
    )  # fmt: skip
    for section, part in sections:
        for one in dataclasses.fields(part):
            key, value = f"{section}.{one.name}", getattr(part, one.name)
            if key in _SKIPPED or (value == one.default and key not in _ALWAYS):
                continue
            words += _flag(key, value)
    words += ["--max-position-embeddings", str(recipe.model.seq_length)] * (
        recipe.model.max_position_embeddings is None
    )
    if recipe.model.num_query_groups is not None:
        words.append("--group-query-attention")
    for name, value in recipe.model.extra.items():
        words += _flag(f"model.{name}", value)
    if recipe.train.fp8:
        words += ["--fp8-format", "hybrid"]
    if recipe.train.data == "mock":
        words += ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    return words


def _flag(key: str, value: Any) -> Iterator[str]:
    if key in _NEGATED:
        yield from [] if value else [f"--{_NEGATED[key]}"]
    elif value is True:
        yield option_of(key)
    elif isinstance(value, list):
        yield from (option_of(key), *map(str, value))
    elif value is not None and value is not False:
        yield from (option_of(key), str(value))
