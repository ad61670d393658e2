"""The phases of a job that trains and generates on the same GPUs, as a YAML file says them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import parse_bytes

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER)
SAVER, COPIES = "torch_memory_saver", "copies"
_FIX = "a YAML list: [train, {offload: torch_memory_saver}, {generate: 60GiB}, reload]"
_Rows = Annotated[list[str | dict[str, object]], msgspec.Meta(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Train:
    """One iteration of the captured job."""

    name = "train"


@dataclass(frozen=True)
class Offload:
    """The training process leaves the device.

    Args:
        how: ``torch_memory_saver``: all segments of its allocator, whatever is in them;
            ``copies``: some parts, then ``empty_cache``.
        parts: that are moved out by copies.
        ends_groups: whether communicators are destroyed as well.
    """

    how: str
    parts: tuple[str, ...] = PARTS
    ends_groups: bool = False
    name = "offload"


@dataclass(frozen=True)
class Generate:
    """An inference engine has the device.

    Args:
        weights: bytes that stay on the host in sleep of level 1.
        cache: bytes that each sleep discards.
        sleep: level in which the engine ends the phase: 0: it keeps all; 1: weights go to the host;
            2: they are discarded.
        stays: bytes that no sleep frees: context, graphs.
    """

    weights: int
    cache: int
    sleep: int
    stays: int
    name = "generate"

    @property
    def num_bytes(self) -> int:
        """Return what the engine takes while it generates."""
        return self.weights + self.cache + self.stays


@dataclass(frozen=True)
class Reload:
    """The training process comes back.

    Args:
        parts: that come back; others stay on the host.
    """

    parts: tuple[str, ...] = PARTS
    name = "reload"


Step: TypeAlias = Train | Offload | Generate | Reload


def read_steps(path: Path) -> list[Step]:
    """Read a YAML list of phases.

    Args:
        path: of the file.

    Raises:
        UsageError: it is no such list, or its phases are in no order that runs.
    """
    with foreign.reading(path, "a list of phases", _FIX):
        stored = foreign.load_yaml(path)
        # a key over the list says what it is
        if isinstance(stored, dict) and list(stored) == ["phases"]:
            stored = stored["phases"]
        rows = foreign.shaped(stored, _Rows)
    steps = [_step(row) for row in rows]
    _check_order(steps)
    return steps


def _step(row: str | dict[str, object]) -> Step:
    """Read a phase: its name, or its name over what is said of it."""
    name, value = row, None
    if isinstance(row, dict):
        if len(row) != 1:
            raise UsageError(f"{row} is no phase", fix=_FIX)
        ((name, value),) = row.items()
    if name == "train" and value is None:
        return Train()
    if name == "offload":
        return _offload(value)
    if name == "generate":
        return _generate(value)
    if name == "reload":
        return Reload(_parts(value))
    raise UsageError(f"there is no phase {name}", fix="train, offload, generate or reload")


def _offload(value: object) -> Offload:
    """Read how the training process leaves the device."""
    if value is None:
        value = SAVER
    if isinstance(value, str):
        value = {"with": value}
    if not isinstance(value, dict) or not set(value) <= {"with", "parts", "destroy_groups"}:
        raise UsageError(f"offload: {value}", fix="offload: {with: copies, parts: [optimizer]}")
    how = value.get("with", SAVER)
    if how not in (SAVER, COPIES):
        raise UsageError(f"nothing offloads with {how}", fix=f"{SAVER} or {COPIES}")
    parts = _parts(value.get("parts"))
    # it copies whole segments, which have blocks of several parts
    if how == SAVER and parts != PARTS:
        raise UsageError(f"{SAVER} knows no parts", fix=f"with: {COPIES}")
    return Offload(how, parts, bool(value.get("destroy_groups", False)))


def _parts(value: object) -> tuple[str, ...]:
    """Read names of parts; all where none is named."""
    if value is None:
        return PARTS
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not set(names) <= set(PARTS):
        raise UsageError(f"{value} are no parts", fix=f"parts: [{', '.join(PARTS)}]")
    return tuple(part for part in PARTS if part in names)


def _generate(value: object) -> Generate:
    """Read what the inference engine takes."""
    if not isinstance(value, dict):
        value = {"cache": value}
    if not set(value) <= {"weights", "cache", "sleep", "stays"}:
        fix = "generate: {weights: 15GiB, cache: 40GiB, sleep: 1}"
        raise UsageError(f"generate: {value}", fix=fix)
    # without a level the engine frees its weights and its cache
    sleep = value.get("sleep", 2)
    if sleep not in (0, 1, 2):
        raise UsageError(f"there is no sleep level {sleep}", fix="sleep: 0, 1 or 2")
    sizes = {}
    for key in ("weights", "cache", "stays"):
        sizes[key] = _num_bytes(value.get(key, 0), key)
    return Generate(sizes["weights"], sizes["cache"], sleep, sizes["stays"])


def _num_bytes(value: object, key: str) -> int:
    """Read a size: a number of bytes, or 60GiB."""
    # true is a number to Python: it would be 1 byte
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise UsageError(f"{key}: {value} is no size", fix=f"{key}: 40GiB")
    return parse_bytes(value)


def _check_order(steps: list[Step]) -> None:
    """Raise UsageError where a phase needs what is not on the device."""
    out: set[str] = set()  # parts that are on the host
    is_saved = False  # with all else of the allocator
    for step in steps:
        if isinstance(step, Offload):
            # a second one would count from the whole process again and forget what is out
            if out:
                raise UsageError("two phases offload without a reload between", fix="reload")
            out = set(step.parts)
            is_saved = step.how == SAVER
        elif isinstance(step, Reload):
            if not out:
                raise UsageError("a phase reloads what is not offloaded", fix="offload before it")
            if is_saved and step.parts != PARTS:
                raise UsageError(f"{SAVER} knows no parts", fix="reload alone")
            out -= set(step.parts)
        # the real step would fail, where its peak here is that of a whole process
        elif isinstance(step, Train) and out:
            missing = ", ".join(sorted(out))
            raise UsageError(f"a phase trains with {missing} on the host", fix="reload before it")
