"""What a change frees at the peak: the allocator again, without what would not be kept.

In : a program. Out: a ``Remedy`` for every module that Megatron can recompute, and for the mask
that its data loader may leave out, with the peak that decides then.  A checkpointed part of the
forward keeps its input and its output.  What else it made for backward goes when it ends, and is
made anew (with the temporaries of that forward) before its backward: both are in the replay.

Allocations do not say what a part was given.  What its layer had made before, and freed in the
forward behind it, counts as given: a value that is a view keeps the storage of queries and keys,
too.  So the promise may be too small.  What a forward without gradients frees earlier is unknown.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import ALLOCATION, IS_CALL, PHASE_NAMES
from megatron_prism.core.programs.program import Program
from megatron_prism.features.fit.loader_masks import NO_MASK, without_mask
from megatron_prism.memory import allocator, blocks, peaks


class _MemoryRow(NamedTuple):
    """A change of memory: a row of ALLOCATION and its stream.  Rows are made by the million.

    Attributes:
        before: The op before which it happens.
        storage: Number of the storage.
        num_bytes: Above 0 where the storage comes, below 0 where it goes.
        note: What it is, a number in the program's strings.
        stream: On which stream.
    """

    before: int
    storage: int
    num_bytes: int
    note: int
    stream: int


@dataclass(frozen=True)
class Recomputation:
    """A part of the model that Megatron can run again.

    Source: core/transformer/transformer_config.py:411 @0.16.1

    Attributes:
        module: Of --recompute-modules; "" for whole layers.
        part: Of a module's name: the part that runs again.
        inside: Of the names of its modules, one at least is there.
        discards: How many results go, too (output-discarding): made anew, each is there twice until
            the part's backward ends (tensor_parallel/random.py:716 @0.16.1); 0: a checkpoint.
        kernels: In notes of segments that the part shares with others, those that are its own.
        stretch: Whether it begins with one of ``inside`` and ends where another module's
            allocations begin.
    """

    module: str
    part: re.Pattern[str]
    inside: re.Pattern[str] = re.compile("")
    discards: int = 0
    kernels: str = ""
    stretch: bool = False


_MATMUL = r"(?:gemm|mm|addmm)\([^;]*"
_ACTIVATION = r"\w*(?:glu|gelu|silu|relu|mul)\w*\([^;]*"
_GATED = rf"{_MATMUL}(?:; {_ACTIVATION})+; {_MATMUL}"  # products around activations
_SCORES = r"(?:\w*attention\w*|b?addbmm|bmm|\w*softmax\w*)\([^;]*"
_OF_EXPERTS = rf"(?!{_MATMUL}|\w*attention|\w*norm|rope)[^;]+"
_LAYER = re.compile(r".*\blayers\.\d+\b")
_NORM = re.compile(r".*\.(input|pre_mlp)_layernorm\b")
_MLP = re.compile(r".*\.mlp\b")
_UP_PROJ = r"\.linear_(?:q|kv)_up_proj\b|\.linear_q_proj\b"
_EXPERTS = re.compile(r"\.mlp\.(experts|router|token_dispatcher)\b")
_SHARED_EXPERTS = re.compile(r".*\.mlp\.shared_experts\b")
_RECOMPUTATIONS = (
    Recomputation("core_attn", re.compile(r".*\.core_attention\b"), kernels=_SCORES),
    Recomputation("mlp", _MLP, re.compile(r"\.mlp\.linear_fc"), kernels=_GATED),
    Recomputation("moe", _MLP, _EXPERTS, kernels=_OF_EXPERTS),
    Recomputation("shared_experts", _SHARED_EXPERTS, kernels=_GATED),
    Recomputation("layernorm", _NORM, discards=1, kernels=r"\w*norm\w*\([^;]*"),
    # with the rotary embedding and what joins both halves (multi_latent_attention.py:714 @0.16.1)
    Recomputation(
        "mla_up_proj",
        re.compile(rf".*\.self_attention(?=$|{_UP_PROJ})"),
        re.compile(_UP_PROJ),
        discards=3,
        kernels=rf"\w*norm\w*\([^;]*; {_MATMUL}",
        stretch=True,
    ),
    Recomputation("", _LAYER, kernels=".+"),
)


_FORWARD = PHASE_NAMES.index("forward")
_BACKWARD = (PHASE_NAMES.index("backward"), PHASE_NAMES.index("weight"))
_LEAST = 100  # times what a remedy frees is the peak: fragmentation moves segments by a percent


@dataclass(frozen=True)
class Remedy:
    """A change of the job and the peak that decides then.

    Attributes:
        words: To type: Megatron's options, or keys of a recipe.
        freed: Bytes of tensors that the peak is lower.
        reserved: Bytes of segments that an iteration holds less.
        peak: The next one.
        how: What runs again; None: nothing does.
    """

    words: str
    freed: int
    reserved: int
    peak: peaks.Peak
    how: Recomputation | None


def remedies(
    program: Program,
    job: Mapping[str, str],
    settings: allocator.Settings | None = None,
    num_ranks: int = 0,
) -> tuple[Remedy, ...]:
    """Find changes that lower the peak of ``program``, by what each frees, most first.

    A mask of the data loader that attention does not read is left out, parts of the model run
    again, or both.

    Args:
        program: That recorded memory.
        job: Its source: whether it is a recipe's, and what it recomputes already.
        settings: The allocator's options.
        num_ranks: Of the job.
    """
    before = peaks.known_peak(program)
    candidates = _recomputed_parts(program, job, settings, before)
    bare = without_mask(program, job)
    if bare is not None:
        # earlier iterations had the mask, too, and the cache keeps what they asked for
        with_mask = blocks.expected_reserved(blocks.reserved(program, settings), num_ranks)
        without = blocks.expected_reserved(blocks.reserved(bare, settings), num_ranks)
        masked = _remedy(NO_MASK, before, bare, with_mask - without, None)
        candidates.append(masked)
        for remedy in _recomputed_parts(bare, job, settings, before):
            words = f"{NO_MASK} {remedy.words}"
            reserved = masked.reserved + remedy.reserved
            candidates.append(dataclasses.replace(remedy, words=words, reserved=reserved))
    worthwhile: list[Remedy] = []
    for remedy in candidates:
        # tensors may go while the segments stay: the job would run out of memory as before
        if remedy.freed * _LEAST >= before.num_bytes and remedy.reserved > 0:
            worthwhile.append(remedy)
    return tuple(sorted(worthwhile, key=lambda remedy: -remedy.freed))


def _remedy(
    words: str, before: peaks.Peak, changed: Program, reserved: int, how: Recomputation | None
) -> Remedy:
    after = peaks.known_peak(changed)
    return Remedy(words, before.num_bytes - after.num_bytes, reserved, after, how)


def _recomputed_parts(
    program: Program,
    job: Mapping[str, str],
    settings: allocator.Settings | None,
    before: peaks.Peak,
) -> list[Remedy]:
    """Return what each part of the model frees that Megatron can run again."""
    segment_bytes = _segment_bytes(program, settings)
    found: list[Remedy] = []
    for change in _changes(program, job):
        fewer_bytes = segment_bytes - _segment_bytes(change.program, settings)
        found.append(_remedy(change.words, before, change.program, fewer_bytes, change.how))
    return found


@dataclass(frozen=True)
class _Change:
    """What a part of the model brings that runs again.

    Attributes:
        words: To type.
        program: With it.
        how: What runs again.
    """

    words: str
    program: Program
    how: Recomputation


def _changes(program: Program, job: Mapping[str, str]) -> Iterator[_Change]:
    """Yield what Megatron can run again and does not."""
    values = job_settings.of_source(job)
    granularity = values.get("recompute_granularity", "")
    # whole layers run again already
    if granularity == "full":
        return
    modules: list[str] = []
    # without --recompute-modules Megatron recomputes core_attn alone
    if granularity == "selective":
        modules = re.findall(r"\w+", values.get("recompute_modules", "core_attn"))
    refused = list(modules)
    # with biases the backward of a recomputed MLP starts itself without end (docs/limitations)
    biases = values.get("add_bias_linear") not in ("false", "False")
    if biases and "disable_bias_linear" not in values:
        refused.append("mlp")
    is_recipe = "settings" in job
    rows, lives = _rows(program), _Lives.of(program)
    for how in _RECOMPUTATIONS:
        # an option that the job has already frees nothing more
        if how.module in refused:
            continue
        changed = _recomputed(program, how, rows, lives)
        if changed is not None:
            with_module = [*modules, how.module] if how.module else []
            yield _Change(_words(with_module, is_recipe), changed, how)


def _words(modules: Sequence[str], is_recipe: bool) -> str:
    """Say what to type to recompute ``modules``, or whole layers without one."""
    options = {"granularity": "full", "method": "uniform", "num-layers": "1"}
    if modules:
        options = {"granularity": "selective", "modules": " ".join(modules)}
    if not is_recipe:
        return " ".join(f"--recompute-{key} {text}" for key, text in options.items())
    pairs: list[str] = []
    for key, text in options.items():
        pairs.append(shlex.quote(f"recompute_{key.replace('-', '_')}={text}"))
    return " ".join(pairs)


def _segment_bytes(program: Program, settings: allocator.Settings | None) -> int:
    """Return the bytes of segments that an iteration needs at most."""
    return allocator.replay_requests(peaks.changes(program), settings).peak_reserved


# -- storages -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Lives:
    """Of every storage that comes once and goes at most once: the events at which it does.

    Attributes:
        born: Storage -> event at which it comes.
        gone: Storage -> event at which it goes.
        kept: Storages that a forward leaves for the backward of its microbatch.
    """

    born: dict[int, int]
    gone: dict[int, int]
    kept: frozenset[int]

    @staticmethod
    def of(program: Program) -> _Lives:
        events = program.allocations
        born: dict[int, int] = {}
        gone: dict[int, int] = {}
        resized: set[int] = set()
        changes = zip(events["storage"].tolist(), events["bytes"].tolist(), strict=True)
        for event, (storage, size) in enumerate(changes):
            lives = born if size > 0 else gone
            # a storage that comes twice has no single life that a change could shorten
            if storage in lives:
                resized.add(storage)
            lives[storage] = event
        turns = _Turns(program)
        kept: set[int] = set()
        for storage, event in born.items():
            if storage in resized or storage not in gone or not turns.is_in_forward(event):
                continue
            if turns.is_in_backward(gone[storage], turns.of_event(event)):
                kept.add(storage)
        return _Lives(born, gone, frozenset(kept))


class _Turns:
    """Which phase and which microbatch's turn each event is in."""

    def __init__(self, program: Program) -> None:
        ops, before = program.ops, program.allocations["before"]
        self._before: list[int] = before.tolist()
        self._op_of_event: list[int] = np.minimum(before, len(program) - 1).tolist()
        self._phase_of_op: list[int] = ops["phase"].tolist()
        microbatches, chunks = ops["microbatch"].tolist(), ops["chunk"].tolist()
        self._turn_of_op: list[tuple[int, int]] = list(zip(microbatches, chunks, strict=True))

    def of_event(self, event: int) -> tuple[int, int]:
        """Return microbatch and chunk of an event."""
        return self._turn_of_op[self._op_of_event[event]]

    def is_in_forward(self, event: int) -> bool:
        """Tell whether an event is in a forward; what is before all ops is not."""
        op = self._op_of_event[event]
        return self._before[event] > 0 and self._phase_of_op[op] == _FORWARD

    def is_in_backward(self, event: int, turn: tuple[int, int]) -> bool:
        """Tell whether an event is in a backward of a turn, or behind its last op."""
        op = self._op_of_event[event]
        previous_op = max(self._before[event] - 1, 0)
        return self._is_backward(op, turn) or self._is_backward(previous_op, turn)

    def _is_backward(self, op: int, turn: tuple[int, int]) -> bool:
        return self._phase_of_op[op] in _BACKWARD and self._turn_of_op[op] == turn


# -- regions: where parts run ---------------------------------------------------------------------
@dataclass
class _Stretch:
    """Events from the first to the last."""

    first: int
    last: int


@dataclass(frozen=True)
class _Region:
    """A forward of a part in a microbatch: the events of the part, and of its layer."""

    part: _Stretch
    layer: _Stretch


@dataclass(frozen=True)
class _Place:
    """What a note says of the model.

    Attributes:
        layer: Name of the layer; "" outside.
        part: Name of the part that runs again; "" outside.
        is_inside: Whether it is one of the modules that must be there.
    """

    layer: str
    part: str
    is_inside: bool


def _place(note: str, how: Recomputation) -> _Place:
    module = peaks.module_of(note)
    layer = _LAYER.match(module)
    part = how.part.match(module)
    is_inside = how.inside.search(module) is not None
    return _Place("" if layer is None else layer[0], "" if part is None else part[0], is_inside)


_Key = tuple[str, tuple[int, int]]  # a name, and the turn of a microbatch


def _regions(program: Program, how: Recomputation) -> list[_Region]:
    """Return each forward of the part in every microbatch."""
    events = program.allocations
    op_of_event = np.minimum(events["before"], len(program) - 1)
    is_forward = program.ops["phase"][op_of_event] == _FORWARD
    comes_in_forward = is_forward & (events["before"] > 0) & (events["bytes"] > 0)
    turns = _Turns(program)
    parts: dict[_Key, _Stretch] = {}
    layers: dict[_Key, _Stretch] = {}
    layer_of_part: dict[_Key, _Key] = {}
    begun: set[_Key] = set()  # layers in which a stretch began
    ended: set[_Key] = set()  # and ended
    place_of_note: dict[int, _Place] = {}
    for event in np.flatnonzero(comes_in_forward).tolist():
        note = int(events["note"][event])
        if note not in place_of_note:
            place_of_note[note] = _place(program.strings[note], how)
        place = place_of_note[note]
        turn = turns.of_event(event)
        layer = (place.layer, turn)
        part = (place.part, turn)
        layers.setdefault(layer, _Stretch(event, event)).last = event

        # a stretch ends with the first event outside it
        if how.stretch and (not place.part or layer in ended):
            if layer in begun:
                ended.add(layer)
            continue
        # and begins with one of its modules; another part has all of its events
        is_of_part = place.is_inside or part in parts or not how.stretch
        if not place.part or not is_of_part:
            continue
        parts.setdefault(part, _Stretch(event, event)).last = event
        if place.is_inside:
            layer_of_part[part] = layer
            begun.add(layer)
    return [_Region(parts[part], layers[layer]) for part, layer in layer_of_part.items()]


def _first_event_of_step(program: Program, ends: np.ndarray, event: int) -> int:
    """Return the first event of the step that ``event`` is in.

    Args:
        program: The program.
        ends: Of each op the last op of its step.
        event: An event.
    """
    before = program.allocations["before"]
    op = min(int(before[event]), len(program) - 1)
    first_op = np.searchsorted(ends, ends[op])
    return int(np.searchsorted(before, first_op))


# -- reruns: forwards that a backward runs again --------------------------------------------------
@dataclass(frozen=True)
class _Rerun:
    """One forward of a part that its backward runs again.

    Attributes:
        first: First event of the forward.
        last: Its last event.
        layer: Events of its layer.
        came: Storage -> the row with which it came.
        no_longer_kept: Storages that the first forward kept for its backward, and now frees.
        frees: The events that free them, ascending.
        start: The event before which it runs again.
    """

    first: int
    last: int
    layer: _Stretch
    came: Mapping[int, _MemoryRow]
    no_longer_kept: Sequence[int]
    frees: Sequence[int]
    start: int


def _rows(program: Program) -> list[_MemoryRow]:
    events = program.allocations
    streams = program.streams.tolist() or [0] * len(events)
    columns = [events[name].tolist() for name in ALLOCATION.names or ()]
    return list(map(_MemoryRow._make, zip(*columns, streams, strict=True)))


def _output(program: Program, came: Mapping[int, _MemoryRow]) -> int:
    """Return the storage that a part gives.

    It is the last; of a kernel of Transformer Engine the largest, which comes before what the
    kernel keeps for its backward.
    """
    storages = list(came)
    last_file = _file_of(program, came[storages[-1]])
    if "/cpp_extensions/" not in last_file:
        return storages[-1]
    largest = storages[-1]
    for storage in reversed(storages):
        if _file_of(program, came[storage]) != last_file:
            break
        if came[storage].num_bytes > came[largest].num_bytes:
            largest = storage
    return largest


def _file_of(program: Program, row: _MemoryRow) -> str:
    """Return what stands before the line number of a note."""
    return program.strings[row.note].rpartition(":")[0]


def _reruns(
    program: Program, how: Recomputation, rows: Sequence[_MemoryRow], lives: _Lives
) -> Iterator[_Rerun]:
    """Yield each forward of a part that keeps something."""
    ends = peaks.ends_of_steps(program)
    releases = sorted(lives.gone[storage] for storage in lives.kept)
    for region in _regions(program, how):
        first, last = region.part.first, region.part.last
        came = {row.storage: row for row in rows[first : last + 1] if row.num_bytes > 0}
        # what goes with its last result
        temporary = came.keys() - lives.kept
        while last + 1 < len(rows):
            following = rows[last + 1]
            if following.num_bytes >= 0 or following.storage not in temporary:
                break
            last += 1

        output = None if how.discards else _output(program, came)
        kept = [storage for storage in came if storage in lives.kept and storage != output]
        if not kept:
            continue
        frees = sorted(lives.gone[storage] for storage in kept)
        # its backward begins behind what the part after it lets go, in its own step at the earliest
        start = _first_event_of_step(program, ends, frees[0])
        earlier_releases = bisect.bisect_left(releases, frees[0])
        if earlier_releases:
            start = max(start, releases[earlier_releases - 1] + 1)
        yield _Rerun(first, last, region.layer, came, kept, frees, start)


@dataclass(frozen=True)
class RepeatedForward:
    """A forward that runs again.

    Attributes:
        before: The op before which a backward runs it.
        ops: Its ops.
        is_whole: Of each, whether all of its kernels are the part's.
    """

    before: int
    ops: range
    is_whole: list[bool]


def reruns(program: Program, how: Recomputation) -> Iterator[RepeatedForward]:
    """Yield every forward of a part that its backward would run again."""
    rows = _rows(program)
    last_op = len(program) - 1
    for rerun in _reruns(program, how, rows, _Lives.of(program)):
        begin = rows[rerun.first].before
        end = min(rows[rerun.last].before, last_op)
        # the call that fills what came last
        last_came = list(rerun.came.values())[-1]
        if end < last_op and program.bytes_out[end + 1] == last_came.num_bytes:
            end += 1
        ops = range(begin, end + 1)
        is_call = IS_CALL[program.ops["name"][begin : end + 1]].tolist()
        is_whole: list[bool] = []
        for op, op_is_call in zip(ops, is_call, strict=True):
            is_whole.append(begin < op < end or op_is_call)
        yield RepeatedForward(rows[rerun.start].before, ops, is_whole)


# -- the program with a part that runs again ------------------------------------------------------
def _recomputed(
    program: Program, how: Recomputation, rows: Sequence[_MemoryRow], lives: _Lives
) -> Program | None:
    """Return the program with what ``how`` frees and makes anew; None if that is nothing."""
    rewriter = _Rewriter(rows, lives)
    for rerun in _reruns(program, how, rows, lives):
        rewriter.add(rerun, how.discards)
    if not rewriter.renamed:
        return None
    changed = rewriter.changed_rows()
    return dataclasses.replace(
        program,
        allocations=np.array([row[:4] for row in changed], dtype=ALLOCATION),
        streams=np.array([row.stream for row in changed], dtype=np.int16),
        history=program.history[:0],
        routed=program.routed[:0],
    )


class _Rewriter:
    """Rewrites changes of memory as they are where forwards run again.

    Attributes:
        rows: As they were.
        renamed: Event -> the storage that is freed in it, made by the forward that ran again.
    """

    def __init__(self, rows: Sequence[_MemoryRow], lives: _Lives) -> None:
        self.rows = rows
        self.renamed: dict[int, int] = {}
        self._lives = lives
        self._added: dict[int, list[_MemoryRow]] = defaultdict(list)  # event -> rows before it
        self._dropped: set[int] = set()  # events that come later
        self._next_storage = max(lives.born, default=-1) + 1

    def add(self, rerun: _Rerun, discards: int) -> None:
        """Let a forward run again before its backward.

        Args:
            rerun: The forward.
            discards: How many of its results are made anew, too.
        """
        rows, came = self.rows, rerun.came
        copy_of = {storage: self._new_storage() for storage in came}
        forward = [row for row in rows[rerun.first : rerun.last + 1] if row.storage in copy_of]
        gone_in_forward = {row.storage for row in forward if row.num_bytes < 0}
        last_free = rerun.frees[-1]
        begin_of_backward = rows[rerun.start].before
        end_of_backward = rows[last_free].before

        # the forward again, with new storages
        for row in forward:
            copy = row._replace(before=begin_of_backward, storage=copy_of[row.storage])
            self._added[rerun.start].append(copy)

        # what the first forward no longer keeps goes when it ends
        freed: list[_MemoryRow] = []
        for storage in rerun.no_longer_kept:
            freed.append(_free(came[storage], rows[rerun.last].before))
        self._added[rerun.last + 1][:0] = freed

        # results of the second forward that nothing frees go with the last that it keeps
        results: list[_MemoryRow] = []
        for storage, row in came.items():
            if storage not in gone_in_forward and storage not in rerun.no_longer_kept:
                results.append(_free(row, end_of_backward, copy_of[storage]))
        self._added[last_free + 1][:0] = results

        # a discarded result is there once more
        discarded = list(came)[-discards:] if discards else []
        for storage in discarded:
            twin = self._new_storage()
            row = came[storage]._replace(before=begin_of_backward, storage=twin)
            self._added[rerun.start].append(row)
            self._added[last_free + 1].append(_free(row, end_of_backward))

        for storage in rerun.no_longer_kept:
            self.renamed[self._lives.gone[storage]] = copy_of[storage]
        self._keep_inputs(rerun)

    def _keep_inputs(self, rerun: _Rerun) -> None:
        """Keep what a part may be given, of the same layer, until its backward ends."""
        last_free = rerun.frees[-1]
        for row in self.rows[rerun.layer.first : rerun.first]:
            if row.num_bytes <= 0 or row.storage in self._lives.kept:
                continue
            free = self._lives.gone.get(row.storage, -1)
            if rerun.first < free <= rerun.layer.last and free not in self._dropped:
                self._dropped.add(free)
                self._added[last_free + 1].append(_free(row, self.rows[last_free].before))

    def _new_storage(self) -> int:
        storage = self._next_storage
        self._next_storage += 1
        return storage

    def changed_rows(self) -> list[_MemoryRow]:
        """Return the rows as they are where all of this runs again."""
        changed: list[_MemoryRow] = []
        for event, row in enumerate(self.rows):
            changed += self._added.get(event, ())
            if event in self._dropped:
                continue
            changed_row = row
            storage = self.renamed.get(event)
            if storage is not None:
                changed_row = row._replace(storage=storage)
            changed.append(changed_row)
        changed += self._added.get(len(self.rows), ())
        return changed


def _free(row: _MemoryRow, before: int, storage: int | None = None) -> _MemoryRow:
    """Return the change with which a storage goes that came with ``row``.

    Args:
        row: With which it came.
        before: The op before which it goes.
        storage: Another one that is as large.
    """
    freed = row.storage if storage is None else storage
    return _MemoryRow(before, freed, -row.num_bytes, note=0, stream=0)
