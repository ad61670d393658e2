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
from typing import Any, NoReturn

from megatron_prism.core.call_selector import CallSelector
from megatron_prism.core.errors import UsageError, WorldError, did_you_mean, refuse
from megatron_prism.core.files import check_writable
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.units import counted
from megatron_prism.core.world import STAGES, World, format_ranks, implied_size
from megatron_prism.emulate.launchers import number_in, processes, processes_here
from megatron_prism.hang.fault_plan import Fault, load_plan, parse

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
    given = {name: getattr(args, name) for name in SIZES.values()}
    sizes = {name: 1 if size is None else size for name, size in given.items()}
    if args.etp is None:
        sizes["etp"] = sizes["tp"]
    for name, size in sizes.items():
        if size < 1:
            raise WorldError(f"{name} is {size}", fix="parallel sizes are positive numbers")
    size = args.prism_world_size
    if size is None and not launched and env.get("WORLD_SIZE"):
        size = number_in(env, "WORLD_SIZE", 1)
    if size is None:  # more processes than the smallest world: add data-parallel replicas
        least = implied_size(**sizes)
        size = max(1, -(-k // least)) * least
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
        fix = re.sub(pattern, lambda found: f"{names[found[1]]}=", error.fix or "")
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


def _captured_separately(args: argparse.Namespace, k: int) -> bool:
    """Whether ranks may be captured each in a process of its own."""
    return k == 1 and bool(args.prism_capture)


def local_ranks(
    args: argparse.Namespace, world: World, env: Mapping[str, str], launched: bool, k: int
) -> tuple[int, ...]:
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
            said = f"--prism-ranks {text} matches {counted(len(ranks), 'rank')}, of which {taken}"
            print(f"prism: {said}", file=sys.stderr)
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
    need, and CUDA's own choice is 8."""
    return "8" if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(sys.argv) else "1"


def without_engine() -> bool:
    """Whether the job asks for local layers: who does mostly has no Transformer Engine, nor its
    optimizer, and Megatron takes torch's AdamW.  Who sets a variable NVTE_* has it, and whoever
    asks for what Megatron refuses without it: fused rotary embeddings (its default), states of
    the optimizer in other types."""
    if any(name.startswith("NVTE_") for name in os.environ):
        return False
    words = sys.argv

    rotary = value_of("--position-embedding-type", words) == "rope"
    rotary = rotary or "--use-rotary-position-embeddings" in words
    needs = rotary and not {"--no-rope-fusion", "--multi-latent-attention"} & set(words)
    if needs or "--use-precision-aware-optimizer" in words:
        return False
    return value_of("--transformer-impl", words) == "local"


@dataclass(frozen=True)
class HangOptions:
    """faults: the plan; programs: folder or file of the world's programs; strict: check calls;
    policy: strict, or let through what nccl or gloo lets through; truth: file for what was
    injected."""

    faults: tuple[Fault, ...]
    seed: int
    dry_run: bool
    programs: Path | None
    strict: bool
    check_order: bool = False
    policy: str = "strict"
    truth: Path | None = None


def hang_options(
    args: argparse.Namespace, env: Mapping[str, str], world: World, local: tuple[int, ...]
) -> HangOptions | None:
    """What was asked for, or None.  UsageError for a fault of a rank that nobody plays here."""
    texts = args.prism_fault
    if texts is None:  # the flag wins over the environment
        texts = [t for t in env.get("PRISM_FAULT", "").split(";") if t]
    faults = tuple(parse(text) for text in texts)
    if args.prism_fault_plan:
        faults += load_plan(args.prism_fault_plan)
    programs = args.prism_world
    policy = args.prism_mismatch or ("off" if programs is None else "strict")
    strict, seed = policy != "off", args.prism_fault_seed or 0
    refuse(
        (programs is not None and str(programs).isdecimal() and not programs.exists(),
         f"--prism-world {programs}: there is no such folder of programs",
         f"--prism-world-size {programs}"),
        (args.prism_check_order and (programs is None or not strict),
         "--prism-check-order compares with the programs of the world",
         "--prism-world DIR (prism capture)"),
        (args.prism_fault_dry_run and not faults,
         "--prism-fault-dry-run without a fault", "--prism-fault drop@rank=0"),
        (args.prism_fault_seed is not None and not faults,
         "--prism-fault-seed without a fault", "--prism-fault drop@rank=0"),
    )  # fmt: skip
    _check_truth(args, bool(faults))
    for fault in faults:
        if virtual := set(fault.ranks(world, seed)) - set(local):
            _check_virtual(fault, min(virtual), args, strict and programs is not None)
    if strict and programs is None and len(local) < 2:
        raise UsageError(
            "one local rank, and nothing to compare its calls with",
            fix="--prism-world DIR (prism capture), or several local ranks",
        )
    if not (faults or strict):
        return None
    return HangOptions(faults, seed, args.prism_fault_dry_run, programs, strict,
                       args.prism_check_order, policy, args.prism_fault_truth)  # fmt: skip


def _check_truth(args: argparse.Namespace, faults: bool) -> None:
    """UsageError if the file for what was injected cannot be written."""
    if (truth := args.prism_fault_truth) is None:
        return
    folder = truth.absolute().parent
    refuse(
        (not faults or args.prism_fault_dry_run,
         "--prism-fault-truth says what was injected, and nothing is",
         "--prism-fault drop@rank=0, no --prism-fault-dry-run"),
        (not folder.is_dir(), f"cannot write {truth}: {truth.parent} is no folder",
         f"mkdir -p {truth.parent}"),
        (truth.is_dir(), f"{truth} is a folder", f"--prism-fault-truth {truth / 'truth'}"),
        (truth.exists() and not args.prism_force, f"{truth} exists and is not overwritten",
         "--prism-force"),
    )  # fmt: skip
    check_writable(folder, "--prism-fault-truth FILE")


def _check_virtual(fault: Fault, rank: int, args: argparse.Namespace, compared: bool) -> None:
    """UsageError for a fault of virtual ``rank`` that no local rank would feel.

    compared : whether calls are checked against the programs of the world
    """
    if fault.only_time:
        _check_paced(fault, args)
    elif fault.kind == "env":
        raise UsageError(f"{fault}: programs do not say what a variable changes on a virtual rank",
                         fix=f"--prism-ranks {rank}")  # fmt: skip
    elif not compared:
        raise UsageError(
            f"{fault}: rank {rank} is virtual here and answers at once",
            fix="--prism-world DIR says what it would do (prism capture), or run it with "
            f"--prism-ranks {rank}",
        )


def slow_factors(found: HangOptions | None, world: World, local: tuple[int, ...]) -> str:
    """Virtual ranks that a fault makes slow, in the words of ``--prism-slow``."""
    parts = []
    for fault in found.faults if found is not None else ():
        virtual = set(fault.ranks(world, found.seed)) - set(local)  # type: ignore[union-attr]
        if fault.kind == "slow" and virtual:
            parts.append(f"{format_ranks(virtual)}:{fault.factor('factor', 2):g}")
    return ";".join(parts)


def _check_paced(fault: Fault, args: argparse.Namespace) -> None:
    """UsageError: a virtual rank that is late is felt only where virtual ranks take their time."""
    if fault.kind == "slow" and args.prism_pace:
        if fault.select != CallSelector(fault.select.rank):
            raise UsageError(f"{fault}: a paced rank is slow in every iteration",
                             fix=f"slow@rank={fault.select.rank}:factor=1.5")  # fmt: skip
        return
    if fault.kind == "slow":
        how = f"--prism-pace DIR --prism-slow {fault.select.rank}:{fault.factor('factor', 2):g}"
    else:
        how = f"prism hang DIR fault={fault} says what it costs"
    raise UsageError(f"{fault}: virtual ranks answer at once, however late they are", fix=how)


TIERS = ("auto", "cuda", "cpu", "meta")


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _value(text: str, metavar: str = "DIR", **more: Any) -> dict[str, Any]:
    """A flag with a value, which of a folder or file is a path."""
    kind = {"DIR": _path, "FILE": _path, "W": int, "N": int}.get(metavar, str)
    return {"metavar": metavar, "help": text, "type": kind, **more}


def _path(text: str) -> Path | None:
    return Path(text) if text else None


FLAGS: dict[str, dict[str, Any]] = {
    "--prism-emulate": _switch(
        "run this process as one rank of the large job; all other ranks are virtual"
    ),
    "--prism-world-size": _value(
        "ranks of the target job (default: WORLD_SIZE, or what the parallel sizes imply)", "W"
    ),
    "--prism-gpus-per-node": _value(
        "ranks on each host of the target job (default: --nproc-per-node of torchrun on "
        "several nodes; else what the machine of a replay has)",
        "N",
    ),
    "--prism-ranks": _value(
        "ranks to run for real, one per process: '0,517', 'pp=3,tp=0' (default: RANK or "
        "0); with --prism-capture also one by one, 'stages' for all that the world needs",
        "SEL",
    ),
    "--prism-tier": {
        "default": "auto",
        "choices": TIERS,
        "help": "cuda: real device; cpu: real values on the CPU; meta: shapes only (default: best)",
    },
    "--prism-te-version": _value(
        "tiers meta and cpu: refuse to run with another Transformer Engine than V", "V"
    ),
    "--prism-values": _value(
        "what virtual ranks hold: mirror (default), noise, recorded:PATH",
        "POLICY",
        default="mirror",
    ),
    "--prism-record": _value(
        "record control values and MoE routing for a later --prism-values recorded:PATH; "
        "with all ranks local this run is the real job, and writes its checkpoints"
    ),
    "--prism-capture": _value(
        "folder of slices: record what each local rank does in an iteration (prism show)"
    ),
    "--prism-all-microbatches": _switch(
        "prism capture on tier meta: run every microbatch, also those that follow from few"
    ),
    "--prism-steps": _value(
        "end the job behind N train steps, without what it does at its end; also a loop of its own",
        "N",
    ),
    "--prism-pace": _value(
        "virtual ranks answer when they would, by the slices in DIR (captured if missing)"
    ),
    "--prism-slow": _value(
        "with --prism-pace: virtual ranks slower by FACTOR, 'pp=3:1.2;17:2'", "SEL:FACTOR"
    ),
    "--prism-memory-snapshot": _value(
        "tier cuda: peaks by phase, and a snapshot of each local rank for memory_viz",
        dest="prism_memory",
    ),
    "--prism-reserve-nccl": _value(
        "tier cuda: hold what the large job's NCCL communicators take (h200, or a file)",
        "CALIBRATION",
    ),
    "--prism-out": _value(
        "artefact folder: one JSON per local rank, written when the job has trained"
    ),
    "--prism-force": _switch("replace an existing --prism-out folder"),
    "--prism-recipe": _value(
        "the same options as a file: its 'prism:' section; flags given here win", "YAML"
    ),
    "--prism-payload": _value(
        "of which calls --prism-record also keeps what they deliver: all, or calls as "
        "--prism-break names them, with ; between them",
        "CALLS",
    ),
    "--prism-verbose": _switch(
        "list what stands in for missing libraries; keep Megatron's warnings of them and "
        "its lists of every bucket's parameters"
    ),
    "--prism-strict": _switch(
        "refuse a job whose data, tokenizer or checkpoint are not here (default: mock "
        "data, a NullTokenizer of its vocabulary, new parameters)"
    ),
    "--prism-allow-writes": _switch(
        "a script that runs dry also makes new files and folders outside the working folder"
    ),
    "--prism-job-flags": _value(
        "flags more of the job itself, behind those of its line or script", "FLAGS"
    ),
    "--prism-ignore-unknown": _switch(
        "run without the flags that this Megatron does not know, such as a fork's"
    ),
    "--prism-fault": _value(
        "make a fault happen: drop@rank=37,iter=2,group=tp,nth=3 (repeatable)",
        "KIND@SEL",
        action="append",
    ),
    "--prism-fault-plan": _value("a list of faults as a file", "YAML"),
    "--prism-fault-seed": _value("draws the ranks of rank=any:K (default 0)", "N"),
    "--prism-fault-dry-run": _switch("say which call every fault would hit, and make none happen"),
    "--prism-fault-truth": _value(
        "write what was injected, a JSON line per fault: the truth that verdicts are scored with",
        "FILE",
    ),
    "--prism-world": _value(
        "programs of the whole job (prism capture): every call is checked against them"
    ),
    "--prism-mismatch": {
        "choices": ("strict", "nccl", "gloo", "off"),
        "help": "strict: stop at a call that peers would not make (default with --prism-world); "
        "nccl, gloo: only where that library would hang or abort, else warn",
    },
    "--prism-check-order": _switch(
        "also stop where this rank leaves the order of its own program in --prism-world"
    ),
    "--prism-break": _value(
        "stop this rank at a call, in a debugger: '1B2 all_reduce group=tp nth=3', '2F0', "
        "'@mappings.py:31 after' (as prism show prints calls); where several ranks are local: "
        "'rank=4 2F0; rank=5 2F0'",
        "CALL",
        dest="prism_stop",
    ),
    "--prism-debugger": _value(
        "pdb (default), or debugpy:[HOST:]PORT, to which an editor attaches", "WHICH"
    ),
    "--prism-iteration": _value(
        "with --load: run iteration N (to M) of the job from its last checkpoint before N, "
        "with the samples, learning rate and batch size of then",
        "N[..M]",
    ),
    "--prism-watch": _value(
        "stop at the first operator whose result has nan, inf, or norm>X: which module, "
        "phase, microbatch and line",
        "VALUE",
    ),
}


@dataclass(frozen=True)
class Options:
    """Everything settled before Megatron is imported; what has a flag of that name is its value.

    process, num_processes : which of how many real processes this one is (torchrun: RANK of k)
    ranks                  : the global rank of each process, in process order
    stages                 : capture whatever the world needs, ``ranks`` to begin with
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
    pace: Path | None = None
    slow: str = ""
    hang: HangOptions | None = None
    memory: Path | None = None
    reserve_nccl: str | None = None
    stop: str | None = None
    debugger: str | None = None
    watch: str | None = None
    stages: bool = False
    payload: str | None = None
    iterations: tuple[int, int] | None = None
    verbose: bool = False
    te_version: str | None = None
    all_microbatches: bool = False
    steps: int | None = None

    @property
    def rank(self) -> int:
        """The global rank that this process runs."""
        return self.ranks[self.process]

    @property
    def recorded(self) -> Path | None:
        """The folder of recorded values that virtual ranks hold, if they do."""
        policy, _, path = self.values.partition(":")
        return Path(path) if policy == "recorded" else None

    @property
    def per_call(self) -> bool:
        """Whether something looks at every call, so that every step has to run."""
        asked = (self.hang, self.stop, self.watch, self.payload, self.record)
        return any(one is not None for one in asked)

    @property
    def one_by_one(self) -> bool:
        """Whether ``ranks`` are to be captured in processes of their own, none in this one."""
        return self.stages or len(self.ranks) > self.num_processes


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags as a group of their own; harmless if they are there already."""
    known = parser._option_string_actions
    group = parser.add_argument_group(title="prism (emulation of the whole job on a few devices)")
    for flag, settings in FLAGS.items():
        if flag not in known:
            group.add_argument(flag, **settings)
    return parser


def value_of(flag: str, words: Sequence[str]) -> str:
    """The value of ``flag`` among ``words``, the last one; empty without one."""
    found = ""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def alone() -> set[str]:
    """Our flags that take no value."""
    return {flag for flag, settings in FLAGS.items() if settings.get("action") == "store_true"}


def split(words: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(our flags, each with its words; the other words) of a command line."""
    ours: list[tuple[str, list[str]]] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not name.startswith("--prism-"):
            others.append(word)
        elif equals or name in alone():
            ours.append((name, [word]))
        else:
            ours.append((name, [word, *([following] if (following := next(rest, None)) else [])]))
    return ours, others


def hide_from_parsers(changes: ProcessChanges) -> None:
    """Leave our flags out of what a parser that does not know them reads off the command line."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(
        self: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        known = isinstance(self, _Parser) or "--prism-emulate" in self._option_string_actions
        return original(self, words if known else split(words)[1], namespace)

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
        parser.add_argument(flag, dest=name, type=int, default=None)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--yaml-cfg", default=None)
    parser.add_argument("--fake-process-group", action="store_true")
    args, rest = parser.parse_known_args(list(argv))
    unknown = [a for a in rest if a.startswith("--prism-")]
    if unknown:
        word = unknown[0].partition("=")[0]
        meant = did_you_mean(word, FLAGS, "see prism run --help;")
        raise UsageError(
            f"unknown option {word}", fix=f"{meant} the options are {', '.join(FLAGS)}"
        )
    if args.prism_recipe:
        from megatron_prism.core.recipe import load_prism_section

        section = load_prism_section(Path(args.prism_recipe))
        given = {f"prism_{key}": value for key, value in section.items() if value is not None}
        parser.set_defaults(**given)
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
    given = [a for a in argv if a.startswith("--prism-")]
    refuse(
        (given and not args.prism_emulate,
         f"{''.join(given[:1])} without --prism-emulate has no effect",
         "add --prism-emulate, or drop the --prism-* options"),
        (args.prism_emulate and args.yaml_cfg is not None,
         "--yaml-cfg replaces Megatron's whole argument namespace, so the --prism-* flags would be "
         "lost (training/arguments.py:105 @0.16.1)",
         "pass the job's arguments on the command line instead of --yaml-cfg"),
        (args.prism_emulate and args.fake_process_group,
         "--prism-emulate and --fake-process-group both replace the process groups",
         "drop one of the two flags"),
        (args.prism_capture and args.prism_pace,
         "--prism-capture keeps what a rank does alone, and --prism-pace makes it wait",
         "capture without --prism-pace, which captures what it lacks"),
        (args.prism_debugger and not (args.prism_stop or args.prism_watch),
         "--prism-debugger without a place to stop", "--prism-break CALL, or --prism-watch nan"),
    )  # fmt: skip
    if not args.prism_emulate:
        return None
    process, k, launched = processes(env)
    world = target_world(args, env, launched, k)
    ranks = local_ranks(args, world, env, launched, k)
    hang = hang_options(args, env, world, ranks)
    slow = [args.prism_slow or "", slow_factors(hang, world, ranks)]
    known = {one.name for one in fields(Options)}
    given_flags = {name.removeprefix("prism_"): value for name, value in vars(args).items()}
    settled: dict[str, Any] = {
        "world": world,
        "process": process,
        "num_processes": k,
        "ranks": ranks,
        "slow": ";".join(filter(None, slow)),
        "hang": hang,
        "stages": args.prism_ranks == STAGES and _captured_separately(args, k),
        "iterations": _iterations(args.prism_iteration, argv),
    }
    return Options(**{k: v for k, v in given_flags.items() if k in known} | settled)


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
    found = re.fullmatch(r"([1-9]\d{0,11})(?:\.\.([1-9]\d{0,11}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise UsageError(f"--prism-iteration {text}: a number, from 1, or a first and a last",
                         fix="--prism-iteration 12345, or 12345..12350")  # fmt: skip
    if not any(word == "--load" or word.startswith("--load=") for word in argv):
        raise UsageError("--prism-iteration goes on from a checkpoint of the job",
                         fix="--load CKPT, the folder that the job has as --save")  # fmt: skip
    return first, last


def of_worker(options: Options) -> Options:
    """Those of a process that multiprocessing made, which has the job's command line: its world and
    tier alone, so that it neither writes what the job writes nor meets the other processes."""
    world, ranks, verbose = options.world, (options.rank,), options.verbose
    return Options(world, 0, 1, ranks, options.tier, "mirror", verbose=verbose)
