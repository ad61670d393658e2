"""What the flags of faults say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core.world import World, format_ranks
from megatron_prism.emulate.command_line.job_flags import FeatureOptions
from megatron_prism.features.hang.fault_plan import Fault


@dataclass(frozen=True)
class FaultOptions(FeatureOptions):
    """Faults to make happen, and how calls are checked.

    Args:
        faults: the plan.
        seed: draws the ranks of ``rank=any:K``.
        dry_run: say which call each fault would hit, and make none happen.
        programs: folder or file of the world's programs; None: there are none.
        strict: check calls, against ``programs`` or those of the other local ranks.
        check_order: also refuse a call that leaves the order of the rank's own program.
        policy: strict, or let through what nccl or gloo lets through.
        truth: file for what was injected.
    """

    faults: tuple[Fault, ...]
    seed: int
    dry_run: bool
    programs: Path | None
    strict: bool
    check_order: bool = False
    policy: str = "strict"
    truth: Path | None = None

    @property
    def looks_at_every_call(self) -> bool:
        """See ``FeatureOptions``: calls of every step are checked or hit."""
        return True

    @property
    def needs_sizes(self) -> str:
        """See ``FeatureOptions``: faults name ranks by their coordinates."""
        return "--prism-fault"

    def slow_ranks(self, world: World, local_ranks: Sequence[int]) -> str:
        """See ``FeatureOptions``: the virtual ranks that a fault makes slow."""
        parts = []
        for fault in self.faults:
            virtual = set(fault.ranks(world, self.seed)) - set(local_ranks)
            if fault.kind == "slow" and virtual:
                parts.append(f"{format_ranks(virtual)}:{fault.factor('factor', 2):g}")
        return ";".join(parts)
