"""Who is to blame for a standstill of programs?  Judged by the dumps that it would leave.

In : ``quiescence.Standstill``.  Out: Diagnosis.  The verdict sees the dumps and nothing else, as
after a real hang; only where they cannot decide (they know no splits) are the programs compared.
"""

from __future__ import annotations

from typing import Any

from megatron_prism import flight_export, flight_recorder, graph
from megatron_prism.diagnosis import Diagnosis
from megatron_prism.flight_dump import DumpSet
from megatron_prism.hang import of_dumps, of_graph
from megatron_prism.quiescence import Standstill

__all__ = ["of_standstill"]


def of_standstill(state: Standstill, **how: Any) -> Diagnosis:
    """The verdict from the dumps that ``state`` leaves; ``how`` as in flight_export.dump_of."""
    if state.finished:
        return Diagnosis("healthy")
    values = flight_export.dumps_of(state, **how)
    found = of_dumps(DumpSet({r: flight_recorder.of_value(v, r) for r, v in values}))
    if found.culprits or state.faults:
        return found
    seen = of_graph(graph.build(state.programs))
    return seen if seen.culprits else found
