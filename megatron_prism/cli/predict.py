"""``prism predict``: how long iterations take when durations vary.

Prints quantiles of the iteration time with their intervals, what moves them, and where a slow GPU
hurts, as text, JSON or a page; or compares layouts.  Without torch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.output import (
    check_outputs,
    console,
    print_json,
    progress,
    steps,
    warn_without_times,
)
from megatron_prism.cli.predict_settings import plan, refuse_unused, settings_of
from megatron_prism.cli.predict_text import show, show_comparison, show_run, show_study
from megatron_prism.core.artefact import write_whole
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.core.programs import Programs
    from megatron_prism.predict import Prediction

__all__ = ["predict"]


def predict(args: argparse.Namespace) -> int:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR machine=h200 calibration=h200x4.json variability=mine.json seed=1 slow=1.2

    variability= is fitted (to the timed iterations of DIR: the default if there are five), the
    name of shipped spreads (the default elsewhere, and with --against: public) or a JSON file
    like predict/variability/public.json; samples= how many iterations of the whole world are
    drawn; slow= how many times as long the one slow GPU computes (0.5: twice as fast, as in prism
    replay).  Calls that calibration= has samples of vary as those do.

    prism predict DIR iterations=500K deadline=30d mtbf=3h checkpoint_cost=30s restart=10min

    The whole run: mtbf= of the job, checkpoint= the time between two (or best).  --html adds what
    single calls, slow GPUs, a hot node and other world sizes do to p95.

    prism predict A --against B --against C

    Layouts side by side under one network: quantiles of each, and how often A is faster.
    A, B and C are slices, or names of shipped recipes, which are captured now; A,machine=b200 is
    A on another machine.
    """
    settings = settings_of(args.settings)
    if args.html is not None:
        check_outputs([Path(args.html)], args.force, [args.programs, *(args.against or ())])
    if not args.programs:
        raise UsageError("predict what?", fix="prism predict DIR")
    refuse_unused(settings, bool(args.against))
    if args.against:
        return _against(args, settings)
    found = _predict(args, settings)
    if args.html is not None:
        write_whole(Path(args.html), found.to_html(), force=args.force)
    if args.json:
        print_json(found.to_json())
        return 0
    show(found)
    if found.study is not None:
        show_study(found.study)
    if found.run is not None:
        show_run(found.run)
    return 0


def _programs(path: str) -> Programs:
    """What is in ``path``; a shipped recipe of that name is captured now, for this once."""
    from megatron_prism.core import recipe
    from megatron_prism.core.slices import open_programs

    if os.path.exists(path) or path not in recipe.shipped():
        programs = open_programs(path)
        warn_without_times(programs)
        return programs
    from megatron_prism.emulate import capture_recipe

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "slices"
        return capture_recipe.capture(recipe.load(path, []), folder, console=console(stderr=True))


def _predict(args: argparse.Namespace, settings: dict[str, Any]) -> Prediction:
    """The distribution, of a whole run if one is described, what-ifs if there is a page."""
    from megatron_prism.predict import predict

    programs, run = _programs(args.programs), plan(settings)
    with steps() as told:
        return predict(
            programs,
            machine=settings["machine"],
            calibration=settings["calibration"],
            variability=settings["variability"],
            samples=settings.get("samples"),
            seed=settings["seed"],
            slow_by=settings.get("slow", 1.2),
            plan=run,
            what_ifs=args.html is not None,
            progress=told,
        )


def _against(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Layouts side by side."""
    from megatron_prism.predict import compare
    from megatron_prism.replay.priced_graph import price

    names = [args.programs, *args.against]
    asked = {name: _with(name, settings) for name in names}
    same = {(os.path.realpath(path), *map(str, own.items())) for path, own in asked.values()}
    if len(same) < len(names):
        raise UsageError("a layout is compared with itself", fix="name each once")
    layouts = {
        name: price(_programs(path), machine=own["machine"], calibration=own["calibration"])
        for name, (path, own) in asked.items()
    }
    with progress("drawing iterations") as told:
        found = compare(
            layouts,
            variability={name: own["variability"] or "public" for name, (_, own) in asked.items()},
            samples=settings.get("samples"),
            seed=settings["seed"],
            progress=told,
        )
    if args.html is not None:
        write_whole(Path(args.html), found.to_html(), force=args.force)
    if args.json:
        print_json(found.to_json())
        return 0
    show_comparison(found)
    return 0


def _with(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, settings) of ``DIR`` or ``DIR,machine=b200``: what differs for this layout alone."""
    path, *words = [name] if os.path.exists(name) else name.split(",")
    if not path or "" in words:
        raise UsageError(f"--against {name!r} names no layout", fix="--against DIR,machine=b200")
    keys = dict.fromkeys(("machine", "calibration", "variability"), arguments.name)
    return path, {**settings, **arguments.read(words, keys, "predict --against")}
