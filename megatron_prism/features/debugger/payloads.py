"""Keep what chosen calls of a real rank delivered, and give it to the rank when it runs alone.

``PayloadRecorder`` follows a run in which all ranks are local; ``PayloadReplayer`` overwrites what
virtual peers would have delivered, so that forward and backward are those of the recorded run.  A
call is known by where it was made: iteration, step, group, operation, and how many like it came
before.  Byte tensors (pickled objects) are left alone.

File ``payload-NNNNNN.bin``: records of two lengths, a JSON head and compressed data.  Each is
flushed, so that a run that fails leaves what it had seen until then; what is cut off is dropped.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import re
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import CallLabel, label
from megatron_prism.core.units import format_bytes
from megatron_prism.features.debugger.debugger import Breakpoint
from megatron_prism.graph.difference import ComparedOp
from megatron_prism.runtime.listeners import LabelledCalls
from megatron_prism.runtime.process_group import ForwardedWork, arguments
from megatron_prism.runtime.recorded_values import check_arguments, check_header

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run
    from megatron_prism.features.debugger.options import PayloadOptions
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup
    from megatron_prism.runtime.recorder.owners import Models

FORMAT = 1
MOST_BYTES = 8 << 30  # of a file; what comes then is not kept
_WAITING = 32  # records that the writer may lag behind: it bounds the memory
_HEAD = struct.Struct("<II")
_MOST_HEAD = 1 << 22  # bytes; the arguments of a job are some kilobytes
_AGAIN = "record again with --prism-record"


def add_to(run: Run, asked: PayloadOptions) -> None:
    """Keep what calls deliver, or give it back where a recording has it."""
    options = run.options
    header: dict[str, object] = {"world": str(options.world)}
    follower: PayloadRecorder | PayloadReplayer
    if asked.calls is not None:
        assert options.record is not None, "the flags were checked"
        # what virtual ranks deliver is no payload of the real job
        num_virtual = options.world.size - len(options.ranks)
        if num_virtual:
            header["virtual"] = num_virtual
        follower = PayloadRecorder(asked.calls, options.record, options.rank, header)
    else:
        folder = asked.replay_from
        # a recording of control values alone
        if folder is None or not file_of(folder, options.rank).exists():
            return
        follower = PayloadReplayer(folder, options.rank, header)
    run.follow_calls(follower)
    run.follow_training(follower)
    run.on_arguments.append(follower.is_of)


def file_of(folder: Path, rank: int) -> Path:
    """Where payloads of ``rank`` lie."""
    return folder / f"payload-{rank:06d}.bin"


class _Keyed(LabelledCalls):
    """Names every call the same way in the real run and in the emulated one."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Counter[str] = Counter()

    def iteration_started(self, number: int, wanted: int, model: Models, optimizer: object) -> None:
        super().iteration_started(number, wanted, model, optimizer)
        self._numbers.clear()

    def key(self, group: PrismGroup, op: str) -> tuple[CallLabel, str]:
        """The call that is made now, and its name."""
        call, name = self._named(group, op)
        self._numbers[name] += 1
        return call, f"{name} #{self._numbers[name]}"

    def _named(self, group: PrismGroup, op: str) -> tuple[CallLabel, str]:
        call = self.label(op, group.desc, "")
        step = label(call.phase, call.microbatch, call.chunk)
        return call, f"{self.iteration} {step} {op} {group.desc}"


def _filled(op: str, args: Args) -> list[torch.Tensor]:
    """The tensors that a call fills, without bytes of pickled objects."""
    return [t for t in arguments(op, args)[1] if t.dtype != torch.uint8 and t.numel()]


class _KeptWork(ForwardedWork):
    """The handle of a call, which keeps its result when it has arrived."""

    def __init__(self, work: dist.Work, keep: Callable[[], None]) -> None:
        super().__init__(work)
        self._keep: Callable[[], None] | None = keep

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = super().wait(timeout)
        # waited for twice, and kept once
        keep, self._keep = self._keep, None
        if keep is not None:
            keep()
        return done


_RANGE = re.compile(
    r"(?<![^\s,])(?:(\w+=)(\d{1,9})\.\.(\d{1,9})"
    r"|(\d{0,9})([FBW])(\d{0,9})\.\.(\d{0,9})\5(\d{0,9}))(?![^\s,])"
)
_MOST_STEPS = 256  # that a range may stand for


def _selected(text: str) -> list[Breakpoint]:
    """The calls that ``text`` selects, one selector for each step of a range.

    Raises UsageError for a range that goes backwards or has more than 256 steps.
    """
    span = _RANGE.search(text)
    if span is None:
        selector = Breakpoint.parse(text)
        if selector.number:
            raise UsageError(
                f"--prism-payload {text!r}: #{selector.number} counts from the job's start",
                fix=f"nth={selector.number}, which counts the calls that fit",
            )
        return [selector]
    steps = _steps_of(span)
    if not 0 < len(steps) <= _MOST_STEPS:
        raise UsageError(
            f"--prism-payload {text!r}: {span[0]} is no range of 1 to {_MOST_STEPS} steps",
            fix="3B0..3B2, or iter=51..53",
        )
    # the text with one step in the place of the range
    before, after = text[: span.start()], text[span.end() :]
    selectors = list[Breakpoint]()
    for step in steps:  # the text may have further ranges
        selectors += _selected(before + step + after)
    return selectors


def _steps_of(span: re.Match[str]) -> list[str]:
    """The steps of a range: iter=51 …, or 3B0 … of microbatches and chunks."""
    key, first, last, first_microbatch, phase, first_chunk, last_microbatch, last_chunk = (
        span.groups()
    )
    # iterations are counted by one number, steps by microbatch and chunk
    if key:
        return [f"{key}{number}" for number in _between(first, last)]
    steps = list[str]()
    for microbatch in _between(first_microbatch, last_microbatch):
        for chunk in _between(first_chunk, last_chunk):
            steps.append(f"{microbatch}{phase}{chunk}")
    return steps


def _between(first: str, last: str) -> Sequence[int | str]:
    """Numbers from ``first`` to ``last``; "" where neither is given."""
    if not first and not last:
        return [""]
    # half a range, or one that is too long: no steps, which is refused
    if not first or not last or int(last) - int(first) >= _MOST_STEPS:
        return []
    return range(int(first), int(last) + 1)


class PayloadRecorder(_Keyed):
    """Keeps what calls that fit ``text`` deliver to this rank.

    text : ``all``, or selectors as of --prism-break with ``;`` between them, perhaps with ranges
           (``3B0..3B2``, ``iter=51..53``)

    Raises UsageError for a selector that names no call.
    """

    def __init__(self, text: str, folder: Path, rank: int, header: Mapping[str, object]) -> None:
        super().__init__()
        self._selectors = []
        # no selectors: all calls fit
        if text != "all":
            for part in text.split(";"):
                self._selectors += [selected.select for selected in _selected(part)]
        self.path = file_of(folder, rank)
        self._own_ns = 0
        self.count = self.raw = self.written = self.lost = 0
        self._queue: queue.Queue[tuple[dict[str, object], bytes] | None] = queue.Queue(_WAITING)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "wb")  # noqa: SIM115 - as long as the run
        self._thread = threading.Thread(target=self._write, name="prism-payloads", daemon=True)
        self._thread.start()
        self._queue.put(({"format": FORMAT, "rank": rank, **header}, b""))
        atexit.register(self.close)  # of a run that fails

    def is_of(self, arguments: str) -> None:
        """The job's arguments are known now."""
        self._queue.put(({"arguments": arguments}, b""))

    def record(
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        call, key = self.key(group, op)
        work = self.through(group, op, answer, args, kwargs)
        # without selectors all calls; those that deliver nothing are left out
        fits = not self._selectors or any(selector.fits(call) for selector in self._selectors)
        if not fits or op == "send" or len(group.ranks) < 2:
            return work
        filled = _filled(op, args)
        if not filled:
            return work
        # a call that returns no handle has arrived
        if work is None:
            self._keep(key, filled)
            return None
        return _KeptWork(work, lambda: self._keep(key, filled))

    def _keep(self, key: str, filled: Sequence[torch.Tensor]) -> None:
        start = time.perf_counter_ns()
        for place, tensor in enumerate(filled):
            # a copy: the job goes on and may write to the tensor
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
            data = flat.numpy().tobytes()
            shape = list(tensor.shape)
            head: dict[str, object] = {"key": f"{key}.{place}", "shape": shape}
            head["dtype"] = str(tensor.dtype)
            self._queue.put((head, data))
            self.raw += len(data)
        self.count += 1
        self._own_ns += time.perf_counter_ns() - start

    def _write(self) -> None:
        """Of the thread: compress and write, until there is no more."""
        while (record := self._queue.get()) is not None:
            head, data = record
            # the quickest: the job must not wait for it
            packed = zlib.compress(data, 1)
            # the disk must not fill up; later payloads may be small enough
            if self.written + len(packed) > MOST_BYTES:
                self.lost += 1
                continue
            text = json.dumps(head).encode()
            self._file.write(_HEAD.pack(len(text), len(packed)) + text + packed)
            self._file.flush()
            self.written += len(packed)

    def close(self) -> None:
        """Wait until all is written; harmless a second time."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            self._file.close()

    def finished(self) -> None:
        self.close()
        lost = ""
        # the file has a bound, so that a long job does not fill the disk
        if self.lost:
            lost = f"; {self.lost:,} beyond {format_bytes(MOST_BYTES)} were not kept"
        sys.stderr.write(
            f"prism: payloads of {self.count:,} calls in {self.path}: {format_bytes(self.raw)}, "
            f"{format_bytes(self.written)} compressed; it took this rank {self._own_ns / 1e9:.2f} s"
            f"{lost}\n"
        )


@dataclass(frozen=True)
class _Record:
    """What the head of a record says."""

    key: str
    dtype: str
    shape: list[foreign.Natural]


_NOTHING = (0, 0, _Record("", "", []))


class _Recorded:
    """A file of payloads, open: its ``header``, and where what every key delivered is.

    Raises UsageError for a foreign file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, dict[str, object]()
        self.at: dict[str, tuple[int, int, _Record]] = {}
        with foreign.reading(path, "a recording of ours", _AGAIN):
            if not path.is_file():
                raise ValueError("it is no regular file")
            size = os.path.getsize(path)
            self._file = open(path, "rb")  # noqa: SIM115 - as long as the run
            while True:
                lengths = self._file.read(_HEAD.size)
                # the end of the file, or what a killed process left of a head
                if len(lengths) < _HEAD.size:
                    break
                text, packed = _HEAD.unpack(lengths)
                # cut off: the process was killed while it wrote
                if self._file.tell() + text + packed > size:
                    break
                if text > _MOST_HEAD:
                    raise ValueError(f"a head has {text:,} bytes")
                head = foreign.value_of_json(self._file.read(text), dict[str, object])
                # a payload; else facts about the run
                if "key" in head:
                    record = foreign.shaped(head, _Record)
                    self.at[record.key] = self._file.tell(), packed, record
                else:
                    self.header |= head
                self._file.seek(packed, 1)

    def value(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """What ``key``, which is there, delivered, flat; a copy."""
        at, packed, record = self.at[key]
        room = math.prod(record.shape) * dtype.itemsize
        with foreign.reading(self.path, "a recording of ours", _AGAIN):
            self._file.seek(at)
            data = zlib.decompressobj().decompress(self._file.read(packed), room)
            # what is packed may be damaged, or say another shape
            if len(data) != room:
                raise ValueError(f"{key!r} has {len(data):,} bytes, not {room:,}")
        return torch.frombuffer(bytearray(data), dtype=dtype)


def rows_of(folder: Path, rank: int) -> list[ComparedOp]:
    """What the recording of ``rank`` has, call by call as it was delivered, for a comparison.

    Raises UsageError for a foreign file.
    """
    recorded = _Recorded(file_of(folder, rank))
    rows = list[ComparedOp]()
    for key, (_, _, record) in recorded.at.items():
        name = record.dtype.removeprefix("torch.")
        dtype = getattr(torch, name, None)
        iteration, _, step_and_call = key.partition(" ")
        step, _, call = step_and_call.partition(" ")
        with foreign.reading(recorded.path, "a recording of ours", _AGAIN):
            # a dtype that this torch does not have
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{key!r} is of {name}")
        value = recorded.value(key, dtype)
        norm = float(torch.linalg.vector_norm(value.to(torch.float64)))
        fields = {
            "shape": "x".join(map(str, record.shape)) or "1",
            "dtype": name,
            "norm": f"{norm:.9g}",
            "values": f"{zlib.crc32(value.view(torch.uint8).numpy().tobytes()):08x}",
        }
        rows.append(ComparedOp(f"iteration {iteration}, {step}", call, fields))
    return rows


class PayloadReplayer(_Keyed):
    """Overwrites what virtual peers deliver by what real ones did; counts both kinds of calls.

    Raises UsageError for a foreign file, and for another run's recording.
    """

    def __init__(self, folder: Path, rank: int, header: Mapping[str, object]) -> None:
        super().__init__()
        self.path = file_of(folder, rank)
        self.replayed = 0
        self.missing = 0
        self._file = _Recorded(self.path)
        self._names = {key.partition(" #")[0] for key in self._file.at}
        recorded_header = self._file.header
        arguments = recorded_header.get("arguments")
        self._arguments: str | None = None
        if arguments is not None:
            self._arguments = str(arguments)
        check_header(self.path, recorded_header, {"format": FORMAT, "rank": rank, **header})
        virtual = recorded_header.get("virtual")
        # values of virtual ranks are made up: replayed, they would pass as real
        if virtual:
            message = f"{self.path} was recorded among {virtual} virtual ranks: it holds mirrors"
            raise UsageError(message, fix="record a run in which all ranks are local")

    def is_of(self, arguments: str) -> None:
        """The job's arguments are known now: UsageError if the recording is of others."""
        check_arguments(self.path, self._arguments, arguments)

    def replays(self, group: PrismGroup) -> bool:
        """Whether the recording has all-reduces of ``group`` in the step that runs."""
        return self._named(group, "all_reduce")[1] in self._names

    def record(
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        _, key = self.key(group, op)
        work = self.through(group, op, answer, args, kwargs)
        # a send fills nothing, and a group of one rank hears of nobody
        filled = [] if op == "send" or len(group.ranks) < 2 else _filled(op, args)
        if not filled:
            return work
        is_real = [self._fill(f"{key}.{place}", tensor) for place, tensor in enumerate(filled)]
        # what was recorded is real from here on, not made up
        for tensor, has_record in zip(filled, is_real, strict=True):
            if has_record:
                group.world.values.overwritten(tensor)
        if all(is_real):
            self.replayed += 1
        else:
            self.missing += 1
        return work

    def _fill(self, key: str, tensor: torch.Tensor) -> bool:
        """Fill ``tensor`` with the record of ``key``, if there is one of its kind."""
        _, _, record = self._file.at.get(key, _NOTHING)
        if (record.dtype, record.shape) != (str(tensor.dtype), list(tensor.shape)):
            return False
        value = self._file.value(key, tensor.dtype).view(tensor.shape)
        tensor.detach().copy_(value)
        return True

    def finished(self) -> None:
        sys.stderr.write(
            f"prism: {self.replayed:,} calls delivered what {self.path} holds; {self.missing:,} "
            "that are not in it were answered by virtual peers\n"
        )
