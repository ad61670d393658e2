"""What-ifs of a job's own settings, as ``key=value`` words, for ``prism replay`` and ``compare``.

In : a path and words.  Out: the job's priced graph with them.  Without torch, but for other numbers
of microbatches, whose order is Megatron's.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_prism.cli import arguments
from megatron_prism.cli.output import console
from megatron_prism.core import feature
from megatron_prism.core.comparing import JobReader
from megatron_prism.core.errors import UnitError, UnsupportedError

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.replay.priced_graph import PricedGraph


def open_job(path: str, partial: bool = False) -> Programs:
    """What is in ``path``, of some stages at least if ``partial``; a shipped recipe of that name is
    captured now, for this once.
    """
    from megatron_prism.core.jobs import recipe
    from megatron_prism.core.programs.slices import open_programs

    # a file or folder here comes before a recipe of that name
    if os.path.exists(path) or path not in recipe.shipped():
        programs = open_programs(path, partial=partial)
        _warn_without_times(programs)
        return programs
    from megatron_prism.emulate.jobs import recipe_job

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "slices"
        return recipe_job.capture(recipe.load(path, []), folder, console=console(stderr=True))


def open_side(path: str, words: Sequence[str], machine: str | None, calibration: str | None) -> Any:
    """Open one side of a comparison.

    Args:
        path: slices, programs, a shipped recipe, or a file that a feature's ``JobReader`` knows.
        words: what-ifs of that side.
        machine: as of ``price``.
        calibration: as of ``price``.

    Returns:
        Programs, a PricedGraph if there are what-ifs, or what the reader read.
    """
    # what-ifs change programs, not files of other kinds
    if words:
        return priced(open_job(path), words, "compare", machine=machine, calibration=calibration)
    reader = job_reader(path)
    if reader is not None:
        return reader.read(path)
    return open_job(path, partial=True)


def job_reader(path: str) -> JobReader | None:
    """Return the reader of a feature that recognizes ``path``; None where slices may lie there."""
    for module in feature.modules("comparers"):
        reader: JobReader
        for reader in module.JOB_READERS:
            if reader.recognizes(path):
                return reader
    return None


def _warn_without_times(programs: Programs) -> None:
    """Say it where no segment says how long it takes or what it computes, as in programs by hand:
    what is added up then are calls and the shortest kernel.
    """
    from megatron_prism.core.programs.ops import CODE

    has_segments = has_work = False
    for program in programs.programs:
        segments = program.ops[program.ops["name"] == CODE["compute"]]
        has_segments = has_segments or len(segments) > 0
        for column in ("ns", "flops", "traffic"):
            has_work = has_work or bool((segments[column] > 0).any())
    if has_segments and not has_work:
        print(
            "prism: warning: no segment says how long it takes or what it computes: each counts as "
            "the shortest kernel, and what follows is no job's time. prism capture RECIPE -o DIR "
            "has what a job computes",
            file=sys.stderr,
        )


def machine_note(programs: Programs, machine: str | None) -> str:
    """A line that names the machine where nobody did; else nothing."""
    from megatron_prism.replay.priced_graph import machine_is_assumed, machine_of

    if machine is not None or not machine_is_assumed(programs):
        return ""
    name = machine_of(programs).upper()
    return f"machine: {name} is assumed, since nobody names one: --machine h100\n"


def priced(programs: Programs, words: Sequence[str], command: str, **how: Any) -> PricedGraph:
    """The programs with the what-ifs; ``how``: other arguments of ``price``."""
    from megatron_prism.replay.priced_graph import WhatIf, price
    from megatron_prism.replay.uncertainty.plausibility import check_plausible

    settings = arguments.read(words, _READERS, command, several=_SEVERAL)
    # another number of microbatches needs Megatron, all other what-ifs do not
    wanted = settings.pop("microbatches", None)
    what_if = WhatIf(**settings | {key: tuple(settings.get(key, ())) for key in _SEVERAL})
    as_captured = price(programs, what_if=what_if, **how)
    if wanted is None:
        return as_captured
    changed = price(with_microbatches(programs, wanted), what_if=what_if, **how)
    check_plausible(changed.timeline, as_captured.timeline)
    return changed


def with_microbatches(programs: Programs, wanted: int) -> Programs:
    """``emulate.schedule.with_microbatches``.  UnsupportedError without Megatron."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that Megatron would rather have
            from megatron_prism.emulate import schedule
    except ModuleNotFoundError as error:
        # another missing module is no missing Megatron: the advice below would be wrong
        if (error.name or "").partition(".")[0] not in ("megatron", "torch"):
            raise
        message = f"the order of microbatches is Megatron's, and there is no {error.name} here"
        raise UnsupportedError(message, fix="pip install megatron-core torch") from error
    return schedule.with_microbatches(programs, wanted)


def _pair(subject: str, example: str) -> arguments.Reader:
    """Reads ``subject:factor``; a range of ranks may have a step, which is not the factor."""

    def reader(text: str) -> tuple[str, str]:
        head, _, factor = text.rpartition(":")
        if not head:
            raise UnitError(f"it needs {subject} and a factor", fix=example)
        return head, factor

    return reader


def _size(text: str) -> NoReturn:
    fix = "capture them with that size, or let prism sweep do it"
    raise UnitError("ranks of another size run other kernels", fix=fix)


_SEVERAL = ("slow", "faster", "nccl")
_READERS: dict[str, arguments.Reader] = {
    "dp": arguments.count(1, 1 << 24, "dp=64"),
    "slow": _pair("ranks", "slow=517:1.2, slow=pp=3,tp=0:1.2"),
    "faster": _pair("calls", "faster=all_reduce@default_pg:2"),
    **dict.fromkeys(("moved", "host", "nccl", "network"), arguments.name),
    **dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "vpp"), _size),
    "microbatches": arguments.count(1, 1 << 24, "microbatches=32"),
}


def split(word: str) -> tuple[str, list[str]]:
    """(path, what-ifs) of ``DIR,slow=517:1.2``; a comma before a key that is none of ours, as in
    ``slow=pp=3,tp=0:2``, belongs to the value.  The path is "" where there are what-ifs alone.
    """
    # a path that exists is no list of what-ifs, whatever its name
    if os.path.exists(word):
        return word, []
    path, *words = re.split(rf",(?=(?:{'|'.join(_READERS)})=)", word)
    if path.partition("=")[0] in _READERS:
        return "", [path, *words]
    return path, words
