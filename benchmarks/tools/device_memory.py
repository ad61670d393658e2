"""How much device memory does a process hold that no allocator sees: context, libraries, NCCL?

``python -m benchmarks.tools.device_memory -o FILE.json`` on a machine of 2 to 8 GPUs (plain torch,
under a minute; it starts torchrun).  On every GPU it follows used - reserved bytes

- while a process comes up: context, cuBLAS, first kernels;
- while communicators of 1, 2, … N ranks are made and used, one operation after the other on one
  communicator (``in turn``), and each operation alone on a fresh communicator (``alone``).

The package reads the file: ``prism memory record DIR device=FILE.json``; the shipped one is
``megatron_prism/memory/device_memory/h200.json``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

FORMAT = 1
MIB = 1 << 20
# NVLS off as in every run of ours on this host; quotes from NCCL about its channels
SETTINGS = {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "2"}
WORDS = re.compile(r"NCCL version|channels|nNodes|comm 0x\S+ rank|Chunksize", re.IGNORECASE)
REPEATS = 2  # of a case: the first pays what is paid once per process
KINDS = ("init", "all_reduce_1KiB", "all_reduce_64MiB", "all_gather_16MiB", "reduce_scatter_16MiB",
         "broadcast_16MiB", "neighbours_1MiB", "neighbours_64MiB", "all_to_all_16MiB")  # fmt: skip
ALONE = ("all_reduce_1KiB", "all_reduce_64MiB", "all_gather_16MiB", "reduce_scatter_16MiB",
         "one_way_16MiB", "neighbours_16MiB", "all_to_all_16MiB", "unbatched_16MiB")  # fmt: skip


# -- one process ----------------------------------------------------------------------------------
class Rank:
    """One process of the measurement: its device, and the rows it found."""

    def __init__(self, limit_s: float) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.end = time.monotonic() + limit_s
        self.device = torch.device("cuda", self.rank)
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def used(self) -> int:
        """Bytes of the device that torch's allocator does not hold."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def together(self) -> None:
        """Every process has come here; over gloo, which takes no device memory."""
        dist.barrier(group=self.quiet)

    def run(self) -> None:
        self.start_up()
        dist.init_process_group("nccl", timeout=datetime.timedelta(0, 120))
        self.quiet = dist.new_group(backend="gloo")
        for size in range(1, self.size + 1):
            for repeat in range(REPEATS):
                self.case(size, "in turn", KINDS, repeat)
        for size in range(self.size, 1, -1):
            for kind in ALONE:
                self.case(size, "alone", (kind,), 0)
        self.together()

    def start_up(self) -> None:
        """What a process holds before it communicates."""
        before = 0
        for step, work in (
            ("context", lambda: torch.empty(1, device=self.device)),
            ("cuBLAS", lambda: _product(self.device)),
            ("kernels", lambda: _kernels(self.device)),
        ):
            work()
            now = self.used()
            self.rows.append({"case": "start", "step": step, "ranks": 0, "bytes": now - before})
            before = now

    def case(self, size: int, case: str, kinds: tuple[str, ...], repeat: int) -> None:
        """A fresh communicator of the first ``size`` ranks; a row per kind."""
        name = f"{case} of {size}: {kinds[0] if len(kinds) == 1 else 'all'}, time {repeat + 1}"
        if self._too_late():
            self.left_out.append(name)
            return
        group = dist.new_group(list(range(size)))
        member = self.rank < size
        before = self.used()
        for kind in kinds:
            self.together()
            if member:
                operation, num_bytes = _parts(kind)
                getattr(self, operation)(group, size, num_bytes)
            self.together()
            now = self.used()
            if member:
                row = {"case": case, "step": kind, "ranks": size, "bytes": now - before}
                self.rows.append({**row, "repeat": repeat})
            before = now

    def _too_late(self) -> bool:
        """Rank 0's clock decides for all."""
        late = [time.monotonic() > self.end]
        dist.broadcast_object_list(late, src=0, group=self.quiet)
        return late[0]

    # -- operations: group, its size, bytes of the message -----------------------------------------
    def init(self, group: Any, size: int, num_bytes: int) -> None:
        """The communicator alone, without a connection."""
        group._get_backend(self.device).eager_connect_single_device(self.device)

    def all_reduce(self, group: Any, size: int, num_bytes: int) -> None:
        dist.all_reduce(self._tensor(num_bytes), group=group)

    def broadcast(self, group: Any, size: int, num_bytes: int) -> None:
        dist.broadcast(self._tensor(num_bytes), 0, group=group)

    def all_gather(self, group: Any, size: int, num_bytes: int) -> None:
        whole = self._tensor(num_bytes * size)
        dist.all_gather_into_tensor(whole, self._tensor(num_bytes), group=group)

    def reduce_scatter(self, group: Any, size: int, num_bytes: int) -> None:
        whole = self._tensor(num_bytes * size)
        dist.reduce_scatter_tensor(self._tensor(num_bytes), whole, group=group)

    def all_to_all(self, group: Any, size: int, num_bytes: int) -> None:
        whole = self._tensor(num_bytes * size)
        dist.all_to_all_single(self._tensor(num_bytes * size), whole, group=group)

    def neighbours(self, group: Any, size: int, num_bytes: int) -> None:
        """Both ways between neighbours of a line, batched, as a pipeline does."""
        if size == 1:
            return
        messages = []
        for peer in (self.rank - 1, self.rank + 1):
            if 0 <= peer < size:
                messages.append(dist.P2POp(dist.isend, self._tensor(num_bytes), peer, group))
                messages.append(dist.P2POp(dist.irecv, self._tensor(num_bytes), peer, group))
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def one_way(self, group: Any, size: int, num_bytes: int) -> None:
        """Rank 0 sends to rank 1, batched; the others stand by."""
        self.init(group, size, 0)  # the first batch of a group would wait for all its ranks
        if self.rank < 2:
            kind = dist.isend if self.rank == 0 else dist.irecv
            message = dist.P2POp(kind, self._tensor(num_bytes), 1 - self.rank, group)
            for work in dist.batch_isend_irecv([message]):
                work.wait()

    def unbatched(self, group: Any, size: int, num_bytes: int) -> None:
        """send and recv outside a batch: torch makes a communicator for each pair."""
        tensor = self._tensor(num_bytes)
        if size > 1 and self.rank == 0:
            dist.send(tensor, 1, group=group)
        elif size > 1 and self.rank == 1:
            dist.recv(tensor, 0, group=group)

    def _tensor(self, num_bytes: int) -> Any:
        return torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=self.device)


def _parts(kind: str) -> tuple[str, int]:
    """``all_reduce_64MiB`` -> (all_reduce, bytes); ``init`` has none."""
    operation, _, text = kind.rpartition("_")
    unit = MIB if text.endswith("MiB") else 1024
    return (operation, int(text[:-3]) * unit) if operation else (kind, 0)


def _product(device: Any) -> None:
    a = torch.ones(512, 512, dtype=torch.bfloat16, device=device, requires_grad=True)
    (a @ a).sum().backward()


def _kernels(device: Any) -> None:
    """What a transformer launches: norms, softmax, embedding, gelu, Adam."""
    table = torch.nn.Embedding(64, 64, device=device)
    norm = torch.nn.LayerNorm(64, device=device)
    x = norm(table(torch.arange(32, device=device)))
    loss = torch.nn.functional.gelu(x).softmax(-1).float().log().mean()
    loss.backward()
    adam = torch.optim.AdamW([*table.parameters(), *norm.parameters()])
    adam.step()
    torch.nn.utils.clip_grad_norm_(table.parameters(), 1.0)


# -- all processes --------------------------------------------------------------------------------
def _join(every: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of all ranks by case and step: ``bytes`` is a list, one a member."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in itertools.chain(*every):
        key = (row["case"], row["ranks"], row.get("repeat", 0), row["step"])
        rows.setdefault(key, {**row, "bytes": []})["bytes"].append(row["bytes"])
    return list(rows.values())


def _said(folder: Path) -> list[str]:
    """What NCCL said of versions and channels, once each, without addresses."""
    lines: dict[str, None] = {}
    for path in sorted(folder.glob("nccl-*")):
        for line in path.read_text(errors="replace").splitlines():
            if WORDS.search(line):
                text = line.partition("NCCL INFO")[2] or line
                lines[re.sub(r"0x[0-9a-f]+", "0x", text).strip()] = None
    return list(lines)[:200]


def measure(out: Path, limit_s: float) -> None:
    """One process of torchrun; the first writes ``out``."""
    start, one = time.monotonic(), Rank(limit_s)
    torch.cuda.set_device(one.device)
    one.run()
    every: list[Any] = [None] * one.size
    dist.all_gather_object(every, one.rows, group=one.quiet)
    if one.rank == 0:
        name, nccl = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.nccl.version()))
        source = f"{one.size} x {name}, NCCL {nccl}, torch {torch.__version__}, NVLS off, "
        value = {"format": FORMAT, "source": f"{source}{datetime.date.today()}",
                 "rows": _join(every), "left_out": one.left_out,
                 "nccl_said": _said(Path(os.environ["NCCL_DEBUG_FILE"]).parent),
                 "wall_s": round(time.monotonic() - start, 1)}  # fmt: skip
        if out.exists():  # what a training process takes is measured elsewhere, and kept
            value |= {k: v for k, v in json.loads(out.read_text()).items() if k == "process"}
        out.write_text(json.dumps(value, indent=1) + "\n")
        print(f"{len(value['rows'])} rows in {value['wall_s']} s, {len(one.left_out)} left out")
    one.together()
    os._exit(0)  # taking communicators down is no part of this, and may take long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--limit", type=float, default=45, help="seconds after which cases stop")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.out, args.limit)
    if not 2 <= args.gpus <= torch.cuda.device_count():
        parser.error(f"this takes at least 2 GPUs, here are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        talk = {**SETTINGS, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV",
                "NCCL_DEBUG_FILE": f"{folder}/nccl-%p"}  # fmt: skip
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        words = [sys.executable, *words, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(words, env={**os.environ, **talk}, check=False).returncode)


if __name__ == "__main__":
    main()
