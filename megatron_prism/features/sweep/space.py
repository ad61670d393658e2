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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from megatron_prism.core import foreign
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.jobs.recipe import Recipe, option_of
from megatron_prism.emulate.command_line.options import value_of
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
    prism_words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the script's file."""
        return Path(self.script).name

    def options(self) -> list[str]:
        """Return options that the words have, and those that a recipe knows."""
        options: list[str] = []
        for word in self.words:
            if word.startswith("--"):
                option, _, _ = word.partition("=")
                options.append(option)
        options += map(option_of, recipes.known_flags())
        return list(dict.fromkeys(options))


Job = Recipe | Script


@dataclass(frozen=True)
class SweepPoint:
    """One combination.

    Attributes:
        axes: Short name -> value.
        layout: Of it; None: it is none.
        reason: Why it is none, or why it was dropped later; "" while it is in the race.
        by: Which filter dropped it.
    """

    axes: Mapping[str, Value]
    layout: JobLayout | None
    reason: str = ""
    by: str = ""

    @property
    def name(self) -> str:
        """The axes in words."""
        return " ".join(f"{axis}={text(value)}" for axis, value in self.axes.items())

    @property
    def key(self) -> str:
        """Name of its result among stored ones."""
        if self.layout is not None:
            return self.layout.key
        return hashlib.sha1(json.dumps(dict(self.axes)).encode()).hexdigest()[:16]

    def dropped(self, by: str, reason: str) -> SweepPoint:
        """Return the point as a filter dropped it."""
        return dataclasses.replace(self, by=by, reason=reason)


def text(value: Value) -> str:
    """Write a value as ``parse_axes`` reads it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def parse_axes(words: Sequence[str], job: Job) -> dict[str, tuple[Value, ...]]:
    """Read ``tp=1,2,4`` and ``pp=auto`` as values, in the order given.

    Raises:
        UsageError: A name is no axis: it names the closest one and Megatron's argument.
    """
    axes: dict[str, tuple[Value, ...]] = {}
    for word in words:
        name, equals, values_text = word.partition("=")
        axis = _axis(name.lstrip("-").replace("-", "_").lower(), values_text, job)
        if not equals or not values_text:
            raise UsageError(f"axis {axis} has no values", fix=f"{axis}=1,2,4 or {axis}=auto")
        if axis in axes:
            raise UsageError(f"axis {axis} is given twice", fix=f"{axis}=A,B in one word")
        if values_text == "auto":
            axes[axis] = _auto(axis, job)
        else:
            axes[axis] = _values(axis, values_text, job)
    # either of the two follows from the other
    if "dp" in axes and "world_size" in axes:
        raise UsageError("dp and world_size say the same thing", fix="leave one of them out")
    return axes


def _axis(name: str, values_text: str, job: Job) -> str:
    """Return the short name of an axis, or a flag of a recipe, or an option of the script.

    Args:
        name: In lower case, without dashes in front, with underscores for others.
        values_text: Its values, for messages.
        job: Whose axis it is.

    Raises:
        UsageError: it is none of them.
    """
    flag = recipes.OTHER_NAMES.get(name, name)
    flags = recipes.known_flags()
    axis_of_flag = {axis_flag: axis for axis, axis_flag in AXES.items()}
    # an axis, under any of its names
    if flag in axis_of_flag:
        return axis_of_flag[flag]
    # any other flag of a recipe
    if flag in flags:
        return flag
    option = option_of(name)
    # a script may have options that Megatron does not know
    if isinstance(job, Script) and option in job.options():
        return option
    raise _no_axis(name, values_text, [*AXES, *flags])


def _no_axis(name: str, values_text: str, names: Sequence[str]) -> UsageError:
    """Return the error of a name that is no axis; it names the closest of ``names``."""
    # people write mbs
    name_of_initials: dict[str, str] = {}
    for candidate in names:
        initials = "".join(part[0] for part in candidate.split("_"))
        name_of_initials[initials] = candidate
    meant = name_of_initials.get(name, name)
    closest = difflib.get_close_matches(meant, names, n=1, cutoff=0.5)
    fix = f"its axes are {', '.join(AXES)}"
    if closest:
        axis = closest[0]
        option = option_of(AXES.get(axis, axis))
        fix = f"did you mean {axis}={values_text or '…'}, Megatron's {option}?"
    return UsageError(f"a sweep has no axis {name}", fix=fix)


def _values(axis: str, values_text: str, job: Job) -> tuple[Value, ...]:
    """Read the values of an axis; an option of a script may have any.

    Raises:
        UsageError: A value is none of a recipe's.
    """
    kind: object = Value
    if axis in AXES or not isinstance(job, Script):
        kind = recipes.kind_of(AXES.get(axis, axis)) or int
    values: list[Value] = []
    for part in values_text.split(","):
        value = _value(part)
        try:
            foreign.shaped(value, cast(type[Value], kind))
        except ValueError as error:
            choices = foreign.choices(kind)
            words = ",".join(["none", *choices]) if choices else "1,2,4"
            raise UsageError(f"{axis}={part}: {error}", fix=f"{axis}={words}") from None
        if axis in AXES and isinstance(value, int) and value < 1:
            raise UsageError(f"{axis}={part} is less than 1", fix=f"{axis}=1,2,4")
        # true equals 1
        if value not in values or isinstance(value, bool):
            values.append(value)
    return tuple(values)


def _value(word: str) -> Value:
    """Read a word as nothing, truth, a number or text."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    # whole numbers stay whole
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError):
        return float(word)
    return word


# axis that may be auto -> the flag whose size its values divide
_DIVIDED = {
    "tp": "num_attention_heads",
    "pp": "num_layers",
    "vpp": "num_layers",
    "cp": "seq_length",
    "ep": "num_experts",
    "recompute": "",
    "micro_batch_size": "global_batch_size",
}
_POWERS = [1 << exponent for exponent in range(11)]
_MAX_MICRO_BATCH = 8  # that auto tries


def _auto(axis: str, job: Job) -> tuple[Value, ...]:
    """Return all values that divide: what is no layout together with the others falls later."""
    if axis not in _DIVIDED:
        raise UsageError(f"{axis}=auto: nothing says which to try", fix=f"{axis}=1,2,4")
    if axis == "recompute":
        return (None, "selective", "full")
    size = _size(job, _DIVIDED[axis])
    # without experts ep is 1
    if axis == "ep":
        size = size or 1
    if not size:
        option = option_of(_DIVIDED[axis])
        raise UsageError(f"{axis}=auto: the command line has no {option}", fix=f"{axis}=1,2,4")
    if axis in ("tp", "cp"):
        node = _size(job, "prism.gpus_per_node") or _NODE
        # Megatron gives each rank of cp two parts of a sequence
        parts = 2 if axis == "cp" else 1
        return tuple(n for n in _POWERS if n <= node and size % (parts * n) == 0)
    if axis == "micro_batch_size":
        return tuple(n for n in _POWERS if n <= _MAX_MICRO_BATCH and size % n == 0)
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    if axis == "pp":
        world_size = _size(job, "prism.world_size")
        divisors = [n for n in divisors if world_size % n == 0]
    return tuple(divisors)


def _size(job: Job, key: str) -> int:
    """Return a size of the job by its flag; 0 where a command line does not say it."""
    _, dot, name = key.rpartition(".")
    if isinstance(job, Recipe):
        section = job.prism if dot else job
        return getattr(section, name) or 0
    words = job.words
    # "prism.world_size" is a flag of ours
    if dot:
        words = job.prism_words
    return size_of(words, option_of(key), 0)


def points(job: Job, axes: Mapping[str, Sequence[Value]]) -> list[SweepPoint]:
    """Return every combination once, in the order of the axes."""
    point_of_key: dict[str, SweepPoint] = {}
    for values in itertools.product(*axes.values()):
        point = point_of(job, dict(zip(axes, values, strict=True)))
        point_of_key.setdefault(point.key, point)
    return list(point_of_key.values())


def point_of(job: Job, axes: Mapping[str, Value]) -> SweepPoint:
    """Return the point of one combination: the job with these values, or why there is none."""
    if isinstance(job, Recipe):
        return _of_recipe(job, axes)
    return _of_script(job, axes)


def _of_script(job: Script, axes: Mapping[str, Value]) -> SweepPoint:
    """Return the point of a script's job."""
    words = list(job.words)
    prism_words = list(job.prism_words)
    for axis, value in axes.items():
        if axis == "world_size":
            prism_words = with_option(prism_words, "--prism-world-size", value)
        elif axis != "dp":
            words = with_option(words, option_of(AXES.get(axis, axis)), value)
    # a line may say its chunks in one of several ways, and Megatron refuses two of them
    # (training/arguments.py:504 @0.16.1)
    if "vpp" in axes:
        words = with_option(words, "--num-layers-per-virtual-pipeline-stage", None)
        if axes["vpp"] == 1:
            words = with_option(words, option_of(AXES["vpp"]), None)
    # sequence parallelism needs tp, and follows it unless it is an axis itself
    if "tp" in axes and axes.keys().isdisjoint(("sequence_parallel", "--sequence-parallel")):
        tp = size_of(job.words, option_of(AXES["tp"]))
        has_sequence_parallel = "--sequence-parallel" in job.words
        wanted = _sequence_parallel(axes, tp, has_sequence_parallel)
        if wanted != has_sequence_parallel:
            words = with_option(words, "--sequence-parallel", wanted)
    if "recompute" in axes:
        words = _with_recompute(words, axes["recompute"] == "full")
    try:
        if "dp" in axes:
            world_size = int(str(axes["dp"]))
            for axis in ("tp", "pp", "cp"):
                world_size *= size_of(words, option_of(AXES[axis]))
            prism_words = with_option(prism_words, "--prism-world-size", world_size)
        return SweepPoint(axes, ScriptLayout.of(job.script, words, prism_words))
    except PrismError as error:
        return SweepPoint(axes, None, error.message, "no layout")


def _with_recompute(words: list[str], is_full: bool) -> list[str]:
    """Return a script's words with the options that recomputing whole layers needs, or without."""
    method = value_of("--recompute-method", words) or "uniform"
    layers = value_of("--recompute-num-layers", words) or "1"
    words = with_option(words, "--recompute-activations", None)
    # Megatron refuses both options for what is not whole layers
    if not is_full:
        words = with_option(words, "--recompute-method", None)
        return with_option(words, "--recompute-num-layers", None)
    words = with_option(words, "--recompute-method", method)
    return with_option(words, "--recompute-num-layers", layers)


def _sequence_parallel(axes: Mapping[str, Value], tp: int, is_given: bool) -> bool:
    """Tell whether a point has sequence parallelism.

    It is as the job has it where that has tensor parallelism, else as Megatron's guides advise.

    Args:
        axes: Of the point.
        tp: Of the job.
        is_given: Whether the job has it.
    """
    return (is_given or tp == 1) and int(str(axes["tp"])) > 1


def _of_recipe(recipe: Recipe, axes: Mapping[str, Value]) -> SweepPoint:
    """Return the point of a recipe's job."""
    # a capture of shapes on this machine, whatever the recipe asks for
    changes: dict[str, object] = {
        "prism.ranks": None,
        "prism.tier": "meta",
        "prism.out": None,
        "train_iters": 2,
    }
    for axis, value in axes.items():
        changes[AXES.get(axis, axis)] = value
    # one chunk is no interleaving
    if axes.get("vpp") == 1:
        changes[AXES["vpp"]] = None
    # sequence parallel follows tensor parallel, unless it is asked for
    if "tp" in axes and "sequence_parallel" not in axes:
        tp, is_given = recipe.world.tp, recipe.sequence_parallel
        changes["sequence_parallel"] = _sequence_parallel(axes, tp, is_given)
    # method and number of layers follow from recompute
    if "recompute" in axes:
        changes["recompute_method"] = None
        changes["recompute_num_layers"] = None
        if axes["recompute"] == "full":
            changes["recompute_method"] = recipe.recompute_method or "uniform"
            changes["recompute_num_layers"] = recipe.recompute_num_layers or 1
    try:
        return SweepPoint(axes, RecipeLayout(recipe.changed(changes)))
    except PrismError as error:
        return SweepPoint(axes, None, error.message, "no layout")


def sizes(axes: Mapping[str, Sequence[Value]]) -> int:
    """Return how many combinations there are."""
    total = 1
    for values in axes.values():
        total *= len(values)
    return total
