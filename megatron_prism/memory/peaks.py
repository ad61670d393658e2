"""Peaks of memory and what is alive there, per class of ranks, from programs alone.

Three levels that are never mixed, each with its provenance:

allocated : bytes of tensors, from the programs' allocations
reserved  : segments of the caching allocator: modelled, by replaying them (``allocator``)
device    : reserved and context, workspaces, NCCL: ``costs.communicators``, where calibrated

What is alive has a kind.  The recorder tags what stands before the iteration (``param``, ``grad``,
``optim``); what comes to be later is told from how it lives:

act    : made in a forward, and alive when that forward is over
comm   : made where Megatron communicates (p2p, gathers, gradient buckets)
tmp    : made and gone within a step, or made by a backward
optim  : made by the optimizer and kept;  grad: made by a backward and kept
other  : all else, and everything of slices that were recorded without notes

Integer bytes.  A step is a run of ops with one label; memory that Python drops on the way out of a
step counts as that step's.  It does not see what no tensor holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import AXES, World, format_ranks
from megatron_prism.graph.classes import equal_programs
from megatron_prism.memory import allocator

__all__ = [
    "KINDS",
    "ClassMemory",
    "HeldMemory",
    "analyse",
    "class_name",
    "growth",
    "overflow",
    "peak",
]

KINDS = ("param", "grad", "optim", "act", "comm", "tmp", "other")
_COMM = re.compile(r"p2p_communication\.py|tensor_parallel/mappings\.py|param_and_grad_buffer\.py")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class HeldMemory:
    """Storages that are alive together and have one origin; layer numbers are ``*``."""

    kind: str
    module: str
    site: str
    num_bytes: int
    count: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.module, self.site


@dataclass(frozen=True)
class Peak:
    """The most that was allocated at once.

    num_bytes : allocated bytes
    op        : the op during which it was reached, and its index
    site      : Megatron's line whose allocation reached it; "" if it was not recorded
    holdings  : what was alive, largest first
    """

    num_bytes: int
    op: Op
    index: int
    site: str
    holdings: tuple[HeldMemory, ...]

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of every kind, in the order of KINDS; they add up to ``num_bytes``."""
        return {k: sum(h.num_bytes for h in self.holdings if h.kind == k) for k in KINDS}


@dataclass(frozen=True)
class Overflow:
    """Where a class runs out of memory: ``limit`` bytes of segments are not enough for a request of
    ``size`` bytes at ``op`` (None: for what stands before the iteration), after cached segments
    were given back."""

    op: Op | None
    site: str
    size: int
    reserved: int

    @property
    def where(self) -> str:
        if self.op is None:
            return "before the iteration"
        return f"in {self.op.label} {self.op.name} {self.site}".rstrip()


@dataclass(frozen=True)
class ClassMemory:
    """Memory of the ranks of one class: peak of allocated, and reserved as modelled.

    between : least and most reserved: the device keeps up, or the host is far ahead of it
    program : index of the program that they run
    growth  : what an iteration leaves behind, ``growth``
    """

    name: str
    ranks: str
    count: int
    peak: Peak
    reserved: int
    between: tuple[int, int]
    program: int = 0
    growth: tuple[HeldMemory, ...] | None = None


def peak(program: Program) -> Peak | None:
    """The peak of one program; None if it recorded no allocations."""
    events = program.allocations
    if not events.size or not len(program):
        return None
    live = program.live_bytes()
    top = int(live.argmax())
    ops = np.minimum(events["before"], len(program) - 1)
    index, note = int(ops[top]), program.strings[events["note"][top]]
    return Peak(
        num_bytes=int(live[top]),
        op=program[index],
        index=index,
        site=_split(note)[2],
        holdings=_holdings(program, top),
    )


def _split(note: str) -> tuple[str, str, str]:
    """(kind or "", module, site) of a note ``kind:module @site``."""
    owner, _, site = note.rpartition("@") if "@" in note else (note, "", "")
    kind, colon, module = owner.strip().partition(":")
    return (kind, module, site.strip()) if colon and kind in KINDS else ("", owner.strip(), site)


def _runs(program: Program) -> np.ndarray:
    """int64 [ops]: the last op of the step that each op belongs to."""
    ops = program.ops
    labels = [ops[name] for name in ("phase", "microbatch", "chunk")]
    new = np.zeros(len(ops), dtype=bool)
    for column in labels:
        new[1:] |= column[1:] != column[:-1]
    ends = np.append(np.flatnonzero(new) - 1, len(ops) - 1)
    found: np.ndarray = ends[np.cumsum(new)]
    return found


def _holdings(program: Program, top: int) -> tuple[HeldMemory, ...]:
    """What is alive after event ``top``, by kind, module and site."""
    events = program.allocations
    ids, which = np.unique(events["storage"], return_inverse=True)
    which = which.ravel()
    held = np.zeros(ids.size, dtype=np.int64)
    np.add.at(held, which[: top + 1], events["bytes"][: top + 1])
    left = np.zeros(ids.size, dtype=np.int64)
    np.add.at(left, which, events["bytes"])
    born = np.full(ids.size, events.size, dtype=np.int64)
    np.minimum.at(born, which, np.arange(events.size))
    last = np.zeros(ids.size, dtype=np.int64)
    np.maximum.at(last, which, np.arange(events.size))
    ends = _runs(program)
    total: dict[tuple[str, str, str], list[int]] = {}
    for one in np.flatnonzero(held > 0):
        first = int(born[one])
        kept = left[one] > 0
        key = _origin(program, first, None if kept else int(events["before"][last[one]]), ends)
        entry = total.setdefault(key, [0, 0])
        entry[0] += int(held[one])
        entry[1] += 1
    made = [HeldMemory(*key, num_bytes=size, count=n) for key, (size, n) in total.items()]
    return tuple(sorted(made, key=lambda h: (-h.num_bytes, h.key)))


def growth(program: Program) -> tuple[HeldMemory, ...] | None:
    """What is alive after the iteration and was not before it, by origin, largest first.

    An origin that replaces what it left the last time has not grown.  None in a job's first
    iteration, which makes what the optimizer keeps, and where notes do not say.
    """
    events = program.allocations
    notes = [program.strings[note] for note in np.unique(events["note"][events["before"] == 0])]
    if not any(n.startswith("optim:") and not n.startswith("optim:main") for n in notes):
        return None
    ids, first, which = np.unique(events["storage"], return_index=True, return_inverse=True)
    left = np.zeros(ids.size, dtype=np.int64)
    np.add.at(left, which.ravel(), events["bytes"])
    stood = np.zeros(ids.size, dtype=np.int64)
    early = events["before"] == 0
    np.add.at(stood, which.ravel()[early], events["bytes"][early])
    total: dict[tuple[str, str], list[int]] = {}
    for one in np.flatnonzero(left != stood):
        _, module, site = _split(program.strings[events["note"][first[one]]])
        entry = total.setdefault((_NUMBER.sub("*", module), site), [0, 0])
        entry[0] += int(left[one] - stood[one])
        entry[1] += 1 if left[one] > stood[one] else -1
    made = [HeldMemory("other", *key, num_bytes=size, count=n) for key, (size, n) in total.items()]
    return tuple(sorted((h for h in made if h.num_bytes), key=lambda h: (-h.num_bytes, h.key)))


def overflow(
    program: Program, limit: int, settings: allocator.Settings | None = None
) -> Overflow | None:
    """Where the program runs out of ``limit`` bytes of segments; None if they are enough for its
    iteration, and for all that the process had asked for before, where that is known."""
    full = allocator.replay_requests(_changes(program), settings, limit).full
    if full is None:
        full = allocator.replay_requests(program.history.tolist(), settings, limit).full
        return None if full is None else Overflow(None, "", full.size, full.reserved)
    row = program.allocations[full.event]
    at = min(int(row["before"]), len(program) - 1)
    site = _split(program.strings[row["note"]])[2]
    return Overflow(program[at] if at else None, site, full.size, full.reserved)


def _origin(
    program: Program, first: int, freed: int | None, ends: np.ndarray
) -> tuple[str, str, str]:
    """(kind, module, site) of a storage made by event ``first`` and freed before op ``freed``."""
    row = program.allocations[first]
    kind, module, site = _split(program.strings[row["note"]])
    module = _NUMBER.sub("*", module)
    if kind or not (site or module):
        return kind or "other", module, site
    at = min(int(row["before"]), len(program) - 1)
    if row["before"] == 0:  # left by what came before the iteration
        return "other", module, site
    phase = program[at].phase
    beyond = freed is None or freed > int(ends[at]) + 1
    if _COMM.search(site):
        kind = "comm"
    elif not beyond:
        kind = "tmp"
    elif phase == "forward":
        kind = "act"
    elif freed is None:
        kind = {"backward": "grad", "weight": "grad", "optimizer": "optim"}.get(phase, "other")
    else:
        kind = "tmp"
    return kind, module, site


# -- all classes ----------------------------------------------------------------------------------
def class_name(world: World, ranks: Sequence[int]) -> str:
    """``pp=0``: the coordinates that all of ``ranks`` and nobody else share; else the ranks."""
    chosen = np.asarray(ranks)
    if chosen.size == world.size:
        return "all"
    everyone = np.arange(world.size)
    alike, words = np.ones(world.size, dtype=bool), []
    for axis in AXES:
        place = np.asarray(world._along(axis, everyone))
        values = np.unique(place[chosen])
        narrower = alike & np.isin(place, values)
        if narrower.sum() < alike.sum():
            words.append(f"{axis}={format_ranks(values.tolist())}")
            alike = narrower
    if int(alike.sum()) == chosen.size:
        return ";".join(words)
    return f"ranks={format_ranks(chosen.tolist())}"


def analyse(
    programs: Programs, settings: allocator.Settings | None = None
) -> tuple[ClassMemory, ...]:
    """Memory of every class; UsageError if a program recorded no allocations."""
    settings = settings or allocator.Settings()
    same = equal_programs(programs.programs)[programs.program_of]
    found = []
    for index in np.unique(same):
        program = programs.programs[index]
        ranks = np.flatnonzero(same == index)
        top = peak(program)
        if top is None:
            fix = ("capture on tier meta: prism capture RECIPE prism.tier=meta -o DIR, or a stock "
                   "job with --prism-tier meta")  # fmt: skip
            raise UsageError(f"rank {program.rank} recorded no allocations", fix=fix)
        heard = program.history.tolist() or _changes(program)
        least, most = (allocator.replay_requests(heard, settings, ahead=n).peak_reserved
                       for n in (0, allocator.AHEAD))  # fmt: skip
        name, shown = class_name(programs.world, ranks.tolist()), format_ranks(ranks.tolist())
        found.append(ClassMemory(name, shown, ranks.size, top, (least + most) // 2, (least, most),
                                 int(index), growth(program)))  # fmt: skip
    return tuple(sorted(found, key=lambda one: int(re.split(r"\D", one.ranks, maxsplit=1)[0])))


def _changes(program: Program) -> list[tuple[int, int, int]]:
    events = program.allocations
    streams = program.streams.tolist() or [0] * len(events)
    return list(zip(events["storage"].tolist(), events["bytes"].tolist(), streams, strict=True))
