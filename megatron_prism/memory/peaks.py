"""Peaks of memory and what is alive there, per class of ranks, from programs alone.

Three levels that are never mixed, each with its provenance:

allocated : bytes of tensors, from the programs' allocations
reserved  : segments of the caching allocator: modelled, by replaying them (``allocator``)
device    : reserved and context, workspaces, NCCL: ``nccl_buffers``, where calibrated

What is alive has a kind.  The recorder tags what stands before the iteration (``param``, ``grad``,
``optim``); what comes to be later is told from how it lives:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.core import job_settings
from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import BEGUN, PHASE_NAMES, TEXTS, Op
from megatron_prism.core.program import Program
from megatron_prism.core.world import AXES, World, format_ranks
from megatron_prism.memory import allocator

if TYPE_CHECKING:
    from megatron_prism.core.recipe import Recipe

KINDS = ("param", "grad", "optim", "act", "comm", "tmp", "graph", "other")
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
    op        : the op during which it was reached
    index     : of that op in the program; 0 if ``earlier``
    site      : Megatron's line whose allocation reached it; "" if it was not recorded
    holdings  : what was alive, largest first
    earlier   : whether it was before the iteration of the program
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
        return {k: sum(h.num_bytes for h in self.holdings if h.kind == k) for k in KINDS}


@dataclass(frozen=True)
class Retained:
    """``num_bytes`` that an iteration leaves behind, and the origins that grew, largest first."""

    num_bytes: int
    origins: tuple[HeldMemory, ...]


@dataclass(frozen=True)
class Overflow:
    """Where a class runs out of memory: ``limit`` bytes of segments are not enough for a request of
    ``size`` bytes at ``op`` (None: for what stands before the iteration), after cached segments
    were given back; ``holdings`` are alive then.
    """

    op: Op | None
    site: str
    size: int
    reserved: int
    holdings: tuple[HeldMemory, ...] = ()

    @property
    def where(self) -> str:
        if self.op is None:
            return "before the iteration"
        return f"in {self.op.label} {self.op.name} {self.site}".rstrip()


def peak(program: Program) -> Peak | None:
    """The peak of the process of ``program``, as far as that is known; None if it recorded no
    allocations.
    """
    recorded = iteration_peak(program)
    if recorded is None or not len(program.earlier_peak):
        return recorded
    num_bytes = program.peak_bytes()
    # a what-if can have made the iteration larger than what was before it
    if num_bytes == recorded.num_bytes:
        return recorded
    rows = program.earlier_peak.tolist()
    op = program.readable(program.earlier_peak_op[0])
    holdings = grouped(
        (_origin(program.strings[note], True, op.phase, True, True), size * count, count)
        for note, size, count in rows
    )
    return Peak(num_bytes, op, 0, op.site, holdings, earlier=True)


def with_earlier(program: Program, earlier: Program) -> Program:
    """The program, which says of an ``earlier`` part of its process that it had more, if it had."""
    levels, levels_before = program.live_bytes(), earlier.live_bytes()
    if levels_before.max(initial=0) <= levels.max(initial=0):
        return program
    top = int(levels_before.argmax())
    # the op's own texts and those of what was alive follow those of the program
    numbers = {text: number for number, text in enumerate(program.strings)}
    op, site = earlier[op_at(earlier, top)], site_of(earlier, top)
    place = Op(op.name, phase=op.phase, microbatch=op.microbatch, chunk=op.chunk, site=site)
    lone = Program.from_ops(program.rank, [place])
    row = lone.ops.copy()
    for name in TEXTS:
        text = lone.strings[int(row[name][0])]
        row[name] = numbers.setdefault(text, len(numbers))
    counts = Counter(_alive_at(earlier, top))
    rows = []
    for ((kind, module, origin_site), size), count in counts.items():
        note = f"{kind}:{module} @{origin_site}" if origin_site else f"{kind}:{module}"
        rows.append((numbers.setdefault(note, len(numbers)), size, count))
    return replace(
        program,
        strings=tuple(numbers),
        earlier_peak=np.array(rows, dtype=np.int64).reshape(-1, 3),
        earlier_peak_op=row,
    )


def iteration_peak(program: Program) -> Peak | None:
    """The peak of the iteration of ``program``; None if it recorded no allocations."""
    if not program.allocations.size or not len(program):
        return None
    live = program.live_bytes()
    top = int(live.argmax())
    index = op_at(program, top)
    held, site = holdings_at(program, top), site_of(program, top)
    return Peak(int(live[top]), program[index], index, site, held)


def op_at(program: Program, event: int) -> int:
    """The op that the allocation ``event`` comes before; the last one for what comes behind it."""
    return min(int(program.allocations["before"][event]), len(program) - 1)


def known_peak(program: Program) -> Peak:
    """The peak of the program's process; UsageError if it recorded no allocations."""
    top = peak(program)
    if top is None:
        fix = ("capture on tier meta: prism capture RECIPE prism.tier=meta -o DIR, or a stock job "
               "with --prism-tier meta")  # fmt: skip
        raise UsageError(f"rank {program.rank} recorded no allocations", fix=fix)
    return top


def _split(note: str) -> tuple[str, str, str]:
    """(kind or "", module, site) of a note ``kind:module @site``."""
    owner, _, site = note.rpartition("@") if "@" in note else (note, "", "")
    kind, colon, module = owner.strip().partition(":")
    return (kind, module, site.strip()) if colon and kind in KINDS else ("", owner.strip(), site)


def site_of(program: Program, event: int) -> str:
    """Where the allocation ``event`` was asked for, "" if that was not recorded."""
    return _split(program.strings[program.allocations["note"][event]])[2]


def module_of(note: str) -> str:
    """The module that a note names, "" if none."""
    return _split(note)[1]


def ends_of_steps(program: Program) -> np.ndarray:
    """int64 [ops]: the last op of the step that each op belongs to."""
    ops = program.ops
    labels = [ops[name] for name in ("phase", "microbatch", "chunk")]
    new = np.zeros(len(ops), dtype=bool)
    for column in labels:
        new[1:] |= column[1:] != column[:-1]
    ends = np.append(np.flatnonzero(new) - 1, len(ops) - 1)
    found: np.ndarray = ends[np.cumsum(new)]
    return found


Key = tuple[str, str, str]  # kind, module, site


def _owners(program: Program) -> tuple[np.ndarray, np.ndarray, list[Key]]:
    """(the storage of every event, the origin of every storage, origins)."""
    events = program.allocations
    _, born, which = np.unique(events["storage"], return_index=True, return_inverse=True)
    which = which.ravel()
    left, last = np.zeros((2, born.size), dtype=np.int64)
    np.add.at(left, which, events["bytes"])
    np.maximum.at(last, which, np.arange(events.size))
    first = events[born]
    at = np.minimum(first["before"], len(program) - 1)
    kept = left > 0
    beyond = kept | (events["before"][last] > ends_of_steps(program)[at] + 1)
    columns = (first["note"], first["before"] == 0, program.ops["phase"][at], beyond, kept)
    rows, of = np.unique(np.stack(columns, axis=1).astype(np.int64), axis=0, return_inverse=True)
    keys = [
        _origin(program.strings[note], bool(stands), PHASE_NAMES[phase], bool(far), bool(stays))
        for note, stands, phase, far, stays in rows.tolist()
    ]
    return which, of.ravel(), keys


def grouped(rows: Iterable[tuple[Key, int, int]]) -> tuple[HeldMemory, ...]:
    """Bytes and storages by origin, largest first, out of (origin, bytes, storages)."""
    sums: dict[Key, list[int]] = {}
    for key, num_bytes, count in rows:
        entry = sums.setdefault(key, [0, 0])
        entry[0] += num_bytes
        entry[1] += count
    held = (HeldMemory(*key, num_bytes, count) for key, (num_bytes, count) in sums.items())
    return tuple(sorted(held, key=lambda one: (-abs(one.num_bytes), one.key)))


def difference(a: Iterable[HeldMemory], b: Iterable[HeldMemory]) -> tuple[HeldMemory, ...]:
    """What ``b`` holds more than ``a`` (less: negative), by origin, most first."""
    rows = [(holding.key, -holding.num_bytes, -holding.count) for holding in a]
    rows += [(holding.key, holding.num_bytes, holding.count) for holding in b]
    return tuple(holding for holding in grouped(rows) if holding.num_bytes)


def holdings_at(program: Program, top: int) -> tuple[HeldMemory, ...]:
    """What is alive after event ``top``, by kind, module and site."""
    return grouped((origin, size, 1) for origin, size in _alive_at(program, top))


def _alive_at(program: Program, top: int) -> list[tuple[Key, int]]:
    """(origin, bytes) of each storage that is alive after event ``top``."""
    which, of, keys = _owners(program)
    held = np.zeros(of.size, dtype=np.int64)
    np.add.at(held, which[: top + 1], program.allocations["bytes"][: top + 1])
    alive = np.flatnonzero(held > 0)
    pairs = zip(of[alive].tolist(), held[alive].tolist(), strict=True)
    return [(keys[origin], size) for origin, size in pairs]


def sizes_at_peak(program: Program) -> Counter[int]:
    """How many storages of each size, in bytes, are alive at the peak of the program's process."""
    top = known_peak(program)
    if top.earlier:
        sizes = Counter[int]()
        for _, size, count in program.earlier_peak.tolist():
            sizes[size] += count
        return sizes
    most = int(program.live_bytes().argmax())
    return Counter(size for _, size in _alive_at(program, most))


def live_by(
    program: Program, name: Callable[[str, str, str], str], events: np.ndarray
) -> dict[str, np.ndarray]:
    """What is alive after each of ``events`` (int64 [n]), int64 [n] bytes by what ``name`` calls
    an origin (its kind, module and site).
    """
    which, of, keys = _owners(program)
    names = [name(*key) for key in keys]
    known = list(dict.fromkeys(names))
    mine = np.array([known.index(one) for one in names], dtype=np.int64)[of][which]
    changes = program.allocations["bytes"]
    return {
        one: np.cumsum(np.where(mine == place, changes, 0))[events]
        for place, one in enumerate(known)
    }


def growth(program: Program) -> Retained | None:
    """What the recorded iteration leaves behind, from the start of its train step to that of the
    next: None in a job's first iteration, which makes what the optimizer keeps, and without a
    history.

    An origin that replaces what it left the last time has not grown.  Nor does it count if the
    iteration before left nothing: neither were there more bytes after it, nor is anything alive
    that it made; so a cache that fills is no leak.
    """
    rows, events = program.history, program.allocations
    begun = np.flatnonzero(rows[:-1, 0] == BEGUN)  # the last row may say that the next one begins
    if begun.size < 2:
        return None
    first, last = begun[-2:].tolist()  # of the two iterations
    before, num_bytes = (int(part[:, 1].sum()) for part in (rows[first:last], rows[last:]))
    born = rows[first:last, 0][rows[first:last, 1] > 0]
    kept = int(rows[np.isin(rows[:, 0], born), 1].sum())
    num_bytes = min(num_bytes, max(before, kept))
    if num_bytes <= 0:
        return Retained(num_bytes, ())
    stands = events.size - int((rows[last:, 1] != 0).sum())
    ids, born, which = np.unique(events["storage"], return_index=True, return_inverse=True)
    change = np.zeros(ids.size, dtype=np.int64)
    np.add.at(change, which.ravel()[stands:], events["bytes"][stands:])
    held, sites = [], dict[Key, str]()
    for one in np.flatnonzero(change):
        kind, module, site = _split(program.strings[events["note"][born[one]]])
        # what the model or the optimizer owns is the same wherever it was made
        key = kind or "other", _NUMBER.sub("*", module), "" if kind else site
        held.append((key, int(change[one]), 1 if change[one] > 0 else -1))
        sites[key] = site or sites.get(key, "")
    origins = (replace(one, site=sites[one.key], count=max(one.count, 0))
               for one in grouped(held) if one.num_bytes > 0)  # fmt: skip
    return Retained(num_bytes, tuple(origins))


def overflow(
    program: Program, limit: int, settings: allocator.Settings | None = None
) -> Overflow | None:
    """Where the program runs out of ``limit`` bytes of segments; None if they are enough for its
    iteration, and for all that the process had asked for before, where that is known.
    """
    full = allocator.replay_requests(changes(program), settings, limit).full
    if full is None:
        full = allocator.replay_requests(program.history.tolist(), settings, limit).full
        return None if full is None else Overflow(None, "", full.size, full.reserved)
    index = op_at(program, full.event)
    holdings = holdings_at(program, full.event)
    op = program[index] if index else None
    site = site_of(program, full.event)
    return Overflow(op, site, full.size, full.reserved, holdings)


def viz_snapshot(program: Program) -> dict[str, object]:
    """The program's allocations as pytorch.org/memory_viz reads them (``_record_memory_history``
    of torch.cuda.memory); ``time_us`` is the number of the op.
    """
    events: list[dict[str, object]] = []
    alive: dict[int, list[dict[str, object]]] = {}
    address = 0
    for before, storage, size, note in program.allocations.tolist():
        if size > 0:
            kind, module, site = _split(program.strings[note])
            file, _, line = site.rpartition(":")
            frame = {"filename": file or site or "before the iteration", "name": module or kind,
                     "line": int(line) if line.isdigit() else 0}  # fmt: skip
            events.append({"action": "alloc", "addr": address, "size": size, "stream": 0,
                           "time_us": before, "frames": [frame]})  # fmt: skip
            alive.setdefault(storage, []).append(events[-1])
            address += size
        else:
            events += [{**born, "time_us": before, "action": action}
                       for born in alive.pop(storage, ())
                       for action in ("free_requested", "free_completed")]  # fmt: skip
    return {"segments": [], "device_traces": [events], "allocator_settings": {},
            "external_annotations": []}  # fmt: skip


def _origin(note: str, stands: bool, phase: str, beyond: bool, kept: bool) -> Key:
    """Whose a storage is.

    Args:
        note: of the event that made it.
        stands: whether it was there before the iteration.
        phase: of the step that made it.
        beyond: whether it is alive when that step is over.
        kept: whether it is never freed.
    """
    kind, module, site = _split(note)
    module = _NUMBER.sub("*", module)
    if kind or stands or not (site or module):
        return kind or "other", module, site
    if _COMM.search(site):
        kind = "comm"
    elif not beyond:
        kind = "tmp"
    elif phase == "forward":
        kind = "act"
    elif kept:
        kind = {"backward": "grad", "weight": "grad", "optimizer": "optim"}.get(phase, "other")
    else:
        kind = "tmp"
    return kind, module, site


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


def reserved(program: Program, settings: allocator.Settings | None = None) -> tuple[int, int]:
    """(least, most) bytes of the allocator's segments, over all that its process asked for: the
    device keeps up, or the host is far ahead of it.
    """
    requests = program.history.tolist() or changes(program)
    keeps_up = allocator.replay_requests(requests, settings, ahead=0)
    far_behind = allocator.replay_requests(requests, settings, ahead=allocator.AHEAD)
    return keeps_up.peak_reserved, far_behind.peak_reserved


def expected_reserved(between: Sequence[int], num_ranks: int) -> int:
    """Return the segments to expect of ``between``, the two ends of ``reserved``; bytes.

    A rank that waits for no other rank has a device that keeps up: its blocks are back before the
    host asks again.  In a job of several ranks the device waits for them, by how much nobody knows.

    Args:
        between: least and most bytes.
        num_ranks: of the job.

    Source: benchmarks/results/h100_life.json and h200_x4_real_peaks.json.
    """
    least, most = between
    if num_ranks == 1:
        return least
    return (least + most) // 2


def as_blocks(program: Program, settings: allocator.Settings | None = None) -> Program:
    """The program whose storages take what their blocks have, as ``torch.cuda.memory_allocated``
    counts them: rounded up, and with what is not worth splitting off (up to 1 MiB of each large
    one).

    The device keeps up with the host.
    """
    requests = program.history.tolist() or changes(program)
    levels: list[int] = []
    allocator.replay_requests(requests, settings, ahead=0, levels=levels)

    # storage -> bytes of its blocks beyond what was asked for
    beyond: dict[int, int] = {}
    before = 0
    for (storage, change, *_), level in zip(requests, levels, strict=True):
        if change > 0:
            beyond[storage] = beyond.get(storage, 0) + level - before - change
        before = level

    # they come with a storage, and go with the last of it
    events = program.allocations.copy()
    held: dict[int, int] = {}
    for index, (storage, change) in enumerate(
        zip(events["storage"].tolist(), events["bytes"].tolist(), strict=True)
    ):
        if storage not in held:
            events["bytes"][index] += beyond.get(storage, 0)
        held[storage] = held.get(storage, 0) + change
        if not held[storage]:
            events["bytes"][index] -= beyond.get(storage, 0)
            del held[storage]
    strings, earlier_peak = _earlier_blocks(program, max(levels, default=0))
    return replace(program, allocations=events, strings=strings, earlier_peak=earlier_peak)


_BEYOND_REQUESTS = "other:blocks beyond what was asked for"


def _earlier_blocks(program: Program, most: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the texts and the earlier peak of ``program``, whose process had ``most`` in blocks.

    An earlier peak is known by sizes, not by storages: what its blocks have beyond them is one row.
    """
    rest = most - program.peak_bytes()
    # without a history nobody knows the blocks of what was before the iteration
    if not len(program.earlier_peak) or not len(program.history) or rest <= 0:
        return program.strings, program.earlier_peak
    row = np.array([[len(program.strings), rest, 1]], dtype=np.int64)
    strings = (*program.strings, _BEYOND_REQUESTS)
    return strings, np.concatenate([program.earlier_peak, row])


def graph_pools(program: Program, settings: allocator.Settings | None = None) -> int:
    """Bytes of the segments that pools of CUDA graphs keep; 0 without graphs."""
    history = program.history
    if not (history[:, 2] < 0).any():
        return 0
    return allocator.replay_requests(history.tolist(), settings, ahead=0).pool_bytes()


def changes(program: Program) -> list[tuple[int, int, int]]:
    """(storage, bytes, stream) of the iteration, as the allocator's model takes them."""
    events = program.allocations
    streams = program.streams.tolist() or [0] * len(events)
    return list(zip(events["storage"].tolist(), events["bytes"].tolist(), streams, strict=True))


# -- what nobody has measured, and the least that a recipe needs -----------------------------------

_Settings = Mapping[str, str]


@dataclass(frozen=True)
class Estimate:
    """``what`` is not known; the truth is between ``low`` and ``high`` percent off the figure."""

    what: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+g} to {self.high:+g} % ({self.what})"


def _has(settings: _Settings, *names: str) -> bool:
    return any(settings.get(name, "0") not in ("0", "None", "False", "none") for name in names)


_RULES: tuple[tuple[Callable[[_Settings], bool], Estimate], ...] = (
    # the router's choices decide how large tensors are: of NVIDIA's published peaks of MoE jobs
    # (docs/measurements.md)
    (lambda s: _has(s, "num_experts", "num_moe_experts")
     and not _has(s, "moe_pad_expert_input_to_capacity"),
     Estimate("routing: other ranks send experts as many tokens as this one", -15, 10)),
    # slices are of the job without: NVIDIA's figures are 1 % above and 13 % below
    # (docs/measurements.md)
    (lambda s: _has(s, "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
     GRAPHS := Estimate("CUDA graphs: counted as if there were none", -15, 10)),
    # by the sources; no GPU has run them beside this
    (lambda s: s.get("fp8_recipe") == "mxfp8",
     Estimate("mxfp8: scales and copies as on Blackwell", -5, 5)),
    # gathered activations are in them on a GPU, and are counted here
    (lambda s: _has(s, "tp_comm_overlap"),
     Estimate("--tp-comm-overlap: userbuffers are no part of it", -10, 0)),
    # scores and their mask, of the longest sequence
    (lambda s: _has(s, "sft", "sequence_packing_scheduler", "use_packed_sequence")
     and s.get("attention_backend") == "unfused",
     Estimate("unfused attention of packed sequences: counted as fused", 0, 150)),
)  # fmt: skip


def estimates(arguments: str | None, graphs: bool = False) -> tuple[Estimate, ...]:
    """What is not known of a job with these settings (``job_settings``'s line of text); ``graphs``:
    its CUDA graphs were captured.
    """
    plain = job_settings.plain(arguments or "")
    found = tuple(estimate for applies, estimate in _RULES if applies(plain))
    return tuple(estimate for estimate in found if not graphs or estimate is not GRAPHS)


def described(provenance: str, found: tuple[Estimate, ...]) -> str:
    """``provenance`` of a figure that ``found`` are part of."""
    return provenance if not found else f"estimated, {'; '.join(map(str, found))}; {provenance}"


_LESS = re.compile(  # flags of what needs less
    "fp8|fp4|dtype|precision_aware|offload|moe_latent|variant|fsdp|_freq|saved_activations"
)


def memory_bound(recipe: Recipe) -> int:
    """Bytes that a rank of the first stage surely has allocated at its peak: the large matrices,
    their gradients and optimizer state, and what every layer keeps for its backward.

    Matrices only: norms, biases, workspaces and the allocator come on top.
    Precision-aware optimizers and FP8 parameters would need less, so with flags like theirs
    (``_LESS``) only weights and gradients in two bytes count.
    """
    given = recipe.hybrid_override_pattern or recipe.pipeline_model_parallel_layout
    layers = 0 if given else _first_layers(recipe)  # else the embedding alone is counted
    dense, experts = _matrices(recipe, layers)
    if given or any(map(_LESS.search, recipe.flags)):
        return (dense + experts) * 4
    t, world = recipe, recipe.world
    each = (2 if t.bf16 else 4) + (2 if t.bf16 and t.grad_reduce_in_bf16 else 4)
    state = (12 if t.bf16 else 8) if t.optimizer == "adam" else 0
    # the distributed optimizer splits over dp x cp, experts' over expert dp
    split = (world.dp * world.cp, world.edp) if t.use_distributed_optimizer else (1, 1)
    held = (dense + experts) * each + dense * state // split[0] + experts * state // split[1]
    return held + _activations(recipe, layers)


def _activations(recipe: Recipe, layers: int) -> int:
    """Bytes that ``layers`` keep when the first stage has most microbatches in flight: their
    inputs; of dense layers that recompute no more than attention's core what their norms, products
    and activation need, too.
    """
    m, p = recipe, recipe.world
    tokens = m.seq_length // p.cp * m.micro_batch_size
    boundary = tokens * m.hidden_size // (p.tp if m.sequence_parallel else 1)
    kept = boundary
    if m.recompute_granularity == "full":
        layers = layers // (m.recompute_num_layers or 1) if m.recompute_method == "uniform" else 0
    elif not m.num_experts and m.recompute_modules in (None, ["core_attn"]):
        query, keys = m.head_size * m.num_attention_heads, m.head_size * m.groups
        if m.multi_latent_attention:
            query, keys = m.num_attention_heads * m.v_head_dim, 0
        wide = m.ffn_size * (3 if m.swiglu else 2)
        kept = 4 * boundary + tokens * (2 * query + 2 * keys + wide) // p.tp
    return int(layers * kept * (2 if m.bf16 else 4) * min(p.pp, m.num_microbatches))


def _first_layers(recipe: Recipe) -> int:
    """Layers of the first stage; embedding and loss may count as one each."""
    if (first := recipe.decoder_first_pipeline_num_layers) is not None:
        return int(first)
    last, pp = recipe.decoder_last_pipeline_num_layers or 0, recipe.world.pp
    embedding = int(recipe.account_for_embedding_in_pipeline_split)
    loss = int(recipe.account_for_loss_in_pipeline_split)
    counted = recipe.num_layers - last + embedding + loss
    return int(counted // max(pp - bool(last), 1) - embedding - loss * (pp == 1))


def _matrices(recipe: Recipe, layers: int) -> tuple[int, int]:
    """(elements of a rank's large matrices outside experts, in experts) of the first stage."""
    m, p = recipe, recipe.world
    query = recipe.head_size * m.num_attention_heads
    keys = recipe.head_size * recipe.groups
    attention = m.hidden_size * (2 * query + 2 * keys) // p.tp
    if m.multi_latent_attention:  # what is compressed is on every rank
        of_head, rope = m.num_attention_heads // p.tp, m.qk_pos_emb_head_dim
        down = m.hidden_size * ((m.q_lora_rank or 0) + m.kv_lora_rank + rope)
        up = (m.q_lora_rank or m.hidden_size) * (m.qk_head_dim + rope)
        up += m.kv_lora_rank * (m.qk_head_dim + m.v_head_dim) + m.hidden_size * m.v_head_dim
        attention = down + of_head * up
    products = 3 if m.swiglu else 2
    mlp = m.hidden_size * recipe.ffn_size * products // p.tp
    embedding = recipe.padded_vocab_size * m.hidden_size // p.tp
    if p.pp == 1 and m.untie_embeddings_and_output_weights:
        embedding *= 2
    if not m.num_experts:
        return layers * (attention + mlp) + embedding, 0
    if m.moe_layer_freq != 1:  # which layers of this stage have experts is Megatron's to say
        return layers * attention + embedding, 0
    width = (m.moe_ffn_hidden_size or recipe.ffn_size) // (p.etp or p.tp)
    experts = m.num_experts // p.ep * m.hidden_size * width * products
    return layers * attention + embedding, layers * experts
