"""``prism hang``: who made a job hang, from its dumps or from its programs.

In : a folder of Flight Recorder dumps, or programs as a folder of slices, a file or a text, perhaps
with faults planted in them.  Out: the verdict in one line, then the picture; or one JSON object.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.artefact import write_whole
from megatron_prism.cli_output import check_outputs, console, print_json, progress
from megatron_prism.errors import PrismError, UsageError

if TYPE_CHECKING:
    from megatron_prism.costs.machine import Machine
    from megatron_prism.diagnosis import Diagnosis
    from megatron_prism.fault_plan import Fault
    from megatron_prism.faults import Planted
    from megatron_prism.flight_dump import DumpSet
    from megatron_prism.programs import Programs
    from megatron_prism.recipe_schema import Recipe
    from megatron_prism.replay.impaired import SlowNic
    from megatron_prism.replay.timeline import Timeline

__all__ = ["hang"]

_SHOWN = 16  # places


def hang(args: argparse.Namespace) -> int:
    """Who made the job hang?  Culprits, not victims, with what speaks for it.

    prism hang --dumps DIR      from Flight Recorder dumps, one per rank, alone
    prism hang --dumps DIR --programs P (or --recipe R)
                                also: where in its program every rank stood, and whether the
                                programs stop there too; P is what prism capture wrote
    prism hang --dumps DIR --recipe R --confirm [--programs P tier=cpu model.num_layers=4]
                                also: runs the culprits' real code to the place where they stood,
                                and on
    prism hang PROGRAMS         would these programs hang?  as prism check, with a verdict
    prism hang PROGRAMS fault=drop@rank=37,group=tp,nth=2 [plan=FILE seed=0 truth=FILE]
                                plants faults, runs all ranks until nobody can go on, and judges
                                the dumps that they would leave; -o DIR keeps these, truth=FILE what
                                was planted.  Faults that only cost time are replayed

    Exit status: 0 nobody waits, 1 a fault, 3 several explanations remain, or the job was perhaps
    running (never 0).  Dumps are read without executing anything in them.
    """
    if not (args.dumps or args.programs) or args.dumps == "":
        raise UsageError("name dumps or programs", fix="prism hang --dumps DIR, or prism hang DIR")
    if args.dumps is None and (args.job or args.recipe):
        raise UsageError("--programs and --recipe say whose job dumps are of, and there are none",
                         fix="prism hang --dumps DIR --programs PATH")  # fmt: skip
    if args.dumps is None and args.confirm:
        raise UsageError("--confirm runs real code to the place where dumps say that it stood",
                         fix="prism hang --dumps DIR --recipe NAME --confirm")  # fmt: skip
    outputs = (args.markdown, args.html, args.trace)
    inputs = [path for path in (args.programs, args.dumps, args.job) if path]
    check_outputs([path for path in outputs if path], args.force, inputs)
    if args.dumps is not None:
        found, planted = _of_dumps(args), None
    else:
        found, planted = _of_programs(args)
    _write(args, found)
    if args.json:
        more = {} if planted is None else {"planted": [str(hit) for hit in planted.hits]}
        print_json(found.to_json() | more)
    else:
        for hit in planted.hits if planted is not None else ():
            print(f"planted: {hit}")
        print(found)
    return int(found.exit_code)


def _write(args: argparse.Namespace, found: Diagnosis) -> None:
    """The verdict as Markdown, as a page, as a trace."""
    from megatron_prism.report import hang as report
    from megatron_prism.report import hang_trace

    for path, render in (
        (args.markdown, report.markdown),
        (args.html, report.page),
        (args.trace, hang_trace.render),
    ):
        if path is not None:
            write_whole(path, render(found), force=args.force)
            console(stderr=True).print(f"wrote {path}")


def _of_dumps(args: argparse.Namespace) -> Diagnosis:
    """The verdict on dumps, tried on the job's programs where these are named."""
    from megatron_prism import flight_workers
    from megatron_prism import hang as judge

    words = [args.programs, *args.settings] if args.programs else list(args.settings)
    words += [f"programs={args.job}"] * bool(args.job)
    words += [f"recipe={args.recipe}"] * bool(args.recipe)
    words = [word if "=" in word else f"programs={word}" for word in words]
    overrides = [word for word in words if "." in word.partition("=")[0]]  # section.key=value
    words = [word for word in words if word not in overrides]
    settings = dict(word.partition("=")[::2] for word in words)
    if args.out:
        raise UsageError(f"-o {args.out} does not go with --dumps", fix="--markdown FILE, --json")
    if set(settings) - {"programs", "recipe", "tier"} or len(words) > len(settings):
        raise UsageError(
            f"{' '.join(words)} does not go with --dumps",
            fix="programs=DIR or recipe=NAME: the job that left the dumps",
        )
    if len(settings) > 1 and not args.confirm:
        raise UsageError(
            f"{' '.join(words)}: only --confirm needs more than the programs or the recipe",
            fix=f"{words[-1]}, or add --confirm",
        )
    if args.confirm and "recipe" not in settings:
        raise UsageError("--confirm runs the suspect's real code, of which job?",
                         fix="--recipe NAME (and --programs DIR, if it was captured)")  # fmt: skip
    if overrides and "recipe" not in settings:
        raise UsageError(f"{' '.join(overrides)}: of which recipe?", fix="--recipe NAME")
    dumps = flight_workers.read(args.dumps)
    found = judge.of_dumps(dumps)
    if not settings:
        return found
    with tempfile.TemporaryDirectory() as place:
        recipe = None
        if "recipe" in settings:
            from megatron_prism import recipe as recipes

            recipe = recipes.load(settings["recipe"], overrides)
        programs = _job(recipe, settings.get("programs"), Path(place))
        if "tier" in settings:  # of the suspect's run; programs are of the recipe's own
            recipe = recipes.load(
                settings["recipe"], [*overrides, f"prism.tier={settings['tier']}"]
            )
        path = Path(settings.get("programs", place))
        return _on_programs(dumps, found, recipe, programs, path, args.confirm)


def _on_programs(
    dumps: DumpSet,
    found: Diagnosis,
    recipe: Recipe | None,
    programs: Programs,
    path: Path,
    confirm: bool,
) -> Diagnosis:
    """The verdict with places, tried on the job's programs, perhaps on the suspect's real code."""
    from megatron_prism import explain, placement

    if recipe is not None and confirm and recipe.world != programs.world:
        raise UsageError(f"{path} is of {programs.world}, {recipe.name} of {recipe.world}",
                         fix="its overrides, too: parallel.world_size=16")  # fmt: skip
    found = explain.explain(dumps, found, programs)
    placed = placement.place(dumps, found, programs)
    named = {c.rank for c in found.culprits}
    shown = [p for p in placed.places if p.rank in named]
    shown += [p for p in placed.places if p.rank not in named][: _SHOWN - len(shown)]
    lines, confirmed = placed.lines, placed.confirmed
    if recipe is not None and confirm:
        from megatron_prism.plugin import confirm as trials

        trial = trials.confirm(recipe, programs, path, dumps, found, placed,
                               console(stderr=True))  # fmt: skip
        lines, confirmed = (*lines, *trial.lines), trial.confirmed
    return dataclasses.replace(
        found, places=tuple(map(str, shown)), tried=lines, confirmed=confirmed
    )


def _job(recipe: Recipe | None, path: str | None, place: Path) -> Programs:
    """The programs of the job, captured now in ``place`` if only a recipe is named."""
    from megatron_prism.slices import open_programs

    if path is not None:
        return open_programs(path)
    from megatron_prism.plugin import capture

    assert recipe is not None, "the job's programs or its recipe"
    return capture.capture(recipe, place, console=console(stderr=True), keep=False)


def _of_programs(args: argparse.Namespace) -> tuple[Diagnosis, Planted | None]:
    """(verdict, what was planted or None)."""
    from megatron_prism import graph
    from megatron_prism import hang as judge
    from megatron_prism.slices import open_programs

    faults, seed, truth = _faults(args.settings)
    if args.programs.startswith(("fault=", "plan=")):
        raise UsageError("faults in which programs?", fix=f"prism hang DIR {args.programs}")
    programs = open_programs(args.programs)
    if not faults:
        if args.out is not None:
            raise UsageError("without a fault there are no dumps to write", fix="fault=KIND@…")
        if args.settings:
            raise UsageError("a seed draws the ranks of faults, truth names them: there are none",
                             fix="fault=KIND@rank=any:1 seed=N")  # fmt: skip
        return judge.of_graph(graph.build(programs)), None
    from megatron_prism import faults as planting
    from megatron_prism import flight_export, hang_world, quiescence

    if truth is not None:
        check_outputs([truth], args.force)
    if args.out is not None:
        flight_export.check_free(Path(args.out), args.force)
    with progress("planting faults"):
        planted = planting.plant(programs, faults, seed)
    with progress("running all ranks"):
        state = quiescence.run(planted.programs, planted.faults)
    if args.out is not None:
        with progress("writing the dumps of all ranks"):
            flight_export.write(state, args.out, force=args.force)
        console(stderr=True).print(f"wrote {args.out}")
    if truth is not None:
        lines = [hit.truth("programs") + "\n" for hit in planted.hits]
        write_whole(truth, "".join(lines), force=args.force)
    with progress("the dumps of all ranks") as told:
        found = hang_world.of_standstill(state, told=told)
    if not state.finished:
        with contextlib.suppress(PrismError):  # programs that hang anyway, a machine too small
            healthy = _replayed(programs, ())[0]
            found = dataclasses.replace(found, watchdog=hang_world.first_watchdog(state, healthy))
    if state.finished and any(fault.only_time for fault in faults):
        with progress("replaying both worlds"):
            found = dataclasses.replace(found, tried=(_cost(programs, planted),))
    return found, planted


def _cost(programs: Programs, planted: Planted) -> str:
    """What faults that only cost time cost, by a replay of both worlds."""
    healthy, hardware = _replayed(programs, ())
    faulty, _ = _replayed(planted.programs, planted.slow_nics)
    before, after = healthy.iteration_ns, faulty.iteration_ns
    more = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return (f"an iteration takes {after / 1e6:,.3f} ms instead of {before / 1e6:,.3f} ms{more} by "
            f"the replay on {hardware.name}; nobody's watchdog fires")  # fmt: skip


def _replayed(programs: Programs, slow_nics: Sequence[SlowNic]) -> tuple[Timeline, Machine]:
    """(the timeline, the machine) of programs on the machine that they are of."""
    from megatron_prism import cli_settings, costs, graph
    from megatron_prism.costs.machine import machine
    from megatron_prism.replay import timeline
    from megatron_prism.replay.impaired import with_slow_nics

    hardware = machine(cli_settings.machine_of(programs))
    made, change = with_slow_nics(programs, slow_nics)
    joined = graph.build(made)
    prices = change(joined, costs.price(joined, hardware), hardware)
    return timeline.replay(joined, prices), hardware


def _faults(words: list[str]) -> tuple[list[Fault], int, Path | None]:
    from megatron_prism.fault_files import load_plan
    from megatron_prism.fault_plan import parse

    found: list[Fault] = []
    seed, truth = 0, None
    for word in words:
        key, equals, value = word.partition("=")
        if key == "fault" and value:
            found.append(parse(value))
        elif key == "plan" and value:
            found += load_plan(value)
        elif key == "seed" and value.isdecimal() and len(value) < 19:
            seed = int(value)
        elif key == "truth" and value:
            truth = Path(value)
        else:
            raise UsageError(f"{word} is not understood",
                             fix="fault=KIND@…, plan=FILE, seed=N, truth=FILE")  # fmt: skip
    return found, seed, truth
