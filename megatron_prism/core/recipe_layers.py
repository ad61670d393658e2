"""How do a recipe's layers split over stages and chunks, and do they?

In : a recipe.  Out: layers of each chunk of a stage, the same in words, or what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_prism.core.recipe_schema import Recipe

__all__ = ["describe", "layers_of", "rules"]


def _by_layout(recipe: Recipe) -> bool:
    return recipe.model.extra.get("pipeline_model_parallel_layout") is not None


def rules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(message, fix) where the layers do not split."""
    m, p = recipe.model, recipe.parallel
    ends = (p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage)
    standalone = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    if _by_layout(recipe):
        return
    if any(ends) and standalone:
        yield (
            "both ways of splitting layers unevenly are set: num_layers_in_…_pipeline_stage and "
            "account_for_…_in_pipeline_split",
            "drop one of them",
        )
    if any(ends):
        middle = m.num_layers - sum(end or 0 for end in ends)
        stages = p.pp - sum(end is not None for end in ends)
        if stages < 0 or middle < 0 or (middle % stages if stages else middle):
            yield (
                f"{m.num_layers} layers less {' and '.join(str(e) for e in ends if e)} at the ends "
                f"leave {middle} for {stages} stages",
                "change parallel.num_layers_in_first_pipeline_stage or …_last_…",
            )
        uneven = [n for n in (*ends, middle // stages if stages else None) if n]
    else:
        uneven = [m.num_layers + standalone]
    chunks = p.vpp or 1
    pieces = chunks if any(ends) else p.pp * chunks
    for number in uneven:
        if number % pieces:
            what = f"pp {p.pp} x vpp {p.vpp}" if p.vpp else f"pp {p.pp}"
            unit = f" + {standalone} for embedding and loss = {number}" if standalone else ""
            whole = [n * pieces - standalone for n in (number // pieces, number // pieces + 1)]
            near = " or ".join(str(n) for n in whole if n > 0)
            near = f"{near} layers there" if any(ends) else f"model.num_layers={near}"
            yield (
                f"{number - standalone} layers{unit} do not split over "
                + (f"vpp {p.vpp}" if any(ends) else f"{what} = {pieces} chunks"),
                f"use {near}, or change parallel.pp or parallel.vpp",
            )


def layers_of(recipe: Recipe, stage: int) -> tuple[int, ...]:
    """Layers of each chunk of one stage, as Megatron will split them.

    core/transformer/transformer_block.py get_num_layers_to_build @core_v0.16.1.  With an explicit
    ``pipeline_model_parallel_layout`` only Megatron knows: an empty tuple.
    """
    m, p = recipe.model, recipe.parallel
    if _by_layout(recipe):
        return ()
    chunks, last = p.vpp or 1, p.pp - 1
    ends = {0: p.num_layers_in_first_pipeline_stage, last: p.num_layers_in_last_pipeline_stage}
    given = [n for n in ends.values() if n is not None]
    if (own := ends.get(stage)) is not None:
        layers = own
    elif given:
        layers = (m.num_layers - sum(given)) // (p.pp - len(given))
    else:
        extra = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
        layers = (m.num_layers + extra) // p.pp
    split = [layers // chunks] * chunks
    if stage == 0:
        split[0] -= p.account_for_embedding_in_pipeline_split
    if stage == last:
        split[-1] -= p.account_for_loss_in_pipeline_split
    return tuple(split)


def describe(recipe: Recipe) -> str:
    """``4 = 80 / (pp 4 x vpp 5)``, or every stage's chunks where they differ."""
    p = recipe.parallel
    if _by_layout(recipe):
        return "by model.extra.pipeline_model_parallel_layout"
    stages = [layers_of(recipe, stage) for stage in range(p.pp)]
    if len({n for chunks in stages for n in chunks}) == 1:
        over = f"pp {p.pp}" + (f" x vpp {p.vpp}" if p.vpp else "")
        return f"{stages[0][0]} = {recipe.model.num_layers} / ({over})"
    middle = stages[1] if p.pp > 2 else None
    words = [f"first stage {_chunks(stages[0])}"]
    if middle is not None:
        words.append(f"middle stages {_chunks(middle)}")
    return ", ".join([*words, f"last stage {_chunks(stages[-1])}"])


def _chunks(layers: tuple[int, ...]) -> str:
    if len(set(layers)) == 1:
        return f"{layers[0]}" + (f" x {len(layers)}" if len(layers) > 1 else "")
    return "+".join(map(str, layers))
