"""Folders of slices (one captured rank each), and the world that they make.

One file per captured rank, ``slice-NNNNNN.prism``, written whole or not at all as soon as the rank
has finished: a capture that is killed loses the slices in flight and nothing else, and the next one
goes on from there.  All slices of a folder are of one job: the same world, versions and arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_prism.core import feature, job_settings, shard
from megatron_prism.core.errors import MissingSlicesError, ProgramError, UsageError
from megatron_prism.core.files import check_writable, claimed
from megatron_prism.core.gpu_state import GPU_CLOCK
from megatron_prism.core.ops import CODE, IS_PAIR, SHARED
from megatron_prism.core.program import FIX, Program, Programs, load, save
from megatron_prism.core.program_text import parse
from megatron_prism.core.world import AXES, World, format_ranks

WORLD = "world.prism"  # the slices of a folder joined
_DEFAULTS = {"transformer_engine": "2.17.1"}  # what a source that does not say it means
_MOST_TEXT = 1 << 26  # bytes, a million lines
# of a source: "RANK=INDEX …", how fast the host of each slice was; no part of what the job is
HOST_INDEX = "host_index"
# of a source: "RANK=BYTES …", the most that large copies on the rank's host take
HOST_MEMORY = "host_memory"
# of a source: "RANK=PART:BYTES,… …", the most that is allocated in each part of the rank's process
MEMORY_PARTS = "memory_parts"
# of a source: "RANK=PART,… …", the parts of the rank's process that ran on an assumption
ASSUMED_PARTS = "assumed_parts"
# of a source: "RANK=WRITES …", what the rank writes into a checkpoint
SAVED_BYTES = "saved_bytes"
OF_RANKS = (
    HOST_INDEX,
    GPU_CLOCK,
    HOST_MEMORY,
    MEMORY_PARTS,
    ASSUMED_PARTS,
    SAVED_BYTES,
)  # each slice has its own rank's, which no two have alike
WHAT_IF = "what-if"  # of a source: what is not as it ran; of a slice, no part of what the job is
_SHOWN = 64  # ranks of a message
_AGAIN = (
    "the same capture again, into the same folder (what is there is kept): prism capture RECIPE "
    "-o DIR, or prism capture -o DIR -- pretrain_gpt.py …"
)
Groups = Mapping[str, tuple[tuple[int, ...], ...]]
_OF_RANK = re.compile(r"(\d{1,9})=(\S+)")
_NAME = re.compile(r"slice-(\d{6,})\.prism")
_DUMP = re.compile(r"\d(\.json)?$")  # files of one rank each, as Flight Recorders name them


def of_ranks(source: Mapping[str, str]) -> dict[str, dict[int, str]]:
    """Key of a source -> rank -> what it says of the rank's own host or GPU."""
    return {
        key: {int(rank): text for rank, text in _OF_RANK.findall(source[key])}
        for key in OF_RANKS
        if key in source
    }


def renumbered(source: Mapping[str, str], ranks: Mapping[int, int]) -> dict[str, str]:
    """The source of a world in which captured ranks have other numbers.

    Args:
        source: what slices say of their job.
        ranks: number in the captured world -> in the new one; a rank that is absent has no place
            there, and neither has what its slice says of its host and GPU.
    """
    new = dict(source)
    for key, texts in of_ranks(source).items():
        kept = {ranks[rank]: text for rank, text in texts.items() if rank in ranks}
        del new[key]
        if kept:
            new[key] = " ".join(f"{rank}={text}" for rank, text in sorted(kept.items()))
    return new


class Origin(NamedTuple):
    """Of which job programs are."""

    world: World
    source: Mapping[str, str]


class SliceStore:
    """The slices of one job in ``folder``.

    source : what must be alike in all of them (versions, tier, arguments)
    parsed : whether ``world`` is that of the job's parsed arguments; if not, only the places of its
             ranks are compared, where it has sizes
    """

    def __init__(
        self, folder: Path, world: World, source: Mapping[str, str], *, parsed: bool = True
    ) -> None:
        self.folder, self.world, self.source, self.parsed = folder, world, dict(source), parsed

    def path(self, rank: int) -> Path:
        """Where the slice of ``rank`` is or will be."""
        return self.folder / f"slice-{rank:06d}.prism"

    def prepare(self, force: bool) -> None:
        """Make the folder; drop what it holds if ``force``.

        UsageError if it holds slices of another job, or things that are no slices.
        """
        check_writable(self.folder)  # now, not when the first slice is done
        self.folder.mkdir(parents=True, exist_ok=True)
        strange = [p.name for p in self.folder.iterdir() if not _ours(p)]
        if strange:
            names = ", ".join(sorted(strange)[:3])
            what = f"{self.folder} holds things that are no slices: {names}"
            raise UsageError(what, fix="name an empty or a new folder with -o DIR")
        if force:
            (self.folder / WORLD).unlink(missing_ok=True)
            for path in list(self.folder.iterdir()):
                if _is_of_rank(path.name):
                    path.unlink(missing_ok=True)
        for rank in self.ranks():
            try:
                self.check(load(self.path(rank)), self.path(rank))
            except ProgramError as error:
                if isinstance(error.__cause__, PermissionError):
                    raise  # it may be a good one
                fix = f"delete {self.path(rank)}: it is captured again"
                raise ProgramError(error.message, fix=fix) from error

    @contextlib.contextmanager
    def writing(self, force: bool) -> Iterator[None]:
        """The folder as ``prepare`` makes it, and no other run's meanwhile."""
        with claimed(self.folder, inside=True):
            self.prepare(force)
            yield

    def ranks(self) -> list[int]:
        """The ranks whose slices are there, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def check(self, found: Programs | Origin, path: Path) -> None:
        """UsageError unless ``found`` is of this job."""
        if differ := self.differences(found):
            fix = "--force drops the old slices, -o DIR puts the new ones elsewhere"
            raise UsageError(f"{path} is a slice of another job: {'; '.join(differ)}", fix=fix)

    def differences(self, found: Programs | Origin) -> list[str]:
        """In which words ``found`` is of another job than this one."""
        there, differ = {**_DEFAULTS, **found.source}, list[str]()
        here = {**_DEFAULTS, **self.source} if self.source else {}  # empty: others compare it
        for key, value in here.items():
            if key in (*OF_RANKS, WHAT_IF):
                continue
            if key in job_settings.KEYS:
                differ += job_settings.differences(key, there.get(key), value)
            elif there.get(key) != value:
                differ.append(f"{key} {there.get(key, 'unknown')}, not {value}")
        alike = found.world == self.world
        if not self.parsed:  # a world of no sizes may get them from the job's own code
            bare, size = self.world.same_places(World(self.world.size)), self.world.size
            alike = found.world.size == size if bare else found.world.same_places(self.world)
        if not alike:
            differ.insert(0, f"a world of {found.world}, not {self.world}")
        return differ

    def put(self, program: Program, groups: Groups | None = None) -> None:
        """Keep a finished slice, and the groups that do not follow from the sizes of the world."""
        everyone = np.zeros(self.world.size, dtype=np.int32)
        one = Programs(self.world, (program,), everyone, groups or {}, self.source)
        (self.folder / WORLD).unlink(missing_ok=True)  # it was made without this slice
        save(one, self.path(program.rank), force=True)


def _ours(path: Path) -> bool:
    """Slices, the world, calls and spreads that go with them, what a killed writer left behind."""
    name = path.name
    beside = (WORLD, "calibration.json", "variability.json", "import.json")
    return _is_of_rank(name) or name in beside or name[0] == "."


def _is_of_rank(name: str) -> bool:
    """Whether a file is a slice, or what a feature keeps of a rank beside its slice."""
    if _NAME.fullmatch(name):
        return True
    patterns = [row.rank_files for row in feature.installed().values() if row.rank_files]
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _instead(folder: Path) -> str:
    """What to type for a folder without slices: it may be another command's."""
    names = {path.name for path in folder.iterdir()}
    if {"recipe.json", "summary.json"} <= names:  # prism emulate -o
        return f"what prism emulate wrote has no programs: prism capture RECIPE -o {folder}-slices"
    if any(_DUMP.search(name) for name in names):
        return f"prism hang --dumps {folder}, if these are Flight Recorder dumps"
    return f"prism capture RECIPE -o {folder}"


def assemble(folder: str | os.PathLike[str], *, partial: bool = False) -> Programs:
    """The world of a folder of slices.

    A rank without a slice runs that of the captured rank of its stage with which it shares most
    coordinates (the lowest of them).  Of slices that differ in their shards of parameters alone,
    the one that updates most stands for all (``source["alike"]``).  ProgramError for a missing
    stage, unless ``partial``, or slices of two jobs.
    """
    paths = sorted(p for p in Path(folder).iterdir() if _NAME.fullmatch(p.name))
    if not paths:
        raise ProgramError(f"{folder} holds no slices", fix=_instead(Path(folder)))
    slices = [load(path) for path in paths]
    first = slices[0]
    store = SliceStore(Path(folder), first.world, first.source)
    for one, path in zip(slices[1:], paths[1:], strict=True):
        store.check(one, path)
    captured = [one.programs[0] for one in slices]
    for program, path in zip(captured, paths, strict=True):
        if store.path(program.rank).name != path.name:
            what = f"{path} holds the slice of rank {program.rank}"
            raise ProgramError(what, fix=f"delete or rename {path}")
    of = stand_in_for(first.world, [program.rank for program in captured], partial=partial)
    if not partial:
        _check_rings(first.world, captured, of)
    groups: dict[str, tuple[tuple[int, ...], ...]] = {}
    for one, path in zip(slices, paths, strict=True):
        for name, members in one.groups.items():
            if groups.setdefault(name, members) != members:
                what = f"{path} has other groups {name} than the slices before it"
                raise ProgramError(what, fix="delete it, and capture it again as the others")
    if not partial:
        _check_gathers(first.world, captured, of, groups)
    source = {key: text for one in slices for key, text in one.source.items()}
    for key in OF_RANKS:
        if each := [one.source[key] for one in slices if key in one.source]:
            source[key] = " ".join(each)
    where = os.fspath(folder)
    one_of = _alike(first.world, captured)
    if said := _said(captured, one_of):
        source["alike"] = said
        kept = sorted(set(one_of))
        of = np.where(of < 0, of, np.searchsorted(kept, np.array(one_of))[of]).astype(np.int32)
        captured = [captured[index] for index in kept]
    return Programs(first.world, tuple(captured), of, groups, source, where, partial)


def _alike(world: World, captured: Sequence[Program]) -> list[int]:
    """For each program the one that stands for it: of those of a stage that are alike but for their
    shards, the one with the longest step.
    """
    strings = list(dict.fromkeys(text for program in captured for text in program.strings))
    splits = list(dict.fromkeys(split for program in captured for split in program.splits))
    kinds: dict[tuple[int, bytes], list[int]] = {}
    for index, program in enumerate(captured):
        kind = -1 - index, b""
        if len(captured) > 1 and shard.is_sharded(program):
            same = shard.without_shard(program).columns(strings, splits)
            kind = world.coordinates(program.rank).pp, same
        kinds.setdefault(kind, []).append(index)
    found = list(range(len(captured)))
    for alike in kinds.values():
        longest = max(alike, key=lambda index: (*_work(captured[index]), -index))
        for index in alike:
            found[index] = longest
    return found


def _work(program: Program) -> tuple[int, int]:
    """(bytes that the optimizer's step moves, its kernels)."""
    step = program.ops[shard.segments(program)]
    return int(step["traffic"].sum()), int(step["kernels"].sum())


def _said(captured: Sequence[Program], one_of: Sequence[int]) -> str:
    """``rank 2 for 7``: who stands for whom."""
    others = defaultdict[int, list[int]](list)
    for program, one in zip(captured, one_of, strict=True):
        others[captured[one].rank] += [program.rank] * (program is not captured[one])
    return ", ".join(f"rank {k} for {format_ranks(v)}" for k, v in others.items() if v)


def _check_rings(world: World, captured: Sequence[Program], of: np.ndarray) -> None:
    """ProgramError where one place of a context-parallel group stands for another, and they differ:
    who sends around it without a group (roll_tensor of multi_token_prediction.py:195 @0.19.0) does
    otherwise first, in the middle and last.
    """
    if world.cp == 1:
        return
    ranks, places = np.arange(world.size), _places(world)
    missing: set[int] = set()
    for index, program in enumerate(captured):
        if "default_pg" not in program.strings:
            continue
        ops, alike = program.ops, (places[axis] for axis in ("tp", "dp", "pp"))
        ring = np.logical_and.reduce([place == place[program.rank] for place in alike])
        pairs = IS_PAIR[ops["name"]] & (ops["group"] == program.strings.index("default_pg"))
        if ring[(program.rank + np.unique(ops["peer"][pairs])) % world.size].any():
            missing.update(ranks[ring & (of == index) & (ranks != program.rank)].tolist())
    if missing:
        why = "messages go around a context-parallel group, and each place makes others"
        what = f"{why}: ranks {format_ranks(sorted(missing))} have no slice"
        raise MissingSlicesError(what, _AGAIN, tuple(sorted(missing)), why)


def _check_gathers(
    world: World, captured: Sequence[Program], of: np.ndarray, groups: Groups
) -> None:
    """ProgramError where one rank stands for another that gives a gather more or less: whole
    parameters belong to single ranks (layer_wise_optimizer.py:763 @0.19.0), so their optimizers
    take other memory and other times.
    """
    missing, group = set[int](), ""
    given = [_gathers(program) for program in captured]
    held = np.isin(np.arange(world.size), [program.rank for program in captured])
    for program, calls in zip(captured, given, strict=True):
        known = world.groups(program.rank, megatron=(0, 19))
        for (name, nth), (_, sizes) in calls.items():
            lists = (ranks for ranks in groups.get(name, ()) if program.rank in ranks)
            named = () if name in groups else known.get(name, ())
            members = np.array(next(lists, named), dtype=np.int64)
            own = np.array([one.get((name, nth), (-1,))[0] for one in given])
            if len(sizes) == len(members):
                differ = members[(own[of[members]] != sizes) & ~held[members]].tolist()
                missing.update(differ)
                group = name if differ else group
    if missing:
        ranks = format_ranks(sorted(missing)) if len(missing) <= _SHOWN else f"{min(missing)} …"
        why = "whole parameters belong to single ranks"
        what = f"gathers of {group} take more from some ranks than from others ({why}, dist_muon)"
        what += f": {len(missing)} ranks ({ranks}) differ from those that stand for them"
        raise MissingSlicesError(what, _AGAIN, tuple(sorted(missing)), why)


def _gathers(program: Program) -> dict[tuple[str, int], tuple[int, tuple[int, ...]]]:
    """(group, how many before it) -> (elements of this rank, of every member) of uneven gathers."""
    ops, calls = program.ops, dict[tuple[str, int], tuple[int, tuple[int, ...]]]()
    before: Counter[str] = Counter()
    for row in ops[(ops["name"] == CODE["all_gather"]) & (ops["splits"] >= 0)]:
        if SHARED in (name := program.strings[row["group"]]):
            calls[name, before[name]] = int(row["num_in"]), program.splits[row["splits"]][1]
            before[name] += 1
    return calls


def stand_in_for(world: World, captured: Iterable[int], *, partial: bool = False) -> np.ndarray:
    """int32 [world]: which of the captured ranks (by index) stands for every rank; -1 for those of
    a stage without a slice, if ``partial``, else ProgramError.
    """
    captured = list(captured)
    ranks, places = np.arange(world.size), _places(world)
    best = np.full(world.size, -1, dtype=np.int32)
    found = np.full(world.size, -1, dtype=np.int32)
    for index, rank in enumerate(captured):
        alike = sum((places[axis] == places[axis][rank]).astype(np.int32) for axis in AXES)
        alike = np.where(places["pp"] == places["pp"][rank], alike, -1)
        alike[rank] = len(AXES) + 1
        better = alike > best
        best[better], found[better] = alike[better], index
    if (found < 0).any() and not partial:
        stages = sorted(set(places["pp"][found < 0].tolist()))
        firsts = tuple(int(ranks[places["pp"] == stage][0]) for stage in stages)
        what = f"stages {format_ranks(stages)} have no slice (rank {', '.join(map(str, firsts))})"
        raise MissingSlicesError(what, _AGAIN, firsts, "their stages have no slice")
    return found


def _places(world: World) -> dict[str, np.ndarray]:
    """axis -> [world], where on it each rank is."""
    ranks = np.arange(world.size)
    return {axis: np.asarray(world._along(axis, ranks)) for axis in AXES}


def open_programs(path: str | os.PathLike[str], *, partial: bool = False) -> Programs:
    """Read the programs in a folder of slices, a file of programs, or a text that a person wrote.

    Args:
        path: what to read.
        partial: take slices of some stages alone, for what needs no other rank (``peak_memory``).

    Raises:
        ProgramError: it is none of them, or slices of different jobs, or a stage has none.
    """
    return dataclasses.replace(_opened(path, partial), path=os.fspath(path))


def _opened(path: str | os.PathLike[str], partial: bool) -> Programs:
    place = Path(path)
    try:
        if place.is_dir():
            whole = place / WORLD
            return load(whole) if whole.exists() else assemble(place, partial=partial)
        with open(place, "rb") as file:  # once: it may be a pipe
            start = file.read(64)
            if start.startswith(b"PK"):
                return load(place)
            rest = b"" if b"\0" in start else file.read(_MOST_TEXT)  # nor is /dev/zero read whole
        if len(rest) == _MOST_TEXT:
            raise ProgramError(f"{place} has more than {_MOST_TEXT:,} bytes", fix=FIX)
        text = io.TextIOWrapper(io.BytesIO(start + rest), encoding="utf-8-sig").read()
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        fix = f"prism capture RECIPE -o {place}, or name a file" if absent else "name a file"
        raise ProgramError(f"cannot read {place}: {error.strerror}", fix=fix) from error
    except UnicodeDecodeError as error:
        raise ProgramError(f"{place} is neither programs nor text", fix=FIX) from error
    return parse(text, str(place))
