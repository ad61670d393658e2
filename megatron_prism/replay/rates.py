"""Tokens and flops per second of an iteration, and its MFU: one function for every answer.

In : a timeline.  Out: ``Rates``.  A figure that needs what the programs do not say is
``Value(None, why)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.program import Programs
from megatron_prism.replay.costs.precision import precision_of
from megatron_prism.replay.timeline import Timeline


@dataclass(frozen=True)
class Value:
    """A number with its basis, or None with what is missing for it."""

    value: float | None
    basis: str


@dataclass(frozen=True)
class Rates:
    """What a timeline does in a second.

    Attributes:
        tokens_per_s: Tokens of the whole job.
        flops_per_gpu: Of recorded kernels.
        mfu: Part of 1 of the data sheet's peak, of the type in which the job computes.
        precision: What a job without --bf16 and --fp16 has to be asked; "" of others.
    """

    tokens_per_s: Value
    flops_per_gpu: Value
    mfu: Value
    precision: str = ""


_COST_TOKENS = 10**9  # that a cost is of
_HOUR_S = 3600


def cost_of_tokens(tokens_per_gpu_s: float, price: float) -> float:
    """Return the money for 10^9 tokens.

    Args:
        tokens_per_gpu_s: Tokens in a second of a GPU.
        price: Of a GPU for an hour.
    """
    return price * _COST_TOKENS / (_HOUR_S * tokens_per_gpu_s)


def tokens_of(programs: Programs) -> int:
    """Count the tokens of an iteration; 0 if the programs do not say."""
    return _count(programs, "tokens_per_iteration")


def _count(programs: Programs, key: str) -> int:
    """Read a whole number of the source; 0 if there is none."""
    text = programs.source.get(key, "")
    if not text.isdecimal():
        return 0
    return int(text)


def rates_of(timeline: Timeline) -> Rates:
    """Compute tokens per second, flops per second and GPU, and MFU, as far as the programs say."""
    programs = timeline.graph.programs
    gpus = programs.world.size
    tokens = tokens_of(programs)
    model_flops = _count(programs, "model_flops_per_iteration")
    kernel_flops = _kernel_flops(timeline)

    # the peak of the type in which the job computes
    precision = precision_of(programs)
    peak = timeline.prices.peak
    of_type = ""
    if precision.peak != "bf16":
        peak = timeline.prices.peaks.get(precision.peak, 0.0)
        of_type = f" for {precision.peak}"

    seconds = timeline.iteration_ns / 1e9
    return Rates(
        tokens_per_s=_rate(
            tokens,
            seconds,
            "tokens of the slices / iteration time",
            (not tokens, "the slices do not say how many tokens an iteration has"),
        ),
        flops_per_gpu=_rate(
            kernel_flops / gpus,
            seconds,
            "recorded kernels, recomputation included",
            (not kernel_flops, "the slices recorded no flops"),
        ),
        mfu=_rate(
            model_flops / gpus / (peak or 1),
            seconds,
            f"of {peak / 1e12:,.0f} TFLOP/s dense {precision.peak}; model flops as Megatron "
            "counts them",
            (not peak, f"the machine's file has no peak of the data sheet{of_type}"),
            (not model_flops, "the slices do not say the model's flops"),
            (programs.source.get("tier") == "cpu", "the slices are of a CPU"),
        ),
        precision=precision.asks,
    )


def _rate(amount: float, seconds: float, basis: str, *missing: tuple[bool, str]) -> Value:
    """Divide by the time.

    Args:
        amount: What an iteration does.
        seconds: What it takes.
        basis: Where the rate is from.
        missing: (whether something is missing for it, what).

    Returns:
        The rate, or the first thing that is missing for it.
    """
    if not seconds:
        return Value(None, "nothing takes time")
    for is_missing, reason in missing:
        if is_missing:
            return Value(None, reason)
    return Value(amount / seconds, basis)


def _kernel_flops(timeline: Timeline) -> int:
    """Count the flops of all ranks' segments."""
    graph = timeline.graph
    total = 0
    for program, num_ranks in zip(graph.program_list, graph.classes.counts, strict=True):
        flops = np.maximum(program.ops["flops"], 0)
        total += int(flops.sum()) * num_ranks
    return total
