"""``prism hang``: who made a job hang, from its dumps or from its programs.

In : a folder of Flight Recorder dumps, or programs as a folder of slices, a file or a text, perhaps
with faults planted in them.  Out: the verdict in one line, then the picture; or one JSON object.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments
from megatron_prism.cli.command import (
    PROGRAMS,
    Command,
    HelpGroup,
    file_option,
    option,
    settings,
    switch,
)
from megatron_prism.cli.output import (
    Answer,
    check_outputs,
    console,
    print_lines,
    steps,
    write_outputs,
)
from megatron_prism.core import units
from megatron_prism.core.errors import UsageError, refuse
from megatron_prism.core.files import write_whole
from megatron_prism.core.messages import progress

if TYPE_CHECKING:
    from megatron_prism.core.fault_plan import Fault
    from megatron_prism.emulate.script_job import Job
    from megatron_prism.features.hang.dumps import DumpSet
    from megatron_prism.features.hang.planting import PlantedFaults
    from megatron_prism.features.hang.verdict import Diagnosis

_AGAIN_S = 5.0  # between two looks at a running job


def hang(args: argparse.Namespace) -> Answer | int:
    """Who made the job hang?  Culprits, not victims, with what speaks for it.

    prism hang DIR              from what lies there: Flight Recorder dumps, one per rank (also gz,
                                or what curl saved of torch's HTTP handler), and logs
    prism hang --dumps DIR --logs FILE…
                                the same, named apart; logs of one or many ranks, also without dumps
    prism hang --dumps DIR --then DIR2
                                also: from dumps of the same job some seconds later; who moved is
                                alive, and if nobody did, the job hangs
    prism hang --dumps DIR --programs P (or --recipe R)
                                also: where in its program every rank stood, and whether the
                                programs stop there too; P is what prism capture wrote
    prism hang DIR torchrun --nproc-per-node 8 pretrain_gpt.py <the job's own arguments>
                                the same; the programs are captured now
    prism hang --dumps DIR --recipe R --confirm [--programs P tier=cpu num_layers=4]
                                also: runs the culprits' real code to the place where they stood,
                                and on
    prism hang --dumps DIR --confirm [--programs P] -- pretrain_gpt.py <the job's own arguments>
                                the same of a script
    prism hang --live           on a node of the running job: asks torch's recorders and NCCL's RAS
                                twice, 5 s apart, and takes the suspects' stacks with py-spy
    prism hang --live --watch 60s [--json --prometheus FILE]
                                every 60 s, until nothing moved in between or the job ends
    prism hang PROGRAMS         would these programs hang?  as prism check, with a verdict
    prism hang PROGRAMS fault=drop@rank=37,group=tp,nth=3 [--plan FILE --seed 0]
                                plants faults, runs all ranks until nobody can go on, and judges
                                the dumps that they would leave; -o DIR keeps these, --truth what
                                was planted.  Faults that only cost time are replayed

    Exit status: 0 nobody waits, 1 a culprit is named, 3 nobody is, or only a rank whose dump is
    missing: several explanations remain, or the job was perhaps running.  Dumps are read without
    executing anything in them.
    """
    live = args.live
    if args.programs and args.dumps is None and not args.live and _is_observation(args.programs):
        args.dumps, args.programs = args.programs, None  # prism hang DIR
    dumps = args.dumps is not None or bool(args.logs)
    refuse(
        (not live and (args.watch or args.ras or args.prometheus),
         "--watch, --ras and --prometheus are of a running job", "prism hang --live --watch 60s"),
        (live and (dumps or args.programs or args.settings or args.confirm),
         "--live looks at the job on this host: it takes no dumps and no programs",
         "prism hang --live"),
        (not live and not (dumps or args.programs) or args.dumps == "",
         "name dumps or programs", "prism hang --dumps DIR, or prism hang DIR"),
        (not dumps and args.then is not None and not live,
         "--then is a second set of dumps, and there is no first",
         "prism hang --dumps DIR --then DIR2"),
        (not dumps and (args.of or args.recipe or args.job),
         "--programs and --recipe say whose job dumps are of, and there are none",
         "prism hang --dumps DIR --programs PATH"),
        (not dumps and args.confirm,
         "--confirm runs real code to the place where dumps say that it stood",
         "prism hang --dumps DIR --recipe NAME --confirm"),
    )  # fmt: skip
    inputs = [path for path in (args.programs, args.dumps, args.then, args.of) if path]
    inputs += args.logs or ()
    check_outputs([args.markdown, args.html, args.trace], args.force, inputs)
    planted = None
    if args.live:
        found = _live(args)
    elif dumps:
        found = _of_dumps(args)
        if args.job:  # the command is whole then
            from megatron_prism.features.hang.verdict import JOB

            job = shlex.join(args.job)
            found = dataclasses.replace(found, stop=found.stop.replace(JOB, job))
    else:
        found, planted = _of_programs(args)
    write_outputs(args.force, (args.markdown, found.to_markdown))
    hits = planted.hits if planted is not None else ()
    more = {} if planted is None else {"planted": [str(hit) for hit in hits]}
    if args.watch and args.json:  # a line, for what reads logs
        print(json.dumps(found.to_json()))
        return int(found.exit_code)
    return Answer(
        lambda: found.to_json() | more,
        lambda: print_lines(
            "\n".join([*(f"planted: {hit}" for hit in hits), str(found)]),
            (found.stop, found.decides),
        ),
        found.to_rows,
        status=int(found.exit_code),
        html=found.to_html,
        trace=found.to_chrome_trace,
    )


def _live(args: argparse.Namespace) -> Diagnosis:
    """The verdict on the job that runs on this host."""
    from megatron_prism.features.hang import live
    from megatron_prism.features.hang.verdict import Diagnosis

    seconds = _AGAIN_S if args.watch is None else units.parse_ns(args.watch) / 1e9
    before = live.look(args.ras)
    if not before.found and before.ras is None:
        raise UsageError("no process on this host has RANK and WORLD_SIZE in its environment",
                         fix="on a node of the job, as its user: prism hang --live")  # fmt: skip
    if args.ras is not None:  # one recording says nothing of what moves
        before = dataclasses.replace(before, ras=None)
    while True:
        with progress(lambda: ""):
            time.sleep(seconds)
        after = live.look(args.ras)
        if args.watch and not after.found:
            return Diagnosis("healthy", evidence=("the job has no process on this host any more",))
        found = live.judge(before, after)
        if args.prometheus is not None:
            write_whole(args.prometheus, live.prometheus(found, after), force=True)
        if args.watch is None or live.still(before, after):
            return found
        before = after


def _of_dumps(args: argparse.Namespace) -> Diagnosis:
    """The verdict on dumps, tried on the job's programs where these are named."""
    from megatron_prism.features.hang import analyze as judge
    from megatron_prism.features.hang import logs

    settings, overrides = _job_of_dumps(args)
    dumps = None if args.dumps is None else logs.read_folder(Path(args.dumps))
    dumps = logs.together(dumps, args.logs or ())
    later = None if args.then is None else logs.read_folder(Path(args.then))
    found, dumps = judge.diagnose_dumps(dumps, later), later or dumps
    if not args.job and not settings:
        return found
    with tempfile.TemporaryDirectory() as place:
        path = Path(settings.get("programs", Path(place, "slices")))
        known = "programs" in settings
        job = (_of_script(args, dumps, path, known) if args.job
               else _of_recipe(settings, overrides, path, known))  # fmt: skip
        return _on_programs(dumps, found, job, path, args.confirm)


def _of_script(args: argparse.Namespace, dumps: DumpSet, path: Path, known: bool) -> Job:
    """The job of a script's command line; captured into ``path`` unless that is ``known``."""
    from megatron_prism.emulate import script_job
    from megatron_prism.features.hang import confirm

    job = confirm.script_job(args.job, args.ours, dumps)
    if not known:
        size = ["--prism-world-size", str(job.world.size), "--prism-tier", job.tier]
        script_job.capture_command_line(args.job[0], [*size, *job.ours, *job.words[1:]], path,
                                        console(stderr=True))  # fmt: skip
    return job


def _of_recipe(
    settings: dict[str, str], overrides: list[str], path: Path, known: bool
) -> Job | None:
    """The job of the recipe that is named, on the tier of the suspect's run; captured into ``path``
    on its own tier unless that is ``known``.
    """
    from megatron_prism.core import recipe as recipes
    from megatron_prism.emulate import recipe_job

    if "recipe" not in settings:
        return None
    recipe = recipes.load(settings["recipe"], overrides)
    if not known:
        recipe_job.capture(recipe, path, console=console(stderr=True), keep=False)
    tier = {"prism.tier": settings["tier"]} if "tier" in settings else {}
    return recipe_job.job_of(recipe.changed(tier) if tier else recipe)


def _on_programs(
    dumps: DumpSet, found: Diagnosis, job: Job | None, path: Path, confirm: bool
) -> Diagnosis:
    """The verdict with places, tried on the job's programs, perhaps on the suspect's real code."""
    from megatron_prism.core.slices import open_programs
    from megatron_prism.features.hang.diagnose import judged

    programs = open_programs(path)
    if confirm and job is not None and not programs.world.same_places(job.world):
        name = job.source.get("recipe", "the script")
        raise UsageError(f"{path} is of {programs.world}, {name} of {job.world}",
                         fix="its sizes, too: world_size=16")  # fmt: skip
    found, placed = judged(dumps, found, programs)
    if not confirm or job is None:
        return found
    from megatron_prism.features.hang import confirm as trials

    trial = trials.confirm(job, programs, path, dumps, found, placed,
                           console(stderr=True))  # fmt: skip
    return dataclasses.replace(
        found, tried=(*placed.lines, *trial.lines), confirmed=trial.confirmed
    )


def has_observation(words: list[str]) -> bool:
    """Whether a command line names dumps or logs: a script beside them is their job."""
    named = any(word.partition("=")[0] in ("--dumps", "--logs") for word in words)
    return named or any(map(_is_observation, words))


def _is_observation(path: str) -> bool:
    """Whether a folder holds dumps or logs and no slices."""
    from megatron_prism.features.hang import dumps, logs

    folder = Path(path)
    if not folder.is_dir() or any(folder.glob("*.prism")):
        return False
    return dumps.has_dumps(folder) or any(p.is_file() and logs.is_log(p) for p in folder.iterdir())


def _job_of_dumps(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """(programs, recipe and tier as far as they are named, overrides of the recipe)."""
    words = [args.programs, *args.settings] if args.programs else list(args.settings)
    words += [f"programs={args.of}"] * bool(args.of)
    words += [f"recipe={args.recipe}"] * bool(args.recipe)
    words = [word if "=" in word else f"programs={word}" for word in words]
    names = [word.partition("=")[0] for word in words]
    overrides = [word for word, name in zip(words, names, strict=True)
                 if "recipe" in names and name not in ("programs", "recipe", "tier")]  # fmt: skip
    words = [word for word in words if word not in overrides]
    settings = dict(word.partition("=")[::2] for word in words)
    said, recipe = " ".join(words), "recipe" in settings
    refuse(
        (args.out, f"-o {args.out} does not go with --dumps", "--markdown FILE, --json"),
        (set(settings) - {"programs", "recipe", "tier"} or len(words) > len(settings),
         f"{said} does not go with --dumps",
         "programs=DIR or recipe=NAME: the job that left the dumps"),
        (len(settings) > 1 and not args.confirm,
         f"{said}: only --confirm needs more than the programs or the recipe",
         f"{words[-1] if words else ''}, or add --confirm"),
        (args.confirm and not recipe and not args.job,
         "--confirm runs the suspect's real code, of which job?",
         "--recipe NAME, or -- pretrain_gpt.py … (and --programs DIR, if it was captured)"),
        (args.job and recipe, f"{' '.join(args.job[:1])}: either a script or a recipe",
         "prism hang --dumps DIR -- pretrain_gpt.py …"),
    )  # fmt: skip
    return settings, overrides


def _of_programs(args: argparse.Namespace) -> tuple[Diagnosis, PlantedFaults | None]:
    """(verdict, what was planted or None)."""
    from megatron_prism.core.slices import open_programs
    from megatron_prism.features.hang.diagnose import diagnose, diagnose_faults

    faults = _faults(args.settings, args.plan)
    if args.programs.startswith("fault="):
        raise UsageError("faults in which programs?", fix=f"prism hang DIR {args.programs}")
    programs = open_programs(args.programs)
    if not faults:
        if args.out is not None:
            raise UsageError("without a fault there are no dumps to write", fix="fault=KIND@…")
        if args.seed is not None or args.truth is not None:
            raise UsageError("a seed draws the ranks of faults, truth names them: there are none",
                             fix="fault=KIND@rank=any:1 --seed N")  # fmt: skip
        return diagnose(programs=programs), None
    check_outputs([args.truth], args.force)
    with steps() as told:
        found = diagnose_faults(
            programs, faults, seed=args.seed or 0, out=args.out, force=args.force, progress=told
        )
    if args.out is not None:
        console(stderr=True).print(f"wrote {args.out}")
    if args.truth is not None:
        lines = [hit.truth("programs") + "\n" for hit in found.planted.hits]
        write_whole(args.truth, "".join(lines), force=args.force)
    return found.verdict, found.planted


def _faults(words: list[str], plans: list[str]) -> list[Fault]:
    from megatron_prism.core.fault_plan import load_plan, parse

    given = arguments.read(words, {"fault": parse}, "hang", several=("fault",))
    return [*given.get("fault", ()), *itertools.chain.from_iterable(map(load_plan, plans))]


COMMANDS = {
    "hang": Command(
        hang,
        (
            (("programs",), {**PROGRAMS[1], "nargs": "?"}),
            settings("fault=KIND@…, or changes of --recipe"),
            option("plan", arguments.name, "FILE", "of faults", action="append", default=[]),
            option(
                "seed",
                arguments.count(0, 10**18, "--seed 0"),
                "N",
                "of ranks that are drawn",
                default=None,
            ),
            file_option("--truth", "what was planted, to write"),
            (("--dumps",), {"metavar": "DIR", "help": "folder of Flight Recorder dumps"}),
            (("--logs",), {"metavar": "FILE", "nargs": "+", "help": "what the job printed"}),
            (("--then",), {"metavar": "DIR2", "help": "dumps of the same job some seconds later"}),
            switch("--live", "of the job that runs on this host"),
            (("--watch",), {"metavar": "60s", "help": "look again so often"}),
            file_option("--ras", "what ncclras printed, instead of asking"),
            file_option("--prometheus", "of its collector"),
            (("--programs",), {"dest": "of", "metavar": "PATH", "help": "of the dumps' job"}),
            (("--recipe",), {"metavar": "NAME", "help": "of the dumps' job, captured now"}),
            switch("--confirm", "run the suspects' real code"),
            (("-o", "--out"), {"metavar": "DIR", "help": "folder for the dumps of planted faults"}),
            file_option("--markdown", "it, for an issue"),
            file_option("--html", "the verdict as a page"),
            file_option("--trace", "for ui.perfetto.dev"),
        ),
        group=HelpGroup.DEBUG,
        job=True,
        programs=0,
        observes=has_observation,
        shows_progress=True,
    ),
}
