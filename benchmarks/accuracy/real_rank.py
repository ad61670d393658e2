"""One rank of a real job, for comparison: runs a stock script and writes its peak memory.

``torchrun --nproc-per-node 4 benchmarks/accuracy/real_rank.py DIR pretrain_gpt.py <arguments>``
writes ``DIR/rank-N.json``.  It knows nothing of emulation: the job is the plain one.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    rank = int(os.environ["RANK"])
    runpy.run_path(script, run_name="__main__")
    folder.mkdir(parents=True, exist_ok=True)  # only after a normal end: a crash has no peak
    peak = torch.cuda.max_memory_allocated()
    (folder / f"rank-{rank}.json").write_text(json.dumps({"allocated_peak": peak}))


if __name__ == "__main__":
    main()
