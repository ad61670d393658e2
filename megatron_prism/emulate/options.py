"""What did the user ask for?  The ``--prism-*`` flags, and what they leave to be derived.

``from_command_line(argv, env)`` reads our flags and the parallel sizes among the job's own
arguments and returns Options, or None if emulation was not asked for.  It knows nothing of torch or
Megatron; ``add_flags`` is what Megatron's own parser gets, so that both read the same table.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World
from megatron_prism.emulate import hang_flags
from megatron_prism.emulate.flag_world import SIZES, local_ranks, processes, target_world

__all__ = ["FLAGS", "TIERS", "Options", "add_flags", "from_command_line"]

TIERS = ("auto", "cuda", "cpu", "meta")

FLAGS: dict[str, dict[str, Any]] = {
    "--prism-emulate": {
        "action": "store_true",
        "help": "run this process as one rank of the large job; all other ranks are virtual",
    },
    "--prism-world-size": {
        "type": int,
        "default": None,
        "metavar": "W",
        "help": "ranks of the target job (default: WORLD_SIZE, or what the parallel sizes imply)",
    },
    "--prism-ranks": {
        "default": None,
        "metavar": "SEL",
        "help": "ranks to run for real, one per process: '0,517', 'pp=3,tp=0' (default: RANK or 0)",
    },
    "--prism-tier": {
        "default": "auto",
        "choices": TIERS,
        "help": "cuda: real device; cpu: real values on the CPU; meta: shapes only (default: best)",
    },
    "--prism-values": {
        "default": "mirror",
        "metavar": "POLICY",
        "help": "what virtual ranks hold: mirror (default), noise, recorded:PATH",
    },
    "--prism-record": {
        "default": None,
        "metavar": "PATH",
        "help": "record control values and MoE routing for a later --prism-values recorded:PATH",
    },
    "--prism-capture": {
        "default": None,
        "metavar": "DIR",
        "help": "folder of slices: record what each local rank does in an iteration (prism show)",
    },
    "--prism-pace": {
        "default": None,
        "metavar": "DIR",
        "help": "virtual ranks answer when they would, by the slices in DIR (captured if missing)",
    },
    "--prism-slow": {
        "default": None,
        "metavar": "SEL:FACTOR",
        "help": "with --prism-pace: virtual ranks slower by FACTOR, 'pp=3:1.2;17:2'",
    },
    "--prism-memory-snapshot": {
        "metavar": "DIR",
        "help": "tier cuda: peaks by phase, and a snapshot of each local rank for memory_viz",
    },
    "--prism-ballast": {
        "metavar": "CALIBRATION",
        "help": "tier cuda: hold what the large job's NCCL communicators take (h200, or a file)",
    },
    "--prism-out": {
        "default": None,
        "metavar": "DIR",
        "help": "artefact folder: one JSON per local rank, written when the job has trained",
    },
    "--prism-force": {"action": "store_true", "help": "replace an existing --prism-out folder"},
    "--prism-recipe": {
        "default": None,
        "metavar": "YAML",
        "help": "the same options as a file: its 'prism:' section; flags given here win",
    },
    **hang_flags.FLAGS,
}


@dataclass(frozen=True)
class Options:
    """Everything settled before Megatron is imported.

    process, num_processes : which of how many real processes this one is (torchrun: RANK of k)
    ranks                  : the global rank of each process, in process order
    """

    world: World
    process: int
    num_processes: int
    ranks: tuple[int, ...]
    tier: str
    values: str
    out: Path | None
    force: bool
    record: Path | None
    capture: Path | None = None
    pace: Path | None = None
    slow: str = ""
    hang: hang_flags.HangOptions | None = None
    memory: Path | None = None
    ballast: str | None = None

    @property
    def rank(self) -> int:
        """The global rank that this process runs."""
        return self.ranks[self.process]


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags as a group of their own; harmless if they are there already."""
    known = parser._option_string_actions
    group = parser.add_argument_group(title="prism (emulation of the whole job on a few devices)")
    for flag, settings in FLAGS.items():
        if flag not in known:
            group.add_argument(flag, **settings)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as our error, so that one place prints it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"bad --prism option: {message}", fix="see the flags with: prism run --help"
        )


def _recipe_defaults(path: str) -> dict[str, object]:
    from megatron_prism.core.recipe import load_prism_section  # the only module with OmegaConf

    section = load_prism_section(Path(path))
    return {f"prism_{key}": value for key, value in section.items() if value is not None}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="prism", allow_abbrev=False, add_help=False)
    add_flags(parser)
    for flag, name in SIZES.items():
        parser.add_argument(flag, dest=name, type=int, default=None)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--yaml-cfg", default=None)
    parser.add_argument("--fake-process-group", action="store_true")
    args, rest = parser.parse_known_args(list(argv))
    unknown = [a for a in rest if a.startswith("--prism-")]
    if unknown:
        word = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(word, FLAGS, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"unknown option {word}", fix=f"{meant}the options are {', '.join(FLAGS)}")
    if args.prism_recipe:
        parser.set_defaults(**_recipe_defaults(args.prism_recipe))
        args, _ = parser.parse_known_args(list(argv))
    return args


def from_command_line(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Options | None:
    """Options of this process, or None without ``--prism-emulate``.

    ``argv`` is the job's command line without the script; ``PRISM_ARGS`` comes before it.
    Raises UsageError or WorldError with the fix.
    """
    env = os.environ if env is None else env
    try:
        argv = [*shlex.split(env.get("PRISM_ARGS", "")), *argv]
    except ValueError as error:  # an open quote
        raise UsageError(
            f"PRISM_ARGS={env['PRISM_ARGS']}: {error}", fix="write it as on a command line"
        ) from None
    args = _parse(argv)
    given = [a for a in argv if a.startswith("--prism-")]
    if not args.prism_emulate:
        if given:
            raise UsageError(
                f"{given[0]} without --prism-emulate has no effect",
                fix="add --prism-emulate, or drop the --prism-* options",
            )
        return None
    if args.yaml_cfg is not None:
        raise UsageError(
            "--yaml-cfg replaces Megatron's whole argument namespace, so the --prism-* flags would "
            "be lost (training/arguments.py:105 @0.16.1)",
            fix="pass the job's arguments on the command line instead of --yaml-cfg",
        )
    if args.fake_process_group:
        raise UsageError(
            "--prism-emulate and --fake-process-group both replace the process groups",
            fix="drop one of the two flags",
        )
    process, k, launched = processes(env)
    world = target_world(args, env, launched, k)
    ranks = local_ranks(args, world, env, launched, k)
    hang = hang_flags.options(args, env, world, ranks)
    slow = [args.prism_slow or "", hang_flags.slow(hang, world, ranks)]
    return Options(
        world=world,
        process=process,
        num_processes=k,
        ranks=ranks,
        tier=args.prism_tier,
        values=args.prism_values,
        out=Path(args.prism_out) if args.prism_out else None,
        force=args.prism_force,
        record=Path(args.prism_record) if args.prism_record else None,
        capture=Path(args.prism_capture) if args.prism_capture else None,
        pace=Path(args.prism_pace) if args.prism_pace else None,
        slow=";".join(filter(None, slow)),
        hang=hang,
        memory=Path(args.prism_memory_snapshot) if args.prism_memory_snapshot else None,
        ballast=args.prism_ballast,
    )


def with_tier(options: Options, tier: str) -> Options:
    """The same options with the tier settled."""
    return replace(options, tier=tier)
