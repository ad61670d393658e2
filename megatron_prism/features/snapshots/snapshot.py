"""Memory snapshots of real processes: ``torch.cuda.memory._snapshot()`` as a program.

In : a pickle (plain, gzip or xz) of torch's, Megatron's ``--record-memory-history`` or another
framework's.  Out: a ``Program`` whose ops are the phases that its Python frames name, and whose
allocations are the blocks that the allocator gave, so that ``peaks`` answers of it what it answers
of slices; and the requests, as ``allocator`` replays them.

A block counts as torch counts it: with what was not worth splitting off.  Blocks that backward
makes have no Python frames, since autograd runs in a thread of C++.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from megatron_prism.core import code_files, foreign
from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import EMPTIED, STEPS
from megatron_prism.core.program import Builder, Program, Programs
from megatron_prism.core.rendering import Rendered
from megatron_prism.memory.allocator import CachingAllocator, Settings, replay_requests
from megatron_prism.memory.blocks import as_blocks
from megatron_prism.memory.peaks import (
    HeldMemory,
    Peak,
    difference,
    holdings_at,
    known_peak,
    sizes_at_peak,
)

_MOST = 1 << 31  # bytes of a snapshot, unpacked
_FIX = "give a file of torch.cuda.memory._dump_snapshot or --record-memory-history"
# of a path without its environment; the innermost, as a checkout may be below a folder of that name
_OURS = re.compile(r"(?:.*/)?(?:megatron/((?:core|training|legacy)/.*)|(transformer_engine/.*))")
# a frame of Python's names its source; one of C++ the file that it was built from, or none
_PYTHON = re.compile(r".*\.pyx?|<.*>")
# torch's own files, also where it is built from source, and what it compiles
_LIBRARY = re.compile(r"(?:^|/)(?:(?:torch|torchgen|functorch|torchinductor_[^/]*)/|<)")
# of names: Megatron's snapshot_oom_rank-3.pickle and snapshot_3.pickle (training/training.py:3543
# @main), torchtitan's iteration_10/rank3_memory_snapshot.pickle
_RANK = re.compile(r"(?:rank[-_]?|snapshot_)0*(\d+)")
_ITERATION = re.compile(r"(?<![a-z])(?:it(?:er(?:ation)?)?|step)s?[-_=]?0*(\d+)")
_LARGE = 1 << 20  # bytes from which requests are held against each other
# functions that make the parameters; of torch.nn.Module: to, cuda, to_empty
_BUILDERS = {"get_model", "setup_model_and_optimizer", "_apply", "to_empty"}
_rounded = Settings().rounded
_AUTOGRAD = "autograd's thread"  # has no frames of Python
_BUFFER = "core/distributed/param_and_grad_buffer.py"


class _Event(msgspec.Struct):
    action: str
    addr: int = 0
    size: int = 0
    stream: int = 0
    device_free: int = 0
    frames: Any = ()


class _Origin(msgspec.Struct):
    frames: Any = ()


class _Block(msgspec.Struct):
    size: int
    state: str
    address: int = 0
    requested_size: int = 0
    frames: Any = ()
    history: list[_Origin] = []  # of torch 2.0, the latest first, for ``frames``


class _Segment(msgspec.Struct):
    address: int
    total_size: int
    stream: int = 0
    device: int = 0
    is_expandable: bool = False
    segment_pool_id: tuple[int, ...] = (0, 0)
    blocks: list[_Block] = []


class _File(msgspec.Struct):
    segments: list[_Segment]
    device_traces: list[list[_Event]] = []
    allocator_settings: dict[str, Any] = {}


@dataclass(frozen=True)
class AllocationSite:
    """Where a block was asked for: Megatron's line, the phase that its frames name ("" if none),
    and whose it is (``param``, ``grad``, ``optim``, ``buffer`` of the two first, or "").
    """

    site: str = ""
    phase: str = ""
    kind: str = ""
    known: bool = False  # whether there were any frames


@dataclass(frozen=True)
class FailedRequest:
    """A request that the device refused: bytes, where, in which iteration and phase, and what the
    device had left.
    """

    size: int
    site: str
    iteration: int
    label: str
    device_free: int


@dataclass(frozen=True)
class Snapshot:
    """What a process had asked its allocator for.

    program    : phases as marks, blocks as allocations, whole bytes
    iterations : that of every op of ``program``; 0: before the first
    requests   : (block, bytes, stream) in order, bytes negative where it is free for others again
    reserved   : bytes of segments at the end;  peak_reserved : the most, None without a history
    modelled   : the most by the allocator's rules from ``requests``
    segments   : sizes of the segments at the end that the rules do not give, and of those that
                 only they give
    free       : bytes of free blocks at the end, and of the largest
    whole      : whether the history begins with the first block that is alive
    failed     : where memory ran out
    unknown    : the option of the allocator that ``modelled`` knows nothing of, in words
    rank       : that its name says
    iteration  : in which it was taken, where its name says it or the history is whole
    """

    program: Program
    iterations: tuple[int, ...]
    requests: tuple[tuple[int, int, int], ...]
    reserved: int
    peak_reserved: int | None
    modelled: int
    segments: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[int, int]
    settings: Settings
    whole: bool
    failed: FailedRequest | None = None
    unknown: str = ""
    rank: int | None = None
    iteration: int | None = None

    def fits_expandable(self) -> bool | None:
        """Whether what failed fits with expandable segments; None if nothing failed."""
        if self.failed is None:
            return None
        limit = self.reserved + self.failed.device_free
        asked = (*self.requests, (-9, self.failed.size, 0))
        return replay_requests(asked, Settings(expandable=True), limit).full is None


def read(path: str | PathLike[str], device: int | None = None) -> Snapshot:
    """Read a snapshot.

    Args:
        path: the file.
        device: whose blocks; the device with most of them by default.

    Raises:
        UsageError: it is no snapshot, is damaged, or asks for code.
    """
    with foreign.reading(path, "a memory snapshot", _FIX) as file:
        data = foreign.read_unpacked(file, _MOST, 1000)
        with foreign.bounded_memory(16 * len(data) + (1 << 30)):
            value = foreign.unpickled(data, lambda value: None)
        taken = _snapshot_of(foreign.shaped(value, _File), device)
    folder, name = Path(path).absolute().parts[-2:]
    rank, named = _RANK.search(name), _ITERATION.search(name) or _ITERATION.search(folder)
    iteration = int(named[1]) if named else taken.iterations[-1] if taken.whole else 0
    return replace(taken, rank=int(rank[1]) if rank else None, iteration=iteration or None)


def _snapshot_of(file: _File, device: int | None) -> Snapshot:
    """Take the snapshot of one device out of a file; None: of the one with most."""
    if device is None:
        device = _fullest_device(file)
    segments = [segment for segment in file.segments if segment.device == device]
    events = []
    if device < len(file.device_traces):
        events = file.device_traces[device]

    # an option that is not modelled does not spoil the rest of the snapshot
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    texts = [str(file.allocator_settings.get(name) or "") for name in names]
    unknown_option = ""
    try:
        settings = Settings.parse(" ".join(texts).strip())
    except PrismError as error:
        settings = Settings()
        unknown_option = error.message

    # segments say it where the variable does not
    has_expandable = any(segment.is_expandable for segment in segments)
    if has_expandable and not settings.expandable:
        settings = replace(settings, expandable=True)
    taken = _History(settings, events, segments).run(segments)
    return replace(taken, unknown=unknown_option)


def _fullest_device(file: _File) -> int:
    """Find the device with most bytes of segments; without any, with the longest trace; else 0."""
    amounts: Counter[int] = Counter()  # device -> bytes of segments
    for segment in file.segments:
        amounts[segment.device] += segment.total_size
    if not amounts:
        # device -> events
        amounts.update({number: len(trace) for number, trace in enumerate(file.device_traces)})
    if not amounts:
        return 0
    fullest, _ = amounts.most_common(1)[0]
    return fullest


@dataclass
class _Life:
    """A block in use: its number, what was asked for and what it takes."""

    number: int
    asked: int
    size: int


_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class _History:
    """Reads events in order and writes the program."""

    def __init__(
        self, settings: Settings, events: Sequence[_Event], segments: Sequence[_Segment]
    ) -> None:
        self.events, self.machine, self.builder = events, CachingAllocator(settings), Builder()
        self.requests: list[tuple[int, int, int]] = []
        self.iterations: list[int] = []
        self.alive: dict[int, _Life] = {}  # by address
        self.places: dict[int, AllocationSite] = {}  # by identity of a list of frames
        # blocks of a private pool (a captured graph's) are as those of a stream of their own
        self.pools = sorted((one.address, one.address + one.total_size, tuple(one.segment_pool_id))
                            for one in segments if any(one.segment_pool_id))  # fmt: skip
        self.streams: dict[object, int] = {(0, None): 0}  # (a stream, its pool) -> its number
        self.phase, self.iteration = "", 0
        self.steps = {"forward": 0, "backward": 0}  # begun in this iteration
        lines = {place.site for event in events if event.action == "alloc"
                 and (place := self.place(event.frames)).kind == "buffer"}  # fmt: skip
        # the last: parameters' buffers come before
        self.gradients = max(lines, default="", key=lambda one: int(one.rpartition(":")[2] or 0))

    def run(self, segments: Sequence[_Segment]) -> Snapshot:
        stood = list(self._stood(segments))
        for block in stood:
            self._comes(block.address, block.size, 0, self.place(block.frames))
        if stood:
            self._mark()
        at_end = sum(segment.total_size for segment in segments)
        sizes = [at_end - sum(_GROWS.get(e.action, 0) * e.size for e in self.events)]
        oom: tuple[_Event, AllocationSite, int] | None = None
        for event in self.events:
            if event.action == "alloc":
                place = self.place(event.frames)
                self._enters(place)
                self._comes(event.addr, event.size, event.stream, place)
            elif event.action in ("free_requested", "free_completed"):
                self._goes(event)
            elif event.action in _GROWS:
                sizes.append(sizes[-1] + _GROWS[event.action] * event.size)
                if event.action == "segment_alloc":
                    self.machine.placed = event.addr  # of equal blocks the lowest is taken
                if _GROWS[event.action] < 0 and self.machine.release():
                    self.requests.append((EMPTIED, 0, 0))
            elif event.action == "oom":
                oom = event, self.place(event.frames), self.iteration
        self._mark()
        program = self.builder.build(0)
        free = [block.size for segment in segments for block in segment.blocks
                if block.state == "inactive"]  # fmt: skip
        failed = None
        if oom is not None:
            event, place, iteration = oom
            label = program[len(program) - 1].label
            failed = FailedRequest(event.size, place.site, iteration, label, event.device_free)
        return Snapshot(
            program=program,
            iterations=tuple(self.iterations),
            requests=tuple(self.requests),
            reserved=at_end,
            peak_reserved=max(sizes) if self.events else None,
            modelled=self.machine.peak_reserved,
            segments=((), ()) if stood or not self.events else self._unlike(segments),
            free=(sum(free), max(free, default=0)),
            settings=self.machine.settings,
            whole=not stood,
            failed=failed,
        )

    def _unlike(self, segments: Sequence[_Segment]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.machine.settings.expandable:  # a segment for each run of pages: not compared
            return (), ()
        real = Counter(one.total_size for one in segments)
        rules = Counter(self.machine.segment_sizes())
        return tuple((real - rules).elements()), tuple((rules - real).elements())

    def _stood(self, segments: Sequence[_Segment]) -> Iterator[_Block]:
        """Blocks that were alive when the history began: what is freed or alive and was never
        asked for in it.
        """
        asked: set[int] = set()
        for event in self.events:
            if event.action == "alloc":
                asked.add(event.addr)
            elif event.action == "free_requested" and event.addr not in asked:
                asked.add(event.addr)
                yield _Block(event.size, "", event.addr)
        for segment in segments:
            address = segment.address
            for block in segment.blocks:
                if block.state.startswith("active") and address not in asked:
                    size = block.requested_size or block.size
                    frames = block.frames or next((one.frames for one in block.history), ())
                    yield _Block(size, "", address, frames=frames)
                address += block.size

    def place(self, frames: Any) -> AllocationSite:
        """Where ``frames`` are; lists of frames are shared, and are read once."""
        found = self.places.get(id(frames))
        if found is None:
            found = self.places[id(frames)] = _place(frames)
        return found

    def _enters(self, place: AllocationSite) -> None:
        """Another step begins where the phase is another one: autograd's thread has no frames."""
        phase = place.phase
        if not place.known:
            phase = "backward" if self.phase == "forward" else self.phase
        if phase == self.phase:
            return
        self._mark()
        if phase == "forward" and self.phase not in ("forward", "backward"):
            self.iteration += 1
            self.steps = {"forward": 0, "backward": 0}
        if phase in self.steps:
            self.steps[phase] += 1
        self.phase = phase
        self._mark()

    def _mark(self) -> None:
        """A step has one at each end, since what is dropped on the way out counts as its own."""
        count = self.steps.get(self.phase, 0) - 1
        self.builder.add("mark", phase=self.phase, microbatch=count)
        self.iterations.append(self.iteration)

    def _comes(self, address: int, size: int, stream: int, place: AllocationSite) -> None:
        number, kind = len(self.requests), place.kind
        if kind == "buffer":
            kind = "grad" if place.site == self.gradients else "param"
        at = bisect.bisect(self.pools, (address, 1 << 62)) - 1
        private = at >= 0 and address < self.pools[at][1]
        pool = self.pools[at][2] if private else None
        stream = self.streams.setdefault((stream, pool), len(self.streams))
        self.machine.malloc(number, size, stream)
        life = _Life(number, size, self.machine.live[number][-1].size)
        self.alive[address] = life
        self.requests.append((number, size, stream))
        owner = f"{kind}:" if kind else ""
        # kept blocks of it are gradients where there is no buffer of them, else workspaces
        own = self.phase == "backward" and not self.gradients
        site = place.site or _AUTOGRAD * own
        self.builder.memory(number, life.size, f"{owner} @{site}", stream)

    def _goes(self, event: _Event) -> None:
        """A block counts until its program lets go; it is free when other streams are past it."""
        life = self.alive.get(event.addr)
        if life is None:
            return
        if life.number not in self.machine.retired:
            self.machine.retire(life.number)
            self.builder.memory(life.number, -life.size)
        if event.action == "free_completed":
            self.machine.free(life.number)
            self.requests.append((life.number, -life.asked, 0))
            del self.alive[event.addr]


# the phase of what functions call, the first that is there: Megatron's, then those of torch, which
# every framework calls; what autograd calls on its own thread runs in the backward
_PHASES = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        ("evaluate", ""),
        ("(?!.*forward).*backward.*|.*autograd::Engine.*|unpack_hook", "backward"),
        ("forward_step|_wrapped_call_impl", "forward"),
        ("finalize_model_grads", "sync"),
    )
)


def _place(frames: Any) -> AllocationSite:
    rows = [(str(f["filename"]), str(f["name"]), int(f["line"])) for f in frames]
    names = {name for _, name, _ in rows}
    site = _site((file, line) for file, _, line in rows if _PYTHON.fullmatch(file))
    optimizer = any("optimizer" in file for file, _, _ in rows)
    step = "optimizer" if optimizer and "step" in names else ""
    phase = next(
        (phase for function, phase in _PHASES if any(map(function.fullmatch, names))), step
    )
    kind = ""
    if site.startswith(_BUFFER) and rows[0][1] == "__init__":
        kind = "buffer"
    elif not phase and optimizer:
        kind = "optim"
    elif not phase and names & _BUILDERS and "get_cublas_workspace" not in names:
        kind = "param"
    return AllocationSite(site, phase, kind, bool(rows))


def _site(python: Iterable[tuple[str, int]]) -> str:
    """Return ``file:line`` of Megatron's or TE's innermost frame, else of the job's own code.

    Args:
        python: (file, line) of Python's frames, innermost first, as the machine of the job wrote
            them.
    """
    of_job = ""
    for path, line in python:
        file = code_files.without_environment(path)
        match = _OURS.fullmatch(file)
        if match is not None:
            return f"{match[1] or match[2]}:{line}"
        if not of_job and not _LIBRARY.search(file):
            of_job = f"{file}:{line}"
    return of_job


@dataclass(frozen=True)
class SnapshotGrowth(Rendered):
    """What one process holds more at the end of the last of its snapshots than of the first.

    grown      : by kind and line, largest first; negative where it has become less
    steps      : for each of them, bytes more from every snapshot to the next
    iterations : in which the snapshots were taken; () where one is not known
    """

    grown: tuple[HeldMemory, ...]
    steps: tuple[tuple[int, ...], ...]
    iterations: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of all together."""
        return sum(one.num_bytes for one in self.grown)

    @property
    def leaking(self) -> int:
        """Bytes of the lines that grow from every snapshot to the next: no cache that is full."""
        return sum(sum(steps) for steps in self.steps if min(steps) > 0)

    @property
    def same(self) -> bool:
        """Whether nothing has grown by more than 1 MiB each time."""
        return min(self.num_bytes, self.leaking) <= 1 << 20

    @property
    def difference(self) -> int:
        """Bytes, the more the worse."""
        return self.leaking

    def rate(self, steps: tuple[int, ...]) -> float | None:
        """Bytes an iteration of a line that grows each time, where the iterations are known."""
        passed = self.iterations[-1] - self.iterations[0] if self.iterations else 0
        return sum(steps) / passed if passed and min(steps) > 0 else None

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every line."""
        return [{**asdict(one), "steps": list(steps), "per_iteration": self.rate(steps)}
                for one, steps in zip(self.grown, self.steps, strict=True)]  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """What ``prism compare EARLIER … LATER --json`` prints; bytes."""
        return {"schema": "prism.memory_growth/2", "grown": self.num_bytes, "leaking": self.leaking,
                "iterations": list(self.iterations), "by": self.to_rows()}  # fmt: skip


def grown(*taken: Snapshot) -> SnapshotGrowth:
    """What is alive at the end of the last snapshot and was not at the end of the first.

    They are one process's, in the order of their iterations, where all of them are known.
    """
    numbers = [one.iteration for one in taken if one.iteration is not None]
    if len(numbers) == len(taken):
        taken = tuple(sorted(taken, key=lambda one: one.iteration or 0))
    ends = [holdings_at(one.program, len(one.program.allocations) - 1) for one in taken]
    steps = [{one.key: one.num_bytes for one in difference(a, b)} for a, b in pairwise(ends)]
    more = difference(ends[0], ends[-1])
    by_line = tuple(tuple(step.get(one.key, 0) for step in steps) for one in more)
    known = tuple(sorted(numbers)) if len(numbers) == len(taken) else ()
    return SnapshotGrowth(more, by_line, known)


# -- beside the slices of the same job -------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    """One allocation: bytes, where it was asked for, and the step (``0F``; ``O``: all that is
    between the last backward and the next forward).
    """

    num_bytes: int
    site: str
    step: str


@dataclass(frozen=True)
class SnapshotComparison(Rendered):
    """A real process beside the slices of its job, in the iteration of the real peak.

    rank           : whose slices they are
    real, emulated : their peaks
    common         : bytes of blocks alive at the real peak that are alive at the other, too
    asked, aligned : bytes of large requests of the iteration, and of those in the other's order
    only_real, only_emulated : requests of the first step that differs, that the other lacks there
    """

    rank: int
    real: Peak
    emulated: Peak
    common: int
    asked: int
    aligned: int
    only_real: tuple[Request, ...]
    only_emulated: tuple[Request, ...]

    @property
    def same(self) -> bool:
        """Whether 99 % of the bytes at the real peak are blocks of the slices, too."""
        return self.common >= 0.99 * self.real.num_bytes

    @property
    def difference(self) -> int:
        """Bytes of the real peak that are none of the slices."""
        return self.real.num_bytes - self.common

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every category; bytes."""
        real, emulated = self.real.by_kind, self.emulated.by_kind
        return [{"kind": kind, "real": real[kind], "emulated": emulated[kind]} for kind in real]

    def to_json(self) -> dict[str, object]:
        """What ``prism compare SNAPSHOT SLICES --json`` prints; bytes."""
        of_kind = {row["kind"]: [row["real"], row["emulated"]] for row in self.to_rows()}
        only = {"only_real": self.only_real, "only_emulated": self.only_emulated}
        return {"schema": "prism.memory_alignment/1", "rank": self.rank,
                "real": self.real.num_bytes, "emulated": self.emulated.num_bytes,
                "common": self.common, "asked": self.asked, "aligned": self.aligned,
                "by_category": of_kind,
                **{name: [asdict(one) for one in each] for name, each in only.items()}}  # fmt: skip


@dataclass(frozen=True)
class RankedSnapshots(Rendered):
    """What is to be said of several processes, by the rank or the name of each."""

    answers: Mapping[str, Any]  # SnapshotComparison or SnapshotGrowth

    @property
    def same(self) -> bool:
        """Whether it is so of each."""
        return all(one.same for one in self.answers.values())

    def to_rows(self) -> list[dict[str, object]]:
        """The rows of each."""
        return [{"of": name, **row} for name, one in self.answers.items() for row in one.to_rows()]

    def to_json(self) -> dict[str, object]:
        """What ``prism compare FOLDER …`` prints."""
        each = {name: one.to_json() for name, one in self.answers.items()}
        return {"schema": "prism.memory_ranks/1", "ranks": each}


def compare(snapshot: Snapshot, programs: Programs) -> SnapshotComparison:
    """Hold the iteration of ``snapshot``'s peak against the slices of its rank; where its name says
    none, against those that have most of its blocks.

    Raises:
        PrismError: the snapshot has no history, the slices have no such rank, or the program
            recorded no allocations.
    """
    if snapshot.rank is None:
        every = [_beside(snapshot, one) for one in programs.programs]
        return max(every, key=lambda one: one.common)
    return _beside(snapshot, programs.of(snapshot.rank))


def _beside(snapshot: Snapshot, program: Program) -> SnapshotComparison:
    known_peak(program)  # or it says what is missing
    real = known_peak(snapshot.program)
    emulated = known_peak(as_blocks(program, snapshot.settings))  # as those of the snapshot are
    sizes = {number: asked for number, asked, _ in snapshot.requests if asked > 0}
    iteration = snapshot.iterations[real.index]
    # the peak is before CUDA graphs ran, and the slices have an iteration with graphs
    if emulated.earlier:
        iteration = snapshot.iterations[-1] - (snapshot.failed is not None)
    ours = [one == iteration for one in snapshot.iterations]
    there, here = _requests(snapshot.program, ours, sizes), _requests(program)
    aligned, first = 0, None
    for step, wanted in there.items():
        given = here.get(step, [])
        pair = [[_rounded(one.num_bytes) for one in each] for each in (wanted, given)]
        matches = SequenceMatcher(None, pair[0], pair[1], autojunk=False).get_matching_blocks()
        aligned += sum(one.num_bytes for at, _, n in matches for one in wanted[at : at + n])
        if first is None and pair[0] != pair[1]:
            taken = {at + i for at, _, n in matches for i in range(n)}
            other = {at + i for _, at, n in matches for i in range(n)}
            first = [tuple(one for i, one in enumerate(each) if i not in known)
                     for each, known in ((wanted, taken), (given, other))]  # fmt: skip
    common = _common(_alive(snapshot.program, sizes), _alive(program))
    asked = sum(one.num_bytes for step in there.values() for one in step)
    only_real, only_emulated = first or ((), ())
    return SnapshotComparison(program.rank, real, emulated, common, asked, aligned, only_real,
                              only_emulated)  # fmt: skip


def _requests(
    program: Program, counted: Sequence[bool] = (), sizes: Mapping[int, int] | None = None
) -> dict[str, list[Request]]:
    """Large requests of the ops that count, by step; ``sizes``: what was asked for, by block."""
    found: dict[str, list[Request]] = {}
    for before, storage, size, note in program.allocations.tolist():
        at = min(before, len(program) - 1)
        asked = (sizes or {}).get(storage, size)
        if size > 0 and asked >= _LARGE and (counted[at] if counted else before > 0):
            op = program[at]
            step = op.label if op.phase in STEPS else "O"
            site = program.strings[note].rpartition("@")[2]
            found.setdefault(step, []).append(Request(asked, site, step))
    return found


def _alive(program: Program, sizes: Mapping[int, int] | None = None) -> dict[int, list[int]]:
    """The blocks that are alive at the peak: bytes of each by what was asked for, rounded up."""
    # a peak before the iteration is known by sizes alone
    if known_peak(program).earlier:
        earlier: dict[int, list[int]] = {}
        for size, count in sizes_at_peak(program).items():
            earlier.setdefault(_rounded(size), []).extend([size] * count)
        return earlier
    events = program.allocations[: int(program.live_bytes().argmax()) + 1]
    held: Counter[int] = Counter()
    for storage, size in zip(events["storage"].tolist(), events["bytes"].tolist(), strict=True):
        held[storage] += size
    blocks: dict[int, list[int]] = {}
    for storage, size in held.items():
        if size > 0:
            asked = _rounded((sizes or {}).get(storage, size))
            blocks.setdefault(asked, []).append(size)
    return blocks


def _common(real: Mapping[int, list[int]], emulated: Mapping[int, list[int]]) -> int:
    """Bytes of the real blocks for which there is one of the same request among the others."""
    total = 0
    for asked, blocks in real.items():
        count = min(len(blocks), len(emulated.get(asked, ())))
        total += sum(sorted(blocks, reverse=True)[:count])
    return total
