"""Does the imported trace of a real job replay as long as the job took?

``python3 -m benchmarks.accuracy.traced OUT [--ranks N] [--slow RANK:FACTOR] [--iterations 20]``

Starts N processes (one per GPU over NCCL; without GPUs four over gloo) that train a small
tensor-parallel and data-parallel model by hand, with overlapped gradient all-reduces and a batched
ring of messages; torch.profiler traces them into OUT/traces.  Once without the profiler the wall
time of an iteration is taken, since the profiler slows the host.  Prints the measured iteration
with and without it, the replayed one and what ``prism import`` says; OUT/job has the programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

BOUND = 5.0  # percent
HIDDEN, LAYERS, BUCKETS, WARM = 4096, 8, 4, 3


def train(rank: int, args: argparse.Namespace, size: int, folder: Path) -> None:
    """One rank: plain iterations, then traced ones."""
    import torch
    from torch import distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    device, hidden = "cpu", 256
    if cuda:
        torch.cuda.set_device(rank)
        device, hidden = f"cuda:{rank}", HIDDEN
    dtype = torch.bfloat16 if cuda else torch.float32
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
    pairs = [dist.new_group([a, a + 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
             for a in range(0, size - 1, 2)]  # fmt: skip
    tp = pairs[min(rank // 2, len(pairs) - 1)]
    weights = [torch.randn(hidden, hidden, device=device, dtype=dtype) for _ in range(LAYERS)]
    gradients = [torch.ones(1 << (24 if cuda else 14), device=device, dtype=dtype)
                 for _ in range(BUCKETS)]  # fmt: skip
    inputs = torch.randn(hidden, hidden, device=device, dtype=dtype)
    slow_rank, _, factor = (args.slow or "-1:1").partition(":")
    times = round(4 * float(factor)) if rank == int(slow_rank) else 4

    def step() -> None:
        x = inputs
        for weight in weights:
            for _ in range(times):
                y = x @ weight
            x = torch.tanh(y)
            dist.all_reduce(x, group=tp)
        handles = []
        for bucket in range(BUCKETS):
            for weight in weights[bucket::BUCKETS]:
                for _ in range(times):
                    y = x @ weight
            handles.append(dist.all_reduce(gradients[bucket], async_op=True))
        for handle in handles:
            handle.wait()
        ring = [dist.P2POp(dist.isend, gradients[0], (rank + 1) % size),
                dist.P2POp(dist.irecv, gradients[1], (rank - 1) % size)]  # fmt: skip
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        for gradient in gradients:
            gradient.mul_(0.5)

    def timed() -> float:
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    plain = [timed() for _ in range(WARM + args.iterations)][WARM:]
    path = str(folder / "traces" / f"rank{rank}.json.gz")
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    plan = schedule(wait=1, warmup=WARM, active=args.iterations)

    def ready(made: profile) -> None:
        made.export_chrome_trace(path)

    with profile(activities=kinds, schedule=plan, record_shapes=True, on_trace_ready=ready) as p:
        for _ in range(1 + WARM + args.iterations):
            timed()
            p.step()
    (folder / f"plain{rank}.json").write_text(json.dumps(plain))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the job, import its traces, print both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--slow", default="")
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args()
    import torch
    from torch import multiprocessing

    from megatron_prism.traces.programs import import_traces, write
    from megatron_prism.traces.variance import vary

    size = args.ranks or torch.cuda.device_count() or 4
    (args.out / "traces").mkdir(parents=True)
    multiprocessing.spawn(train, (args, size, args.out), size)  # type: ignore[no-untyped-call]
    plain = [json.loads((args.out / f"plain{rank}.json").read_text()) for rank in range(size)]
    found = import_traces([args.out / "traces"])
    varies = vary(found)
    write(found, args.out / "job")
    print(varies.to_text())
    took, again = (statistics.fmean(times) for times in (varies.iteration_ns, varies.replayed_ns))
    alone = 1e3 * statistics.median(time for times in plain for time in times)
    error = 100 * (again / took - 1)
    print(f"without the profiler {alone:.2f} ms, with it {took / 1e6:.2f} ms, replayed "
          f"{again / 1e6:.2f} ms: {error:+.2f} % (bound {BOUND} %)")  # fmt: skip


if __name__ == "__main__":
    main()
