"""``prism world``: a world of given sizes, and the groups of a rank in it.

In : ``key=value`` words, or a recipe.  Out: a page of text or JSON.  No torch, no Megatron.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_prism.cli.output import console, print_json, print_table
from megatron_prism.core.errors import UnitError, UsageError

if TYPE_CHECKING:
    from megatron_prism.core.world import World

__all__ = ["world"]

_MOST = 1 << 24  # ranks; a list of so many takes seconds


def world(args: argparse.Namespace) -> int:
    """Show a world: its sizes, its stages, and one rank's coordinates and Megatron groups.

    prism world size=8192 tp=8 pp=16 rank=1000
    prism world llama3-70b_1024gpu_tp8pp4vp5_h200 rank=pp=3,tp=0

    Sizes are size, tp, cp, pp, ep, etp, vpp and order; size may be left out.  rank is a rank or a
    selector; megatron=0.19 lists the groups of that release (0.16 by default).
    """
    sizes, rank, release = _world_settings(args.settings)
    the_world = _world(sizes)
    ranks = the_world.select(rank) if rank is not None else ()
    if args.json:
        print_json(
            {
                "sizes": {"size": the_world.size, "vpp": the_world.vpp, **the_world.axis_sizes()},
                "ranks": {
                    str(r): {
                        "coordinates": the_world.coordinates(r)._asdict(),
                        "groups": the_world.groups(r, megatron=release),
                    }
                    for r in ranks
                },
            }
        )
        return 0
    _print_world(the_world, ranks, release)
    return 0


def _world_settings(words: Sequence[str]) -> tuple[dict[str, str], str | None, tuple[int, int]]:
    """(sizes, rank selector, megatron release) out of key=value words; RECIPE stands for sizes."""
    sizes: dict[str, str] = {}
    known = ("size", "tp", "cp", "pp", "ep", "etp", "vpp", "order", "rank", "megatron")
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            sizes["recipe"] = word
        elif key in known:
            sizes[key] = value
        else:
            close = difflib.get_close_matches(key.lstrip("-"), known, n=1)
            fix = f"did you mean {close[0]}={value}?" if close else f"use {', '.join(known)}"
            raise UsageError(f"prism world has no {key}", fix=fix)
    release = sizes.pop("megatron", "0.16").split(".")
    if len(release) < 2 or not all(part.isdigit() for part in release[:2]):
        raise UsageError(f"megatron={'.'.join(release)} is no release", fix="megatron=0.19")
    return sizes, sizes.pop("rank", None), (int(release[0]), int(release[1]))


def _world(settings: dict[str, str]) -> World:
    from megatron_prism.core import units
    from megatron_prism.core.world import World, implied_size

    values: dict[str, Any] = {}
    if name := settings.pop("recipe", None):
        from megatron_prism.core import recipe

        p = recipe.load(name).parallel
        values = {key: getattr(p, key) for key in ("tp", "cp", "pp", "ep", "etp", "vpp", "order")}
        values["size"] = p.world_size
    for key, text in settings.items():
        try:
            values[key] = text if key == "order" else units.parse_count(text)
        except UnitError as error:
            raise UsageError(f"{key}={text}: {error.message}", fix=error.fix) from None
    for key, value in values.items():
        if isinstance(value, int) and value < 1:
            raise UsageError(f"{key}={value}: sizes are positive numbers", fix=f"{key}=1")
    parts = {key: values[key] for key in ("tp", "cp", "pp", "ep", "etp") if key in values}
    size = values.pop("size", None) or implied_size(**parts)
    if size > _MOST:
        raise UsageError(f"{size:,} ranks are too many to list", fix=f"at most size={_MOST}")
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
