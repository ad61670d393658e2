"""How fast this host issues work: about ten seconds of what Megatron's host time is made of.

Five parts, none of which needs a GPU, so that hosts with and without one compare: operators on tiny
tensors (dispatch), forward and backward of small modules (autograd), plain Python (modules, dicts,
keywords), what stands in for launches and allocations (calls to C, buffers that come and go), and
locks with queues.  They take turns of 50 ms: all of them see the same drift, and a turn is long
enough to feel others on its core as an iteration does.  A ``HostIndex`` comes out.
"""

from __future__ import annotations

import ctypes
import datetime
import platform
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_prism.replay.costs.host_index import HostIndex

_TURN_NS = 50_000_000
_SIZES = (4096, 256, 65536, 1024, 16384, 512)  # bytes, of buffers


def measure(seconds: float = 10.0) -> HostIndex:
    """Run the parts in turns for ``seconds``."""
    parts: dict[str, Callable[[], int]] = {
        "dispatch": _dispatch(),
        "autograd": _autograd(),
        "python": _python(),
        "launches": _launches(),
        "lock": _lock(),
    }
    # one thread: what is measured is one core
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples: dict[str, list[float]] = {name: [] for name in parts}
    try:
        for part in parts.values():  # caches, first allocations
            part()
        # whole turns, so that every part runs at least once
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not samples["lock"]:
            for name, part in parts.items():
                samples[name].append(_turn(part))
    finally:
        torch.set_num_threads(threads)
    times = {name: np.array(values) for name, values in samples.items()}
    return HostIndex.of(
        {name: float(np.median(values)) for name, values in times.items()},
        {name: _spread(values) for name, values in times.items()},
        _where(),
    )


def _turn(part: Callable[[], int]) -> float:
    """ns of a unit, over a turn."""
    units, begin = 0, time.perf_counter_ns()
    while (took := time.perf_counter_ns() - begin) < _TURN_NS:
        units += part()
    return took / units


def _spread(samples: np.ndarray) -> float:
    """Half of what the middle four fifths span, as a part of the median."""
    low, high = np.quantile(samples, [0.1, 0.9])
    return float((high - low) / 2 / np.median(samples))


def _where() -> str:
    name, info = platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {versions}, {datetime.date.today()}"


def _dispatch() -> Callable[[], int]:
    # small tensors: all time is the host's
    a, b, weight = torch.zeros(4, 8), torch.ones(4, 8), torch.ones(8, 8)

    def run() -> int:
        with torch.no_grad():
            for _ in range(60):
                x = torch.matmul(a, weight).add_(b)
                x = x.view(2, 2, 8).transpose(0, 1).contiguous()
                x = torch.cat((x, x), dim=-1)[..., :8].mul(0.5)
                torch.nn.functional.silu(x)
        return 60

    return run


class _Scale(torch.autograd.Function):
    """A function of its own, as Megatron's parallel layers have."""

    @staticmethod
    def forward(ctx, x, by):  # type: ignore[no-untyped-def]
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.by, None


def _autograd() -> Callable[[], int]:
    # a small model with a function of its own, as layers of Megatron have
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)) for _ in range(6)
    )
    x = torch.ones(4, 8, requires_grad=True)

    def run() -> int:
        with torch.enable_grad():
            y = x
            for layer in layers:
                y = y + _Scale.apply(layer(y), 0.5)
            y.sum().backward()
        layers.zero_grad()
        x.grad = None
        return 1

    return run


class _Module:
    """Attributes that are looked up in vain first, keywords, and a table of hooks."""

    def __init__(self) -> None:
        self.table = {f"name{i}": i for i in range(20)}
        self.hooks: dict[int, Callable[..., int]] = {}

    def __getattr__(self, name: str) -> int:
        return self.__dict__["table"].get(name, 0)

    def __call__(self, *args: int, **more: int) -> int:
        for hook in tuple(self.hooks.values()):
            hook(*args)
        return self.forward(*args, **more)

    def forward(self, x: int, scale: int = 1, **more: int) -> int:
        """Some work of the interpreter alone."""
        merged = {**self.table, **more}
        return x + scale + self.name3 + len(merged) + (1 if isinstance(x, int) else 0)


def _python() -> Callable[[], int]:
    module = _Module()

    def run() -> int:
        x = 0
        for number in range(400):
            x = module(x % 7, scale=2, name4=number)
        return 400

    return run


def _launches() -> Callable[[], int]:
    clock = ctypes.CDLL(None).clock
    device = torch.device("cpu")

    def run() -> int:
        # a call of C and an allocation, as each kernel's launch has
        live_tensors: list[torch.Tensor] = []
        for number in range(150):
            clock()
            live_tensors.append(torch.empty(_SIZES[number % 6], dtype=torch.uint8, device=device))
            if len(live_tensors) > 8:
                live_tensors.pop(0)
        return 150

    return run


def _lock() -> Callable[[], int]:
    # what pairs of threads do: locks, a queue, a signal
    lock, condition = threading.RLock(), threading.Condition()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run() -> int:
        for number in range(300):
            with lock, lock:
                waiting.put(number)
            with condition:
                condition.notify_all()
            waiting.get()
        return 300

    return run
