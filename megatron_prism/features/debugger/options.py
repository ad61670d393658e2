"""What the flags of the debugger say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_prism.emulate.command_line.job_flags import FeatureOptions


@dataclass(frozen=True)
class StopOptions(FeatureOptions):
    """Where a rank stops, and in which debugger.

    Args:
        stop: calls of ``--prism-break``; "" for none.
        watch: of which values ``--prism-watch`` waits; None for none.
        debugger: ``pdb`` or ``debugpy:[HOST:]PORT``; None for pdb.
    """

    stop: str = ""
    watch: str | None = None
    debugger: str | None = None

    @property
    def looks_at_every_call(self) -> bool:
        """See ``FeatureOptions``: any call may be the one to stop at."""
        return True

    @property
    def holds_calls(self) -> bool:
        """See ``FeatureOptions``: the user reads at the prompt."""
        return True


@dataclass(frozen=True)
class PayloadOptions(FeatureOptions):
    """Which payloads are kept or given back.

    Args:
        calls: of which calls a recording keeps what they deliver; None: of none.
        replay_from: folder of a recording whose payloads calls deliver again; None: of none.
    """

    calls: str | None = None
    replay_from: Path | None = None

    @property
    def looks_at_every_call(self) -> bool:
        """See ``FeatureOptions``: a recording has the calls of every step."""
        return self.calls is not None

    @property
    def records_calls(self) -> bool:
        """See ``FeatureOptions``: what virtual ranks deliver is kept, to compare it."""
        return self.calls is not None
