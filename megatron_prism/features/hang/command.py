"""``prism hang``: who made a job hang, from its dumps or from its programs.

In : a folder of Flight Recorder dumps, or programs as a folder of slices, a file or a text, perhaps
with faults planted in them.  Out: the verdict in one line, then the picture; or one JSON object.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import tempfile
import time
from dataclasses import dataclass
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
    from megatron_prism.emulate.jobs.script_job import Job
    from megatron_prism.features.hang.dumps import DumpSet
    from megatron_prism.features.hang.fault_plan import Fault
    from megatron_prism.features.hang.planting import PlantedFaults
    from megatron_prism.features.hang.verdict import Diagnosis

_AGAIN_S = 5.0  # between two looks at a running job


def hang(args: argparse.Namespace) -> Answer | int:
    """Which rank made the job hang?  Culprits and victims, with the evidence.

    prism hang DIR              reads what is in DIR: Flight Recorder dumps, one per rank (also gz,
                                or what curl saved of torch's HTTP handler), and logs
    prism hang --dumps DIR --logs FILE…
                                the same by name; logs of one or many ranks, also without dumps
    prism hang --dumps DIR --then DIR2
                                also: dumps of the same job some seconds later; a rank that moved is
                                alive, and if none did, the job hangs
    prism hang --dumps DIR --programs P (or --recipe R)
                                also: the op of its program at which every rank stood, and whether
                                the programs stop there, too; P is a folder of prism capture
    prism hang DIR torchrun --nproc-per-node 8 pretrain_gpt.py <the job's own arguments>
                                the same; the programs are captured now
    prism hang --dumps DIR --recipe R --confirm [--programs P tier=cpu num_layers=4]
                                also: runs the culprits' real code to the op where they stood, and
                                beyond
    prism hang --dumps DIR --confirm [--programs P] -- pretrain_gpt.py <the job's own arguments>
                                the same, of a script
    prism hang --live           on a node of the running job: asks torch's recorders and NCCL's RAS
                                twice, 5 s apart, and takes the suspects' stacks with py-spy
    prism hang --live --watch 60s [--json --prometheus FILE]
                                every 60 s, until nothing moved in between or the job ends
    prism hang PROGRAMS         would these programs hang?  as prism check, with a verdict
    prism hang PROGRAMS fault=drop@rank=37,group=tp,nth=3 [--plan FILE --seed 0]
                                plants faults, runs all ranks until each is blocked or done, and
                                judges the dumps that they would leave; -o DIR keeps these, --truth
                                the faults.  Faults that only cost time are replayed

    Exit status: 0 no rank waits; 1 a culprit is named; 3 several explanations remain, only a rank
    whose dump is missing is named, or the job may have been running.  Dumps are read without
    executing anything in them.
    """
    _take_folder_of_dumps(args)
    _refuse_contradictions(args)
    inputs = [path for path in (args.programs, args.dumps, args.then, args.of) if path]
    inputs += args.logs or ()
    check_outputs([args.markdown, args.html, args.trace], args.force, inputs)

    # the verdict
    planted = None
    if args.live:
        verdict = _live(args)
    elif _has_dumps(args):
        verdict = _of_dumps(args)
    else:
        verdict, planted = _of_programs(args)
    write_outputs(args.force, (args.markdown, verdict.to_markdown))

    # a line for each look, for what reads logs
    if args.watch and args.json:
        print(json.dumps(verdict.to_json()))
        return int(verdict.exit_code)
    return _answer(verdict, planted)


def _has_dumps(args: argparse.Namespace) -> bool:
    """Tell whether dumps or logs are named."""
    return args.dumps is not None or bool(args.logs)


def _take_folder_of_dumps(args: argparse.Namespace) -> None:
    """Take ``prism hang DIR`` for ``prism hang --dumps DIR`` where dumps or logs lie in DIR."""
    if not args.programs or args.dumps is not None or args.live:
        return
    if _is_observation(args.programs):
        args.dumps, args.programs = args.programs, None


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Refuse words that do not go together.

    Raises:
        UsageError: Some do not, or nothing is named.
    """
    has_dumps = _has_dumps(args)
    has_job = args.of or args.recipe or args.job
    of_running_job = args.watch or args.ras or args.prometheus
    other_inputs = has_dumps or args.programs or args.settings or args.confirm
    nothing_named = not (args.live or has_dumps or args.programs)
    refuse(
        (
            not args.live and of_running_job,
            "--watch, --ras and --prometheus are of a running job",
            "prism hang --live --watch 60s",
        ),
        (
            args.live and other_inputs,
            "--live looks at the job on this host: it takes no dumps and no programs",
            "prism hang --live",
        ),
        (
            nothing_named or args.dumps == "",
            "name dumps or programs",
            "prism hang --dumps DIR, or prism hang DIR",
        ),
        (
            args.then is not None and not has_dumps and not args.live,
            "--then is a second set of dumps, and there is no first",
            "prism hang --dumps DIR --then DIR2",
        ),
        (
            has_job and not has_dumps,
            "--programs and --recipe say whose job dumps are of, and there are none",
            "prism hang --dumps DIR --programs PATH",
        ),
        (
            args.confirm and not has_dumps,
            "--confirm runs real code to the place where dumps say that it stood",
            "prism hang --dumps DIR --recipe NAME --confirm",
        ),
    )


def _answer(verdict: Diagnosis, planted: PlantedFaults | None) -> Answer:
    """Return a verdict as a command prints and writes it, with the faults that were planted."""
    hits = () if planted is None else planted.hits
    planted_lines = [f"planted: {hit}" for hit in hits]

    def as_json() -> dict[str, object]:
        value = verdict.to_json()
        if planted is not None:
            value |= {"planted": [str(hit) for hit in hits]}
        return value

    def print_it() -> None:
        text = "\n".join([*planted_lines, str(verdict)])
        print_lines(text, (verdict.stop, verdict.decides))

    return Answer(
        as_json,
        print_it,
        verdict.to_rows,
        status=int(verdict.exit_code),
        html=verdict.to_html,
        trace=verdict.to_chrome_trace,
    )


def _live(args: argparse.Namespace) -> Diagnosis:
    """The verdict on the job that runs on this host."""
    from megatron_prism.features.hang import live
    from megatron_prism.features.hang.verdict import Diagnosis

    seconds = _AGAIN_S
    if args.watch is not None:
        seconds = units.parse_ns(args.watch) / 1e9
    before = live.look(args.ras)
    if not before.found and before.ras is None:
        raise UsageError(
            "no process on this host has RANK and WORLD_SIZE in its environment",
            fix="on a node of the job, as its user: prism hang --live",
        )

    # one recording says nothing of what moves
    if args.ras is not None:
        before = dataclasses.replace(before, ras=None)
    while True:
        with progress(lambda: ""):
            time.sleep(seconds)
        after = live.look(args.ras)
        if args.watch and not after.found:
            return Diagnosis("healthy", evidence=("the job has no process on this host any more",))
        verdict = live.judge(before, after)
        if args.prometheus is not None:
            write_whole(args.prometheus, live.prometheus(verdict, after), force=True)

        # a job that stands still is not watched any longer
        if args.watch is None or live.still(before, after):
            return verdict
        before = after


def _of_dumps(args: argparse.Namespace) -> Diagnosis:
    """The verdict on dumps, tried on the job's programs where these are named."""
    from megatron_prism.features.hang import analyze as judge
    from megatron_prism.features.hang import logs
    from megatron_prism.features.hang.verdict import JOB

    named_job = _job_of_dumps(args)
    dumps = None if args.dumps is None else logs.read_folder(Path(args.dumps))
    dumps = logs.together(dumps, args.logs or ())
    later = None if args.then is None else logs.read_folder(Path(args.then))
    verdict = judge.diagnose_dumps(dumps, later)
    dumps = later or dumps
    if not args.job and not named_job.settings:
        return verdict

    # programs of the job: those that are named, or captured now
    with tempfile.TemporaryDirectory() as place:
        is_captured = "programs" in named_job.settings
        path = Path(named_job.settings.get("programs", Path(place, "slices")))
        job: Job | None
        if args.job:
            job = _of_script(args, dumps, path, is_captured)
        else:
            job = _of_recipe(named_job, path, is_captured)
        verdict = _on_programs(dumps, verdict, job, path, args.confirm)

    # the job's own words make the command whole
    if args.job:
        stop = verdict.stop.replace(JOB, shlex.join(args.job))
        verdict = dataclasses.replace(verdict, stop=stop)
    return verdict


def _of_script(args: argparse.Namespace, dumps: DumpSet, path: Path, is_captured: bool) -> Job:
    """The job of a script's command line; captured into ``path`` unless it is there."""
    from megatron_prism.emulate.jobs import script_job
    from megatron_prism.features.hang import confirm

    job = confirm.script_job(args.job, args.ours, dumps)
    if not is_captured:
        size = ["--prism-world-size", str(job.world.size), "--prism-tier", job.tier]
        words = [*size, *job.ours, *job.words[1:]]
        script_job.capture_command_line(args.job[0], words, path, console(stderr=True))
    return job


def _of_recipe(named_job: _NamedJob, path: Path, is_captured: bool) -> Job | None:
    """The job of the recipe that is named, on the tier of the suspect's run.

    It is captured into ``path``, on the recipe's own tier, unless it is there.
    """
    from megatron_prism.core.jobs import recipe as recipes
    from megatron_prism.emulate.jobs import recipe_job

    settings = named_job.settings
    if "recipe" not in settings:
        return None
    recipe = recipes.load(settings["recipe"], named_job.overrides)
    if not is_captured:
        recipe_job.capture(recipe, path, console=console(stderr=True), keep=False)
    if "tier" in settings:
        recipe = recipe.changed({"prism.tier": settings["tier"]})
    return recipe_job.job_of(recipe)


def _on_programs(
    dumps: DumpSet, verdict: Diagnosis, job: Job | None, path: Path, confirm: bool
) -> Diagnosis:
    """The verdict with places, tried on the job's programs, perhaps on the suspect's real code."""
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.hang.diagnose import judged

    programs = open_programs(path)
    if confirm and job is not None and not programs.world.same_places(job.world):
        name = job.source.get("recipe", "the script")
        raise UsageError(
            f"{path} is of {programs.world}, {name} of {job.world}",
            fix="its sizes, too: world_size=16",
        )
    verdict, placed = judged(dumps, verdict, programs)
    if not confirm or job is None:
        return verdict

    # the suspect's real code
    from megatron_prism.features.hang import confirm as trials

    trial = trials.confirm(job, programs, path, dumps, verdict, placed, console(stderr=True))
    tried = (*placed.lines, *trial.lines)
    return dataclasses.replace(verdict, tried=tried, confirmed=trial.confirmed)


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
    if dumps.has_dumps(folder):
        return True
    return any(file.is_file() and logs.is_log(file) for file in folder.iterdir())


@dataclass(frozen=True)
class _NamedJob:
    """The job that left dumps, as it is named.

    Attributes:
        settings: programs, recipe and tier, as far as they are named.
        overrides: Changes of the recipe.
    """

    settings: dict[str, str]
    overrides: list[str]


_OF_JOB = ("programs", "recipe", "tier")


def _job_of_dumps(args: argparse.Namespace) -> _NamedJob:
    """Read which job left the dumps.

    Raises:
        UsageError: The words name no job, or more than ``--confirm`` is there for.
    """
    named = list(args.settings)
    if args.programs:
        named.insert(0, args.programs)
    if args.of:
        named.append(f"programs={args.of}")
    if args.recipe:
        named.append(f"recipe={args.recipe}")
    words: list[str] = []
    for word in named:
        # a word alone is a path of programs
        words.append(word if "=" in word else f"programs={word}")

    # beside a recipe, other names are changes of it
    has_recipe = any(word.startswith("recipe=") for word in words)
    overrides: list[str] = []
    settings_words: list[str] = []
    for word in words:
        if has_recipe and word.partition("=")[0] not in _OF_JOB:
            overrides.append(word)
        else:
            settings_words.append(word)
    settings: dict[str, str] = {}
    for word in settings_words:
        name, _, value = word.partition("=")
        settings[name] = value

    # words that do not go together
    text = " ".join(settings_words)
    has_unknown = bool(settings.keys() - set(_OF_JOB))
    has_several = len(settings_words) > len(settings)
    last_word = settings_words[-1] if settings_words else ""
    script = " ".join(args.job[:1]) if args.job else ""
    refuse(
        (args.out, f"-o {args.out} does not go with --dumps", "--markdown FILE, --json"),
        (
            has_unknown or has_several,
            f"{text} does not go with --dumps",
            "programs=DIR or recipe=NAME: the job that left the dumps",
        ),
        (
            len(settings) > 1 and not args.confirm,
            f"{text}: only --confirm needs more than the programs or the recipe",
            f"{last_word}, or add --confirm",
        ),
        (
            args.confirm and not has_recipe and not args.job,
            "--confirm runs the suspect's real code, of which job?",
            "--recipe NAME, or -- pretrain_gpt.py … (and --programs DIR, if it was captured)",
        ),
        (
            args.job and has_recipe,
            f"{script}: either a script or a recipe",
            "prism hang --dumps DIR -- pretrain_gpt.py …",
        ),
    )
    return _NamedJob(settings, overrides)


def _of_programs(args: argparse.Namespace) -> tuple[Diagnosis, PlantedFaults | None]:
    """Return the verdict on programs, and what was planted in them, if anything."""
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.hang.diagnose import diagnose, diagnose_faults

    faults = _faults(args.settings, args.plan)
    if args.programs.startswith("fault="):
        raise UsageError("faults in which programs?", fix=f"prism hang DIR {args.programs}")
    programs = open_programs(args.programs)
    if not faults:
        _refuse_words_of_faults(args)
        return diagnose(programs=programs), None

    # faults are planted
    check_outputs([args.truth], args.force)
    with steps() as told:
        result = diagnose_faults(
            programs, faults, seed=args.seed or 0, out=args.out, force=args.force, progress=told
        )
    if args.out is not None:
        console(stderr=True).print(f"wrote {args.out}")
    if args.truth is not None:
        lines = [hit.truth("programs") + "\n" for hit in result.planted.hits]
        write_whole(args.truth, "".join(lines), force=args.force)
    return result.verdict, result.planted


def _refuse_words_of_faults(args: argparse.Namespace) -> None:
    """Refuse words that are of planted faults.

    Raises:
        UsageError: There is one.
    """
    refuse(
        (
            args.out is not None,
            "without a fault there are no dumps to write",
            "fault=KIND@…",
        ),
        (
            args.seed is not None or args.truth is not None,
            "a seed draws the ranks of faults, truth names them: there are none",
            "fault=KIND@rank=any:1 --seed N",
        ),
    )


def _faults(words: list[str], plans: list[str]) -> list[Fault]:
    """Read faults from the command line, then those of plans."""
    from megatron_prism.features.hang.fault_plan import load_plan, parse

    settings = arguments.read(words, {"fault": parse}, "hang", several=("fault",))
    faults = list(settings.get("fault", ()))
    for plan in plans:
        faults += load_plan(plan)
    return faults


COMMANDS = {
    "hang": Command(
        hang,
        (
            (("programs",), {**PROGRAMS[1], "nargs": "?"}),
            settings("fault=KIND@…, or changes of --recipe"),
            option("plan", arguments.name, "FILE", "list of faults", action="append", default=[]),
            option(
                "seed",
                arguments.count(0, 10**18, "--seed 0"),
                "N",
                "seed of ranks that are drawn",
                default=None,
            ),
            file_option("--truth", "write the planted faults"),
            (("--dumps",), {"metavar": "DIR", "help": "folder of Flight Recorder dumps"}),
            (("--logs",), {"metavar": "FILE", "nargs": "+", "help": "logs of the job"}),
            (("--then",), {"metavar": "DIR2", "help": "dumps of the same job some seconds later"}),
            switch("--live", "judge the job that runs on this host"),
            (("--watch",), {"metavar": "60s", "help": "interval between two looks"}),
            file_option("--ras", "output of ncclras, in place of asking NCCL's RAS"),
            file_option("--prometheus", "write metrics, for a textfile collector of Prometheus"),
            (
                ("--programs",),
                {"dest": "of", "metavar": "PATH", "help": "programs of the dumps' job"},
            ),
            (("--recipe",), {"metavar": "NAME", "help": "recipe of the dumps' job, captured now"}),
            switch("--confirm", "run the suspects' real code"),
            (("-o", "--out"), {"metavar": "DIR", "help": "folder for the dumps of planted faults"}),
            file_option("--markdown", "write the verdict for an issue"),
            file_option("--html", "the verdict as a page"),
            file_option("--trace", "write a trace, for ui.perfetto.dev"),
        ),
        group=HelpGroup.DEBUG,
        job=True,
        programs=0,
        observes=has_observation,
        shows_progress=True,
    ),
}
