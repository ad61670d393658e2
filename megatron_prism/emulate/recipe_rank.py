"""Run one rank of a recipe through megatron-core: the worker process of the main job.

In : a Recipe and a rank, pickled on stdin.  Out: JSON lines on a file descriptor of its own
(progress, then one result or one error).  The model is megatron-core's GPTModel, driven by
megatron-core's scheduler, DDP and optimizer, as ``megatron.training`` would drive it
(training/training.py:1195 get_model, :2547 config hooks @0.16.1); nothing of them is copied here.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_prism.core.errors import PrismError, UnsupportedError
from megatron_prism.core.recipe_schema import Recipe
from megatron_prism.emulate.session import Session

if TYPE_CHECKING:
    from megatron_prism.core.slices import SliceStore
    from megatron_prism.emulate.recipe_training import RankJob
    from megatron_prism.emulate.run import Run
    from megatron_prism.emulate.signatures import Summary
    from megatron_prism.emulate.witness import Watch
    from megatron_prism.runtime.devices import Tier
    from megatron_prism.runtime.recorder.recorder import Recorder
    from megatron_prism.runtime.world import VirtualWorld

__all__ = ["main", "run", "run_of", "start_world"]

Emit = Callable[..., None]


def main(fd: int) -> int:
    """Entry of the worker: ``python -m megatron_prism.emulate.recipe_rank FD``."""
    recipe, rank, slices, watch = pickle.load(sys.stdin.buffer)
    out = os.fdopen(fd, "w", buffering=1)

    def emit(kind: str, **fields: object) -> None:
        out.write(json.dumps({"kind": kind, **fields}) + "\n")

    try:
        # never closed: the process ends behind this, and all that it changed with it
        emit("result", result=run(Session(), recipe, rank, emit, slices, watch))
    except PrismError as error:
        emit("error", message=error.message, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except Exception as error:  # a bug, ours or Megatron's: its traceback goes to the parent
        emit("crash", message=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        return 1
    return 0


def run(
    session: Session,
    recipe: Recipe,
    rank: int,
    emit: Emit,
    slices: SliceStore | None = None,
    watch: Watch | None = None,
) -> Summary:
    """Train ``recipe.train.iterations`` iterations as ``rank``; returns the plain summary.

    What that changes in the process stays until ``session`` is closed.  With ``slices`` (a
    SliceStore) the last iteration is recorded and kept there; with ``watch`` (a
    ``witness.Watch``) every call is held against the programs of the world.
    """
    start = time.perf_counter()
    _collect_no_garbage(session)
    _no_warnings(session)
    from megatron_prism.emulate.recipe_training import RankJob
    from megatron_prism.runtime import devices as tiers

    name = "meta" if recipe.prism.tier == "auto" else recipe.prism.tier
    tier = tiers.prepare(name, session.changes, history=slices is not None)
    if recipe.prism.transformer_impl == "transformer_engine" and not _has_te():
        raise UnsupportedError(
            "prism.transformer_impl=transformer_engine needs Transformer Engine, absent here",
            fix="install it, or use prism.transformer_impl=local_flash",
        )
    made = run_of(recipe, rank, tier)
    witness = None
    if watch is not None:
        from megatron_prism.emulate.witness import Witness

        witness = Witness(recipe.world, rank, tier, watch)
        made.calls = made.training = (witness,)
    monitor = made.monitor
    monitor.listen(*made.training)
    session.changes.set_item(os.environ, "RANK", str(rank))
    session.changes.set_item(os.environ, "WORLD_SIZE", str(recipe.world.size))
    world = start_world(made, recipe, session)
    emit("phase", text="importing megatron-core")
    with monitor.device_memory():
        job = RankJob(recipe, monitor, tier, emit)
    gc.collect()
    gc.freeze()
    gc.enable()
    built = time.perf_counter()
    before = None
    recorder = _recorder(rank, tier, job, session) if slices is not None else None
    for iteration in range(recipe.train.iterations):
        before = world.tally.copy()
        if recorder is not None and iteration == recipe.train.iterations - 1:
            world.listen(*world.listeners, recorder)
            monitor.listen(recorder, *monitor.listeners)
            job.recorder = recorder
        job.iterate(iteration)
    monitor.check(recipe.train.iterations)
    summary = job.summary(world, before, built - start, time.perf_counter() - built)
    if witness is not None:
        summary["witness"] = witness.said()
    if slices is not None and job.program is not None:
        slices.put(job.program)
        summary["recording"] = {
            "ops": len(job.program),
            "recorded_s": job.iteration_s[-1],
            "plain_s": min(job.iteration_s[1:-1] or job.iteration_s[:1]),
        }
    return summary


def _collect_no_garbage(session: Session) -> None:
    """What is imported and built stays: looking through it takes a second of five."""
    if gc.isenabled():
        session.changes.on_undo(gc.enable)
    session.changes.on_undo(gc.unfreeze)  # all of it, or the model would stay in memory for good
    gc.disable()


def _no_warnings(session: Session) -> None:
    before = warnings.catch_warnings()
    before.__enter__()
    session.changes.on_undo(lambda: before.__exit__(None, None, None))
    warnings.filterwarnings("ignore")


def _recorder(rank: int, tier: Tier, job: RankJob, session: Session) -> Recorder:
    from megatron_prism.runtime.recorder import events as watch
    from megatron_prism.runtime.recorder.recorder import Recorder

    recorder = Recorder(rank, tier.name, tier.live)
    recorder.owned_by(job.model, job.optimizer)
    watch.report_to(recorder, session.changes)
    session.changes.on_undo(lambda: recorder.owners.remove())
    return recorder


def run_of(recipe: Recipe, rank: int, tier: Tier) -> Run:
    """The Run of ``rank`` alone in the recipe's world; nobody listens yet."""
    from megatron_prism.emulate import monitor
    from megatron_prism.emulate import options as flags
    from megatron_prism.emulate.run import Run

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
    follows = monitor.TrainingMonitor(tier.live, shapes_only=tier.name == "meta")
    follows.who = "it"  # the parent names the rank
    return Run(options, tier, follows)


def start_world(run: Run, recipe: Recipe, session: Session) -> VirtualWorld:
    """Apply the patches and bring the virtual world up, before Megatron is imported."""
    from megatron_prism.emulate import launch, patch
    from megatron_prism.emulate.patches import without_cuda

    meta, rank = run.tier.name == "meta", run.options.rank
    context = patch.Context(
        start=lambda: launch.start_world(run, session),
        proof=run.monitor,
        meta=meta,
        local_ranks=(rank,),
        rank=rank,
        changes=session.changes,
    )
    chosen = without_cuda.patches_for(run.tier.name)
    if meta and recipe.prism.transformer_impl == "local_flash":
        chosen += (without_cuda.FUSED_ATTENTION,)
    patch.apply(chosen, context)
    return context.start()


def _has_te() -> bool:
    return "transformer_engine" in sys.modules or bool(find_spec("transformer_engine"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
