"""What the flags of pacing say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_prism.emulate.command_line.job_flags import FeatureOptions


@dataclass(frozen=True)
class PaceOptions(FeatureOptions):
    """What ``--prism-pace`` and ``--prism-slow`` say.

    Args:
        folder: of the slices by which virtual ranks answer.
        slow: virtual ranks that are slower, as ``ranks:factor;ranks:factor``.
    """

    folder: Path
    slow: str = ""

    @property
    def needs_sizes(self) -> str:
        """See ``FeatureOptions``: the slices are of one world."""
        return "--prism-pace"
