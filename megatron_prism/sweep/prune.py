"""Why points cannot run, found before anything is captured.

Two filters: what Megatron refuses (asked of Megatron itself), and a lower bound of the memory of
the first stage: a point that falls by it would be out of memory for certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prism.core.units import format_bytes
from megatron_prism.emulate.recipe_server import CaptureServer
from megatron_prism.memory.estimates import memory_bound
from megatron_prism.sweep.layout import RecipeLayout
from megatron_prism.sweep.space import SweepPoint

__all__ = ["MEGATRON", "MEMORY", "refused_by_megatron", "too_large"]

MEGATRON, MEMORY = "Megatron's checks", "memory bound"
_AT_ONCE = 64  # recipes of a request


def refused_by_megatron(points: Sequence[SweepPoint], server: CaptureServer) -> list[SweepPoint]:
    """The points, those that Megatron refuses with its words."""
    left = [point for point in points if not point.by and point.layout is not None]
    refusals: dict[str, str] = {}
    for start in range(0, len(left), _AT_ONCE):
        some = left[start : start + _AT_ONCE]
        asked = [point.layout for point in some if point.layout is not None]
        recipes = [one.recipe for one in asked if isinstance(one, RecipeLayout)]
        said = server.check(
            recipes, [one.command() for one in asked], [one.world.size for one in asked]
        )
        refusals |= dict(zip((point.key for point in some), said, strict=True))
    return [
        point.dropped(MEGATRON, refusals[point.key]) if refusals.get(point.key) else point
        for point in points
    ]


def too_large(points: Sequence[SweepPoint], limit: int) -> list[SweepPoint]:
    """The points, those whose first stage exceeds ``limit`` bytes with what it needs."""
    found = []
    for point in points:
        if not point.by and isinstance(point.layout, RecipeLayout):
            least = memory_bound(point.layout.recipe)
            if least > limit:
                said = f"needs at least {format_bytes(least)}, limit {format_bytes(limit)}"
                point = point.dropped(MEMORY, said)
        found.append(point)
    return found
