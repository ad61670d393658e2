"""Study what moves p95: a slow GPU or node, a larger world.

``study`` takes a Sampler and a Variability and returns a Study.  Every answer is simulated again
with the same random numbers.  What a slow GPU does is compared by p95.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.predict.sampler import Sampler, Slow, replica_of
from megatron_prism.predict.variability import Variability
from megatron_prism.replay.priced_graph import PricedGraph

FACTORS = (1.05, 1.1, 1.2, 1.5, 2.0)
SIZES = tuple(1 << n for n in range(6, 18))  # 64 … 131,072 ranks
_DRAWS, _FEWEST, _MOST = 1 << 15, 200, 2000
_STAGES = 16
CLASSES = 64  # in which one rank is made slow: those that compute longest


@dataclass(frozen=True)
class Placement:
    """p95 in ns [factor][class] with one GPU of that class that much slower, of the 64 classes that
    compute longest.

    gain : worst over best class, by factor
    """

    factors: tuple[float, ...]
    classes: tuple[int, ...]
    p95: tuple[tuple[float, ...], ...]
    gain: tuple[float, ...]


@dataclass(frozen=True)
class HotNode:
    """(factor, p95 in ns) with all GPUs of node ``node`` that much slower."""

    node: int
    ranks: int
    p95: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Point:
    """A world of ``ranks`` ranks: the path without variation and quantiles, ns."""

    ranks: int
    steady: int
    p50: float
    p95: float


@dataclass(frozen=True)
class Study:
    """All what-ifs; ``note`` says what they leave as it is.  base: p95 without any of them; hot: a
    node of each kind."""

    base: float
    placement: Placement
    hot: tuple[HotNode, ...]
    scale: tuple[Point, ...]
    note: str


def study(
    sampler: Sampler,
    spread: Variability,
    priced: PricedGraph,
    factors: Sequence[float] = FACTORS,
    progress: Callable[[float], object] | None = None,
) -> Study:
    """Everything, with as few draws as that needs.

    Args:
        sampler: of the timeline of ``priced``.
        spread: how much everything varies.
        priced: prices worlds of other sizes.
        factors: how many times as long slow GPUs and nodes compute.
        progress: is told which part is done, 0 to 1.
    """

    def told(part: float) -> None:
        if progress is not None:
            progress(part)

    count = _count(sampler.replicas)
    each = sampler.draw(spread, count)
    placed = placement(sampler, spread, each, factors)
    hot = hot_nodes(sampler, spread, each, priced.machine.gpus_per_node, factors)
    told(0.1)
    points, note = scale(sampler, spread, priced, progress=lambda part: told(0.1 + 0.9 * part))
    return Study(p95(each.max(axis=1)), placed, hot, points, note)


def _count(replicas: int) -> int:
    return min(_MOST, max(_FEWEST, _DRAWS // replicas))


def placement(
    sampler: Sampler, spread: Variability, each: np.ndarray, factors: Sequence[float] = FACTORS
) -> Placement:
    """One slow GPU in every class in turn, beside ``each`` [count, replicas] without one."""
    classes = tuple(busiest(sampler))
    rows = []
    for factor in factors:
        if factor <= 0:
            raise UsageError(f"{factor} is no factor", fix="slow=1.2")
        rows.append(
            tuple(
                p95(with_slow(sampler, spread, each, {0: {index: (1, factor)}}))
                for index in classes
            )
        )
    return Placement(
        tuple(factors), classes, tuple(rows), tuple(max(row) / min(row) for row in rows)
    )


def hot_node(
    sampler: Sampler,
    spread: Variability,
    each: np.ndarray,
    node: int,
    gpus_per_node: int,
    factors: Sequence[float] = FACTORS,
) -> HotNode:
    """All GPUs of one node slower, whichever replicas and classes they are in."""
    world = sampler.graph.programs.world
    ranks = np.arange(node * gpus_per_node, min(world.size, (node + 1) * gpus_per_node))
    if not 0 <= node * gpus_per_node < world.size:
        raise UsageError(f"there is no node {node}", fix="node 0")
    places = zip(
        replica_of(sampler.graph, ranks).tolist(),
        sampler.graph.classes.of[ranks].tolist(),
        strict=True,
    )
    counts: dict[int, dict[int, int]] = {}
    for replica, index in places:
        counts.setdefault(replica, {})
        counts[replica][index] = counts[replica].get(index, 0) + 1
    found = []
    for factor in factors:
        slow = {
            replica: {index: (many, factor) for index, many in mine.items()}
            for replica, mine in counts.items()
        }
        found.append((factor, p95(with_slow(sampler, spread, each, slow))))
    return HotNode(node, len(ranks), tuple(found))


def hot_nodes(
    sampler: Sampler,
    spread: Variability,
    each: np.ndarray,
    gpus_per_node: int,
    factors: Sequence[float] = FACTORS,
) -> tuple[HotNode, ...]:
    """The first node of every kind (which classes, in how many replicas), at most ``_STAGES``."""
    graph, size = sampler.graph, sampler.graph.programs.world.size
    count = max(1, size // gpus_per_node)
    ranks = np.arange(count * gpus_per_node if size >= gpus_per_node else size).reshape(count, -1)
    replicas = replica_of(graph, ranks.ravel()).reshape(ranks.shape)
    kind = np.concatenate([graph.classes.of[ranks], replicas - replicas[:, :1]], axis=1)
    first = np.sort(np.unique(kind, axis=0, return_index=True)[1])[:_STAGES]
    return tuple(
        hot_node(sampler, spread, each, int(node), gpus_per_node, factors) for node in first
    )


def scale(
    sampler: Sampler,
    spread: Variability,
    priced: PricedGraph,
    sizes: Sequence[int] = SIZES,
    progress: Callable[[float], object] | None = None,
) -> tuple[tuple[Point, ...], str]:
    """(points, what they leave as it is): the same model with more or fewer replicas.

    The slowest of n replicas, for all n from the same draws: those for the largest world make
    several of each smaller one.  The path without variation is that of the programs in a world of
    that size, which moves all quantiles.  ``progress`` is told which part is done, 0 to 1.
    """
    programs = sampler.graph.programs
    own = programs.world.size // sampler.replicas
    if sampler.replicas == 1 and programs.world.dp > 1:
        return (), "no sweep over worlds: the replicas are not alike"
    wanted = [size for size in sizes if size % own == 0]
    most = max(wanted, default=own) // own
    count = _count(min(most, sampler.replicas * 4))
    if most * count > 1 << 22:  # small replicas: fewer of them, rather than hours
        wanted = [size for size in wanted if size // own * count <= 1 << 22]
        most = max(wanted, default=own) // own
    done = 0

    def told(draws: int) -> None:
        nonlocal done
        done += draws
        if progress is not None:
            progress(0.9 * done / (most * count))

    each = sampler.draw(spread, count, replicas=range(most), progress=told)
    here = sampler.timeline.iteration_ns
    points, note = [], ""
    for size in wanted:
        steady = here
        try:
            if size != programs.world.size:
                dp = programs.world.dp * size // programs.world.size
                steady = priced.again(dp=dp).timeline.iteration_ns
        except PrismError as error:
            note = (
                f"calls between replicas cost what they do in the captured world: {error.message}"
            )
        worlds = most // (size // own)
        slowest = each[:, : worlds * (size // own)].reshape(count, worlds, -1).max(axis=2)
        times = np.sort(slowest, axis=None) + steady - here
        points.append(Point(size, steady, float(np.median(times)), p95(times)))
        if progress is not None:
            progress(0.9 + 0.1 * len(points) / len(wanted))
    said = f"{own} ranks a replica, {count} iterations or more of each; the global batch grows"
    said += " with the world"
    return tuple(points), f"{said}; {note}" if note else said


def busiest(sampler: Sampler) -> list[int]:
    """The 64 classes that compute longest, ascending."""
    rows, lasts = sampler.paths.row, sampler.paths.lasts
    total = np.bincount(rows, lasts, minlength=len(sampler.members))[: len(sampler.members)]
    return sorted(np.argsort(-total, kind="stable")[:CLASSES].tolist())


def p95(times: np.ndarray) -> float:
    """The 95 % quantile, as ``quantile`` picks it."""
    return float(np.sort(times)[min(len(times) - 1, int(0.95 * len(times)))])


def with_slow(
    sampler: Sampler,
    spread: Variability,
    each: np.ndarray,
    slow: Mapping[int, Slow],
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Iteration times, ns [count], if some ranks of some replicas are slow: those are drawn again,
    the others are as in ``each`` [count, replicas]."""
    others = np.delete(each, list(slow), axis=1)
    found = others.max(axis=1) if others.size else np.zeros(len(each))
    for replica, what in slow.items():
        one = sampler.draw(
            spread, len(each), slow=what, replicas=range(replica, replica + 1), progress=progress
        )
        np.maximum(found, one[:, 0], out=found)
    return found
