"""Which captured piece stands for each piece of the wanted schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import cast

from megatron_prism.core.programs.ops import PHASE_NAMES
from megatron_prism.replay.microbatches.cut import FORWARD, Cut, Kind, Member

_AROUND = 4  # steps on each side that are compared
Edges = Mapping[Kind, tuple[int, int]]  # of steps: how many first and last microbatches differ
Place = tuple[tuple[int, object], ...]  # (weight, value) of every trait of a piece's place


class Weight:
    """How unlike a wanted piece a captured one is that differs in a trait."""

    NEIGHBOUR = 1
    EDGE = 10
    CHUNK = 100
    BETWEEN = 1000
    OTHER = 10000  # it cannot stand for the wanted piece


class MissingKindError(Exception):
    """No captured piece can stand for one of the wanted schedule."""


def has_surroundings(captured: Cut, count: int, wanted: Cut) -> bool:
    """Tell whether every piece of a schedule has a captured one in the same surroundings.

    Buffers of messages live on into the pieces around the one that receives them.

    Args:
        captured: The captured schedule.
        count: Its microbatches.
        wanted: The other schedule.
    """
    try:
        Choice(captured, count, wanted, {}, Weight.EDGE).pieces()
    except MissingKindError:
        return False
    return True


class Choice:
    """For every piece of the wanted schedule a piece of the captured one, of its kind."""

    def __init__(
        self, captured: Cut, count: int, wanted: Cut, edges: Edges, limit: int = Weight.OTHER
    ) -> None:
        """Sort the captured pieces by kind and place.

        Args:
            captured: The captured schedule.
            count: Its microbatches.
            wanted: The wanted schedule.
            edges: Of steps how many first and last microbatches have bodies of their own.
            limit: What differs as much does not stand for a piece.
        """
        self._wanted, self._edges, self._limit = wanted, edges, limit
        # kind -> place -> captured pieces
        self._captured: dict[Kind, dict[Place, list[int]]] = {}
        for piece in range(len(captured)):
            places = self._captured.setdefault(_kind(captured, piece), {})
            place = self._place(captured, piece, count)
            places.setdefault(place, []).append(piece)

    def pieces(self) -> list[int]:
        """Choose the captured piece of every wanted one.

        Raises:
            MissingKindError: No captured piece is of the kind of a wanted one.
        """
        # wanted pieces of one kind and place share the captured ones
        wanted = self._wanted
        last_microbatch = -1
        for members in wanted.members:
            last_microbatch = max(last_microbatch, *members.values())
        wanted_pieces = defaultdict[tuple[Kind, Place], list[int]](list)
        for piece in range(len(wanted)):
            place = self._place(wanted, piece, last_microbatch + 1)
            wanted_pieces[_kind(wanted, piece), place].append(piece)

        # the captured pieces that are most alike, in turn
        chosen = [0] * len(wanted)
        for (kind, place), pieces in wanted_pieces.items():
            nearest = self._nearest(kind, place)
            if not nearest:
                is_step = wanted.is_step(pieces[0])
                raise MissingKindError(kind_in_words(wanted.shape(pieces[0]), is_step))
            numbers = _spread(len(nearest), len(pieces))
            for piece, number in zip(pieces, numbers, strict=True):
                chosen[piece] = nearest[number]
        return chosen

    def _nearest(self, kind: Kind, place: Place) -> list[int]:
        """Find the captured pieces of a kind that are most like a place; none beyond the limit."""
        captured = self._captured.get(kind, {})
        # in just that place
        if place in captured:
            return captured[place]
        smallest_distance, nearest = self._limit, list[int]()
        for captured_place, pieces in captured.items():
            distance = _distance(place, captured_place)
            if distance < smallest_distance:
                smallest_distance, nearest = distance, []
            if distance == smallest_distance < self._limit:
                nearest += pieces
        return sorted(nearest)

    def _place(self, cut: Cut, piece: int, count: int) -> Place:
        """Say what tells a piece from others of its kind, and how much.

        Args:
            cut: The schedule of the piece.
            piece: Its number.
            count: Microbatches of the schedule.
        """
        step, _ = cut.places[piece]
        if cut.is_step(piece):
            traits = self._traits_of_step(cut, step, count)
            step_behind = step + 1
        else:
            traits = _traits_between(cut, piece, count)
            step_behind = step

        # neighbours decide what Python frees: a message's buffer lives until the next has its name
        for distance in range(_AROUND):
            for neighbour in (step - 1 - distance, step_behind + distance):
                traits.append((Weight.NEIGHBOUR, cut.shape_of_step(neighbour)))
        return tuple(traits)

    def _traits_of_step(self, cut: Cut, step: int, count: int) -> list[tuple[int, object]]:
        """Return where the microbatches of a step are among all, by distance from both ends.

        Args:
            cut: The schedule.
            step: Which of its steps.
            count: Of microbatches.

        Returns:
            Weights, and distances from the first and from the last microbatch, each up to the
            number of microbatches that differ from those in the middle.
        """
        members, shape = cut.members[step], cut.shapes[step]
        traits: list[tuple[int, object]] = []
        for phase, chunk in sorted(members):
            # if the capture does not show it: the first forward and the last backward differ
            edges = (0, 1)
            if phase == FORWARD:
                edges = (1, 0)
            edges = self._edges.get(shape, edges)
            microbatch = members[phase, chunk]
            traits.append((Weight.OTHER, _from_ends(microbatch, count, edges)))
            traits.append((Weight.EDGE, _from_ends(microbatch, count, (1, 1))))
        return traits


def _traits_between(cut: Cut, piece: int, count: int) -> list[tuple[int, object]]:
    """Say which messages and steps are around a piece that is no step."""
    step, number = cut.places[piece]
    phases = cut.program.ops["phase"][cut.messages[piece]]
    traits: list[tuple[int, object]] = [(Weight.BETWEEN, number)]
    traits.append((Weight.BETWEEN, tuple(phases.tolist())))
    traits.append((Weight.BETWEEN, cut.requests_between[step]))
    for neighbour in (step - 1, step):
        shape = cut.shape_of_step(neighbour)
        chunks = [chunk for _, chunk in shape]
        traits.append((Weight.CHUNK, tuple(chunks)))
        ends: list[tuple[int, int]] = []
        for member in shape:
            microbatch = cut.members[neighbour][member]
            ends.append(_from_ends(microbatch, count, (1, 1)))
        traits.append((Weight.EDGE, tuple(ends)))
    return traits


def _spread(captured: int, wanted: int) -> Iterator[int]:
    """Say which of ``captured`` equal pieces stands for each of ``wanted``.

    The first and the last quarter stand for themselves, since what they find in memory differs, the
    others in turn.
    """
    first = (captured + 2) // 4
    last = min(first, captured - 1 - first)
    for number in range(wanted):
        # one of the first
        if number < first:
            yield number
        # one of the last
        elif wanted - number <= last:
            yield captured - (wanted - number)
        # the others in turn
        else:
            yield first + (number - first) % (captured - first - last)


def _kind(cut: Cut, piece: int) -> Kind:
    """Say what a piece must have in common with one that stands for it.

    That is what the scheduler does in it, and of a step its phases and chunks.  Of another piece it
    is the phases of the steps around it: the iteration begins and ends with work of its own, which
    no two steps have between them.
    """
    requests = cut.requests(piece)
    if cut.is_step(piece):
        return cut.shape(piece), requests
    step, _ = cut.places[piece]
    phases_before = tuple(phase for phase, _ in cut.shape_of_step(step - 1))
    phases_behind = tuple(phase for phase, _ in cut.shape_of_step(step))
    return phases_before, phases_behind, requests


def _from_ends(microbatch: int, count: int, edges: tuple[int, int]) -> tuple[int, int]:
    """Count microbatches before and behind one, at most the first and last that differ."""
    first, last = edges
    return min(microbatch, first), min(count - 1 - microbatch, last)


def _distance(left: Place, right: Place) -> int:
    """Add the weights of the traits in which two places differ."""
    distance = 0
    for left_trait, right_trait in zip(left, right, strict=True):
        if left_trait != right_trait:
            weight, _ = left_trait
            distance += weight
    return distance


def kind_in_words(shape: Kind, is_step: bool) -> str:
    """Put the shape of a piece into words: ``backward of chunk 1``."""
    if is_step:
        words: list[str] = []
        for phase, chunk in cast("tuple[Member, ...]", shape):
            text = PHASE_NAMES[phase]
            if chunk >= 0:
                text += f" of chunk {chunk}"
            words.append(text)
        return " with ".join(words)
    before, behind = cast("tuple[Kind, Kind]", shape)
    before_text, behind_text = "the start", "end"
    if before:
        before_text = kind_in_words(before, True)
    if behind:
        behind_text = kind_in_words(behind, True)
    return f"{behind_text} behind {before_text} with these messages"
