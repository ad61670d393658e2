"""``prism replay``: when does everything happen, and what is the iteration's time made of?

In : programs (a folder of slices, a file, a text), a machine, perhaps a calibration.  Out: a page
of text or JSON, and on request an HTML page and a trace for ui.perfetto.dev.  Without torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_prism import units
from megatron_prism.artefact import write_whole
from megatron_prism.cli_output import console, print_json
from megatron_prism.errors import PrismError, UnitError, UsageError

__all__ = ["replay"]

_KEYS = ("machine", "calibration", "iterations")
_MOST_ITERATIONS = 100


def replay(args: argparse.Namespace) -> int:
    """Replay an iteration of the whole world: its time, bubble, critical path and their provenance.

    prism replay DIR
    prism replay DIR machine=h200 calibration=h200x4.json iterations=2
    prism replay DIR --html page.html --trace trace.json     a page; a trace for ui.perfetto.dev

    machine= is the name of a shipped one or a JSON file like it.  calibration= is what prism
    calibrate wrote; its measured calls come before the machine's model.
    """
    from megatron_prism.report import figures, html, perfetto, text

    settings = _settings(args.settings)
    wanted = [(args.html, html.render), (args.trace, perfetto.render)]
    outputs = [(Path(name), render) for name, render in wanted if name is not None]
    _check_outputs([path for path, _ in outputs], args.force)
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
    found: dict[str, Any] = {"machine": "h200", "calibration": None, "iterations": 2}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("-")
        if not equals or key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            fix = f"did you mean {close[0]}={value}?" if close else f"use {', '.join(_KEYS)}=…"
            raise UsageError(f"prism replay does not understand {word}", fix=fix)
        found[key] = _iterations(value) if key == "iterations" else value
    return found


def _iterations(text: str) -> int:
    try:
        count = units.parse_count(text)
    except UnitError as error:
        raise UsageError(f"iterations={text}: {error.message}", fix="iterations=2") from None
    if not 1 <= count <= _MOST_ITERATIONS:
        raise UsageError(
            f"{count:,} iterations cannot be replayed in a row",
            fix=f"iterations=2 is settled; at most {_MOST_ITERATIONS}",
        )
    return count


def _timeline(path: str, machine: str, calibration: str | None, iterations: int) -> Any:
    """The timeline; PrismError if the programs do not fit together."""
    from megatron_prism import costs, graph
    from megatron_prism.costs.collective import read_calibration
    from megatron_prism.costs.machine import machine as read_machine
    from megatron_prism.replay import timeline
    from megatron_prism.slices import open_programs

    hardware = read_machine(machine)
    measured = None if calibration is None else read_calibration(calibration)
    world = graph.build(open_programs(path))
    findings = world.check()
    if findings:
        more = f"\n… and {len(findings) - 1} more" if len(findings) > 1 else ""
        raise PrismError(
            f"the calls of {path} do not fit together, so its job hangs or is wrong and has no "
            f"timeline:\n\n{findings[0]}{more}",
            fix=f"prism check {path} explains every mismatch",
        )
    return timeline.replay(world, costs.price(world, hardware, measured), iterations)


def _check_outputs(paths: Sequence[Path], force: bool) -> None:
    """UsageError for what cannot be written, before the work and not after it."""
    if len({path.absolute() for path in paths}) < len(paths):
        raise UsageError(f"two outputs are to be written to {paths[0]}", fix="name two files")
    for path in paths:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", fix=f"name a file, such as {path / 'out.html'}")
        if os.path.lexists(path) and not force:
            raise UsageError(
                f"{path} exists and is not overwritten", fix="--force, or another name"
            )
        if not os.access(path.absolute().parent, os.W_OK):
            raise UsageError(
                f"cannot write {path}: {path.absolute().parent} is no folder you may write to",
                fix="name another place",
            )
