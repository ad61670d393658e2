"""The iteration of a job with many equal layers, from the same job with few and with some more.

In : two priced worlds that differ in their numbers of layers.  Out: ns.  What each step of each
rank computes, and how long its calls take, is linear in the layers; the schedule is that of the
world with more layers, so a pipeline's slowest stage may be another one than with few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.programs.ops import NAMES
from megatron_prism.core.programs.program import Program
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.priced_graph import PricedGraph
from megatron_prism.replay.timeline import durations_of

_OF_GRADIENTS = "DATA_PARALLEL"  # part of the names of groups that reduce and gather parameters
_BITS_OF_CHUNK = 16
_BITS_OF_MICROBATCH = 32
_CallKey: TypeAlias = tuple[int, int, str, str]  # class, step, name, group


@dataclass(frozen=True)
class _Calls:
    """Matched calls of a world.

    Attributes:
        keys: what each of them belongs to.
        is_beside: bool [matched calls], those of data-parallel groups beside computing.
    """

    keys: list[_CallKey]
    is_beside: np.ndarray


def iteration_of_layers(fewer: PricedGraph, more: PricedGraph, growth: float) -> int:
    """Return the ns of an iteration with more layers than both worlds have.

    Args:
        fewer: the world with the fewest layers.
        more: the world with more layers.
        growth: layers beyond those of ``more``, in units of what ``more`` has beyond ``fewer``.

    Raises:
        UnsupportedError: the worlds differ in more than their layers.
    """
    few_programs = fewer.graph.program_list
    more_programs = more.graph.program_list
    if len(few_programs) != len(more_programs):
        raise UnsupportedError("with other layers the job has other classes of ranks", fix="none")
    few_steps = [step_numbers(program) for program in few_programs]
    more_steps = [step_numbers(program) for program in more_programs]
    few_prices = fewer.timeline.prices
    more_prices = more.timeline.prices

    # what each step computes, and what the host takes for it
    compute = _grown(few_steps, few_prices.compute, more_steps, more_prices.compute, growth)
    lead = _grown(few_steps, few_prices.lead, more_steps, more_prices.lead, growth)
    host = _grown(few_steps, few_prices.host, more_steps, more_prices.host, growth)

    # calls of a step, by kind and group
    few_calls = _calls(fewer.graph, few_steps)
    more_calls = _calls(more.graph, more_steps)
    numbers: dict[_CallKey, int] = {}
    for key in [*few_calls.keys, *more_calls.keys]:
        numbers.setdefault(key, len(numbers))
    few_places = [numbers[key] for key in few_calls.keys]
    more_places = [numbers[key] for key in more_calls.keys]
    few_numbers = np.array(few_places, dtype=np.int64)
    more_numbers = np.array(more_places, dtype=np.int64)
    few_ns = few_prices.collective_ns
    more_ns = more_prices.collective_ns
    factor = _factors(few_numbers, few_ns, more_numbers, more_ns, growth)
    # more layers make more buckets, of which the last alone is not hidden
    factor[more_calls.is_beside] = 1.0
    call_ns = np.rint(more_ns * factor).astype(np.int64)

    grown = dataclasses.replace(
        more_prices, compute=compute, lead=lead, host=host, collective_ns=call_ns
    )
    durations = durations_of(more.timeline.dag, grown)
    return more.timeline.iteration_with(durations)


def step_numbers(program: Program) -> np.ndarray:
    """Number the steps of ops, alike in programs of one schedule: int64 [ops]."""
    ops = program.ops
    phases = ops["phase"].astype(np.int64)
    microbatches = ops["microbatch"].astype(np.int64) + 1
    chunks = ops["chunk"].astype(np.int64) + 1
    numbers: np.ndarray = phases << (_BITS_OF_CHUNK + _BITS_OF_MICROBATCH)
    numbers += microbatches << _BITS_OF_CHUNK
    numbers += chunks
    return numbers


def _grown(
    few_steps: Sequence[np.ndarray],
    few_ns: Sequence[np.ndarray],
    more_steps: Sequence[np.ndarray],
    more_ns: Sequence[np.ndarray],
    growth: float,
) -> tuple[np.ndarray, ...]:
    """Return what ops take with more layers, of every class int64 [ops].

    Args:
        few_steps: of every class the step of each op, with the fewest layers.
        few_ns: what these ops take.
        more_steps: the same with more layers.
        more_ns: what these ops take.
        growth: as of ``iteration_of_layers``.
    """
    grown: list[np.ndarray] = []
    for index, ns in enumerate(more_ns):
        factor = _factors(few_steps[index], few_ns[index], more_steps[index], ns, growth)
        grown_ns = np.rint(ns * factor)
        grown.append(grown_ns.astype(np.int64))
    return tuple(grown)


def _factors(
    few_keys: np.ndarray,
    few_ns: np.ndarray,
    more_keys: np.ndarray,
    more_ns: np.ndarray,
    growth: float,
) -> np.ndarray:
    """Return how many times as long each entry of ``more_ns`` takes; float64.

    Args:
        few_keys: int64, what each entry of ``few_ns`` belongs to.
        few_ns: with the fewest layers.
        more_keys: int64, what each entry of ``more_ns`` belongs to.
        more_ns: with more layers.
        growth: as of ``iteration_of_layers``.
    """
    keys = np.concatenate((few_keys, more_keys))
    distinct_keys, places = np.unique(keys, return_inverse=True)
    few_places = places[: len(few_keys)]
    more_places = places[len(few_keys) :]
    few_totals = np.bincount(few_places, few_ns, len(distinct_keys))
    totals = np.bincount(more_places, more_ns, len(distinct_keys))
    # what grows by each layer grows on; it cannot become less than nothing
    expected = totals + growth * (totals - few_totals)
    expected = np.maximum(expected, 0)
    quotients = expected / np.maximum(totals, 1)
    factors: np.ndarray = np.where(totals > 0, quotients, 1.0)
    return factors[more_places]


def _calls(graph: WorldGraph, steps: Sequence[np.ndarray]) -> _Calls:
    """Say of every matched call what it belongs to.

    Args:
        graph: of the world.
        steps: of every class the step of each op.
    """
    matched = graph.matched_calls
    first_members = matched.start[:-1]
    classes = matched.classes[first_members].tolist()
    ops = matched.ops[first_members].tolist()
    keys: list[_CallKey] = []
    is_beside = np.zeros(len(matched), dtype=bool)
    for number, (index, op) in enumerate(zip(classes, ops, strict=True)):
        program = graph.program_list[index]
        row = program.ops[op]
        group = program.strings[row["group"]]
        name = NAMES[row["name"]]
        step = int(steps[index][op])
        keys.append((index, step, name, group))
        is_asynchronous = row["handle"] >= 0
        is_of_gradients = _OF_GRADIENTS in group
        is_beside[number] = is_asynchronous and is_of_gradients
    return _Calls(keys, is_beside)
