"""How much device memory does a process hold that no allocator sees: context, libraries, NCCL?

``python -m benchmarks.tools.device_memory -o FILE.json`` on a machine of 2 to 8 GPUs (plain torch,
under a minute; it starts its own processes).  On every GPU it follows used - reserved bytes

- while a process comes up: context, cuBLAS, first kernels;
- while communicators of 1, 2, … N ranks are made and used, one operation after the other on one
  communicator (``in turn``), and each operation alone on a fresh communicator (``alone``).

The package reads the file: ``prism memory record DIR device=FILE.json``; the shipped one is
``megatron_prism/memory/device_memory/h200.json``.  ``--cpu`` runs the same on gloo and host memory,
to try the script; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FORMAT = 1
MIB = 1 << 20
# NVLS off as in every run of ours on this host; quotes from NCCL about its channels
SETTINGS = {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "2"}
TALK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}
WORDS = re.compile(r"NCCL version|channels|nNodes|comm 0x\S+ rank|Chunksize", re.IGNORECASE)
REPEATS = 2  # of a case: the first pays what is paid once per process
KINDS = ("init", "all_reduce_1KiB", "all_reduce_64MiB", "all_gather_16MiB", "reduce_scatter_16MiB",
         "broadcast_16MiB", "neighbours_1MiB", "neighbours_64MiB", "all_to_all_16MiB")  # fmt: skip
ALONE = ("all_reduce_1KiB", "all_reduce_64MiB", "all_gather_16MiB", "reduce_scatter_16MiB",
         "one_way_16MiB", "neighbours_16MiB", "all_to_all_16MiB", "unbatched_16MiB")  # fmt: skip


# -- one process ----------------------------------------------------------------------------------
class Rank:
    """One process of the measurement: its device, and the rows it found."""

    def __init__(self, cpu: bool, limit_s: float) -> None:
        import torch
        from torch import distributed as dist

        self.torch, self.dist, self.cpu = torch, dist, cpu
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.end = time.monotonic() + limit_s
        self.device = torch.device("cpu") if cpu else torch.device("cuda", self.rank)
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def used(self) -> int:
        """Bytes of the device that torch's allocator does not hold (``--cpu``: resident bytes)."""
        if self.cpu:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        cuda = self.torch.cuda
        cuda.synchronize()
        free, total = cuda.mem_get_info()
        return total - free - cuda.memory_reserved()

    def together(self) -> None:
        """Every process has come here; over gloo, which takes no device memory."""
        self.dist.barrier(group=self.quiet)

    def run(self) -> None:
        dist = self.dist
        self.start_up()
        dist.init_process_group("gloo" if self.cpu else "nccl", timeout=datetime.timedelta(0, 120))
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
        torch, before = self.torch, 0
        for step, work in (
            ("context", lambda: torch.empty(1, device=self.device)),
            ("cuBLAS", lambda: _product(torch, self.device)),
            ("kernels", lambda: _kernels(torch, self.device)),
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
        group = self.dist.new_group(list(range(size)))
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
        self.dist.broadcast_object_list(late, src=0, group=self.quiet)
        return late[0]

    # -- operations: group, its size, bytes of the message -----------------------------------------
    def init(self, group: Any, size: int, num_bytes: int) -> None:
        """The communicator alone, without a connection."""
        if not self.cpu:
            group._get_backend(self.device).eager_connect_single_device(self.device)

    def all_reduce(self, group: Any, size: int, num_bytes: int) -> None:
        self.dist.all_reduce(self._tensor(num_bytes), group=group)

    def broadcast(self, group: Any, size: int, num_bytes: int) -> None:
        self.dist.broadcast(self._tensor(num_bytes), 0, group=group)

    def all_gather(self, group: Any, size: int, num_bytes: int) -> None:
        whole = self._tensor(num_bytes * size)
        self.dist.all_gather_into_tensor(whole, self._tensor(num_bytes), group=group)

    def reduce_scatter(self, group: Any, size: int, num_bytes: int) -> None:
        if self.cpu:  # gloo has none
            return
        whole = self._tensor(num_bytes * size)
        self.dist.reduce_scatter_tensor(self._tensor(num_bytes), whole, group=group)

    def all_to_all(self, group: Any, size: int, num_bytes: int) -> None:
        if self.cpu:
            return
        whole = self._tensor(num_bytes * size)
        self.dist.all_to_all_single(self._tensor(num_bytes * size), whole, group=group)

    def neighbours(self, group: Any, size: int, num_bytes: int) -> None:
        """Both ways between neighbours of a line, batched, as a pipeline does."""
        if size == 1:
            return
        dist, messages = self.dist, []
        for peer in (self.rank - 1, self.rank + 1):
            if 0 <= peer < size:
                messages.append(dist.P2POp(dist.isend, self._tensor(num_bytes), peer, group))
                messages.append(dist.P2POp(dist.irecv, self._tensor(num_bytes), peer, group))
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def one_way(self, group: Any, size: int, num_bytes: int) -> None:
        """Rank 0 sends to rank 1, batched; the others stand by."""
        dist = self.dist
        self.init(group, size, 0)  # the first batch of a group would wait for all its ranks
        if self.rank < 2:
            kind = dist.isend if self.rank == 0 else dist.irecv
            message = dist.P2POp(kind, self._tensor(num_bytes), 1 - self.rank, group)
            for work in dist.batch_isend_irecv([message]):
                work.wait()

    def unbatched(self, group: Any, size: int, num_bytes: int) -> None:
        """send and recv outside a batch: torch makes a communicator for each pair."""
        dist, tensor = self.dist, self._tensor(num_bytes)
        if size > 1 and self.rank == 0:
            dist.send(tensor, 1, group=group)
        elif size > 1 and self.rank == 1:
            dist.recv(tensor, 0, group=group)

    def _tensor(self, num_bytes: int) -> Any:
        return self.torch.zeros(num_bytes // 2, dtype=self.torch.bfloat16, device=self.device)


def _parts(kind: str) -> tuple[str, int]:
    """``all_reduce_64MiB`` -> (all_reduce, bytes); ``init`` has none."""
    operation, _, text = kind.rpartition("_")
    unit = MIB if text.endswith("MiB") else 1024
    return (operation, int(text[:-3]) * unit) if operation else (kind, 0)


def _product(torch: Any, device: Any) -> None:
    a = torch.ones(512, 512, dtype=torch.bfloat16, device=device, requires_grad=True)
    (a @ a).sum().backward()


def _kernels(torch: Any, device: Any) -> None:
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
def _rank_main(cpu: bool, limit_s: float, folder: Path) -> None:
    one = Rank(cpu, limit_s)
    if not cpu:
        one.torch.cuda.set_device(one.device)
    one.run()
    found = {"rank": one.rank, "rows": one.rows, "left_out": one.left_out}
    (folder / f"rank-{one.rank}.json").write_text(json.dumps(found))
    one.together()
    os._exit(0)  # taking communicators down is no part of this, and may take long


def _join(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all ranks by case and step: ``bytes`` is a list, one a member."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in found:
        for row in one["rows"]:
            key = (row["case"], row["ranks"], row.get("repeat", 0), row["step"])
            entry = rows.setdefault(key, {**row, "bytes": []})
            entry["bytes"].append(row["bytes"])
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


def measure(num: int, cpu: bool, limit_s: float) -> dict[str, Any]:
    """Start ``num`` processes and join what they found; RuntimeError with a log if one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, **SETTINGS, **TALK, "MASTER_ADDR": "localhost"}
        environment |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(num)}
        environment["NCCL_DEBUG_FILE"] = str(folder / "nccl-%p")
        me = [sys.executable, __file__, "--rank-of", name, "--limit", str(limit_s)]
        me += ["--cpu"] if cpu else []
        started = []
        for rank in range(num):
            with open(folder / f"log-{rank}", "w") as log:
                env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(subprocess.Popen(me, env=env, stdout=log, stderr=log))
        end = time.monotonic() + limit_s + 60
        try:
            states = [p.wait(max(1, end - time.monotonic())) for p in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
        bad = [rank for rank, state in enumerate(states) if state]
        if bad:
            log = (folder / f"log-{bad[0]}").read_text()[-3000:]
            raise RuntimeError(f"rank {bad[0]} ended with status {states[bad[0]]}:\n{log}")
        found = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(num)]
        return {"rows": _join(found), "left_out": found[0]["left_out"], "nccl_said": _said(folder)}


def _source(cpu: bool, num: int) -> str:
    import torch

    today = datetime.date.today()
    if cpu:
        return f"gloo on a CPU, resident bytes of the host: no figures, torch {torch.__version__}"
    name, nccl = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.nccl.version()))
    return f"{num} x {name}, NCCL {nccl}, torch {torch.__version__}, NVLS off, {today}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="out", type=Path, help="JSON to write; else it is printed")
    parser.add_argument("--gpus", type=int, default=None, help="processes (default: all GPUs)")
    parser.add_argument("--cpu", action="store_true", help="gloo on CPUs: tries the script")
    parser.add_argument("--limit", type=float, default=45, help="seconds after which cases stop")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        _rank_main(args.cpu, args.limit, args.rank_of)
    import torch

    num = args.gpus or (3 if args.cpu else torch.cuda.device_count())
    if num < 2 or not args.cpu and num > torch.cuda.device_count():
        parser.error(f"this takes at least 2 GPUs, here are {torch.cuda.device_count()}")
    start = time.monotonic()
    found = measure(num, args.cpu, args.limit)
    value = {"format": FORMAT, "source": _source(args.cpu, num), **found}
    value["wall_s"] = round(time.monotonic() - start, 1)
    if args.out is None:
        print(json.dumps(value, indent=1))
    else:
        if args.out.exists():  # what a training process takes is measured elsewhere, and kept
            value |= {k: v for k, v in json.loads(args.out.read_text()).items() if k == "process"}
        args.out.write_text(json.dumps(value, indent=1) + "\n")
        print(
            f"{len(found['rows'])} rows in {value['wall_s']} s, {len(found['left_out'])} left out"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
