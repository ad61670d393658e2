"""What does every virtual rank take in one drawn iteration?  Prices of a slow one, to be felt.

In : programs, how they are priced, a Variability, the local ranks, a seed and perhaps a quantile.
Out: Drawn: the world graph with the local ranks' replicas told apart from the others, and Prices
that are those of the drawn iteration: of the local replicas as drawn, of all others as the slowest
of them (it alone is waited for), calls and network included.  Without a quantile it is the first
iteration that the seed draws, with one (0.99) the iteration of that place among all that are drawn.

Approximated as in ``sampler``: replicas that meet within an iteration wait for each other here, but
not in the draws, so a replay of these prices may take a little longer than the drawn time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.costs import Prices
from megatron_prism.costs.variability import Variability
from megatron_prism.errors import UsageError
from megatron_prism.graph import WorldGraph, build
from megatron_prism.programs import Programs
from megatron_prism.replay import dag as dags
from megatron_prism.replay import whatif
from megatron_prism.stochastic.calls import CallSpread
from megatron_prism.stochastic.quantiles import needed
from megatron_prism.stochastic.replicas import replica_of
from megatron_prism.stochastic.sampler import Sampler

__all__ = ["Drawn", "drawn", "read_draw"]

_DRAWS = 2000  # iterations among which a quantile is looked for, or as many as it needs
_MOST = 100_000


@dataclass(frozen=True)
class Drawn:
    """One iteration.

    graph, prices : the world, every local rank a class of its own, and what everything takes
    ns, steady    : its time as drawn, and without variation
    said          : where it is from, in words
    """

    graph: WorldGraph
    prices: Prices
    ns: float
    steady: float
    said: str


def read_draw(text: str) -> tuple[int, float | None]:
    """(seed, quantile) of ``7``, ``7:0.99`` or ``7:p99``.  UsageError for anything else."""
    seed, colon, level = text.partition(":")
    fix = "SEED or SEED:QUANTILE, such as 7:p99 or 7:0.99"
    try:
        share = float(level[1:]) / 100 if level.startswith("p") else float(level if colon else 0.5)
        if int(seed) < 0 or not 0 < share < 1:
            raise ValueError
    except ValueError:
        raise UsageError(f"{text!r} names no draw", fix=fix) from None
    if colon and needed(share) > _MOST:
        raise UsageError(f"it takes {needed(share):,} draws to know {level}", fix=fix)
    return int(seed), round(share, 12) if colon else None


def drawn(
    programs: Programs,
    pricing: Callable[[WorldGraph], Prices],
    spread: Variability,
    local: Sequence[int],
    seed: int,
    level: float | None = None,
    calls: Callable[[WorldGraph, Prices], CallSpread | None] | None = None,
) -> Drawn:
    """The iteration that ``seed`` draws; ``calls`` gives spreads of sampled calls, if any are."""
    base = build(programs)
    prices = pricing(base)
    sampler = Sampler(base, prices, seed, calls(base, prices) if calls is not None else None)
    count = _DRAWS if level is None else max(_DRAWS, 2 * needed(level))
    each = sampler.draw(spread, count)
    times = each.max(axis=1)
    place = 0 if level is None else min(count - 1, int(count * level))
    chosen = 0 if level is None else int(np.argsort(times, kind="stable")[place])
    mine = np.unique(replica_of(base, np.asarray(local))).tolist()
    others = np.delete(np.arange(sampler.replicas), mine)
    slowest = int(others[np.argmax(each[chosen, others])]) if others.size else mine[0]
    factors = {
        replica: _factors(sampler, spread, count, chosen, replica) for replica in {*mine, slowest}
    }
    world = build(_apart(programs, base, mine if others.size else [], local))
    which = "the first" if level is None else f"p{100 * level:g} of {count:,}"
    said = f"{which} drawn with seed {seed}, {times[chosen] / 1e6:,.1f} ms; {spread.name}"
    if sampler.calls is not None:
        said += f"; {sampler.calls.source}"
    made = _prices(world, pricing(world), sampler, factors, slowest, said)
    return Drawn(world, made, float(times[chosen]), sampler.steady(), said)


def _apart(
    programs: Programs, base: WorldGraph, replicas: Sequence[int], local: Sequence[int]
) -> Programs:
    """The same world with these replicas, and in them every local rank, in classes of their own."""
    everyone = replica_of(base, np.arange(programs.world.size))
    for replica in replicas:
        ranks = np.flatnonzero(everyone == replica).tolist()
        programs = whatif.apart(programs, ranks, f"replica {replica}")
    for rank in local:
        programs = whatif.apart(programs, [rank], f"local rank {rank}")
    return programs


def _factors(
    sampler: Sampler, spread: Variability, count: int, iteration: int, replica: int
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(per class float64 [ops], float64 [rendezvous], of each class's host): what ``sampler.draw``
    multiplied with in that iteration of that replica."""
    paths, classes = sampler.paths, len(sampler.members)
    nodes = sampler.at(spread, count, iteration, replica)
    where, kind = paths.node, sampler.node_kind
    meetings = np.ones(len(sampler.graph.rendezvous))
    meets = kind[where] == dags.MEET
    meetings[sampler.op[where[meets]]] = nodes[meets]
    segments = []
    for index in range(classes):
        found = np.ones(len(sampler.graph.program_list[index]))
        mine = (paths.row == index) & (kind[where] == dags.COMPUTE)
        found[sampler.op[where[mine]]] = nodes[mine]
        segments.append(found)
    hosts = np.ones(classes)
    issued = paths.row > classes
    hosts[paths.row[issued] - classes - 1] = nodes[issued]
    return segments, meetings, hosts


def _prices(
    world: WorldGraph,
    prices: Prices,
    sampler: Sampler,
    factors: dict[int, tuple[list[np.ndarray], np.ndarray, np.ndarray]],
    slowest: int,
    said: str,
) -> Prices:
    """``prices`` of ``world``, each times its factor in the draw."""
    ranks = np.array(world.classes.representatives)
    replicas = replica_of(sampler.graph, ranks).tolist()
    replicas = [one if one in factors else slowest for one in replicas]
    before = sampler.graph.classes.of[ranks].tolist()
    compute = []
    for ns, replica, old in zip(prices.compute, replicas, before, strict=True):
        times = np.ones(len(ns))
        known = factors[replica][0][old]
        times[: len(known)] = known  # marks that tell classes apart stand behind
        compute.append(np.rint(ns * times).astype(np.int64))
    meet, old_of = world.rendezvous, sampler.graph.rendezvous.of
    firsts = meet.start[:-1]
    times = np.ones(len(meet))
    for place, (owner, op) in enumerate(
        zip(meet.classes[firsts].tolist(), meet.ops[firsts].tolist(), strict=True)
    ):
        times[place] = factors[replicas[owner]][1][old_of[before[owner]][op]]
    issuing = [factors[replica][2][old] for replica, old in zip(replicas, before, strict=True)]
    lead, host = (
        tuple(np.rint(ns * by).astype(np.int64) for ns, by in zip(column, issuing, strict=False))
        for column in (prices.lead, prices.host)
    )
    return dataclasses.replace(
        prices,
        compute=tuple(compute),
        lead=lead,
        host=host,
        meetings=np.rint(prices.meetings * times).astype(np.int64),
        sources=tuple(f"drawn ({said}), of {source}" for source in prices.sources),
    )
