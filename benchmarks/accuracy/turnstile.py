"""A process whose train steps happen in turns: it waits before a step until that step may begin.

``python benchmarks/accuracy/turnstile.py DIR (-m MODULE | SCRIPT) arguments…`` imports what takes
long, waits for ``DIR/go`` and runs SCRIPT. ``go`` holds how many train steps may have begun. At
every stop the device is idle; ``DIR/rank-N.json`` then holds how many steps were made, when each
began (ns of the clock that all processes of a host share), the peaks so far, what is reserved now
and what the driver says that the process holds of its own GPU and of others, in bytes, the mean
power of its GPU in every turn, in watts, and of paced peers how many calls were late. ``run.py`` is
at the other end. The script is a stock one, or one under ``megatron_prism run``: what runs between
two stops is untouched. With TURNS_HOST=1 in the environment the file also says what the host did in
every step: calls of process groups, ns in them, ns of garbage collection, ns of processor time
(clocks take about 1 us a call). A turn that begins while ``DIR/kernels`` exists is recorded:
``DIR/kernels-N.json`` then has [name, stream, start, ns] of everything that the device did in it.

With TURNS_PLACES=N in the environment the process keeps to one N-th of the cores: number
TURNS_PLACE (0), or as many behind it as torchrun's LOCAL_RANK says. A rank alone then runs on the
cores of its twin in the real job, so neither is quicker because of where it was put. Whether these
are near its GPU nobody looks.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.005  # between two looks at ``go``
_METHODS = ("allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base",
            "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "barrier", "send",
            "recv", "_start_coalescing", "_end_coalescing")  # fmt: skip
_HEAVY = (
    "numpy",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformer_engine.pytorch",
)


class Host:
    """What the host does, added up: ``read`` gives [calls, ns in calls, ns of gc, ns of cpu]."""

    def __init__(self) -> None:
        self.calls = self.in_calls = self.in_gc = self._gc_began = 0
        self.methods: dict[str, list[int]] = {}

    def install(self) -> None:
        """Time the methods of the job's process groups, and the garbage collector."""
        from torch import distributed as dist

        kind = type(dist.distributed_c10d._get_default_group())
        for name in _METHODS:
            setattr(kind, name, self._timed(name, getattr(kind, name)))
        gc.callbacks.append(self._collected)

    def _timed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            made = method(*args, **kwargs)
            ns = time.perf_counter_ns() - begin
            self.calls += 1
            self.in_calls += ns
            self.methods.setdefault(name, []).append(ns)
            return made

        return call

    def _collected(self, phase: str, info: Any) -> None:
        now = time.perf_counter_ns()
        if phase == "start":
            self._gc_began = now
        else:
            self.in_gc += now - self._gc_began

    def read(self) -> list[int]:
        return [self.calls, self.in_calls, self.in_gc, time.process_time_ns()]


class Turnstile:
    """Lets a process through while ``go`` allows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts: list[int] = []
        self.host = Host() if os.environ.get("TURNS_HOST") else None
        self.read: list[list[int]] = []  # of the host, when each step began
        self.recorder: Any = None  # of kernels, during a turn that is recorded
        self.watts: list[float] = []  # of each turn
        self._since: tuple[int, int] | None = None  # ns and mJ when the turn began

    def allowed(self) -> int:
        """How many steps may have begun; -1 as long as nothing may."""
        try:
            return int((self.folder / "go").read_text() or -1)
        except FileNotFoundError:
            return -1

    def step(self) -> None:
        """Before a train step."""
        if len(self.starts) >= self.allowed():
            self.tell()
            self.wait(len(self.starts) + 1)
            if (capture := sys.modules.get("megatron_prism.emulate.capture")) is not None:
                capture.disturbed()  # what is recorded now has the wait in it
            self.record()
            self._since = _energy()
        if self.host is not None:
            self.read.append(self.host.read())
        self.starts.append(time.monotonic_ns())

    def wait(self, steps: int) -> None:
        """Until ``steps`` may have begun; whose parent is gone waits for nobody."""
        parent = os.getppid()
        while self.allowed() < steps:
            if os.getppid() != parent:
                raise SystemExit("the job that this one took turns with has ended")
            time.sleep(LOOK_S)

    def record(self) -> None:
        """Record the kernels of the turn that begins, if asked to."""
        if (self.folder / "kernels").exists():
            from torch.profiler import ProfilerActivity, profile

            self.recorder = profile(activities=[ProfilerActivity.CUDA])
            self.recorder.start()

    def recorded(self) -> None:
        """Write what was recorded."""
        if self.recorder is not None:
            self.recorder.stop()
            found = self.recorder.profiler.kineto_results.events()
            kernels = [(e.name(), e.device_resource_id(), e.start_ns(), e.duration_ns())
                       for e in found if e.device_type().name == "CUDA"]  # fmt: skip
            self.recorder = None
            self._write("kernels", sorted(kernels, key=lambda kernel: kernel[2]))

    def _write(self, kind: str, found: Any) -> None:
        file = self.folder / f"{kind}-{os.environ.get('RANK', '0')}.json"
        new = file.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(file)

    def tell(self) -> None:
        """Come to rest and say how far this process is."""
        import torch

        found = {"steps": len(self.starts), "starts_ns": self.starts}
        cuda = torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
        stopped_ns = time.monotonic_ns()  # what follows takes time of its own
        host = self.host.read() if self.host is not None else None
        if cuda:
            if self._since is not None and (now := _energy()) is not None:
                spent = [end - begin for begin, end in zip(self._since, now, strict=True)]
                self.watts.append(round(1e6 * spent[1] / spent[0], 1))
            found["watts"] = self.watts
            self.recorded()
            found["allocated_peak"] = torch.cuda.max_memory_allocated()
            found["reserved_peak"] = torch.cuda.max_memory_reserved()
            found["segments"] = _segments(torch.cuda.memory_snapshot())
            found["device_bytes"] = _device_bytes()
            found["paced"] = _paced()
        if host is not None:
            found["host"] = [*self.read, host]
            found["methods"] = {k: [len(v), sorted(v)[len(v) // 2]]
                                for k, v in self.host.methods.items()}  # fmt: skip
        found["stopped_ns"] = stopped_ns
        self._write("rank", found)

    def install(self) -> None:
        """Wrap ``train_step`` once everybody else has, which is when training begins."""
        from megatron_prism.emulate.import_hooks import after_import

        def at_training(module: Any) -> None:
            train = module.train

            def whole(*args: Any, **kwargs: Any) -> Any:
                train_step = module.train_step

                def step(*args: Any, **kwargs: Any) -> Any:
                    self.step()
                    return train_step(*args, **kwargs)

                module.train_step = step
                if self.host is not None:
                    self.host.install()
                return train(*args, **kwargs)

            module.train = whole

        after_import("megatron.training.training", at_training)


def _paced() -> dict[str, Any]:
    """How many calls of the last iteration were paced, and how many of them ended late, by how many
    us; {} in a process whose peers are not paced."""
    session = sys.modules.get("megatron_prism.runtime.virtual_world")
    world = session.current() if session is not None else None
    callers = [one for one in world.listeners if hasattr(one, "record")] if world else []
    pacer = callers[-1] if callers else None
    pacer = getattr(pacer, "pacer", pacer)  # of a rank that is recorded at pace
    if not hasattr(pacer, "launcher"):
        return {}
    from megatron_prism.runtime.pacing.pacer import summary

    found = summary(pacer, pacer.launcher.stamps(), {})
    return {k: found[k] for k in ("calls_paced", "late_calls", "late_us") if k in found}


def _segments(snapshot: list[dict[str, Any]]) -> list[list[Any]]:
    """[pool, on the default stream, segments, bytes of them, bytes in use, {size of a segment: how
    many}] by pool and stream, largest first: where do the reserved bytes of two ranks differ?"""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for segment in snapshot:
        found.setdefault((segment["segment_type"], segment["stream"]), []).append(segment)
    rows = []
    for (pool, stream), segments in found.items():
        total, used = (sum(s[key] for s in segments) for key in ("total_size", "allocated_size"))
        sizes = Counter(s["total_size"] for s in segments)
        rows.append([pool, stream == 0, len(segments), total, used, dict(sorted(sizes.items()))])
    return sorted(rows, key=lambda row: -row[3])


def _device_bytes() -> dict[str, int]:
    """What this process holds of its own GPU and of all others, as the driver says; {} where it
    does not tell (no NVML, or a container that hides the numbers of processes)."""
    try:
        import pynvml
    except ImportError:
        return {}
    import torch

    own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    found: dict[str, int] = {}
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(gpu)
            whose = "own" if str(uuid).endswith(own) else "others"
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    found[whose] = found.get(whose, 0) + int(process.usedGpuMemory)
    return found


def _energy() -> tuple[int, int] | None:
    """(ns of the host's clock, mJ that this process's GPU has used); None without NVML."""
    found = None
    with suppress(ImportError):
        import pynvml
        import torch

        own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{own}")
            found = time.monotonic_ns(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    return found


def _preload() -> None:
    for name in _HEAVY:
        with suppress(ImportError):  # whatever a job needs and lacks it says itself
            importlib.import_module(name)


def keep_to_place() -> None:
    """Stay on this rank's share of the cores; threads that start later inherit it."""
    if places := int(os.environ.get("TURNS_PLACES", "0")):
        place = int(os.environ.get("TURNS_PLACE", "0")) + int(os.environ.get("LOCAL_RANK", "0"))
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // places)
        first = place * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])


def main() -> None:
    keep_to_place()
    turnstile = Turnstile(Path(sys.argv[1]))
    program = sys.argv[2:]
    _preload()
    turnstile.wait(0)
    turnstile.install()
    if program[0] == "-m":
        sys.argv = program[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")
    turnstile.tell()


if __name__ == "__main__":
    main()
