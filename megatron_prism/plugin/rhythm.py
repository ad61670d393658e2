"""``--prism-capture NEW --prism-pace OLD``: capture a rank in the rhythm that ``OLD`` replays in.

In : the options, and what the rank's slices must have alike.  Out: a ``slicer.rhythm.Rhythm``.
"""

from __future__ import annotations

from typing import Any

from megatron_prism.plugin import pace
from megatron_prism.replay import timeline
from megatron_prism.slicer.rhythm import Rhythm, pauses

__all__ = ["of_slices"]


def of_slices(options: Any, source: dict[str, str]) -> Rhythm:
    """When the local rank's device pauses, as the slices in ``options.pace`` replay.

    UsageError for slices of another job, PrismError for slices that do not fit together.
    """
    world, prices, _ = pace.priced(options, source)[1:]
    line = timeline.replay(world, prices, iterations=3)
    index = int(world.classes.of[options.rank])
    return pauses(world.program_list[index], line.spans(index), line.lanes.index("main"))
