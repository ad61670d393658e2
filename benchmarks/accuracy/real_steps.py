"""One rank of a real job, for comparison: when did each train step start, what did NCCL record?

``torchrun --nproc-per-node 4 benchmarks/accuracy/real_steps.py DIR pretrain_gpt.py <arguments>``
writes ``DIR/rank-N.json``: milliseconds from the start of each train step to the start of the next,
and the Flight Recorder's entries of the last whole iteration.  It knows nothing of emulation, and
it waits for nothing: the job is the plain one.  Peaks are bytes; ``device_used`` is at the end.
With REAL_CALLS=1 in the environment it also times how long each method of a process group keeps the
host, at about 1 us a call, and writes {method: [calls, mean ns, median ns]} after the warm-up.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

_METHODS = ("allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base",
            "barrier", "send", "recv", "_start_coalescing", "_end_coalescing")  # fmt: skip
_WARM_UP = 3  # train steps whose calls do not count
_KEPT = ("profiling_name", "input_sizes", "input_dtypes", "output_sizes", "process_group")


class _Steps:
    """Takes the time at the start of every train step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts: list[float] = []
        self.last_record = -1
        self.entries: list[dict[str, Any]] = []
        self.calls: dict[str, list[int]] = {}

    def before(self, wanted: int) -> None:
        self.starts.append(time.perf_counter())
        if len(self.starts) >= wanted - 1:
            self._flight(keep=len(self.starts) == wanted)

    def _flight(self, keep: bool) -> None:
        from torch._C._distributed_c10d import _dump_nccl_trace

        entries = pickle.loads(_dump_nccl_trace(True, False, False)).get("entries", [])
        if keep:
            new = [entry for entry in entries if entry["record_id"] > self.last_record]
            self.entries = [{key: entry.get(key) for key in _KEPT} for entry in new]
        elif entries:
            self.last_record = entries[-1]["record_id"]

    def time_calls(self) -> None:
        """Time the host in every call of a process group from here on."""
        for name in _METHODS:
            setattr(dist.ProcessGroup, name, self._timed(name, getattr(dist.ProcessGroup, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            made = method(*args, **kwargs)
            ns = time.perf_counter_ns() - begin
            if len(self.starts) > _WARM_UP:
                later = getattr(args[-1], "asyncOp", None)
                key = name if later is None else f"{name}, {'a' * later}synchronous"
                self.calls.setdefault(key, []).append(ns)
            return made

        return call

    def write(self, rank: int) -> None:
        ms = [1e3 * (b - a) for a, b in zip(self.starts, self.starts[1:], strict=False)]
        self.folder.mkdir(parents=True, exist_ok=True)
        free, total = torch.cuda.mem_get_info()
        stored = {
            "iteration_ms": ms,
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "device_used": total - free,
            "flight_recorder": self.entries,
            "host_of_calls": {
                name: [len(ns), round(statistics.fmean(ns)), round(statistics.median(ns))]
                for name, ns in self.calls.items()
            },
        }
        (self.folder / f"rank-{rank}.json").write_text(json.dumps(stored))


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    import megatron.training.training as training

    steps, original = _Steps(folder), training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        steps.before(get_args().train_iters)
        return original(*args, **kwargs)

    training.train_step = train_step
    if os.environ.get("REAL_CALLS"):
        steps.time_calls()
    runpy.run_path(script, run_name="__main__")
    torch.cuda.synchronize()
    steps.write(int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
