"""The flag of a capture that also records what streams do with memory: ``--prism-streams``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
class StreamOptions(FeatureOptions):
    """That the accesses of an iteration are recorded, by stream."""

    @property
    def looks_at_every_call(self) -> bool:
        """See ``FeatureOptions``: each microbatch runs, since none proves anything of another."""
        return True


def read(parsed: ParsedFlags) -> StreamOptions | None:
    """Read the flag.  UsageError on a tier whose streams are not those of the job."""
    if not parsed.args.prism_streams:
        return None
    parsed.check_tier_has_shapes("--prism-streams", "records shapes")
    return StreamOptions()


def attach(run: Run, session: Session, options: StreamOptions) -> None:
    """Have a capture record the accesses, too.  UsageError without a capture."""
    from megatron_prism.features.streams import recording

    run.options.check_captures("--prism-streams", "records beside a slice")
    recording.add_to(run, session)


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-streams": switch(
                "of a capture on tier meta: record the memory that streams read and write, for "
                "prism check --streams"
            ),
        },
        read=read,
        attach=attach,
        place=AttachOrder.OUTPUT,
    ),
)
