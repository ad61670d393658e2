"""What would the timeline be if …?  Other programs or other prices, made from those at hand.

In : Programs, or a WorldGraph and its Prices.  Out: the same kind of value, changed; nothing is
changed in place.  What a function assumes is in ``Programs.source["what-if"]`` or in the new
provenance of the prices that it changed.

slow        : some ranks compute slower (``slowed`` applies it to prices)
apart       : some ranks in classes of their own, for faults of one rank
faster      : calls of one kind or group take another time
moved       : the same programs on another machine
data_parallel (in ``scale.py``): more or fewer replicas
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.membership import named_group
from megatron_prism.core.ops import CODE, NAMES, OP, UNKNOWN
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.core.selectors import format_ranks
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices, price
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.replay.costs.compute import MEASURED
from megatron_prism.replay.costs.machine import Machine

__all__ = ["apart", "assumed", "faster", "moved", "slow", "slowed", "used"]

_SLOWED = "slowed x"
_FINEST = 1000  # denominators of factors


def apart(programs: Programs, ranks: Iterable[int], why: str = "apart") -> Programs:
    """The same world, in which ``ranks`` say at their end what sets them apart: ``why``.

    So they are in other classes than the rest, and whatever they meet splits as far as it must.
    WorldError for a rank that does not exist.
    """
    chosen = np.unique([programs.world.check_rank(int(rank)) for rank in ranks]).astype(np.int64)
    of, more = programs.program_of.copy(), list(programs.programs)
    for index in np.unique(of[chosen]).tolist():
        mine = chosen[of[chosen] == index]
        of[mine] = len(more)
        more.append(_marked(programs.programs[index], int(mine[0]), why))
    return used(dataclasses.replace(programs, programs=tuple(more), program_of=of))


def used(programs: Programs) -> Programs:
    """The same world without programs that no rank runs."""
    kept, of = np.unique(programs.program_of, return_inverse=True)
    left = tuple(programs.programs[index] for index in kept.tolist())
    return dataclasses.replace(programs, programs=left, program_of=of.ravel())


def _marked(program: Program, rank: int, note: str) -> Program:
    """The program with a mark as its last op."""
    row = np.zeros(1, dtype=OP)
    for name in UNKNOWN:
        row[name] = -1
    strings = (*program.strings, note)
    row["name"], row["note"] = CODE["mark"], len(program.strings)
    row["stream"] = strings.index("main") if "main" in strings else 0
    ops = np.concatenate([program.ops, row])
    return dataclasses.replace(program, rank=rank, ops=ops, strings=strings)


def slow(programs: Programs, ranks: Iterable[int], factor: Fraction | float | str) -> Programs:
    """``ranks`` take ``factor`` times as long to compute (3/2: half as long again).

    The programs carry it as a mark; ``slowed`` puts it into prices.  Twice slow is the product.
    """
    ranks = list(ranks)
    made = apart(programs, ranks, f"{_SLOWED}{fraction(factor)}")
    return assumed(made, f"ranks {format_ranks(sorted(set(ranks)))} compute {factor} times as long")


def slowed(graph: WorldGraph, prices: Prices) -> Prices:
    """``prices``, with the segments of slow ranks as long as ``slow`` says, rounded up."""
    compute, source = list(prices.compute), list(prices.compute_source)
    sources = list(prices.sources)
    for index, program in enumerate(graph.program_list):
        marks = program.ops["note"][program.ops["name"] == CODE["mark"]]
        notes = [program.strings[note] for note in marks]
        factor = math.prod(
            (Fraction(n.removeprefix(_SLOWED)) for n in notes if n.startswith(_SLOWED)),
            start=Fraction(1),
        )
        if factor != 1:
            segments = program.ops["name"] == CODE["compute"]
            compute[index] = _scaled(prices.compute[index], factor)
            source[index] = _relabelled(source[index], segments, f"x {factor}", sources)
    return dataclasses.replace(
        prices, compute=tuple(compute), compute_source=tuple(source), sources=tuple(sources)
    )


def faster(
    graph: WorldGraph,
    prices: Prices,
    factor: Fraction | float | str,
    name: str = "",
    group: str = "",
) -> Prices:
    """Calls of ``name`` (all_reduce, …; send means messages) in ``group`` are ``factor`` times as
    fast; empty: all of them; tp means TENSOR_MODEL_PARALLEL_GROUP, as in faults.  UsageError if
    there are none."""
    speed = fraction(factor)
    name = "send" if name == "recv" else name
    meet = graph.rendezvous
    firsts, chosen = meet.start[:-1], np.zeros(len(meet), dtype=bool)
    owners, ops = meet.classes[firsts], meet.ops[firsts]
    for index, program in enumerate(graph.program_list):
        mine = np.flatnonzero(owners == index)
        rows = program.ops[ops[mine]]
        right = np.array([not name or text == name for text in NAMES])[rows["name"]]
        groups = np.array([not group or named_group(group, text) for text in program.strings])
        chosen[mine] = right & groups[rows["group"]]
    if not chosen.any():
        what = " in ".join(filter(None, (name or "calls", group)))
        names = sorted({text for program in graph.program_list for text in program.groups()})
        close = difflib.get_close_matches(group or name, [*NAMES, *names], n=1)
        meant = f"did you mean {close[0]}? " if close and close[0] != (group or name) else ""
        raise UsageError(
            f"the world has no {what}", fix=f"{meant}its groups are {', '.join(names)}"
        )
    sources = list(prices.sources)
    return dataclasses.replace(
        prices,
        meetings=np.where(chosen, _scaled(prices.meetings, 1 / speed), prices.meetings),
        meeting_source=_relabelled(prices.meeting_source, chosen, f"{speed} x as fast", sources),
        sources=tuple(sources),
    )


def moved(
    graph: WorldGraph, here: Machine, there: Machine, calibration: Calibration | None = None
) -> Prices:
    """Prices on ``there`` of programs whose segments were measured on ``here``.

    A measured segment is scaled by what the roofline says of it on the two machines; calls are
    ``there``'s.  A segment of which flops and bytes are unknown keeps its time.
    """
    unknown = [_unmeasured(program) for program in graph.programs.programs]
    bare = dataclasses.replace(graph, programs=_with(graph.programs, unknown))
    old, new = price(graph, here), price(graph, there, calibration)
    # both by roofline alone: one of them may have no op table
    base, roof = (price(bare, dataclasses.replace(one, ops="")) for one in (here, there))
    compute, source, sources = [], [], list(new.sources)
    for index in range(len(graph.classes)):
        measured = old.compute_source[index] == MEASURED
        before, after = base.compute[index], roof.compute[index]
        ratio = after / np.maximum(before, 1)
        ns = np.rint(old.compute[index] * np.where(before > 0, ratio, 1.0)).astype(np.int64)
        compute.append(np.where(measured, ns, new.compute[index]))
        what = f"scaled from {here.name} to {there.name} by their rooflines"
        source.append(_relabelled(new.compute_source[index], measured, what, sources))
    return dataclasses.replace(
        new, compute=tuple(compute), compute_source=tuple(source), sources=tuple(sources)
    )


def assumed(programs: Programs, what: str) -> Programs:
    """The programs, with one more thing that is not as captured in their source."""
    said = programs.source.get("what-if")
    text = what if said is None else f"{said}; {what}"
    return dataclasses.replace(programs, source={**programs.source, "what-if": text})


def _unmeasured(program: Program) -> Program:
    ops = program.ops.copy()
    known = (ops["flops"] >= 0) | (ops["traffic"] >= 0)
    ops["ns"][known] = -1
    return dataclasses.replace(program, ops=ops)


def _with(programs: Programs, changed: list[Program]) -> Programs:
    return dataclasses.replace(programs, programs=tuple(changed))


_MOST = 10**6  # times as long; more is none that anybody means, and 64 bits of ns end


def fraction(factor: Fraction | float | str) -> Fraction:
    """A factor as a ratio of small numbers.  UsageError unless it is one above 0."""
    try:
        found = Fraction(str(factor)).limit_denominator(_FINEST)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= _MOST:
        raise UsageError(
            f"{str(factor)[:40]} is no factor", fix="above 0, at most a million: 1.5, 3/2"
        )
    return found


def _scaled(ns: np.ndarray, factor: Fraction) -> np.ndarray:
    """ns times factor, rounded up."""
    return -(-ns * factor.numerator // factor.denominator)


def _relabelled(
    source: np.ndarray, chosen: np.ndarray, what: str, sources: list[str]
) -> np.ndarray:
    """Sources in which the chosen entries say ``what`` was assumed of them; extends ``sources``."""
    found = source.copy()
    for code in np.unique(source[chosen]).tolist():
        text = f"assumed: {what}, of {sources[code]}"
        if text not in sources:
            sources.append(text)
        found[chosen & (source == code)] = sources.index(text)
    return found
