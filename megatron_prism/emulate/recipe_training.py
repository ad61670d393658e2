"""How does one rank train a recipe?  Model, optimizer and data, and one iteration after another.

megatron-core's own scheduler, DDP and optimizer, driven as ``megatron.training`` would drive them
(training/training.py:1195 get_model, :2547 config hooks @0.16.1); nothing of them is copied here.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from megatron_prism.core.errors import NotTrainedError
from megatron_prism.core.megatron_source import megatron_release
from megatron_prism.core.recipe_schema import Recipe
from megatron_prism.emulate import recipe_model

if TYPE_CHECKING:
    import torch

    from megatron_prism.core.program import Program
    from megatron_prism.emulate.monitor import TrainingMonitor
    from megatron_prism.emulate.signatures import (
        Batch,
        Chunk,
        Loss,
        Memory,
        Peak,
        Report,
        Summary,
        Sync,
    )
    from megatron_prism.runtime.devices import Tier
    from megatron_prism.runtime.recorder.recorder import Recorder
    from megatron_prism.runtime.traffic import Tally
    from megatron_prism.runtime.world import VirtualWorld

__all__ = ["RankJob"]

Emit = Callable[..., None]


class RankJob:
    """Model, optimizer and data of one rank, and its iterations."""

    def __init__(self, recipe: Recipe, monitor: TrainingMonitor, tier: Tier, emit: Emit) -> None:
        self.recipe, self.monitor, self.tier, self.emit = recipe, monitor, tier, emit
        recipe_model.initialize(recipe)
        self.config = recipe_model.transformer_config(recipe)
        emit("phase", text="building the model")
        with tier.live.scope(phase="build") if tier.live else _nothing():
            self.model = recipe_model.chunks(recipe, self.config)
            self.optimizer = recipe_model.optimizer(recipe, self.config, self.model)
        self._hook_up()
        self.batches = self._batches()
        self.peaks: list[Peak] = []
        self.losses: list[float] = []
        self.iteration_s: list[float] = []
        self.recorder: Recorder | None = None  # of the iterations that are recorded
        self.program: Program | None = None  # what the last iteration did, if it was recorded
        total = self.recipe.num_microbatches * len(self.model) * 2 * recipe.train.iterations
        monitor.on_step = lambda done: emit("step", done=done, total=total)
        emit("step", done=0, total=total)

    def _hook_up(self) -> None:
        """The hooks that megatron.training sets on the config (training.py:2547 @0.16.1)."""
        from megatron.core.distributed import finalize_model_grads

        t, config = self.recipe.train, self.config

        def per_chunk(name: str) -> Sync | list[Sync]:
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
    def _batches(self) -> Iterator[Batch]:
        from megatron.core import parallel_state

        from megatron_prism.emulate.batches import batches

        return batches(
            self.recipe,
            device=self.tier.device,
            dp_rank=parallel_state.get_data_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
        )

    def _forward_step(
        self, data: Iterator[Batch], model: Chunk
    ) -> tuple[torch.Tensor, Callable[..., Loss]]:
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
        recorder = self.recorder
        start = time.perf_counter()
        if recorder is not None:
            recorder.start()
        with self.monitor.iteration(self.optimizer, chunks, self.recipe.train.iterations):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            data = [self.batches] * len(chunks) if len(chunks) > 1 else self.batches
            losses = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=data,
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=self.recipe.num_microbatches,
                seq_length=self.recipe.model.seq_length,
                micro_batch_size=t.micro_batch_size,
                forward_only=False,
            )
            with self.monitor.phase("optimizer"):
                updated, grad_norm, _ = self.optimizer.step()
            updated = True if self.tier.name == "meta" else bool(updated)
            self.monitor.stepped(_mean_loss(losses), skipped=not updated, grad_norm=grad_norm)
        if recorder is not None:
            self.program = recorder.stop().program()
        self.iteration_s.append(time.perf_counter() - start)
        if any(not math.isfinite(x) for x in self.monitor.iterations[-1].losses.values()):
            raise NotTrainedError(  # pretrain checks this too (--check-for-nan-in-loss-and-grad)
                f"the loss of iteration {number + 1} is not finite", fix="lower train.lr"
            )
        if first_with_gather:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()
            self.config.param_sync_func = self.param_sync
        if live is not None:
            self.peaks.append({"bytes": live.high.bytes, "at": live.high.labels})
        gc.collect()

    def _stand_ins(self) -> list[str]:
        """What this module put in the place of production kernels."""
        found = []
        if self.recipe.prism.transformer_impl == "local_flash" and self.tier.name == "meta":
            found.append("attention: what fused attention allocates and saves, no scores")
        if self.recipe.model.moe_grouped_gemm and not self.config.moe_grouped_gemm:
            found.append("grouped GEMM: one expert after the other")
        return found

    def summary(
        self, world: VirtualWorld, before: Tally | None, build_s: float, run_s: float
    ) -> Summary:
        """What the parent prints and writes, plain numbers with their provenance."""
        rank, recipe = world.rank, self.recipe
        rows = world.tally.since(before).rows() if before is not None else []
        place = recipe.world.coordinates(rank)
        memory: Memory = {"peaks": self.peaks, "provenance": "unknown on this tier"}
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
            "stand_ins": [*self.tier.stand_in, *self._stand_ins()],
            "megatron_core": megatron_release(),
            "parameters": self.monitor.num_parameters,
            "steps": self.monitor.steps,
            "master_parameter_moved": self.monitor.has_moved(),
            "losses": [entry.losses.get("lm loss") for entry in self.monitor.iterations],
            "communication": [dataclasses.asdict(row) for row in rows],
            "communication_of": "the last iteration",
            "memory": memory,
            "build_s": round(build_s, 3),
            "run_s": round(run_s, 3),
            "iteration_s": [round(s, 3) for s in self.iteration_s],
            "host_peak_rss": _peak_rss(),
        }


def _loss(mask: torch.Tensor, output: torch.Tensor) -> Loss:
    """Sum of token losses, number of tokens, and both for the log, as pretrain_gpt's loss_func."""
    import torch

    total = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    report = torch.cat([total.detach().view(1), tokens.view(1).to(total.dtype)])
    return total, tokens, {"lm loss": report}


def _mean_loss(losses: list[Report]) -> Report:
    if not losses:
        return {}
    total = sum(entry["lm loss"] for entry in losses)
    assert not isinstance(total, int)
    return {"lm loss": total[0] / total[1]}


class _nothing:
    def __enter__(self) -> None:
        """No tracker: no labels."""

    def __exit__(self, *exc: object) -> None:
        """See __enter__."""


def _peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
