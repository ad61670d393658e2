"""``--prism-draw SEED[:QUANTILE]``: virtual ranks as slow as in one drawn iteration.

In : the options, the programs of a folder of slices and how they are priced.  Out: the world in
which the local ranks are classes of their own, and its prices: as they are, or with the flag those
of a drawn iteration (``stochastic.drawn``), so that the local rank feels a p99.  Spreads are fitted
to the slices where their iterations were timed, else the shipped ``public`` ones; calls vary as
the folder's calibration has samples of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism import graph, stochastic
from megatron_prism.costs import Prices
from megatron_prism.costs.fitted import fitted, is_timed
from megatron_prism.costs.machine import Machine
from megatron_prism.costs.variability import variability
from megatron_prism.errors import PrismError
from megatron_prism.graph import WorldGraph
from megatron_prism.programs import Programs
from megatron_prism.replay import whatif

if TYPE_CHECKING:
    from megatron_prism.plugin.flags import Options

__all__ = ["world_of"]


def world_of(
    programs: Programs,
    options: Options,
    pricing: Callable[[WorldGraph], Prices],
    machine: Machine,
    calibration: Path,
) -> tuple[WorldGraph, Prices, str | None]:
    """(the world, its prices, what was drawn).

    PrismError for slices that do not fit together.
    """
    plain = programs
    for rank in options.ranks:
        programs = whatif.apart(programs, [rank], f"local rank {rank}")
    world = graph.build(programs)
    findings = world.check()
    if findings:
        raise PrismError(
            f"the slices in {options.pace} do not fit together: {findings[0].kind}",
            fix=f"prism check {options.pace}",
        )
    if not options.draw:
        return world, pricing(world), None
    spread = variability("public")
    if is_timed(plain):
        spread = fitted(plain, spread)

    def calls(world: WorldGraph, prices: Prices) -> stochastic.CallSpread | None:
        if not calibration.exists():
            return None
        return stochastic.call_spread(world, prices, machine, calibration)

    seed, level = stochastic.read_draw(options.draw)
    found = stochastic.drawn(plain, pricing, spread, options.ranks, seed, level, calls)
    return (
        found.graph,
        found.prices,
        f"{found.said} ({found.ns / found.steady:.3f} of no variation)",
    )
