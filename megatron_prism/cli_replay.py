"""``prism replay``: when does everything happen, and what is the iteration's time made of?

In : programs (a folder of slices, a file, a text), a machine, perhaps a calibration.  Out: a page
of text or JSON, and on request an HTML page and a trace for ui.perfetto.dev.  Without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_prism import cli_settings
from megatron_prism.artefact import write_whole
from megatron_prism.cli_output import check_outputs, console, print_json, warn_without_times
from megatron_prism.collectives import BY_NAME
from megatron_prism.errors import PrismError, UnitError

__all__ = ["replay"]

_MOST_ITERATIONS = 100


def replay(args: argparse.Namespace) -> int:
    """Replay an iteration of the whole world: its time, bubble, critical path and their provenance.

    prism replay DIR
    prism replay DIR machine=h200 calibration=h200x4.json iterations=2
    prism replay DIR --html page.html --trace trace.json     a page; a trace for ui.perfetto.dev

    machine= is the name of a shipped one or a JSON file like it.  calibration= is what prism
    calibrate wrote; its measured calls come before the machine's model, and computing and calls
    that run at once slow each other as it measured.

    What if (any of them together; those with … more than once):
      dp=64                     64 replicas of the model, each with the microbatches it has now
      slow=517:1.2 …            ranks compute 1.2 times as long; slow=pp=3,tp=0:3/2; 517:0.5 in half
      faster=all_reduce:2 …     calls twice as fast; faster=GROUP:2, faster=all_reduce@GROUP:1/2
      moved=b200                programs measured on machine=, run on another one; calibration= is
                                then that one's
      microbatches=32           the steady state of the schedule, longer or shorter
    """
    from megatron_prism.report import figures, html, perfetto, text

    settings = _settings(args.settings)
    wanted = [(args.html, html.render), (args.trace, perfetto.render)]
    outputs = [(Path(name), render) for name, render in wanted if name is not None]
    check_outputs([path for path, _ in outputs], args.force, [args.programs])
    timeline = _timeline(args.programs, **settings)
    for path, render in outputs:
        write_whole(path, render(timeline), force=args.force)
    if args.json:
        print_json(asdict(figures.figures(timeline)))
    else:
        print(text.render(timeline), end="")
    for path, _ in outputs:
        console(stderr=True).print(f"wrote {path}")
    return 0


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``_timeline``."""
    keys: dict[str, Callable[[str], Any]] = {
        "machine": cli_settings.name,
        "calibration": cli_settings.name,
        "iterations": cli_settings.count(1, _MOST_ITERATIONS, "iterations=2 is settled"),
        "dp": cli_settings.count(1, 1 << 24, "dp=64"),
        "slow": _slow,
        "faster": _faster,
        "moved": cli_settings.name,
        "microbatches": cli_settings.count(1, 1 << 24, "microbatches=32"),
    }
    return cli_settings.read(words, keys, "replay", several=("slow", "faster"))


def _slow(text: str) -> tuple[str, str]:
    """``ranks:factor``; a range of ranks may have a step, which is not the factor."""
    ranks, colon, factor = text.rpartition(":")
    if not colon or not ranks:
        raise UnitError("it needs ranks and a factor", fix="slow=517:1.2, slow=pp=3,tp=0:1.2")
    return ranks, factor


def _faster(text: str) -> tuple[str, str, str]:
    """``[collective][@group]:factor``; a group alone needs no ``@``."""
    what, colon, factor = text.rpartition(":")
    if not colon:
        raise UnitError("it needs calls and a factor", fix="faster=all_reduce@default_pg:2")
    name, _, group = what.partition("@")
    return (
        ("", name, factor) if not group and name and name not in BY_NAME else (name, group, factor)
    )


def _timeline(
    path: str,
    machine: str | None = None,
    calibration: str | None = None,
    iterations: int = 2,
    moved: str | None = None,
    slow: Sequence[tuple[str, str]] = (),
    faster: Sequence[tuple[str, str, str]] = (),
    **sizes: int,
) -> Any:
    """The timeline; PrismError if the programs do not fit together."""
    from megatron_prism import graph
    from megatron_prism.costs.collective import read_calibration
    from megatron_prism.costs.machine import machine as read_machine
    from megatron_prism.replay import overlap, scenario, timeline
    from megatron_prism.slices import open_programs

    programs = open_programs(path)
    warn_without_times(programs)
    own = machine or cli_settings.machine_of(programs)
    hardware = read_machine(own)
    there = None if moved is None else read_machine(moved)
    what_if = scenario.Scenario(slow=tuple(slow), faster=tuple(faster), moved=there, **sizes)
    measured = None if calibration is None else read_calibration(calibration)
    if measured is not None:
        cli_settings.check_calibration(measured.source, moved or own)
    cli_settings.check_machine(programs, machine)
    world = graph.build(scenario.change(programs, what_if))
    findings = world.check()
    if findings:
        more = f"\n… and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise PrismError(
            f"the calls of {path} do not fit together, so its job hangs or is wrong and has no "
            f"timeline:\n\n{findings[0]}{more}",
            fix=f"prism check {path} explains every mismatch",
        )
    prices = scenario.priced(world, hardware, measured, what_if)
    if measured is None:
        return timeline.replay(world, prices, iterations)
    return overlap.replay(world, prices, measured.overlap, measured.source, iterations)
