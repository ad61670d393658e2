"""``prism capture``: run one rank per stage with the recorder on and keep what each did.

In : a recipe and a folder.  Out: one slice per rank as soon as it is finished, and ``world.prism``
at the end.  Slices that are there already are not captured again.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_prism.core import job_settings, programs
from megatron_prism.core import recipe as recipes
from megatron_prism.core.megatron_source import megatron_release
from megatron_prism.core.programs import Programs
from megatron_prism.core.recipe_schema import Recipe
from megatron_prism.core.slices import SliceStore, assemble
from megatron_prism.emulate import job_arguments, model_flops, recipe_job, recipe_job_report
from megatron_prism.emulate.slice_source import versions

__all__ = ["capture", "source_of"]

_ELSEWHERE = ("name", "prism.ranks", "prism.out")  # a line of its own; which to run, and where to


def source_of(recipe: Recipe) -> dict[str, str]:
    """What decides a slice's content: versions, tier and every setting but which ranks to run."""
    tier = "meta" if recipe.prism.tier == "auto" else recipe.prism.tier
    return {
        "recipe": recipe.name,
        "settings": job_settings.as_text(dict(_flat(recipe))),
        "megatron_core": megatron_release(),
        **versions(),
        "tier": tier,
        **model_flops.of_recipe(recipe),
    }


def _flat(section: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """(``model.seq_length``, its value as text) of all settings that are not the default."""
    for field in dataclasses.fields(section):
        key, value = above + field.name, getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, Mapping):  # extra: of TransformerConfig
            yield from ((f"{key}.{name}", job_arguments.text_of(value[name])) for name in value)
        elif value != field.default and key not in _ELSEWHERE:
            yield key, job_arguments.text_of(value)


def capture(
    recipe: Recipe | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    console: Console | None = None,
    keep: bool = True,
) -> Programs:
    """Record what one rank per pipeline stage does in an iteration; returns the whole world.

    Args:
        recipe: a Recipe, the name of a shipped one, or a YAML file.
        folder: of slices; what is in it already is not captured again.
        force: whether to drop what is in it first.
        console: a rich Console for what is being done; default: stdout.
        keep: whether to say where the slices are.

    Raises what ``emulate`` raises; the slices finished until then are kept.
    """
    console, folder, recipe = console or Console(), Path(folder), recipes.given(recipe)
    ranks = recipe_job.ranks_of(recipe)
    store = SliceStore(folder, recipe.world, source_of(recipe))
    store.prepare(force)
    there = set(store.ranks())
    missing = tuple(rank for rank in ranks if rank not in there)
    recipe_job_report.head(recipe, ranks, console)
    if len(missing) < len(ranks):
        console.print(f"  {'kept':<20} {len(ranks) - len(missing)} slices are there already")
    start = time.perf_counter()
    summaries = recipe_job.run_ranks(recipe, missing, console, slices=store) if missing else []
    made = assemble(folder)
    programs.save(made, folder / "world.prism", force=True)
    for summary in summaries:
        cost = summary["recording"]
        console.print(
            f"stage {summary['stage']}: {cost['ops']:,} ops, an iteration takes "
            f"{cost['recorded_s']:.2f} s here recorded, {cost['plain_s']:.2f} s not"
        )
    took = f"in {time.perf_counter() - start:.1f} s"
    console.print(f"wrote {folder} {took}" if keep else
                  f"captured {took}, for this once; to keep it: prism capture")  # fmt: skip
    return made
