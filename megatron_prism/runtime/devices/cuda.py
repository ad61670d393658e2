"""Stand-ins for ``torch.cuda`` where there is no CUDA device.

``replace_functions(changes)`` replaces the functions and classes that Megatron's start-up, streams,
timers and memory reports touch (facts: 499 textual uses at 0.16.1, 624 at 0.19.0).  Streams and
events are inert: on the CPU and meta tiers everything runs in program order.  Each stand-in says in
its docstring what it stands in for.  Memory questions are answered by the live-byte tracker when
one is running, else by zero, and the run's summary says which.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.jobs.megatron_source import fields_of_class
from megatron_prism.core.process_changes import ProcessChanges

_H200 = types.SimpleNamespace(
    name="megatron_prism stand-in for NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150_754_820_096,  # bytes, as nvidia-smi reports 143,771 MiB
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    is_integrated=False,
)


watcher: Any = None  # a slicer.Recorder while a slice is captured: hears of what follows
capturing: list[Any] = []  # CUDA graphs that are being captured
# hears of copies between device and host that are no operators on tier meta: target, source (of
# these one is a tensor of the device), and whether the host waits
copy_listener: Callable[[object, object, bool], None] | None = None


class Stream:
    """Stands in for torch.cuda.Stream: one program order, so nothing to wait for."""

    device = torch.device("cpu")
    device_index = 0
    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority
        self.cuda_stream = self.stream_id = Stream._count  # the first one is the default stream
        Stream._count += 1

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing is outstanding."""
        host_waits("stream")

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        _streams.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        _streams.pop()


class Event:
    """Stands in for torch.cuda.Event; elapsed_time is 0 because these tiers keep no device time."""

    captured = False  # last recorded in the capture of a CUDA graph

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Recorded at once."""
        self.captured = bool(capturing)
        if watcher is not None:
            watcher.event_recorded(id(self), stream)

    def wait(self, stream: Any = None) -> None:
        """Already complete."""
        if watcher is not None:
            watcher.event_waited(id(self), stream)

    def synchronize(self) -> None:
        """Already complete."""
        if self.captured or not capturing:
            host_waits("event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


# the default stream, the one that the job has set, then those entered and not yet left
_streams = [Stream()] * 2


_NO_MEMORY = types.SimpleNamespace(
    current=lambda: 0,
    peak=lambda: 0,
    reset_peak=lambda: None,
    copied=lambda tensor: None,
    history=None,
)
_memory: Any = _NO_MEMORY  # where the memory questions go


def set_memory_source(source: Any) -> None:
    """Answer memory questions from ``source``, and tell it of copies to the host and from there.

    Args:
        source: has ``current()``, ``peak()``, ``reset_peak()``, ``copied(tensor)`` and ``history``;
            None: nobody.
    """
    global _memory
    _memory = source or _NO_MEMORY


def _memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = _memory.current(), _memory.peak()
    stats: dict[str, int] = {}
    for kind in ("allocated", "reserved", "active", "requested"):
        stats[f"{kind}_bytes.all.current"] = now
        stats[f"{kind}_bytes.all.peak"] = peak
    stats["allocation.all.current"] = 0
    stats["num_alloc_retries"] = stats["num_ooms"] = 0
    return stats


def _cut() -> None:
    if watcher is not None:
        watcher.cut()


class StreamContext:
    """Stands in for torch.cuda.StreamContext, which may be entered again (Megatron does, where
    there are several instances of the distributed optimizer).
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            _cut()
            self.stream.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc)
            _cut()


def _set_stream(stream: Any) -> None:
    _cut()
    _streams[-1] = stream


def _synchronize(device: Any = None) -> None:
    """Nothing is outstanding."""
    host_waits("device")


def current_stream() -> int:
    """The number of the current stream; 0 is the default one."""
    return int(_streams[-1].cuda_stream)


def host_waits(what: str) -> None:
    """The host waits for the device: said to who listens."""
    refuse_while_capturing(what)
    if _memory.history is not None:
        _memory.history.waited()
    if watcher is not None:
        watcher.host_waited(what)


def refuse_while_capturing(what: str) -> None:
    """CUDA refuses that the host waits for what is not launched, but captured."""
    if capturing:
        config = fields_of_class(
            "megatron.core.transformer.transformer_config", "TransformerConfig"
        )
        # 0.18 gave the flag its second name
        option = "modules" if "cuda_graph_modules" in config else "scope"
        fix = f"leave what waits out of --cuda-graph-{option}, or --cuda-graph-impl none"
        raise UnsupportedError(f"the host waits ({what}) while a CUDA graph is captured", fix=fix)


def copied(target: object, source: object, blocks: bool) -> None:
    """Tell who listens that the current stream copies ``source`` to ``target``."""
    of_device = target if isinstance(target, torch.Tensor) and target.is_meta else source
    if isinstance(of_device, torch.Tensor):
        _memory.copied(of_device)
    if copy_listener is not None:
        copy_listener(target, source, blocks)


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    if _memory.history is not None:
        _memory.used(tensor, stream.cuda_stream)


def _empty_cache() -> None:
    """Nothing is cached here; what it would give back matters to reserved bytes."""
    if _memory.history is not None:
        _memory.history.emptied()


def _no_history(*args: Any, **kwargs: Any) -> None:
    """Stands in for torch's recorder of allocations, which only the CUDA allocator feeds."""
    fix = "leave --record-memory-history out: the summary has the peaks, prism memory what is alive"
    raise UnsupportedError("torch records allocations of a CUDA device only", fix=fix)


def _no_graphs(*args: Any, **kwargs: Any) -> None:
    """Stands in for torch.cuda.CUDAGraph; tier meta has another (cuda_graphs.py)."""
    fix = "leave --cuda-graph-impl out, or --prism-tier meta or cuda"
    raise UnsupportedError("CUDA graphs need a CUDA device", fix=fix)


def _no_ranges(*args: Any, **kwargs: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Has no effect without a device."""


def replace_functions(changes: ProcessChanges, num_devices: int = 8) -> None:
    """Put the stand-ins into ``torch.cuda``; ``num_devices`` is what device_count() answers."""
    cuda = torch.cuda
    changes.on_undo(_reset)
    answers = {**_device_answers(num_devices), **_memory_answers(), **_random_answers(num_devices)}
    for name in _WITHOUT_EFFECT:
        answers[name] = _nothing
    for name, answer in answers.items():
        changes.set(cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        changes.set(cuda.random, name, answers[name])
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        changes.set(cuda.nvtx, name, _nothing)
    changes.set(torch.autograd.profiler, "emit_nvtx", _no_ranges)  # --profile at 0.16
    for name, answer in _memory_answers().items():
        changes.set(cuda.memory, name, answer)
    changes.set(cuda.memory, "_record_memory_history", _no_history)
    # its binding insists on a real stream before any function mode is asked
    changes.set(torch.Tensor, "record_stream", _record_stream)
    cudart = types.SimpleNamespace(
        cudaProfilerStart=_nothing, cudaProfilerStop=_nothing, cudaStreamSynchronize=_nothing
    )
    changes.set(cuda, "cudart", lambda: cudart)


def _reset() -> None:
    """As after the import of this module: nobody watches, and the default stream is the first."""
    global watcher, copy_listener
    watcher = copy_listener = None
    capturing.clear()
    set_memory_source(None)
    Stream._count = 0
    _streams[:] = [Stream()] * 2


_WITHOUT_EFFECT = (
    "ipc_collect",
    "set_device",
    "init",
    "_lazy_init",
    "check_error",  # of what cudart() answers, --profile
)


def _device_answers(num_devices: int) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *a, **k: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: _H200.name,
        "get_device_capability": lambda device=None: (_H200.major, _H200.minor),
        "get_device_properties": lambda device=None: _H200,
        "current_stream": lambda device=None: _streams[-1],
        "default_stream": lambda device=None: _streams[0],
        "set_stream": _set_stream,
        "synchronize": _synchronize,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "Stream": Stream,
        "Event": Event,
        "is_current_stream_capturing": lambda: bool(capturing),
        "CUDAGraph": _no_graphs,
        # --log-straggler prints them; there is no device to ask
        **dict.fromkeys(
            ("temperature", "power_draw", "utilization", "clock_rate"), lambda device=None: 0
        ),
        "_lazy_call": lambda call, **kwargs: call(),
    }


def _memory_answers() -> dict[str, Any]:
    total = _H200.total_memory
    now = ("memory_allocated", "memory_reserved", "device_memory_used")
    peaks = ("max_memory_allocated", "max_memory_reserved")
    resets = ("reset_peak_memory_stats", "reset_max_memory_allocated")
    return {
        **dict.fromkeys(now, lambda device=None: _memory.current()),
        **dict.fromkeys(peaks, lambda device=None: _memory.peak()),
        **dict.fromkeys(resets, lambda device=None: _memory.reset_peak()),
        "memory_stats": _memory_stats,
        "empty_cache": _empty_cache,
        "mem_get_info": lambda device=None: (total - _memory.current(), total),
    }


def _random_answers(num_devices: int) -> dict[str, Any]:
    """The device's random state is the host's: tensors are on the host."""
    generator = torch.default_generator
    return {
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), generator.manual_seed),
        "initial_seed": generator.initial_seed,
        "default_generators": (generator,) * num_devices,
    }
