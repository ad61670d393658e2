"""One rank of a real job, for comparison: when did each train step start, what did NCCL record?

``torchrun --nproc-per-node 4 benchmarks/real_steps.py DIR pretrain_gpt.py <arguments>`` writes
``DIR/rank-N.json``: milliseconds from the start of each train step to the start of the next, and
the Flight Recorder's entries of the last whole iteration.  It knows nothing of emulation, and it
waits for nothing: the job is the plain one.  Peaks are bytes; ``device_used`` is at the end.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

_KEPT = ("profiling_name", "input_sizes", "input_dtypes", "output_sizes", "process_group")


class _Steps:
    """Takes the time at the start of every train step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts: list[float] = []
        self.last_record = -1
        self.entries: list[dict[str, Any]] = []

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
    runpy.run_path(script, run_name="__main__")
    torch.cuda.synchronize()
    steps.write(int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
