"""What-ifs of a job's own settings, as ``key=value`` words, for ``prism replay`` and ``compare``.

In : a path and words.  Out: the job's priced graph with them.  Without torch, but for other numbers
of microbatches, whose order is Megatron's.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.output import console, warn_without_times
from megatron_prism.core.errors import UnitError, UnsupportedError

if TYPE_CHECKING:
    from megatron_prism.core.program import Programs
    from megatron_prism.replay.priced_graph import PricedGraph, WhatIf

_SIZES = ("tp", "cp", "pp", "ep", "etp", "vpp")
_SEVERAL = ("slow", "faster", "nccl")
_KEYS = ("dp", "slow", "faster", "moved", "host", "nccl", "network", *_SIZES, "microbatches")


def split(word: str) -> tuple[str, list[str]]:
    """(path, what-ifs) of ``DIR,slow=517:1.2``; a comma before a key that is none of ours, as in
    ``slow=pp=3,tp=0:2``, belongs to the value.  The path is "" where there are what-ifs alone."""
    if os.path.exists(word):
        return word, []
    path, *words = re.split(rf",(?=(?:{'|'.join(_KEYS)})=)", word)
    if path.partition("=")[0] in _KEYS:
        return "", [path, *words]
    return path, words


def open_job(path: str, partial: bool = False) -> Programs:
    """What is in ``path``, of some stages at least if ``partial``; a shipped recipe of that name is
    captured now, for this once."""
    from megatron_prism.core import recipe
    from megatron_prism.core.slices import open_programs

    if os.path.exists(path) or path not in recipe.shipped():
        programs = open_programs(path, partial=partial)
        warn_without_times(programs)
        return programs
    from megatron_prism.emulate import recipe_job

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "slices"
        return recipe_job.capture(recipe.load(path, []), folder, console=console(stderr=True))


def machine_note(programs: Programs, machine: str | None) -> str:
    """A line that names the machine where nobody did; else nothing."""
    from megatron_prism.replay.priced_graph import machine_is_assumed, machine_of

    if machine is not None or not machine_is_assumed(programs):
        return ""
    name = machine_of(programs).upper()
    return f"machine: {name} is assumed, since nobody names one: --machine h100\n"


def priced(programs: Programs, words: Sequence[str], command: str, **how: Any) -> PricedGraph:
    """The programs with the what-ifs; ``how``: other arguments of ``price``."""
    from megatron_prism.replay import whatif
    from megatron_prism.replay.plausibility import check_plausible
    from megatron_prism.replay.priced_graph import price

    settings = _read(words, command)
    sizes = {key: settings.pop(key) for key in _SIZES if key in settings}
    wanted = settings.pop("microbatches", None)
    whatif.check_sizes(programs, sizes, settings.get("dp"), wanted)
    found = price(programs, what_if=_what_if(**settings), **how)
    if wanted is None:
        return found
    other = price(_with_microbatches(programs, wanted), what_if=_what_if(**settings), **how)
    check_plausible(other.timeline, found.timeline)
    return other


def _with_microbatches(programs: Programs, wanted: int) -> Programs:
    """``emulate.schedule.with_microbatches``.  UnsupportedError without Megatron."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that Megatron would rather have
            from megatron_prism.emulate.schedule import with_microbatches
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("megatron", "torch"):
            raise
        what = f"the order of microbatches is Megatron's, and there is no {error.name} here"
        raise UnsupportedError(what, fix="pip install megatron-core torch") from error
    return with_microbatches(programs, wanted)


def _read(words: Sequence[str], command: str) -> dict[str, Any]:
    """Fields of a what-if, sizes and microbatches."""
    keys: dict[str, arguments.Reader] = {
        "dp": arguments.count(1, 1 << 24, "dp=64"),
        "slow": _slow,
        "faster": _faster,
        "moved": arguments.name,
        "host": arguments.name,
        "nccl": arguments.name,
        "network": arguments.name,
        **dict.fromkeys(_SIZES, arguments.count(1, 1 << 20, "tp=4")),
        "microbatches": arguments.count(1, 1 << 24, "microbatches=32"),
    }
    return arguments.read(words, keys, command, several=_SEVERAL)


def _slow(text: str) -> tuple[str, str]:
    """``ranks:factor``; a range of ranks may have a step, which is not the factor."""
    ranks, colon, factor = text.rpartition(":")
    if not colon or not ranks:
        raise UnitError("it needs ranks and a factor", fix="slow=517:1.2, slow=pp=3,tp=0:1.2")
    return ranks, factor


def _faster(text: str) -> tuple[str, str]:
    """``calls:factor``; calls are a collective, a group or ``collective@group``."""
    what, colon, factor = text.rpartition(":")
    if not colon:
        raise UnitError("it needs calls and a factor", fix="faster=all_reduce@default_pg:2")
    return what, factor


def _what_if(
    slow: Sequence[tuple[str, str]] = (),
    faster: Sequence[tuple[str, str]] = (),
    nccl: Sequence[str] = (),
    **others: Any,
) -> WhatIf:
    from megatron_prism.replay.priced_graph import WhatIf

    return WhatIf(slow=tuple(slow), faster=tuple(faster), nccl=tuple(nccl), **others)
