"""Memory of single layers and blocks: on a CUDA GPU, and as tier meta counts it.

``python -m benchmarks.accuracy.layer_memory measure OUT.json [--tier cuda|meta] [--with te]
[--only RE]``
``python -m benchmarks.accuracy.layer_memory compare GPU.json [META.json] [--bound 0.5]``

Needs megatron-core 0.19.2; a GPU for ``cuda``.  Rows of group ``te`` need the real Transformer
Engine on the GPU (``--with te`` runs these alone), all others torch and megatron-core only.  Every
row is built in this process with one rank, runs twice, and the second pass is measured: bytes above
what was allocated before it, after forward, at the peak of forward, at the peak of backward, and
left over when outputs are gone and gradients stay.  A row that fails says why.  ``compare`` holds
both against each other: a row is off by its largest difference over the largest of its figures.

On the GPU the allocator runs with expandable segments, so that it only rounds to 512 bytes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
from torch.nn import functional

from megatron_prism.core.jobs.megatron_source import engine_version

SEQUENCE, BATCH, HIDDEN, HEADS, FFN, VOCABULARY, EXPERTS = 2048, 2, 1024, 8, 4096, 32768, 8
FIGURES = ("forward", "forward_peak", "backward_peak", "left")
ROUNDING = 16 << 10  # bytes: the allocator gives out 512 at a time, tier meta counts what is asked

Step = Callable[[], torch.Tensor]  # one forward pass
ROWS: dict[str, tuple[str, Callable[[], Step]]] = {}  # name -> group, what builds it


def row(name: str, group: str = "core") -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    def add(build: Callable[[], Step]) -> Callable[[], Step]:
        assert name not in ROWS, name
        ROWS[name] = (group, build)
        return build

    return add


# -- tensors ---------------------------------------------------------------------------------------
def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.02).to(dtype).requires_grad_()


def hidden(width: int = HIDDEN) -> torch.Tensor:
    return leaf(SEQUENCE, BATCH, width)


def tokens(most: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, most, (BATCH, SEQUENCE), device="cuda")


def places() -> torch.Tensor:
    return torch.arange(SEQUENCE, device="cuda").expand(BATCH, -1).contiguous()


def on(function: Callable[..., Any], *inputs: Any, **options: Any) -> Step:
    """``function`` of the same leaves every time; of several results the first."""

    def step() -> torch.Tensor:
        out = function(*inputs, **options)
        return out[0] if isinstance(out, tuple) else out

    return step


def simple(name: str, function: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> None:
    row(name)(lambda: on(function, *make()))


# -- torch -----------------------------------------------------------------------------------------
for _type, _label in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
    for _p in (0.0, 0.1):
        simple(
            f"dropout {_p} {_label}",
            lambda x, p=_p: functional.dropout(x, p) * 1,
            lambda t=_type: (leaf(SEQUENCE, BATCH, HIDDEN, dtype=t),),
        )


for _name, _kind, _sizes in (("torch LayerNorm", "LayerNorm", (HIDDEN,)),
                             ("torch RMSNorm", "RMSNorm", (HIDDEN,)),
                             ("torch Linear with bias", "Linear", (HIDDEN, FFN))):  # fmt: skip
    row(_name)(lambda kind=_kind, sizes=_sizes: on(
        getattr(torch.nn, kind)(*sizes, device="cuda", dtype=torch.bfloat16), hidden()
    ))  # fmt: skip
simple("gelu", functional.gelu, lambda: (hidden(FFN),))
simple("silu and gate", lambda x: functional.silu(x[..., :FFN]) * x[..., FFN:],
       lambda: (hidden(2 * FFN),))  # fmt: skip
simple("squared relu", lambda x: torch.pow(functional.relu(x), 2), lambda: (hidden(FFN),))
simple("softmax in fp32", lambda x: torch.softmax(x.float(), dim=-1).bfloat16(),
       lambda: (leaf(BATCH * HEADS, SEQUENCE, SEQUENCE),))  # fmt: skip
simple("embedding", lambda i, w: functional.embedding(i, w),
       lambda: (tokens(), leaf(VOCABULARY, HIDDEN)))  # fmt: skip
simple("embedding by index", lambda i, w: w[i], lambda: (tokens(), leaf(VOCABULARY, HIDDEN)))
simple("cross entropy of torch",
       lambda x, i: functional.cross_entropy(x.view(-1, VOCABULARY).float(), i.view(-1)),
       lambda: (hidden(VOCABULARY), tokens()))  # fmt: skip
simple("attention of torch, causal",
       lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
       lambda: tuple(leaf(BATCH, HEADS, SEQUENCE, HIDDEN // HEADS) for _ in "qkv"))  # fmt: skip
simple("attention of torch, causal, dropout",
       lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                               dropout_p=0.1),
       lambda: tuple(leaf(BATCH, HEADS, SEQUENCE, HIDDEN // HEADS) for _ in "qkv"))  # fmt: skip
simple("topk of probabilities", lambda x: torch.topk(torch.softmax(x, -1), 2, dim=-1)[0],
       lambda: (leaf(SEQUENCE * BATCH * 16, 128, dtype=torch.float32),))  # fmt: skip
simple("cumulative sum", lambda x: torch.cumsum(x, dim=0),
       lambda: (leaf(SEQUENCE * BATCH, HIDDEN, dtype=torch.float32),))  # fmt: skip
simple("rows by index", lambda x, i: x.index_select(0, i),
       lambda: (leaf(SEQUENCE * BATCH, HIDDEN),
                torch.randint(0, SEQUENCE * BATCH, (2 * SEQUENCE * BATCH,), device="cuda"))
       )  # fmt: skip
simple("rows added by scatter",
       lambda x, i: torch.zeros(SEQUENCE * BATCH, HIDDEN, device="cuda", dtype=x.dtype)
       .scatter_add(0, i, x),
       lambda: (leaf(2 * SEQUENCE * BATCH, HIDDEN),
                torch.randint(0, SEQUENCE * BATCH, (2 * SEQUENCE * BATCH, 1), device="cuda")
                .expand(-1, HIDDEN)))  # fmt: skip


# -- what torch's kernels take while they run, at sizes that reach another branch of their rules ---
def temporary(name: str, function: Callable[..., Any], *more: Callable[[], torch.Tensor],
              shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
    """What ``function`` makes of a leaf, and of ``more``; its result counts for nothing."""
    row(name)(lambda: on(
        lambda x, *rest: (function(x, *rest), x[:1] * 1)[1],
        leaf(*shape, dtype=dtype), *(make() for make in more),
    ))  # fmt: skip


for _rows, _width in ((4096, 1024), (2048, 8192), (8192, 12288), (16384, 128), (1000, 3000)):
    temporary(f"sum of {_rows} rows of {_width}", lambda x: x.sum(0), shape=(_rows, _width))
temporary("sum of rows in two dimensions", lambda x: x.sum((0, 1)), shape=(SEQUENCE, BATCH, FFN))
temporary("sum of rows in fp32", lambda x: x.sum(0), shape=(4096, 4096), dtype=torch.float32)
temporary("sum within rows", lambda x: x.sum(-1), shape=(4096, 8192))
temporary("sum within few rows", lambda x: x.sum(-1), shape=(16, 1 << 22))
temporary("sum of all", lambda x: x.sum(), shape=(4096, 8192), dtype=torch.float32)
temporary("mean of the middle", lambda x: x.mean(1), shape=(64, 1024, 1024))
temporary("largest of rows", lambda x: x.max(dim=0)[0], shape=(4096, 4096))
temporary("norm in fp32", lambda x: torch.linalg.vector_norm(x), shape=(1 << 26,),
          dtype=torch.float32)  # fmt: skip
for _count in (4096, 1 << 17, 1 << 20):
    _numbers = lambda count=_count: torch.randint(0, 64, (count,), device="cuda")  # noqa: E731
    temporary(f"argsort of {_count} numbers", lambda x, i: torch.argsort(i), _numbers, shape=(8, 8))
    temporary(f"argsort of {_count} numbers, stable", lambda x, i: torch.argsort(i, stable=True),
              _numbers, shape=(8, 8))  # fmt: skip
    temporary(f"histogram of {_count} numbers", lambda x, i: torch.histc(i.float(), 64, 0, 63),
              _numbers, shape=(8, 8))  # fmt: skip
    temporary(f"sums so far of {_count} numbers", lambda x, i: torch.cumsum(i, 0), _numbers,
              shape=(8, 8))  # fmt: skip
for _count, _experts in ((4096, 8), (1 << 16, 64), (1 << 16, 256)):
    temporary(f"topk of {_experts}, {_count} rows", lambda x: torch.topk(x, 8, dim=1),
              shape=(_count, _experts), dtype=torch.float32)  # fmt: skip
    temporary(f"sorted mask of {_experts}, {_count} rows",
              lambda x: torch.argsort((x > 0).T.contiguous(), dim=-1, descending=True, stable=True),
              shape=(_count, _experts), dtype=torch.float32)  # fmt: skip


def _table(count: int, words: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, words, (count,), device="cuda"), leaf(words, width)


for _shape in ((1024, VOCABULARY, HIDDEN), (3000, 512, 4096), (32768, 2048, 4096),
               (8192, 131072, 1024)):  # fmt: skip
    _label = "{} of {}, {} wide".format(*_shape)
    simple(f"embedding, {_label}", lambda i, w: functional.embedding(i, w),
           lambda sizes=_shape: _table(*sizes))  # fmt: skip
    simple(f"rows by index, {_label}", lambda i, w: w[i], lambda sizes=_shape: _table(*sizes))
_SIZES = (BATCH, HEADS, SEQUENCE, HIDDEN // HEADS)


def _pairs(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(SEQUENCE, SEQUENCE, device="cuda").tril().to(dtype)


for _label, _make in {
    "a mask": lambda: ([leaf(*_SIZES) for _ in "qkv"], {"attn_mask": _pairs(torch.bool)}),
    "a bias": lambda: ([leaf(*_SIZES) for _ in "qkv"], {"attn_mask": _pairs(torch.bfloat16)}),
    "fp32": lambda: ([leaf(*_SIZES, dtype=torch.float32) for _ in "qkv"], {"is_causal": True}),
    "fp32 and a mask": lambda: ([leaf(*_SIZES, dtype=torch.float32) for _ in "qkv"],
                                {"attn_mask": _pairs(torch.bool)}),
    "groups of heads": lambda: (
        [leaf(*_SIZES), *(leaf(BATCH, 2, *_SIZES[2:]) for _ in "kv")],
        {"is_causal": True, "enable_gqa": True}),
    "values of another size": lambda: (
        [leaf(*_SIZES), leaf(*_SIZES), leaf(*_SIZES[:3], 64)], {"is_causal": True}),
    "heads of 72": lambda: ([leaf(*_SIZES[:3], 72) for _ in "qkv"], {"is_causal": True}),
}.items():  # fmt: skip

    def _sdpa(make: Callable[[], Any] = _make) -> Step:
        qkv, options = make()
        return on(functional.scaled_dot_product_attention, *qkv, **options)

    row(f"attention of torch, {_label}")(_sdpa)


# -- fused functions of Megatron -------------------------------------------------------------------
def fusion(name: str, path: str, make: Callable[[], tuple[Any, ...]]) -> None:
    """``path``: module below megatron.core.fusions and function."""

    def build() -> Step:
        module, _, function = path.rpartition(".")
        found = __import__(f"megatron.core.fusions.{module}", fromlist=[function])
        return on(getattr(found, function), *make())

    row(name)(build)


fusion("bias and gelu", "fused_bias_gelu.bias_gelu_impl", lambda: (hidden(FFN), leaf(FFN)))
fusion("bias and swiglu", "fused_bias_swiglu.bias_swiglu_impl",
       lambda: (hidden(2 * FFN), leaf(2 * FFN)))  # fmt: skip
fusion("swiglu", "fused_bias_swiglu.bias_swiglu_impl", lambda: (hidden(2 * FFN), None))
fusion("weighted swiglu", "fused_bias_swiglu.weighted_bias_swiglu_impl",
       lambda: (leaf(SEQUENCE * BATCH, 2 * FFN), None,
                leaf(SEQUENCE * BATCH, 1, dtype=torch.float32)))  # fmt: skip
fusion("geglu", "fused_bias_geglu.bias_geglu_impl", lambda: (hidden(2 * FFN), None))
fusion("weighted squared relu", "fused_weighted_squared_relu.weighted_squared_relu_impl",
       lambda: (leaf(SEQUENCE * BATCH, FFN),
                leaf(SEQUENCE * BATCH, 1, dtype=torch.float32)))  # fmt: skip
for _p in (0.0, 0.1):
    for _bias in (True, False):
        fusion(f"{'bias, ' if _bias else ''}dropout {_p} and residual",
               "fused_bias_dropout.bias_dropout_add_fused_train",
               lambda p=_p, bias=_bias: ((hidden(), leaf(HIDDEN) if bias else None), hidden(), p)
               )  # fmt: skip


@row("bias, dropout 0.1 and residual, not fused")
def _bias_dropout() -> Step:
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

    return on(bias_dropout_add_unfused(True), (hidden(), leaf(HIDDEN)), hidden(), 0.1)


def cross_entropy(fused: bool) -> Step:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group = (parallel_state.get_tensor_model_parallel_group(),) * fused
    function = fused_vocab_parallel_cross_entropy if fused else vocab_parallel_cross_entropy
    logits, labels = hidden(VOCABULARY), tokens().t().contiguous()
    return lambda: function(logits * 1, labels, *group)  # logits are no leaf in a job


row("cross entropy of Megatron")(lambda: cross_entropy(False))
row("cross entropy of Megatron, fused")(lambda: cross_entropy(True))


# -- layers of Megatron ----------------------------------------------------------------------------
def config(latent: bool = False, **options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    made = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN, "bf16": True, "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False, "bias_activation_fusion": True,
        "bias_dropout_fusion": True, "masked_softmax_fusion": False, "persist_layer_norm": False,
        "attention_softmax_in_fp32": True,
    }  # fmt: skip
    return (MLATransformerConfig if latent else TransformerConfig)(**{**made, **options})


def attention_backend(name: str) -> Any:
    """Megatron's name of it; sets what ``--attention-backend`` sets for Transformer Engine."""
    from megatron.core.transformer.enums import AttnBackend

    for kind in ("FLASH", "FUSED", "UNFUSED"):
        os.environ[f"NVTE_{kind}_ATTN"] = str(int(name in ("auto", kind.lower())))
    return AttnBackend[name]


def masked() -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda"), 1).bool()


def described(te: bool = False, latent: bool = False, experts: int | None = None,
              backend: str = "auto", **options: Any) -> tuple[Any, Any]:  # fmt: skip
    """Configuration and parts of GPT's layers."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    own = {"moe_grouped_gemm": options.get("moe_grouped_gemm", False),
           "qk_layernorm": options.get("qk_layernorm", False)}  # fmt: skip
    find = "with_transformer_engine" if te else "local"
    spec = getattr(specs, f"get_gpt_layer_{find}_spec")(
        num_experts=experts, multi_latent_attention=latent, **own
    )
    options["attention_backend"] = attention_backend(backend)
    return config(latent, num_moe_experts=experts, **options), spec


def layer(accumulate: bool = False, packed: bool = False, **options: Any) -> Step:
    """One transformer layer of GPT.

    accumulate : weights' gradients are added to fp32 ones that are there already
    packed     : four sequences in one, told apart by their ends
    """
    from megatron.core.transformer import build_module

    made, spec = described(**options)
    module = build_module(spec, config=made).cuda().bfloat16()
    for param in module.parameters() if accumulate else ():
        param.main_grad = torch.zeros(param.shape, device="cuda")
        param.grad_added_to_main_grad = False
    if packed:
        from megatron.core.packed_seq_params import PackedSeqParams

        ends = torch.tensor([0, 512, 1024, 3072, 4096], dtype=torch.int32, device="cuda")
        params = PackedSeqParams("thd", ends, ends, max_seqlen_q=2048, max_seqlen_kv=2048)
        return on(module, leaf(SEQUENCE * BATCH, 1, HIDDEN), None, packed_seq_params=params)
    return on(module, hidden(), masked())


def model(tied: bool = False, rope: bool = True, mtp: bool = False, **options: Any) -> Step:
    """A whole GPT with its loss."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    made, spec = described(num_layers=2, **{"mtp_num_layers": 1} if mtp else {}, **options)
    te = bool(options.get("te"))
    more = {"mtp_block_spec": specs.get_gpt_mtp_block_spec(made, spec, te)} if mtp else {}
    module = GPTModel(
        made, spec, VOCABULARY, SEQUENCE, share_embeddings_and_output_weights=tied,
        position_embedding_type="rope" if rope else "learned_absolute", **more,
    )  # fmt: skip
    module, mask, ids = module.cuda().bfloat16(), masked(), tokens()
    return lambda: module(ids, places(), mask, labels=ids)


def _linear_layer(name: str, te: bool, width: int) -> Step:
    from megatron.core.transformer import TransformerConfig  # noqa: F401 - loads what it needs

    if te:
        from megatron.core.extensions import transformer_engine as layers
    else:
        from megatron.core.tensor_parallel import layers
    sizes = (HIDDEN, FFN) if width == HIDDEN else (FFN, HIDDEN)
    options: dict[str, Any] = {"config": config(), "init_method": torch.nn.init.zeros_,
                               "bias": True, "skip_bias_add": True}  # fmt: skip
    if "Column" in name:
        options["gather_output"] = False
    else:
        options["input_is_parallel"] = True
    if te:
        options["is_expert"] = False
    return on(getattr(layers, name)(*sizes, **options).cuda().bfloat16(), hidden(width))


for _name, _te, _width in (
    ("ColumnParallelLinear", False, HIDDEN), ("RowParallelLinear", False, FFN),
    ("TEColumnParallelLinear", True, HIDDEN), ("TERowParallelLinear", True, FFN),
    ("TELayerNormColumnParallelLinear", True, HIDDEN),
):  # fmt: skip
    row(_name, "te" if _te else "core")(
        lambda name=_name, te=_te, width=_width: _linear_layer(name, te, width)
    )


def _te_norm(kind: str, width: int) -> Step:
    import transformer_engine.pytorch as engine

    module = getattr(engine, kind)(width, device="cuda", params_dtype=torch.bfloat16)
    return on(module, leaf(SEQUENCE * BATCH * HIDDEN // width * 4, width))


for _kind in ("LayerNorm", "RMSNorm"):
    for _width in (64, 128, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288,
                   16384, 20480):  # fmt: skip
        row(f"TE {_kind}, {_width} wide", "te")(lambda k=_kind, w=_width: _te_norm(k, w))


@row("embedding with positions and dropout")
def _embedding() -> Step:
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )

    module = LanguageModelEmbedding(config(hidden_dropout=0.1), VOCABULARY, SEQUENCE)
    return on(module.cuda().bfloat16(), tokens(), places())


def again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SWIGLU = {"gated_linear_unit": True, "activation_func": functional.silu,
           "add_bias_linear": False, "normalization": "RMSNorm"}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    **_SWIGLU, "moe_token_dispatcher_type": "alltoall", "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
    "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True,
    "experts": EXPERTS,
}  # fmt: skip
_GROUPED = {**_EXPERTS, "moe_grouped_gemm": True}
_LATENT = {"latent": True, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_head_dim": 64,
           "qk_pos_emb_head_dim": 64, "v_head_dim": 128}  # fmt: skip

LAYERS: dict[str, dict[str, Any]] = {
    "layer": {},
    "layer, dropout 0.1": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "layer, functions not fused": {"bias_activation_fusion": False, "bias_dropout_fusion": False,
                                   "hidden_dropout": 0.1},
    "layer, groups of heads": {"num_query_groups": 2},
    "layer, swiglu and RMSNorm": _SWIGLU,
    "layer, squared relu": {"activation_func": lambda x: torch.pow(functional.relu(x), 2),
                            "bias_activation_fusion": False, "add_bias_linear": False},
    "layer, norms of q and k": {"qk_layernorm": True},
    "layer, recompute core attention": {**again("core_attn"), "attention_dropout": 0.1},
    # without biases: a bias that a checkpoint returns becomes its result, and runs for ever
    "layer, recompute MLP": {**again("mlp"), **_SWIGLU},
    "layer, experts with capacity": _EXPERTS,
    "layer, experts with capacity and a shared one": {
        **_EXPERTS, "moe_shared_expert_intermediate_size": FFN},
}  # fmt: skip
TE_LAYERS: dict[str, dict[str, Any]] = {
    **{f"layer, {b} attention": {"backend": b} for b in ("flash", "fused", "unfused")},
    **{f"layer, {b} attention, dropout 0.1": {"backend": b, "attention_dropout": 0.1,
                                              "hidden_dropout": 0.1}
       for b in ("flash", "fused", "unfused")},
    **{f"layer, {b} attention, groups of heads": {"backend": b, "num_query_groups": 2}
       for b in ("flash", "fused", "unfused")},
    "layer, unfused, recompute core attention": {"backend": "unfused", **again("core_attn")},
    "layer, recompute norms": again("layernorm"),
    "layer, latent attention": _LATENT,
    "layer, latent attention, unfused": {**_LATENT, "backend": "unfused"},
    "layer, grouped experts with capacity": _GROUPED,
    "layer, grouped experts, permutation fused": {**_GROUPED, "moe_permute_fusion": True},
    "layer, grouped experts, router fused": {**_GROUPED, "moe_router_fusion": True},
    "layer, gradients accumulated": {"accumulate": True, "gradient_accumulation_fusion": True},
    "layer, grouped experts, gradients accumulated": {
        **_GROUPED, "accumulate": True, "gradient_accumulation_fusion": True},
    "layer, packed sequences": {"packed": True},
    "layer, window": {"window_size": (256, 0)},
    "layer, softmax off by one": {"softmax_type": "off-by-one", "backend": "unfused"},
    "layer, recompute attention and MLP": {**again("core_attn", "mlp"), **_SWIGLU},
    "layer, recompute activation": {**again("moe_act"), **_GROUPED},
    "layer, recompute experts": {**again("moe"), **_GROUPED},
    "layer, recompute up-projections of latent attention": {**_LATENT, **again("mla_up_proj")},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "GPT, positions learned, weights tied": {"tied": True, "rope": False},
    "GPT, dropout 0.1": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "rope": False},
    "GPT, recompute all": _FULL,
    "GPT, cross entropy fused": {"cross_entropy_loss_fusion": True},
    "GPT, rope interleaved": {"rotary_interleaved": True, "apply_rope_fusion": False},
    "GPT, two more tokens predicted": {"mtp": True},
}
for _name, _options in {**LAYERS, **TE_LAYERS}.items():
    if _name not in TE_LAYERS:
        row(f"local {_name}")(lambda o=_options: layer(**o))
    row(f"TE {_name}", "te")(lambda o=_options: layer(te=True, **o))
for _name, _options in MODELS.items():
    row(f"local {_name}")(lambda o=_options: model(**o))
    row(f"TE {_name}", "te")(lambda o=_options: model(te=True, **o))
row("TE GPT, cross entropy of TE", "te")(
    lambda: model(te=True, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
)
row("TE GPT, latent attention", "te")(lambda: model(te=True, **_LATENT))
for _name in ("delayed", "tensorwise", "blockwise"):
    row(f"TE GPT, FP8 {_name}", "te")(
        lambda recipe=_name: model(te=True, fp8="hybrid", fp8_recipe=recipe)
    )


def _bert(te: bool, **options: Any) -> Step:
    from megatron.core.models.bert import bert_layer_specs as specs
    from megatron.core.models.bert.bert_model import BertModel

    options["attention_backend"] = attention_backend("unfused" if te else "auto")
    spec = (specs.get_bert_layer_with_transformer_engine_spec() if te
            else specs.bert_layer_local_spec)  # fmt: skip
    module = BertModel(config(num_layers=2, **options), 2, spec, VOCABULARY, SEQUENCE)
    module = module.cuda().bfloat16()
    ids, there = tokens(), torch.ones(BATCH, SEQUENCE, device="cuda", dtype=torch.int64)
    return on(module, ids, there, tokentype_ids=torch.zeros_like(ids), lm_labels=ids)


def _t5(te: bool, **options: Any) -> Step:
    from megatron.core.models.T5 import t5_spec as specs
    from megatron.core.models.T5.t5_model import T5Model

    options["attention_backend"] = attention_backend("unfused" if te else "auto")
    find = "transformer_engine" if te else "local"
    both = [getattr(specs, f"get_t5_{part}_with_{find}_block_spec")(1)
            for part in ("encoder", "decoder")]  # fmt: skip
    made = config(num_layers=1, **options)
    module = T5Model(made, made, *both, VOCABULARY, SEQUENCE).cuda().bfloat16()
    ids = tokens()
    seen = torch.zeros(BATCH, SEQUENCE, SEQUENCE, device="cuda").bool()
    padded = torch.zeros(BATCH, 1, 1, SEQUENCE, device="cuda").bool()
    causal = torch.triu(torch.ones(BATCH, SEQUENCE, SEQUENCE, device="cuda"), 1).bool()
    masks = (padded, causal[:, None], (padded, padded)) if te else (
        seen[:, None], causal[:, None], seen[:, None])  # fmt: skip
    return on(module, ids, ids, *masks, lm_labels=ids)


for _te, _p, (_name, _build) in itertools.product(
    (False, True), (0.0, 0.1), (("BERT", _bert), ("T5", _t5))
):
    row(f"{'TE' if _te else 'local'} {_name}, dropout {_p}", "te" if _te else "core")(
        lambda te=_te, p=_p, of=_build: of(te, hidden_dropout=p, attention_dropout=p)
    )


# -- attention alone, whose backward takes a workspace ---------------------------------------------
def _attention(
    sequence: int = SEQUENCE,
    groups: int = HEADS,
    sizes: tuple[int, int] = (128, 128),
    mask: str = "causal",
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str = "fused",
    bias: str = "no_bias",
    recipe: str = "",
) -> Step:
    """Transformer Engine's attention; ``sizes`` of a head's queries and values, a bias on its
    scores, a recipe of FP8."""
    from transformer_engine.pytorch import DotProductAttention

    attention_backend(backend)
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not deterministic))
    module = DotProductAttention(HEADS, sizes, groups, dropout, attn_mask_type=mask)
    q = leaf(sequence, BATCH, HEADS, sizes[0])
    k, v = (leaf(sequence, BATCH, groups, size) for size in sizes)
    added = leaf(1, HEADS, sequence, sequence) if bias == "post_scale_bias" else None

    def run(*qkv: torch.Tensor) -> Any:
        return module(*qkv, core_attention_bias_type=bias, core_attention_bias=added)

    return _in_fp8(run, recipe, q, k, v, **({"fp8_dpa": True} if recipe else {}))


ATTENTION: dict[str, dict[str, Any]] = {
    "": {},
    ", no mask": {"mask": "no_mask"},
    ", dropout 0.1": {"dropout": 0.1},
    ", groups of heads": {"groups": 2},
    ", one group": {"groups": 1},
    ", heads of 64": {"sizes": (64, 64)},
    ", heads of 72": {"sizes": (72, 72)},
    ", heads of 256": {"sizes": (256, 256)},
    ", latent": {"sizes": (192, 128)},
    ", 1040 places": {"sequence": 1040},
    ", 4096 places": {"sequence": 4096},
}
for _name, _options in ATTENTION.items():
    for _fixed in (False, True):
        row(f"TE attention{_name}{', deterministic' * _fixed}", "te")(
            lambda o=_options, fixed=_fixed: _attention(deterministic=fixed, **o)
        )


# -- modules of Transformer Engine that Megatron does not build ------------------------------------
def _in_fp8(module: Callable[..., Any], recipe: str, *inputs: Any, **of_recipe: Any) -> Step:
    """``module`` of ``inputs`` under an FP8 recipe of this class; none where it is empty."""
    if not recipe:
        return on(module, *inputs)
    import transformer_engine.pytorch as engine
    from transformer_engine.common import recipe as recipes

    chosen = getattr(recipes, recipe)(**of_recipe)

    def run(*inputs: Any) -> Any:
        with engine.fp8_autocast(enabled=True, fp8_recipe=chosen):
            return module(*inputs)

    return on(run, *inputs)


def _engine_module(name: str, recipe: str, *sizes: int, **options: Any) -> Step:
    import transformer_engine.pytorch as engine

    module = getattr(engine, name)(*sizes, params_dtype=torch.bfloat16, device="cuda", **options)
    return _in_fp8(module, recipe, hidden())


_BLOCK = {"num_attention_heads": HEADS, "self_attn_mask_type": "causal",
          "attention_dropout": 0.0, "hidden_dropout": 0.0}  # fmt: skip
_HEADS = {"attention_dropout": 0.0, "attn_mask_type": "causal"}
_RMS = {"normalization": "RMSNorm", "bias": False}
_NORM_OUT = {"return_layernorm_output": True}
ENGINE: dict[str, tuple[str, int, dict[str, Any]]] = {  # class, second size, options
    "Linear": ("Linear", FFN, {}),
    "Linear without bias": ("Linear", FFN, {"bias": False}),
    "LayerNormLinear": ("LayerNormLinear", FFN, _RMS),
    "LayerNormMLP": ("LayerNormMLP", FFN, {}),
    "LayerNormMLP, swiglu": ("LayerNormMLP", FFN, {**_RMS, "activation": "swiglu"}),
    "LayerNormMLP, squared relu": ("LayerNormMLP", FFN, {"activation": "srelu"}),
    "LayerNormMLP, output of the norm": ("LayerNormMLP", FFN, _NORM_OUT),
    "MultiheadAttention": ("MultiheadAttention", HEADS, _HEADS),
    "MultiheadAttention, groups, norm": (
        "MultiheadAttention", HEADS, {**_HEADS, "num_gqa_groups": 2, "input_layernorm": True}),
    "TransformerLayer": ("TransformerLayer", FFN, _BLOCK),
    "TransformerLayer, swiglu, groups": (
        "TransformerLayer", FFN, {**_BLOCK, **_RMS, "activation": "swiglu", "num_gqa_groups": 2}),
    "TransformerLayer, dropout 0.1": (
        "TransformerLayer", FFN, {**_BLOCK, "attention_dropout": 0.1, "hidden_dropout": 0.1}),
    "TransformerLayer, one product of q, k and v": (
        "TransformerLayer", FFN, {**_BLOCK, "fuse_qkv_params": True}),
    "TransformerLayer, norm behind": (
        "TransformerLayer", FFN, {**_BLOCK, "output_layernorm": True}),
}  # fmt: skip
OPERATIONS: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {  # class, sizes
    "Linear": (("Linear", (HIDDEN, FFN)),),
    "norm, Linear": (("RMSNorm", (HIDDEN,)), ("Linear", (HIDDEN, FFN))),
    "MLP": (("LayerNorm", (HIDDEN,)), ("Linear", (HIDDEN, FFN)), ("GELU", ()),
            ("Linear", (FFN, HIDDEN))),
    "MLP, swiglu": (("RMSNorm", (HIDDEN,)), ("Linear", (HIDDEN, 2 * FFN)), ("SwiGLU", ()),
                    ("Linear", (FFN, HIDDEN))),
}  # fmt: skip


def _operations(recipe: str, *built: tuple[str, tuple[int, ...]]) -> Step:
    import transformer_engine.pytorch as engine

    placed = {"device": "cuda", "dtype": torch.bfloat16}
    parts = [
        getattr(engine.ops, name)(*sizes, **(placed if sizes else {})) for name, sizes in built
    ]
    return _in_fp8(engine.ops.Sequential(*parts), recipe, hidden())


RECIPES = ("", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
for _recipe in RECIPES:
    _with = f", {_recipe}" if _recipe else ""
    for _name, (_class, _size, _options) in ENGINE.items():
        row(f"TE alone, {_name}{_with}", "te")(
            lambda c=_class, r=_recipe, s=_size, o=_options: _engine_module(c, r, HIDDEN, s, **o)
        )
    for _name, _built in OPERATIONS.items():
        row(f"TE ops, {_name}{_with}", "te")(lambda b=_built, r=_recipe: _operations(r, *b))


for _backend in ("fused", "unfused"):
    for _bias in ("post_scale_bias", "alibi"):
        row(f"TE attention, {_bias}, {_backend}", "te")(
            lambda k=_bias, b=_backend: _attention(backend=b, bias=k)
        )
row("TE attention in FP8, DelayedScaling", "te")(lambda: _attention(recipe="DelayedScaling"))


@row("TE layers, activations offloaded", "te")
def _offloaded(layers: int = 3) -> Step:
    import transformer_engine.pytorch as engine

    context, commit = engine.get_cpu_offload_context(True, 2, layers, True, False)
    placed = {"params_dtype": torch.bfloat16, "device": "cuda"}
    blocks = [engine.TransformerLayer(HIDDEN, FFN, **_BLOCK, **placed) for _ in range(layers)]

    def run(out: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            with context:
                out = block(out)
            out = commit(out)
        return out

    return on(run, hidden())


# -- measuring -------------------------------------------------------------------------------------
def _pass(step: Step) -> dict[str, int]:
    """Bytes of one forward and one backward."""
    cuda = torch.cuda
    gc.collect()
    cuda.synchronize()
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    out = step()
    cuda.synchronize()
    found = {"forward": cuda.memory_allocated() - before,
             "forward_peak": cuda.max_memory_allocated() - before}  # fmt: skip
    grad = torch.ones_like(out)
    cuda.reset_peak_memory_stats()
    out.backward(grad)
    cuda.synchronize()
    found["backward_peak"] = cuda.max_memory_allocated() - before
    del out, grad
    gc.collect()
    return {**found, "left": cuda.memory_allocated() - before}


def _leaves(step: Step) -> list[torch.Tensor]:
    """Parameters and inputs that ``step`` holds."""
    found: list[torch.Tensor] = []

    def look(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.nn.Module):
            found.extend(value.parameters())
        elif isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            for item in value:
                look(item, depth)
        elif isinstance(value, dict):
            look(list(value.values()), depth)
        elif callable(value) and depth < 4:
            for cell in getattr(value, "__closure__", None) or ():
                look(cell.cell_contents, depth + 1)

    look(step)
    return found


def _forget_backend() -> None:
    """Undo what a row has asked of Transformer Engine: it keeps its choice for like shapes."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        if name != "NVTE_FRAMEWORK":
            del os.environ[name]
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    chosen = getattr(sys.modules.get(name), "_attention_backends", {})
    chosen.update(dict.fromkeys(chosen), backend_selection_requires_update=True)


_NEWER = re.compile("TE ops, .*Float8BlockScaling|TE attention in FP8")  # tried with 2.20


def measure(only: str, group: str | None) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    older = [int(x) for x in (engine_version() or "99.0").split(".")[:2]] < [2, 20]
    gc.collect()
    gc.freeze()  # else every collection looks at what was imported
    for name, (of, build) in ROWS.items():
        if not re.search(only, name) or (group is not None and of != group):
            continue
        if older and _NEWER.search(name):
            continue
        step = None
        _forget_backend()
        try:
            step = build()
            for _ in range(2):
                for tensor in _leaves(step):
                    tensor.grad = None
                results[name] = {"group": of, **_pass(step)}
        except Exception as error:
            said = traceback.format_exc().strip().splitlines()
            results[name] = {"group": of, "failed": repr(error)[:300], "at": said[-8:]}
        print(name, {k: v for k, v in results[name].items() if k != "at"}, flush=True)
        del step
        gc.collect()
        torch.cuda.empty_cache()
    return results


def start(tier: str, release: str | None = None) -> dict[str, Any]:
    """One rank on ``tier``; says on what.  ``release``: the Transformer Engine it must have."""
    if tier == "meta":
        from megatron_prism.core.process_changes import ProcessChanges
        from megatron_prism.runtime import devices, virtual_world
        from megatron_prism.runtime.values import Values

        changes = ProcessChanges()
        here = devices.prepare(tier, changes, engine_release=release)
        virtual_world.start(virtual_world.VirtualWorld(size=1, rank=0, local_ranks=[0],
                                       values=Values("mirror", rank=0),
                                       device=here.device))  # fmt: skip
        about: dict[str, Any] = {"stand_ins": list(here.stand_in)}
    else:
        import torch.distributed as dist

        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)
        about = {"device": torch.cuda.get_device_name(0)}
        try:
            import transformer_engine

            about["transformer_engine"] = transformer_engine.__version__
        except ImportError:
            pass
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return {**about, "tier": tier, "torch": torch.__version__, "python": sys.version.split()[0],
            "megatron_core": megatron.core.__version__}  # fmt: skip


def compare(gpu: dict[str, Any], meta: dict[str, Any]) -> list[tuple[str, float | None, str]]:
    """(row, percent off or None, what to say) of every row that the GPU measured."""
    found: list[tuple[str, float | None, str]] = []
    for name, real in gpu["rows"].items():
        ours = meta["rows"].get(name)
        if "failed" in real or ours is None or "failed" in ours:
            why = real.get("failed") or (ours or {}).get("failed") or "not measured on meta"
            found.append((name, None, why))
            continue
        most = max(real[key] for key in FIGURES)
        by = {key: ours[key] - real[key] for key in FIGURES}
        off = {key: 100 * b / most if abs(b) > ROUNDING else 0.0 for key, b in by.items()}
        worst = max(off.values(), key=abs)
        found.append((name, worst, ", ".join(
            f"{key} {real[key] / 2**20:.1f} -> {ours[key] / 2**20:.1f} MiB" for key in FIGURES
        )))  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tier", choices=("cuda", "meta"), default="cuda")
    parser.add_argument("--with", dest="group", choices=("core", "te"))
    parser.add_argument("--only", default="")
    parser.add_argument("--bound", type=float, default=0.5, help="percent")
    args = parser.parse_args()
    if args.action == "measure":
        head = start(args.tier)
        found = {"about": head, "rows": measure(args.only, args.group)}
        if args.files[0].exists():  # rows of another group join it
            before = json.loads(args.files[0].read_text())
            found["rows"] = {**before["rows"], **found["rows"]}
        args.files[0].write_text(json.dumps(found, indent=1) + "\n")
        bad = [name for name, one in found["rows"].items() if "failed" in one]
        print(f"{len(found['rows'])} rows, {len(bad)} failed: {', '.join(bad)}")
        return int(args.tier == "meta" and bool(bad))  # a GPU's host may lack flash-attn
    gpu = json.loads(args.files[0].read_text())
    if len(args.files) > 1:
        meta = json.loads(args.files[1].read_text())
    else:
        start("meta", gpu["about"]["transformer_engine"])
        names = "|".join(f"^{re.escape(name)}$" for name in gpu["rows"])
        meta = {"rows": measure(names, None)}
    rows = compare(gpu, meta)
    for name, off, said in sorted(rows, key=lambda one: -abs(one[1] or 0)):
        print(f"{'failed ' if off is None else f'{off:+6.2f} %'}  {name}: {said}")
    held = [off for _, off, _ in rows if off is not None]
    within = sum(abs(off) <= args.bound for off in held)
    print(f"{within} of {len(held)} rows within {args.bound} %; {len(rows) - len(held)} failed")
    return int(within < len(held))


if __name__ == "__main__":
    sys.exit(main())
