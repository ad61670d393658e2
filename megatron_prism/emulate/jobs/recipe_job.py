"""A recipe as a job: ``recipe_script`` with the recipe's flags, one rank per pipeline stage.

``emulate(recipe, out, ...)`` needs no Megatron checkout and no GPU.  It starts the script for every
rank (two at a time on two cores), prints what each did and writes the artefact folder when all have
trained; ``capture`` records them.  It imports neither torch nor Megatron: the workers do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from megatron_prism.core.columns import columns
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import artefact_folder, write_json
from megatron_prism.core.groups import short_name
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.jobs.megatron_source import megatron_release, versions
from megatron_prism.core.jobs.recipe import Recipe
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import assemble
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.core.world import STAGES
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.jobs import script_job
from megatron_prism.emulate.jobs.script_job import Job
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.memory.recipe_bound import memory_bound


def head(recipe: Recipe, ranks: Sequence[int], console: Console) -> None:
    """Before the work: which job, and what is real of it."""
    title = f"{recipe.name}: {recipe.world}"
    if recipe.hardware.name:
        title += f" on {recipe.hardware.name}"
    console.print(title)
    for key, value in recipe.derived().items():
        console.print(f"  {key:<20} {value}")
    virtual = recipe.world.size - len(ranks)
    console.print(f"  {'real here':<20} {counted(len(ranks), 'rank')}; {virtual:,} virtual")


def body(
    recipe: Recipe,
    summaries: Sequence[Json],
    wall_s: float,
    console: Console,
    verbose: bool = False,
) -> None:
    """After the work: per stage parameters, memory and p2p; then communication by group."""
    _stages(recipe, summaries, console)
    _communication(summaries, console)
    first = summaries[0]
    console.print(f"memory: {first['memory']['provenance']}")
    for summary in summaries:
        values = [loss for loss in summary["losses"] if loss is not None]
        # only the last stage has losses
        if not values:
            continue
        shown = f"{values[0]:.4f} -> {values[-1]:.4f} over {len(values)} iterations"
        console.print(f"loss at stage {summary['stage']}: {shown}")
    console.print(f"communication: counted here, every call of {first['communication_of']}")
    console.print(f"megatron-core {first['megatron_core']}, tier {first['tier']}")
    if verbose:
        for stand_in in first["stand_ins"]:
            console.print(f"  stand-in  {stand_in}")
    rss = max(s["host_peak_rss"] for s in summaries)
    console.print(f"{wall_s:.1f} s, at most {format_bytes(rss)} of host memory per worker")


def _stages(recipe: Recipe, summaries: Sequence[Json], console: Console) -> None:
    rows = [
        [
            "stage",
            "layers by chunk",
            "peak in",
            "rank",
            "parameters",
            "live peak",
            "sends",
            "receives",
            "s / iteration here",
        ]
    ]
    for summary in summaries:
        peak = max(summary["memory"]["peaks"], key=lambda p: p["bytes"], default=None)
        where = peak_bytes = "unknown"
        if peak:
            where = ", ".join(f"{key} {value}" for key, value in peak["at"].items())
            peak_bytes = format_bytes(peak["bytes"])
        calls = Counter[str]()
        for row in summary["communication"]:
            calls[row["op"]] += row["calls"]
        rows.append(
            [
                str(summary["stage"]),
                "+".join(str(n) for n in summary["layers"]),
                where,
                f"{summary['rank']:,}",
                f"{summary['parameters']:,}",
                peak_bytes,
                f"{calls['send']:,}",
                f"{calls['recv']:,}",
                f"{summary['iteration_s'][-1]:.2f}",
            ]
        )
    console.print("\n".join(["", "per stage, one iteration", *columns(rows, left=3)]))


def _communication(summaries: Sequence[Json], console: Console) -> None:
    """Calls and bytes by group; stages that communicate alike share a row."""
    stages: dict[tuple[str, int, str, int, int], list[str]] = {}
    for summary in summaries:
        for row in summary["communication"]:
            key = (row["group"], row["group_size"], row["op"], row["calls"], row["bytes"])
            stages.setdefault(key, []).append(str(summary["stage"]))

    def most_bytes_first(
        item: tuple[tuple[str, int, str, int, int], list[str]],
    ) -> tuple[int, str, str, list[str]]:
        (group, _, op, _, num_bytes), stages_of_row = item
        return -num_bytes, group, op, stages_of_row

    rows = [["group", "collective", "stages", "ranks", "calls", "message bytes"]]
    for key, stages_of_row in sorted(stages.items(), key=most_bytes_first):
        group, size, op, calls, num_bytes = key
        stages_text = ",".join(stages_of_row)
        # all stages communicate alike
        if len(stages_of_row) == len(summaries) > 1:
            stages_text = "all"
        size_text, calls_text = f"{size:,}", f"{calls:,}"
        row = [short_name(group), op, stages_text, size_text, calls_text, format_bytes(num_bytes)]
        rows.append(row)
    head = "communication of one rank, one iteration"
    console.print("\n".join(["", head, *columns(rows, left=3), ""]))


SCRIPT = "megatron_prism.emulate.jobs.recipe_script"
FORMAT = 1  # version of summary.json


@dataclass(frozen=True)
class EmulationResult:
    """What the job did: one summary per rank, in stage order."""

    recipe: Recipe
    ranks: list[Json]
    wall_s: float

    def to_json(self) -> dict[str, object]:
        """The content of ``summary.json``: plain numbers, provenance beside them."""
        from megatron_prism import __version__

        return {
            "format": FORMAT,
            "megatron_prism": __version__,
            "recipe": self.recipe.name,
            "world_size": self.recipe.world.size,
            "derived": self.recipe.derived(),
            "wall_s": round(self.wall_s, 3),
            "ranks": self.ranks,
        }


def ranks_of(recipe: Recipe) -> tuple[int, ...]:
    """The ranks to run: what the recipe names, else the first rank of every pipeline stage."""
    return recipe.world.select(str(recipe.prism.ranks or STAGES))


def emulate(
    recipe: Recipe | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    console: Console | None = None,
    num_workers: int | None = None,
    verbose: bool = False,
) -> EmulationResult:
    """Train a recipe on one rank per pipeline stage; all other ranks are virtual.

    Args:
        recipe: a Recipe, the name of a shipped one, or a YAML file.
        out: artefact folder to write; None: nothing is written.
        force: whether to replace that folder.
        console: a rich Console for what is printed; default: stdout.
        num_workers: ranks at once; default: one per core.
        verbose: whether to list what stands in for missing libraries.

    Raises:
        NotTrainedError: a rank did not make its optimizer steps; then nothing is written.
        PrismError: whatever a worker ended with.
    """
    console, recipe = console or Console(), recipes.given(recipe)
    ranks = ranks_of(recipe)
    folder = contextlib.nullcontext() if out is None else artefact_folder(out, force=force)
    with folder as work:
        head(recipe, ranks, console)
        start = time.perf_counter()
        job = job_of(recipe)
        tasks = [workers.RankTask(rank, job.title(rank), job.command(rank)) for rank in ranks]
        summaries = workers.run(tasks, console, num_workers)
        result = EmulationResult(recipe, summaries, time.perf_counter() - start)
        body(recipe, summaries, result.wall_s, console, verbose)
        if work is not None:
            write_json(work / "summary.json", result.to_json())
            write_json(work / "recipe.json", asdict(recipe))
            for summary in summaries:
                write_json(work / f"rank-{summary['rank']:06d}.json", summary)
    if out is not None:
        console.print(f"wrote {out}")
    return result


def _check_memory(recipe: Recipe) -> None:
    """UsageError if a rank needs more memory than this host has: it would be killed in the midst of
    others' work.
    """
    with contextlib.suppress(OSError):  # not Linux
        meminfo = Path("/proc/meminfo").read_text()
        free_kib = meminfo.split("MemAvailable:")[1].split()[0]
        free_bytes, bound = int(free_kib) << 10, memory_bound(recipe)
        if bound > free_bytes:
            raise UsageError(
                f"a rank needs at least {format_bytes(bound)} of host memory on tier cpu, and "
                f"{format_bytes(free_bytes)} are free",
                fix="prism.tier=meta, which needs none for tensors, or a smaller model",
            )


def job_of(recipe: Recipe) -> Job:
    """The recipe's script and our flags for every rank."""
    prism = recipe.prism
    # tier cpu has the whole model in the host's memory
    if prism.tier == "cpu":
        _check_memory(recipe)
    prism_words = ["--prism-values", prism.values]
    if prism.gpus_per_node is not None:
        prism_words += ["--prism-gpus-per-node", str(prism.gpus_per_node)]
    if prism.te_version is not None:
        prism_words += ["--prism-te-version", prism.te_version]
    if prism.all_microbatches:
        prism_words.append("--prism-all-microbatches")
    prism_words += shlex.split(prism.flags)
    source = source_of(recipe)
    words = ("-m", SCRIPT, *recipe.words())
    return Job(words, tuple(prism_words), recipe.world, source["tier"], source)


def source_of(recipe: Recipe) -> dict[str, str]:
    """What decides the content of its slices: versions, tier and every setting but which ranks to
    run.
    """
    return {
        "recipe": recipe.name,
        "settings": job_settings.as_text(recipe.settings(job_arguments.text_of)),
        "megatron_core": megatron_release(),
        **versions(),
        "tier": "meta" if recipe.prism.tier == "auto" else recipe.prism.tier,
    }


def capture(
    recipe: Recipe | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    console: Console | None = None,
    keep: bool = True,
) -> Programs:
    """Record what one rank per pipeline stage does in an iteration; returns the whole world.

    Args:
        recipe: a Recipe, the name of a shipped one, or a YAML file.
        folder: of slices; what is in it already is not captured again.
        force: whether to drop what is in it first.
        console: a rich Console for what is being done; default: stdout.
        keep: whether to say where the slices are.

    Raises what ``emulate`` raises; the slices finished until then are kept.
    """
    console, recipe = console or Console(), recipes.given(recipe)
    ranks = ranks_of(recipe)
    head(recipe, ranks, console)
    script_job.capture(job_of(recipe), Path(folder), ranks, console, force=force, keep=keep)
    return assemble(folder)
