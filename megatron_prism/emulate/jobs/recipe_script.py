"""The script of a recipe: the smallest training loop over megatron-core.

``prism run -- -m megatron_prism.emulate.jobs.recipe_script NAME flag=value …`` starts it like
a user's script.  Model, DDP and optimizer are built of the recipe's flags that are fields of their
configurations, and Megatron's scheduler drives them.  What ``megatron.training``, which the wheel
of 0.16.1 lacks, does around them is here with its place there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import inspect
import math
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist

from megatron_prism.core import code_files
from megatron_prism.core.errors import NotTrainedError, RecipeError, UnsupportedError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.jobs.megatron_source import megatron_release
from megatron_prism.core.jobs.recipe import FIELD, Recipe
from megatron_prism.emulate.capture import capture
from megatron_prism.emulate.command_line import job_arguments, options
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.emulate.rank import launch
from megatron_prism.emulate.rank.session import Session
from megatron_prism.memory import estimates

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.monitor import TrainingMonitor
    from megatron_prism.emulate.rank.session import Run
    from megatron_prism.runtime.devices import Tier
    from megatron_prism.runtime.virtual_world import TrafficCounter

T = TypeVar("T")
Foreign = Any  # of Megatron: a configuration, a model chunk, an optimizer
Report = dict[str, torch.Tensor]  # what a loss function logs
Batch = dict[str, torch.Tensor]  # tokens, labels, positions, mask
Loss = tuple[torch.Tensor, torch.Tensor, Report]  # sum, number of tokens, both for the log


def main() -> None:
    """Train the recipe of the command line as the rank of this process."""
    _, words = options.split(sys.argv[1:])
    assert launch.running is not None, "prism run starts it"
    summary = train(Recipe.of_words(words), launch.running)
    if launch.running.options.capture is None and (emit := workers.emitter()) is not None:
        emit("result", result=summary)


def run(session: Session, recipe: Recipe, rank: int, slices: Path | None = None) -> Json:
    """``main`` in this process, which stays changed until ``session`` is closed."""
    return train(recipe, attached(session, recipe, rank, slices))


def attached(session: Session, recipe: Recipe, rank: int, slices: Path | None = None) -> Run:
    """The run of a process that is attached for a rank of ``recipe``."""
    # shapes answer what is asked by default, on any host
    tier = recipe.prism.tier
    if tier == "auto":
        tier = "meta"
    run_options = options.Options(
        recipe.world,
        0,
        1,
        (rank,),
        tier,
        recipe.prism.values,
        capture=slices,
        te_version=recipe.prism.te_version,
    )
    session.changes.on_undo(gc.unfreeze)  # or the model would stay in memory for good
    launch.attach(run_options, session)
    assert launch.running is not None
    return launch.running


def train(recipe: Recipe, run: Run) -> Json:
    """Train all iterations of ``recipe`` as the rank of ``run``."""
    start, emit = time.perf_counter(), workers.emitter()
    with run.monitor.training(lambda: recipe):
        job = RankJob.build(recipe, run)
        built = time.perf_counter()
        iterations = recipe.train_iters
        if run.options.capture is not None:
            # the second iteration is recorded, which has the optimizer's states
            iterations = max(iterations, capture.least_steps(run.monitor.note, iterations))
            job.wanted = iterations
            # with other loads of the experts, in an iteration more
            if recipe.num_experts:
                iterations = max(3, iterations)
                job.wanted = max(4, iterations)
        elif iterations < capture.LEAST_STEPS and emit is not None:
            without = "one iteration: the optimizer's states begin at its end, its peak is without"
            emit("note", text=f"{without} them; train_iters=2 has them")
        for number in range(iterations):
            job.iterate(number)
    return job.summary(built - start, time.perf_counter() - built)


class RankJob:
    """Model, optimizer and data of one rank, and its iterations."""

    def __init__(self, recipe: Recipe, monitor: TrainingMonitor, tier: Tier) -> None:
        self.recipe, self.monitor, self.tier = recipe, monitor, tier
        initialize(recipe)
        with tier.live.scope(phase="build") if tier.live else nullcontext(), refusals():
            self.config = transformer_config(recipe)
            self.model = chunks(recipe, self.config)
            self.optimizer = optimizer(recipe, self.config, self.model)
        self._hook_up()
        # each chunk reads all microbatches (training/training.py:993 @0.16.1)
        self.batches = [batches(recipe, tier.device) for _ in self.model]
        self.num_microbatches = recipe.num_microbatches  # of the next iteration
        self.before: TrafficCounter | None = None  # of the calls before the last iteration
        self.wanted = recipe.train_iters  # iterations, for whoever follows them
        self.peaks: list[Json] = []
        if (emit := workers.emitter()) is not None and monitor.on_step is None:
            total = self.num_microbatches * len(self.model) * 2 * recipe.train_iters
            monitor.on_step = lambda done: emit("step", done=done, total=total)

    @classmethod
    def build(cls, recipe: Recipe, run: Run) -> RankJob:
        """Bring the world of ``recipe`` up, and build what is trained."""
        engine = sys.modules.get("transformer_engine") or find_spec("transformer_engine")
        if recipe.transformer_impl == "transformer_engine" and not engine:
            raise UnsupportedError(
                "transformer_impl=transformer_engine needs Transformer Engine, absent here",
                fix="install it, or use transformer_impl=local",
            )
        job_arguments.recipe = recipe
        # another job in this process does not find it
        run.claims.callback(setattr, job_arguments, "recipe", None)
        dist.init_process_group()
        recipe = job_arguments.recipe  # a capture may have made its batch smaller
        run.monitor.world_known(recipe.world)
        gc.disable()  # what is built stays: looking through it takes a second of five
        try:
            job = cls(recipe, run.monitor, run.tier)
            gc.collect()
            gc.freeze()
        finally:
            gc.enable()
        return job

    def _hook_up(self) -> None:
        """The hooks that megatron.training sets on the config (training.py:2547 @0.16.1)."""
        from megatron.core.distributed import finalize_model_grads

        t, config = self.recipe, self.config

        def per_chunk(name: str) -> object:
            functions = [getattr(chunk, name) for chunk in self.model]
            return functions if len(functions) > 1 else functions[0]

        config.grad_scale_func = self.optimizer.scale_loss
        # gradients are reduced while later ones are computed
        if t.overlap_grad_reduce:
            config.no_sync_func = per_chunk("no_sync")
            config.grad_sync_func = per_chunk("start_grad_sync")
        # kept: the first iteration runs without it
        self.param_sync = per_chunk("start_param_sync") if t.overlap_param_gather else None
        config.param_sync_func = self.param_sync
        config.finalize_model_grads_func = finalize_model_grads

    def _forward_step(
        self, data: Iterator[Batch], model: Foreign
    ) -> tuple[torch.Tensor, Callable[..., Loss]]:
        batch = next(data)
        output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        return output, partial(_loss, batch["mask"])

    # -- iterations -------------------------------------------------------------------------------
    def iterate(self, number: int) -> None:
        """One iteration: schedule, gradient finalisation, optimizer step."""
        from megatron_prism.runtime.virtual_world import current

        t, chunks, live, monitor = self.recipe, self.model, self.tier.live, self.monitor
        first_with_gather = number == 0 and t.overlap_param_gather
        if first_with_gather:  # training.py:2657 @0.16.1: iteration 1 has nothing to gather yet
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
            self.config.param_sync_func = None
        if live is not None:
            live.reset_peak()
        if (world := current()) is not None:
            self.before = world.tally.copy()
        part = "steady iteration" if number else "first iteration"
        with monitor.iteration(self.optimizer, chunks, self.wanted), monitor.part(part):
            losses = self.schedule()
            with monitor.phase("optimizer"), monitor.part("optimizer step"):
                updated, grad_norm, _ = self.optimizer.step()
            # shapes do not say whether a step was skipped
            updated = True if self.tier.name == "meta" else bool(updated)
            monitor.stepped(_mean_loss(losses), skipped=not updated, grad_norm=grad_norm)
        if any(not math.isfinite(x) for x in self.monitor.iterations[-1].losses.values()):
            raise NotTrainedError(  # pretrain checks this too (--check-for-nan-in-loss-and-grad)
                f"the loss of iteration {number + 1} is not finite", fix="a smaller lr"
            )
        if first_with_gather:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()
            self.config.param_sync_func = self.param_sync
        if live is not None:
            self.peaks.append({"bytes": live.high.bytes, "at": live.high.labels})
        gc.collect()

    def schedule(self) -> list[Report]:
        """Forwards and backwards of an iteration; the reported losses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # as Megatron's train_step begins (training/training.py)
        chunks = self.model
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # the schedule takes a list for several chunks, and one of each else
        data = self.batches if len(chunks) > 1 else self.batches[0]
        losses: list[Report] = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=data,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=self.num_microbatches,
            seq_length=self.recipe.seq_length,
            micro_batch_size=self.recipe.micro_batch_size,
            forward_only=False,
        )
        return losses

    def summary(self, build_s: float, run_s: float) -> Json:
        """What the parent prints and writes, plain numbers with their provenance."""
        from megatron_prism.runtime.virtual_world import current

        recipe, monitor, tier, world = self.recipe, self.monitor, self.tier, current()
        assert world is not None
        assert self.before is not None
        # which part of the model this rank has
        place = recipe.world.coordinates(world.rank)
        one_by_one: list[str] = []
        # without Transformer Engine grouped products are computed one by one
        if recipe.moe_grouped_gemm and not self.config.moe_grouped_gemm:
            one_by_one.append("grouped GEMM: one expert after the other")
        memory: Json = {"peaks": self.peaks, "provenance": "unknown on this tier"}
        if tier.live is not None:
            text = job_settings.as_text(recipe.settings(job_arguments.text_of))
            modelled = "modelled: live bytes of shapes, before the allocator's rounding"
            memory["provenance"] = estimates.described(modelled, estimates.estimates(text))
            memory["after"] = tier.live.now
        if tier.name == "cuda":
            memory["peaks"] = [{"bytes": torch.cuda.max_memory_allocated(), "at": {}}]
            memory["provenance"] = "measured here: the caching allocator"
        return {
            "rank": world.rank,
            "stage": place.pp,
            "coordinates": place._asdict(),
            "tier": tier.name,
            "stand_ins": [*tier.stand_in, *one_by_one],
            "megatron_core": megatron_release(),
            "layers": [_layers(chunk) for chunk in self.model],
            "parameters": monitor.num_parameters,
            "steps": monitor.steps,
            "master_parameter_moved": monitor.has_moved(),
            "losses": [entry.losses.get("lm loss") for entry in monitor.iterations],
            "communication": list(map(dataclasses.asdict, world.tally.since(self.before).rows())),
            "communication_of": "the last iteration",
            "memory": memory,
            "build_s": round(build_s, 3),
            "run_s": round(run_s, 3),
            "iteration_s": [round(entry.wall_ns / 1e9, 3) for entry in monitor.iterations],
            "host_peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _layers(chunk: torch.nn.Module) -> int:
    """How many layers are in a chunk, whatever wraps it."""
    inner: Foreign = chunk
    while not hasattr(inner, "decoder"):
        inner = inner.module
    return len(inner.decoder.layers)


def _loss(mask: torch.Tensor, output: torch.Tensor) -> Loss:
    """Sum of token losses, number of tokens, and both for the log, as pretrain_gpt's loss_func."""
    # padding has no part in the loss
    total = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    report = torch.cat([total.detach().view(1), tokens.view(1).to(total.dtype)])
    return total, tokens, {"lm loss": report}


def _mean_loss(losses: list[Report]) -> Report:
    if not losses:
        return {}
    # as training/training.py:1748 @0.16.1, where the number of kernels does not grow with them
    total = torch.vstack([entry["lm loss"].view(-1) for entry in losses]).sum(dim=0)
    return {"lm loss": total[0] / total[1]}


def batches(recipe: Recipe, device: torch.device) -> Iterator[Batch]:
    """Endless microbatches for one rank, the same on every run.  RecipeError for a short text."""
    from megatron.core import parallel_state

    size, tokens, cp = recipe.micro_batch_size, recipe.seq_length, recipe.world.cp
    keep, place = torch.arange(tokens), parallel_state.get_context_parallel_rank()
    if cp > 1:  # a context-parallel rank holds two of 2 cp parts
        parts = keep.view(2 * cp, -1)
        keep = torch.cat([parts[place], parts[2 * cp - 1 - place]])
    positions = keep.expand(size, -1)
    if device.type == "meta":
        ids = torch.empty((size, len(keep)), dtype=torch.int64, device=device)
        mask = torch.empty((size, len(keep)), dtype=torch.float32, device=device)
        # a batch of shapes, in new memory each time as a real one
        like = {"tokens": ids, "labels": ids, "positions": ids, "mask": mask}
        while True:
            yield {name: torch.empty_like(tensor) for name, tensor in like.items()}
    sample = _samples(recipe)
    # replicas take turns in the order of samples
    number = parallel_state.get_data_parallel_rank() * size
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


def _samples(recipe: Recipe) -> Callable[[int], np.ndarray]:
    """A function sample number -> ``[seq_length + 1]`` token ids, reproducible."""
    tokens, vocabulary, seed = recipe.seq_length, recipe.vocab_size, recipe.seed
    # no text: tokens are drawn, each sample from its own number
    if recipe.data_path is None:

        def mock(number: int) -> np.ndarray:
            return np.random.default_rng((seed, number)).integers(0, vocabulary, tokens + 1)

        return mock
    text = np.frombuffer(Path(recipe.data_path).read_bytes(), dtype=np.uint8).astype(np.int64)
    # bytes are the tokens
    if len(text) <= tokens + 1 or text.max() >= vocabulary:
        raise RecipeError(
            f"{recipe.data_path} has {len(text):,} bytes up to value {text.max(initial=0)}; "
            f"samples need {tokens + 1} bytes below vocab_size {vocabulary}",
            fix="use a longer text, a shorter seq_length, or vocab_size=256",
        )

    def read(number: int) -> np.ndarray:
        start = np.random.default_rng((seed, number)).integers(0, len(text) - tokens - 1)
        return text[start : start + tokens + 1]

    return read


# -- the model -------------------------------------------------------------------------------------
# Groups, configuration, chunks, DDP and optimizer are megatron-core's own; what is here passes the
# recipe's numbers where ``megatron.training`` would pass the command line's.


def initialize(recipe: Recipe) -> None:
    """Megatron's groups, seeds and microbatch calculator, as its own start-up sets them."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    world, batch = recipe.world, (recipe.global_batch_size, recipe.micro_batch_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world.tp,
        pipeline_model_parallel_size=world.pp,
        virtual_pipeline_model_parallel_size=world.vpp,
        context_parallel_size=world.cp,
        expert_model_parallel_size=world.ep,
        expert_tensor_parallel_size=recipe.expert_tensor_parallel_size,
        order=world.order,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed)
    init_num_microbatches_calculator(0, None, *batch, world.dp)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise what Megatron refuses while it builds things as a RecipeError with its words; an
    assertion without any is named by its own line.
    """
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        words = re.sub(r"\s+", " ", str(error)).strip()
        if not words:
            # where Megatron asserts it, in place of words
            last = traceback.extract_tb(error.__traceback__)[-1]
            inside = code_files.below_package("megatron", last.filename)
            file = code_files.without_environment(last.filename) if inside is None else inside
            place = f"{file}:{last.lineno}"
            words = f"{type(error).__name__}: {last.line} ({place})"
        raise RecipeError(words, fix="change the flags that Megatron names here") from error


def configured(kind: type[T], recipe: Recipe, **defaults: object) -> T:
    """One of Megatron's configurations, with what the recipe says of its fields.

    defaults : what ``megatron.training`` would say where the recipe does not
    """
    values = dict(defaults)
    for name, value in recipe.flags.items():
        values[FIELD.get(name, name)] = value
    settings = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        # Megatron's own default stays
        if field.name not in values:
            continue
        value = values[field.name]
        # an enum's member by its name, as Megatron's parser reads it
        if isinstance(value, str) and isinstance(field.type, enum.EnumMeta):
            value = field.type[value]
        settings[field.name] = value
    return kind(**settings)


def transformer_config(recipe: Recipe) -> Foreign:
    """The TransformerConfig that training/arguments.py:1306 @0.16.1 would make of these flags."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )
    from torch.nn import functional

    r, te = recipe, recipe.transformer_impl == "transformer_engine"
    latent, interleaved = r.multi_latent_attention, bool(r.world.vpp and r.world.pp > 1)
    fields = {
        "expert_tensor_parallel_size": r.world.etp,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "params_dtype": _dtype(r),
        "pipeline_dtype": _dtype(r),
        "deallocate_pipeline_outputs": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": te,
        "apply_rope_fusion": te and r.position_embedding_type == "rope" and not latent,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": te,
        "bias_activation_fusion": te and (r.swiglu or r.add_bias_linear),
        "moe_permute_fusion": te and r.num_experts is not None,
        "is_hybrid_model": r.is_hybrid,
    }
    if r.swiglu:
        fields |= {"gated_linear_unit": True, "activation_func": functional.silu}
    if latent:  # a rank that is None is one: queries are not compressed
        fields |= {"q_lora_rank": r.q_lora_rank, "kv_lora_rank": r.kv_lora_rank}
    if not te:  # grouped products need Transformer Engine: one expert after the other
        r = r.changed(moe_grouped_gemm=False)
    if latent:
        return configured(MLATransformerConfig, r, **fields)
    return configured(TransformerConfig, r, **fields)


def check_layers(recipe: Recipe) -> None:
    """Let Megatron split the layers over all stages and chunks."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config, world = transformer_config(recipe), recipe.world
    for stage in world.stages:
        for chunk in range(world.chunks):
            get_num_layers_to_build(config, chunk if world.vpp else None, stage)


def _dtype(recipe: Recipe) -> torch.dtype:
    if recipe.bf16:
        return torch.bfloat16
    if recipe.fp16:
        return torch.half
    return torch.float32


def chunks(recipe: Recipe, config: Foreign) -> list[Foreign]:
    """This rank's model chunks, wrapped as get_model does (training/training.py:1195 @0.16.1)."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.transformer.module import Float16Module

    world, wrapped = recipe.world, []
    # of megatron-core itself it is by the replicas alone (training/training.py:1316 @0.16.1)
    bucket = max(40_000_000, 1_000_000 * world.dp * world.cp)
    for chunk in range(world.chunks):
        model = _model(recipe, config, chunk)
        # as get_model marks them: optimizers and norms of gradients ask for these attributes
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        model.cuda()
        if recipe.bf16 or recipe.fp16:
            model = Float16Module(config, model)
        ddp = configured(
            DistributedDataParallelConfig,
            recipe,
            grad_reduce_in_fp32=not recipe.grad_reduce_in_bf16,
            bucket_size=bucket if recipe.overlap_grad_reduce else None,
        )
        # chunks behind the first have no buckets: compute of other chunks hides their calls
        wrapped.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return wrapped


def _model(recipe: Recipe, config: Foreign, chunk: int) -> torch.nn.Module:
    """One model chunk; embedding and loss where Megatron's pipeline puts them."""
    from megatron.core import parallel_state

    # without chunks Megatron takes no number of one
    m, vpp = recipe, recipe.world.vpp
    stage = chunk if vpp else None
    if vpp:
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    # releases of Megatron take other arguments
    place = {"ignore_virtual": False, "vp_stage": stage}
    accepted = inspect.signature(parallel_state.is_pipeline_first_stage).parameters
    place = {k: v for k, v in place.items() if k in accepted}
    both = {
        "config": config,
        "vocab_size": recipe.padded_vocab_size,
        "max_sequence_length": m.max_position_embeddings or m.seq_length,
        "pre_process": parallel_state.is_pipeline_first_stage(**place),
        "post_process": parallel_state.is_pipeline_last_stage(**place),
        "share_embeddings_and_output_weights": not m.untie_embeddings_and_output_weights,
        "position_embedding_type": m.position_embedding_type,
        "rotary_percent": m.rotary_percent,
        "rotary_base": m.rotary_base,
    }
    return _hybrid(m, both) if m.is_hybrid else _gpt(recipe, both, stage)


def _gpt(recipe: Recipe, both: dict[str, Foreign], stage: int | None) -> torch.nn.Module:
    """A GPTModel (gpt_builders.py @0.16.1)."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    m, config = recipe, both["config"]
    te = recipe.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=m.normalization, vp_stage=stage
    )
    return GPTModel(
        **both,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, te, vp_stage=stage)
        if m.mtp_num_layers
        else None,
        rope_scaling=m.use_rope_scaling,
        rope_scaling_factor=m.rope_scaling_factor,
        vp_stage=stage,
    )


def _hybrid(m: Recipe, both: dict[str, Foreign]) -> torch.nn.Module:
    """A MambaModel, which is a HybridModel from 0.19 on (mamba_builders.py @0.16.1)."""
    kind = "hybrid" if find_spec("megatron.core.models.hybrid") else "mamba"
    place = f"megatron.core.models.{kind}.{kind}"
    model = getattr(import_module(f"{place}_model"), f"{kind.title()}Model")
    name = f"{kind}_stack_spec"
    spec = {name: getattr(import_module(f"{place}_layer_specs"), name)}
    pattern = m.hybrid_override_pattern
    module: torch.nn.Module = model(**both, **spec, hybrid_override_pattern=pattern)
    return module


def optimizer(recipe: Recipe, config: Foreign, model: list[Foreign]) -> Foreign:
    """Megatron's optimizer over all chunks."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    lr = {"lr": recipe.lr, "min_lr": recipe.lr, "params_dtype": config.params_dtype}
    settings = configured(OptimizerConfig, recipe, **lr)
    return get_megatron_optimizer(settings, model, use_gloo_process_groups=False)


if __name__ == "__main__":
    main()
