"""Flags of launch scripts, which the launch line's reader (``job_line``) asks for."""

from megatron_prism.emulate.command_line.job_flags import JobFlags, switch, value

JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-allow-writes": switch(
                "a script that runs dry also makes new files and folders outside the working folder"
            ),
            "--prism-dry-run-limit": value(
                "seconds after which a script that has started no job is stopped (default: 20)", "S"
            ),
            "--prism-map": value(
                "NEW stands for the path OLD of a script or launch line, such as a checkout or "
                "data; may be given several times",
                "OLD=NEW",
                action="append",
            ),
        },
    ),
)
