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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_prism.core.call_selector import CallSelector
from megatron_prism.core.errors import UsageError, WorldError, did_you_mean, refuse
from megatron_prism.core.files import check_writable
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
    given = {name: getattr(args, name) for name in ("tp", "pp", "cp", "ep")}
    sizes = {name: 1 if size is None else size for name, size in given.items()}
    sizes["etp"] = sizes["tp"] if args.etp is None else args.etp
    for name, size in sizes.items():
        if size < 1:
            raise WorldError(f"{name} is {size}", fix="parallel sizes are positive numbers")
    size = args.prism_world_size
    if size is None and not launched and env.get("WORLD_SIZE"):
        size = number_in(env, "WORLD_SIZE", 1)
    if size is None:
        size = implied_size(**sizes)
        while size < k:  # more processes than the smallest world: add data-parallel replicas
            size += implied_size(**sizes)
    order, node = _ORDERS[args.use_tp_pp_dp_mapping], args.prism_gpus_per_node
    if node is None and k == size and processes_here(env, k) < k:  # this is the job itself
        node = processes_here(env, k)
    try:
        return World(size=size, order=order, gpus_per_node=node, **sizes)
    except WorldError as error:
        raise WorldError(error.message, fix=_in_flags(error.fix)) from None


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
    try:
        return World(size=size, order=order, **sizes)
    except WorldError as error:
        raise WorldError(error.message, fix=_in_flags(error.fix)) from None


def _captured_separately(args: argparse.Namespace, k: int) -> bool:
    """Whether ranks may be captured each in a process of its own."""
    return k == 1 and bool(args.prism_capture) and not args.prism_pace


def _in_flags(fix: str | None) -> str | None:
    """``size=56`` of a World's fix as the flag that says it."""
    names = {name: flag for flag, name in SIZES.items()}
    names |= {"size": "--prism-world-size", "gpus_per_node": "--prism-gpus-per-node"}
    pattern = rf"\b({'|'.join(names)})=(?=\d)"
    return fix and re.sub(pattern, lambda found: f"{names[found[1]]}=", fix)


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

    def values_of(flag: str) -> set[str]:
        found = [b for a, b in zip(words, [*words[1:], ""], strict=True) if a == flag]
        return {*found, *(word.partition("=")[2] for word in words if word.startswith(flag + "="))}

    rotary = "rope" in values_of("--position-embedding-type")
    rotary = rotary or "--use-rotary-position-embeddings" in words
    needs = rotary and not {"--no-rope-fusion", "--multi-latent-attention"} & set(words)
    if needs or "--use-precision-aware-optimizer" in words:
        return False
    return values_of("--transformer-impl") == {"local"}


HANG_FLAGS: dict[str, dict[str, Any]] = {
    "--prism-fault": {
        "action": "append",
        "metavar": "KIND@SEL",
        "help": "make a fault happen: drop@rank=37,iter=2,group=tp,nth=2 (repeatable)",
    },
    "--prism-fault-plan": {
        "metavar": "YAML",
        "help": "a list of faults as a file",
    },
    "--prism-fault-seed": {
        "type": int,
        "metavar": "N",
        "help": "draws the ranks of rank=any:K (default 0)",
    },
    "--prism-fault-dry-run": {
        "action": "store_true",
        "help": "say which call every fault would hit, and make none happen",
    },
    "--prism-fault-truth": {
        "metavar": "FILE",
        "help": "write what was injected, a JSON line per fault: the truth that verdicts are "
        "scored with",
    },
    "--prism-world": {
        "metavar": "DIR",
        "help": "programs of the whole job (prism capture): every call is checked against them",
    },
    "--prism-mismatch": {
        "choices": ("strict", "nccl", "gloo", "off"),
        "help": "strict: stop at a call that peers would not make (default with --prism-world); "
        "nccl, gloo: only where that library would hang or abort, else warn",
    },
    "--prism-check-order": {
        "action": "store_true",
        "help": "also stop where this rank leaves the order of its own program in --prism-world",
    },
}


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
    programs = _path(args.prism_world)
    policy = args.prism_mismatch or ("off" if programs is None else "strict")
    strict, seed = policy != "off", args.prism_fault_seed or 0
    refuse(
        (programs is not None and args.prism_world.isdecimal() and not programs.exists(),
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
    truth = _truth_file(args, bool(faults))
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
                       args.prism_check_order, policy, truth)  # fmt: skip


def _truth_file(args: argparse.Namespace, faults: bool) -> Path | None:
    """Where to write what was injected, if asked; UsageError if it cannot be written."""
    if not args.prism_fault_truth:
        return None
    truth = Path(args.prism_fault_truth)
    if not faults or args.prism_fault_dry_run:
        raise UsageError("--prism-fault-truth says what was injected, and nothing is",
                         fix="--prism-fault drop@rank=0, no --prism-fault-dry-run")  # fmt: skip
    if not truth.absolute().parent.is_dir():
        raise UsageError(
            f"cannot write {truth}: {truth.parent} is no folder", fix=f"mkdir -p {truth.parent}"
        )
    check_writable(truth.absolute().parent, "--prism-fault-truth FILE")
    if truth.is_dir():
        raise UsageError(f"{truth} is a folder", fix=f"--prism-fault-truth {truth / 'truth'}")
    if truth.exists() and not args.prism_force:
        raise UsageError(f"{truth} exists and is not overwritten", fix="--prism-force")
    return truth


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

FLAGS: dict[str, dict[str, Any]] = {
    "--prism-emulate": {
        "action": "store_true",
        "help": "run this process as one rank of the large job; all other ranks are virtual",
    },
    "--prism-world-size": {
        "type": int,
        "metavar": "W",
        "help": "ranks of the target job (default: WORLD_SIZE, or what the parallel sizes imply)",
    },
    "--prism-gpus-per-node": {
        "type": int,
        "metavar": "N",
        "help": "ranks on each host of the target job (default: --nproc-per-node of torchrun on "
        "several nodes; else what the machine of a replay has)",
    },
    "--prism-ranks": {
        "metavar": "SEL",
        "help": "ranks to run for real, one per process: '0,517', 'pp=3,tp=0' (default: RANK or "
        "0); with --prism-capture also one by one, 'stages' for all that the world needs",
    },
    "--prism-tier": {
        "default": "auto",
        "choices": TIERS,
        "help": "cuda: real device; cpu: real values on the CPU; meta: shapes only (default: best)",
    },
    "--prism-te-version": {
        "metavar": "V",
        "help": "tiers meta and cpu: refuse to run with another Transformer Engine than V",
    },
    "--prism-values": {
        "default": "mirror",
        "metavar": "POLICY",
        "help": "what virtual ranks hold: mirror (default), noise, recorded:PATH",
    },
    "--prism-record": {
        "metavar": "PATH",
        "help": "record control values and MoE routing for a later --prism-values recorded:PATH; "
        "with all ranks local this run is the real job, and writes its checkpoints",
    },
    "--prism-capture": {
        "metavar": "DIR",
        "help": "folder of slices: record what each local rank does in an iteration (prism show)",
    },
    "--prism-all-microbatches": {
        "action": "store_true",
        "help": "prism capture on tier meta: run every microbatch, also those that follow from few",
    },
    "--prism-pace": {
        "metavar": "DIR",
        "help": "virtual ranks answer when they would, by the slices in DIR (captured if missing)",
    },
    "--prism-slow": {
        "metavar": "SEL:FACTOR",
        "help": "with --prism-pace: virtual ranks slower by FACTOR, 'pp=3:1.2;17:2'",
    },
    "--prism-memory-snapshot": {
        "metavar": "DIR",
        "help": "tier cuda: peaks by phase, and a snapshot of each local rank for memory_viz",
    },
    "--prism-reserve-nccl": {
        "metavar": "CALIBRATION",
        "help": "tier cuda: hold what the large job's NCCL communicators take (h200, or a file)",
    },
    "--prism-out": {
        "metavar": "DIR",
        "help": "artefact folder: one JSON per local rank, written when the job has trained",
    },
    "--prism-force": {"action": "store_true", "help": "replace an existing --prism-out folder"},
    "--prism-recipe": {
        "metavar": "YAML",
        "help": "the same options as a file: its 'prism:' section; flags given here win",
    },
    "--prism-payload": {
        "metavar": "CALLS",
        "help": "of which calls --prism-record also keeps what they deliver: all, or calls as "
        "--prism-break names them, with ; between them",
    },
    "--prism-verbose": {
        "action": "store_true",
        "help": "list what stands in for missing libraries; keep Megatron's warnings of them and "
        "its lists of every bucket's parameters",
    },
    "--prism-strict": {
        "action": "store_true",
        "help": "refuse a job whose data, tokenizer or checkpoint are not here (default: mock "
        "data, a NullTokenizer of its vocabulary, new parameters)",
    },
    "--prism-job-flags": {
        "metavar": "FLAGS",
        "help": "flags more of the job itself, behind those of its line or script",
    },
    "--prism-ignore-unknown": {
        "action": "store_true",
        "help": "run without the flags that this Megatron does not know, such as a fork's",
    },
    **HANG_FLAGS,
    "--prism-break": {
        "metavar": "CALL",
        "help": "stop this rank at a call, in a debugger: '1B2 all_reduce group=tp nth=3', '2F0', "
        "'@mappings.py:31 after' (as prism show prints calls; rank=R where several are local)",
    },
    "--prism-debugger": {
        "metavar": "WHICH",
        "help": "pdb (default), or debugpy:[HOST:]PORT, to which an editor attaches",
    },
    "--prism-iteration": {
        "metavar": "N[..M]",
        "help": "with --load: run iteration N (to M) of the job from its last checkpoint before N, "
        "with the samples, learning rate and batch size of then",
    },
    "--prism-watch": {
        "metavar": "VALUE",
        "help": "stop at the first operator whose result has nan, inf, or norm>X: which module, "
        "phase, microbatch and line",
    },
}


@dataclass(frozen=True)
class Options:
    """Everything settled before Megatron is imported.

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
    engine_release: str | None = None
    all_microbatches: bool = False

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
    found = [next_ for word, next_ in zip(words, words[1:], strict=False) if word == flag]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return found[-1] if found else ""


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


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as our error, so that one place prints it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"bad --prism option: {message}", fix="see the flags with: prism run --help"
        )


def _recipe_defaults(path: str) -> dict[str, object]:
    from megatron_prism.core.recipe import load_prism_section

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
        meant = did_you_mean(word, FLAGS, "see prism run --help;")
        raise UsageError(
            f"unknown option {word}", fix=f"{meant} the options are {', '.join(FLAGS)}"
        )
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
        (args.prism_debugger and not (args.prism_break or args.prism_watch),
         "--prism-debugger without a place to stop", "--prism-break CALL, or --prism-watch nan"),
    )  # fmt: skip
    if not args.prism_emulate:
        return None
    process, k, launched = processes(env)
    world = target_world(args, env, launched, k)
    ranks = local_ranks(args, world, env, launched, k)
    hang = hang_options(args, env, world, ranks)
    slow = [args.prism_slow or "", slow_factors(hang, world, ranks)]
    return Options(
        world=world,
        process=process,
        num_processes=k,
        ranks=ranks,
        tier=args.prism_tier,
        values=args.prism_values,
        out=_path(args.prism_out),
        force=args.prism_force,
        record=_path(args.prism_record),
        capture=_path(args.prism_capture),
        pace=_path(args.prism_pace),
        slow=";".join(filter(None, slow)),
        hang=hang,
        memory=_path(args.prism_memory_snapshot),
        reserve_nccl=args.prism_reserve_nccl,
        stop=args.prism_break,
        debugger=args.prism_debugger,
        watch=args.prism_watch,
        stages=args.prism_ranks == STAGES and _captured_separately(args, k),
        payload=args.prism_payload,
        iterations=_iterations(args.prism_iteration, argv),
        verbose=args.prism_verbose,
        engine_release=args.prism_te_version,
        all_microbatches=args.prism_all_microbatches,
    )


def words_of(env: Mapping[str, str]) -> list[str]:
    """The words of PRISM_ARGS."""
    try:
        return shlex.split(env.get("PRISM_ARGS", ""))
    except ValueError as error:  # an open quote
        raise UsageError(
            f"PRISM_ARGS={env['PRISM_ARGS']}: {error}", fix="write it as on a command line"
        ) from None


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


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


def with_tier(options: Options, tier: str) -> Options:
    """The same options with the tier settled."""
    return replace(options, tier=tier)


def of_worker(options: Options) -> Options:
    """Those of a process that multiprocessing made, which has the job's command line: its world and
    tier alone, so that it neither writes what the job writes nor meets the other processes."""
    world, ranks, verbose = options.world, (options.rank,), options.verbose
    return Options(world, 0, 1, ranks, options.tier, "mirror", verbose=verbose)
