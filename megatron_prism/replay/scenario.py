"""Several what-ifs of one replay, in the order in which they make sense, each by its name.

In : what is changed, programs, machines.  Out: other programs, and prices.  First the size of the
world, then who is slow in it, then where it runs, then what its calls cost; ``whatif`` and
``scale`` say what each assumes.  Every change is in ``Programs.source["what-if"]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_prism.costs import Prices, price
from megatron_prism.costs.collective import Calibration
from megatron_prism.costs.machine import Machine
from megatron_prism.errors import UsageError
from megatron_prism.graph import WorldGraph
from megatron_prism.programs import Programs
from megatron_prism.replay import whatif
from megatron_prism.replay.scale import data_parallel

__all__ = ["Scenario", "change", "priced"]


@dataclass(frozen=True)
class Scenario:
    """What is different from what was captured.

    dp           : the data-parallel size; None: as captured
    slow         : (ranks as ``selectors`` reads them, by which factor), one after the other
    faster       : (collective or "", group or "", by which factor)
    moved        : the machine that it runs on instead
    microbatches : of an iteration; refused unless it is the captured number
    """

    dp: int | None = None
    slow: tuple[tuple[str, str], ...] = ()
    faster: tuple[tuple[str, str, str], ...] = ()
    moved: Machine | None = None
    microbatches: int | None = None


def change(programs: Programs, scenario: Scenario) -> Programs:
    """The programs of the scenario's world, with its name in their source."""
    if scenario.microbatches is not None:
        _check_microbatches(programs, scenario.microbatches)
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


def _check_microbatches(programs: Programs, wanted: int) -> None:
    """UsageError unless ``wanted`` is what the programs do.

    What a microbatch does depends on its place in the schedule (the first gathers parameters, the
    last reduces gradients), and Megatron alone knows the schedule: it must run again.
    """
    there = max(int(p.ops["microbatch"].max(initial=-1)) for p in programs.programs) + 1
    if wanted == there:
        return
    recipe = programs.source.get("recipe")
    what = f"the programs have {there} microbatches" if there else "the programs name no microbatch"
    dp, job = programs.world.dp, recipe or "RECIPE"
    raise UsageError(
        f"{what}; with {wanted} Megatron's schedule is another, which only Megatron can run",
        fix=f"prism capture {job} -o DIR train.global_batch_size=N, "
        f"N = {wanted} x micro_batch_size x dp {dp} = {wanted * dp} x micro_batch_size; "
        "then replay DIR",
    )
