"""``prism world``: a world of given sizes, and the groups of a rank in it.

In : ``key=value`` words, or a recipe.  Out: a page of text or JSON.  No torch, no Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.output import console, print_table, write_data
from megatron_prism.core.errors import UnitError, UsageError

if TYPE_CHECKING:
    from megatron_prism.core.world import World


def world(args: argparse.Namespace) -> int:
    """Show a world: its sizes, its stages, and one rank's coordinates and Megatron groups.

    prism world size=8192 tp=8 pp=16 --rank 1000
    prism world llama3-70b_1024gpu_tp8pp4vp5_h200 --rank pp=3,tp=0

    Sizes are size, tp, cp, pp, ep, etp, vpp, gpus_per_node and order; size may be left out.
    --rank is a rank or a selector; --megatron 0.19 lists the groups of that release (0.16 by
    default).
    """
    names: list[str] = []
    sizes = arguments.read(args.settings, _KEYS, "world", names=names)
    rank, release = args.rank, args.megatron
    the_world = _world(names, sizes)
    ranks = the_world.select(rank) if rank is not None else ()
    found = {
        str(r): {
            "coordinates": the_world.coordinates(r)._asdict(),
            "groups": the_world.groups(r, megatron=release),
        }
        for r in ranks
    }
    rows: list[dict[str, object]] = [
        {"rank": r, "group": name, "size": len(group), "ranks": group}
        for r, one in found.items()
        for name, group in one["groups"].items()
    ]
    if not found and args.csv is not None:
        stages = ((s, the_world.matching(pp=s).tolist()) for s in the_world.stages)
        rows = [{"stage": s, "size": len(all_of), "ranks": all_of} for s, all_of in stages]
    sizes = {"size": the_world.size, "vpp": the_world.vpp, **the_world.axis_sizes()}
    if write_data(args, {"sizes": sizes, "ranks": found}, rows):
        return 0
    _print_world(the_world, ranks, release)
    return 0


def _size(text: str) -> int:
    from megatron_prism.core import units

    found = units.parse_count(text)
    if found < 1:
        raise UnitError("sizes are positive numbers", fix="1 at least")
    return found


def release(text: str) -> tuple[int, int]:
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise UnitError("it is no release", fix="--megatron 0.19")
    return int(parts[0]), int(parts[1])


_SIZES = ("size", "tp", "cp", "pp", "ep", "etp", "vpp", "gpus_per_node")
_KEYS: dict[str, arguments.Reader] = {
    **dict.fromkeys(_SIZES, _size),
    "order": str,
}


def _world(names: Sequence[str], values: dict[str, Any]) -> World:
    """The world of a recipe, some sizes of which may be given otherwise."""
    from megatron_prism.core.world import MOST_RANKS, World, implied_size

    if len(names) > 1:
        raise UsageError(f"{' '.join(names)}: a world is that of one recipe", fix=names[0])
    for name in names:
        from megatron_prism.core import recipe

        job = recipe.load(name).world
        values = {**{key: getattr(job, key) for key in (*_SIZES, "order")}, **values}
    parts = {key: values[key] for key in ("tp", "cp", "pp", "ep", "etp") if key in values}
    size = values.pop("size", None) or implied_size(**parts)
    if size > MOST_RANKS:
        raise UsageError(f"{size:,} ranks are too many to list", fix=f"at most size={MOST_RANKS}")
    return World(size, **values)


def _print_world(the_world: World, ranks: Sequence[int], release: tuple[int, int]) -> None:
    from megatron_prism.core.world import format_ranks

    out = console()
    out.print(str(the_world))
    if not ranks:
        rows = [
            (f"stage {s}", format_ranks(the_world.matching(pp=s).tolist()))
            for s in the_world.stages
        ]
        print_table(("", "ranks"), rows)
    for rank in ranks:
        where = " ".join(f"{k} {v}" for k, v in the_world.coordinates(rank)._asdict().items())
        out.print(f"\nrank {rank}: {where}")
        groups = the_world.groups(rank, megatron=release, gloo=False)
        sizes = [(name, f"{len(g):,}", format_ranks(g)) for name, g in groups.items()]
        print_table(("group", "size", "ranks"), sizes)
