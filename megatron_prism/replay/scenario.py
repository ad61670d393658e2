"""Several what-ifs of one replay, in the order in which they make sense, each by its name.

In : what is changed, programs, machines.  Out: other programs, and prices.  First the schedule and
the size of the world, then who is slow in it, then where it runs, then what its calls cost;
``reschedule``, ``scale`` and ``whatif`` say what each assumes.  Every change is in
``Programs.source["what-if"]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_prism.costs import Prices, price
from megatron_prism.costs.collective import Calibration
from megatron_prism.costs.machine import Machine
from megatron_prism.graph import WorldGraph
from megatron_prism.programs import Programs
from megatron_prism.replay import whatif
from megatron_prism.replay.reschedule import microbatches
from megatron_prism.replay.scale import data_parallel

__all__ = ["Scenario", "change", "priced"]


@dataclass(frozen=True)
class Scenario:
    """What is different from what was captured.

    dp           : the data-parallel size; None: as captured
    slow         : (ranks as ``selectors`` reads them, by which factor), one after the other
    faster       : (collective or "", group or "", by which factor)
    moved        : the machine that it runs on instead
    microbatches : of an iteration; None: as captured
    """

    dp: int | None = None
    slow: tuple[tuple[str, str], ...] = ()
    faster: tuple[tuple[str, str, str], ...] = ()
    moved: Machine | None = None
    microbatches: int | None = None


def change(programs: Programs, scenario: Scenario) -> Programs:
    """The programs of the scenario's world, with its name in their source."""
    if scenario.microbatches is not None:
        programs = microbatches(programs, scenario.microbatches)
    if scenario.dp is not None:
        programs = data_parallel(programs, scenario.dp)
    for ranks, factor in scenario.slow:
        programs = whatif.slow(programs, programs.world.select(ranks), factor)
    if scenario.moved is not None:
        programs = whatif.assumed(programs, f"on {scenario.moved.name}")
    for name, group, factor in scenario.faster:
        where = f" in {group}" if group else ""
        what = f"{name or 'all'} calls{where} {factor} times as fast"
        programs = whatif.assumed(programs, what)
    return programs


def priced(
    made: WorldGraph, machine: Machine, calibration: Calibration | None, scenario: Scenario
) -> Prices:
    """Prices of the world that ``change`` made; ``calibration`` is of the machine it runs on."""
    if scenario.moved is not None:
        prices = whatif.moved(made, machine, scenario.moved, calibration)
    else:
        prices = price(made, machine, calibration)
    for name, group, factor in scenario.faster:
        prices = whatif.faster(made, prices, factor, name, group)
    return whatif.slowed(made, prices)
