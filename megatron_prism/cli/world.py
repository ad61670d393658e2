"""``prism world``: a world of given sizes, and the groups of a rank in it.

In : ``key=value`` words, or a recipe.  No torch, no Megatron.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments
from megatron_prism.cli.output import Answer, Row, console, print_table
from megatron_prism.core import units
from megatron_prism.core.errors import UnitError, UsageError

if TYPE_CHECKING:
    from megatron_prism.core.world import World


def world(args: argparse.Namespace) -> Answer:
    """Show a world: its sizes, its stages, and one rank's coordinates and Megatron groups.

    prism world size=8192 tp=8 pp=16 --rank 1000
    prism world llama3-70b_1024gpu_tp8pp4vp5_h200 --rank pp=3,tp=0

    Sizes are size, tp, cp, pp, ep, etp, vpp, gpus_per_node and order; size may be left out.
    --rank is a rank or a selector; --megatron 0.19 lists the groups of that release (0.16 by
    default).
    """
    from megatron_prism.core.world import format_ranks

    shown = _world(args.settings)
    stages = {stage: shown.matching(pp=stage).tolist() for stage in shown.stages}
    ranks = {
        str(rank): {
            "coordinates": shown.coordinates(rank)._asdict(),
            "groups": shown.groups(rank, megatron=args.megatron),
        }
        for rank in (shown.select(args.rank) if args.rank is not None else ())
    }

    def rows() -> list[Row]:
        if not ranks:
            return [{"stage": s, "size": len(whole), "ranks": whole} for s, whole in stages.items()]
        return [
            {"rank": rank, "group": name, "size": len(group), "ranks": group}
            for rank, one in ranks.items()
            for name, group in one["groups"].items()
        ]

    def page() -> None:
        out = console()
        out.print(str(shown))
        if not ranks:
            print_table(("", "ranks"), [(f"stage {s}", format_ranks(r)) for s, r in stages.items()])
        for rank, one in ranks.items():
            out.print(
                f"\nrank {rank}: {' '.join(f'{k} {v}' for k, v in one['coordinates'].items())}"
            )
            groups = shown.groups(int(rank), megatron=args.megatron, gloo=False)
            cells = [(name, f"{len(g):,}", format_ranks(g)) for name, g in groups.items()]
            print_table(("group", "size", "ranks"), cells)

    sizes = {"size": shown.size, "vpp": shown.vpp, **shown.axis_sizes()}
    return Answer(lambda: {"sizes": sizes, "ranks": ranks}, page, rows)


def _size(text: str) -> int:
    count = units.parse_count(text)
    if count < 1:
        raise UnitError("sizes are positive numbers", fix="1 at least")
    return count


def release(text: str) -> tuple[int, int]:
    """Reads ``0.19``."""
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise UnitError("it is no release", fix="--megatron 0.19")
    return int(parts[0]), int(parts[1])


_PARALLEL = ("tp", "cp", "pp", "ep", "etp")
_SIZES = ("size", *_PARALLEL, "vpp", "gpus_per_node")


def _world(words: list[str]) -> World:
    """The world of sizes, or of a recipe, some of whose sizes may be given otherwise."""
    from megatron_prism.core import recipe
    from megatron_prism.core.world import MOST_RANKS, World, implied_size

    names = list[str]()
    values = arguments.read(words, {**dict.fromkeys(_SIZES, _size), "order": str}, "world",
                            names=names)  # fmt: skip
    if len(names) > 1:
        raise UsageError(f"{' '.join(names)}: a world is that of one recipe", fix=names[0])
    for name in names:
        job = recipe.load(name).world
        values = {**{key: getattr(job, key) for key in (*_SIZES, "order")}, **values}
    parts = {key: values[key] for key in _PARALLEL if key in values}
    size = values.pop("size", None) or implied_size(**parts)
    if size > MOST_RANKS:
        raise UsageError(f"{size:,} ranks are too many to list", fix=f"at most size={MOST_RANKS}")
    return World(size, **values)
