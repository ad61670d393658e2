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
from megatron_prism.core.programs.ops import EMPTIED, STEPS
from megatron_prism.core.programs.program import Builder, Program, Programs
from megatron_prism.core.rendering import Rendered
from megatron_prism.features.snapshots import owners
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
# bytes of a handle's workspace on Hopper and later, and before
# (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize, torch 2.11)
_CUBLAS_WORKSPACES = (32 << 20, (4096 * 2 + 16 * 8) << 10)


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
    """Where a block was asked for.

    Attributes:
        site: Megatron's line.
        phase: That its frames name ("" if none).
        kind: Whose it is (``param``, ``grad``, ``optim``, ``work``, ``buffer`` of the
            two first, or "").
        known: Whether there were any frames.
        maker: The line of a function that makes blocks of several kinds, if one runs.
        batch_functions: Names of functions that run and get a batch.
    """

    site: str = ""
    phase: str = ""
    kind: str = ""
    known: bool = False
    maker: owners.Maker | None = None
    batch_functions: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FailedRequest:
    """A request that the device refused.

    Attributes:
        size: Bytes.
        site: Where it was made.
        iteration: In which.
        label: Of the phase.
        device_free: Bytes that the device had left.
    """

    size: int
    site: str
    iteration: int
    label: str
    device_free: int


@dataclass(frozen=True)
class Snapshot:
    """What a process had asked its allocator for.

    Attributes:
        program: Phases as marks, blocks as allocations, whole bytes.
        iterations: That of every op of ``program``; 0: before the first.
        requests: (block, bytes, stream) in order, bytes negative where it is free for others again.
        reserved: Bytes of segments at the end.
        peak_reserved: The most, None without a history.
        modelled: The most by the allocator's rules from ``requests``.
        segments: Sizes of the segments at the end that the rules do not give, and of those that
            only they give.
        free: Bytes of free blocks at the end, and of the largest.
        settings: Of the allocator.
        whole: Whether the history begins with the first block that is alive.
        failed: Where memory ran out.
        unknown: The option of the allocator that ``modelled`` knows nothing of, in words.
        rank: That its name says.
        iteration: In which it was taken, where its name says it or the history is whole.
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
        """Tell whether what failed fits with expandable segments; None if nothing failed."""
        if self.failed is None:
            return None
        limit = self.reserved + self.failed.device_free
        failed_request = (_FAILED_BLOCK, self.failed.size, 0)
        requests = (*self.requests, failed_request)
        return replay_requests(requests, Settings(expandable=True), limit).full is None


_FAILED_BLOCK = -9  # number of the block that the device refused


def read(path: str | PathLike[str], device: int | None = None) -> Snapshot:
    """Read a snapshot.

    Args:
        path: The file.
        device: Whose blocks; the device with most of them by default.

    Raises:
        UsageError: It is no snapshot, is damaged, or asks for code.
    """
    # a pickle of plain values: whatever would run code is refused
    with foreign.reading(path, "a memory snapshot", _FIX) as file:
        data = foreign.read_unpacked(file, _MOST, 1000)
        with foreign.bounded_memory(16 * len(data) + (1 << 30)):
            value = foreign.unpickled(data, lambda value: None)
        snapshot = _snapshot_of(foreign.shaped(value, _File), device)
    folder, name = Path(path).absolute().parts[-2:]
    rank = _RANK.search(name)
    iteration = _ITERATION.search(name) or _ITERATION.search(folder)
    number = 0
    # its number is in the name of the file or of its folder, or all iterations are in the history
    if iteration is not None:
        number = int(iteration[1])
    elif snapshot.whole:
        number = snapshot.iterations[-1]
    rank_number = None if rank is None else int(rank[1])
    return replace(snapshot, rank=rank_number, iteration=number or None)


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
    snapshot = _History(settings, events, segments).run()
    return replace(snapshot, unknown=unknown_option)


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
    """A block in use: its number, what was asked for and what it takes, when and where it came."""

    number: int
    asked: int
    size: int
    iteration: int
    phase: str
    site: str


_GROWS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True)
class _Pool:
    """Addresses of a segment of a private pool, which a captured graph has.

    Attributes:
        first: The first address.
        behind: The first address behind it.
        number: Of the pool.
    """

    first: int
    behind: int
    number: tuple[int, ...]


@dataclass(frozen=True)
class _RefusedRequest:
    """A request that the device refused, and when."""

    event: _Event
    place: AllocationSite
    iteration: int


class _History:
    """Reads events in order and writes the program.

    Attributes:
        events: Of the device.
        segments: Of the device, at the end.
        machine: The allocator by its rules.
        builder: Of the program.
        requests: As of the snapshot.
        iterations: As of the snapshot.
        alive: Address -> block in use.
        gradients: The line that makes buffers of gradients; "" if none does.
        phase: In which the process is.
        iteration: In which the process is.
        steps: How many forwards and backwards began in the iteration.
    """

    def __init__(
        self, settings: Settings, events: Sequence[_Event], segments: Sequence[_Segment]
    ) -> None:
        self.events = events
        self.segments = segments
        self.machine = CachingAllocator(settings)
        self.builder = Builder()
        self.requests: list[tuple[int, int, int]] = []
        self.iterations: list[int] = []
        self.alive: dict[int, _Life] = {}
        self._place_of_frames: dict[int, AllocationSite] = {}  # by identity of a list of frames
        self._pools = _private_pools(segments)
        self._streams: dict[object, int] = {(0, None): 0}  # (a stream, its pool) -> its number
        self.phase = ""
        self.iteration = 0
        self.steps = {"forward": 0, "backward": 0}
        self.gradients = self._line_of_gradients()
        self._kind_of_maker = self._kinds_of_makers()
        self._batch = owners.LoadedBatch()
        self._owner_of_block: dict[int, str] = {}  # of blocks whose stacks do not say it alone

    def _line_of_gradients(self) -> str:
        """Return the last line that makes buffers: those of parameters come before."""
        lines: set[str] = set()
        for event in self.events:
            if event.action == "alloc":
                place = self.place(event.frames)
                if place.kind == "buffer":
                    lines.add(place.site)
        return max(lines, default="", key=_line_number)

    def _kinds_of_makers(self) -> dict[owners.Maker, str]:
        """Return the kinds of what lines make whose functions make several kinds."""
        blocks: list[tuple[owners.Maker, int]] = []
        for event in self.events:
            if event.action == "alloc":
                maker = self.place(event.frames).maker
                if maker is not None:
                    blocks.append((maker, event.size))
        return owners.kinds_of_makers(blocks)

    def run(self) -> Snapshot:
        """Read all events."""
        # what was there before the first event
        earlier_blocks = list(self._blocks_before())
        for block in earlier_blocks:
            self._comes(block.address, block.size, 0, self.place(block.frames))
        if earlier_blocks:
            self._mark()

        # only the end is recorded: what was reserved before follows backwards
        reserved_at_end = sum(segment.total_size for segment in self.segments)
        reserved = reserved_at_end
        for event in self.events:
            reserved -= _GROWS.get(event.action, 0) * event.size
        peak_reserved = reserved

        # the events, in order
        refused: _RefusedRequest | None = None
        for event in self.events:
            if event.action == "alloc":
                place = self.place(event.frames)
                self._enters(place)
                self._comes(event.addr, event.size, event.stream, place)
            elif event.action in ("free_requested", "free_completed"):
                self._goes(event)
            elif event.action in _GROWS:
                reserved += _GROWS[event.action] * event.size
                peak_reserved = max(peak_reserved, reserved)
                self._segment_changes(event)
            elif event.action == "oom":
                refused = _RefusedRequest(event, self.place(event.frames), self.iteration)
        self._mark()
        self._end_batch()
        self._own_workspaces()
        self.builder.own(self._owner_of_block)

        # segments are compared with the model where it saw all of them
        program = self.builder.build(0)
        segments: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        if self.events and not earlier_blocks:
            segments = self._unlike_segments()
        free_sizes = self._free_sizes()
        return Snapshot(
            program=program,
            iterations=tuple(self.iterations),
            requests=tuple(self.requests),
            reserved=reserved_at_end,
            peak_reserved=peak_reserved if self.events else None,
            modelled=self.machine.peak_reserved,
            segments=segments,
            free=(sum(free_sizes), max(free_sizes, default=0)),
            settings=self.machine.settings,
            whole=not earlier_blocks,
            failed=None if refused is None else _failed(refused, program),
        )

    def _own_workspaces(self) -> None:
        """Name the workspaces of cuBLAS, which products take in their own lines and keep.

        Python's frames show the product alone.  A block of just that size that a step of an earlier
        iteration made and that is in use at the end is one: tensors of a step are gone by then.
        """
        for life in self.alive.values():
            is_of_step = life.phase in ("forward", "backward") and life.iteration < self.iteration
            if life.asked in _CUBLAS_WORKSPACES and is_of_step:
                self._owner_of_block[life.number] = "work:cuBLAS workspace"

    def _own_kept(self) -> None:
        """Name what a forward made and the next iteration finds: no activation, but a cache.

        Transformer Engine's weights in FP8, Megatron's buffer of gathered tensors, tables of rotary
        embeddings; and Megatron-FSDP's gathered weights.  Slices find them in front of their
        iteration.
        """
        for life in self.alive.values():
            is_gone = life.number in self.machine.retired
            if life.phase == "forward" and life.iteration < self.iteration and not is_gone:
                owner = "param:" if owners.FSDP_FILE in life.site else "other:"
                self._owner_of_block.setdefault(life.number, owner)

    def _end_batch(self) -> None:
        """Name the masks of a batch, which is whole now."""
        for number in self._batch.masks():
            self._owner_of_block[number] = "mask:attention mask"
        self._batch = owners.LoadedBatch()

    def _segment_changes(self, event: _Event) -> None:
        """Let the allocator know that it got a segment, or gave one back."""
        if event.action == "segment_alloc":
            self.machine.placed = event.addr  # of equal blocks the lowest is taken
        if _GROWS[event.action] < 0 and self.machine.release():
            self.requests.append((EMPTIED, 0, 0))

    def _free_sizes(self) -> list[int]:
        """Return sizes of the free blocks at the end."""
        sizes: list[int] = []
        for segment in self.segments:
            for block in segment.blocks:
                if block.state == "inactive":
                    sizes.append(block.size)
        return sizes

    def _unlike_segments(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes of segments that only the process has, and that only the rules give."""
        # a segment for each run of pages: not compared
        if self.machine.settings.expandable:
            return (), ()
        real = Counter(segment.total_size for segment in self.segments)
        modelled = Counter(self.machine.segment_sizes())
        only_real, only_modelled = real - modelled, modelled - real
        return tuple(only_real.elements()), tuple(only_modelled.elements())

    def _blocks_before(self) -> Iterator[_Block]:
        """Yield blocks that were alive when the history began.

        What is freed or alive was there if it was never asked for.
        """
        known_addresses: set[int] = set()
        for event in self.events:
            # it was asked for within the history
            if event.action == "alloc":
                known_addresses.add(event.addr)
            # it is freed without a request: it was there before
            elif event.action == "free_requested" and event.addr not in known_addresses:
                known_addresses.add(event.addr)
                yield _Block(event.size, "", event.addr)
        for segment in self.segments:
            address = segment.address
            for block in segment.blocks:
                # it is alive and was never asked for
                if block.state.startswith("active") and address not in known_addresses:
                    size = block.requested_size or block.size
                    yield _Block(size, "", address, frames=_frames_of(block))
                address += block.size

    def place(self, frames: Any) -> AllocationSite:
        """Return where ``frames`` are; lists of frames are shared, and are read once."""
        place = self._place_of_frames.get(id(frames))
        if place is None:
            place = _place(frames)
            self._place_of_frames[id(frames)] = place
        return place

    def _enters(self, place: AllocationSite) -> None:
        """Begin another step where the phase is another one."""
        phase = place.phase
        # autograd's thread has no frames
        if not place.known:
            phase = "backward" if self.phase == "forward" else self.phase
        if phase == self.phase:
            return
        self._mark()
        # a forward behind something else begins an iteration
        if phase == "forward" and self.phase not in ("forward", "backward"):
            self.iteration += 1
            self.steps = {"forward": 0, "backward": 0}
            self._own_kept()
        if phase in self.steps:
            self.steps[phase] += 1
        self.phase = phase
        self._mark()

    def _mark(self) -> None:
        """Mark an end of a step: each has two, as what is dropped on the way out is its own."""
        microbatch = self.steps.get(self.phase, 0) - 1
        self.builder.add("mark", phase=self.phase, microbatch=microbatch)
        self.iterations.append(self.iteration)

    def _comes(self, address: int, size: int, stream: int, place: AllocationSite) -> None:
        """Add a block."""
        number = len(self.requests)
        stream_number = self._stream(address, stream)
        self.machine.malloc(number, size, stream_number)
        self.requests.append((number, size, stream_number))
        kind = place.kind
        # Megatron's buffers: one line makes gradients, another one parameters
        if kind == "buffer":
            kind = "grad" if place.site == self.gradients else "param"
        elif place.maker is not None:
            kind = self._kind_of_maker.get(place.maker, kind)
        # a data loader's batch is made by several requests in a row
        if place.batch_functions:
            self._batch.add(number, size, place.batch_functions)
        elif self._batch.whole:
            self._end_batch()
        owner = f"{kind}:" if kind else ""
        # kept blocks of it are gradients where there is no buffer of them, else workspaces
        site = place.site
        if not site and self.phase == "backward" and not self.gradients:
            site = _AUTOGRAD
        rounded_size = self.machine.live[number][-1].size
        life = _Life(number, size, rounded_size, self.iteration, self.phase, site)
        self.alive[address] = life
        self.builder.memory(number, life.size, f"{owner} @{site}", stream_number)

    def _stream(self, address: int, stream: int) -> int:
        """Return the number of a stream; blocks of a private pool are on one of their own."""
        place = bisect.bisect_right(self._pools, address, key=lambda pool: pool.first) - 1
        pool: tuple[int, ...] | None = None
        if place >= 0 and address < self._pools[place].behind:
            pool = self._pools[place].number
        return self._streams.setdefault((stream, pool), len(self._streams))

    def _goes(self, event: _Event) -> None:
        """Remove a block.

        It counts until its program lets go; it is free when other streams are past it.
        """
        life = self.alive.get(event.addr)
        # it is older than the history
        if life is None:
            return
        # freed twice: a block that another stream still uses
        if life.number not in self.machine.retired:
            self.machine.retire(life.number)
            self.builder.memory(life.number, -life.size)
        # other streams are past it
        if event.action == "free_completed":
            self.machine.free(life.number)
            self.requests.append((life.number, -life.asked, 0))
            del self.alive[event.addr]


def _private_pools(segments: Iterable[_Segment]) -> list[_Pool]:
    """Return segments of private pools, by address."""
    pools: list[_Pool] = []
    for segment in segments:
        if any(segment.segment_pool_id):
            behind = segment.address + segment.total_size
            pools.append(_Pool(segment.address, behind, tuple(segment.segment_pool_id)))
    return sorted(pools, key=lambda pool: (pool.first, pool.behind, pool.number))


def _line_number(site: str) -> int:
    return int(site.rpartition(":")[2] or 0)


def _frames_of(block: _Block) -> object:
    """Return the frames of a block, which torch 2.0 has in its history."""
    if block.frames or not block.history:
        return block.frames or ()
    return block.history[0].frames


def _failed(refused: _RefusedRequest, program: Program) -> FailedRequest:
    label = program[len(program) - 1].label
    event = refused.event
    return FailedRequest(
        event.size, refused.place.site, refused.iteration, label, event.device_free
    )


# the phase of what functions call, the first that is there: Megatron's, then those of torch, which
# every framework calls; what autograd calls on its own thread runs in the backward
_PHASES = (
    (re.compile("evaluate"), ""),
    (re.compile("(?!.*forward).*backward.*|.*autograd::Engine.*|unpack_hook"), "backward"),
    (re.compile("forward_step|_wrapped_call_impl"), "forward"),
    (re.compile("finalize_model_grads"), "sync"),
)


def _place(values: Any) -> AllocationSite:
    """Return where a list of frames is, innermost first."""
    frames: list[owners.Frame] = []
    for value in values:
        frames.append(owners.Frame(str(value["filename"]), str(value["name"]), int(value["line"])))
    functions = {frame.function for frame in frames}
    python = [(frame.file, frame.line) for frame in frames if _PYTHON.fullmatch(frame.file)]
    site = _site(python)
    is_optimizer = any("optimizer" in frame.file for frame in frames)
    phase = _phase(functions, is_optimizer)
    # who makes it: Megatron's buffers of parameters and gradients, Transformer Engine for cuBLAS,
    # the optimizer, or what builds the model
    kind = ""
    if site.startswith(_BUFFER) and frames[0].function == "__init__":
        kind = "buffer"
    elif "get_cublas_workspace" in functions:
        kind = "work"
    elif not phase and is_optimizer:
        kind = "optim"
    elif not phase and functions & _BUILDERS:
        kind = "param"
    return AllocationSite(
        site=site,
        phase=phase,
        kind=kind,
        known=bool(frames),
        maker=owners.maker_of(frames),
        batch_functions=frozenset(filter(owners.gets_batch, functions)),
    )


def _phase(functions: set[str], is_optimizer: bool) -> str:
    """Return the phase that functions of a stack name."""
    for pattern, phase in _PHASES:
        if any(map(pattern.fullmatch, functions)):
            return phase
    return "optimizer" if is_optimizer and "step" in functions else ""


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

    Attributes:
        grown: By kind and line, largest first; negative where it has become less.
        steps: For each of them, bytes more from every snapshot to the next.
        iterations: In which the snapshots were taken; () where one is not known.
    """

    grown: tuple[HeldMemory, ...]
    steps: tuple[tuple[int, ...], ...]
    iterations: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all lines together."""
        return sum(holding.num_bytes for holding in self.grown)

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
        """Return bytes an iteration of a line that grows each time; None if not known."""
        passed = 0
        if self.iterations:
            passed = self.iterations[-1] - self.iterations[0]
        if not passed or min(steps) <= 0:
            return None
        return sum(steps) / passed

    def to_rows(self) -> list[dict[str, object]]:
        """Return a row for every line."""
        rows: list[dict[str, object]] = []
        for holding, steps in zip(self.grown, self.steps, strict=True):
            rate = self.rate(steps)
            rows.append({**asdict(holding), "steps": list(steps), "per_iteration": rate})
        return rows

    def to_json(self) -> dict[str, object]:
        """Return what ``prism compare EARLIER … LATER --json`` prints; bytes."""
        return {
            "schema": "prism.memory_growth/2",
            "grown": self.num_bytes,
            "leaking": self.leaking,
            "iterations": list(self.iterations),
            "by": self.to_rows(),
        }


def grown(*snapshots: Snapshot) -> SnapshotGrowth:
    """Find what is alive at the end of the last snapshot and was not at the end of the first.

    They are one process's, in the order of their iterations, where all of them are known.
    """
    iterations: list[int] = []
    for snapshot in snapshots:
        if snapshot.iteration is not None:
            iterations.append(snapshot.iteration)
    # where an iteration is not known, the order of the arguments counts
    ordered = list(snapshots)
    if len(iterations) == len(snapshots):
        ordered.sort(key=lambda snapshot: snapshot.iteration or 0)
    else:
        iterations = []
    ends = [_alive_at_end(snapshot) for snapshot in ordered]
    steps: list[dict[tuple[str, ...], int]] = []
    for earlier, later in pairwise(ends):
        growth = difference(earlier, later)
        steps.append({holding.key: holding.num_bytes for holding in growth})
    # of each holding that grew from the first to the last, its growth from each to the next
    grown_holdings = difference(ends[0], ends[-1])
    steps_of_line: list[tuple[int, ...]] = []
    for holding in grown_holdings:
        steps_of_line.append(tuple(step.get(holding.key, 0) for step in steps))
    return SnapshotGrowth(grown_holdings, tuple(steps_of_line), tuple(sorted(iterations)))


def _alive_at_end(snapshot: Snapshot) -> tuple[HeldMemory, ...]:
    program = snapshot.program
    return holdings_at(program, len(program.allocations) - 1)


# -- beside the slices of the same job -------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    """One allocation.

    Attributes:
        num_bytes: Of it.
        site: Where it was asked for.
        step: In which (``0F``; ``O``: all that is between the last backward and the next forward).
    """

    num_bytes: int
    site: str
    step: str


@dataclass(frozen=True)
class SnapshotComparison(Rendered):
    """A real process beside the slices of its job, in the iteration of the real peak.

    Attributes:
        rank: Whose slices they are.
        real: The peak of the process.
        emulated: The peak of the slices.
        common: Bytes of blocks alive at the real peak that are alive at the other, too.
        asked: Bytes of large requests of the iteration.
        aligned: Bytes of those that come in the other's order.
        only_real: Requests of the first step that differs, that the slices lack there.
        only_emulated: Requests of that step that the process lacks.
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
        """Return a row for every category; bytes."""
        real, emulated = self.real.by_kind, self.emulated.by_kind
        return [{"kind": kind, "real": real[kind], "emulated": emulated[kind]} for kind in real]

    def to_json(self) -> dict[str, object]:
        """Return what ``prism compare SNAPSHOT SLICES --json`` prints; bytes."""
        by_category = {row["kind"]: [row["real"], row["emulated"]] for row in self.to_rows()}
        return {
            "schema": "prism.memory_alignment/1",
            "rank": self.rank,
            "real": self.real.num_bytes,
            "emulated": self.emulated.num_bytes,
            "common": self.common,
            "asked": self.asked,
            "aligned": self.aligned,
            "by_category": by_category,
            "only_real": [asdict(request) for request in self.only_real],
            "only_emulated": [asdict(request) for request in self.only_emulated],
        }


@dataclass(frozen=True)
class RankedSnapshots(Rendered):
    """What is to be said of several processes.

    Attributes:
        answers: Rank or name -> SnapshotComparison or SnapshotGrowth.
    """

    answers: Mapping[str, Any]

    @property
    def same(self) -> bool:
        """Whether it is so of each."""
        return all(answer.same for answer in self.answers.values())

    def to_rows(self) -> list[dict[str, object]]:
        """Return the rows of each."""
        rows: list[dict[str, object]] = []
        for name, answer in self.answers.items():
            for row in answer.to_rows():
                rows.append({"of": name, **row})
        return rows

    def to_json(self) -> dict[str, object]:
        """Return what ``prism compare FOLDER …`` prints."""
        ranks = {name: answer.to_json() for name, answer in self.answers.items()}
        return {"schema": "prism.memory_ranks/1", "ranks": ranks}


def compare(snapshot: Snapshot, programs: Programs) -> SnapshotComparison:
    """Hold the iteration of a snapshot's peak against the slices of its rank.

    Where its name says no rank, it is held against the slices that have most of its blocks.

    Raises:
        PrismError: The snapshot has no history, the slices have no such rank, or the program
            recorded no allocations.
    """
    if snapshot.rank is not None:
        return _beside(snapshot, programs.of(snapshot.rank))
    comparisons = [_beside(snapshot, program) for program in programs.programs]
    return max(comparisons, key=lambda comparison: comparison.common)


def _beside(snapshot: Snapshot, program: Program) -> SnapshotComparison:
    """Hold the iteration of a snapshot's peak against a slice."""
    known_peak(program)  # or it says what is missing
    real = known_peak(snapshot.program)
    emulated = known_peak(as_blocks(program, snapshot.settings))  # as those of the snapshot are
    sizes = {number: asked for number, asked, _ in snapshot.requests if asked > 0}
    iteration = snapshot.iterations[real.index]
    # the peak is before CUDA graphs ran, and the slices have an iteration with graphs
    if emulated.earlier:
        iteration = snapshot.iterations[-1]
        # the last is not whole where memory ran out
        if snapshot.failed is not None:
            iteration -= 1
    is_compared = [number == iteration for number in snapshot.iterations]
    order = _compare_order(_requests(snapshot.program, is_compared, sizes), _requests(program))
    common = _common_bytes(_alive(snapshot.program, sizes), _alive(program))
    return SnapshotComparison(
        rank=program.rank,
        real=real,
        emulated=emulated,
        common=common,
        asked=order.asked,
        aligned=order.aligned,
        only_real=order.only_real,
        only_emulated=order.only_emulated,
    )


@dataclass
class _Order:
    """How far requests of two programs come in the same order; as in SnapshotComparison."""

    asked: int = 0
    aligned: int = 0
    only_real: tuple[Request, ...] = ()
    only_emulated: tuple[Request, ...] = ()


def _compare_order(
    real_steps: Mapping[str, list[Request]], emulated_steps: Mapping[str, list[Request]]
) -> _Order:
    """Compare the order of requests step by step."""
    order = _Order()
    has_difference = False
    for step, real in real_steps.items():
        emulated = emulated_steps.get(step, [])
        real_sizes = [_rounded(request.num_bytes) for request in real]
        emulated_sizes = [_rounded(request.num_bytes) for request in emulated]
        matcher = SequenceMatcher(None, real_sizes, emulated_sizes, autojunk=False)
        matched_real: set[int] = set()
        matched_emulated: set[int] = set()
        for match in matcher.get_matching_blocks():
            matched_real.update(range(match.a, match.a + match.size))
            matched_emulated.update(range(match.b, match.b + match.size))
        order.asked += sum(request.num_bytes for request in real)
        order.aligned += sum(real[place].num_bytes for place in matched_real)
        # the first step that differs is shown
        if not has_difference and real_sizes != emulated_sizes:
            has_difference = True
            order.only_real = _without(real, matched_real)
            order.only_emulated = _without(emulated, matched_emulated)
    return order


def _without(requests: Sequence[Request], matched: set[int]) -> tuple[Request, ...]:
    """Return the requests that have no match."""
    return tuple(request for place, request in enumerate(requests) if place not in matched)


def _requests(
    program: Program,
    is_compared: Sequence[bool] = (),
    sizes: Mapping[int, int] | None = None,
) -> dict[str, list[Request]]:
    """Return large requests by step.

    Args:
        program: The program.
        is_compared: Of each op, whether its requests count; without it all but those before the
            first op.
        sizes: Block -> what was asked for; else it is what the program says.
    """
    requests_of_step: dict[str, list[Request]] = {}
    for before, storage, size, note in program.allocations.tolist():
        op_number = min(before, len(program) - 1)
        counts = is_compared[op_number] if is_compared else before > 0
        asked = (sizes or {}).get(storage, size)
        # small requests, frees, and what is not compared
        if size <= 0 or asked < _LARGE or not counts:
            continue
        op = program[op_number]
        step = op.label if op.phase in STEPS else "O"
        site = program.strings[note].rpartition("@")[2]
        requests_of_step.setdefault(step, []).append(Request(asked, site, step))
    return requests_of_step


def _alive(program: Program, sizes: Mapping[int, int] | None = None) -> dict[int, list[int]]:
    """Return blocks that are alive at the peak: what was asked for, rounded up -> bytes of each."""
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


def _common_bytes(real: Mapping[int, list[int]], emulated: Mapping[int, list[int]]) -> int:
    """Return bytes of the real blocks for which the others have one of the same request."""
    total = 0
    for asked, blocks in real.items():
        count = min(len(blocks), len(emulated.get(asked, ())))
        total += sum(sorted(blocks, reverse=True)[:count])
    return total
