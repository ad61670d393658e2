"""A process whose train steps happen in turns: it waits before a step until that step may begin.

``python benchmarks/accuracy/turnstile.py DIR (-m MODULE | SCRIPT) arguments…`` imports what takes
long, waits for ``DIR/go`` and runs SCRIPT. ``go`` holds how many train steps may have begun. At
every stop the device is idle; ``DIR/rank-N.json`` then holds how many steps were made, when each
began (ns of the clock that all processes of a host share), the peaks so far, and what the driver
says that the process holds of its own GPU and of others, in bytes. ``run.py`` is at the other end.
The script is a stock one, or one under ``megatron_prism run``: what runs between two stops is
untouched.

With TURNS_PLACES=N in the environment the process keeps to one N-th of the cores: number
TURNS_PLACE (0), or as many behind it as torchrun's LOCAL_RANK says. A rank alone then runs on the
cores of its twin in the real job, so neither is quicker because of where it was put. Whether these
are near its GPU nobody looks.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.005  # between two looks at ``go``
_HEAVY = (
    "numpy",
    "torch._dynamo",
    "torch._inductor.config",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformer_engine.pytorch",
)


class Turnstile:
    """Lets a process through while ``go`` allows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts: list[int] = []

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
            if (capture := sys.modules.get("megatron_prism.emulate.capture.capture")) is not None:
                capture.disturbed()  # what is recorded now has the wait in it
        self.starts.append(time.monotonic_ns())

    def wait(self, steps: int) -> None:
        """Until ``steps`` may have begun; whose parent is gone waits for nobody."""
        parent = os.getppid()
        while self.allowed() < steps:
            if os.getppid() != parent:
                raise SystemExit("the job that this one took turns with has ended")
            time.sleep(LOOK_S)

    def tell(self) -> None:
        """Come to rest and say how far this process is."""
        import torch

        found: dict[str, Any] = {"steps": len(self.starts), "starts_ns": self.starts}
        cuda = torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
        found["stopped_ns"] = time.monotonic_ns()  # what follows takes time of its own
        if cuda:
            found["allocated_peak"] = torch.cuda.max_memory_allocated()
            found["reserved_peak"] = torch.cuda.max_memory_reserved()
            found["device_bytes"] = _device_bytes()
        file = self.folder / f"rank-{os.environ.get('RANK', '0')}.json"
        new = file.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(file)

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
                return train(*args, **kwargs)

            module.train = whole

        after_import("megatron.training.training", at_training)


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
