"""The flag of launch scripts: ``--prism-allow-writes``, which the launch line's reader asks for."""

from megatron_prism.emulate.job_flags import JobFlags, switch

JOB_FLAGS = (
    JobFlags(
        flags={
            "--prism-allow-writes": switch(
                "a script that runs dry also makes new files and folders outside the working folder"
            ),
        },
    ),
)
