"""The ranks of a job of a given size: coordinates, groups, selectors such as ``pp=3,tp=0``.

In : world size and Megatron's parallel sizes.  Out: ranks, coordinates, Megatron's named groups,
all by strides over ``arange(size)``, so that a million ranks cost milliseconds.  Numpy only.  It
knows nothing of nodes or links, and nothing of models.

Megatron lays the ranks out twice over the same numbers: a *dense* grid tp x cp x dp x pp for
attention, embeddings and the rest, and an *expert* grid etp x ep x edp x pp for the experts of an
MoE layer.  In the order string the first axis varies fastest (megatron/core/parallel_state.py:447
RankGenerator @core_v0.16.1).

>>> world = World(64, tp=8, pp=4)
>>> world.coordinates(25)
Coordinates(tp=1, cp=0, dp=1, pp=1, ep=0, etp=1, edp=1)
>>> world.groups(25)["PIPELINE_MODEL_PARALLEL_GROUP"]
(9, 25, 41, 57)
>>> world.select("pp=3,tp=0")
(48, 56)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from megatron_prism.core.errors import WorldError
from megatron_prism.core.units import counted

STAGES = "stages"  # selects the first rank of every pipeline stage
HELP = (
    "write 0,517 or 0-127:8 for ranks, pp=3,tp=0 for coordinates, 'pp=0;pp=3' for several, "
    f"{STAGES} for the first rank of every pipeline stage"
)
_NUMBERS = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>\d+))?)?")
_CONDITION = re.compile(r"(?P<axis>[a-z]+)\s*=\s*(?P<value>\d+)")


def format_ranks(ranks: Iterable[int]) -> str:
    """The ranks in few words that ``select`` reads back: ``0-120:8``, ``0-3,9``; no ranks, no text.

    Runs of three or more evenly spaced ranks become a range, greedily from the lowest.
    """
    rest = sorted(set(ranks))
    words = []
    at = 0
    while at < len(rest):
        # the longest run of even steps from this rank on
        end = at + 1
        step = rest[end] - rest[at] if end < len(rest) else 1
        while end + 1 < len(rest) and rest[end + 1] - rest[end] == step:
            end += 1
        # two ranks in a row are shorter by themselves
        if end - at >= 2 and end < len(rest):
            words.append(f"{rest[at]}-{rest[end]}" + (f":{step}" if step > 1 else ""))
            at = end + 1
        else:
            words.append(str(rest[at]))
            at += 1
    return ",".join(words)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-3,9``."""
    distinct_ranks = set(ranks)
    noun = "rank" if len(distinct_ranks) == 1 else "ranks"
    return f"{noun} {format_ranks(distinct_ranks)}"


@dataclass(frozen=True)
class Family:
    """One kind of group that ``initialize_model_parallel`` creates.

    desc   : Megatron's group_desc, also what a Flight Recorder dump says
    grid   : ``dense`` or ``expert``
    axes   : the axes its members differ in; an empty tuple is a group of one
    pick   : ``all`` members of that slice, its ``ends`` (first and last) or its ``first``;
             in one case the whole ``world``
    twin   : a gloo copy ``<desc>_GLOO`` is made beside it unless --disable-gloo-process-groups
    since  : first megatron-core release that makes it
    """

    desc: str
    grid: str
    axes: tuple[str, ...]
    pick: str = "all"
    twin: bool = False
    since: tuple[int, int] = (0, 0)


# In Megatron's order of creation (parallel_state.py:830-1340 @core_v0.16.1, :930-1580
# @core_v0.19.0), for one distributed optimizer instance and without hierarchical or hybrid context
# parallelism.
FAMILIES = (
    Family("GTP_WEIGHT_REMAT_GROUP", "dense", (), since=(0, 19)),
    Family("DATA_PARALLEL_GROUP_WITH_CP", "dense", ("dp", "cp"), twin=True),
    Family("DATA_PARALLEL_GROUP", "dense", ("dp",), twin=True),
    Family("CONTEXT_PARALLEL_GROUP", "dense", ("cp",)),
    Family("MODEL_PARALLEL_GROUP", "dense", ("tp", "pp")),
    Family("TENSOR_MODEL_PARALLEL_GROUP", "dense", ("tp",)),
    Family("PIPELINE_MODEL_PARALLEL_GROUP", "dense", ("pp",)),
    Family("EMBEDDING_GROUP", "dense", ("pp",), pick="ends"),
    Family("POSITION_EMBEDDING_GROUP", "dense", ("pp",), pick="first"),
    Family("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "dense", ("tp", "dp", "cp")),
    Family("TENSOR_AND_DATA_PARALLEL_GROUP", "dense", ("tp", "dp")),
    Family("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "dense", ("tp", "cp")),
    Family("EXPERT_GTP_WEIGHT_REMAT_GROUP", "expert", (), since=(0, 19)),
    Family("EXPERT_MODEL_PARALLEL_GROUP", "expert", ("ep",)),
    Family("EXPERT_TENSOR_PARALLEL_GROUP", "expert", ("tp",)),
    Family("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert", ("tp", "ep")),
    Family("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "expert", ("tp", "ep", "pp")),
    Family(
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
        "expert",
        ("tp", "ep", "pp"),
        since=(0, 19),
    ),
    Family("EXPERT_DATA_PARALLEL_GROUP", "expert", ("dp",), twin=True),
    Family(
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "expert",
        ("tp", "ep", "dp", "pp"),
        pick="world",
    ),
)


def orthogonal_rank_groups(
    parallel_size: Sequence[int], mask: Sequence[bool], containing: Iterable[int] | None = None
) -> np.ndarray:
    """Every group whose members differ only in the masked axes, int64 [groups, members].

    The first axis varies fastest.  The same groups, in the same order, as Megatron's own
    generate_masked_orthogonal_rank_groups (megatron/core/parallel_state.py:251 @core_v0.16.1,
    unchanged @core_v0.19.0), which walks every rank in Python.  With ``containing`` only those that
    hold one of these ranks are built, whatever the size of the world.  Beware where the *list* is
    used and not its members: Megatron counts and concatenates all tp-ep-pp groups to make
    INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP (:1332 @core_v0.16.1).
    """
    sizes = np.asarray(parallel_size, dtype=np.int64)
    spanned = np.asarray(mask, dtype=bool)
    strides = np.cumprod(np.concatenate(([1], sizes[:-1]))).astype(np.int64)
    if containing is None:
        # a group for each combination of coordinates that its members share
        first_ranks = _corners(sizes[~spanned], strides[~spanned])
    else:
        ranks = np.fromiter(containing, dtype=np.int64)
        coordinates = ranks[:, None] // strides % sizes  # int64 [ranks, axes]
        # Groups are numbered over the axes they do not span, the first fastest; since strides grow
        # along the axes, that is also the order of their lowest ranks.
        first_ranks = np.unique(coordinates[:, ~spanned] @ strides[~spanned])
    offsets = _corners(sizes[spanned], strides[spanned])
    groups: np.ndarray = first_ranks[:, None] + offsets
    return groups


def _corners(sizes: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """All sums of coordinate x stride, int64 [prod(sizes)], first axis fastest."""
    total = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        total = (np.arange(size)[:, None] * stride + total).reshape(-1)
    return total


def family(desc: str) -> Family:
    """The row called ``desc`` (or its gloo twin).  WorldError if there is none."""
    for row in FAMILIES:
        if desc == row.desc or row.twin and desc == f"{row.desc}_GLOO":
            return row
    message = f"Megatron makes no group called {desc}"
    raise WorldError(message, fix=f"use one of {', '.join(row.desc for row in FAMILIES)}")


# What Megatron passes; --use-tp-pp-dp-mapping gives tp-cp-ep-pp-dp (training/initialize.py:378
# @core_v0.16.1)
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


class Coordinates(NamedTuple):
    """Where a rank stands: (tp, cp, dp, pp) on the dense grid, (etp, ep, edp, pp) on the other."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


AXES = Coordinates._fields
Ranks = TypeVar("Ranks", int, np.ndarray)  # one of them or many


@dataclass(frozen=True)
class World:
    """The target job: ``size`` ranks split by Megatron's parallel sizes.

    size  : ranks (GPUs) of the job            etp  : tensor parallel size of experts, None: tp
    tp    : tensor parallel size               vpp  : chunks per stage, None: not interleaved
    cp    : context parallel size              order: fastest axis first, as in Megatron
    pp    : pipeline parallel size (stages)
    ep    : expert parallel size
    gpus_per_node: ranks that the launcher starts on each of several hosts, which they fill in
                   their order; None: not known, as of a job on one host

    Raises WorldError, showing the arithmetic, when the sizes do not fit.
    """

    size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    order: str = DEFAULT_ORDER
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.etp is None:
            # Megatron's default, and the only change of a frozen world
            object.__setattr__(self, "etp", self.tp)
        _check_sizes(self)
        # a stage holds dense layers and experts: both grids must put it on the same ranks
        dense_stride, expert_stride = self._stride("dense", "pp"), self._stride("expert", "pp")
        if dense_stride != expert_stride:
            raise WorldError(
                f"order {self.order}: stages are {dense_stride} (dense layers) and "
                f"{expert_stride} (expert layers) ranks apart",
                fix=f"use the order {DEFAULT_ORDER}, or etp x ep = tp x cp = {self.tp * self.cp}",
            )

    @cached_property
    def _grids(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """The axes of each grid, fastest first, and their sizes."""
        axes = _ordered_axes(self)
        dense = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        expert = {"tp": self.etp or self.tp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return {
            "dense": (axes, tuple(dense[axis] for axis in axes)),
            "expert": (axes, tuple(expert[axis] for axis in axes)),
        }

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def dp(self) -> int:
        """Data parallel size: size / (tp x cp x pp)."""
        return self.size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data parallel size of the experts: size / (etp x ep x pp)."""
        return self.size // ((self.etp or self.tp) * self.ep * self.pp)

    @property
    def stages(self) -> range:
        """The pipeline stages, 0 … pp-1."""
        return range(self.pp)

    @property
    def chunks(self) -> int:
        """Model chunks of one stage (vpp, or 1)."""
        return self.vpp or 1

    def same_places(self, world: World) -> bool:
        """Whether every rank has the same coordinates in both, whatever chunks stages and ranks
        nodes have.
        """
        # neither moves a rank to another coordinate
        own_places = replace(self, vpp=None, gpus_per_node=None)
        return own_places == replace(world, vpp=None, gpus_per_node=None)

    def axis_sizes(self) -> dict[str, int]:
        """Size of every coordinate, in the order of ``Coordinates``."""
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        axes = f"tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp}"
        text = f"{counted(self.size, 'rank')} = {axes}"
        if self.vpp is not None:
            text += f", vpp {self.vpp}"
        # experts have a grid of their own
        if self.ep > 1 or self.etp != self.tp:
            text += f"; experts etp {self.etp} x ep {self.ep} x edp {self.edp} x pp {self.pp}"
        if self.gpus_per_node is not None:
            text += f"; nodes of {self.gpus_per_node}"
        return text

    # -- ranks and coordinates ---------------------------------------------------------------------

    def _stride(self, grid: str, axis: str) -> int:
        axes, sizes = self._grids[grid]
        return math.prod(sizes[: axes.index(axis)])

    def _along(self, axis: str, ranks: Ranks) -> Ranks:
        """The coordinate ``axis`` (one of AXES) of one rank or of an array of ranks."""
        grid = "expert" if axis in ("ep", "etp", "edp") else "dense"
        # on the experts' grid they take the places of tp and dp
        name = {"etp": "tp", "edp": "dp"}.get(axis, axis)
        return ranks // self._stride(grid, name) % self.axis_sizes()[axis]

    def check_rank(self, rank: int) -> int:
        """The rank itself; WorldError if the world has no such rank."""
        if not 0 <= rank < self.size:
            message = f"rank {rank} is outside a world of {counted(self.size, 'rank')}"
            raise WorldError(message, fix=f"choose ranks from 0 to {self.size - 1}")
        return rank

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands.  WorldError if the world has no such rank."""
        self.check_rank(rank)
        return Coordinates(*(self._along(axis, rank) for axis in AXES))

    def matching(self, **coordinates: int) -> np.ndarray:
        """All ranks with these coordinates, ascending, int64 [n].

        WorldError for an axis that does not exist or a value outside it.
        """
        sizes = self.axis_sizes()
        ranks = np.arange(self.size)
        for axis, value in coordinates.items():
            if axis not in sizes:
                message = f"{axis} is no coordinate of a rank"
                raise WorldError(message, fix=f"use one of {', '.join(AXES)}")
            if not 0 <= value < sizes[axis]:
                message = f"{axis}={value}: this world has {axis} {sizes[axis]} ({self})"
                raise WorldError(message, fix=f"choose {axis} from 0 to {sizes[axis] - 1}")
            ranks = ranks[self._along(axis, ranks) == value]
        return ranks

    def rank_at(self, **coordinates: int) -> int:
        """The lowest rank with these coordinates; tp, cp, dp and pp together name exactly one.

        WorldError when no rank has them all: dense and expert coordinates can exclude each other.
        """
        ranks = self.matching(**coordinates)
        if not ranks.size:
            wanted = ", ".join(f"{axis}={value}" for axis, value in coordinates.items())
            message = f"no rank has {wanted} in {self}"
            raise WorldError(message, fix="leave one of the coordinates out")
        return int(ranks[0])

    def select(self, text: str) -> tuple[int, ...]:
        """Ranks that a selector names, ascending, each once: ``0,517`` · ``0-127:8`` ·
        ``pp=3,tp=0;5`` · ``stages``.

        WorldError with the fix when it names none, one outside the world, or cannot be read.
        """
        ranks: set[int] = set()
        for selector in text.split(";"):
            terms = [term.strip() for term in selector.split(",")]
            # the lowest rank of each stage
            if terms == [STAGES]:
                ranks.update(self.rank_at(pp=stage) for stage in self.stages)
            elif any("=" in term for term in terms):
                ranks.update(self._by_coordinates(selector.strip(), terms))
            else:
                for term in terms:
                    ranks.update(self._by_number(term, text))
        return tuple(sorted(ranks))

    def _by_coordinates(self, selector: str, terms: list[str]) -> list[int]:
        wanted: dict[str, int] = {}
        for term in terms:
            match = _CONDITION.fullmatch(term)
            if match is None:
                message = f"selector {selector!r}: {term!r} is no condition like pp=3"
                raise WorldError(message, fix=HELP)
            if match["axis"] in wanted:
                raise WorldError(f"selector {selector!r}: {term!r} is given twice", fix=HELP)
            wanted[match["axis"]] = int(match["value"])
        ranks: list[int] = self.matching(**wanted).tolist()
        if not ranks:
            message = f"selector {selector!r}: no rank of {self} has all of these"
            raise WorldError(message, fix="drop one condition")
        return ranks

    def _by_number(self, term: str, text: str) -> range:
        match = _NUMBERS.fullmatch(term)
        if match is None:
            raise WorldError(f"ranks {text!r}: {term!r} is no rank, range or condition", fix=HELP)
        first = self.check_rank(int(match["first"]))
        last = self.check_rank(int(match["last"] or first))
        step = int(match["step"] or 1)
        if last < first or step < 1:
            fix = f"write {last}-{first}" if last < first else "use a step of at least 1"
            raise WorldError(f"ranks {text!r}: {term!r} is an empty range", fix=fix)
        return range(first, last + 1, step)

    # -- groups ------------------------------------------------------------------------------------

    def groups(self, rank: int, megatron: tuple[int, int] = (0, 16)) -> dict[str, tuple[int, ...]]:
        """Megatron's group_desc -> ascending global ranks, for every group the rank is in.

        megatron : release whose list of groups is meant, (0, 16) or (0, 19)
        """
        groups = dict[str, tuple[int, ...]]()
        for row in FAMILIES:
            members = self.group(rank, row) if row.since <= megatron else None
            if members is None:
                continue
            groups[row.desc] = members
            if row.twin:
                groups[f"{row.desc}_GLOO"] = members
        return groups

    def group(self, rank: int, which: Family | str) -> tuple[int, ...] | None:
        """This rank's group of one family (or group_desc), ascending; None if it is in none."""
        row = family(which) if isinstance(which, str) else which
        # the slice holds the rank; of its ends or its first the rank may be none
        (members,) = self.members(row, containing=(self.check_rank(rank),)).tolist()
        return tuple(members) if rank in members else None

    def members(self, row: Family, containing: Iterable[int] | None = None) -> np.ndarray:
        """All groups of a family, int64 [groups, members], or those whose slice holds one of
        ``containing``.
        """
        if row.pick == "world":
            return np.arange(self.size)[None]
        axes, sizes = self._grids[row.grid]
        groups = orthogonal_rank_groups(sizes, [axis in row.axes for axis in axes], containing)
        if row.pick == "first":
            return groups[:, [0]]
        if row.pick == "ends":  # a group of one is both of its ends
            last = groups.shape[1] - 1
            return groups[:, sorted({0, last})]
        return groups


def implied_size(tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> int:
    """The smallest world these sizes allow: one model replica of both grids."""
    return pp * math.lcm(tp * cp, (tp if etp is None else etp) * ep)


def _ordered_axes(world: World) -> tuple[str, ...]:
    """The five axes in the order given; absent ones (of size 1) come last, as in Megatron."""
    sizes = {"tp": world.tp, "cp": world.cp, "dp": world.dp, "pp": world.pp, "ep": world.ep}
    named = world.order.lower().split("-")
    absent = [axis for axis in sizes if axis not in named]
    # an axis of size 1 may be left out
    missing = [f"{axis} {sizes[axis]}" for axis in absent if sizes[axis] > 1]
    if missing or len(named) + len(absent) != len(sizes):
        what = "is not made of tp, cp, ep, dp, pp, each once"
        what = f"leaves out {', '.join(missing)}" if missing else what
        fix = f"use {DEFAULT_ORDER} or tp-cp-ep-pp-dp"
        raise WorldError(f"order {world.order!r} {what}", fix=fix)
    return (*named, *absent)


MOST_RANKS = 1 << 21  # of a world; what is said of each rank then still fits into memory
# each is an object or a call; a layer takes 30 ms to emulate, a microbatch as long
MOST_LAYERS, MOST_EXPERTS, MOST_MICROBATCHES = 1 << 12, 1 << 16, 1 << 16


def _check_sizes(world: World) -> None:
    """WorldError unless all sizes are whole numbers >= 1 and both grids divide the world."""
    for name in ("size", "tp", "cp", "pp", "ep", "etp", "vpp", "gpus_per_node"):
        value = getattr(world, name)
        if value is None and name in ("vpp", "gpus_per_node"):
            continue
        # True is an int, too
        is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_size:
            message = f"{name} must be a whole number of at least 1, not {value!r}"
            raise WorldError(message, fix=f"{name}=1")
    if world.size > MOST_RANKS:
        raise WorldError(f"{world.size} ranks are too many", fix=f"use at most {MOST_RANKS:,}")
    if world.vpp is not None and world.pp == 1:
        message = f"vpp {world.vpp} needs a pipeline, but pp is 1: there is nothing to interleave"
        raise WorldError(message, fix="leave vpp out, or set pp to 2 or more")
    # dense layers and experts have a grid each; what remains is dp, and edp
    for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        product = math.prod(getattr(world, name) for name in names)
        if world.size % product:
            arithmetic = " x ".join(f"{name} {getattr(world, name)}" for name in names)
            message = f"{arithmetic} = {product} does not divide {counted(world.size, 'rank')}"
            raise WorldError(message, fix=_sizes_that_work(world))


def _sizes_that_work(world: World) -> str:
    """The nearest world sizes that satisfy both grids."""
    unit = implied_size(world.tp, world.cp, world.pp, world.ep, world.etp)
    below, above = world.size // unit * unit, (world.size // unit + 1) * unit
    sizes = " or ".join(f"size={size}" for size in (below, above) if size)
    return f"{sizes}, or parallel sizes whose product divides {counted(world.size, 'rank')}"
