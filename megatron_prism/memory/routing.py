"""How much memory an MoE rank may need: routing drawn from a law, the peak of every draw.

In : a program whose capture says which storages grow with the tokens that experts get
(``Program.routed``), and a law.  Out: the distribution of the peak.

Which they are is found out, not guessed: a second iteration runs in which every call of a
dispatcher gets another number of tokens more (``probe``), and what differs, differs by it
(``learned``).  Sizes grow linearly with tokens, so a draw costs a sum over the program's events.

Laws: ``uniform``, each token takes experts at random; ``zipf:A``, the k-th popular expert of a
layer gets a share of k^-A, and which one that is is drawn for each layer; or a recording of a real
run (``--prism-record``), of which a call of the same layer is drawn.  An iteration's microbatches
share what is popular.  Tokens that a rank sends do not change, those that its experts get do.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import CODED, STEPS
from megatron_prism.core.programs.program import Program, RepeatedEvents

STEP = 16  # copies by which each call's loads differ in a probe: FP8 pads to no less
_CALL = re.compile(r"route (\d{1,6})#(\d{1,9})")


# -- what depends on routing -----------------------------------------------------------------------
def more_tokens(routes: np.ndarray) -> Callable[[int, int], int]:
    """What a probe gives each (layer, turn) of ``Program.routes`` beyond its even share, per expert
    and source rank; 0 where there are fewer tokens than calls.
    """
    numbers: dict[tuple[int, int], int] = {}
    for layer, turn in routes[1:, :2].tolist():
        numbers[layer, turn] = len(numbers)
    calls = 1 + len(numbers)
    step = STEP
    copies, experts, copies_of_token, sources = routes[0].tolist()
    # a rank that gathers all tokens selects those of its experts: no expert gets more than all
    if sources == 1:
        tokens = copies // copies_of_token
        even_share = math.ceil(copies / experts)
        step = min(STEP, (tokens - even_share) // calls)

    def more_of_call(layer: int, turn: int) -> int:
        number = numbers.get((layer, turn), calls - 1)
        return step * (1 + number)

    return more_of_call


def has_all_experts(program: Program) -> bool:
    """Say whether the experts of this rank get every copy of a token that the ranks send.

    Args:
        program: has calls of a dispatcher (``Program.routes``).
    """
    copies_of_source, _, _, sources = program.routes[0].tolist()
    received = program.routes[1:, 2]
    return bool((received == copies_of_source * sources).all())


def learned(program: Program, probe: Program, repeated: Sequence[RepeatedEvents] = ()) -> Program:
    """Return ``program`` with what ``probe`` says of its allocations.

    It is unchanged where the two do not make the same storages in the same order.

    Args:
        program: Of an iteration with even loads.
        probe: The same with other loads.
        repeated: Steps of the probe that were written down again, in order: the calls in one have
            the loads of the calls in the step that ran.
    """
    keys = program.routes[1:, :2]
    further_tokens = probe.routes[1:, 2] - program.routes[1:, 2]
    same_calls = np.array_equal(keys, probe.routes[1:, :2])
    # another order of calls, no call of a dispatcher, or one without further tokens: no probe
    if not same_calls or not further_tokens.size or (further_tokens <= 0).any():
        return program
    births, probe_births = _births(program), _births(probe)
    num_alike = _count_alike(program, births, probe, probe_births)

    # what follows the steps may differ: not every iteration has it
    steps = np.isin(program.ops["phase"], [CODED["phase"].index(name) for name in STEPS])
    ops = np.minimum(program.allocations["before"][births], len(program) - 1)
    if steps[ops[num_alike:]].any():
        return program

    # the call and the growth of every storage, in the order in which they are made
    sizes = program.allocations["bytes"][births[:num_alike]]
    growths = probe.allocations["bytes"][probe_births[:num_alike]] - sizes
    calls = _Calls(program.routes[1:], further_tokens)
    sources = _sources(probe_births[:num_alike], repeated)
    routed = np.zeros((len(program.allocations), 2), dtype=np.int64)
    routed[:, 0] = -1
    call = -1
    for number in np.flatnonzero(growths).tolist():
        size, growth = int(sizes[number]), int(growths[number])
        if number in sources:
            # as in the step that ran, some turns later
            source, turns = sources[number]
            call = calls.behind(int(routed[births[source], 0]), turns)
        else:
            # what has a constant part, too, depends on the call before it
            call = calls.with_growth(size, growth, otherwise=call)
        if call >= 0:
            routed[births[number]] = call, growth
    _give_back(program, routed)
    routes = program.routes.copy()
    routes[1:, 3] = further_tokens
    return replace(program, routed=routed, routes=routes)


class _Calls:
    """The calls of dispatchers of an iteration, and by how much each grew in a probe."""

    def __init__(self, routes: np.ndarray, further_tokens: np.ndarray) -> None:
        """Sort the calls that ran by their growth; those written down again grew as another one.

        Args:
            routes: Rows of ``Program.routes`` of the calls.
            further_tokens: What each of them has more in the probe.
        """
        self._keys = [(int(layer), int(turn)) for layer, turn in routes[:, :2]]
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        ratios = further_tokens / np.maximum(routes[:, 2], 1)
        _, ran = np.unique(further_tokens, return_index=True)
        ran = np.sort(ran)
        self._order = ran[np.argsort(ratios[ran], kind="stable")]
        self._ratios = ratios[self._order]

    def with_growth(self, size: int, growth: int, otherwise: int) -> int:
        """Find the call whose loads grew as a storage did; ``otherwise`` if none did."""
        place = int(np.searchsorted(self._ratios, growth / size))
        first = max(place - 1, 0)
        distances = np.abs(self._ratios[first : place + 1] - growth / size)
        nearest = first + int(np.argmin(distances))
        # paddings move a size a little
        difference = abs(self._ratios[nearest] * size - growth)
        if difference <= max(0.002 * growth, 64):
            return int(self._order[nearest])
        return otherwise

    def behind(self, call: int, turns: Mapping[int, int]) -> int:
        """Find the call of the same layer so many turns later; itself where nobody has counted."""
        if call < 0:
            return call
        layer, turn = self._keys[call]
        return self._numbers.get((layer, turn + turns.get(layer, 0)), call)


def _count_alike(
    program: Program, births: np.ndarray, probe: Program, probe_births: np.ndarray
) -> int:
    """Count the storages, from the first on, that are made alike in a program and its probe.

    Args:
        program: With even loads.
        births: Events of the program that make a storage, or let it grow.
        probe: With other loads.
        probe_births: Such events of the probe.
    """
    count = min(births.size, probe_births.size)
    notes, probe_notes = _notes(program, births[:count]), _notes(probe, probe_births[:count])
    for number, (note, probe_note) in enumerate(zip(notes, probe_notes, strict=True)):
        if note != probe_note:
            return number
    return count


def _sources(
    events: np.ndarray, repeated: Sequence[RepeatedEvents]
) -> dict[int, tuple[int, Mapping[int, int]]]:
    """Find the twins of events in steps that were written down again.

    Args:
        events: Of the probe, ascending.
        repeated: Such steps.

    Returns:
        Number of an event -> (number of its twin in the step that ran, turns between them).
    """
    sources: dict[int, tuple[int, Mapping[int, int]]] = {}
    for step in repeated:
        first, behind = np.searchsorted(events, step.span).tolist()
        first_source, behind_source = np.searchsorted(events, step.source).tolist()
        numbers = zip(range(first, behind), range(first_source, behind_source), strict=False)
        for number, source in numbers:
            sources[number] = source, step.turns
    return sources


def _births(program: Program) -> np.ndarray:
    """Events of the iteration that make a storage, or let it grow."""
    events = program.allocations
    return np.flatnonzero((events["bytes"] > 0) & (events["before"] > 0))


def _notes(program: Program, events: np.ndarray) -> list[str]:
    return [program.strings[note] for note in program.allocations["note"][events]]


def _give_back(program: Program, routed: np.ndarray) -> None:
    """What a storage grew by goes with it."""
    grown: dict[int, tuple[int, int]] = {}
    storages, sizes = program.allocations["storage"], program.allocations["bytes"]
    for event in np.flatnonzero((routed[:, 0] >= 0) | (sizes < 0)).tolist():
        storage = int(storages[event])
        if sizes[event] > 0:
            before = grown.get(storage, (0, 0))[1]
            grown[storage] = int(routed[event, 0]), before + int(routed[event, 1])
        elif storage in grown:
            call, change = grown.pop(storage)
            routed[event] = call, -change


# -- the law ---------------------------------------------------------------------------------------
Shares = Callable[[np.random.Generator, int, int], np.ndarray]


@dataclass(frozen=True)
class Law:
    """text; shares(random, layer, experts) -> of the tokens, [experts].

    is_by_layer : whether the shares of a layer are those of its number in the model
    """

    text: str
    shares: Shares
    is_by_layer: bool = False


def law(text: str) -> Law:
    """Read how tokens are shared out.

    Args:
        text: ``uniform``, ``zipf:1.2``, a JSON file of tokens by expert, or a folder that
            --prism-record wrote.

    Raises:
        UsageError: It is none of these.
    """
    if text == "uniform":
        return Law(text, lambda random, layer, experts: np.full(experts, 1 / experts))
    kind, _, number = text.partition(":")
    # few experts get most tokens, in each layer others
    if kind == "zipf" and re.fullmatch(r"\d{1,2}(\.\d{1,6})?", number):
        power = float(number)

        def shares(random: np.random.Generator, layer: int, experts: int) -> np.ndarray:
            weights: np.ndarray = np.arange(1.0, experts + 1) ** -power
            return random.permutation(weights / weights.sum())

        return Law(text, shares)
    if os.path.isfile(text):
        shares_of_file, is_by_layer = _listed(Path(text))
        return Law(f"tokens of {text}", shares_of_file, is_by_layer)
    if not os.path.isdir(text):
        message = f"--routing {text} is no law"
        raise UsageError(
            message, fix="--routing uniform, zipf:1.2, FILE.json, or a --prism-record folder"
        )
    return Law(f"recorded in {text}", _recorded(Path(text)))


_Tokens = list[Annotated[float, msgspec.Meta(ge=0, le=1e15)]]
_TOKENS_FIX = 'tokens of each expert: [9000, 0, 1200, …], or by MoE layer from 0: {"0": […]}'


def _listed(file: Path) -> tuple[Shares, bool]:
    """Read the shares of experts that a file lists, and whether it has each MoE layer's own."""
    with foreign.reading(file, "a file of tokens by expert", _TOKENS_FIX):
        listed = foreign.read_json(file, object)
        layers: dict[str, _Tokens]
        if isinstance(listed, dict):
            layers = foreign.shaped(listed, dict[str, _Tokens])
        else:
            layers = {"": foreign.shaped(listed, _Tokens)}

    def shares(random: np.random.Generator, layer: int, experts: int) -> np.ndarray:
        tokens = layers.get("", layers.get(str(layer)))
        if tokens is None:
            raise UsageError(f"{file} says nothing of MoE layer {layer}", fix=_TOKENS_FIX)
        if not sum(tokens):
            message = f"{file} gives no expert of MoE layer {layer} a token"
            raise UsageError(message, fix=_TOKENS_FIX)
        if len(tokens) != experts:
            message = f"{file} has tokens of {len(tokens)} experts, and this job has {experts}"
            raise UsageError(message, fix=_TOKENS_FIX)
        shares_of_layer: np.ndarray = np.array(tokens) / sum(tokens)
        return shares_of_layer

    return shares, "" not in layers


def _recorded(folder: Path) -> Shares:
    """Shares of experts in every call of a layer, over all ranks that were recorded."""
    calls: dict[tuple[int, int], np.ndarray] = {}
    files = sorted(folder.glob("rank-*.npz"))
    for file in files:
        with foreign.reading(file, "a recording of ours", "record again with --prism-record"):
            members = re.compile(r"(?:gather|route) .*#\d{1,9}", re.DOTALL)
            _, values = foreign.read_arrays(file, dict[str, object], members)
            for name, value in values.items():
                call = _CALL.fullmatch(name)
                # other recorded values of a call are no maps of tokens to experts
                if call is None or value.dtype != np.uint8:
                    continue
                sums = np.unpackbits(value.reshape(-1, value.shape[-1]), axis=-1).sum(axis=0)
                # ranks route their own tokens: counts of all ranks are summed
                key = int(call[1]), int(call[2])
                if key in calls:
                    sums = calls[key] + sums
                calls[key] = sums
    layers: dict[int, list[np.ndarray]] = {}
    for (layer, _), sums in sorted(calls.items()):
        layers.setdefault(layer, []).append(sums)
    if not layers:
        message = f"{folder} has no routing of an MoE layer"
        raise UsageError(message, fix="record the job with all ranks local: --prism-record DIR")
    names = sorted(layers)

    def shares(random: np.random.Generator, layer: int, experts: int) -> np.ndarray:
        of_layer = layers[names[layer % len(names)]]
        sums = of_layer[random.integers(len(of_layer))][:experts].astype(float)
        # another number of experts, or a call that routed nothing
        if sums.size != experts or not sums.sum():
            message = f"{folder} has routing to {sums.size} experts, this job has {experts}"
            raise UsageError(message, fix="record this very job")
        shares_of_call: np.ndarray = sums / sums.sum()
        return shares_of_call

    return shares


# -- draws -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Drawn:
    """Peaks of allocated bytes over ``draws`` iterations.

    ranks : int64 [draws, ranks of a group of experts]: the peak of each
    """

    law: str
    ranks: np.ndarray

    def quantile(self, share: float) -> int:
        """Bytes that ``share`` of all ranks and iterations stay within."""
        return int(np.quantile(self.ranks, share))

    def beyond(self, limit: int) -> tuple[float, float]:
        """Chance that one rank exceeds ``limit`` bytes in an iteration; that one of its group."""
        over = self.ranks > limit
        return float(over.mean()), float(over.any(axis=1).mean())


def draw(
    program: Program, chosen: Law, draws: int, seed: int = 0, capacity: float | None = None
) -> Drawn | None:
    """The peaks of ``draws`` iterations; None if the program does not say what routing changes.

    capacity : --moe-expert-capacity-factor: what is beyond it is dropped
    """
    if not program.routed.size or not (program.routed[:, 0] >= 0).any():
        return None
    copies, experts, topk, sources = program.routes[0].tolist()
    calls = program.routes[1:]
    timeline = _Timeline(program)
    random = np.random.default_rng(seed)
    most_of_expert = None
    if capacity is not None:
        most_of_expert = sources * int(np.ceil(capacity * copies / experts))
    # loads were even when the program was recorded
    local = max(1, round(calls[0, 2] * experts / (copies * sources)))
    groups = experts // local
    peaks = np.empty((draws, groups), dtype=np.int64)
    layers = sorted(set(calls[:, 0].tolist()))
    for row in peaks:
        shares = {n: _at_most(chosen.shares(random, n, experts), 1 / topk) for n in layers}
        rows = np.empty((len(calls), groups), dtype=np.int64)
        for call, (layer, *_) in zip(rows, calls.tolist(), strict=True):
            counts = _draw_counts(random, copies * sources, shares[layer], topk)
            # tokens above the capacity are dropped
            if most_of_expert is not None:
                counts = np.minimum(counts, most_of_expert)
            call[:] = counts.reshape(groups, local).sum(axis=1)
        row[:] = [timeline.peak(rows[:, group]) for group in range(groups)]
    return Drawn(chosen.text, peaks)


def _draw_counts(
    random: np.random.Generator, copies: int, shares: np.ndarray, topk: int
) -> np.ndarray:
    """Draw how many tokens each expert gets; none gets more tokens than there are.

    Args:
        random: Where draws come from.
        copies: Of tokens: each token goes to ``topk`` experts.
        shares: float [experts]: of the copies; they add up to 1.
        topk: Experts of a token.

    Returns:
        int64 [experts], which add up to ``copies``.
    """
    tokens = copies // topk
    counts = random.multinomial(copies, shares)
    excess = np.maximum(counts - tokens, 0).sum()
    while excess:
        counts = np.minimum(counts, tokens)
        # experts with room take what is beyond, by their shares
        has_room = counts < tokens
        shares_left = np.where(has_room, shares, 0.0)
        if not shares_left.any():
            shares_left = has_room.astype(float)
        counts = counts + random.multinomial(excess, shares_left / shares_left.sum())
        excess = np.maximum(counts - tokens, 0).sum()
    return counts


def _at_most(shares: np.ndarray, limit: float) -> np.ndarray:
    """No expert gets a token twice: what is beyond ``limit`` goes to the others."""
    while (shares > limit * (1 + 1e-9)).any():
        full = shares >= limit * (1 - 1e-9)
        left = np.where(full, 0.0, shares)
        # nobody is left to take what is beyond: as many experts as a token takes
        if not left.sum():
            return np.full(shares.size, 1 / shares.size)
        shares = np.where(full, limit, left * ((1 - limit * full.sum()) / left.sum()))
    return shares


class _Timeline:
    """Live bytes of a program as a function of its calls' loads: between two events that depend on
    routing only the most counts.
    """

    def __init__(self, program: Program) -> None:
        routed = program.routed
        self._at = np.flatnonzero(routed[:, 0] >= 0)
        live = program.live_bytes()
        starts = np.concatenate(([0], self._at))
        self._peaks = np.maximum.reduceat(live, np.unique(starts))
        # nothing is live before the first event
        if self._at.size and self._at[0] == 0:
            self._peaks = np.concatenate(([0], self._peaks))
        self._call = routed[self._at, 0]
        self._rows = program.routes[1:, 2]
        grown = routed[self._at, 1].astype(float)
        self._bytes_a_token = grown / program.routes[1:, 3][self._call]

    def peak(self, rows: np.ndarray) -> int:
        """With ``rows`` copies of tokens for this rank's experts in every call."""
        changes = (rows - self._rows)[self._call] * self._bytes_a_token
        beyond_even = np.concatenate(([0.0], np.cumsum(changes)))
        return round(float((self._peaks + beyond_even).max()))
