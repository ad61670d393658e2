"""What the reader of launch lines (``emulate.job_line``) asks about scripts that start a job."""

from collections.abc import Sequence

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate import options
from megatron_prism.emulate.obstacles import Obstacles
from megatron_prism.emulate.path_map import PathMap
from megatron_prism.features.scripts.dry_commands import starts_launcher
from megatron_prism.features.scripts.dry_run import LIMIT_S, DryOptions, dry_run

__all__ = ["dry_run", "options_of", "starts_launcher"]


def options_of(given: Sequence[str], python: str, obstacles: Obstacles | None) -> DryOptions:
    """Read how a script is run dry from our flags.

    Args:
        given: flags of ours.
        python: the script of Python that starts the launcher, if one does.
        obstacles: gets what only the user can say; None raises that.

    Raises:
        UsageError: a limit that is no number of seconds above 0.
    """
    limit_text = options.value_of("--prism-dry-run-limit", given) or str(LIMIT_S)
    try:
        limit_s = float(limit_text)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise UsageError(
            f"--prism-dry-run-limit {limit_text} is no number of seconds",
            fix="--prism-dry-run-limit 120",
        )
    return DryOptions(
        gpus=options.value_of("--prism-gpus-per-node", given),
        python=python,
        writes="--prism-allow-writes" in given,
        limit_s=limit_s,
        paths=PathMap.parse(options.values_of("--prism-map", given)),
        obstacles=obstacles,
    )
