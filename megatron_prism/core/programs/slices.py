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

from megatron_prism.core import feature
from megatron_prism.core.errors import MissingSlicesError, ProgramError, UsageError
from megatron_prism.core.files import check_writable, claimed
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs import shard
from megatron_prism.core.programs.gpu_state import GPU_CLOCK
from megatron_prism.core.programs.ops import CODE, IS_PAIR, SHARED
from megatron_prism.core.programs.program import FIX, WHAT_IF, Program, Programs, load, save
from megatron_prism.core.programs.program_text import parse
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
# of a source: what a capture found out of a rank, which answers show; the job is the same
FOUND_OF_RANKS = (HOST_MEMORY, MEMORY_PARTS, ASSUMED_PARTS, SAVED_BYTES)
# each slice has its own rank's, which no two have alike
OF_RANKS = (HOST_INDEX, GPU_CLOCK, *FOUND_OF_RANKS)
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
    texts = dict[str, dict[int, str]]()
    for key in OF_RANKS:
        # slices of earlier releases lack some of these keys
        if key in source:
            texts[key] = {int(rank): text for rank, text in _OF_RANK.findall(source[key])}
    return texts


def renumbered(source: Mapping[str, str], ranks: Mapping[int, int]) -> dict[str, str]:
    """The source of a world in which captured ranks have other numbers.

    Args:
        source: what slices say of their job.
        ranks: number in the captured world -> in the new one; a rank that is absent has no place
            there, and neither has what its slice says of its host and GPU.
    """
    new = dict(source)
    for key, texts in of_ranks(source).items():
        # what a slice says of its own host goes with its rank
        new_texts = {ranks[rank]: text for rank, text in texts.items() if rank in ranks}
        del new[key]
        if new_texts:
            new[key] = " ".join(f"{rank}={text}" for rank, text in sorted(new_texts.items()))
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
        self.folder = folder
        self.world = world
        self.source = dict(source)
        self.parsed = parsed

    def path(self, rank: int) -> Path:
        """Where the slice of ``rank`` is or will be."""
        return self.folder / f"slice-{rank:06d}.prism"

    def prepare(self, force: bool) -> None:
        """Make the folder; drop what it holds if ``force``.

        UsageError if it holds slices of another job, or things that are no slices.
        """
        check_writable(self.folder)  # now, not when the first slice is done
        self.folder.mkdir(parents=True, exist_ok=True)
        # a folder of something else is left alone, also with --force
        strange = [p.name for p in self.folder.iterdir() if not _ours(p)]
        if strange:
            names = ", ".join(sorted(strange)[:3])
            message = f"{self.folder} holds things that are no slices: {names}"
            raise UsageError(message, fix="name an empty or a new folder with -o DIR")
        if force:
            (self.folder / WORLD).unlink(missing_ok=True)
            for path in list(self.folder.iterdir()):
                if _is_of_rank(path.name):
                    path.unlink(missing_ok=True)
        for rank in self.ranks():
            try:
                self.check(load(self.path(rank)), self.path(rank))
            except ProgramError as error:
                # the advice to delete a slice must not cost the user a good one
                if isinstance(error.__cause__, PermissionError):
                    raise  # it may be a good one
                fix = f"delete {self.path(rank)}: it is captured again"
                raise ProgramError(error.message, fix=fix) from error

    @contextlib.contextmanager
    def writing(self, force: bool) -> Iterator[None]:
        """The folder as ``prepare`` makes it, and no other run's meanwhile."""
        # two captures into one folder would mix slices of two jobs
        with claimed(self.folder, inside=True):
            self.prepare(force)
            yield

    def ranks(self) -> list[int]:
        """The ranks whose slices are there, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def check(self, programs: Programs | Origin, path: Path) -> None:
        """UsageError unless ``programs`` are of this job."""
        differences = self.differences(programs)
        if differences:
            raise UsageError(
                f"{path} is a slice of another job: {'; '.join(differences)}",
                fix="--force drops the old slices, -o DIR puts the new ones elsewhere",
            )

    def differences(self, programs: Programs | Origin) -> list[str]:
        """In which words ``programs`` are of another job than this one."""
        differences = list[str]()
        if not self._has_same_world(programs.world):
            differences.append(f"a world of {programs.world}, not {self.world}")
        if not self.source:  # nothing is known of the job yet: its ranks compare themselves
            return differences
        # older slices lack keys that have a default
        their_source = {**_DEFAULTS, **programs.source}
        for key, value in {**_DEFAULTS, **self.source}.items():
            # facts of one rank, and what was assumed: alike in no two slices
            if key in (*OF_RANKS, WHAT_IF):
                continue
            their_value = their_source.get(key)
            if key in job_settings.KEYS:
                differences += job_settings.differences(key, their_value, value)
            elif their_value != value:
                differences.append(f"{key} {their_source.get(key, 'unknown')}, not {value}")
        return differences

    def _has_same_world(self, world: World) -> bool:
        """Whether ``world`` is this job's, as far as that is known."""
        if self.parsed:
            return world == self.world
        is_bare = self.world.same_places(World(self.world.size))
        if is_bare:  # a world of no sizes may get them from the job's own code
            return world.size == self.world.size
        return world.same_places(self.world)

    def put(self, program: Program, groups: Groups | None = None) -> None:
        """Keep a finished slice, and the groups that do not follow from the sizes of the world."""
        # a slice is a world's file with one program: one format, one reader
        stand_ins = np.zeros(self.world.size, dtype=np.int32)  # the one program, for all ranks
        programs = Programs(self.world, (program,), stand_ins, groups or {}, self.source)
        (self.folder / WORLD).unlink(missing_ok=True)  # it was made without this slice
        save(programs, self.path(program.rank), force=True)


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
    # the folders of three commands look alike to a user: each gets the line that helps
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
    for programs, path in zip(slices[1:], paths[1:], strict=True):
        # all must be of the first one's job
        store.check(programs, path)
    captured = [programs.programs[0] for programs in slices]
    for program, path in zip(captured, paths, strict=True):
        # a file that somebody has renamed or copied
        if store.path(program.rank).name != path.name:
            raise ProgramError(
                f"{path} holds the slice of rank {program.rank}", fix=f"delete or rename {path}"
            )
    stand_ins = stand_in_for(first.world, [program.rank for program in captured], partial=partial)
    if not partial:
        _check_rings(first.world, captured, stand_ins)
    groups = _joined_groups(slices, paths)
    if not partial:
        _check_gathers(first.world, captured, stand_ins, groups)
    source = _joined_source(slices)
    # slices that differ in their shards of parameters alone: one stands for all
    representative = _alike(first.world, captured)
    text = _said(captured, representative)
    if text:
        source["alike"] = text
        indices = sorted(set(representative))
        # places of those that stay, in the shorter list
        new_index = np.searchsorted(indices, np.array(representative))
        stand_ins = np.where(stand_ins < 0, stand_ins, new_index[stand_ins]).astype(np.int32)
        captured = [captured[index] for index in indices]
    where = os.fspath(folder)
    return Programs(first.world, tuple(captured), stand_ins, groups, source, where, partial)


def _joined_groups(
    slices: Sequence[Programs], paths: Sequence[Path]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of all slices; ProgramError where two differ in those of a name."""
    groups = dict[str, tuple[tuple[int, ...], ...]]()
    for programs, path in zip(slices, paths, strict=True):
        for name, members in programs.groups.items():
            if groups.setdefault(name, members) != members:
                raise ProgramError(
                    f"{path} has other groups {name} than the slices before it",
                    fix="delete it, and capture it again as the others",
                )
    return groups


def _joined_source(slices: Sequence[Programs]) -> dict[str, str]:
    """What the slices say of their job; of ``OF_RANKS`` each slice has its own rank's."""
    source = dict[str, str]()
    for programs in slices:
        # alike in all but what is of ranks, which follows
        source |= programs.source
    for key in OF_RANKS:
        texts = [programs.source[key] for programs in slices if key in programs.source]
        if texts:
            source[key] = " ".join(texts)
    return source


def _alike(world: World, captured: Sequence[Program]) -> list[int]:
    """For each program the one that stands for it: of those of a stage that are alike but for their
    shards, the one with the longest step.
    """
    # numbers of texts and splits, the same in all programs: their bytes can be compared then
    strings = dict[str, None]()
    splits = dict[tuple[tuple[int, ...], tuple[int, ...]], None]()
    for program in captured:
        strings |= dict.fromkeys(program.strings)
        splits |= dict.fromkeys(program.splits)
    all_strings = list(strings)
    all_splits = list(splits)
    kinds = defaultdict[tuple[int, bytes], list[int]](list)
    for index, program in enumerate(captured):
        kind = -1 - index, b""  # like no other
        if len(captured) > 1 and shard.is_sharded(program):
            columns = shard.without_shard(program).columns(all_strings, all_splits)
            kind = world.coordinates(program.rank).pp, columns
        kinds[kind].append(index)
    representative = list(range(len(captured)))
    for indices in kinds.values():
        # it updates most parameters, so nobody needs more memory or time
        longest = max(indices, key=lambda index: (*_work(captured[index]), -index))
        for index in indices:
            representative[index] = longest
    return representative


def _work(program: Program) -> tuple[int, int]:
    """(bytes that the optimizer's step moves, its kernels)."""
    step = program.ops[shard.segments(program)]
    return int(step["traffic"].sum()), int(step["kernels"].sum())


def _said(captured: Sequence[Program], representative: Sequence[int]) -> str:
    """``rank 2 for 7``: which rank stands for which others."""
    represented = defaultdict[int, list[int]](list)
    for program, index in zip(captured, representative, strict=True):
        ranks = represented[captured[index].rank]
        if program is not captured[index]:
            ranks.append(program.rank)
    return ", ".join(
        f"rank {rank} for {format_ranks(ranks)}" for rank, ranks in represented.items() if ranks
    )


def _check_rings(world: World, captured: Sequence[Program], of: np.ndarray) -> None:
    """ProgramError where one place of a context-parallel group stands for another, and they differ:
    who sends around it without a group (roll_tensor of multi_token_prediction.py:195 @0.19.0) does
    otherwise first, in the middle and last.
    """
    if world.cp == 1:
        return
    ranks = np.arange(world.size)
    places = _places(world)
    missing = set[int]()
    for index, program in enumerate(captured):
        # it makes no calls without a group
        if "default_pg" not in program.strings:
            continue
        ops = program.ops
        in_ring = np.ones(world.size, dtype=bool)  # the ranks of its context-parallel group
        for axis in ("tp", "dp", "pp"):
            in_ring &= places[axis] == places[axis][program.rank]
        group = program.strings.index("default_pg")
        messages = IS_PAIR[ops["name"]] & (ops["group"] == group)
        # global ranks, as the group is that of all
        peers = (program.rank + np.unique(ops["peer"][messages])) % world.size
        if in_ring[peers].any():
            represented = in_ring & (of == index) & (ranks != program.rank)
            missing.update(ranks[represented].tolist())
    if missing:
        reason = "messages go around a context-parallel group, and each place makes others"
        text = f"{reason}: ranks {format_ranks(sorted(missing))} have no slice"
        raise MissingSlicesError(text, _AGAIN, tuple(sorted(missing)), reason)


def _check_gathers(
    world: World, captured: Sequence[Program], stand_ins: np.ndarray, groups: Groups
) -> None:
    """Check that no rank stands for another that gives a gather more or less.

    Whole parameters may belong to single ranks (layer_wise_optimizer.py:763 @0.19.0), whose
    optimizers then take other memory and other times.

    Args:
        world: of the job.
        captured: the programs.
        stand_ins: int64 [ranks], the program in ``captured`` that stands for each rank.
        groups: that do not follow from the sizes of the world.

    Raises:
        MissingSlicesError: with the ranks for which another stands that differs.
    """
    missing = set[int]()
    group = ""  # of a gather that shows it
    gathers = [_gathers(program) for program in captured]
    has_slice = np.isin(np.arange(world.size), [program.rank for program in captured])
    for program, own_gathers in zip(captured, gathers, strict=True):
        members_of_group = dict[str, np.ndarray]()
        for call, (_, sizes_of_members) in own_gathers.items():
            name = call[0]
            if name not in members_of_group:
                members_of_group[name] = _members(world, groups, name, program.rank)
            members = members_of_group[name]
            # a group that nobody has named has no members here
            if len(sizes_of_members) != len(members):
                continue
            # what each member's slice gives, against what this slice has got from the member
            own_sizes: list[int] = []
            for gathers_of_program in gathers:
                own_size, _ = gathers_of_program.get(call, (-1, ()))
                own_sizes.append(own_size)
            sizes_by_stand_in = np.array(own_sizes)[stand_ins[members]]
            differs = sizes_by_stand_in != sizes_of_members
            unlike = members[differs & ~has_slice[members]].tolist()
            missing.update(unlike)
            if unlike:
                group = name
    if missing:
        ranks = f"{min(missing)} …"
        if len(missing) <= _SHOWN:
            ranks = format_ranks(sorted(missing))
        reason = "whole parameters belong to single ranks"
        text = (
            f"gathers of {group} take more from some ranks than from others ({reason}, dist_muon): "
            f"{len(missing)} ranks ({ranks}) differ from those that stand for them"
        )
        raise MissingSlicesError(text, _AGAIN, tuple(sorted(missing)), reason)


def _members(world: World, groups: Groups, name: str, rank: int) -> np.ndarray:
    """int64 [members]: the group ``name`` of ``rank``; empty where nobody has said it."""
    if name not in groups:
        own_groups = world.groups(rank, megatron=(0, 19))
        return np.array(own_groups.get(name, ()), dtype=np.int64)
    for ranks in groups[name]:
        if rank in ranks:
            return np.array(ranks, dtype=np.int64)
    return np.empty(0, dtype=np.int64)


def _gathers(program: Program) -> dict[tuple[str, int], tuple[int, tuple[int, ...]]]:
    """(group, how many before it) -> (elements of this rank, of every member) of uneven gathers."""
    ops = program.ops
    is_uneven_gather = (ops["name"] == CODE["all_gather"]) & (ops["splits"] >= 0)
    gathers = dict[tuple[str, int], tuple[int, tuple[int, ...]]]()
    gathers_of_group = Counter[str]()
    for row in ops[is_uneven_gather]:
        name = program.strings[row["group"]]
        # groups in which parameters are shared out
        if SHARED not in name:
            continue
        _, elements_of_members = program.splits[row["splits"]]
        gathers[name, gathers_of_group[name]] = int(row["num_in"]), elements_of_members
        gathers_of_group[name] += 1
    return gathers


def stand_in_for(world: World, captured: Iterable[int], *, partial: bool = False) -> np.ndarray:
    """int32 [world]: which of the captured ranks (by index) stands for every rank; -1 for those of
    a stage without a slice, if ``partial``, else ProgramError.
    """
    places = _places(world)
    stage = places["pp"]
    most_shared = np.full(world.size, -1, dtype=np.int32)  # coordinates
    stand_ins = np.full(world.size, -1, dtype=np.int32)
    for index, rank in enumerate(captured):
        shared = np.zeros(world.size, dtype=np.int32)
        for axis in AXES:
            shared += places[axis] == places[axis][rank]
        # another stage runs another program
        shared[stage != stage[rank]] = -1
        shared[rank] = len(AXES) + 1  # a rank stands for itself
        better = shared > most_shared
        most_shared[better] = shared[better]
        stand_ins[better] = index
    missing = stand_ins < 0
    if missing.any() and not partial:
        stages = sorted(set(stage[missing].tolist()))
        first_ranks = tuple(int(np.flatnonzero(stage == number)[0]) for number in stages)
        ranks = ", ".join(map(str, first_ranks))
        text = f"stages {format_ranks(stages)} have no slice (rank {ranks})"
        raise MissingSlicesError(text, _AGAIN, first_ranks, "their stages have no slice")
    return stand_ins


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
            # an archive: what prism writes
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
