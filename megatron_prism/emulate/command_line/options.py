"""The ``--prism-*`` options, and the world and ranks derived from them.

``from_command_line(argv, env)`` reads our flags and the parallel sizes among the job's own
arguments and returns Options, or None if emulation was not asked for.  It knows nothing of torch or
Megatron; ``add_flags`` is what Megatron's own parser gets, so that both read the same table.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_prism.core import feature
from megatron_prism.core.errors import UsageError, WorldError, did_you_mean, refuse
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.units import counted
from megatron_prism.core.world import STAGES, World, format_ranks, implied_size
from megatron_prism.emulate.command_line.job_flags import (
    AskedFeature,
    FeatureOptions,
    JobFlags,
    ParsedFlags,
    recorded_folder,
    switch,
    value,
)
from megatron_prism.emulate.command_line.launchers import number_in, processes, processes_here

FeatureOptionsT = TypeVar("FeatureOptionsT", bound=FeatureOptions)

# Megatron's own arguments that fix the smallest world (training/arguments.py @0.16.1, 0.19.0)
SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
}
_ORDERS = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"  # Megatron's, and with --use-tp-pp-dp-mapping


def target_world(args: argparse.Namespace, env: Mapping[str, str], launched: bool, k: int) -> World:
    """The places of the job's ranks, before Megatron has parsed its arguments: without chunks."""
    sizes = dict.fromkeys(SIZES.values(), 1)
    for name in sizes:
        typed_size = getattr(args, name)
        if typed_size is not None:
            sizes[name] = typed_size
    # experts are split as the other layers where the line does not say it
    if args.etp is None:
        sizes["etp"] = sizes["tp"]
    for name, size in sizes.items():
        if size < 1:
            raise WorldError(f"{name} is {size}", fix="parallel sizes are positive numbers")
    size = args.prism_world_size
    if size is None and not launched and env.get("WORLD_SIZE"):
        size = number_in(env, "WORLD_SIZE", 1)
    if size is None:  # more processes than the smallest world: add data-parallel replicas
        smallest_world = implied_size(**sizes)
        size = max(1, -(-k // smallest_world)) * smallest_world
    node = args.prism_gpus_per_node
    if node is None and k == size and processes_here(env, k) < k:  # this is the job itself
        node = processes_here(env, k)
    order = _ORDERS[args.use_tp_pp_dp_mapping]
    return _world(size=size, order=order, gpus_per_node=node, **sizes)


def _world(**sizes: Any) -> World:
    """A World, whose refusals name our flags for its sizes."""
    names = {name: flag for flag, name in SIZES.items()}
    names |= {"size": "--prism-world-size", "gpus_per_node": "--prism-gpus-per-node"}
    try:
        return World(**sizes)
    except WorldError as error:
        pattern = rf"\b({'|'.join(names)})=(?=\d)"
        fix = re.sub(pattern, lambda match: f"{names[match[1]]}=", error.fix or "")
        raise WorldError(error.message, fix=fix or None) from None


def parsed_world(size: int, given: Mapping[str, Any]) -> World:
    """The world of Megatron's validated arguments, or of ``initialize_model_parallel(**given)``;
    WorldError names our flags.

    Chunks are known here alone: several options say them, and Megatron derives them from all of
    them (training/arguments.py:520 @0.16.1, :911 @0.19.0).
    """
    sizes = {
        name: given.get(flag.removeprefix("--").replace("-", "_"), 1) or 1
        for flag, name in SIZES.items()
    }
    sizes["etp"] = given.get("expert_tensor_parallel_size") or sizes["tp"]
    sizes["vpp"] = given.get("virtual_pipeline_model_parallel_size")
    order = given.get("order") or _ORDERS[bool(given.get("use_tp_pp_dp_mapping"))]
    return _world(size=size, order=order, **sizes)


def smallest_world_size(argv: Sequence[str]) -> int:
    """Return how many ranks the parallel sizes on a command line need at least."""
    args = _parse([*words_of(os.environ), *argv])
    sizes = {name: getattr(args, name) or 1 for name in SIZES.values()}
    return implied_size(**{**sizes, "etp": args.etp})


def _captured_separately(args: argparse.Namespace, k: int) -> bool:
    """Whether ranks may be captured each in a process of its own."""
    return k == 1 and bool(args.prism_capture)


def local_ranks(
    args: argparse.Namespace, world: World, env: Mapping[str, str], launched: bool, k: int
) -> tuple[int, ...]:
    """Return the global ranks of the processes here, in the order of the processes.

    Args:
        args: our flags.
        world: of the job.
        env: environment; RANK says the first rank where no launcher does.
        launched: whether a launcher started the processes.
        k: how many processes there are.

    Raises:
        UsageError: the flags name another number of ranks.
        WorldError: a rank is outside the world.
    """
    if args.prism_ranks is None:
        first = 0 if launched else number_in(env, "RANK", 0)
        ranks = tuple(range(first, first + k))
    else:
        text = str(args.prism_ranks)
        ranks = tuple(world.select(text))
        named = "=" not in text
        if len(ranks) > k and named and _captured_separately(args, k):
            return ranks  # each in a process of its own
        if len(ranks) > k and named:
            raise UsageError(
                f"--prism-ranks {text} names {counted(len(ranks), 'rank')}, but there "
                f"{'is one process' if k == 1 else f'are {k} processes'}",
                fix=f"start with torchrun --nproc-per-node {len(ranks)}, one process per rank; "
                "to record each for itself: --prism-capture DIR, without torchrun",
            )
        if len(ranks) > k:  # coordinates match many equal ranks
            taken = f"rank {ranks[0]} runs" if k == 1 else f"ranks {format_ranks(ranks[:k])} run"
            note = f"--prism-ranks {text} matches {counted(len(ranks), 'rank')}, of which {taken}"
            print(f"prism: {note}", file=sys.stderr)
        ranks = ranks[:k]
    if len(ranks) < k:
        raise UsageError(
            f"{k} processes were started, but --prism-ranks {args.prism_ranks} names {len(ranks)}",
            fix=f"name {counted(k, 'rank')}, or start {len(ranks)} processes",
        )
    for rank in ranks:
        if not 0 <= rank < world.size:
            raise WorldError(
                f"rank {rank} is outside the world of {counted(world.size, 'rank')}",
                fix=f"choose a rank between 0 and {world.size - 1}, or raise --prism-world-size",
            )
    return ranks


def cuda_max_connections() -> str:
    """CUDA_DEVICE_MAX_CONNECTIONS where nothing is said: FSDP refuses the one that others
    need, and CUDA's own choice is 8.
    """
    return "8" if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(sys.argv) else "1"


def without_engine() -> bool:
    """Whether the job asks for local layers: who does mostly has no Transformer Engine, nor its
    optimizer, and Megatron takes torch's AdamW.  Who sets a variable NVTE_* has it, and whoever
    asks for what Megatron refuses without it: fused rotary embeddings (its default), states of
    the optimizer in other types.
    """
    if any(name.startswith("NVTE_") for name in os.environ):
        return False
    words = sys.argv

    rotary = value_of("--position-embedding-type", words) == "rope"
    rotary = rotary or "--use-rotary-position-embeddings" in words
    needs = rotary and not {"--no-rope-fusion", "--multi-latent-attention"} & set(words)
    if needs or "--use-precision-aware-optimizer" in words:
        return False
    return value_of("--transformer-impl", words) == "local"


TIERS = ("auto", "cuda", "cpu", "meta")


_CORE_FLAGS: dict[str, dict[str, Any]] = {
    "--prism-emulate": switch(
        "run this process as one rank of the large job; all other ranks are virtual"
    ),
    "--prism-world-size": value(
        "ranks of the target job (default: WORLD_SIZE, or what the parallel sizes imply)", "W"
    ),
    "--prism-gpus-per-node": value(
        "ranks on each host of the target job (default: --nproc-per-node of torchrun on "
        "several nodes; else that of the replay's machine)",
        "N",
    ),
    "--prism-ranks": value(
        "ranks to run for real, one per process: '0,517', 'pp=3,tp=0' (default: RANK or "
        "0); with --prism-capture also one by one, 'stages' for all that the world needs",
        "SEL",
    ),
    "--prism-tier": {
        "default": "auto",
        "choices": TIERS,
        "help": "cuda: real device; cpu: real values on the CPU; meta: shapes only (default: best)",
    },
    "--prism-te-version": value(
        "tiers meta and cpu: refuse to run with another Transformer Engine than V", "V"
    ),
    "--prism-values": value(
        "what virtual ranks hold: mirror (default), noise, recorded:PATH",
        "POLICY",
        default="mirror",
    ),
    "--prism-record": value(
        "record control values and MoE routing for a later --prism-values recorded:PATH; "
        "with all ranks local this run is the real job, and writes its checkpoints"
    ),
    "--prism-capture": value(
        "folder of slices: record what each local rank does in an iteration (prism show)"
    ),
    "--prism-all-microbatches": switch(
        "prism capture on tier meta: run every microbatch, also those that follow from few"
    ),
    "--prism-check": switch(
        "with a capture's worker: end when Megatron has validated the arguments, and tell what "
        "stops the job (prism capture --check)"
    ),
    "--prism-steps": value(
        "end the job after N train steps, without its evaluation and checkpoint",
        "N",
    ),
    "--prism-memory-snapshot": value(
        "tier cuda: peaks by phase, and a snapshot of each local rank for memory_viz",
        dest="prism_memory",
    ),
    "--prism-reserve-nccl": value(
        "tier cuda: hold what the large job's NCCL communicators take (h200, or a file)",
        "CALIBRATION",
    ),
    "--prism-out": value(
        "artefact folder: one JSON per local rank, written when the job has trained"
    ),
    "--prism-force": switch("replace an existing --prism-out folder"),
    "--prism-recipe": value(
        "the same options from the 'prism:' section of a file; flags given here take precedence",
        "YAML",
    ),
    "--prism-verbose": switch(
        "list what stands in for missing libraries; keep Megatron's warnings of them and "
        "its lists of every bucket's parameters"
    ),
    "--prism-strict": switch(
        "refuse a job whose data, tokenizer or checkpoint are not here (default: mock "
        "data, a NullTokenizer of its vocabulary, new parameters)"
    ),
    "--prism-job-flags": value(
        "flags of the job itself, behind or in place of those of its line or script", "FLAGS"
    ),
    "--prism-ignore-unknown": switch(
        "run without the flags that this Megatron does not know, such as a fork's"
    ),
    "--prism-iteration": value(
        "with --load: run iteration N (to M) of the job from its last checkpoint before N, "
        "with the samples, learning rate and batch size of that iteration",
        "N[..M]",
    ),
}


def _all_flags() -> dict[str, Mapping[str, Any]]:
    """Collect the flags of core and of every feature, with their settings for argparse."""
    flags: dict[str, Mapping[str, Any]] = dict(_CORE_FLAGS)
    for row in feature_flags():
        flags.update(row.flags)
    return flags


def feature_flags() -> list[JobFlags]:
    """Return the rows of all features, in the order in which they are attached."""
    rows: list[JobFlags] = []
    for module in feature.modules("flags"):
        rows += module.JOB_FLAGS
    return sorted(rows, key=lambda row: row.place)


FLAGS = _all_flags()


@dataclass(frozen=True)
class Options:
    """Everything settled before Megatron is imported; what has a flag of that name is its value.

    process, num_processes : which of how many real processes this one is (torchrun: RANK of k)
    ranks                  : the global rank of each process, in process order
    stages                 : capture whatever the world needs, ``ranks`` to begin with
    asked_features         : what the flags of features say, in the order of attachment
    """

    world: World
    process: int
    num_processes: int
    ranks: tuple[int, ...]
    tier: str
    values: str
    out: Path | None = None
    force: bool = False
    record: Path | None = None
    capture: Path | None = None
    memory: Path | None = None
    reserve_nccl: str | None = None
    stages: bool = False
    iterations: tuple[int, int] | None = None
    verbose: bool = False
    te_version: str | None = None
    all_microbatches: bool = False
    steps: int | None = None
    asked_features: tuple[AskedFeature, ...] = ()

    @property
    def holds_calls(self) -> bool:
        """Whether the rank may stand at a call for as long as the user likes."""
        return any(asked.options.holds_calls for asked in self.asked_features)

    def of(self, kind: type[FeatureOptionsT]) -> FeatureOptionsT | None:
        """Return the options of a feature, by their class; None where nothing was asked for."""
        for asked in self.asked_features:
            if isinstance(asked.options, kind):
                return asked.options
        return None

    def check_captures(self, flag: str, purpose: str) -> None:
        """Refuse a flag of a capture where nothing is captured.

        Args:
            flag: such as ``--prism-streams``.
            purpose: what it does beside the slice, for the message.

        Raises:
            UsageError: this job is no capture.
        """
        if self.capture is None:
            raise UsageError(
                f"{flag} {purpose}, and nothing is captured",
                fix=f"prism capture -o DIR {flag} -- SCRIPT",
            )

    @property
    def rank(self) -> int:
        """The global rank that this process runs."""
        return self.ranks[self.process]

    @property
    def recorded(self) -> Path | None:
        """The folder of recorded values that virtual ranks hold, if they do."""
        return recorded_folder(self.values)

    @property
    def ranks_share_start(self) -> bool:
        """Whether a capture's ranks may be forks of a process that has started Megatron.

        They may not where more than the capture depends on the rank.
        """
        if self.capture is None or self.asked_features:
            return False
        others = (self.record, self.recorded, self.out, self.memory, self.reserve_nccl)
        return not any(others)

    @property
    def per_call(self) -> bool:
        """Whether something looks at every call, so that every step has to run."""
        if self.record is not None:
            return True
        return any(asked.options.looks_at_every_call for asked in self.asked_features)

    @property
    def loads_own_layout(self) -> bool:
        """Whether a checkpoint that is not here is loaded as one of the job's own layout."""
        return any(asked.options.loads_own_layout for asked in self.asked_features)

    @property
    def one_by_one(self) -> bool:
        """Whether ``ranks`` are to be captured in processes of their own, none in this one."""
        return self.stages or len(self.ranks) > self.num_processes


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags as a group of their own; harmless if they are there already."""
    existing = parser._option_string_actions
    group = parser.add_argument_group(title="prism (emulation of the whole job on a few devices)")
    for flag, settings in FLAGS.items():
        if flag not in existing:
            group.add_argument(flag, **settings)
    return parser


def value_of(flag: str, words: Sequence[str]) -> str:
    """The value of ``flag`` among ``words``, the last one; empty without one."""
    values = values_of(flag, words)
    return values[-1] if values else ""


def values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Return every value of ``flag`` among ``words``, in their order."""
    values = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, joined_value = word.partition("=")
        if name != flag:
            continue
        if equals:
            values.append(joined_value)
        else:
            values.append(following)
    return values


def alone() -> set[str]:
    """Our flags that take no value."""
    return {flag for flag, settings in FLAGS.items() if settings.get("action") == "store_true"}


def split(words: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(our flags, each with its words; the other words) of a command line."""
    own_flags: list[tuple[str, list[str]]] = []
    job_words: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if not name.startswith("--prism-"):
            job_words.append(word)
        elif equals or name in alone():
            own_flags.append((name, [word]))
        else:
            own_flags.append(
                (name, [word, *([following] if (following := next(remaining, None)) else [])])
            )
    return own_flags, job_words


def hide_from_parsers(changes: ProcessChanges) -> None:
    """Leave our flags out of what a parser that does not know them reads off the command line."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(
        self: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        # Megatron's own parser has our flags since ``add_flags``
        takes_own_flags = (
            isinstance(self, _Parser) or "--prism-emulate" in self._option_string_actions
        )
        return original(self, words if takes_own_flags else split(words)[1], namespace)

    changes.set(argparse.ArgumentParser, "parse_known_args", parse_known_args)


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as our error, so that one place prints it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"bad --prism option: {message}", fix="see the flags with: prism run --help"
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="prism", allow_abbrev=False, add_help=False)
    add_flags(parser)
    for flag, name in SIZES.items():
        # sizes are Megatron's flags, which decide the world before Megatron reads them
        parser.add_argument(flag, dest=name, type=int, default=None)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--yaml-cfg", default=None)
    parser.add_argument("--fake-process-group", action="store_true")
    # flags of Megatron are left to its own parser
    args, unread = parser.parse_known_args(list(argv))
    # a flag of ours that nobody has is misspelt
    unknown = [a for a in unread if a.startswith("--prism-")]
    if unknown:
        word = unknown[0].partition("=")[0]
        meant = did_you_mean(word, FLAGS, "see prism run --help;")
        raise UsageError(
            f"unknown option {word}", fix=f"{meant} the options are {', '.join(FLAGS)}"
        )
    if args.prism_recipe:
        from megatron_prism.core.jobs.recipe import load_prism_section

        # what the command line says itself wins over the recipe
        section = load_prism_section(Path(args.prism_recipe))
        defaults = {f"prism_{key}": value for key, value in section.items() if value is not None}
        parser.set_defaults(**defaults)
        args, _ = parser.parse_known_args(list(argv))
    return args


def from_command_line(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Options | None:
    """Options of this process, or None without ``--prism-emulate``.

    ``argv`` is the job's command line without the script; ``PRISM_ARGS`` comes before it.
    Raises UsageError or WorldError with the fix.
    """
    env = os.environ if env is None else env
    argv = [*words_of(env), *argv]
    args = _parse(argv)
    # flags of ours that would do nothing, or would be lost, are refused
    own_flags = [a for a in argv if a.startswith("--prism-")]
    refuse(
        (
            own_flags and not args.prism_emulate,
            f"{''.join(own_flags[:1])} without --prism-emulate has no effect",
            "add --prism-emulate, or drop the --prism-* options",
        ),
        (
            args.prism_emulate and args.yaml_cfg is not None,
            "--yaml-cfg replaces Megatron's whole argument namespace, so the --prism-* flags would "
            "be lost (training/arguments.py:105 @0.16.1)",
            "pass the job's arguments on the command line instead of --yaml-cfg",
        ),
        (
            args.prism_emulate and args.fake_process_group,
            "--prism-emulate and --fake-process-group both replace the process groups",
            "drop one of the two flags",
        ),
    )
    if not args.prism_emulate:
        return None
    process, k, launched = processes(env)
    world = target_world(args, env, launched, k)
    ranks = local_ranks(args, world, env, launched, k)
    parsed = ParsedFlags(args, argv, env, world, ranks)
    asked_features = []
    for row in feature_flags():
        # flags of the launch line's reader: the line is read before the job runs
        if row.read is None:
            continue
        feature_options = row.read(parsed)
        if feature_options is not None:
            asked_features.append(AskedFeature(row, feature_options))
    # flags without a field of their own are those of features, or are settled below
    names = {field.name for field in fields(Options)}
    of_flags = {name.removeprefix("prism_"): value for name, value in vars(args).items()}
    settled: dict[str, Any] = {
        "world": world,
        "process": process,
        "num_processes": k,
        "ranks": ranks,
        "stages": args.prism_ranks == STAGES and _captured_separately(args, k),
        "iterations": _iterations(args.prism_iteration, argv),
        "asked_features": tuple(asked_features),
    }
    return Options(**{k: v for k, v in of_flags.items() if k in names} | settled)


def words_of(env: Mapping[str, str]) -> list[str]:
    """The words of PRISM_ARGS."""
    try:
        return shlex.split(env.get("PRISM_ARGS", ""))
    except ValueError as error:  # an open quote
        raise UsageError(
            f"PRISM_ARGS={env['PRISM_ARGS']}: {error}", fix="write it as on a command line"
        ) from None


def _iterations(text: str | None, argv: Sequence[str]) -> tuple[int, int] | None:
    """The first and the last of ``12345`` or ``12345..12350``."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,11})(?:\.\.([1-9]\d{0,11}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise UsageError(
            f"--prism-iteration {text}: a number, from 1, or a first and a last",
            fix="--prism-iteration 12345, or 12345..12350",
        )
    # without a checkpoint the job begins at iteration 1
    if not any(word == "--load" or word.startswith("--load=") for word in argv):
        raise UsageError(
            "--prism-iteration goes on from a checkpoint of the job",
            fix="--load CKPT, the folder that the job has as --save",
        )
    return first, last


def of_worker(options: Options) -> Options:
    """Those of a process that multiprocessing made, which has the job's command line: its world and
    tier alone, so that it neither writes what the job writes nor meets the other processes.
    """
    world, ranks, verbose = options.world, (options.rank,), options.verbose
    return Options(world, 0, 1, ranks, options.tier, "mirror", verbose=verbose)
