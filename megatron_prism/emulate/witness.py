"""What does a rank's real code call, and where is it when it comes to one call?  A Guard looks.

In : the programs of the world, the number of the call in question.  Out: the calls of one steady
iteration as Ops, each compared with what the peers' programs say, and the Python frames at that
call.  It stops nothing: the iteration goes on, which is the counterfactual.  Runs in the worker
that trains the suspect (``rank_job``); ``confirm`` is the other side.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_prism.core.ops import Op
from megatron_prism.emulate.call_guard import Guard
from megatron_prism.emulate.hang_flags import HangOptions
from megatron_prism.runtime.frames import frames
from megatron_prism.runtime.recorder.fields import details

if TYPE_CHECKING:
    from megatron_prism.core.world import World
    from megatron_prism.runtime.devices import Tier
    from megatron_prism.runtime.process_group import PrismGroup
    from megatron_prism.runtime.signatures import Args, Kwargs

__all__ = ["Watch", "Witness"]

_ITERATION = 2  # the first steady one


@dataclasses.dataclass(frozen=True)
class Watch:
    """programs: folder or file of the world; call: how many calls of the iteration come before the
    one in question."""

    programs: Path
    call: int


class Witness(Guard):
    """Follows calls as a Guard does; ``said`` is what it has seen."""

    def __init__(self, world: World, rank: int, tier: Tier, watch: Watch) -> None:
        options = SimpleNamespace(world=world, rank=rank, ranks=(rank,))
        super().__init__(options, HangOptions((), 0, False, watch.programs, True), tier, None)
        self.watch = watch
        self.calls: list[dict[str, object]] = []
        self.frames: list[str] = []
        self.differs: list[str] = []

    def _check(self, group: PrismGroup, op: str, args: Args, kwargs: Kwargs, site: str) -> None:
        if self.iteration == _ITERATION:
            if len(self.calls) == self.watch.call:
                self.frames = frames()
            fields = details(group, op, args, kwargs)
            kept = {k: v for k, v in fields.items() if k in ("dtype", "num_in", "num_out")}
            self.calls.append({"name": op, "group": group.desc, "site": site, **kept})
        super()._check(group, op, args, kwargs, site)

    def _fail(self, kind: str, call: Op, number: int, *more: Any) -> None:
        found = more[1] if len(more) > 1 else ()
        self.differs.append(f"{call.name} #{number + 1} of {call.group}: {'; '.join(found)}")

    def said(self) -> dict[str, object]:
        """Plain values: calls, frames at the call in question, what peers would call otherwise."""
        return {"calls": self.calls, "frames": self.frames, "differs": self.differs,
                "compared": self._compared}  # fmt: skip
