"""Diagnose a hang: from dumps, from dumps and programs, from programs alone, from planted faults.

``diagnose`` judges what there is; ``diagnose_faults`` plants faults in healthy programs, runs all
ranks until nobody can go on and judges the dumps that they would leave: the verdict sees these and
nothing else, as after a real hang.  Only where dumps cannot decide (they know no splits) are the
programs compared, and, where a job knows them, the programs as they should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import claimed, no_collector
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.world import format_ranks
from megatron_prism.features.hang import advice, analyze, export, hypotheses
from megatron_prism.features.hang import planting as fault_planting
from megatron_prism.features.hang.dumps import DumpSet, of_value, read
from megatron_prism.features.hang.fault_plan import Fault
from megatron_prism.features.hang.hypotheses import Confirmation
from megatron_prism.features.hang.planting import PlantedFaults
from megatron_prism.features.hang.state import JobState
from megatron_prism.features.hang.verdict import Culprit, Diagnosis, Waiting
from megatron_prism.graph import stall, world_graph
from megatron_prism.graph.matching import Finding
from megatron_prism.graph.stall import StalledJob
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.priced_graph import WhatIf, price

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
        return diagnose_graph(world_graph.build(programs))
    found = dumps if isinstance(dumps, DumpSet) else read(dumps)
    later = then if isinstance(then, DumpSet) or then is None else read(then)
    verdict = analyze.diagnose_dumps(found, later)
    found = later or found
    return verdict if programs is None else judged(found, verdict, programs)[0]


def judged(
    dumps: DumpSet, verdict: Diagnosis, programs: Programs
) -> tuple[Diagnosis, Confirmation]:
    """(the verdict held against the job's programs, where every rank stood in them)."""
    verdict = hypotheses.explain(dumps, verdict, programs)
    placed = hypotheses.confirm_verdict(dumps, verdict, programs)
    named = {culprit.rank for culprit in verdict.culprits}
    shown = [place for place in placed.places if place.rank in named]
    # thousands of ranks that only wait would bury the place of the culprit
    others = [place for place in placed.places if place.rank not in named]
    shown += others[: _SHOWN - len(shown)]
    calls = {rank: _call(programs, rank, index) for rank, index in sorted(placed.stops.items())}
    # a command that misses a culprit is no better than the one that the dumps gave
    exact = calls and (named <= calls.keys() or not verdict.stop)
    verdict = dataclasses.replace(
        verdict,
        places=tuple(map(str, shown)),
        tried=placed.lines,
        confirmed=placed.confirmed,
        decides=advice.what_decides(verdict, JobState(dumps), programs=True),
        stop=advice.stop_command(calls, programs.world.size) if exact else verdict.stop,
    )
    return verdict, placed


def _call(programs: Programs, rank: int, index: int) -> str:
    """Return the first call of ``rank`` from op ``index`` of its program on, as a breakpoint."""
    ops = list(programs.of(rank))
    first = 0
    for place in range(index, len(ops)):
        if ops[place].group:
            first = place
            break
    op = ops[first]

    # its number among the calls that read the same
    # a line makes the same call in every layer: only the count names this one
    number = 1
    for earlier in ops[:first]:
        if _breakpoint_key(earlier) == _breakpoint_key(op):
            number += 1
    call = advice.breakpoint_at(f"{op.label} {op.name} of {op.group}", op.site)
    return f"{call} nth={number}"


def _breakpoint_key(op: Op) -> tuple[str, ...]:
    """Return what a breakpoint compares."""
    return op.label, op.name, op.group, op.site


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
        # a folder that may not be replaced is refused before the run, not behind it
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
    verdict = diagnose_stall(state, told=lambda part: told("the dumps of all ranks", part))
    # a slow rank hangs nobody, and a bare `healthy` would hide what it costs
    if state.finished and any(fault.only_time for fault in planned):
        told("replaying both worlds")
        verdict = dataclasses.replace(verdict, tried=(_cost(programs, planted),))
    return PlantedDiagnosis(verdict, planted)


def _cost(programs: Programs, planted: PlantedFaults) -> str:
    """What faults that only cost time cost, by a replay of both worlds."""
    healthy = price(programs)
    faulty = price(planted.programs, what_if=WhatIf(edits=planted.edits))
    before, after = healthy.timeline.iteration_ns, faulty.timeline.iteration_ns
    more = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    return (
        f"an iteration takes {after / 1e6:,.3f} ms instead of {before / 1e6:,.3f} ms{more} by "
        f"the replay on {healthy.machine.name}; nobody's watchdog fires"
    )


_RECORDED = (64, 0)  # calls of each rank that are judged around the first that waits; 0: all


def diagnose_graph(graph: WorldGraph) -> Diagnosis:
    """Healthy, or who makes the programs hang: by the calls that do not match, else by the dumps
    that they would leave.
    """
    if findings := graph.check():
        return _mismatch(graph, findings)
    return diagnose_stall(stall.run_until_stalled(graph.programs))


def _mismatch(graph: WorldGraph, findings: list[Finding]) -> Diagnosis:
    """By calls that do not match: the rank that is the odd one in most of them, and all of its
    class.
    """
    votes = Counter(rank for finding in findings for rank in _odd(graph, finding))
    classes = graph.classes
    named = {int(classes.of[r]) for r, n in votes.items() if n == max(votes.values())}
    ranks = sorted(r for number in named for r in classes.ranks(number).tolist())
    first = next((f for f in findings if votes.keys() & set(f.ranks)), findings[0])
    line = next((x for x in first.picture.splitlines() if "<-- here" in x), first.picture)
    words = [*line.partition(f"#{first.number} ")[2].split(), "", ""]
    victims = [
        Waiting(r, tuple(ranks), words[1], first.group, first.number)
        for r in _members(graph, first)
        if r not in ranks
    ]
    evidence = [f"{f.kind} in {f.group}, call #{f.number}: {f.likely}" for f in findings]
    # a vote without a majority must not name a rank: it may be the healthy one
    if not ranks:
        evidence.append(
            "no majority, among the members or the ranks of their stages, says which "
            f"of ranks {format_ranks(first.ranks)} is wrong"
        )
    return Diagnosis(
        "mismatch",
        tuple(Culprit(r, _kind(graph, first, r), first.likely) for r in ranks),
        tuple(victims),
        first.group,
        words[1],
        first.number,
        "certain" if ranks else "possible",
        evidence=tuple(evidence),
        chain=tuple(first.picture.splitlines()),
    )


def _odd(graph: WorldGraph, finding: Finding) -> list[int]:
    """Return the votes of a finding for ranks that err, a rank once for each vote."""
    world, program_of = graph.programs.world, graph.programs.program_of
    stages = world._along("pp", np.arange(world.size))

    # a rank that runs another program than most of its stage
    erring: list[int] = []
    for rank in set(finding.ranks):
        counts = Counter(program_of[stages == stages[rank]].tolist())
        if counts[int(program_of[rank])] < max(counts.values()):
            erring.append(rank)
    if len(erring) == 1:
        return erring

    # where a group has a majority, both ranks, and more the one that others contradict
    if len(_members(graph, finding)) > 2:
        return [*finding.ranks, finding.ranks[1]]
    return []


def _members(graph: WorldGraph, finding: Finding) -> list[int]:
    """Who meets in the call of ``finding``; a wait for nothing is of no group."""
    known = graph.groups.get(finding.group)
    return [] if known is None else known.group(finding.ranks[0]).tolist()


def _kind(graph: WorldGraph, finding: Finding, rank: int) -> str:
    """What is wrong with the call of ``rank``: it is left out, made once too often, or differs."""
    programs, unmatched = graph.programs, finding.kind.startswith("unmatched")
    if finding.kind != "missing" and not unmatched:
        return finding.kind
    stages = programs.world._along("pp", np.arange(programs.world.size))
    like = np.flatnonzero(stages == stages[rank]) if unmatched else [rank, *finding.ranks]
    of = programs.program_of
    calls = {n: len(programs.programs[n].groups().get(finding.group, ())) for n in {*of[like]}}
    return "extra call" if calls[of[rank]] > min(calls.values()) else "skipped call"


def diagnose_stall(
    state: StalledJob,
    healthy: Programs | None = None,
    told: Callable[[float], None] | None = None,
) -> Diagnosis:
    """The verdict from the dumps that ``state`` leaves.

    healthy : the programs of the job; they decide between ranks of which dumps cannot tell
    told    : is told which part of the dumps is there, 0 to 1: 1,024 ranks may take a minute
    """
    if state.finished:
        return Diagnosis("healthy")
    for last in _RECORDED:
        dumps = {}
        with no_collector():
            for rank, value in export.dumps_of(state, last=last):
                dumps[rank] = of_value(value, rank)
                if told is not None:
                    told((rank + 1) / state.programs.world.size)
        found = analyze.diagnose_dumps(DumpSet(dumps))
        found = dataclasses.replace(found, missing=(), decides="")  # all is known already
        if found.verdict == "missing dump":  # no file was lost
            found = dataclasses.replace(found, confidence="likely")
        if found.culprits:
            break
    if healthy is not None and not found.culprits:
        found = hypotheses.explain(DumpSet(dumps), found, healthy)
    # planted faults: only the dumps may speak, as after a real hang
    if found.culprits or state.faults:
        return found
    graph = world_graph.build(state.programs)
    seen = _mismatch(graph, findings) if (findings := graph.check()) else found
    return seen if seen.culprits else found
