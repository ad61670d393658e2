"""The points of a sweep: every combination of the values of its axes, each with its recipe.

In : a recipe and axes (``tp=1,2,4,8``).  Out: Points; those that are no layout at all carry the
reason why.  An axis has a short name, or is any other of Megatron's flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron_prism.core import foreign
from megatron_prism.core import recipe as recipes
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.recipe import Recipe, option_of
from megatron_prism.emulate.options import value_of
from megatron_prism.features.sweep.layout import (
    JobLayout,
    RecipeLayout,
    ScriptLayout,
    size_of,
    with_option,
)

AXES = {  # short name -> flag of a recipe
    **{axis: recipes.SHORT[axis] for axis in ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp")},
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "recompute": "recompute_granularity",
    "dp": "dp",  # world_size = dp x tp x cp x pp
}
MOST = 20_000  # points that are enumerated
_WORDS = {"none": None, "null": None, "true": True, "false": False}
_NODE = 8  # GPUs, where the job does not say it: tp beyond a node is nothing that auto tries
Value = int | float | str | bool | None


@dataclass(frozen=True)
class Script:
    """A stock script's job: its path, its arguments, and ``--prism-…`` flags for every rank."""

    script: str
    words: tuple[str, ...]
    ours: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.script).name

    def options(self) -> list[str]:
        """Those that are given, and those that a recipe knows."""
        given = [word.partition("=")[0] for word in self.words if word.startswith("--")]
        return [*dict.fromkeys([*given, *map(option_of, recipes.known_flags())])]


Job = Recipe | Script


@dataclass(frozen=True)
class SweepPoint:
    """One combination.

    axes   : short name -> value
    layout : of it; None: it is none
    reason : why it is none, or why it was dropped later; "" while it is in the race
    by     : which filter dropped it
    """

    axes: Mapping[str, Value]
    layout: JobLayout | None
    reason: str = ""
    by: str = ""

    @property
    def name(self) -> str:
        return " ".join(f"{axis}={text(value)}" for axis, value in self.axes.items())

    @property
    def key(self) -> str:
        """Of its result among stored ones."""
        if self.layout is not None:
            return self.layout.key
        return hashlib.sha1(json.dumps(dict(self.axes)).encode()).hexdigest()[:16]

    def dropped(self, by: str, reason: str) -> SweepPoint:
        return dataclasses.replace(self, by=by, reason=reason)


def text(value: Value) -> str:
    """As ``parse_axes`` reads it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_axes(words: Sequence[str], job: Job) -> dict[str, tuple[Value, ...]]:
    """``tp=1,2,4`` and ``pp=auto`` as values, in the order given.

    UsageError for a name that is no axis: it names the closest one and Megatron's argument.
    """
    found: dict[str, tuple[Value, ...]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        axis = _axis(name.lstrip("-").replace("-", "_").lower(), text if equals else "", job)
        if not equals or not text:
            raise UsageError(f"axis {axis} has no values", fix=f"{axis}=1,2,4 or {axis}=auto")
        if axis in found:
            raise UsageError(f"axis {axis} is given twice", fix=f"{axis}=A,B in one word")
        found[axis] = _auto(axis, job) if text == "auto" else _values(axis, text, job)
    if "dp" in found and "world_size" in found:
        raise UsageError("dp and world_size say the same thing", fix="leave one of them out")
    return found


def _axis(name: str, text: str, job: Job) -> str:
    """The short name of an axis, or a flag of a recipe, or an option of the script."""
    flag, known = recipes.OTHER_NAMES.get(name, name), recipes.known_flags()
    short = {flag: axis for axis, flag in AXES.items()}
    if flag in short:
        return short[flag]
    if flag in known:
        return flag
    option = option_of(name)
    if isinstance(job, Script) and option in job.options():
        return option
    words = [*AXES, *known]
    initials = {"".join(part[0] for part in one.split("_")): one for one in words}  # mbs
    close = difflib.get_close_matches(initials.get(name, name), words, n=1, cutoff=0.5)
    if not close:
        raise UsageError(f"a sweep has no axis {name}", fix=f"its axes are {', '.join(AXES)}")
    megatrons = f", Megatron's {option_of(AXES.get(close[0], close[0]))}"
    raise UsageError(f"a sweep has no axis {name}",
                     fix=f"did you mean {close[0]}={text or '…'}{megatrons}?")  # fmt: skip


def _values(axis: str, text: str, job: Job) -> tuple[Value, ...]:
    """UsageError for a value that is none of a recipe's; an option of a script may have any."""
    free = isinstance(job, Script) and axis not in AXES
    kind: object = Value if free else recipes.kind_of(AXES.get(axis, axis)) or int
    values: list[Value] = []
    for part in text.split(","):
        one: Value = _WORDS.get(part.lower(), part)
        if isinstance(one, str):
            for read in (int, float):
                with contextlib.suppress(ValueError):
                    one = read(part)
                    break
        try:
            foreign.shaped(one, cast(type[Value], kind))
        except ValueError as error:
            words = ",".join(["none", *foreign.choices(kind)]) if foreign.choices(kind) else "1,2,4"
            raise UsageError(f"{axis}={part}: {error}", fix=f"{axis}={words}") from None
        if axis in AXES and isinstance(one, int) and one < 1:
            raise UsageError(f"{axis}={part} is less than 1", fix=f"{axis}=1,2,4")
        if one not in values or isinstance(one, bool):
            values.append(one)
    return tuple(values)


def _auto(axis: str, job: Job) -> tuple[Value, ...]:
    """All that divide: what is no layout together with the others falls later."""
    decides = {
        "tp": "num_attention_heads", "pp": "num_layers", "vpp": "num_layers", "cp": "seq_length",
        "ep": "num_experts", "recompute": "", "micro_batch_size": "global_batch_size",
    }  # fmt: skip
    if axis not in decides:
        raise UsageError(f"{axis}=auto: nothing says which to try", fix=f"{axis}=1,2,4")
    size, world = _size(job, decides[axis]), _size(job, "prism.world_size")
    if not size and axis not in ("ep", "recompute"):  # without experts ep is 1
        option = option_of(decides[axis])
        raise UsageError(f"{axis}=auto: the command line has no {option}", fix=f"{axis}=1,2,4")
    powers, node = [1 << n for n in range(11)], _size(job, "prism.gpus_per_node") or _NODE
    found: dict[str, list[Value]] = {
        "tp": [n for n in powers if n <= node and size % n == 0],
        "pp": [n for n in range(1, size + 1) if size % n == world % n == 0],
        "vpp": [n for n in range(1, size + 1) if size % n == 0],
        "cp": [n for n in powers if n <= node and size % (2 * n) == 0],
        "ep": [n for n in range(1, (size or 1) + 1) if (size or 1) % n == 0],
        "micro_batch_size": [n for n in powers[:4] if size % n == 0],
        "recompute": [None, "selective", "full"],
    }
    return tuple(found[axis])


def _size(job: Job, key: str) -> int:
    """A size of the job by its flag; 0 where a command line does not say it."""
    _, dot, name = key.rpartition(".")
    if not key:
        return 0
    if isinstance(job, Recipe):
        return getattr(job.prism if dot else job, name) or 0
    return size_of(job.ours if dot else job.words, option_of(key), 0)


def points(job: Job, axes: Mapping[str, Sequence[Value]]) -> list[SweepPoint]:
    """Every combination once, in the order of the axes."""
    found: dict[str, SweepPoint] = {}
    for values in itertools.product(*axes.values()):
        point = point_of(job, dict(zip(axes, values, strict=True)))
        found.setdefault(point.key, point)
    return list(found.values())


def point_of(job: Job, axes: Mapping[str, Value]) -> SweepPoint:
    """The point of one combination: the job with these values, or why there is none."""
    return _of_recipe(job, axes) if isinstance(job, Recipe) else _of_script(job, axes)


def _of_script(job: Script, axes: Mapping[str, Value]) -> SweepPoint:
    words, ours = list(job.words), list(job.ours)
    for axis, value in axes.items():
        if axis == "world_size":
            ours = with_option(ours, "--prism-world-size", value)
        elif axis != "dp":
            words = with_option(words, option_of(AXES.get(axis, axis)), value)
    if "vpp" in axes:
        words = with_option(words, "--num-layers-per-virtual-pipeline-stage", None)
        if axes["vpp"] == 1:
            words = with_option(words, option_of(AXES["vpp"]), None)
    if "tp" in axes and not {"sequence_parallel", "--sequence-parallel"} & {*axes}:
        tp, given = size_of(job.words, option_of(AXES["tp"])), "--sequence-parallel" in job.words
        if (wanted := _sequence_parallel(axes, tp, given)) != given:
            words = with_option(words, "--sequence-parallel", wanted)
    if "recompute" in axes:
        full = axes["recompute"] == "full"
        method = value_of("--recompute-method", words) or "uniform"
        layers = value_of("--recompute-num-layers", words) or "1"
        words = with_option(words, "--recompute-activations", None)
        words = with_option(words, "--recompute-method", method if full else None)
        words = with_option(words, "--recompute-num-layers", layers if full else None)
    try:
        if "dp" in axes:
            sizes = [size_of(words, option_of(AXES[axis])) for axis in ("tp", "pp", "cp")]
            size = int(str(axes["dp"])) * math.prod(sizes)
            ours = with_option(ours, "--prism-world-size", size)
        return SweepPoint(axes, ScriptLayout.of(job.script, words, ours))
    except PrismError as error:
        return SweepPoint(axes, None, error.message, "no layout")


def _sequence_parallel(axes: Mapping[str, Value], tp: int, given: bool) -> bool:
    """Whether a point has it: as the job where that has tensor parallelism (``tp``), else as
    Megatron's guides advise.
    """
    return (given or tp == 1) and int(str(axes["tp"])) > 1


def _of_recipe(recipe: Recipe, axes: Mapping[str, Value]) -> SweepPoint:
    ours = {"prism.ranks": None, "prism.tier": "meta", "prism.out": None, "train_iters": 2}
    given = {**ours, **{AXES.get(axis, axis): value for axis, value in axes.items()}}
    if axes.get("vpp") == 1:
        given[AXES["vpp"]] = None
    if "tp" in axes and "sequence_parallel" not in axes:
        own = recipe.world.tp, recipe.sequence_parallel
        given["sequence_parallel"] = _sequence_parallel(axes, *own)
    if "recompute" in axes:
        full = axes["recompute"] == "full"
        given["recompute_method"] = (recipe.recompute_method or "uniform") if full else None
        given["recompute_num_layers"] = (recipe.recompute_num_layers or 1) if full else None
    try:
        return SweepPoint(axes, RecipeLayout(recipe.changed(given)))
    except PrismError as error:
        return SweepPoint(axes, None, error.message, "no layout")


def sizes(axes: Mapping[str, Sequence[Value]]) -> int:
    """How many combinations there are."""
    total = 1
    for values in axes.values():
        total *= len(values)
    return total
