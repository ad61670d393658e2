"""Flags of a job that a feature adds: what argparse reads, and what the flags turn on.

A feature's ``flags.py`` has ``JOB_FLAGS``, rows of ``JobFlags``.  ``options.py`` reads the flags of
all features beside its own, ``emulate.rank.launch`` attaches what was asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World


class FeatureOptions:
    """Base of what the flags of a feature say; a subclass is a frozen dataclass.

    Core asks these questions of every feature's options; the answers here are those of a feature
    that none of them concerns.
    """

    @property
    def looks_at_every_call(self) -> bool:
        """Whether every train step has to run, because each of its calls is looked at."""
        return False

    @property
    def holds_calls(self) -> bool:
        """Whether a rank may stand at a call for as long as the user likes."""
        return False

    @property
    def records_calls(self) -> bool:
        """Whether --prism-record keeps what calls deliver, so that ranks may be virtual."""
        return False

    @property
    def loads_own_layout(self) -> bool:
        """Whether a checkpoint that is not here is loaded as one of the job's own layout."""
        return False

    @property
    def needs_sizes(self) -> str:
        """The flag that needs the parallel sizes before the script runs; "": none does."""
        return ""

    def slow_ranks(self, world: World, local_ranks: Sequence[int]) -> str:
        """Virtual ranks that are slow, as ``ranks:factor;ranks:factor``."""
        return ""


@dataclass(frozen=True)
class ParsedFlags:
    """What a feature reads its options from.

    Args:
        args: what argparse read of the flags.
        argv: the job's command line without the script, ``PRISM_ARGS`` in front.
        env: environment of the process.
        world: the world of the job.
        local_ranks: global ranks that have a process here.
    """

    args: argparse.Namespace
    argv: Sequence[str]
    env: Mapping[str, str]
    world: World
    local_ranks: tuple[int, ...]

    def flag_is_set(self, name: str) -> bool:
        """Whether a flag, perhaps of another feature, is there and has a value.

        Args:
            name: of the flag as argparse stores it, such as ``prism_pace``.
        """
        return bool(getattr(self.args, name, None))

    def check_tier_has_shapes(self, flag: str, purpose: str) -> None:
        """Refuse a flag on a tier whose memory and streams are not those of the job's device.

        Args:
            flag: such as ``--prism-streams``.
            purpose: what it does with shapes, for the message.

        Raises:
            UsageError: the tier is cpu or cuda.
        """
        tier = self.args.prism_tier
        if tier not in ("meta", "auto", None):
            raise UsageError(f"{flag} {purpose}, and the tier is {tier}", fix="--prism-tier meta")


class AttachOrder:
    """Order in which parts of a run are attached: it is the order in which listeners are told."""

    OUTPUT = 0
    PACING = 10
    DEBUGGER = 20
    FAULTS = 30
    PAYLOADS = 39
    RECORDING = 40
    DEVICE_MEMORY = 50
    CAPTURE = 60


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Flags of a job and what they turn on.

    Flags of the launch line's reader turn nothing on in the job: they have neither ``read`` nor
    ``attach``.

    Args:
        flags: flag -> settings of argparse's add_argument.
        read: makes the options, or None where nothing was asked for.  Raises UsageError for flags
            that do not go together.
        attach: adds listeners, places to write and checks to a run; called with the run
            (``session.Run``), its session and the options.  A row with ``read`` has it.
        place: where in the order of ``AttachOrder`` it is attached.
        section: key of the feature's section in the JSON of a run (``Section.name``); the key is
            there, with null, in runs without the feature.
    """

    flags: Mapping[str, Mapping[str, Any]]
    read: Callable[[ParsedFlags], FeatureOptions | None] | None = None
    attach: Callable[[Any, Any, Any], None] | None = None
    place: int = AttachOrder.OUTPUT
    section: str = ""


@dataclass(frozen=True)
class AskedFeature:
    """A row of flags, and what these flags say in one job."""

    row: JobFlags
    options: FeatureOptions


class Section(Protocol):
    """What a listener says of the run when the job has trained.

    name            : key in the JSON of the run
    time_provenance : what else is to know of measured times; "": nothing
    """

    name: str
    time_provenance: str

    def summary(self) -> Mapping[str, Any]:
        """Make the section's JSON."""
        ...

    def lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Make the lines that people get of that JSON."""
        ...


def switch(text: str) -> dict[str, Any]:
    """Make the settings of a flag without a value, whose help is ``text``."""
    return {"action": "store_true", "help": text}


def value(text: str, metavar: str = "DIR", **more: Any) -> dict[str, Any]:
    """Make the settings of a flag with a value.

    Args:
        text: help of the flag.
        metavar: DIR and FILE are read as paths, W and N as integers, others as text.
        **more: further settings of argparse's add_argument.
    """
    kinds = {"DIR": read_path, "FILE": read_path, "W": int, "N": int}
    return {"metavar": metavar, "help": text, "type": kinds.get(metavar, str), **more}


def recorded_folder(values: str) -> Path | None:
    """Return the folder of recorded values that ``--prism-values`` names; None for another policy.

    Args:
        values: mirror, noise, or recorded:PATH.
    """
    policy, _, path = values.partition(":")
    return Path(path) if policy == "recorded" else None


def read_path(text: str) -> Path | None:
    """Read a path; an empty word is none."""
    return Path(text) if text else None
