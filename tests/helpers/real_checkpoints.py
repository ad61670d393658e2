"""Saves and loads checkpoints with real ranks over gloo: torch is imported once, a rank is a fork.

A script: a line of stdin is a JSON object of one world, {"size": ranks, "flags": of prism run,
"words": of the job, "folder": for logs}, a line of stdout a JSON list of [status, output] of its
ranks.  ``reads-<rank>.json`` in the folder is file -> bytes of stored shards that torch has read.
It ends with its stdin.
"""

import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys

from helpers import stock_jobs

PATIENCE_S = 500


class Worlds:
    """Runs worlds of ranks, one after the other; a context manager."""

    def __enter__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NVTE_DEBUG": "0"}
        environment["PYTHONPATH"] = str(pathlib.Path(__file__).parents[1])
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *error):
        self.process.communicate()

    def run(self, size, words, folder, flags=()):
        """[(status, output)] of the ranks of one world."""
        folder.mkdir(parents=True, exist_ok=True)
        world = {"size": size, "flags": list(map(str, flags)), "folder": str(folder)}
        world["words"] = [str(stock_jobs.TINY), *map(str, words)]
        self.process.stdin.write(json.dumps(world) + "\n")
        self.process.stdin.flush()
        return [tuple(answer) for answer in json.loads(self.process.stdout.readline())]

    def real(self, size, words, folder):
        """[(status, output)] of a real job, which writes its checkpoints."""
        return self.run(
            size, words, folder, ["--prism-tier", "cpu", "--prism-record", folder / "r"]
        )

    def plan(self, size, rank, words, folder):
        """What a rank of a job on shapes plans to read."""
        flags = ["--prism-tier", "meta", "--prism-plan-load", "--prism-ranks", rank]
        ((status, said),) = self.run(1, words, folder, [*flags, "--prism-world-size", size])
        lines = [line for line in said.splitlines() if line.startswith('{"requests"')]
        assert lines, (status, said[-3000:])
        return json.loads(lines[-1])


def _rank(world, rank, port, path):
    """Run one rank in this fork."""
    from torch.distributed import checkpoint

    with open(os.devnull) as nothing, open(path, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.alarm(PATIENCE_S)
    is_real = "--prism-plan-load" not in world["flags"]
    if is_real:
        size = str(world["size"])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        world["flags"] += ["--prism-world-size", size]
        read_bytes, counted = checkpoint.FileSystemReader.read_data, {}

        def read(reader, plan, planner):
            for item in plan.items:
                place = reader.storage_data[item.storage_index]
                counted[place.relative_path] = counted.get(place.relative_path, 0) + place.length
            target = pathlib.Path(world["folder"]) / f"reads-{rank}.json"
            target.write_text(json.dumps(counted))
            return read_bytes(reader, plan, planner)

        checkpoint.FileSystemReader.read_data = read
    sys.argv = ["prism", "run", *world["flags"], "--", *world["words"]]
    runpy.run_module("megatron_prism", run_name="__main__", alter_sys=True)
    raise SystemExit("prism run came back without a status")


def main():
    for name in stock_jobs.PREPARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        world = json.loads(line)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        paths = [f"{world['folder']}/log-{rank}" for rank in range(world["size"])]
        pids = []
        for rank, path in enumerate(paths):
            pid = os.fork()
            if not pid:
                return _rank(world, rank, port, path)
            pids.append(pid)
        answers = []
        for pid, path in zip(pids, paths, strict=True):
            _, status = os.waitpid(pid, 0)
            said = pathlib.Path(path).read_text(errors="replace")
            answers.append([os.waitstatus_to_exitcode(status), said])
        print(json.dumps(answers), flush=True)
    return None


if __name__ == "__main__":
    main()
