"""Run one rank of a recipe through megatron-core: the worker process of the main job.

In : a Recipe and a rank, pickled on stdin.  Out: JSON lines on a file descriptor of its own
(progress, then one result or one error).  The model is megatron-core's GPTModel, driven by
megatron-core's scheduler, DDP and optimizer, as ``megatron.training`` would drive it
(training/training.py:1195 get_model, :2547 config hooks @0.16.1); nothing of them is copied here.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import inspect
import json
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_prism.errors import PrismError, RecipeError
from megatron_prism.recipe_schema import Recipe

__all__ = ["main"]

Emit = Callable[..., None]


def main(fd: int) -> int:
    """Entry of the worker: ``python -m megatron_prism.plugin.rank_job FD``."""
    recipe, rank = pickle.load(sys.stdin.buffer)
    out = os.fdopen(fd, "w", buffering=1)

    def emit(kind: str, **fields: Any) -> None:
        out.write(json.dumps({"kind": kind, **fields}) + "\n")

    try:
        emit("result", result=run(recipe, rank, emit))
    except PrismError as error:
        emit("error", message=error.message, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except Exception as error:  # a bug, ours or Megatron's: its traceback goes to the parent
        emit("crash", message=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        return 1
    return 0


def run(recipe: Recipe, rank: int, emit: Emit) -> dict[str, Any]:
    """Train ``recipe.train.iterations`` iterations as ``rank``; returns the plain summary."""
    start = time.perf_counter()
    warnings.filterwarnings("ignore")
    from megatron_prism import tiers
    from megatron_prism.plugin import flags, launch, seams, seams_tiers
    from megatron_prism.plugin.proof import Proof

    tier = tiers.install("meta" if recipe.prism.tier == "auto" else recipe.prism.tier)
    proof = Proof(tier.live, shapes_only=tier.name == "meta")
    options = flags.Options(
        world=recipe.world,
        process=0,
        num_processes=1,
        ranks=(rank,),
        tier=tier.name,
        values=recipe.prism.values,
        out=None,
        force=False,
        record=None,
    )
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(recipe.world.size)
    context = seams.Context(
        start=lambda: launch.start_world(options, tier.device),
        proof=proof,
        meta=tier.name == "meta",
        local_ranks=(rank,),
        rank=rank,
    )
    seams.apply(seams_tiers.seams_for(tier.name), context)
    world = context.start()
    emit("phase", text="importing megatron-core")
    job = _Job(recipe, proof, tier, emit)
    built = time.perf_counter()
    before = None
    for iteration in range(recipe.train.iterations):
        before = world.tally.copy()
        job.iterate(iteration)
    proof.check(recipe.train.iterations)
    return job.summary(world, before, built - start, time.perf_counter() - built)


class _Job:
    """Model, optimizer and data of one rank, and its iterations."""

    def __init__(self, recipe: Recipe, proof: Any, tier: Any, emit: Emit) -> None:
        self.recipe, self.proof, self.tier, self.emit = recipe, proof, tier, emit
        self._initialize()
        self.config = self._config()
        emit("phase", text="building the model")
        with tier.live.scope(phase="build") if tier.live else _nothing():
            self.model = self._chunks()
            self.optimizer = self._optimizer()
        self._hook_up()
        self.batches = self._batches()
        self.peaks: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.iteration_s: list[float] = []
        total = self.recipe.num_microbatches * len(self.model) * 2 * recipe.train.iterations
        proof.on_step = lambda done: emit("step", done=done, total=total)
        emit("step", done=0, total=total)

    # -- building ---------------------------------------------------------------------------------
    def _initialize(self) -> None:
        from megatron.core import parallel_state, tensor_parallel

        p = self.recipe.parallel
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
        tensor_parallel.model_parallel_cuda_manual_seed(self.recipe.train.seed)
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

        t = self.recipe.train
        init_num_microbatches_calculator(
            0, None, t.global_batch_size, t.micro_batch_size, self.recipe.world.dp
        )

    def _config(self) -> Any:
        import torch
        from megatron.core.transformer.transformer_config import TransformerConfig
        from torch.nn import functional

        r, m, p, t = self.recipe, self.recipe.model, self.recipe.parallel, self.recipe.train
        dtype = torch.bfloat16 if t.bf16 else torch.float32
        te = r.prism.transformer_impl == "transformer_engine"
        interleaved = p.vpp is not None and p.pp > 1
        fields: dict[str, Any] = {
            "ffn_hidden_size": r.ffn_hidden_size,
            "kv_channels": r.kv_channels,
            "num_query_groups": m.num_query_groups,
            "num_moe_experts": m.num_experts,
            "layernorm_epsilon": m.norm_epsilon,
            "tensor_model_parallel_size": p.tp,
            "pipeline_model_parallel_size": p.pp,
            "virtual_pipeline_model_parallel_size": p.vpp,
            "context_parallel_size": p.cp,
            "expert_model_parallel_size": p.ep,
            "expert_tensor_parallel_size": r.world.etp,
            "sequence_parallel": p.sequence_parallel,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": t.bf16,
            "fp8": "hybrid" if t.fp8 else None,
            "deallocate_pipeline_outputs": True,
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": not interleaved,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": te,
            "apply_rope_fusion": te and m.position_embedding_type == "rope",
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": te,
            "bias_activation_fusion": te,
            "transformer_impl": r.prism.transformer_impl,
            "moe_permute_fusion": te and m.num_experts is not None,
        }
        if t.fp8:
            fields["fp8_recipe"] = t.fp8
        if m.swiglu:
            fields |= {"gated_linear_unit": True, "activation_func": functional.silu}
        known = {f.name for f in dataclasses.fields(TransformerConfig)}
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
        return TransformerConfig(**{k: v for k, v in fields.items() if k in known})

    def _chunks(self) -> list[Any]:
        from megatron.core import tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.module import Float16Module

        t, world = self.recipe.train, self.recipe.world
        bucket = max(40_000_000, 1_000_000 * world.dp * world.cp)  # training.py:1316 @0.16.1
        wrapped = []
        for chunk in range(self.recipe.parallel.vpp or 1):
            model = self._gpt(chunk)
            for parameter in model.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            model.cuda()
            if t.bf16:
                model = Float16Module(self.config, model)
            ddp = DistributedDataParallelConfig(
                grad_reduce_in_fp32=t.grad_reduce_in_fp32,
                overlap_grad_reduce=t.overlap_grad_reduce,
                overlap_param_gather=t.overlap_param_gather,
                use_distributed_optimizer=t.use_distributed_optimizer,
                bucket_size=bucket if t.overlap_grad_reduce else None,
            )
            wrapped.append(
                DistributedDataParallel(self.config, ddp, model, disable_bucketing=chunk > 0)
            )
        return wrapped

    def _gpt(self, chunk: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        m, vpp = self.recipe.model, self.recipe.parallel.vpp
        stage = chunk if vpp else None
        if vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        place = {"ignore_virtual": False, "vp_stage": stage}
        accepted = inspect.signature(parallel_state.is_pipeline_first_stage).parameters
        place = {k: v for k, v in place.items() if k in accepted}
        return GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                self.config,
                use_transformer_engine=self.recipe.prism.transformer_impl == "transformer_engine",
                normalization=m.normalization,
                vp_stage=stage,
            ),
            vocab_size=self.recipe.padded_vocab_size,
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

    def _optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        t = self.recipe.train
        settings = OptimizerConfig(
            optimizer=t.optimizer,
            lr=t.lr,
            min_lr=t.lr,
            weight_decay=t.weight_decay,
            clip_grad=t.clip_grad,
            bf16=t.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=t.use_distributed_optimizer,
            overlap_param_gather=t.overlap_param_gather,
        )
        return get_megatron_optimizer(settings, self.model, use_gloo_process_groups=False)

    def _hook_up(self) -> None:
        """The hooks that megatron.training sets on the config (training.py:2547 @0.16.1)."""
        from megatron.core.distributed import finalize_model_grads

        t, config = self.recipe.train, self.config

        def per_chunk(name: str) -> Any:
            functions = [getattr(chunk, name) for chunk in self.model]
            return functions if len(functions) > 1 else functions[0]

        config.grad_scale_func = self.optimizer.scale_loss
        if t.overlap_grad_reduce:
            config.no_sync_func = per_chunk("no_sync")
            config.grad_sync_func = per_chunk("start_grad_sync")
        self.param_sync = per_chunk("start_param_sync") if t.overlap_param_gather else None
        config.param_sync_func = self.param_sync
        config.finalize_model_grads_func = finalize_model_grads

    # -- data -------------------------------------------------------------------------------------
    def _batches(self) -> Iterator[dict[str, Any]]:
        from megatron.core import parallel_state

        from megatron_prism.plugin.batches import batches

        return batches(
            self.recipe,
            device=self.tier.device,
            dp_rank=parallel_state.get_data_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
        )

    def _forward_step(self, data: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(data)
        output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        return output, partial(_loss, batch["mask"])

    # -- iterations -------------------------------------------------------------------------------
    def iterate(self, number: int) -> None:
        """One iteration: schedule, gradient finalisation, optimizer step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        t, chunks, live = self.recipe.train, self.model, self.tier.live
        first_with_gather = number == 0 and t.overlap_param_gather
        if first_with_gather:  # training.py:2657 @0.16.1: iteration 1 has nothing to gather yet
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
            self.config.param_sync_func = None
        if live is not None:
            live.reset_peak()
        start = time.perf_counter()
        with self.proof.iteration(self.optimizer, chunks):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            data: Any = [self.batches] * len(chunks) if len(chunks) > 1 else self.batches
            losses = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=data,
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=self.recipe.num_microbatches,
                seq_length=self.recipe.model.seq_length,
                micro_batch_size=t.micro_batch_size,
                forward_only=False,
            )
            with live.scope(phase="optimizer") if live else _nothing():
                updated, grad_norm, _ = self.optimizer.step()
            updated = True if self.tier.name == "meta" else bool(updated)
            self.proof.stepped(_mean_loss(losses), skipped=not updated, grad_norm=grad_norm)
        self.iteration_s.append(time.perf_counter() - start)
        if first_with_gather:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()
            self.config.param_sync_func = self.param_sync
        if live is not None:
            self.peaks.append({"bytes": live.high.bytes, "at": live.high.labels})
        gc.collect()

    def summary(self, world: Any, before: Any, build_s: float, run_s: float) -> dict[str, Any]:
        """What the parent prints and writes, plain numbers with their provenance."""
        rank, recipe = world.rank, self.recipe
        rows = world.tally.since(before).rows() if before is not None else []
        place = recipe.world.coordinates(rank)
        memory: dict[str, Any] = {"peaks": self.peaks, "provenance": "unknown on this tier"}
        if self.tier.live is not None:
            memory["provenance"] = "modelled: live bytes of shapes, before the allocator's rounding"
            memory["after"] = self.tier.live.now
        if self.tier.name == "cuda":
            import torch

            memory["peaks"] = [{"bytes": torch.cuda.max_memory_allocated(), "at": {}}]
            memory["provenance"] = "measured here: the caching allocator"
        return {
            "rank": rank,
            "stage": place.pp,
            "coordinates": place._asdict(),
            "tier": self.tier.name,
            "stand_ins": list(self.tier.stand_in),
            "megatron_core": importlib.metadata.version("megatron-core"),
            "parameters": self.proof.num_parameters,
            "steps": self.proof.steps,
            "master_parameter_moved": self.proof.has_moved(),
            "losses": [entry.losses.get("lm loss") for entry in self.proof.iterations],
            "communication": [dataclasses.asdict(row) for row in rows],
            "communication_of": "the last iteration",
            "memory": memory,
            "build_s": round(build_s, 3),
            "run_s": round(run_s, 3),
            "iteration_s": [round(s, 3) for s in self.iteration_s],
            "host_peak_rss": _peak_rss(),
        }


def _loss(mask: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum of token losses, number of tokens, and both for the log, as pretrain_gpt's loss_func."""
    import torch

    total = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    report = torch.cat([total.detach().view(1), tokens.view(1).to(total.dtype)])
    return total, tokens, {"lm loss": report}


def _mean_loss(losses: list[dict[str, Any]]) -> dict[str, Any]:
    if not losses:
        return {}
    total = sum(entry["lm loss"] for entry in losses)
    return {"lm loss": total[0] / total[1]}


class _nothing:
    def __enter__(self) -> None:
        """No tracker: no labels."""

    def __exit__(self, *exc: Any) -> None:
        """See __enter__."""


def _peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
