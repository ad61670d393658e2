"""One rank of a real job, for comparison: its peak memory, and what NCCL recorded.

``torchrun --nproc-per-node 4 benchmarks/accuracy/real_rank.py DIR pretrain_gpt.py <arguments>``
writes ``DIR/rank-N.json`` after a normal end: peaks in bytes, and the Flight Recorder's entries of
the last iteration.  It knows nothing of emulation: the job is the plain one.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

KEPT = ("profiling_name", "input_sizes", "input_dtypes", "output_sizes", "process_group")


def flight() -> list[dict[str, Any]]:
    """What the Flight Recorder holds."""
    from torch._C._distributed_c10d import _dump_nccl_trace

    return pickle.loads(_dump_nccl_trace(True, False, False)).get("entries", [])


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    import megatron.training.training as training

    train_step, last = training.train_step, -1

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        last = max([-1, *(entry["record_id"] for entry in flight())])
        return train_step(*args, **kwargs)

    training.train_step = step
    runpy.run_path(script, run_name="__main__")
    entries = [{k: one.get(k) for k in KEPT} for one in flight() if one["record_id"] > last]
    peaks = {"allocated_peak": torch.cuda.max_memory_allocated(),
             "reserved_peak": torch.cuda.max_memory_reserved()}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{os.environ['RANK']}.json"
    file.write_text(json.dumps({**peaks, "flight_recorder": entries}))


if __name__ == "__main__":
    main()
