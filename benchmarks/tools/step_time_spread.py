"""Steps of eight processes whose samples have other lengths, beside what captures let expect.

Eight processes over gloo train a small job (dp 4, pp 2), each a core of its own; every microbatch
has a drawn length.  The same job is captured on tier cpu at four lengths, one rank of each stage,
and ``features/uneven`` says how long these very steps take.  What is held against each other is
the spread: both have the same processor, but the one has gloo, whose calls nobody models.

    python -m benchmarks.tools.step_time_spread -o benchmarks/results/step_time_spread.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

LENGTHS = (1024, 128, 384, 704)
WORDS = [
    "world_size=8",
    "pp=2",
    "data_path=null",
    "micro_batch_size=1",
    "global_batch_size=16",
    "num_layers=4",
    "hidden_size=256",
    "ffn_hidden_size=1024",
    "num_attention_heads=4",
    "vocab_size=1000",
    "prism.tier=cpu",
    "moe_token_dispatcher_type=alltoall",
    "variable_seq_lengths=true",
]
DP, MICROBATCHES = 4, 4
WARM_UP = 3  # steps that are left out


def recipe_of(length: int, iterations: int):
    """The job at a length."""
    from megatron_prism.core.jobs import recipe

    words = [*WORDS, f"seq_length={length}", f"train_iters={iterations}"]
    return recipe.load("tiny-gpt_1cpu", words)


def draw_tokens(iterations: int, seed: int) -> np.ndarray:
    """Packs of documents: many short, few long; int64 [iterations, dp, microbatches]."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(300), 0.7, (iterations, DP, MICROBATCHES))
    return (drawn.clip(min(LENGTHS), max(LENGTHS)) // 8 * 8).astype(np.int64)


def run_rank(recipe, tokens: np.ndarray, rank: int, store_file: str) -> list[float]:
    """Train as one of the processes; s of every step."""
    from helpers import unequal_lengths
    from torch import distributed as dist

    from megatron_prism.core.process_changes import ProcessChanges
    from megatron_prism.core.world import World
    from megatron_prism.emulate.jobs.recipe_script import RankJob
    from megatron_prism.emulate.rank.monitor import TrainingMonitor
    from megatron_prism.runtime import devices

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    world: World = recipe.world
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_file, world.size), rank=rank, world_size=world.size
    )
    lengths = {dp_rank: tuple(tokens[:, dp_rank].reshape(-1).tolist()) for dp_rank in range(DP)}
    unequal_lengths.cut(lengths)
    job = RankJob(recipe, TrainingMonitor(), devices.prepare("cpu", ProcessChanges()))
    steps: list[float] = []
    for iteration in range(recipe.train_iters):
        begin = time.perf_counter()
        job.iterate(iteration)
        steps.append(time.perf_counter() - begin)
    return steps


def run_for_real(tokens: np.ndarray) -> np.ndarray:
    """Steps of the slowest process, s, float64 [iterations]."""
    from helpers import forks, gloo_ranks

    gloo_ranks.wrap()
    forks.prepare("cpu")
    recipe = recipe_of(max(LENGTHS), len(tokens))
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        children = []
        for rank in range(recipe.world.size):
            children.append(
                forks.fork(lambda rank=rank: {"steps": run_rank(recipe, tokens, rank, store)})
            )
        answers = [forks.wait(*child) for child in children]
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        raise SystemExit(errors[0])
    steps = [answer.get("summary", answer)["steps"] for answer in answers]
    return np.array(steps).max(axis=0)


def capture_all(folder: Path) -> list[Path]:
    """Capture the job at all lengths, side by side where each has cores of its own."""
    places: list[Path] = []
    running: list[subprocess.Popen[bytes]] = []
    has_cores = len(os.sched_getaffinity(0)) >= 4 * len(LENGTHS)
    for length in LENGTHS:
        place = folder / f"s{length}"
        command = [sys.executable, "-m", "megatron_prism", "capture", "tiny-gpt_1cpu", "-o", place]
        command += [*WORDS, f"seq_length={length}", "train_iters=4"]
        words = [str(word) for word in command]
        running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=REPOSITORY))
        if not has_cores:
            running[-1].wait()
        places.append(place)
    for process in running:
        if process.wait():
            raise SystemExit("a capture failed")
    return places


def expected(tokens: np.ndarray, places: list[Path]) -> np.ndarray:
    """Steps that captures let expect, s, float64 [iterations]."""
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.uneven.length_curves import make_curves
    from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
    from megatron_prism.features.uneven.samples import Batches
    from megatron_prism.features.uneven.step_times import step_times

    base, *others = [open_programs(str(place)) for place in places]
    curves = make_curves(LengthCaptures(base, others))
    batches = Batches(tokens, tokens.astype(np.float64) ** 2, False, "drawn")
    return step_times(curves, batches).step_ns / 1e9


def figures(steps: np.ndarray) -> dict[str, float]:
    """Median and spread of steps."""
    low, middle, high = np.quantile(steps, (0.05, 0.5, 0.95))
    return {"median_s": middle, "p95_over_p5": high / low, "deviation": steps.std() / steps.mean()}


def main() -> None:
    """Measure, expect, write both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    tokens = draw_tokens(args.steps + WARM_UP, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        places = capture_all(Path(folder))
        expected_steps = expected(tokens, places)[WARM_UP:]
    real_steps = run_for_real(tokens)[WARM_UP:]
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "captured_lengths": sorted(LENGTHS),
        "steps": args.steps,
        "seed": args.seed,
        "real": figures(real_steps),
        "expected": figures(expected_steps),
        "correlation": float(np.corrcoef(real_steps, expected_steps)[0, 1]),
        "real_s": real_steps.tolist(),
        "expected_s": expected_steps.tolist(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if not key.endswith("_s")}))


if __name__ == "__main__":
    main()
