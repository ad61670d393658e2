"""Build the Megatron model of a recipe: groups, configuration, chunks, DDP and optimizer.

Everything is megatron-core's own; this module only passes the recipe's numbers where
``megatron.training`` would pass the command line's.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

from megatron_prism.core.errors import RecipeError
from megatron_prism.core.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from megatron_prism.emulate.signatures import MegatronConfig, ModelChunk, Optimizer

__all__ = ["chunks", "initialize", "optimizer", "transformer_config"]


def initialize(recipe: Recipe) -> None:
    """Megatron's groups, seeds and microbatch calculator, as its own start-up sets them."""
    from megatron.core import parallel_state, tensor_parallel

    p = recipe.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.etp,
        order=p.order,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.train.seed)
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    t = recipe.train
    init_num_microbatches_calculator(
        0, None, t.global_batch_size, t.micro_batch_size, recipe.world.dp
    )


def _parallel_fields(recipe: Recipe) -> dict[str, object]:
    """How the model is split, and how its stages talk (interleaving overlaps its p2p)."""
    p = recipe.parallel
    interleaved = p.vpp is not None and p.pp > 1
    return {
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp,
        "context_parallel_size": p.cp,
        "expert_model_parallel_size": p.ep,
        "expert_tensor_parallel_size": recipe.world.etp,
        "sequence_parallel": p.sequence_parallel,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def transformer_config(recipe: Recipe) -> MegatronConfig:
    """The TransformerConfig that training/arguments.py:1306 @0.16.1 would make of these flags.

    RecipeError for a ``model.extra`` key that this release's TransformerConfig lacks.
    """
    import torch
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )
    from torch.nn import functional

    r, m, p, t = recipe, recipe.model, recipe.parallel, recipe.train
    dtype = torch.bfloat16 if t.bf16 else torch.float32
    te = r.prism.transformer_impl == "transformer_engine"
    latent = m.multi_latent_attention
    kind = MLATransformerConfig if latent else TransformerConfig
    fields: dict[str, object] = {
        **_parallel_fields(recipe),
        "ffn_hidden_size": r.ffn_hidden_size,
        "kv_channels": r.kv_channels,
        "num_query_groups": m.num_query_groups,
        "num_moe_experts": m.num_experts,
        "layernorm_epsilon": m.norm_epsilon,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": t.bf16,
        "fp8": "hybrid" if t.fp8 else None,
        "deallocate_pipeline_outputs": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": te,
        "apply_rope_fusion": te and m.position_embedding_type == "rope" and not latent,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": te,
        "bias_activation_fusion": te,
        "transformer_impl": "transformer_engine" if te else "local",
        "moe_permute_fusion": te and m.num_experts is not None,
    }
    if t.fp8:
        fields["fp8_recipe"] = t.fp8
    if not te and m.moe_grouped_gemm:
        fields["moe_grouped_gemm"] = False  # needs Transformer Engine: one expert at a time
    if m.swiglu:
        fields |= {"gated_linear_unit": True, "activation_func": functional.silu}
    if latent:  # a rank that is None is one: queries are not compressed
        fields["q_lora_rank"] = m.q_lora_rank
    known = {f.name for f in dataclasses.fields(kind)}
    for part in (m, p, t):
        for item in dataclasses.fields(part):
            value = getattr(part, item.name)
            if item.name in known and item.name not in fields and value is not None:
                fields[item.name] = value
    missing = set(m.extra) - known
    if missing:
        raise RecipeError(
            f"model.extra.{min(missing)} is no field of this Megatron's TransformerConfig",
            fix="check its spelling in megatron/core/transformer/transformer_config.py",
        )
    fields |= m.extra
    return kind(**{k: v for k, v in fields.items() if k in known})


def chunks(recipe: Recipe, config: MegatronConfig) -> list[ModelChunk]:
    """This rank's model chunks, wrapped as get_model does (training/training.py:1195 @0.16.1)."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.transformer.module import Float16Module

    t, world = recipe.train, recipe.world
    bucket = max(40_000_000, 1_000_000 * world.dp * world.cp)  # training.py:1316 @0.16.1
    wrapped = []
    for chunk in range(recipe.parallel.vpp or 1):
        model = _gpt(recipe, config, chunk)
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        model.cuda()
        if t.bf16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=t.grad_reduce_in_fp32,
            overlap_grad_reduce=t.overlap_grad_reduce,
            overlap_param_gather=t.overlap_param_gather,
            use_distributed_optimizer=t.use_distributed_optimizer,
            bucket_size=bucket if t.overlap_grad_reduce else None,
        )
        wrapped.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return wrapped


def _gpt(recipe: Recipe, config: MegatronConfig, chunk: int) -> torch.nn.Module:
    """One GPTModel chunk; embedding and loss where Megatron's pipeline puts them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    m, vpp = recipe.model, recipe.parallel.vpp
    stage = chunk if vpp else None
    if vpp:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    place = {"ignore_virtual": False, "vp_stage": stage}
    accepted = inspect.signature(parallel_state.is_pipeline_first_stage).parameters
    place = {k: v for k, v in place.items() if k in accepted}
    te = recipe.prism.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=m.normalization, vp_stage=stage
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, te, vp_stage=stage)
        if m.mtp_num_layers
        else None,
        vocab_size=recipe.padded_vocab_size,
        max_sequence_length=m.max_position_embeddings or m.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=not m.untie_embeddings_and_output_weights,
        position_embedding_type=m.position_embedding_type,
        rotary_percent=m.rotary_percent,
        rotary_base=m.rotary_base,
        rope_scaling=m.use_rope_scaling,
        rope_scaling_factor=m.rope_scaling_factor,
        vp_stage=stage,
    )


def optimizer(recipe: Recipe, config: MegatronConfig, model: list[ModelChunk]) -> Optimizer:
    """Megatron's optimizer over all chunks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    t = recipe.train
    settings = OptimizerConfig(
        optimizer=t.optimizer,
        lr=t.lr,
        min_lr=t.lr,
        weight_decay=t.weight_decay,
        clip_grad=t.clip_grad,
        bf16=t.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=t.use_distributed_optimizer,
        overlap_param_gather=t.overlap_param_gather,
    )
    return get_megatron_optimizer(settings, model, use_gloo_process_groups=False)
