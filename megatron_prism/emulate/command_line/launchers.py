"""Launchers of this process: torchrun, srun or none, by their environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_prism.core.errors import UsageError


def processes(env: Mapping[str, str]) -> tuple[int, int, bool]:
    """(this process, number of processes, whether a launcher set the variables)."""
    if "TORCHELASTIC_RUN_ID" in env or "LOCAL_WORLD_SIZE" in env:
        process, k = number_in(env, "RANK", 0), number_in(env, "WORLD_SIZE", 1)
        if not 0 <= process < k:
            raise UsageError(
                f"RANK={process} is none of WORLD_SIZE={k} processes",
                fix="start with torchrun, or unset TORCHELASTIC_RUN_ID and LOCAL_WORLD_SIZE",
            )
        return process, k, True
    if _by_srun(env):
        return number_in(env, "SLURM_PROCID", 0), number_in(env, "SLURM_STEP_NUM_TASKS", 1), True
    return 0, 1, False


def _by_srun(env: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of a step of srun.  A batch script, and a job that srun
    starts with one task, have SLURM_PROCID too, and nobody to wait for.
    """
    return number_in(env, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in env


def is_first(env: Mapping[str, str]) -> bool:
    """Whether this process tells what is wrong with the command line of all that were started."""
    return env.get("SLURM_PROCID" if _by_srun(env) else "RANK") in (None, "", "0")


def processes_here(env: Mapping[str, str], k: int) -> int:
    """How many of ``k`` processes are on this host."""
    if "LOCAL_WORLD_SIZE" in env:
        return number_in(env, "LOCAL_WORLD_SIZE", k)
    on_each = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "4(x2)"
    return min(k, int(on_each[0])) if on_each and _by_srun(env) else k


def launcher_variables(env: Mapping[str, str]) -> dict[str, str]:
    """LOCAL_RANK and where the processes of a job meet, as far as ``env`` does not say it.

    Raises UsageError where tasks of srun on several hosts have not been told where to meet.
    """
    variables = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    if _by_srun(env) and "LOCAL_WORLD_SIZE" not in env:
        variables["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
        if number_in(env, "SLURM_STEP_NUM_NODES", 1) > 1 and "MASTER_ADDR" not in env:
            raise UsageError(
                "srun started tasks on several hosts, and MASTER_ADDR does not say where they meet",
                fix="export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)",
            )
    return {name: text for name, text in variables.items() if name not in env}


def number_in(env: Mapping[str, str], name: str, default: int) -> int:
    """The number that a variable says, unless it is empty; UsageError for what is none."""
    try:
        return int(env.get(name) or default)
    except ValueError:
        raise UsageError(f"{name}={env[name]} is no number", fix=f"unset {name}") from None
