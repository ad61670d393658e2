"""The flag of a planned rank: ``--prism-plan-load``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line.job_flags import (
    AttachOrder,
    FeatureOptions,
    JobFlags,
    ParsedFlags,
    switch,
)

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run, Session


@dataclass(frozen=True)
class PlanOptions(FeatureOptions):
    """That the rank ends when it has planned what it reads."""


def read(parsed: ParsedFlags) -> PlanOptions | None:
    """Read the flag.  UsageError where the rank would have values."""
    if not parsed.args.prism_plan_load:
        return None
    # on tiers with values the job would read them
    if parsed.args.prism_tier != "meta":
        raise UsageError("--prism-plan-load reads no values", fix="--prism-tier meta")
    return PlanOptions()


def attach(run: Run, session: Session, options: PlanOptions) -> None:
    """Have the rank tell its plan, and end."""
    from megatron_prism.features.reshard import planned_rank

    planned_rank.add_to(run, session)


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-plan-load": switch(
                "tier meta: end the job once this rank has planned what it reads of --load"
            ),
        },
        read=read,
        attach=attach,
        place=AttachOrder.OUTPUT,
    ),
)
