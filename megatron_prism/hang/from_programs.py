"""Who is to blame for a standstill of programs?  Judged by the dumps that it would leave.

In : ``quiescence.Standstill``.  Out: Diagnosis.  The verdict sees the dumps and nothing else, as
after a real hang; only where they cannot decide (they know no splits) are the programs compared,
and, where a job knows them, the programs as they should be (``explain``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_prism.core.programs import Programs
from megatron_prism.graph import world_graph
from megatron_prism.graph.stall import Standstill
from megatron_prism.hang import dump_reader, export, watchdog
from megatron_prism.hang.analyze import of_dumps, of_graph
from megatron_prism.hang.dumps import DumpSet
from megatron_prism.hang.hypotheses import explain
from megatron_prism.hang.verdict import Diagnosis

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from megatron_prism.hang.export import How
    from megatron_prism.replay.timeline import Timeline

__all__ = ["first_watchdog", "of_standstill"]


def of_standstill(
    state: Standstill,
    healthy: Programs | None = None,
    told: Callable[[float], None] | None = None,
    **how: Unpack[How],
) -> Diagnosis:
    """The verdict from the dumps that ``state`` leaves; ``how`` as in flight_export.dump_of.

    healthy : the programs of the job; they decide between ranks of which dumps cannot tell
    told    : is told which part of the dumps is there, 0 to 1: 1,024 ranks may take a minute
    """
    if state.finished:
        return Diagnosis("healthy")
    dumps = {}
    for rank, value in export.dumps_of(state, **how):
        dumps[rank] = dump_reader.of_value(value, rank)
        if told is not None:
            told((rank + 1) / state.programs.world.size)
    found = of_dumps(DumpSet(dumps))
    if healthy is not None and not found.culprits:
        found = explain(DumpSet(dumps), found, healthy)
    if found.culprits or state.faults:
        return found
    seen = of_graph(world_graph.build(state.programs))
    return seen if seen.culprits else found


def first_watchdog(state: Standstill, healthy: Timeline) -> str:
    """Whose watchdog would fire first, when, and what it prints; "" if nobody is left to say it.

    healthy : the Timeline of the programs without a fault; a call is issued when its rank is ready
    for it there.  Ranks whose programs a fault changed are left out: their own times are unknown
    """
    waits = []
    begin = healthy.ends[-2] if healthy.iterations > 1 else 0
    for rank in range(state.programs.world.size):
        fault = state.faults.get(rank)
        kept = int(state.programs.program_of[rank]) < len(healthy.graph.programs.programs)
        if not kept or fault is not None and fault.silent:
            continue
        ready = healthy.dag.ready_of[int(healthy.graph.classes.of[rank])][-1]
        done, program = state.done[rank], state.programs.of(rank)
        for index in range(state.issued[rank]):
            name = program.strings[program.ops["group"][index]] if ready[index] >= 0 else ""
            if not done[index] and name and len(state.groups[name].group(rank)) > 1:
                waits.append((int(healthy.node_end[ready[index]]) - begin, rank, name))
                break
    if not waits:
        return ""
    when, rank, name = min(waits)
    dump = dump_reader.of_value(export.dump_of(state, rank), rank)
    entry = next(e for e in dump.entries if not e.done and e.desc == name and e.op != "coalesced")
    due = when / 1e9 + entry.timeout_ms / 1e3
    return (f"modelled: rank {rank}, {due:.3f} s after the iteration began: "
            + watchdog.message(rank, entry))  # fmt: skip
