"""The flag of a capture that also loads, evaluates and saves: ``--prism-life``."""

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
class LifeOptions(FeatureOptions):
    """That the captured job loads its checkpoint, and evaluates and saves at its end."""

    @property
    def loads_own_layout(self) -> bool:
        """See ``FeatureOptions``: what loading takes follows from the layout."""
        return True


def read(parsed: ParsedFlags) -> LifeOptions | None:
    """Read the flag.  UsageError on a tier that does not count bytes of the device."""
    if not parsed.args.prism_life:
        return None
    parsed.check_tier_has_shapes("--prism-life", "weighs shapes")
    return LifeOptions()


def attach(run: Run, session: Session, options: LifeOptions) -> None:
    """Have the job go on to its end once its slice is complete.  UsageError without a capture."""
    from megatron_prism.features.life import ending

    run.options.check_captures("--prism-life", "keeps peaks in a slice")
    ending.add_to(run)


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-life": switch(
                "of a capture on tier meta: load a checkpoint of the job's layout where --load is "
                "not here, evaluate and save, for the memory of these parts in prism fit"
            ),
        },
        read=read,
        attach=attach,
        place=AttachOrder.OUTPUT,
    ),
)
