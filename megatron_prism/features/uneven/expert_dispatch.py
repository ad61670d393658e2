"""What the flex dispatcher does if ranks have other counts of tokens.

In : the settings of a job, and programs of all ranks.  Out: the rule of its backend, and dispatches
of which the members of a group send other counts though the backend takes equal ones.

DeepEP exchanges counts before tokens, as an all-to-all does.  HybridEP sizes its buffers and the
routing map of all ranks by the own count (deepseek-ai/DeepEP issue 604), so counts must be equal;
``moe_hybridep_pad_uneven_dispatch_inputs`` pads them to the largest of the group, rounded up to
a multiple of 64, the chunk of the kernels (core/transformer/moe/token_dispatcher.py:1061
_HybridEPManager.setup_metadata, fused_a2a.py:281 @0.19.0).  Unpadded counts need no such multiple,
but a rest by 64 that fits the kernels' loads of 16 bytes (DeepEP hybrid-ep executor
metadata_preprocess_core), of which nothing is known here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

import numpy as np

from megatron_prism.core.programs.ops import CODE, Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.graph.matching import Finding

_DISPATCH = CODE["dispatch"]


class DispatchRule(enum.Enum):
    """What a dispatcher does with other counts of tokens."""

    EXCHANGED = "exchanged"  # ranks tell each other their counts
    EQUAL = "equal"  # it takes equal counts
    PADDED = "padded"  # it makes them equal


def dispatch_rule(settings: Mapping[str, str]) -> DispatchRule:
    """Find the rule of a job.

    Args:
        settings: By Megatron's names.
    """
    is_flex = settings.get("moe_token_dispatcher_type") == "flex"
    # DeepEP and all-to-alls exchange counts before tokens
    if not is_flex or settings.get("moe_flex_dispatcher_backend") != "hybridep":
        return DispatchRule.EXCHANGED
    if settings.get("moe_hybridep_pad_uneven_dispatch_inputs", "").lower() == "true":
        return DispatchRule.PADDED
    return DispatchRule.EQUAL


def is_routing_map(op: Op) -> bool:
    """Whether a call gathers which experts the tokens of all ranks go to."""
    return op.name == "all_gather" and "token_dispatcher.py" in op.site


def unequal_dispatches(programs: Programs) -> Iterator[Finding]:
    """Find the first dispatch of each group of which members send other counts of tokens.

    One group of each arrangement of programs is looked at.
    """
    world = programs.world
    seen: set[tuple[str, bytes]] = set()
    for rank in range(world.size):
        program = programs.of(rank)
        for group, calls in _dispatches(program).items():
            ranks = world.group(rank, group) or ()
            arrangement = group, programs.program_of[list(ranks)].tobytes()
            # each group once, by its lowest rank; groups that run the same programs find the same
            if rank != min(ranks, default=-1) or arrangement in seen:
                continue
            seen.add(arrangement)
            for other_rank in ranks[1:]:
                other = programs.of(other_rank)
                other_calls = _dispatches(other).get(group, calls[:0])
                # that one rank has more of them is found by the matching of calls
                common = min(len(calls), len(other_calls))
                sent = program.ops["num_in"][calls[:common]]
                other_sent = other.ops["num_in"][other_calls[:common]]
                unlike = np.flatnonzero(sent != other_sent)
                if unlike.size:
                    number = int(unlike[0])
                    op = program[int(calls[number])]
                    other_op = other[int(other_calls[number])]
                    yield _finding(group, (rank, other_rank), number, (op, other_op))
                    break


def _dispatches(program: Program) -> dict[str, np.ndarray]:
    """List the dispatches of a program by group: int64 [calls]."""
    calls = np.flatnonzero(program.ops["name"] == _DISPATCH)
    by_group: dict[str, np.ndarray] = {}
    for code in np.unique(program.ops["group"][calls]).tolist():
        of_group = program.ops["group"][calls] == code
        by_group[program.strings[code]] = calls[of_group]
    return by_group


def _finding(group: str, ranks: tuple[int, int], number: int, ops: tuple[Op, Op]) -> Finding:
    """Show two dispatches that differ."""
    lines: list[str] = []
    sizes: list[str] = []
    for rank, op in zip(ranks, ops, strict=True):
        lines.append(
            f"  rank {rank}  #{number + 1} {op.label} dispatch {op.dtype} in={op.num_in} "
            f"shape={op.shape} @{op.site}"
        )
        sizes.append(f"rank {rank} dispatches {op.num_in:,} elements")
    dispatched = " and ".join(sizes)
    likely = f"{dispatched}; HybridEP takes equal counts of tokens on all ranks of the group"
    return Finding("shape", group, ranks, number + 1, "\n".join(lines), likely)
