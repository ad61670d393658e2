"""What the reader of launch lines (``job_line``) asks about scripts that start a job."""

from megatron_prism.features.scripts.dry_commands import starts_launcher
from megatron_prism.features.scripts.dry_run import dry_run

__all__ = ["dry_run", "starts_launcher"]
