"""A change to Megatron: what it replaces, in which releases, why, and what depends on it.

``apply`` fails closed.  Before a job starts every target is looked up in Megatron's source; while
it runs a patch replaces what it declares and nothing else, right after the import of its module, so
that no copy of the old function survives.  A target that is missing ends the job by name, unless
the patch only speeds things up.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.jobs.megatron_source import (
    TESTED,
    Release,
    locate,
    lookup,
    megatron_release,
    parse_release,
)
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate import import_hooks
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.runtime.recorded_values import ValueRecorder, ValueReplayer
from megatron_prism.runtime.virtual_world import VirtualWorld

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

PROTECTS = "protects"  # files of the real job: checkpoints, curves, logs
ENABLES = "enables"  # without it a job does not run, or is wrong
SPEEDS_UP = "speeds up"  # or makes a log easier to read
STATES = FOUND, MISSING, NOT_NEEDED = "found", "missing", "not needed"
TIERS = ("cuda", "cpu", "meta")
NO_CUDA = ("cpu", "meta")
META = ("meta",)
VALUES = ("cuda", "cpu")  # where tensors have values
Original = Callable[..., Any]  # a function of Megatron
Apply = Callable[[ModuleType, "PatchContext"], None]
Replacement = Callable[..., Any]  # (context, original, *args, **kwargs)
_RANGE = re.compile(r"(>=|<)(\d+)\.(\d+)")


@dataclass(frozen=True)
class Patch:
    """A change of one module; ``Patches`` declares it.

    name    : of the patch; the same in two modules if it is the same change
    module  : whose names are replaced
    reason  : why
    source  : the lines that it was read at, ``file:line @release``
    apply   : ``(module, context)``, right after the import of the module
    targets : ``name`` or ``Class.member`` of all that it replaces or needs, each perhaps followed
              by the releases that have it: ``_NCCLEPManager.__init__ >=0.19``
    purpose : PROTECTS, ENABLES or SPEEDS_UP
    releases : that have the module (``<0.19``); "": all
    tiers    : that need it
    """

    name: str
    module: str
    reason: str
    source: str
    apply: Apply
    targets: tuple[str, ...]
    purpose: str = ENABLES
    releases: str = ""
    tiers: tuple[str, ...] = TIERS

    def paths(self, release: Release | None) -> tuple[str, ...]:
        """The targets that ``release`` should have; of an unknown release (None) all."""
        paths = []
        for target in self.targets:
            path, _, releases = target.partition(" ")
            if within(release, releases):
                paths.append(path)
        return tuple(paths)


class _About(TypedDict, total=False):
    """Fields of a Patch; ``at``: its source, without the file where that is the module's."""

    at: Required[str]
    purpose: str
    releases: str
    tiers: tuple[str, ...]


class Patches(list[Patch]):
    """Patches of one subject; its methods decorate functions that are named like the patch, and
    whose docstring is the reason.

    about : what all of them have alike
    place : ``module:target``, or the module alone
    """

    def __init__(self, **about: Any) -> None:
        super().__init__()
        self.about = about

    def patch(self, place: str, *targets: str, **about: Unpack[_About]) -> Callable[[Apply], Apply]:
        """Append a patch of a module that the decorated function applies."""
        module, _, first = place.partition(":")
        fields: dict[str, Any] = {**self.about, **about}
        at = fields.pop("at")
        # a line alone is of the patched module
        if at.startswith(":"):
            at = f"{module.removeprefix('megatron.').replace('.', '/')}.py{at}"

        def declare(function: Apply) -> Apply:
            name = function.__name__.strip("_").replace("_", "-")
            reason = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
            wanted = (first, *targets) if first else targets
            self.append(Patch(name, module, reason, at, function, wanted, **fields))
            return function

        return declare

    def left_out(
        self,
        name: str,
        place: str,
        *,
        reason: str,
        unless: Callable[[PatchContext], bool],
        said: str = "",
        **about: Unpack[_About],
    ) -> None:
        """Append a patch of a function that does nothing ``unless`` the run may; ``said``: once."""

        def leave_out(
            context: PatchContext, original: Original, *args: object, **kwargs: object
        ) -> Any:
            if unless(context):
                return original(*args, **kwargs)
            if said:
                context.say(said)
            return None

        leave_out.__name__, leave_out.__doc__ = name.replace("-", "_"), reason
        self.instead(place, **about)(leave_out)

    def instead(
        self, place: str, *targets: str, **about: Unpack[_About]
    ) -> Callable[[Replacement], Replacement]:
        """Append a patch whose every target is replaced by the decorated function, which is called
        with the context, the original and the arguments.
        """

        def declare(function: Replacement) -> Replacement:
            def put(module: ModuleType, context: PatchContext) -> None:
                context.replace(module, functools.partial(function, context))

            put.__name__, put.__doc__ = function.__name__, function.__doc__
            self.patch(place, *targets, **about)(put)
            return function

        return declare


@dataclass(frozen=True)
class PatchStatus:
    """One target of a patch: found, missing or not needed, and why."""

    patch: Patch
    target: str
    state: str
    why: str = ""

    @property
    def fatal(self) -> bool:
        """Whether a job must not start."""
        return self.state == MISSING and self.patch.purpose != SPEEDS_UP


@dataclass
class PatchContext:
    """What patches need to know of this run; ``start`` brings the virtual world up.

    changes    : what was replaced, so that it can be undone
    iterations : the first and the last that are wanted of a job with a checkpoint, or None
    recording  : keeps values that steer the program, or gives them back
    profiles   : where traces of a profiler go, or None
    records    : whether what the job does is written down as slices
    loads_own_layout : on tier meta, whether a checkpoint that is not here is loaded as one of the
                 job's own layout
    """

    start: Callable[[], VirtualWorld]
    monitor: TrainingMonitor
    meta: bool
    local_ranks: tuple[int, ...]
    rank: int
    changes: ProcessChanges = field(default_factory=ProcessChanges)
    iterations: tuple[int, int] | None = None
    recording: ValueRecorder | ValueReplayer | None = None
    profiles: Path | None = None
    records: bool = False
    loads_own_layout: bool = False
    _applying: Patch | None = None

    @property
    def leads(self) -> bool:
        """Whether this process does what rank 0 does once for all (build indices, compile)."""
        return self.rank == min(self.local_ranks)

    def say(self, text: str) -> None:
        """Note what the job does without; the leading local rank says it on stderr, once."""
        if self.monitor.note(text) and self.leads:
            sys.stderr.write(f"prism: {text}\n")

    def is_real(self, world_size: int | None = None) -> bool:
        """Whether all ranks are local and have values; before torch.distributed starts only
        arguments know the size of the world.
        """
        size = world_size or torch.distributed.get_world_size()
        return len(self.local_ranks) == size and not self.meta

    def writes(self, world_size: int | None = None) -> bool:
        """Whether this run is the real job, of which a recording is made, and writes among its
        files; as ``is_real``.
        """
        return isinstance(self.recording, ValueRecorder) and self.is_real(world_size)

    def replace(self, module: ModuleType, call: Callable[..., Any], *paths: str) -> None:
        """Replace functions of ``module`` by ``call``, whose first argument is the original.

        paths : targets of the patch that is applied; all of them if none is given

        One function that is reachable through two modules is replaced once by each patch.
        """
        patch = self._applying
        assert patch is not None
        for path in paths or patch.paths(None):
            owner, name = self._place(module, path)
            original = getattr(owner, name, None) if owner is not None else None
            changed_by: frozenset[str] = getattr(original, "__prism__", frozenset())
            # it is not in this release, or this patch has changed it under another name
            if original is None or patch.name in changed_by:
                continue
            replacement = _calling(call, original)
            vars(replacement)["__prism__"] = changed_by | {patch.name}
            self.changes.set(owner, name, replacement)

    def set(self, module: ModuleType, path: str, value: object) -> None:
        """Set a target to a stand-in."""
        owner, name = self._place(module, path)
        if owner is not None and hasattr(owner, name):
            self.changes.set(owner, name, value)

    def _place(self, module: ModuleType, path: str) -> tuple[object, str]:
        """The owner of a target and its name there; the owner None where this release lacks it.

        A patch replaces what it declares: else nobody would notice where that is missing.
        """
        patch = self._applying
        if patch is None or path not in patch.paths(None):
            name = "nobody" if patch is None else patch.name
            raise AssertionError(f"patch {name} replaces {path} and does not declare it")
        owner, _, name = path.rpartition(".")
        return (getattr(module, owner, None) if owner else module), name

    @contextlib.contextmanager
    def applying(self, patch: Patch) -> Iterator[None]:
        """While ``patch`` is applied, ``replace`` knows whose targets are meant."""
        before, self._applying = self._applying, patch
        try:
            yield
        finally:
            self._applying = before


def _calling(call: Callable[..., Any], original: Original) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: object, **kwargs: object) -> Any:
        return call(original, *args, **kwargs)

    return replacement


def refused(message: str, fix: str) -> Callable[..., Any]:
    """For ``replace``: a function that cannot run here says so by name."""

    def call(original: Original, *args: object, **kwargs: object) -> Any:
        raise UnsupportedError(message, fix=fix)

    return call


def within(release: Release | None, ranges: str) -> bool:
    """Whether a release is in ``>=0.19``, ``<0.19`` or both; None and "" are everywhere."""
    if release is None:
        return True
    for sign, major, minor in _RANGE.findall(ranges):
        reaches_bound = release >= (int(major), int(minor))
        if reaches_bound != (sign == ">="):
            return False
    return True


def statuses(patches: Sequence[Patch], roots: Sequence[str] | None = None) -> list[PatchStatus]:
    """Look every target up in the source of the Megatron that would be imported.

    roots : where to look for it instead of where Python would

    A package that is absent altogether (megatron.training is not in the wheel of 0.16) needs no
    patch: a job cannot use it.
    """
    release = parse_release(megatron_release(roots))
    statuses = []
    for patch in patches:
        # megatron is a namespace: its packages come apart
        depth = 1
        if patch.module.startswith("megatron"):
            depth = 2
        package = ".".join(patch.module.split(".")[:depth])
        path, why = None, ""
        # no part of this release, or of this environment
        if not within(release, patch.releases):
            why = f"of releases {patch.releases}"
        elif (path := locate(patch.module, roots)) is None and locate(package, roots) is None:
            why = f"{package} is not installed"
        for target in patch.targets:
            name, _, releases = target.partition(" ")
            if why or not within(release, releases):
                statuses.append(
                    PatchStatus(patch, name, NOT_NEEDED, why or f"of releases {releases}")
                )
            elif path is None:
                statuses.append(
                    PatchStatus(patch, name, MISSING, f"there is no module {patch.module}")
                )
            else:
                wrong = lookup(path, name)
                statuses.append(PatchStatus(patch, name, MISSING if wrong else FOUND, wrong))
    return statuses


def apply(patches: Sequence[Patch], context: PatchContext) -> None:
    """Apply every patch, now or when its module is imported.

    Raises UnsupportedError, before anything is written, where a target is missing that protects the
    real job's files or that the job needs; warns of others.
    """
    release = parse_release(megatron_release())
    missing = [status for status in statuses(patches) if status.state == MISSING]
    for status in missing:
        # files would be written, or the job would be wrong
        if status.fatal:
            raise _missing(status.patch, status.target, status.why)
        warnings.warn(f"patch {status.patch.name}: {status.why}; it does without", stacklevel=2)
    for patch in patches:
        if within(release, patch.releases):
            callback = functools.partial(_apply, patch, release, context)
            forget = functools.partial(import_hooks.forget, patch.module, callback)
            context.changes.on_undo(forget)
            import_hooks.after_import(patch.module, callback)


def _apply(
    patch: Patch, release: Release | None, context: PatchContext, module: ModuleType
) -> None:
    for path in patch.paths(release):
        if (wrong := _wrong(module, path)) and patch.purpose != SPEEDS_UP:
            raise _missing(patch, path, wrong)
    with context.applying(patch):
        patch.apply(module, context)


def _wrong(module: ModuleType, path: str) -> str:
    """As ``lookup``, of a module that was imported."""
    name, _, member = path.partition(".")
    if not hasattr(module, name):
        return f"{module.__name__} has no {name}"
    owner = getattr(module, name)
    if member and not isinstance(owner, type):
        return f"{name} is a {type(owner).__name__} now, not a class"
    return "" if not member or hasattr(owner, member) else f"class {name} has no {member}"


def _missing(patch: Patch, target: str, why: str) -> UnsupportedError:
    depends = "the files of the real job" if patch.purpose == PROTECTS else "this run"
    return UnsupportedError(
        f"megatron-core {megatron_release()} lacks {patch.module}:{target} ({why}), and {depends} "
        f"depends on the patch {patch.name} of it: {patch.reason}",
        fix=f"use a tested release ({', '.join(TESTED)}); prism patches lists what is missing",
    )
