"""Diagnose a hang: from dumps, from dumps and programs, from programs alone, from planted faults.

``diagnose`` judges what there is; ``diagnose_faults`` plants faults in healthy programs, runs all
ranks until nobody can go on and judges the dumps that they would leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.files import claimed
from megatron_prism.core.program import Programs
from megatron_prism.graph import stall, world_graph
from megatron_prism.hang import alignment, export, fault_planting, from_programs, hypotheses
from megatron_prism.hang import analyze as hang
from megatron_prism.hang.alignment import Confirmation
from megatron_prism.hang.dumps import DumpSet, read
from megatron_prism.hang.fault_plan import Fault
from megatron_prism.hang.fault_planting import PlantedFaults
from megatron_prism.hang.verdict import Diagnosis
from megatron_prism.replay.priced_graph import WhatIf, price

__all__ = ["diagnose", "diagnose_faults", "judged"]

_SHOWN = 16  # ranks whose places are in the verdict
Progress = Callable[[str, float], object]  # what is done, and which part of it, 0 to 1


@dataclass(frozen=True)
class PlantedDiagnosis:
    """Faults that were planted, and the verdict on the dumps that they would leave."""

    verdict: Diagnosis
    planted: PlantedFaults


def diagnose(
    dumps: str | os.PathLike[str] | DumpSet | None = None,
    *,
    programs: Programs | None = None,
    then: str | os.PathLike[str] | DumpSet | None = None,
) -> Diagnosis:
    """Find who made a job hang.

    Args:
        dumps: folder of Flight Recorder dumps, one per rank, or what was read from one.
        programs: of the job.  With dumps: the verdict also says where in its program every rank
            stood, and whether the programs stop there too.  Without: whether the programs would
            hang.
        then: dumps of the same job, written some seconds later: who moved is alive.

    Raises:
        UsageError: neither dumps nor programs.
        PrismError: no dump can be read.
    """
    if dumps is None:
        if programs is None:
            raise UsageError("name dumps or programs", fix="diagnose('dumps/')")
        return from_programs.diagnose_graph(world_graph.build(programs))
    found = dumps if isinstance(dumps, DumpSet) else read(dumps)
    later = then if isinstance(then, DumpSet) or then is None else read(then)
    verdict = hang.diagnose_dumps(found, later)
    found = later or found
    return verdict if programs is None else judged(found, verdict, programs)[0]


def judged(
    dumps: DumpSet, verdict: Diagnosis, programs: Programs
) -> tuple[Diagnosis, Confirmation]:
    """(the verdict held against the job's programs, where every rank stood in them)."""
    verdict = hypotheses.explain(dumps, verdict, programs)
    placed = alignment.confirm_verdict(dumps, verdict, programs)
    named = {culprit.rank for culprit in verdict.culprits}
    shown = [place for place in placed.places if place.rank in named]
    others = [place for place in placed.places if place.rank not in named]
    shown += others[: _SHOWN - len(shown)]
    verdict = dataclasses.replace(
        verdict,
        places=tuple(map(str, shown)),
        tried=placed.lines,
        confirmed=placed.confirmed,
    )
    return verdict, placed


def diagnose_faults(
    programs: Programs,
    planned: Sequence[Fault],
    *,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> PlantedDiagnosis:
    """Plant faults in programs and judge the dumps that they would leave.

    Args:
        programs: of a healthy job.
        planned: the faults.
        seed: draws the ranks of faults of any rank.
        out: folder for the dumps; None: they are not kept.
        force: whether to replace that folder.
        progress: is told what is being done and which part of it is done, 0 to 1.

    Faults that only cost time end in no hang: the verdict then says what they cost by a replay.
    """

    def told(what: str, part: float = 0.0) -> None:
        if progress is not None:
            progress(what, part)

    with contextlib.ExitStack() as stack:
        if out is not None:
            export.check_free(Path(out), force)
            stack.enter_context(claimed(out, inside=True))
        told("planting faults")
        planted = fault_planting.plant(programs, planned, seed)
        told("running all ranks")
        state = stall.run_until_stalled(planted.programs, planted.faults)
        if out is not None:
            told("writing the dumps of all ranks")
            export.write(state, out, force=force)
    verdict = from_programs.diagnose_stall(
        state, told=lambda part: told("the dumps of all ranks", part)
    )
    if not state.finished:
        with contextlib.suppress(PrismError):  # programs that hang anyway, a machine too small
            first = from_programs.first_watchdog(state, price(programs).timeline)
            verdict = dataclasses.replace(verdict, watchdog=first)
    elif any(fault.only_time for fault in planned):
        told("replaying both worlds")
        verdict = dataclasses.replace(verdict, tried=(_cost(programs, planted),))
    return PlantedDiagnosis(verdict, planted)


def _cost(programs: Programs, planted: PlantedFaults) -> str:
    """What faults that only cost time cost, by a replay of both worlds."""
    healthy = price(programs)
    faulty = price(planted.programs, what_if=WhatIf(slow_nics=tuple(planted.slow_nics)))
    before, after = healthy.timeline.iteration_ns, faulty.timeline.iteration_ns
    more = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return (f"an iteration takes {after / 1e6:,.3f} ms instead of {before / 1e6:,.3f} ms{more} by "
            f"the replay on {healthy.machine.name}; nobody's watchdog fires")  # fmt: skip
