"""Does the index of a host predict how much longer iterations take that wait for Python?

``python -m benchmarks.accuracy.host_index [--rounds 4] [--quota 60]``

One machine at several speeds: as it is, with a part of its processor's time (a control group's
quota, where one may be made), and on a core beside a busy process.  In a process that switches
between them a model of megatron-core, so narrow that everything is Python's and PyTorch's time
(16 layers, width 16, forward, backward, Adam), and the short benchmark of a capture take turns, so
that both see the same drift.  Predicted is the ratio of the indices, measured the ratio of
the iterations' mean times.  Bound: 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import Row, finish

GROUPS = Path("/sys/fs/cgroup/cpu")
ITERATIONS = 6  # of a turn


def model_step() -> Callable[[], None]:
    """A train step of a small GPT of megatron-core, in a world of one."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29871", RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"  # where buffers are
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    config = TransformerConfig(
        num_layers=16, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, pipeline_dtype=torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=8)
    optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.arange(8).view(1, 8)
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, tokens, mask, labels=tokens).mean().backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def quota(percent: int) -> Iterator[None]:
    """This process has so much of a processor's time."""
    group = GROUPS / f"prism-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("10000")
        (group / "cpu.cfs_quota_us").write_text(str(percent * 100))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _busy() -> None:
    while True:
        pass


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """This process shares its core with a busy one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    other = multiprocessing.Process(target=_busy, daemon=True)
    other.start()
    try:
        yield
    finally:
        other.terminate()
        other.join()
        os.sched_setaffinity(0, before)


def turn(step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """(index, ms of an iteration), each on both sides of the other."""
    from megatron_prism.emulate.host_benchmark import measure

    indices, times = [], []
    for _ in range(2):
        indices.append(measure(seconds).index)
        begin = time.perf_counter()
        for _ in range(ITERATIONS):
            step()
        times.append((time.perf_counter() - begin) * 1e3 / ITERATIONS)
    indices.append(measure(seconds).index)
    return mean(indices), mean(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quota", type=int, default=60, help="percent of a processor")
    args = parser.parse_args()
    speeds: dict[str, Callable[[], Any]] = {"as it is": contextlib.nullcontext}
    if os.access(GROUPS, os.W_OK) and (GROUPS / "cpu.cfs_quota_us").parent.is_dir():
        speeds[f"quota of {args.quota} %"] = lambda: quota(args.quota)
    speeds["beside a busy process"] = beside
    step = model_step()
    for _ in range(3):
        step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in speeds}
    for _ in range(args.rounds):
        for name, speed in speeds.items():
            with speed():
                found[name].append(turn(step, 0.5))
    base, *others = found
    each = {
        name: [mean(column) for column in zip(*turns, strict=True)] for name, turns in found.items()
    }
    rows = [Row(f"{base}: index", each[base][0], ""), Row("  iteration", each[base][1], "ms")]
    for name in others:
        predicted, measured = (each[name][i] / each[base][i] for i in (0, 1))
        rows.append(Row(f"{name}: index, times", predicted, "x"))
        rows.append(Row("  iteration, times", measured, "x"))
        rows.append(Row("  off", 100 * abs(predicted / measured - 1), "%", 5))
    finish("index of a host", rows)


if __name__ == "__main__":
    main()
