"""How does a job become an emulated one?

``install_from_command_line`` runs before the first ``import megatron`` (zero-edit attach);
``run_script`` is ``prism run -- pretrain_gpt.py …``.  Both settle the options, give Megatron the
virtual RANK and WORLD_SIZE, prepare the tier, register the seams and arrange for the verdict.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_prism.core.artefact import check_writable
from megatron_prism.core.errors import NotTrainedError, PrismError, UsageError
from megatron_prism.core.megatron_source import UNKNOWN, megatron_release
from megatron_prism.emulate import exit_status
from megatron_prism.emulate import options as flags
from megatron_prism.emulate.flag_world import queues, without_engine

__all__ = ["TESTED", "install", "install_from_command_line", "run_script", "start_world"]

TESTED = ("0.16.1", "0.19.0", "0.19.1", "0.19.2")  # megatron-core; tag core_v0.19.0 reports 0.19.1


def run_script(argv: Sequence[str]) -> int:
    """Run ``argv`` (``[--prism-… ] script.py arguments``) as a program; returns its exit status.

    Flags before the script are ours; ``--prism-emulate`` is implied.
    """
    words = enumerate(argv)
    split = next((i + (a == "--") for i, a in words if a == "--" or a.endswith(".py")), len(argv))
    if split == len(argv):
        raise UsageError(
            "prism run needs a script", fix="prism run -- pretrain_gpt.py <the job's arguments>"
        )
    ours = [a for a in argv[:split] if a != "--"]
    script, rest = argv[split], list(argv[split + 1 :])
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script}", fix="give the path of pretrain_gpt.py")
    emulate = [] if "--prism-emulate" in [*ours, *rest] else ["--prism-emulate"]
    sys.argv = [script, *emulate, *ours, *rest]
    sys.path.insert(0, str(Path(script).resolve().parent))
    install_from_command_line()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # also one that was raised without sys.exit
        exit_status.note(end.code)
        raise
    except BaseException:
        exit_status.note(1)
        raise
    return 0


def install_from_command_line() -> None:
    """Install what ``sys.argv`` and ``PRISM_ARGS`` ask for; bad usage ends the process (exit 2)."""
    if getattr(install_from_command_line, "done", False):
        return
    install_from_command_line.done = True  # type: ignore[attr-defined]
    try:
        options = flags.from_command_line(sys.argv[1:])
        if options is not None:
            install(options)
    except PrismError as error:
        exit_status.report(error)
        raise SystemExit(error.exit_code) from None


def _check_version() -> str:
    """The release of the megatron.core that is imported; an untested one warns by name."""
    release = megatron_release()
    if release not in TESTED and release != UNKNOWN:
        warnings.warn(
            f"megatron-core {release} was never tested with megatron_prism "
            f"(tested: {', '.join(TESTED)}); prism patches says what it lacks",
            stacklevel=2,
        )
    return release


def install(options: flags.Options) -> Any:
    """Prepare this process for ``options``; returns the seams' Context.

    Raises UsageError for a tier that this host lacks, two local ranks on one device, or an artefact
    folder that exists.
    """
    from megatron_prism.emulate import call_guard, nccl_reserve, patch, summary
    from megatron_prism.emulate import capture as stock_capture
    from megatron_prism.emulate.monitor import Proof
    from megatron_prism.emulate.patches import moe, without_cuda
    from megatron_prism.runtime import devices as tiers
    from megatron_prism.runtime.values import Values

    version = _check_version()
    Values(options.values)  # a bad policy is bad usage now, not a failed job later
    if options.out is not None and options.process == 0:
        summary.check_free(options.out, options.force)
    if options.capture is not None:
        stock_capture.check_free(options.capture, options.rank, options.force)
    engine = not (options.tier == "meta" and without_engine())
    tier = tiers.install(options.tier, engine, queues(), history=options.capture is not None)
    options = flags.with_tier(options, tier.name)
    _check_devices(options)
    store = _shared_store(options)
    pace = _pace(options, version, store) if options.pace or options.slow else None
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(options.rank), str(options.world.size)
    defaults = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    os.environ.update({name: os.environ.get(name, text) for name, text in defaults.items()})

    proof = Proof(tier.live, shapes_only=tier.name == "meta")
    if options.hang is not None:
        call_guard.install(options, tier, store, proof, _job_arguments())
    held = nccl_reserve.follow_memory(options, proof, summary.coordinates(options))
    recording = _recording(options)
    observer = recording.observe if recording else None
    context = patch.Context(
        start=lambda: start_world(options, tier.device, store, observer, pace, proof, held),
        proof=proof,
        meta=tier.name == "meta",
        local_ranks=tuple(sorted(options.ranks)),
        rank=options.rank,
    )
    patch.apply(without_cuda.patches_for(tier.name), context)
    _capture(options, tier, version, proof)
    if recording is not None:
        patch.apply(moe.patches_for_recording(recording), context)
        if options.record is not None:
            proof.on_finish.append(recording.save)
    report = summary.Reporter(options, tier, proof, version, store)
    report.recording, report.pace = recording, pace
    proof.on_finish.append(report.finish)
    report.banner()
    _arrange_verdict(proof)
    return context


def _capture(options: flags.Options, tier: Any, version: str, proof: Any) -> None:
    """Record an iteration of this rank and keep it when the job has trained, if asked."""
    if options.capture is None:
        return
    import torch

    from megatron_prism.emulate import capture as stock_capture
    from megatron_prism.emulate import slice_source

    device = torch.cuda.get_device_name() if tier.name == "cuda" else tier.name
    source = slice_source.source_of(_job_arguments(), version, tier.name, device, options.pace)
    proof.capture = capture = stock_capture.StockCapture(options, tier, source)

    def keep() -> None:
        path = capture.finish(proof)
        assert capture.program is not None
        what = f"{len(capture.program):,} ops of an iteration (median of {capture.num_iterations})"
        print(f"prism: {what} in {path}{capture.said()}", file=sys.stderr)

    proof.on_finish.append(keep)


def _recording(options: flags.Options) -> Any:
    """The recorder or replayer that ``options`` ask for, or None."""
    from megatron_prism.runtime.control_values import Recorder, Replayer

    policy, _, path = options.values.partition(":")
    if options.record is None and policy != "recorded":
        return None
    if options.tier == "meta":
        raise UsageError(
            "tier meta has no values to record or replay", fix="use --prism-tier cuda or cpu"
        )
    header = {"world": str(options.world), "arguments": _job_arguments()}
    if options.record is None:
        return Replayer(Path(path), options.rank, header)
    if policy == "recorded" or len(options.ranks) < options.world.size:
        raise UsageError(
            f"--prism-record needs every rank of the world to be local, {len(options.ranks)} of "
            f"{options.world.size} are: virtual ranks say nothing worth keeping",
            fix=f"torchrun --nproc-per-node {options.world.size}, without --prism-values",
        )
    check_writable(options.record, "--prism-record PATH")
    return Recorder(options.record, options.rank, header)


def _job_arguments() -> str:
    """The job's own arguments, without ours and without how long it runs."""
    return " ".join(_job_words(sys.argv[1:]))


def _job_words(argv: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in argv:
        name = word.partition("=")[0]
        if skip and not word.startswith("--"):
            skip = False
            continue
        skip = name.startswith("--prism-") or name == "--train-iters"
        if not skip:
            kept.append(word)
        elif "=" in word:
            skip = False
    return kept


def _pace(options: flags.Options, version: str, store: Any) -> Any:
    """When virtual ranks answer; captures the slices that are missing."""
    from megatron_prism.emulate import pace, pace_capture

    pace.check(options)
    pace_capture.capture_missing(options, [sys.argv[0], *_job_words(sys.argv[1:])], store)
    return pace.Pace(options, _job_arguments(), version)


def start_world(
    options: flags.Options,
    device: Any,
    store: Any = None,
    observer: Any = None,
    pace: Any = None,
    proof: Any = None,
    tally: Any = None,
) -> Any:
    """Bring the virtual world of ``options`` up in this process."""
    import torch

    from megatron_prism.runtime import world as session
    from megatron_prism.runtime.values import Values

    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    world = session.start(
        session.VirtualWorld(
            size=options.world.size,
            rank=options.rank,
            local_ranks=options.ranks,
            values=Values(options.values, rank=options.rank),
            device=device,
            store=store,
            backend="nccl" if device.type == "cuda" else "gloo",
            tally=tally,
        )
    )
    world.observer, world.guard = observer, proof and proof.guard
    if pace is not None:
        world.recorder = proof.pacer = pace.start(world, store)
    return world


def _check_devices(options: flags.Options) -> None:
    """NCCL refuses two ranks on one device, late and obscurely; say it before anything starts."""
    if options.tier != "cuda" or options.num_processes == 1:
        return
    import torch

    local, have = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", options.num_processes))
    if local >= have or here > have:
        raise UsageError(
            f"{here} local ranks on {have} CUDA device{'s' * (have != 1)}: two would share one, "
            "and NCCL cannot connect them",
            fix=f"torchrun --nproc-per-node {have}, each rank alone, or --prism-tier cpu",
        )


def _shared_store(options: flags.Options) -> Any:
    """The store of the launcher, through which the local processes find each other."""
    if options.num_processes == 1:
        return None
    from torch.distributed import rendezvous

    iterator = rendezvous("env://", rank=options.process, world_size=options.num_processes)
    return next(iterator)[0]


def _arrange_verdict(proof: Any) -> None:
    """A script that ends well without ever training must not exit 0."""

    def untrained() -> NotTrainedError | None:
        if (
            proof.finished or exit_status.is_worker()
        ):  # of a checkpoint, with the job's command line
            return proof.failure
        if proof.started:
            return NotTrainedError(
                "Megatron's pretrain() failed, and the script ended as if it had not",
                fix="let the exception through: what went wrong is in the log above",
            )
        return NotTrainedError(
            "the script ended without calling Megatron's pretrain(), so nothing trained",
            fix="--prism-emulate belongs on a script that trains, such as pretrain_gpt.py",
        )

    exit_status.at_good_end(untrained)
