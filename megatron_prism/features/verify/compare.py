"""What two runs keep, one against the other: the first difference in the order of execution.

In : folders of two runs, and of a third that is the second with every parameter rounded otherwise.
Out: a ``LayoutDifference``, or none; and how far apart everything was.  Tolerances follow from
float32 and from how many numbers a sum has; where roundings alone move a value farther than that,
as the third run shows, they follow from it.  Numpy only.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_prism.core.world import ranks_text
from megatron_prism.features.verify import shrink
from megatron_prism.features.verify.kept import (
    STATES,
    Kept,
    PartKey,
    Shard,
    UndecidedError,
    missing_elements,
    placed,
)

LAST_BIT = {False: 2.0**-24, True: 2.0**-53}  # of float32, of float64
MARGIN = 4  # times what one sum's roundings make, for those that follow each other
FLOORS = 32  # times what one rounding of every parameter makes
UPDATED = 1e-2  # of an update: where gradients are noise, Adam makes steps of it
NAMES, INITIAL = "parameter names", "initial parameter"  # kinds of what is there at the start
_ALIKE = 1e-3  # of a factor
_SEEN = 0.5  # of a value: where as much is allowed, the value is not compared
_Axes = ("tp", "cp", "dp", "pp", "ep", "edp")
_MOST_NAMES = 3  # of a sentence


@dataclass(frozen=True)
class LayoutDifference:
    """The first value that is another one.

    what   : parameter names, loss, reported, routing, gradient, gradient norm, a state of the
        optimizer, parameter, evaluation
    where  : the parameter, microbatch or layer; place: rank and part of the whole
    error  : relative, and what it may be; None where one run does not have the value
    notes  : what is known of it: a factor, ranks that do not agree
    as_well : how many other values of this kind differ, of how many
    """

    what: str
    iteration: int
    where: str
    place: str
    error: float | None
    tolerance: float
    notes: tuple[str, ...] = ()
    as_well: tuple[int, int] = (0, 0)
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Value:
    """A value of both runs, a number or a part of a tensor.

    size  : what an error is relative to
    floor : how far other roundings move it
    part  : of a tensor that ranks have copies of
    notes : what is known of it already, if it differs
    """

    where: str
    place: str
    actual: np.ndarray
    wanted: np.ndarray
    size: float
    floor: float = 0.0
    part: Shard | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Lack:
    """A value that one run has and the other has not, or has of another shape."""

    where: str
    place: str
    note: str


@dataclass(frozen=True)
class _Wrong:
    """A value that differs: by how much, and how much is allowed."""

    value: _Value | _Lack
    error: float | None
    allowed: float


_Item = _Value | _Lack
_Step = tuple[str, int, Callable[[int], Iterator[_Item]], float]  # kind, iteration, least allowed


@dataclass
class LayoutComparison:
    """``job`` against ``other``; ``rounded`` is the other with other roundings.

    worst : kind of value -> the largest share of its tolerance that an error took
    not_compared : sentences on what both runs may have and what was not compared
    """

    job: Kept
    reference: Kept
    rounded: Kept
    iterations: int
    worst: dict[str, float] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)

    @property
    def microbatches(self) -> int:
        """Of one iteration, in the whole batch."""
        return len({number for iteration, number, _ in self.reference.losses if iteration == 1})

    @property
    def last_bit(self) -> float:
        """What half of a last bit is, relative to a number."""
        return LAST_BIT[self.job.facts[0].get("precise", False)]

    @property
    def tolerance(self) -> float:
        """Of a sum over the batch and a layer's width, whose roundings are independent."""
        terms = max(self.microbatches, 1) * shrink.SEQUENCE * shrink.HIDDEN
        return MARGIN * self.last_bit * math.sqrt(terms)

    def first(self, start: int = 0) -> LayoutDifference | None:
        """Find the first difference in the order of execution.

        Args:
            start: the iteration of whose checkpoint a run was resumed; those behind it are
                compared.

        Raises:
            UndecidedError: if a run ended early, or a value that is compared with is no number.
        """
        # a resumed run has iterations behind the checkpoint alone
        self.job.check_iterations(start, self.iterations)
        for run in (self.reference, self.rounded):
            run.check_iterations(0, self.iterations)
        with np.errstate(all="ignore"):
            for kind, iteration, values, least_allowed in self._steps(start):
                difference = self._compare(kind, iteration, values(iteration), least_allowed)
                if difference is not None:
                    return difference
        return None

    def _steps(self, start: int) -> Iterator[_Step]:
        """Yield what is compared, in the order of execution."""
        yield NAMES, start, functools.partial(self._coverage, "parameter"), 0.0
        if start:
            # a resumed run begins with what it has loaded
            yield from self._states(start)
            yield "parameter", start, self._parameters, UPDATED
        else:
            yield INITIAL, 0, self._initial, 0.0
        for i in range(start + 1, self.iterations + 1):
            yield "loss", i, self._losses, self.tolerance
            yield "routing", i, self._routed, self.tolerance
            yield "gradient", i, functools.partial(self._like_gradients, "gradient"), self.tolerance
            yield "gradient norm", i, self._norms, self.tolerance
            yield from self._states(i)
            yield "parameter", i, self._parameters, UPDATED
            yield "evaluation", i, functools.partial(self._reported, "validation$"), UPDATED / 100

    def _states(self, iteration: int) -> Iterator[_Step]:
        """Yield the steps that compare the optimizer's states."""
        for name in STATES:
            values = functools.partial(self._like_gradients, name)
            yield name, iteration, values, 2 * self.tolerance

    def reports(self) -> list[LayoutDifference]:
        """Find the first that differs, in each iteration, of the figures that Megatron reports."""
        differences = []
        with np.errstate(all="ignore"):
            for i in range(1, self.iterations + 1):
                figures = self._reported("loss$|/|logit$|s-norm$", i)
                difference = self._compare("reported", i, figures, UPDATED / 100)
                if difference is not None:
                    differences.append(difference)
        return differences

    def _compare(
        self, kind: str, iteration: int, values: Iterable[_Item], least_allowed: float
    ) -> LayoutDifference | None:
        """Find the first of ``values`` that differs, and how many do."""
        wrong: dict[str, _Wrong] = {}
        unseen: list[str] = []
        names = set()
        for value in values:
            names.add(value.where)
            # one run has no such value
            if isinstance(value, _Lack):
                wrong.setdefault(value.where, _Wrong(value, None, 0.0))
                continue
            self._check_finite(kind, iteration, value)
            error = _norm(value.actual - value.wanted) / value.size
            allowed = max(least_allowed, FLOORS * value.floor / value.size)
            share = error
            if allowed:
                share = error / allowed
            # a share that is no number is of a value that is none
            if math.isnan(share):
                share = math.inf
            self.worst[kind] = max(self.worst.get(kind, 0.0), share)
            if not error <= allowed:  # NaN is no number that is allowed
                wrong.setdefault(value.where, _Wrong(value, error, allowed))
            # half of the value or more is allowed: a fault in it would not be seen
            elif 0 < _norm(value.wanted) <= allowed * value.size / _SEEN:
                unseen.append(value.where)
        if unseen:
            self._say_not_compared(f"{kind} of {_listed(unseen)}: not above roundings")
        if not wrong:
            return None
        # names of both runs were compared, not only those that differ
        if kind == NAMES:
            names.update(self.job.tensors("parameter", iteration))
            names.update(self.reference.tensors("parameter", iteration))
        return self._difference(kind, iteration, wrong, len(names))

    def _check_finite(self, kind: str, iteration: int, value: _Value) -> None:
        """Check that there is a number to compare with.

        Raises:
            UndecidedError: if neither run has one, or roundings alone make it none.
        """
        place = f"{kind} of iteration {iteration}, {value.where}"
        # both runs are broken alike: that is no difference of the layouts
        if not np.isfinite(value.wanted).all() and not np.isfinite(value.actual).all():
            raise UndecidedError(
                f"{self.job.title} and {self.reference.title} have NaN or infinity: {place}"
            )
        # a rounding alone made NaN or infinity of a number
        if np.isfinite(value.wanted).all() and not math.isfinite(value.floor):
            raise UndecidedError(f"{self.rounded.title} has NaN or infinity: {place}")

    def _difference(
        self, kind: str, iteration: int, wrong: Mapping[str, _Wrong], compared: int
    ) -> LayoutDifference:
        """Describe the first of the values that differ."""
        first = next(iter(wrong.values()))
        value = first.value
        notes: tuple[str, ...] = ()
        axes: tuple[str, ...] = ()
        # the value itself says more than its numbers
        if isinstance(value, _Lack):
            notes = (value.note,)
        elif value.notes:
            notes = value.notes
        # only one of the two is finite
        elif not np.isfinite(value.actual).all():
            notes = (f"NaN or infinity in {self.job.title} only",)
        elif not np.isfinite(value.wanted).all():
            notes = (f"NaN or infinity in {self.reference.title} only",)
        # a part of a tensor: factors and axes say where a sum is missing
        elif value.part is not None:
            held = self.job.tensors(kind, iteration)
            notes, axes = self._of_part(value.part, value.wanted, held)
            if self._by_one_factor(wrong):
                notes += ("all by the same factor",)
        elif value.actual.size == 1:
            notes = self._of_number(kind, value.actual.item(), value.wanted.item())
        as_well = len(wrong) - 1, compared
        return LayoutDifference(
            kind,
            iteration,
            value.where,
            value.place,
            first.error,
            first.allowed,
            notes,
            as_well,
            axes,
        )

    def _by_one_factor(self, wrong: Mapping[str, _Wrong]) -> bool:
        """Whether several values differ, and all by the same factor."""
        ratios = []
        for difference in wrong.values():
            value = difference.value
            if isinstance(value, _Lack):
                return False
            ratios.append(_ratio(value.actual, value.wanted))
        # the factor of one tensor alone may be chance
        return len(ratios) > 1 and bool(np.allclose(ratios, ratios[0], _ALIKE))

    def _say_not_compared(self, sentence: str) -> None:
        """Keep what was not compared, once."""
        if sentence not in self.not_compared:
            self.not_compared.append(sentence)

    # -- whether both runs have a value -----------------------------------------------------------

    def _coverage(self, kind: str, iteration: int) -> Iterator[_Lack]:
        """Yield the tensors that one run lacks, or has in another shape, or a part of.

        Raises:
            UndecidedError: The reference itself is not whole.
        """
        wanted = self.reference.tensors(kind, iteration)
        actual = self.job.tensors(kind, iteration)
        self._check_whole(kind, iteration)
        for key in wanted:
            if key not in actual:
                yield _Lack(key, "no rank", f"in {self.reference.title} only")
        for key, parts in actual.items():
            ranks = ranks_text({part.rank for part in parts})
            if key not in wanted:
                yield _Lack(key, ranks, f"in {self.job.title} only")
                continue
            yield from self._shapes(parts, wanted[key][0].global_shape)
            missing = missing_elements(parts)
            if missing:
                of = f"{missing:,} of {math.prod(parts[0].global_shape):,} elements"
                yield _Lack(key, "no rank", f"{of} are on no rank of {self.job.title}")
            yield from self._ranks_without(kind, iteration, key)

    def _check_whole(self, kind: str, iteration: int) -> None:
        """Check that there is all to compare with, and how far roundings move it.

        Raises:
            UndecidedError: with the tensor that is missing.
        """
        wanted = self.reference.tensors(kind, iteration)
        rounded = self.rounded.tensors(kind, iteration)
        for key, parts in wanted.items():
            # the reference must hold every element
            if missing_elements(parts):
                raise UndecidedError(f"{self.reference.title} has a part of {kind} {key} alone")
            # so must the run that says how much roundings matter
            if key not in rounded or rounded[key][0].global_shape != parts[0].global_shape:
                raise UndecidedError(f"{self.rounded.title} has another {kind} {key}")

    def _shapes(self, parts: Sequence[Shard], global_shape: tuple[int, ...]) -> Iterator[_Lack]:
        """Yield the parts of wholes of another shape."""
        for part in parts:
            if part.global_shape != global_shape:
                note = f"shape {list(part.global_shape)} in place of {list(global_shape)}"
                yield _Lack(part.key, part.place, note)

    def _ranks_without(self, kind: str, iteration: int, key: str) -> Iterator[_Lack]:
        """Yield the ranks that have a part of a parameter and nothing of this kind of it."""
        having = {(part.rank, part.offset) for part in self.job.tensors(kind, iteration)[key]}
        # a parameter is compared with what the rank had before the step
        before = iteration
        if kind == "parameter":
            before = iteration - 1
        for part in self.job.tensors("parameter", before).get(key, ()):
            if (part.rank, part.offset) not in having:
                yield _Lack(key, part.place, f"the rank has the parameter and no {kind} of it")

    def _title_of_only(self, place: object, of_job: Collection[object]) -> str:
        """Return the title of the run that has a value which the other run has not."""
        if place in of_job:
            return self.job.title
        return self.reference.title

    # -- the values of an iteration, in the order of execution ------------------------------------

    def _initial(self, _: int) -> Iterator[_Item]:
        wanted = self.reference.wholes("parameter", 0)
        for key, parts in self.job.tensors("parameter", 0).items():
            for part in parts:
                yield _Value(key, part.place, part.data, part.of(wanted[key]), 1.0)

    def _losses(self, iteration: int) -> Iterator[_Item]:
        """Losses of each microbatch on each tensor rank."""
        for place in {**self.reference.losses, **self.job.losses}:
            place_iteration, number, name = place
            if place_iteration != iteration:
                continue
            where = f"{name} of microbatch {number}"
            wanted, actual = self.reference.losses.get(place), self.job.losses.get(place)
            if wanted is None or actual is None:
                title = self._title_of_only(place, self.job.losses)
                yield _Lack(where, "all ranks", f"in {title} only")
                continue
            # the rounded run says how much roundings matter: without it nothing is decided
            if place not in self.rounded.losses:
                raise UndecidedError(f"{self.rounded.title} has no {where}")
            rounded = self.rounded.losses[place][0].mean
            for loss in actual:
                yield _number(where, f"rank {loss.rank}", loss.mean, wanted[0].mean, rounded)

    def _reported(self, names: str, iteration: int) -> Iterator[_Item]:
        """Figures whose name has ``names``."""
        for place in {**self.reference.reported, **self.job.reported}:
            place_iteration, name = place
            # figures of the same name and iteration
            if place_iteration != iteration or not re.search(names, name):
                continue
            # one of the runs does not report it
            if place not in self.job.reported or place not in self.reference.reported:
                title = self._title_of_only(place, self.job.reported)
                yield _Lack(name, "last rank", f"reported by {title} only")
                continue
            wanted = self.reference.reported[place]
            rounded = self.rounded.reported.get(place, wanted)
            yield _number(name, "last rank", self.job.reported[place], wanted, rounded)

    def _routed(self, iteration: int) -> Iterator[_Item]:
        """Shares of tokens that experts get, layer by layer."""
        for place in {**self.reference.routed, **self.job.routed}:
            place_iteration, layer = place
            if place_iteration != iteration:
                continue
            where = f"layer {layer}"
            if place not in self.job.routed or place not in self.reference.routed:
                title = self._title_of_only(place, self.job.routed)
                yield _Lack(where, "all ranks", f"routed in {title} only")
                continue
            actual, wanted = self.job.routed[place], self.reference.routed[place]
            # another number of experts
            if actual.shape != wanted.shape:
                note = f"{actual.size} experts in place of {wanted.size}"
                yield _Lack(where, "all ranks", note)
                continue
            rounded = self.rounded.routed.get(place, wanted)
            yield _Value(where, "all ranks", actual, wanted, 1.0, _norm(rounded - wanted))

    def _like_gradients(self, kind: str, iteration: int) -> Iterator[_Item]:
        """Gradients, or states of the optimizer, which are sums of them and of their squares."""
        yield from self._coverage(kind, iteration)
        wanted = self.reference.wholes(kind, iteration)
        rounded = self.rounded.wholes(kind, iteration)
        actual = self.job.tensors(kind, iteration)
        if not wanted:
            return
        # beside these shares of a full tensor, and of all gradients, roundings of sums are as large
        of_full, of_all = 1e-2, 1e-4
        if kind == "exp_avg_sq":
            of_full, of_all = of_full**2, of_all**2  # a sum of squares
        usual = _mean(np.concatenate([tensor.ravel() for tensor in wanted.values()]))
        for key in reversed(wanted):  # backward
            full, moved = wanted[key], rounded[key] - wanted[key]
            for part in actual.get(key, ()):
                # another shape has been said by ``_coverage``
                if part.global_shape != full.shape:
                    continue
                right, root = part.of(full), math.sqrt(part.data.size)
                size = root * max(_mean(right), of_full * _mean(full), of_all * usual)
                floor = root * max(_mean(part.of(moved)), _mean(moved))
                yield _Value(key, part.place, part.data, right, max(size, 1e-30), floor, part)

    def _norms(self, iteration: int) -> Iterator[_Item]:
        """What is in the gradient norm, by parameter and rank, and the norm of each rank."""
        yield from self._counts(iteration)
        wanted, rounded = self.reference.norms(iteration)[0], self.rounded.norms(iteration)[0]
        for run in (self.job, self.reference):
            for rank, actual in enumerate(run.norms(iteration)):
                where = "of all parameters"
                if run is self.reference:
                    where = f"of all parameters of {run.title}"
                if actual is None and wanted is None:
                    self._say_not_compared("the gradient norm: neither run has one")
                elif actual is None or wanted is None:
                    title = self.reference.title
                    if wanted is None:
                        title = self.job.title
                    yield _Lack(where, f"rank {rank}", f"in {title} only")
                else:
                    # without the rounded run's norm roundings count nothing
                    moved = wanted
                    if rounded is not None:
                        moved = rounded
                    yield _number(where, f"rank {rank}", actual, wanted, moved)

    def _counts(self, iteration: int) -> Iterator[_Value]:
        """How often each part of each gradient is in the norm that a rank gets.

        A part that is small beside the norm would vanish in it.
        """
        wanted_counts = self.reference.counted(iteration, 0)
        wholes: dict[str, np.ndarray] = {}
        for rank in range(self.job.world.size):
            counts = self.job.counted(iteration, rank)
            if counts is None or wanted_counts is None:
                without = self.reference.title
                if counts is None:
                    without = self.job.title
                self._say_not_compared(
                    f"which parameters are in the gradient norm: not known of {without}"
                )
                return
            for part in self._gradient_parts(iteration):
                if part.key not in wholes:
                    wholes[part.key] = placed(wanted_counts, part.key, part.global_shape)
                wanted = part.of(wholes[part.key])
                # a gradient that the other run has not is another difference, and said as such
                if not np.isfinite(wanted).all():
                    continue
                actual = counts.get(part.part_key)
                # no member of the rank's groups has this part
                if actual is None:
                    actual = np.zeros(part.data.shape)
                note = f"counted {_times(actual)} in the norm of rank {rank}, not {_times(wanted)}"
                size = math.sqrt(part.data.size)
                yield _Value(part.key, part.place, actual, wanted, size, notes=(note,))

    def _gradient_parts(self, iteration: int) -> list[Shard]:
        """Return the parts of the job's gradients, of copies the first."""
        parts: dict[PartKey, Shard] = {}
        for shards in self.job.tensors("gradient", iteration).values():
            for part in shards:
                parts.setdefault(part.part_key, part)
        return list(parts.values())

    def _parameters(self, iteration: int) -> Iterator[_Item]:
        """Updates; where a gradient is noise Adam steps by its sign, and those places count 0."""
        yield from self._coverage("parameter", iteration)
        wanted, before = (self.reference.wholes("parameter", i) for i in (iteration, 0))
        rounded, start = (self.rounded.wholes("parameter", i) for i in (iteration, 0))
        gradients = self.reference.wholes("gradient", 1)
        parts = self.job.tensors("parameter", iteration)
        for key, full in wanted.items():
            gradient = gradients.get(key, np.ones_like(full))
            counts = np.abs(gradient) > 1e-3 * _mean(gradient)
            step = (full - before[key]) * counts
            moved = (rounded[key] - start[key]) * counts - step
            for part in parts.get(key, ()):
                # another shape has been said by ``_coverage``
                if part.global_shape != full.shape:
                    continue
                change = (part.data - part.of(before[key])) * part.of(counts)
                rounding = 64 * self.last_bit * _norm(part.of(full))
                usual = 1e-2 * math.sqrt(part.data.size) * _mean(step)
                size = max(_norm(part.of(step)), usual, rounding, 1e-30)
                floor = _norm(part.of(moved))
                yield _Value(key, part.place, change, part.of(step), size, floor)

    # -- what is known of a difference --------------------------------------------------------

    def _of_number(self, kind: str, actual: float, wanted: float) -> tuple[str, ...]:
        """Say both numbers, and the factor between them if there is one."""
        ratio = math.nan
        if wanted:
            ratio = actual / wanted
        factor = self._as_factor(ratio)
        if kind == "gradient norm":
            # a norm is a root: what is counted twice shows in its square
            square = self._as_factor(ratio * ratio)
            if ":" in "".join(square):
                factor = (f"its square: {square[0]}",)
        return (f"{actual:.7g} in place of {wanted:.7g}", *factor)

    def _as_factor(self, ratio: float) -> tuple[str, ...]:
        """``2 x: tp, or cp``: the sizes of groups whose product, or quotient, it is."""
        # equal, or no factor of sizes
        if not (math.isfinite(ratio) and ratio > 0 and abs(ratio - 1) > _ALIKE):
            return ()
        above_one = {name: size for name, size in self._sizes().items() if size > 1}
        # one size explains it, or else the product of two
        for number_of_factors in (1, 2):
            texts = []
            for names in itertools.combinations(above_one, number_of_factors):
                product = math.prod(above_one[name] for name in names)
                text = " x ".join(names)
                if abs(ratio / product - 1) < _ALIKE:
                    texts.append(text)
                if abs(ratio * product - 1) < _ALIKE:
                    texts.append(f"1/({text})")
            if texts:
                return (f"{ratio:.4g} x: {', or '.join(texts)}",)
        return (f"{ratio:.4g} x",)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of groups, and the microbatches of a rank."""
        world = self.job.world
        axes: tuple[str, ...] = _Axes
        # without experts edp is another dp
        if world.ep == 1:
            axes = _Axes[:4]
        sizes = {axis: getattr(world, axis) for axis in axes}
        sizes["the number of microbatches"] = self.microbatches // world.dp
        return sizes

    def _of_part(
        self, part: Shard, right: np.ndarray, held: Mapping[str, Sequence[Shard]]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what is known of a gradient that differs, and the axes that it points at."""
        notes: tuple[str, ...] = ("zero",)
        # a part of zeros has no ratio
        if _norm(part.data):
            notes = self._as_factor(_ratio(part.data, right))
        copies = [copy for copy in held[part.key] if copy.part_key == part.part_key]
        # where copies agree, adding them tells nothing of an axis
        if all(_norm(copy.data - part.data) <= _ALIKE * _norm(right) for copy in copies):
            return notes, ()
        ranks = ranks_text({copy.rank for copy in copies})
        notes += (f"{ranks} hold this part and do not agree on it",)
        axes = [axis for axis in _Axes[:4] if self._is_sum_over(axis, part, copies, right)]
        if axes:
            notes += (f"together over {' or '.join(axes)} they have it: not reduced there",)
        return notes, tuple(axes)

    def _is_sum_over(
        self, axis: str, part: Shard, copies: Sequence[Shard], right: np.ndarray
    ) -> bool:
        """Whether the sum or mean of the copies along an axis is the right value."""
        place = self.job.world.coordinates(part.rank)._asdict()
        other_axes = [name for name in _Axes[:4] if name != axis]
        members = []
        for copy in copies:
            coordinates = self.job.world.coordinates(copy.rank)._asdict()
            # copies that differ in this axis alone
            if all(coordinates[name] == place[name] for name in other_axes):
                members.append(copy)
        if len(members) < 2:
            return False
        total = np.sum([copy.data for copy in members], axis=0)
        allowed = 1e-2 * _norm(right)
        # the sum is missing, or the mean
        return any(_norm(total / n - right) <= allowed for n in (1, len(members)))


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def _mean(values: np.ndarray) -> float:
    """The root of the mean square."""
    return _norm(values) / math.sqrt(max(values.size, 1))


def _times(counts: np.ndarray) -> str:
    """``0 times``; ``0 to 1 times`` where elements differ."""
    fewest, highest = int(counts.min()), int(counts.max())
    if fewest == highest:
        return f"{highest} times"
    return f"{fewest} to {highest} times"


def _listed(names: Sequence[str]) -> str:
    """``a, b, c and 4 more``: the first of the names, each once."""
    single = list(dict.fromkeys(names))
    text = ", ".join(single[:_MOST_NAMES])
    num_unlisted = len(single) - _MOST_NAMES
    if num_unlisted <= 0:
        return text
    return f"{text} and {num_unlisted} more"


def _number(where: str, place: str, actual: float, wanted: float, rounded: float) -> _Value:
    size, floor = max(abs(wanted), 1e-30), abs(rounded - wanted)
    return _Value(where, place, np.array([actual]), np.array([wanted]), size, floor)


def _ratio(actual: np.ndarray, wanted: np.ndarray) -> float:
    """The factor between them, NaN where it is none."""
    square = float((wanted**2).sum())
    if not square:
        return math.nan
    # the factor of the least squares; where it leaves a rest, there is none
    ratio = float((actual * wanted).sum()) / square
    if _norm(actual - ratio * wanted) <= _ALIKE * max(_norm(actual), 1e-30):
        return ratio
    return math.nan
