"""What two runs keep, one against the other: the first difference in the order of execution.

In : folders of two runs, and of a third that is the second with every parameter rounded otherwise.
Out: a ``LayoutDifference``, or none; and how far apart everything was.  Tolerances follow from
float32 and from how many numbers a sum has; where roundings alone move a value farther than that,
as the third run shows, they follow from it.  Numpy only.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_prism.core.world import World, ranks_text
from megatron_prism.emulate.workers import Json
from megatron_prism.verify import shrink

LAST_BIT = {False: 2.0**-24, True: 2.0**-53}  # of float32, of float64
MARGIN = 4  # times what one sum's roundings make, for those that follow each other
FLOORS = 32  # times what one rounding of every parameter makes
UPDATED = 1e-2  # of an update: where gradients are noise, Adam makes steps of it
_ALIKE = 1e-3  # of a factor
_Axes = ("tp", "cp", "dp", "pp", "ep", "edp")


@dataclass(frozen=True)
class Shard:
    """A part of a gradient or parameter, as ``rank`` has it."""

    key: str
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    rank: int
    data: np.ndarray

    def of(self, whole: np.ndarray) -> np.ndarray:
        """The same part of another whole."""
        return whole[
            tuple(slice(o, o + n) for o, n in zip(self.offset, self.data.shape, strict=True))
        ]

    @property
    def place(self) -> str:
        """``rank 3, [32:64, 0:16]``; the rank alone where it has all of it."""
        ends = [f"{o}:{o + n}" for o, n in zip(self.offset, self.data.shape, strict=True)]
        return f"rank {self.rank}" + (
            f", [{', '.join(ends)}]" if self.data.shape != self.whole else ""
        )


@dataclass(frozen=True)
class LayoutDifference:
    """The first value that is another one.

    what   : loss, reported, routing, gradient, gradient norm, exp_avg, exp_avg_sq, parameter,
        evaluation
    where  : the parameter, microbatch or layer; place: rank and part of the whole
    error  : relative, and what it may be
    notes  : what is known of it: a factor, ranks that do not agree
    as_well : how many other values of this kind differ, of how many
    """

    what: str
    iteration: int
    where: str
    place: str
    error: float
    tolerance: float
    notes: tuple[str, ...] = ()
    as_well: tuple[int, int] = (0, 0)
    axes: tuple[str, ...] = ()


@dataclass
class Kept:
    """What the ranks of one run have kept."""

    folder: Path
    world: World

    @cached_property
    def facts(self) -> list[Json]:
        return [json.loads((self.folder / f"rank-{rank}.json").read_text())
                for rank in range(self.world.size)]  # fmt: skip

    @cached_property
    def _tensors(self) -> dict[tuple[str, int], dict[str, list[Shard]]]:
        found: dict[tuple[str, int], dict[str, list[Shard]]] = {}
        for rank, facts in enumerate(self.facts):
            with np.load(self.folder / f"rank-{rank}.npz") as file:
                arrays = [file[name] for name in file.files]
            for (what, iteration, key, offset, whole), data in zip(
                facts["tensors"], arrays, strict=True
            ):
                one = Shard(key, tuple(offset), tuple(whole), rank, data)
                found.setdefault((what, iteration), {}).setdefault(key, []).append(one)
        return found

    def tensors(self, what: str, iteration: int) -> dict[str, list[Shard]]:
        """Key -> the parts that ranks have, in the order in which the model has them."""
        return self._tensors.get((what, iteration), {})

    def wholes(self, what: str, iteration: int) -> dict[str, np.ndarray]:
        """Key -> the whole, of the first ranks that have its parts; what nobody has is zero."""
        found = {}
        for key, parts in self.tensors(what, iteration).items():
            found[key] = np.zeros(parts[0].whole)
            for part in reversed(parts):
                part.of(found[key])[...] = part.data
        return found

    @cached_property
    def losses(self) -> dict[tuple[int, int, str], tuple[float, int]]:
        """(iteration, microbatch of the whole batch, name) -> (loss of a token, a rank)."""
        sums: dict[tuple[int, int, str], list[tuple[list[float], int]]] = {}
        for facts in self.facts:
            at = self.world.coordinates(facts["rank"])
            if at.tp:
                continue
            for iteration, number, values in facts["losses"]:
                for key, numbers in values.items():
                    place = iteration, number * self.world.dp + at.dp, key
                    sums.setdefault(place, []).append((numbers, facts["rank"]))
        found = {}
        for place, members in sorted(sums.items()):
            total = np.sum([numbers for numbers, _ in members], axis=0)
            mean = total[0] / total[1] if len(total) == 2 else total[0] / len(members)
            found[place] = float(mean), members[0][1]
        return found

    @cached_property
    def reported(self) -> dict[tuple[int, str], float]:
        """(iteration, Megatron's name) -> a figure that the last rank reports to TensorBoard."""
        figures = reversed(self.facts[-1]["reported"])  # the first evaluation of an iteration
        return {(iteration, name): value for iteration, name, value in figures}

    @cached_property
    def routed(self) -> dict[tuple[int, int], np.ndarray]:
        """(iteration, layer) -> the share of tokens that each expert gets."""
        sums: dict[tuple[int, int], np.ndarray] = {}
        for facts in self.facts:
            for key, counts in facts["routed"].items():
                iteration, layer = map(int, key.split())
                sums[iteration, layer] = sums.get((iteration, layer), 0) + np.array(counts, float)
        return {key: counts / counts.sum() for key, counts in sorted(sums.items())}


@dataclass(frozen=True)
class _Value:
    """A value of both runs, a number or a part of a tensor.

    size  : what an error is relative to
    floor : how far other roundings move it
    """

    where: str
    place: str
    got: np.ndarray
    wanted: np.ndarray
    size: float
    floor: float = 0.0
    part: Shard | None = None


_Step = tuple[str, int, Callable[[int], Iterator[_Value]], float]  # kind, iteration, least allowed


@dataclass
class LayoutComparison:
    """``job`` against ``other``; ``rounded`` is the other with other roundings.

    worst : kind of value -> the largest share of its tolerance that an error took
    """

    job: Kept
    other: Kept
    rounded: Kept
    iterations: int
    worst: dict[str, float] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """Of one iteration, in the whole batch."""
        return len([place for place in self.other.losses if place[0] == 1])

    @property
    def last_bit(self) -> float:
        return LAST_BIT[self.job.facts[0].get("precise", False)]

    @property
    def tolerance(self) -> float:
        """Of a sum over the batch and a layer's width, whose roundings are independent."""
        terms = max(self.microbatches, 1) * shrink.SEQUENCE * shrink.HIDDEN
        return MARGIN * self.last_bit * math.sqrt(terms)

    def first(self, start: int = 0) -> LayoutDifference | None:
        """The first difference in the order of execution, behind iteration ``start``, of which a
        run that was resumed has a checkpoint."""
        gradients = functools.partial(self._like_gradients, "gradient")
        steps: list[_Step] = [("initial parameter", 0, self._initial, 0.0)]
        if start:
            steps = [*self._states(start), ("parameter", start, self._parameters, UPDATED)]
        for i in range(start + 1, self.iterations + 1):
            steps += [
                ("loss", i, self._losses, self.tolerance),
                ("routing", i, self._routed, self.tolerance),
                ("gradient", i, gradients, self.tolerance),
                ("gradient norm", i, self._norms, self.tolerance),
                *self._states(i),
                ("parameter", i, self._parameters, UPDATED),
                ("evaluation", i, functools.partial(self._reported, "validation$"), UPDATED / 100),
            ]
        found = (self._compare(kind, i, values(i), least) for kind, i, values, least in steps)
        return next((one for one in found if one is not None), None)

    def reports(self) -> list[LayoutDifference]:
        """The first that differs of the figures of each iteration that Megatron reports by name."""
        figures = functools.partial(self._reported, "loss$|/|logit$|s-norm$")
        found = (self._compare("reported", i, figures(i), UPDATED / 100)
                 for i in range(1, self.iterations + 1))  # fmt: skip
        return [one for one in found if one is not None]

    def _states(self, iteration: int) -> list[_Step]:
        return [(name, iteration, functools.partial(self._like_gradients, name), 2 * self.tolerance)
                for name in ("exp_avg", "exp_avg_sq")]  # fmt: skip

    def _compare(
        self, kind: str, iteration: int, values: Iterable[_Value], least: float
    ) -> LayoutDifference | None:
        """The first of ``values`` that differs, and how many do."""
        wrong: dict[str, tuple[_Value, float, float]] = {}
        names = set()
        for one in values:
            names.add(one.where)
            error = _norm(one.got - one.wanted) / one.size
            most = max(least, FLOORS * one.floor / one.size)
            self.worst[kind] = max(self.worst.get(kind, 0.0), error / most if most else error)
            if not error <= most:  # NaN is none
                wrong.setdefault(one.where, (one, error, most))
        if not wrong:
            return None
        one, error, most = next(iter(wrong.values()))
        notes: tuple[str, ...] = ()
        axes: tuple[str, ...] = ()
        if one.part is None and one.got.size == 1:
            notes = self._of_number(kind, float(one.got[0]), float(one.wanted[0]))
        elif one.part is not None:
            notes, axes = self._of_part(one.part, one.wanted, self.job.tensors(kind, iteration))
            ratios = {key: _ratio(value.got, value.wanted) for key, (value, *_) in wrong.items()}
            if len(wrong) > 1 and np.allclose([*ratios.values()], ratios[one.where], _ALIKE):
                notes += ("all by the same factor",)
        as_well = len(wrong) - 1, len(names)
        return LayoutDifference(
            kind, iteration, one.where, one.place, error, most, notes, as_well, axes
        )

    # -- the values of an iteration, in the order of execution ------------------------------------

    def _initial(self, _: int) -> Iterator[_Value]:
        wanted, got = self.other.wholes("parameter", 0), self.job.tensors("parameter", 0)
        one, none = np.ones(1), np.zeros(1)
        for key in [*wanted, *(got.keys() - wanted.keys())]:
            if key not in wanted or key not in got:
                yield _Value(key, "only one of the runs has it", one, none, 1.0)
                continue
            for part in got[key]:
                yield _Value(key, part.place, part.data, part.of(wanted[key]), 1.0)

    def _losses(self, iteration: int) -> Iterator[_Value]:
        for place, (wanted, _) in self.other.losses.items():
            if place[0] == iteration:
                got, rank = self.job.losses.get(place, (math.nan, 0))
                rounded, _ = self.rounded.losses[place]
                where = f"{place[2]} of microbatch {place[1]}"
                yield _number(where, f"rank {rank}", got, wanted, rounded)

    def _reported(self, names: str, iteration: int) -> Iterator[_Value]:
        """Figures whose name has ``names``."""
        for place, wanted in self.other.reported.items():
            if place[0] == iteration and re.search(names, place[1]):
                got = self.job.reported.get(place, math.nan)
                yield _number(place[1], "last rank", got, wanted, self.rounded.reported[place])

    def _routed(self, iteration: int) -> Iterator[_Value]:
        for place, wanted in self.other.routed.items():
            if place[0] == iteration:
                got = self.job.routed.get(place, np.full_like(wanted, math.nan))
                floor = _norm(self.rounded.routed[place] - wanted)
                yield _Value(f"layer {place[1]}", "all ranks", got, wanted, 1.0, floor)

    def _like_gradients(self, what: str, iteration: int) -> Iterator[_Value]:
        """Gradients, or states of the optimizer, which are sums of them and of their squares."""
        wanted = self.other.wholes(what, iteration)
        rounded = self.rounded.wholes(what, iteration)
        got = self.job.tensors(what, iteration)
        if not wanted:
            return
        usual = _mean(np.concatenate([whole.ravel() for whole in wanted.values()]))
        for key in reversed(wanted):  # backward
            whole, moved = wanted[key], rounded[key] - wanted[key]
            for part in got.get(key, ()):
                right, root = part.of(whole), math.sqrt(part.data.size)
                size = root * max(_mean(right), 1e-2 * _mean(whole), 1e-4 * usual)
                floor = root * max(_mean(part.of(moved)), _mean(moved))
                yield _Value(key, part.place, part.data, right, size, floor, part)

    def _norms(self, iteration: int) -> Iterator[_Value]:
        def norms(kept: Kept) -> list[float]:
            return [facts["norms"][str(iteration)] or math.nan for facts in kept.facts]

        (wanted,), (rounded,) = norms(self.other)[:1], norms(self.rounded)[:1]
        for rank, got in enumerate(norms(self.job)):
            yield _number("of all parameters", f"rank {rank}", got, wanted, rounded)

    def _parameters(self, iteration: int) -> Iterator[_Value]:
        """Updates; where a gradient is noise Adam steps by its sign, and those places count 0."""
        wanted, before = (self.other.wholes("parameter", i) for i in (iteration, 0))
        rounded, start = (self.rounded.wholes("parameter", i) for i in (iteration, 0))
        gradients = self.other.wholes("gradient", 1)
        parts = self.job.tensors("parameter", iteration)
        for key, whole in wanted.items():
            gradient = gradients.get(key, np.ones_like(whole))
            counts = np.abs(gradient) > 1e-3 * _mean(gradient)
            step = (whole - before[key]) * counts
            moved = (rounded[key] - start[key]) * counts - step
            for part in parts.get(key, ()):
                change = (part.data - part.of(before[key])) * part.of(counts)
                rounding = 64 * self.last_bit * _norm(part.of(whole))
                usual = 1e-2 * math.sqrt(part.data.size) * _mean(step)
                size = max(_norm(part.of(step)), usual, rounding, 1e-30)
                floor = _norm(part.of(moved))
                yield _Value(key, part.place, change, part.of(step), size, floor)

    # -- what is known of a difference --------------------------------------------------------

    def _of_number(self, kind: str, got: float, wanted: float) -> tuple[str, ...]:
        known, square = (self._as_factor((got / wanted) ** power) for power in (1, 2))
        if kind == "gradient norm" and ":" in "".join(square):
            known = (f"its square: {square[0]}",)
        return (f"{got:.7g} in place of {wanted:.7g}", *known)

    def _as_factor(self, ratio: float) -> tuple[str, ...]:
        """``2 x: tp, or cp``: the sizes of groups whose product, or quotient, it is."""
        if not (math.isfinite(ratio) and ratio > 0 and abs(ratio - 1) > _ALIKE):
            return ()
        world = self.job.world
        axes = _Axes if world.ep > 1 else _Axes[:4]  # without experts edp is another dp
        sizes = {axis: getattr(world, axis) for axis in axes}
        sizes["the number of microbatches"] = self.microbatches // world.dp
        above = {axis: size for axis, size in sizes.items() if size > 1}
        for n in (1, 2):
            found = []
            for some in itertools.combinations(above, n):
                product, text = math.prod(above[axis] for axis in some), " x ".join(some)
                found += [text] if abs(ratio / product - 1) < _ALIKE else []
                found += [f"1/({text})"] if abs(ratio * product - 1) < _ALIKE else []
            if found:
                return (f"{ratio:.4g} x: {', or '.join(found)}",)
        return (f"{ratio:.4g} x",)

    def _of_part(
        self, part: Shard, right: np.ndarray, held: Mapping[str, Sequence[Shard]]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is known of a gradient that differs, and the axes that it points at."""
        notes = self._as_factor(_ratio(part.data, right)) if _norm(part.data) else ("zero",)
        same = [one for one in held[part.key] if one.offset == part.offset]
        if all(_norm(one.data - part.data) <= _ALIKE * _norm(right) for one in same):
            return notes, ()
        notes += (
            f"{ranks_text({one.rank for one in same})} hold this part and do not agree on it",
        )
        coordinates, axes = self.job.world.coordinates, []
        here = coordinates(part.rank)._asdict()
        for axis in _Axes[:4]:
            others = {(k, v) for k, v in here.items() if k in _Axes[:4] and k != axis}
            members = [x for x in same if others <= coordinates(x.rank)._asdict().items()]
            total = np.sum([one.data for one in members], axis=0)
            if len(members) > 1 and any(
                _norm(total / n - right) <= 1e-2 * _norm(right) for n in (1, len(members))
            ):
                axes.append(axis)
        if axes:
            notes += (f"together over {' or '.join(axes)} they have it: not reduced there",)
        return notes, tuple(axes)


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def _mean(values: np.ndarray) -> float:
    """The root of the mean square."""
    return _norm(values) / math.sqrt(max(values.size, 1))


def _number(where: str, place: str, got: float, wanted: float, rounded: float) -> _Value:
    size, floor = max(abs(wanted), 1e-30), abs(rounded - wanted)
    return _Value(where, place, np.array([got]), np.array([wanted]), size, floor)


def _ratio(got: np.ndarray, wanted: np.ndarray) -> float:
    """The factor between them, NaN where it is none."""
    square = float((wanted**2).sum())
    ratio = float((got * wanted).sum()) / square if square else math.nan
    return ratio if _norm(got - ratio * wanted) <= _ALIKE * max(_norm(got), 1e-30) else math.nan
