"""What one planned rank tells: its part of the checkpoint and its memory, as JSON.

It runs in the rank's own process.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.patches import planned_reads
from megatron_prism.emulate.patches.planned_reads import PlannedRead
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.rank import exit_status
from megatron_prism.runtime.listeners import TrainingListener

if TYPE_CHECKING:
    from megatron_prism.emulate.processes.workers import Json
    from megatron_prism.emulate.rank.session import Run, Session


class PlanTeller(TrainingListener):
    """Tells the process that started this rank what the rank would read, and ends the job.

    Args:
        run: of this rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._emit = workers.emitter()

    def tell(self, read: PlannedRead) -> None:
        """Take the plan of this rank."""
        live = self._run.tier.live
        result = as_json(read)
        result["rank"] = self._run.options.rank
        result["load_peak"] = 0 if live is None else live.parts.get("load", 0)
        # a rank that somebody started by hand prints its plan
        if self._emit is None:
            print(json.dumps(result))
        else:
            self._emit("result", result=result)
        sys.stdout.flush()
        # the plan is all that is asked for: no training follows
        self._run.claims.close()
        exit_status.leave(0)

    def iteration_started(self, number: int, wanted: int, model: object, optimizer: object) -> None:
        """Refuse a job that trains without having read a checkpoint in this format."""
        raise UsageError(
            "the job read no checkpoint of the format torch_dist",
            fix="--ckpt-format torch_dist (the default), and a folder that has .metadata",
        )


def add_to(run: Run, session: Session) -> None:
    """Tell what this rank plans, and end it."""
    teller = PlanTeller(run)
    run.follow_training(teller)
    planned_reads.observers.append(teller.tell)
    session.changes.on_undo(lambda: planned_reads.observers.remove(teller.tell))


def as_json(read: PlannedRead) -> Json:
    """Write a plan as values of JSON."""
    # an enumeration becomes its text
    requests = []
    for request in read.requests.values():
        requests.append({**vars(request), "match": request.match.value})
    return {
        "requests": requests,
        "objects": sorted(read.objects),
        "taken_bytes": read.taken_bytes,
        "file_bytes": read.file_bytes,
        "largest_shard_bytes": read.largest_shard_bytes,
        "stand_in": read.stand_in,
        "refusal": read.refusal,
        "shifted_states": read.shifted_states,
    }
