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
import itertools
import re
import shlex
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_prism.core import job_settings
from megatron_prism.core.ops import ALLOCATION, IS_CALL, PHASE_NAMES
from megatron_prism.core.program import Program
from megatron_prism.features.fit.loader_masks import NO_MASK, without_mask
from megatron_prism.memory import allocator, blocks, peaks

Row = tuple[int, int, int, int, int]  # before, storage, bytes, note, stream


@dataclass(frozen=True)
class Recomputation:
    """A part of the model that Megatron can run again.

    module      : of --recompute-modules; "" for whole layers
    part        : of a module's name: the part that runs again
    inside      : of the names of its modules, one at least is there
    stretch     : it begins with one of these and ends where another module's allocations begin
    discards    : how many results go, too (output-discarding): made anew, each is there twice until
                  the part's backward ends (tensor_parallel/random.py:716 @0.16.1); 0: a checkpoint
    kernels     : in notes of segments that the part shares with others, those that are its own
    Source: core/transformer/transformer_config.py:411 @0.16.1
    """

    module: str
    part: re.Pattern[str]
    inside: re.Pattern[str] = re.compile("")
    discards: int = 0
    kernels: str = ""
    stretch: bool = False


_MATMUL, _ACTIVATION = r"(?:gemm|mm|addmm)\([^;]*", r"\w*(?:glu|gelu|silu|relu|mul)\w*\([^;]*"
_GATED = rf"{_MATMUL}(?:; {_ACTIVATION})+; {_MATMUL}"  # products around activations
_SCORES = r"(?:\w*attention\w*|b?addbmm|bmm|\w*softmax\w*)\([^;]*"
_LAYER = re.compile(r".*\blayers\.\d+\b")
_NORM, _MLP = re.compile(r".*\.(input|pre_mlp)_layernorm\b"), re.compile(r".*\.mlp\b")
_UP_PROJ = r"\.linear_(?:q|kv)_up_proj\b|\.linear_q_proj\b"
_EXPERTS = re.compile(r"\.mlp\.(experts|router|token_dispatcher)\b")
_KNOWN = (
    Recomputation("core_attn", re.compile(r".*\.core_attention\b"), kernels=_SCORES),
    Recomputation("mlp", _MLP, re.compile(r"\.mlp\.linear_fc"), kernels=_GATED),
    Recomputation("moe", _MLP, _EXPERTS, kernels=rf"(?!{_MATMUL}|\w*attention|\w*norm|rope)[^;]+"),
    Recomputation("shared_experts", re.compile(r".*\.mlp\.shared_experts\b"), kernels=_GATED),
    Recomputation("layernorm", _NORM, discards=1, kernels=r"\w*norm\w*\([^;]*"),
    # with the rotary embedding and what joins both halves (multi_latent_attention.py:714 @0.16.1)
    Recomputation("mla_up_proj", re.compile(rf".*\.self_attention(?=$|{_UP_PROJ})"),
                  re.compile(_UP_PROJ), discards=3,
                  kernels=rf"\w*norm\w*\([^;]*; {_MATMUL}", stretch=True),
    Recomputation("", _LAYER, kernels=".+"),
)  # fmt: skip


_FORWARD = PHASE_NAMES.index("forward")
_BACKWARD = PHASE_NAMES.index("backward"), PHASE_NAMES.index("weight")
_LEAST = 100  # times what a remedy frees is the peak: fragmentation moves segments by a percent


@dataclass(frozen=True)
class Remedy:
    """A change of the job and the peak that decides then.

    words    : to type: Megatron's options, or keys of a recipe
    freed    : bytes of tensors that the peak is lower
    reserved : bytes of segments that an iteration holds less
    peak     : the next one
    how      : what runs again; None: nothing does
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
        program: that recorded memory.
        job: its source: whether it is a recipe's, and what it recomputes already.
        settings: the allocator's options.
        num_ranks: of the job.
    """
    before = peaks.known_peak(program)
    tried = _recomputed_parts(program, job, settings, before)
    bare = without_mask(program, job)
    if bare is not None:
        # earlier iterations had the mask, too, and the cache keeps what they asked for
        with_mask = blocks.expected_reserved(blocks.reserved(program, settings), num_ranks)
        without = blocks.expected_reserved(blocks.reserved(bare, settings), num_ranks)
        masked = _remedy(NO_MASK, before, bare, with_mask - without, None)
        tried.append(masked)
        for remedy in _recomputed_parts(bare, job, settings, before):
            words, reserved = f"{NO_MASK} {remedy.words}", masked.reserved + remedy.reserved
            tried.append(dataclasses.replace(remedy, words=words, reserved=reserved))
    worthwhile = [
        remedy
        for remedy in tried
        if remedy.freed * _LEAST >= before.num_bytes and remedy.reserved > 0
    ]
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
    """What each part of the model frees that Megatron can run again."""
    segments = _segments(program, settings)
    tried = []
    for words, changed, how in _recomputations(program, job):
        less = segments - _segments(changed, settings)
        tried.append(_remedy(words, before, changed, less, how))
    return tried


def _recomputations(
    program: Program, job: Mapping[str, str]
) -> Iterator[tuple[str, Program, Recomputation]]:
    """(words to type, the program with them, what runs again) of what Megatron can run again."""
    values = job_settings.plain(job_settings.line_of(job))
    granularity = values.get("recompute_granularity", "")
    # whole layers run again already
    if granularity == "full":
        return
    modules = re.findall(r"\w+", values.get("recompute_modules", "core_attn"))
    modules = modules if granularity == "selective" else []
    refused = list(modules)
    # with biases the backward of a recomputed MLP starts itself without end (docs/limitations)
    biases = values.get("add_bias_linear") not in ("false", "False")
    if biases and "disable_bias_linear" not in values:
        refused.append("mlp")
    for how in _KNOWN:
        if how.module in refused:
            continue
        changed = _recomputed(program, how)
        if changed is not None:
            words = _words([*modules, how.module] if how.module else [], "settings" in job)
            yield words, changed, how


def _words(modules: Sequence[str], recipe: bool) -> str:
    """What recomputes ``modules``, or whole layers."""
    given = {"granularity": "selective" if modules else "full"}
    if not modules:
        given |= {"method": "uniform", "num-layers": "1"}
    named = {"modules": " ".join(modules)} if modules else {}
    if recipe:
        pairs = {key.replace("-", "_"): text for key, text in {**given, **named}.items()}
        return " ".join(shlex.quote(f"recompute_{key}={text}") for key, text in pairs.items())
    return " ".join(f"--recompute-{key} {text}" for key, text in {**given, **named}.items())


def _segments(program: Program, settings: allocator.Settings | None) -> int:
    """Bytes of segments that its iteration needs at most."""
    return allocator.replay_requests(peaks.changes(program), settings).peak_reserved


@dataclass(frozen=True)
class _Lives:
    """Of every storage that comes once and goes at most once: the events at which it does.

    kept : storages that a forward leaves for the backward of its microbatch
    """

    born: dict[int, int]
    gone: dict[int, int]
    kept: frozenset[int]

    @staticmethod
    def of(program: Program) -> _Lives:
        events = program.allocations
        born: dict[int, int] = {}
        gone: dict[int, int] = {}
        resized = set()
        ops, before = program.ops, events["before"].tolist()
        moves = zip(events["storage"].tolist(), events["bytes"].tolist(), strict=True)
        for at, (storage, size) in enumerate(moves):
            lives = born if size > 0 else gone
            if storage in lives:
                resized.add(storage)
            lives[storage] = at
        op = np.minimum(events["before"], len(program) - 1).tolist()
        turns = list(zip(ops["microbatch"].tolist(), ops["chunk"].tolist(), strict=True))
        phases = ops["phase"].tolist()

        def in_backward(event: int, turn: tuple[int, int]) -> bool:
            """Also on the way out of it, before the op behind it."""
            return any(phases[at] in _BACKWARD and turns[at] == turn
                       for at in (op[event], max(before[event] - 1, 0)))  # fmt: skip

        kept = frozenset(
            one for one, at in born.items()
            if one not in resized and one in gone and before[at] and phases[op[at]] == _FORWARD
            and in_backward(gone[one], turns[op[at]])
        )  # fmt: skip
        return _Lives(born, gone, kept)


def _regions(program: Program, how: Recomputation) -> list[tuple[int, int, int, int]]:
    """(first and last event of the part, of its layer) of every forward in every microbatch."""
    events, ops = program.allocations, program.ops
    op = np.minimum(events["before"], len(program) - 1)
    mine = (ops["phase"][op] == _FORWARD) & (events["before"] > 0) & (events["bytes"] > 0)
    parts: dict[Hashable, list[int]] = {}
    layers: dict[Hashable, list[int]] = {}
    layer_of: dict[Hashable, Hashable] = {}

    @cache
    def names(note: int) -> tuple[str, str, bool]:
        module = peaks.module_of(program.strings[note])
        layer, part = _LAYER.match(module), how.part.match(module)
        inside = how.inside.search(module) is not None
        return layer[0] if layer else "", part[0] if part else "", inside

    begun, ended = set[Hashable](), set[Hashable]()
    for at in np.flatnonzero(mine).tolist():
        layer, part, inside = names(int(events["note"][at]))
        turn = int(ops["microbatch"][op[at]]), int(ops["chunk"][op[at]])
        place, key = (layer, turn), (part, turn)
        layers.setdefault(place, [at, at])[1] = at
        if how.stretch and (not part or place in ended):
            if place in begun:
                ended.add(place)
        elif part and (inside or key in parts or not how.stretch):
            parts.setdefault(key, [at, at])[1] = at
            if inside:
                layer_of[key] = place
                begun.add(place)
    return [(*parts[key], *layers[layer]) for key, layer in layer_of.items()]  # type: ignore[misc]


def _begin(program: Program, ends: np.ndarray, event: int) -> int:
    """The first event of the step that ``event`` is in."""
    before = program.allocations["before"]
    op = min(int(before[event]), len(program) - 1)
    return int(np.searchsorted(before, np.searchsorted(ends, ends[op])))


@dataclass(frozen=True)
class _Rerun:
    """One forward of a part that its backward runs again.

    first, last : events of the forward;  begin, end: of its layer
    mine        : storage -> the row with which it came
    kept, frees : storages that it no longer keeps, and the events that free them, ascending
    start       : the event before which it runs again
    """

    first: int
    last: int
    begin: int
    end: int
    mine: Mapping[int, Row]
    kept: Sequence[int]
    frees: Sequence[int]
    start: int


def _rows(program: Program) -> list[Row]:
    events = program.allocations
    streams = program.streams.tolist() or [0] * len(events)
    columns = (events[key].tolist() for key in ALLOCATION.names or ())
    return list(zip(*columns, streams, strict=True))


def _output(program: Program, mine: Mapping[int, Row]) -> int:
    """The storage that a part gives: its last, of a kernel of Transformer Engine the largest, which
    comes before what it keeps for its backward.
    """
    files = {one: program.strings[row[3]].rpartition(":")[0] for one, row in mine.items()}
    last = [*mine][-1]
    if "/cpp_extensions/" not in files[last]:
        return last
    call = itertools.takewhile(lambda one: files[one] == files[last], reversed([*mine]))
    return max(call, key=lambda one: mine[one][2])


def _reruns(
    program: Program, how: Recomputation, rows: Sequence[Row], lives: _Lives
) -> Iterator[_Rerun]:
    ends = peaks.ends_of_steps(program)
    releases = sorted(lives.gone[one] for one in lives.kept)
    for first, last, begin, end in _regions(program, how):
        mine = {row[1]: row for row in rows[first : last + 1] if row[2] > 0}
        while (
            last + 1 < len(rows)
            and rows[last + 1][2] < 0
            and rows[last + 1][1] in mine.keys() - lives.kept
        ):
            last += 1  # what goes with its last result
        output = None if how.discards else _output(program, mine)
        kept = [one for one in mine if one in lives.kept and one != output]
        if not kept:
            continue
        frees = sorted(lives.gone[one] for one in kept)
        # its backward begins behind what the part after it lets go, in its own step at the earliest
        behind = bisect.bisect_left(releases, frees[0])
        start = max(releases[behind - 1] + 1 if behind else 0, _begin(program, ends, frees[0]))
        yield _Rerun(first, last, begin, end, mine, kept, frees, start)


def reruns(program: Program, how: Recomputation) -> Iterator[tuple[int, list[tuple[int, bool]]]]:
    """(the op before which a backward runs the part again; its forward's ops, each with whether all
    of its kernels are the part's), for every forward of the part.
    """
    rows, last = _rows(program), len(program) - 1
    for one in _reruns(program, how, rows, _Lives.of(program)):
        begin, end = rows[one.first][0], min(rows[one.last][0], last)
        made = list(one.mine.values())[-1][2]
        if end < last and program.bytes_out[end + 1] == made:
            end += 1  # the call that fills what came last
        again = [(op, begin < op < end or bool(IS_CALL[program.ops["name"][op]]))
                 for op in range(begin, end + 1)]  # fmt: skip
        yield rows[one.start][0], again


def _recomputed(program: Program, how: Recomputation) -> Program | None:
    """The program with what ``how`` frees and makes anew; None where it keeps nothing."""
    lives, rows = _Lives.of(program), _rows(program)
    added: dict[int, list[Row]] = {}  # event -> rows before it
    renamed: dict[int, int] = {}  # event -> the storage that goes instead
    number = max(lives.born, default=-1) + 1
    dropped: set[int] = set()  # events that come later
    for one in _reruns(program, how, rows, lives):
        first, last, mine, frees, start = one.first, one.last, one.mine, one.frees, one.start
        copies = {storage: number + at for at, storage in enumerate(mine)}
        number += len(copies)
        forward = [row for row in rows[first : last + 1] if row[1] in copies]
        gone = {row[1] for row in forward if row[2] < 0}
        again = added.setdefault(start, [])
        again += [(rows[start][0], copies[row[1]], *row[2:]) for row in forward]
        left = [row for key, row in mine.items() if key not in gone and key not in one.kept]
        added.setdefault(last + 1, [])[:0] = [
            (rows[last][0], key, -mine[key][2], 0, 0) for key in one.kept
        ]
        added.setdefault(frees[-1] + 1, [])[:0] = [
            (rows[frees[-1]][0], copies[row[1]], -row[2], 0, 0) for row in left
        ]
        for storage in list(mine)[-how.discards :] if how.discards else ():
            again.append((rows[start][0], number, *mine[storage][2:]))
            gone_at = rows[frees[-1]][0], number, -mine[storage][2], 0, 0
            added[frees[-1] + 1].append(gone_at)
            number += 1
        renamed |= {lives.gone[key]: copies[key] for key in one.kept}
        for row in rows[one.begin : first]:  # what it may be given, of the same layer
            free = lives.gone.get(row[1], -1) if row[2] > 0 else -1
            if row[1] not in lives.kept and first < free <= one.end and free not in dropped:
                dropped.add(free)
                added[frees[-1] + 1].append((rows[frees[-1]][0], row[1], -row[2], 0, 0))
    if not renamed:
        return None
    changed: list[Row] = []
    for at, row in enumerate(rows):
        changed += added.get(at, ())
        if at not in dropped:
            changed.append((row[0], renamed.get(at, row[1]), *row[2:]))
    changed += added.get(len(rows), ())
    return dataclasses.replace(
        program,
        allocations=np.array([row[:4] for row in changed], dtype=ALLOCATION),
        streams=np.array([row[4] for row in changed], dtype=np.int16),
        history=program.history[:0],
        routed=program.routed[:0],
    )
