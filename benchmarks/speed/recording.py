"""How much longer does an iteration take while it is recorded, or has a call to stop at?

``python -m benchmarks.speed.recording [key=value …]``

One rank of a tiny GPT on the cpu tier (real values), TP2 PP2 DP2 in a virtual world: plain
and recorded iterations, and such with a --prism-break that is never reached, take turns in one
process, so that a busy machine is busy for all of them.  Processor time; medians, and the
median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch

from benchmarks.report import Row, finish

ROUNDS = 13
BOUND = 5.0  # %
SETTINGS = """
    world_size=8 tp=2 pp=2 use_distributed_optimizer=true
    overlap_grad_reduce=true global_batch_size=16 micro_batch_size=2
    data_path=null num_layers=4 hidden_size=256 ffn_hidden_size=768
"""
KINDS = ("plain", "recorded", "to be stopped")


def build(overrides: list[str]) -> tuple[Any, Any]:
    """(the rank's job, its virtual world), after one iteration to warm up."""
    from megatron_prism.core import recipe
    from megatron_prism.emulate import recipe_rank
    from megatron_prism.emulate.session import Session
    from megatron_prism.runtime import devices as tiers

    settings = recipe.load("tiny-gpt_1cpu", [*SETTINGS.split(), *overrides])
    session = Session()
    tier = tiers.prepare("cpu", session.changes)
    run = recipe_rank.run_of(settings, 0, tier)
    world = recipe_rank.start_world(run, settings, session)
    from megatron_prism.emulate.recipe_rank import RankJob

    job = RankJob(settings, run.monitor, tier, lambda kind, **fields: None)
    for number in range(2):
        job.iterate(number)
    return job, world


def measure(job: Any, world: Any) -> tuple[dict[str, list[float]], int]:
    """(kind -> processor seconds of each iteration, ops of a recorded one)."""
    from megatron_prism.core.process_changes import ProcessChanges
    from megatron_prism.emulate.debugger import Breakpoint, Debugger
    from megatron_prism.runtime.recorder.recorder import Recorder, report_to

    recorder, watched = Recorder(world.rank, "cpu"), ProcessChanges()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    number, ops = 2, 0
    for turn in range(ROUNDS):
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:  # nobody is always first
            used = recorder if kind == "recorded" else None
            job.recorder = used
            listeners = () if used is None else (used,)
            if kind == "to be stopped":
                elsewhere = Breakpoint.parse("1B all_reduce group=tp nth=100000")
                listeners = (Debugger(elsewhere, None, 0, job.recipe.world, "mirror", "cpu"),)
            world.listen(*listeners)
            job.monitor.listen(*listeners)
            watched.undo()
            if used is not None:
                report_to(recorder, watched)
            start_s = time.process_time()
            job.iterate(number)
            found[kind].append(time.process_time() - start_s)
            if kind == "recorded":
                ops = len(job.program)
            number += 1
    return found, ops


def overhead(found: dict[str, list[float]], kind: str) -> float:
    """Per cent that ``kind`` takes longer than the plain iteration of its turn, median."""
    ratios = [a / b for a, b in zip(found[kind], found["plain"], strict=True)]
    return (statistics.median(ratios) - 1) * 100


def main() -> None:
    """Measure, print, exit 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings", nargs="*", help="key=value of the recipe")
    words = parser.parse_args().settings
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, ops = measure(*build(words))
    rows = [Row(f"{k} iteration", statistics.median(found[k]) * 1e3, "ms") for k in KINDS]
    rows += [
        Row(f"recording {ops:,} ops costs", overhead(found, "recorded"), "%", BOUND),
        Row("a break that is not reached costs", overhead(found, "to be stopped"), "%", BOUND),
    ]
    finish("What recording costs on the cpu tier", rows)


if __name__ == "__main__":
    main()
