"""Peaks of memory and what is alive there, per class of ranks, from programs alone.

Three levels that are never mixed, each with its provenance:

allocated : bytes of tensors, from the programs' allocations
reserved  : segments of the caching allocator: modelled, by replaying them (``allocator``)
device    : reserved and context, workspaces, NCCL: ``nccl_buffers``, where calibrated

What is alive has a kind.  The recorder tags what stands before the iteration (``param``, ``grad``,
``optim``, ``master``) and masks of attention that a data loader makes (``mask``); what else comes
to be later is told from how it lives:

act    : made in a forward, and alive when that forward is over
comm   : made where Megatron communicates (p2p, gathers, gradient buckets)
tmp    : made and gone within a step, or made by a backward
optim  : made by the optimizer and kept;  grad: made by a backward and kept
graph  : made for CUDA graphs: static buffers, what warms them up, what a capture keeps
other  : all else, and everything of slices that were recorded without notes

Integer bytes.  A step is a run of ops with one label; memory that Python drops on the way out of a
step counts as that step's.  It does not see what no tensor holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import BEGUN, PHASE_NAMES, TEXTS, Op
from megatron_prism.core.programs.program import Program
from megatron_prism.core.world import AXES, World, format_ranks

KINDS = (
    "param",
    "grad",
    "optim",
    "master",
    "act",
    "comm",
    "tmp",
    "graph",
    "work",
    "mask",
    "other",
)
_COMM = re.compile(r"p2p_communication\.py|tensor_parallel/mappings\.py|param_and_grad_buffer\.py")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_KEPT_KIND = {"backward": "grad", "weight": "grad", "optimizer": "optim"}  # by phase

Key = tuple[str, str, str]  # kind, module, site


@dataclass(frozen=True)
class HeldMemory:
    """Storages that are alive together and have one origin; layer numbers are ``*``."""

    kind: str
    module: str
    site: str
    num_bytes: int
    count: int

    @property
    def key(self) -> Key:
        """The origin."""
        return self.kind, self.module, self.site


@dataclass(frozen=True)
class Peak:
    """The most that was allocated at once.

    Attributes:
        num_bytes: allocated bytes.
        op: the op during which it was reached.
        index: of that op in the program; 0 if ``earlier``.
        site: Megatron's line whose allocation reached it; "" if it was not recorded.
        holdings: what was alive, largest first.
        earlier: whether it was before the iteration of the program.
    """

    num_bytes: int
    op: Op
    index: int
    site: str
    holdings: tuple[HeldMemory, ...]
    earlier: bool = False

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of every kind, in the order of KINDS; they add up to ``num_bytes``."""
        kind_bytes = dict.fromkeys(KINDS, 0)
        for holding in self.holdings:
            kind_bytes[holding.kind] += holding.num_bytes
        return kind_bytes


@dataclass(frozen=True)
class Retained:
    """``num_bytes`` that an iteration leaves behind, and the origins that grew, largest first."""

    num_bytes: int
    origins: tuple[HeldMemory, ...]


@dataclass(frozen=True)
class _Note:
    """A note ``kind:module @site`` of an allocation, taken apart.

    Attributes:
        kind: one of KINDS; "" where the note says none.
        module: "" where the note says none.
        site: Megatron's line; "" where it was not recorded.
    """

    kind: str
    module: str
    site: str


@dataclass(frozen=True)
class _Owners:
    """Whose storages are.

    Attributes:
        storage_of_event: int64 [allocations], the storage of every event.
        origin_of_storage: int64 [storages], an index into ``origins``.
        origins: keys.
    """

    storage_of_event: np.ndarray
    origin_of_storage: np.ndarray
    origins: list[Key]


def peak(program: Program) -> Peak | None:
    """Find the peak of the process of ``program``, as far as that is known; None if it recorded no
    allocations.
    """
    recorded = iteration_peak(program)
    if recorded is None or not len(program.earlier_peak):
        return recorded
    num_bytes = program.peak_bytes()
    # a what-if can have made the iteration larger than what was before it
    if num_bytes == recorded.num_bytes:
        return recorded

    # the earlier peak is kept as (note, bytes of a storage, storages)
    op = program.readable(program.earlier_peak_op[0])
    rows = []
    for note, size, count in program.earlier_peak.tolist():
        origin = _origin(program.strings[note], True, op.phase, True, True)
        rows.append((origin, size * count, count))
    return Peak(num_bytes, op, 0, op.site, grouped(rows), earlier=True)


def with_earlier(program: Program, earlier: Program) -> Program:
    """Return the program, which says of an ``earlier`` part of its process that it had more, if it
    had.
    """
    levels = program.live_bytes()
    earlier_levels = earlier.live_bytes()
    if earlier_levels.max(initial=0) <= levels.max(initial=0):
        return program

    # the op's own texts and those of what was alive follow those of the program
    top = int(earlier_levels.argmax())
    op = earlier[op_at(earlier, top)]
    site = site_of(earlier, top)
    numbers = {text: number for number, text in enumerate(program.strings)}
    place = Op(op.name, phase=op.phase, microbatch=op.microbatch, chunk=op.chunk, site=site)
    place_program = Program.from_ops(program.rank, [place])
    row = place_program.ops.copy()
    for name in TEXTS:
        text = place_program.strings[int(row[name][0])]
        row[name] = numbers.setdefault(text, len(numbers))

    # storages of one origin and size are one row
    rows = []
    for ((kind, module, origin_site), size), count in Counter(_alive_at(earlier, top)).items():
        note = f"{kind}:{module}"
        if origin_site:
            note += f" @{origin_site}"
        rows.append((numbers.setdefault(note, len(numbers)), size, count))
    return replace(
        program,
        strings=tuple(numbers),
        earlier_peak=np.array(rows, dtype=np.int64).reshape(-1, 3),
        earlier_peak_op=row,
    )


def iteration_peak(program: Program) -> Peak | None:
    """Find the peak of the iteration of ``program``; None if it recorded no allocations."""
    if not program.allocations.size or not len(program):
        return None
    live = program.live_bytes()
    top = int(live.argmax())
    index = op_at(program, top)
    return Peak(
        num_bytes=int(live[top]),
        op=program[index],
        index=index,
        site=site_of(program, top),
        holdings=holdings_at(program, top),
    )


def op_at(program: Program, event: int) -> int:
    """Return the op that the allocation ``event`` comes before; the last one for what comes behind
    it.
    """
    return min(int(program.allocations["before"][event]), len(program) - 1)


def known_peak(program: Program) -> Peak:
    """Find the peak of the program's process.

    Raises:
        UsageError: it recorded no allocations.
    """
    top = peak(program)
    if top is None:
        fix = (
            "capture on tier meta: prism capture RECIPE prism.tier=meta -o DIR, or a stock job "
            "with --prism-tier meta"
        )
        raise UsageError(f"rank {program.rank} recorded no allocations", fix=fix)
    return top


def _read(note: str) -> _Note:
    """Take a note apart."""
    owner, site = note, ""
    if "@" in note:
        owner, _, site = note.rpartition("@")
    kind, colon, module = owner.strip().partition(":")
    if colon and kind in KINDS:
        return _Note(kind, module, site.strip())
    return _Note("", owner.strip(), site)


def site_of(program: Program, event: int) -> str:
    """Return where the allocation ``event`` was asked for, "" if that was not recorded."""
    return _read(program.strings[program.allocations["note"][event]]).site


def module_of(note: str) -> str:
    """Return the module that a note names, "" if none."""
    return _read(note).module


def changes(program: Program) -> list[tuple[int, int, int]]:
    """Return (storage, bytes, stream) of the iteration, as the allocator's model takes them."""
    events = program.allocations
    streams = program.streams.tolist() or [0] * len(events)
    return list(zip(events["storage"].tolist(), events["bytes"].tolist(), streams, strict=True))


def ends_of_steps(program: Program) -> np.ndarray:
    """Find the last op of the step that each op belongs to: int64 [ops]."""
    ops = program.ops
    begins_step = np.zeros(len(ops), dtype=bool)
    for name in ("phase", "microbatch", "chunk"):
        column = ops[name]
        begins_step[1:] |= column[1:] != column[:-1]
    last_ops = np.append(np.flatnonzero(begins_step) - 1, len(ops) - 1)
    ends: np.ndarray = last_ops[np.cumsum(begins_step)]
    return ends


def _owners(program: Program) -> _Owners:
    """Find the origin of every storage."""
    events = program.allocations
    _, first_events, storage_of_event = np.unique(
        events["storage"], return_index=True, return_inverse=True
    )
    storage_of_event = storage_of_event.ravel()

    # bytes that stay of each storage, and its last event
    left_bytes = np.zeros(first_events.size, dtype=np.int64)
    np.add.at(left_bytes, storage_of_event, events["bytes"])
    last_events = np.zeros(first_events.size, dtype=np.int64)
    np.maximum.at(last_events, storage_of_event, np.arange(events.size))

    # whether it outlives the step that made it
    births = events[first_events]
    born_at = np.minimum(births["before"], len(program) - 1)
    is_kept = left_bytes > 0
    ends_behind = events["before"][last_events] > ends_of_steps(program)[born_at] + 1
    outlives = is_kept | ends_behind

    # each combination of what decides an origin once
    phases = program.ops["phase"][born_at]
    stands = births["before"] == 0
    columns = np.stack((births["note"], stands, phases, outlives, is_kept), axis=1)
    combinations, origin_of_storage = np.unique(
        columns.astype(np.int64), axis=0, return_inverse=True
    )
    origins = []
    for note, stood, phase, beyond, stays in combinations.tolist():
        text = program.strings[note]
        origins.append(_origin(text, bool(stood), PHASE_NAMES[phase], bool(beyond), bool(stays)))
    return _Owners(storage_of_event, origin_of_storage.ravel(), origins)


def grouped(rows: Iterable[tuple[Key, int, int]]) -> tuple[HeldMemory, ...]:
    """Add up bytes and storages by origin, largest first, out of (origin, bytes, storages)."""
    sums: dict[Key, list[int]] = {}
    for key, num_bytes, count in rows:
        entry = sums.setdefault(key, [0, 0])
        entry[0] += num_bytes
        entry[1] += count
    holdings = [HeldMemory(*key, num_bytes, count) for key, (num_bytes, count) in sums.items()]
    holdings.sort(key=lambda holding: (-abs(holding.num_bytes), holding.key))
    return tuple(holdings)


def difference(a: Iterable[HeldMemory], b: Iterable[HeldMemory]) -> tuple[HeldMemory, ...]:
    """Return what ``b`` holds more than ``a`` (less: negative), by origin, most first."""
    rows = [(holding.key, -holding.num_bytes, -holding.count) for holding in a]
    rows += [(holding.key, holding.num_bytes, holding.count) for holding in b]
    return tuple(holding for holding in grouped(rows) if holding.num_bytes)


def holdings_at(program: Program, top: int) -> tuple[HeldMemory, ...]:
    """Return what is alive after event ``top``, by kind, module and site."""
    return grouped((origin, size, 1) for origin, size in _alive_at(program, top))


def _alive_at(program: Program, top: int) -> list[tuple[Key, int]]:
    """Return (origin, bytes) of each storage that is alive after event ``top``."""
    owners = _owners(program)
    held_bytes = np.zeros(owners.origin_of_storage.size, dtype=np.int64)
    storages = owners.storage_of_event[: top + 1]
    np.add.at(held_bytes, storages, program.allocations["bytes"][: top + 1])
    alive = np.flatnonzero(held_bytes > 0)
    origins = owners.origin_of_storage[alive].tolist()
    sizes = held_bytes[alive].tolist()
    return [(owners.origins[origin], size) for origin, size in zip(origins, sizes, strict=True)]


def sizes_at_peak(program: Program) -> Counter[int]:
    """Count the storages of each size, in bytes, that are alive at the peak of the program's
    process.
    """
    sizes = Counter[int]()
    if known_peak(program).earlier:
        for _, size, count in program.earlier_peak.tolist():
            sizes[size] += count
        return sizes
    top = int(program.live_bytes().argmax())
    for _, size in _alive_at(program, top):
        sizes[size] += 1
    return sizes


def live_by(
    program: Program, name: Callable[[str, str, str], str], events: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what is alive after some events, by name.

    Args:
        program: that recorded memory.
        name: what an origin (its kind, module and site) is called.
        events: int64 [n].

    Returns:
        int64 [n] bytes of each name.
    """
    owners = _owners(program)
    names = [name(*origin) for origin in owners.origins]
    places = {distinct: place for place, distinct in enumerate(dict.fromkeys(names))}
    place_of_origin = np.array([places[origin_name] for origin_name in names], dtype=np.int64)
    place_of_event = place_of_origin[owners.origin_of_storage][owners.storage_of_event]
    changed_bytes = program.allocations["bytes"]
    levels = {}
    for distinct, place in places.items():
        levels[distinct] = np.cumsum(np.where(place_of_event == place, changed_bytes, 0))[events]
    return levels


def growth(program: Program) -> Retained | None:
    """Find what the recorded iteration leaves behind, from the start of its train step to that of
    the next.

    An origin that replaces what it left the last time has not grown.  Nor does it count if the
    iteration before left nothing: neither were there more bytes after it, nor is anything alive
    that it made; so a cache that fills is no leak.

    Returns:
        None in a job's first iteration, which makes what the optimizer keeps, and without a
        history.
    """
    rows = program.history
    # the last row may say that the next one begins
    begun = np.flatnonzero(rows[:-1, 0] == BEGUN)
    if begun.size < 2:
        return None
    previous, recorded = begun[-2:].tolist()
    previous_rows = rows[previous:recorded]
    recorded_rows = rows[recorded:]

    # what the iteration before left: bytes, and what it made that is alive
    previous_bytes = int(previous_rows[:, 1].sum())
    made_before = previous_rows[:, 0][previous_rows[:, 1] > 0]
    alive_bytes = int(rows[np.isin(rows[:, 0], made_before), 1].sum())
    num_bytes = min(int(recorded_rows[:, 1].sum()), max(previous_bytes, alive_bytes))
    if num_bytes <= 0:
        return Retained(num_bytes, ())
    origins = _grown_origins(program, int((recorded_rows[:, 1] != 0).sum()))
    return Retained(num_bytes, origins)


def _grown_origins(program: Program, num_events: int) -> tuple[HeldMemory, ...]:
    """Return the origins that have more bytes after the program's last ``num_events`` events."""
    events = program.allocations
    begin = events.size - num_events
    _, first_events, storage_of_event = np.unique(
        events["storage"], return_index=True, return_inverse=True
    )
    # what the last events changed, by storage
    changed_bytes = np.zeros(first_events.size, dtype=np.int64)
    np.add.at(changed_bytes, storage_of_event.ravel()[begin:], events["bytes"][begin:])

    rows = []
    sites: dict[Key, str] = {}
    for storage in np.flatnonzero(changed_bytes).tolist():
        note = _read(program.strings[events["note"][first_events[storage]]])
        # what the model or the optimizer owns is the same wherever it was made
        key_site = note.site
        if note.kind:
            key_site = ""
        key = (note.kind or "other", _NUMBER.sub("*", note.module), key_site)
        change = int(changed_bytes[storage])
        count = 1
        if change < 0:
            count = -1
        rows.append((key, change, count))
        sites[key] = note.site or sites.get(key, "")

    origins = []
    for holding in grouped(rows):
        if holding.num_bytes > 0:
            site = sites[holding.key]
            origins.append(replace(holding, site=site, count=max(holding.count, 0)))
    return tuple(origins)


def viz_snapshot(program: Program) -> dict[str, object]:
    """Return the program's allocations as pytorch.org/memory_viz reads them.

    The format is that of ``_record_memory_history`` of torch.cuda.memory; ``time_us`` is the number
    of the op.
    """
    events: list[dict[str, object]] = []
    alive: dict[int, list[dict[str, object]]] = {}
    address = 0
    for before, storage, size, note in program.allocations.tolist():
        # a storage is made, or grows
        if size > 0:
            event: dict[str, object] = {
                "action": "alloc",
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": before,
                "frames": [_frame(_read(program.strings[note]))],
            }
            events.append(event)
            alive.setdefault(storage, []).append(event)
            address += size
            continue
        # the whole storage goes
        for birth in alive.pop(storage, ()):
            for action in ("free_requested", "free_completed"):
                events.append({**birth, "time_us": before, "action": action})
    return {
        "segments": [],
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _frame(note: _Note) -> dict[str, object]:
    """Write a note as a frame of a snapshot."""
    file, _, line = note.site.rpartition(":")
    line_number = 0
    if line.isdigit():
        line_number = int(line)
    return {
        "filename": file or note.site or "before the iteration",
        "name": note.module or note.kind,
        "line": line_number,
    }


def _origin(note: str, stands: bool, phase: str, beyond: bool, stays: bool) -> Key:
    """Say whose a storage is.

    Args:
        note: of the event that made it.
        stands: whether it was there before the iteration.
        phase: of the step that made it.
        beyond: whether it is alive when that step is over.
        stays: whether it is never freed.
    """
    parts = _read(note)
    module = _NUMBER.sub("*", parts.module)
    # the recorder has said it, or nobody knows
    is_unknown = stands or not (parts.site or module)
    if parts.kind or is_unknown:
        return parts.kind or "other", module, parts.site
    kind = "tmp"
    # made by code of communication
    if _COMM.search(parts.site):
        kind = "comm"
    # a forward left it for a backward
    elif beyond and phase == "forward":
        kind = "act"
    # it stays: a gradient, or a state of the optimizer
    elif beyond and stays:
        kind = _KEPT_KIND.get(phase, "other")
    return kind, module, parts.site


def class_name(world: World, ranks: Sequence[int]) -> str:
    """Name a class of ranks: ``pp=0``, the coordinates that all of ``ranks`` and nobody else share;
    else the ranks.
    """
    members = np.asarray(ranks)
    if members.size == world.size:
        return "all"
    everyone = np.arange(world.size)
    sharing = np.ones(world.size, dtype=bool)  # ranks that share the coordinates so far
    words = []
    for axis in AXES:
        places = np.asarray(world._along(axis, everyone))
        member_places = np.unique(places[members])
        narrower = sharing & np.isin(places, member_places)
        # a coordinate that tells nobody apart is not named
        if narrower.sum() < sharing.sum():
            words.append(f"{axis}={format_ranks(member_places.tolist())}")
            sharing = narrower
    if int(sharing.sum()) == members.size:
        return ";".join(words)
    return f"ranks={format_ranks(members.tolist())}"
