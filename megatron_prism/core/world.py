"""Which ranks does a job of this size have, where does each stand, and which groups is it in?

In : world size and Megatron's parallel sizes.  Out: ranks, coordinates, Megatron's named groups,
all by strides over ``arange(size)``, so that a million ranks cost milliseconds.  Numpy only.  It
knows nothing of nodes or links (``topology.py``) and nothing of models.

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
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from megatron_prism.core import selectors
from megatron_prism.core.errors import WorldError
from megatron_prism.core.rank_groups import FAMILIES, Family, family, orthogonal_rank_groups
from megatron_prism.core.selectors import format_ranks

__all__ = [
    "AXES",
    "DEFAULT_ORDER",
    "FAMILIES",
    "Coordinates",
    "World",
    "format_ranks",
    "implied_size",
    "orthogonal_rank_groups",
]

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
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


Ranks = TypeVar("Ranks", int, np.ndarray)  # one of them or many


@dataclass(frozen=True)
class World:
    """The target job: ``size`` ranks split by Megatron's parallel sizes.

    size  : ranks (GPUs) of the job            etp  : tensor parallel size of experts, None: tp
    tp    : tensor parallel size               vpp  : chunks per stage, None: not interleaved
    cp    : context parallel size              order: fastest axis first, as in Megatron
    pp    : pipeline parallel size (stages)
    ep    : expert parallel size

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
    _grids: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = field(
        init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        _check_sizes(self)
        axes = _ordered_axes(self)
        dense = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        expert = {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        grids = {
            "dense": (axes, tuple(dense[a] for a in axes)),
            "expert": (axes, tuple(expert[a] for a in axes)),
        }
        object.__setattr__(self, "_grids", grids)
        if self._stride("dense", "pp") != self._stride("expert", "pp"):
            raise WorldError(
                f"order {self.order}: the two grids disagree on the stages: next stages are "
                f"{self._stride('dense', 'pp')} ranks apart for dense layers and "
                f"{self._stride('expert', 'pp')} for experts",
                fix=f"use the order {DEFAULT_ORDER} (pp last), or choose etp x ep = "
                f"tp x cp = {self.tp * self.cp}",
            )

    # -- sizes
    # ---------------------------------------------------------------------------------------

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

    def axis_sizes(self) -> dict[str, int]:
        """Size of every coordinate, in the order of ``Coordinates``."""
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        text = f"{self.size:,} ranks = tp {self.tp} x cp {self.cp} x dp {self.dp} x pp {self.pp}"
        if self.vpp is not None:
            text += f", vpp {self.vpp}"
        if self.ep > 1 or self.etp != self.tp:
            text += f"; experts etp {self.etp} x ep {self.ep} x edp {self.edp} x pp {self.pp}"
        return text

    # -- ranks and coordinates
    # -----------------------------------------------------------------------

    def _stride(self, grid: str, axis: str) -> int:
        axes, sizes = self._grids[grid]
        return math.prod(sizes[: axes.index(axis)])

    def _along(self, axis: str, ranks: Ranks) -> Ranks:
        """The coordinate ``axis`` (one of AXES) of one rank or of an array of ranks."""
        grid = "expert" if axis in ("ep", "etp", "edp") else "dense"
        name = {"etp": "tp", "edp": "dp"}.get(axis, axis)
        return ranks // self._stride(grid, name) % self.axis_sizes()[axis]

    def check_rank(self, rank: int) -> int:
        """The rank itself; WorldError if the world has no such rank."""
        if not 0 <= rank < self.size:
            raise WorldError(
                f"rank {rank} is outside a world of {self.size} ranks",
                fix=f"choose ranks from 0 to {self.size - 1}",
            )
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
                raise WorldError(
                    f"{axis} is no coordinate of a rank", fix=f"use one of {', '.join(AXES)}"
                )
            if not 0 <= value < sizes[axis]:
                raise WorldError(
                    f"{axis}={value}: this world has {axis} {sizes[axis]} ({self})",
                    fix=f"choose {axis} from 0 to {sizes[axis] - 1}",
                )
            ranks = ranks[self._along(axis, ranks) == value]
        return ranks

    def rank_at(self, **coordinates: int) -> int:
        """The lowest rank with these coordinates; tp, cp, dp and pp together name exactly one.

        WorldError when no rank has them all: dense and expert coordinates can exclude each other.
        """
        found = self.matching(**coordinates)
        if not found.size:
            wanted = ", ".join(f"{axis}={value}" for axis, value in coordinates.items())
            raise WorldError(
                f"no rank has {wanted} in {self}", fix="leave one of the coordinates out"
            )
        return int(found[0])

    def select(self, text: str) -> tuple[int, ...]:
        """Ranks that a selector names, ascending: ``0,517`` · ``0-127:8`` · ``pp=3,tp=0;5``."""
        return selectors.select(self, text)

    # -- groups
    # --------------------------------------------------------------------------------------

    def groups(
        self, rank: int, *, megatron: tuple[int, int] = (0, 16), gloo: bool = True
    ) -> dict[str, tuple[int, ...]]:
        """Megatron's group_desc -> ascending global ranks, for every group the rank is in.

        megatron : release whose list of groups is meant, (0, 16) or (0, 19)
        gloo     : include the gloo twins of the data-parallel groups (Megatron's default)
        """
        found = {}
        for row in FAMILIES:
            if row.since <= megatron and (members := self.group(rank, row)) is not None:
                found[row.desc] = members
                if row.twin and gloo:
                    found[f"{row.desc}_GLOO"] = members
        return found

    def group(self, rank: int, which: Family | str) -> tuple[int, ...] | None:
        """This rank's group of one family (or group_desc), ascending; None if it is in none."""
        row = family(which) if isinstance(which, str) else which
        self.check_rank(rank)
        if row.pick == "world":
            return tuple(range(self.size))
        axes, sizes = self._grids[row.grid]
        mask = [axis in row.axes for axis in axes]
        (members,) = orthogonal_rank_groups(self.size, sizes, mask, containing=(rank,))
        if row.pick == "ends":
            members = members[:1] + members[1:][-1:]
        elif row.pick == "first":
            members = members[:1]
        return tuple(members) if rank in members else None


def implied_size(tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> int:
    """The smallest world these sizes allow: one model replica of both grids."""
    return pp * math.lcm(tp * cp, (tp if etp is None else etp) * ep)


def _ordered_axes(world: World) -> tuple[str, ...]:
    """The five axes in the order given; absent ones (of size 1) come last, as in Megatron."""
    sizes = {"tp": world.tp, "cp": world.cp, "dp": world.dp, "pp": world.pp, "ep": world.ep}
    named = world.order.lower().split("-")
    absent = [axis for axis in sizes if axis not in named]
    if (
        len(set(named)) != len(named)
        or not set(named) <= set(sizes)
        or any(sizes[a] > 1 for a in absent)
    ):
        missing = [f"{a} {sizes[a]}" for a in absent if sizes[a] > 1]
        what = (
            f"leaves out {', '.join(missing)}"
            if missing
            else "is not made of tp, cp, ep, dp, pp, each once"
        )
        raise WorldError(
            f"order {world.order!r} {what}", fix=f"use {DEFAULT_ORDER} or tp-cp-ep-pp-dp"
        )
    return (*named, *absent)


def _check_sizes(world: World) -> None:
    """WorldError unless all sizes are whole numbers >= 1 and both grids divide the world."""
    for name in ("size", "tp", "cp", "pp", "ep", "etp", "vpp"):
        value = getattr(world, name)
        if name == "vpp" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WorldError(
                f"{name} must be a whole number of at least 1, not {value!r}", fix=f"{name}=1"
            )
    if world.vpp is not None and world.pp == 1:
        raise WorldError(
            f"vpp {world.vpp} needs a pipeline, but pp is 1: there is nothing to interleave",
            fix="leave vpp out, or set pp to 2 or more",
        )
    for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        product = math.prod(getattr(world, name) for name in names)
        if world.size % product:
            arithmetic = " x ".join(f"{name} {getattr(world, name)}" for name in names)
            raise WorldError(
                f"{arithmetic} = {product} does not divide {world.size} ranks",
                fix=_sizes_that_work(world, names),
            )


_NEAR = 1 << 16  # how far from a size we look for one that works


def _sizes_that_work(world: World, names: tuple[str, ...]) -> str:
    """The nearest world sizes and the nearest values of one axis that satisfy both grids."""
    unit = implied_size(world.tp, world.cp, world.pp, world.ep, world.etp)
    below, above = world.size // unit * unit, (world.size // unit + 1) * unit
    sizes = f"size={below} or size={above}" if below else f"size={above}"
    # the axis to blame: the largest one that is no power of two, as clusters mostly are
    axis = max(names, key=lambda name: ((value := getattr(world, name)) & (value - 1) > 0, value))
    old = getattr(world, axis)
    linked = axis == "tp" and world.etp == world.tp

    def works(value: int) -> bool:
        new = {name: getattr(world, name) for name in ("tp", "cp", "pp", "ep", "etp")}
        new |= {axis: value, **({"etp": value} if linked else {})}
        return world.size % implied_size(**new) == 0

    top, bottom = min(old - 1, world.size), old + 1  # and a mistyped 10**20 is no long search
    lower = next((v for v in range(top, max(0, top - _NEAR), -1) if works(v)), None)
    end = min(2 * old, world.size, old + _NEAR)
    higher = next((v for v in range(bottom, end + 1) if works(v)), None)
    others = [f"{axis}={value}" for value in (lower, higher) if value is not None]
    return sizes + (f", or keep {world.size} ranks with {' or '.join(others)}" if others else "")
