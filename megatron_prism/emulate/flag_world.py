"""Which world does a command line mean, and which of its ranks run here?

From our flags, the job's own parallel sizes and what a launcher put into the environment.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping

from megatron_prism.core.errors import UsageError, WorldError
from megatron_prism.core.world import World, implied_size

__all__ = ["SIZES", "local_ranks", "processes", "queues", "target_world", "without_engine"]

# Megatron's own arguments that fix the smallest world (training/arguments.py @0.16.1, 0.19.0)
SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
}


def processes(env: Mapping[str, str]) -> tuple[int, int, bool]:
    """(this process, number of processes, whether a launcher set the variables)."""
    if "TORCHELASTIC_RUN_ID" in env or "LOCAL_WORLD_SIZE" in env:
        process, k = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
        if not 0 <= process < k:
            raise UsageError(
                f"RANK={process} is none of WORLD_SIZE={k} processes",
                fix="start with torchrun, or unset TORCHELASTIC_RUN_ID and LOCAL_WORLD_SIZE",
            )
        return process, k, True
    return 0, 1, False


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={env[name]} is no number", fix=f"unset {name}") from None


def target_world(args: argparse.Namespace, env: Mapping[str, str], launched: bool, k: int) -> World:
    given = {name: getattr(args, name) for name in ("tp", "pp", "cp", "ep")}
    sizes = {name: 1 if size is None else size for name, size in given.items()}
    sizes["etp"] = sizes["tp"] if args.etp is None else args.etp
    for name, size in sizes.items():
        if size < 1:
            raise WorldError(f"{name} is {size}", fix="parallel sizes are positive numbers")
    size = args.prism_world_size
    if size is None and not launched and "WORLD_SIZE" in env:
        size = _number(env, "WORLD_SIZE", 1)
    if size is None:
        size = implied_size(**sizes)
        while size < k:  # more processes than the smallest world: add data-parallel replicas
            size += implied_size(**sizes)
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    try:
        return World(size=size, order=order, **sizes)
    except WorldError as error:
        raise WorldError(error.message, fix=_in_flags(error.fix)) from None


def _in_flags(fix: str | None) -> str | None:
    """``size=56`` of a World's fix as the flag that says it."""
    names = {name: flag for flag, name in SIZES.items()} | {"size": "--prism-world-size"}
    pattern = rf"\b({'|'.join(names)})=(?=\d)"
    return fix and re.sub(pattern, lambda found: f"{names[found[1]]}=", fix)


def local_ranks(
    args: argparse.Namespace, world: World, env: Mapping[str, str], launched: bool, k: int
) -> tuple[int, ...]:
    if args.prism_ranks is None:
        first = 0 if launched else _number(env, "RANK", 0)
        ranks = tuple(range(first, first + k))
    else:
        text = str(args.prism_ranks)
        ranks = tuple(world.select(text))
        named = "=" not in text
        if len(ranks) > k and named:
            raise UsageError(
                f"--prism-ranks {text} names {len(ranks)} ranks, but there "
                f"{'is one process' if k == 1 else f'are {k} processes'}",
                fix=f"start with torchrun --nproc-per-node {len(ranks)}, one process per rank",
            )
        ranks = ranks[:k]  # a coordinate selector matches many equal ranks: take the first k
    if len(ranks) < k:
        raise UsageError(
            f"{k} processes were started, but --prism-ranks {args.prism_ranks} names {len(ranks)}",
            fix=f"name {k} ranks, or start {len(ranks)} processes",
        )
    for rank in ranks:
        if not 0 <= rank < world.size:
            raise WorldError(
                f"rank {rank} is outside the world of {world.size} ranks",
                fix=f"choose a rank between 0 and {world.size - 1}, or raise --prism-world-size",
            )
    return ranks


def queues() -> str:
    """CUDA_DEVICE_MAX_CONNECTIONS where nothing is said: FSDP refuses the one that others
    need, and CUDA's own choice is 8."""
    return "8" if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(sys.argv) else "1"


def without_engine() -> bool:
    """Whether the job asks for local layers: who does mostly has no Transformer Engine, nor its
    optimizer, and Megatron takes torch's AdamW."""
    words, flag = sys.argv, "--transformer-impl"
    given = [b for a, b in zip(words, [*words[1:], ""], strict=True) if a == flag]
    given += [word.partition("=")[2] for word in words if word.startswith(flag + "=")]
    return bool(given) and set(given) == {"local"}
