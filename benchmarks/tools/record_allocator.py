"""What does PyTorch's caching allocator really do?  Records small histories on one GPU.

``python -m benchmarks.tools.record_allocator -o tests/golden/allocator_h200.json.gz`` (plain torch,
about 20 s): for each of several PYTORCH_CUDA_ALLOC_CONF a fresh process makes a few hundred
requests on two streams, some with record_stream, and a small training loop; events are kept from
the first one. ``tests/memory/test_allocator_trace.py`` replays them through our model.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

FORMAT = 1
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
           "segment_map", "segment_unmap", "snapshot", "oom")  # fmt: skip
CONFS = (
    "",
    "expandable_segments:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,256:4,>:1]",
    "max_split_size_mb:64",
    "max_split_size_mb:32,max_non_split_rounding_mb:64",
)
MIB = 1 << 20


def requests(torch: Any) -> None:
    """400 requests of all sizes on two streams, freed in any order, some used by the other one."""
    rng = random.Random(7)
    side = torch.cuda.Stream()
    live: list[Any] = []
    for step in range(400):
        stream = side if rng.random() < 0.3 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            low, high = rng.choice([(1, 4096), (4096, MIB), (MIB, 10 * MIB), (10 * MIB, 90 * MIB)])
            tensor = torch.empty(rng.randint(low, high), dtype=torch.uint8, device="cuda")
            if rng.random() < 0.2:
                torch.cuda._sleep(2_000_000)  # busy, so that a recorded use outlasts the free
                other = torch.cuda.default_stream() if stream is side else side
                tensor.record_stream(other)
                with torch.cuda.stream(other):
                    torch.cuda._sleep(2_000_000)
        live.append(tensor)
        del tensor
        while len(live) > 12 or live and rng.random() < 0.35:
            live.pop(rng.randrange(len(live)))
        if step == 250:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def training(torch: Any) -> None:
    """Four layers and Adam, three steps: what comes and goes in a training loop."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(1024)).cuda().bfloat16()
    adam = torch.optim.AdamW(model.parameters())
    for step in range(3):
        data = torch.randn(2048 + 512 * step, 1024, device="cuda", dtype=torch.bfloat16)
        model(data).float().square().mean().backward()
        adam.step()
        adam.zero_grad()


def _one(conf: str) -> dict[str, Any]:
    """Runs in its own process: the history of one setting, as columns of whole numbers."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python", context=None)
    requests(torch)
    training(torch)
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    history = snapshot["device_traces"][torch.cuda.current_device()]
    addresses: dict[int, int] = {}
    streams: dict[int, int] = {0: 0}
    columns: dict[str, list[int]] = {"action": [], "address": [], "bytes": [], "stream": []}
    for entry in history:
        if entry["action"] not in ACTIONS:
            continue
        address = entry.get("addr", 0)
        columns["action"].append(ACTIONS.index(entry["action"]))
        columns["address"].append(addresses.setdefault(address, len(addresses)))
        columns["bytes"].append(entry["size"])
        columns["stream"].append(streams.setdefault(entry["stream"], len(streams)))
    stats = torch.cuda.memory_stats()
    peaks = {key: stats[f"{key}_bytes.all.peak"] for key in ("allocated", "reserved")}
    return {"conf": conf, "peaks": peaks, **columns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="out", type=Path, required=True, help="FILE.json.gz to write")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        args.out.write_text(json.dumps(_one(args.one)))
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("this records a real allocator: it needs a CUDA device")
    runs = []
    for number, conf in enumerate(CONFS):
        part = args.out.with_name(f".{args.out.name}.{number}")
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        env = {k: v for k, v in os.environ.items() if k not in names}
        env |= {names[0]: conf} if conf else {}
        me = [sys.executable, __file__, "-o", str(part), f"--one={conf}"]
        subprocess.run(me, env=env, check=True)
        runs.append(json.loads(part.read_text()))
        part.unlink()
        print(f"{conf or 'defaults'}: {len(runs[-1]['action'])} events, {runs[-1]['peaks']}")
    name, today = torch.cuda.get_device_name(), datetime.date.today()
    source = f"{name}, torch {torch.__version__}, {today}, benchmarks/tools/record_allocator.py"
    text = json.dumps({"format": FORMAT, "source": source, "runs": runs}, separators=(",", ":"))
    args.out.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
