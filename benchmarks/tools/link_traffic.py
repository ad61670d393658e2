"""Keeps the NVLinks between two GPUs awake, as long as a file says so.

``python -m benchmarks.tools.link_traffic FILE`` looks into FILE again and again: ``light`` copies
256 KiB each way about every 0.6 ms, ``heavy`` 256 MiB one way about every 9 ms, ``end`` ends it,
anything else rests.  Beside the jobs of ``run.py`` (tp2, ``--num-layers 8 --micro-batch-size 4
--global-batch-size 16``) it gave the figures of ``results/h200_x2_mirrors.json``, ``links``; SM
clocks beside them are of ``nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw.instant
--format=csv -lms 40``.  Tidied after it ran (2026-11-22), not run again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch


def asked(file: Path) -> str:
    """What the file says."""
    return file.read_text().strip() if file.exists() else ""


def main() -> None:
    file = Path(sys.argv[1])
    small = [torch.empty(1 << 18, device=f"cuda:{i}", dtype=torch.uint8) for i in (0, 1)]
    large = [torch.empty(1 << 26, device=f"cuda:{i}", dtype=torch.uint8) for i in (0, 1)]
    while (mode := asked(file)) != "end":
        if mode == "light":
            for _ in range(200):
                small[1].copy_(small[0], non_blocking=True)
                small[0].copy_(small[1], non_blocking=True)
                _rest(0.0005)
        elif mode == "heavy":
            for _ in range(50):
                for _ in range(4):
                    large[1].copy_(large[0], non_blocking=True)
                _rest(0.008)
        else:
            time.sleep(0.02)


def _rest(seconds: float) -> None:
    for device in (0, 1):
        torch.cuda.synchronize(device)
    time.sleep(seconds)


if __name__ == "__main__":
    main()
