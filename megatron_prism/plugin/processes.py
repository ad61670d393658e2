"""Which of how many processes is this one?  What a launcher left in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_prism.errors import UsageError

__all__ = ["number", "processes"]


def processes(env: Mapping[str, str]) -> tuple[int, int, bool]:
    """(this process, number of processes, whether a launcher set the variables)."""
    if "TORCHELASTIC_RUN_ID" in env or "LOCAL_WORLD_SIZE" in env:
        process, k = number(env, "RANK", 0), number(env, "WORLD_SIZE", 1)
        if not 0 <= process < k:
            raise UsageError(
                f"RANK={process} is none of WORLD_SIZE={k} processes",
                fix="start with torchrun, or unset TORCHELASTIC_RUN_ID and LOCAL_WORLD_SIZE",
            )
        return process, k, True
    return 0, 1, False


def number(env: Mapping[str, str], name: str, default: int) -> int:
    """A variable that is a number; UsageError otherwise."""
    try:
        return int(env.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={env[name]} is no number", fix=f"unset {name}") from None
