"""The flag of launch scripts: ``--prism-allow-writes``, which the launch line's reader asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_prism.emulate.job_flags import (
    AttachOrder,
    FeatureOptions,
    JobFlags,
    ParsedFlags,
    switch,
)

if TYPE_CHECKING:
    from megatron_prism.emulate.session import Run, Session


def read_nothing(parsed: ParsedFlags) -> None:
    """Return None: the flag is of the script, which has ended when the job starts."""
    return


def attach_nothing(run: Run, session: Session, options: FeatureOptions) -> None:
    """Do nothing: ``read_nothing`` makes no options."""


JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-allow-writes": switch(
                "a script that runs dry also makes new files and folders outside the working folder"
            ),
        },
        read=read_nothing,
        attach=attach_nothing,
        place=AttachOrder.OUTPUT,
    ),
)
