"""Launch: turn a job into an emulated one.

``attach_from_command_line`` runs before the first ``import megatron`` (zero-edit attach);
``run_script`` is ``prism run -- pretrain_gpt.py …``.  Both settle the options, give Megatron the
virtual RANK and WORLD_SIZE, prepare the tier, register the patches and arrange for the verdict.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core.bare_engine import hide_bare_engine
from megatron_prism.core.errors import NotTrainedError, PrismError, UsageError
from megatron_prism.core.files import claimed
from megatron_prism.core.jobs.megatron_source import TESTED, UNKNOWN, megatron_release
from megatron_prism.core.messages import last_resort
from megatron_prism.core.units import counted
from megatron_prism.emulate.command_line import launchers
from megatron_prism.emulate.command_line import options as flags
from megatron_prism.emulate.command_line.job_flags import AttachOrder
from megatron_prism.emulate.command_line.job_line import job_of
from megatron_prism.emulate.command_line.launch_line import split_line
from megatron_prism.emulate.command_line.options import cuda_max_connections, without_engine
from megatron_prism.emulate.rank import exit_status
from megatron_prism.emulate.rank.session import Session

if TYPE_CHECKING:
    from megatron_prism.emulate.patch import PatchContext
    from megatron_prism.emulate.rank.monitor import TrainingMonitor
    from megatron_prism.emulate.rank.session import Run
    from megatron_prism.runtime.virtual_world import VirtualWorld

_attached = False
running: Run | None = None  # of this process, once it is attached


def run_script(argv: Sequence[str]) -> int:
    """Run ``argv`` (``[--prism-… ] [torchrun …] script.py arguments``) as a program; returns its
    exit status.

    Flags before the script are ours; ``--prism-emulate`` is implied.
    """
    leading, line = split_line(argv, flags.alone())
    # our flags of the line's launchers and the script behind them
    inner, job = job_of(line, leading)
    if not job:
        raise UsageError(
            "prism run needs a script", fix="prism run -- pretrain_gpt.py <the job's arguments>"
        )
    module = job[0] == "-m"
    # as Python does: of a module the current folder, of a file its own
    if module:
        script, *words = job[1:]
        place = str(Path.cwd())
    else:
        script, *words = job
        place = str(Path(script).resolve().parent)
    words = [*leading, *inner, *words]
    # prism run implies it
    if "--prism-emulate" not in words:
        words.insert(0, "--prism-emulate")
    session = Session()  # open until the process ends
    session.changes.set(sys, "argv", [script, *words])
    sys.path.insert(0, place)
    session.changes.on_undo(lambda: sys.path.remove(place))
    gc.disable()  # what is imported stays: looking through it takes a second of five
    attach_from_command_line(session)
    gc.freeze()
    gc.enable()
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # also one that was raised without sys.exit
        exit_status.note(end.code)
        raise
    except BaseException as error:
        exit_status.note(1)
        # the process that started this worker prints it, with its fix
        if isinstance(error, PrismError):
            exit_status.tell_parent(error)
        raise
    return 0


def attach_from_command_line(session: Session | None = None) -> None:
    """Do once what ``sys.argv`` and ``PRISM_ARGS`` ask for; bad usage ends the process (exit 2).

    Without a ``session`` what is changed stays until the process ends.
    """
    global _attached
    if _attached:
        return
    _attached = True
    session = session or Session()
    session.changes.on_undo(_detach)
    hide_bare_engine()  # also where torch loads no entry points
    options = None
    try:
        options = flags.from_command_line(sys.argv[1:])
        if options is not None and exit_status.is_worker():
            # a process of multiprocessing has the job's command line, and is no rank
            options = flags.of_worker(options)
        if options is not None and options.one_by_one:
            _capture_one_by_one(options)
            raise SystemExit(0)
        if options is not None:
            attach(options, session)
        elif exit_status.emulation_is_expected():
            raise UsageError(
                "the script took --prism-emulate off sys.argv before it used Megatron, so it would "
                "run without emulation",
                fix="PRISM_ARGS='--prism-emulate …' in the environment, or sys.argv left alone",
            )
    except PrismError as error:
        # of several processes of a launcher one says it, where no rank is known
        if options is not None or launchers.is_first(os.environ):
            exit_status.report(error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        raise SystemExit(last_resort(error, "while this job was attached")) from None


def _capture_one_by_one(options: flags.Options) -> None:
    """Nothing trains in this process: its script runs once for every rank, as a worker."""
    from rich.console import Console

    from megatron_prism.emulate.jobs import script_job

    assert options.capture is not None, "options that are captured one by one"
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    script_job.capture_command_line(sys.argv[0], sys.argv[1:], options.capture, console)


def _detach() -> None:
    global _attached
    _attached = False


_OF_THIS_HOST = (  # what Megatron misses here, and the job has or does not care about
    r"(Transformer Engine|Apex|absl\.logging|nvidia-modelopt|flashinfer|DeepEP)\b.* (is|are) not ",
    r"Triton is not ",
    r"`torch\.distributed\.\w+` is deprecated",
)
_LISTS_OF_PARAMETERS = logging.getLogger("megatron.core.distributed.param_and_grad_buffer")


def _quieten(session: Session) -> None:
    """Leave out Megatron's warnings of libraries that this host lacks, and its lists of every
    bucket's parameters (their number stays).
    """
    # filters are put back as they were when the session ends
    before = list(warnings.filters)
    session.changes.on_undo(lambda: warnings.filters.__setitem__(slice(None), before))  # type: ignore[index]
    for pattern in _OF_THIS_HOST:
        warnings.filterwarnings("ignore", message=pattern)

    def first_line(record: logging.LogRecord) -> bool:
        # the first line has the number of parameters, the others their names
        record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True

    _LISTS_OF_PARAMETERS.addFilter(first_line)
    session.changes.on_undo(lambda: _LISTS_OF_PARAMETERS.removeFilter(first_line))


def _check_version() -> str:
    """The release of the megatron.core that is imported; an untested one warns by name."""
    release = megatron_release()
    # it may work: patches whose targets are missing are refused by themselves
    if release not in TESTED and release != UNKNOWN:
        warnings.warn(
            f"megatron-core {release} was never tested with megatron_prism "
            f"(tested: {', '.join(TESTED)}); prism patches says what it lacks",
            stacklevel=2,
        )
    return release


def attach(options: flags.Options, session: Session) -> Any:
    """Prepare this process for ``options``; returns the patches' context.

    Raises UsageError for a tier that this host lacks, two local ranks on one device, or an artefact
    folder that exists.
    """
    from megatron_prism.emulate.rank import monitor, summary

    if not options.verbose:
        _quieten(session)
    run = build_run(options, session)
    monitor.host(lambda: start_world(run, session), run.options, run.monitor, session.changes)
    session.changes.set(sys.modules[__name__], "running", run)
    flags.hide_from_parsers(session.changes)
    context = patched(run, session)
    report = summary.Reporter(run)
    run.monitor.listen(*run.training, report)
    if not exit_status.is_worker():
        report.banner()
    _arrange_verdict(run.monitor, session)
    atexit.register(run.claims.close)  # before the verdict, which may end the process
    return context


def patched(run: Run, session: Session) -> PatchContext:
    """Register the patches of ``run``'s tier, before Megatron is imported."""
    from megatron_prism.emulate import patch
    from megatron_prism.emulate.patches import patches_for

    context = patch.PatchContext(
        start=lambda: start_world(run, session),
        monitor=run.monitor,
        meta=run.tier.name == "meta",
        local_ranks=tuple(sorted(run.options.ranks)),
        rank=run.options.rank,
        changes=session.changes,
        iterations=run.options.iterations,
        recording=run.recording,
        records=run.options.capture is not None,
        loads_own_layout=_loads_own_layout(run),
        profiles=run.options.out and run.options.out.with_name(run.options.out.name + ".profile"),
    )
    run.patches = context
    patch.apply(patches_for(run.tier.name), context)
    return context


def _loads_own_layout(run: Run) -> bool:
    """Whether a checkpoint that is not here is loaded as one of the job's own layout."""
    # what 0.16 has beside shards is in a file of its own
    is_known = not run.version.startswith("0.16")
    return is_known and run.tier.name == "meta" and run.options.loads_own_layout


# Parts of core that a run has where one of these options asks for them.  ``add_to(run, session)``
# of the module adds listeners, places to write and checks.
_CORE_PARTS = (
    (AttachOrder.OUTPUT, "rank.summary", ("out",)),
    (AttachOrder.RECORDING, "rank.recording", ("record", "recorded")),
    (AttachOrder.DEVICE_MEMORY, "rank.device_memory", ("memory", "reserve_nccl")),
    (AttachOrder.CAPTURE, "capture.capture", ("capture",)),
)


def _attach_parts(run: Run, session: Session) -> None:
    """Attach the parts of core and of features that the options ask for, in their order."""
    # parts of core and of features, by the order in which they must attach
    steps: list[tuple[int, Callable[[], None]]] = []
    for place, name, fields in _CORE_PARTS:
        if any(getattr(run.options, field) for field in fields):
            module = import_module(f"megatron_prism.emulate.{name}")
            steps.append((place, partial(module.add_to, run, session)))
    for asked in run.options.asked_features:
        assert asked.row.attach is not None, "a row that reads options attaches them"
        steps.append((asked.row.place, partial(asked.row.attach, run, session, asked.options)))
    for _, attach_part in sorted(steps, key=lambda step: step[0]):
        attach_part()


def build_run(options: flags.Options, session: Session) -> Run:
    """Prepare tier, environment and listeners for ``options``; raises as ``attach``."""
    from megatron_prism.emulate.rank.monitor import TrainingMonitor
    from megatron_prism.emulate.rank.session import Run
    from megatron_prism.runtime import devices as tiers
    from megatron_prism.runtime.values import Values

    version = _check_version()
    Values(options.values)  # a bad policy is bad usage now, not a failed job later
    engine = not (options.tier == "meta" and without_engine())
    tier = tiers.prepare(
        options.tier,
        session.changes,
        engine,
        cuda_max_connections(),
        history=options.capture is not None,
        engine_release=options.te_version,
    )
    options = replace(options, tier=tier.name)
    for name, text in launchers.launcher_variables(os.environ).items():
        session.changes.set_item(os.environ, name, text)
    _check_devices(options)
    store = _shared_store(options)
    variables = {"RANK": str(options.rank), "WORLD_SIZE": str(options.world.size)}
    for name, text in variables.items():
        session.changes.set_item(os.environ, name, text)
    monitor = TrainingMonitor(tier.live, shapes_only=tier.name == "meta")
    run = Run(options, tier, monitor, version=version, store=store)
    session.changes.on_undo(run.claims.close)
    _attach_rank(run, session)
    return run


def _attach_rank(run: Run, session: Session) -> None:
    """Attach what the options of this process's rank ask for, and claim what it will write."""
    from megatron_prism.emulate.rank import summary

    run.monitor.who = f"rank {run.options.rank} ({summary.coordinates(run.options)})"
    _attach_parts(run, session)
    for place in run.places:
        run.claims.enter_context(claimed(place))


def _becoming(run: Run, session: Session) -> Callable[[list[str], int], None] | None:
    """Return what makes a fork of this process another rank of its job.

    Returns:
        None where this process starts no job for others, or where more than the capture depends
        on the rank: what features and other options ask for, programs without Megatron's
        arguments, recipes.
    """
    from megatron_prism.emulate.command_line import job_arguments
    from megatron_prism.emulate.jobs import short_job
    from megatron_prism.emulate.processes import rank_server

    if not rank_server.starts_job():
        # no server: this process is one rank
        return None
    if not run.options.ranks_share_start:
        return None
    if job_arguments.parsed() is None or job_arguments.recipe is not None:
        return None
    run.claims.close()  # every rank claims its own slice
    configs = short_job.configurations()
    _share_answers(configs)
    return partial(_become, run, session, configs)


def _share_answers(configs: Sequence[object]) -> None:
    """Find out once what every rank of the job asks for, in the process that they are forks of.

    Args:
        configs: that the script has made of the job's arguments.
    """
    from megatron_prism.emulate.capture import few_microbatches
    from megatron_prism.emulate.command_line import job_arguments

    job_arguments.megatron_parser()
    arguments = job_arguments.parsed()
    samples_at_once = arguments.micro_batch_size * arguments.data_parallel_size
    num_microbatches = (arguments.global_batch_size or 0) // samples_at_once
    # scripts of 0.16 make their configuration later, each rank its own
    if num_microbatches and configs:
        world = flags.parsed_world(arguments.world_size, vars(arguments))
        few_microbatches.share_first_stage(world, num_microbatches, vars(configs[0]))


def _become(
    run: Run, session: Session, configs: Sequence[Any], argv: list[str], periods: int
) -> None:
    """Make this process another rank of its job, in front of all that depends on the rank.

    Args:
        run: of the job's start.
        session: of this process.
        configs: that the script has made of the job's arguments.
        argv: ``sys.argv`` of the rank.
        periods: of layers that a chunk of the job gets; 0: all.
    """
    from megatron_prism.emulate.command_line import job_arguments
    from megatron_prism.emulate.jobs import short_job
    from megatron_prism.emulate.rank import summary

    options = flags.from_command_line(argv[1:])
    assert options is not None, "the job's start was emulated, too"
    run.options = replace(options, tier=run.tier.name)
    rank = run.options.rank
    # what has depended on the rank so far
    session.changes.set_item(os.environ, "RANK", str(rank))
    megatron_args = job_arguments.parsed()
    megatron_args.rank = rank
    # an estimate's job with fewer layers
    if periods:
        layers = short_job.chunk_layers(megatron_args)
        if layers.reason:
            exit_status.end_without_estimate(layers.reason)
        num_layers = short_job.short_layers(layers, periods)
        run.short_layers = num_layers, layers.whole
        short_job.shorten(megatron_args, num_layers, configs)

    # patches and listeners of this rank
    assert run.patches is not None, "they were applied"
    run.patches.rank = rank
    run.patches.local_ranks = tuple(run.options.ranks)
    run.forget_listeners()
    _attach_rank(run, session)
    if run.short_layers is not None:
        layer_check = short_job.LayerCheck(run.short_layers[0], exit_status.end_without_estimate)
        run.follow_training(layer_check)
    run.monitor.listen(*run.training, summary.Reporter(run))


def start_world(run: Run, session: Session) -> VirtualWorld:
    """Bring the virtual world of ``run`` up in this process."""
    import torch

    from megatron_prism.emulate.command_line import job_arguments
    from megatron_prism.emulate.preflight import first_look
    from megatron_prism.emulate.processes import rank_server
    from megatron_prism.runtime.values import Values
    from megatron_prism.runtime.virtual_world import VirtualWorld, start, stop

    look = first_look.end()
    if look is None and first_look.CHECK in sys.argv:  # a program without Megatron's arguments
        look = first_look.FirstLook()
    if look is not None:  # nor a script that does not validate them
        look.finish()
    job_arguments.check_sizes()
    # all that ranks have in common is done: their processes begin from a copy of it
    rank_server.fork_ranks(_becoming(run, session))
    arguments = job_arguments.parsed()
    if arguments is not None:
        run.monitor.world_known(flags.parsed_world(arguments.world_size, vars(arguments)))
    if run.on_arguments:
        arguments_of_job = job_arguments.of_running_job()
        for tell in run.on_arguments:
            tell(arguments_of_job)
    options, device = run.options, run.tier.device
    backend = "gloo"
    # local ranks have a device each
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    session.changes.on_undo(stop)
    values = Values(options.values, rank=options.rank)
    for replayer in run.calls:
        values.replays = getattr(replayer, "replays", values.replays)
    world = start(
        VirtualWorld(
            size=options.world.size,
            rank=options.rank,
            local_ranks=options.ranks,
            values=values,
            device=device,
            store=run.store,
            backend=backend,
            tally=run.tally,
            listeners=run.calls,
            patient=options.holds_calls,
        )
    )
    for begin in run.on_world:
        begin(world)
    return world


def _check_devices(options: flags.Options) -> None:
    """NCCL refuses two ranks on one device, late and obscurely; say it before anything starts."""
    if options.tier != "cuda" or options.num_processes == 1:
        return
    import torch

    local = int(os.environ.get("LOCAL_RANK", "0"))
    num_devices = torch.cuda.device_count()
    num_local = launchers.processes_here(os.environ, options.num_processes)
    if local >= num_devices or num_local > num_devices:
        ranks, devices = counted(num_local, "local rank"), counted(num_devices, "CUDA device")
        raise UsageError(
            f"{ranks} on {devices}: two would share one, and NCCL cannot connect them",
            fix=f"torchrun --nproc-per-node {num_devices}, each rank alone, or --prism-tier cpu",
        )


def _shared_store(options: flags.Options) -> Any:
    """The store of the launcher, through which the local processes find each other."""
    if options.num_processes == 1:
        return None
    from torch.distributed import rendezvous

    iterator = rendezvous("env://", rank=options.process, world_size=options.num_processes)
    try:
        return next(iterator)[0]
    except (RuntimeError, ValueError) as error:  # torch's DistNetworkError and its like
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        message = str(error).partition("\n")[0]
        raise UsageError(
            f"the {options.num_processes} local processes cannot meet at {place}: {message}",
            fix="another MASTER_PORT (torchrun --master-port), the same for all of them",
        ) from error


def _arrange_verdict(monitor: TrainingMonitor, session: Session) -> None:
    """A script that ends well without ever training must not exit 0."""

    def untrained() -> PrismError | None:
        # a worker of a checkpoint has the job's command line
        if monitor.loop is not None:  # the end of the program is that of its loop
            try:
                monitor.loop.finish()
            except PrismError as error:
                return error
        if monitor.finished or exit_status.is_worker():
            return monitor.failure
        if monitor.started:
            return NotTrainedError(
                "Megatron's pretrain() failed, and the script ended as if it had not",
                fix="let the exception through: what went wrong is in the log above",
            )
        if exit_status.trained_below():  # the script starts its workers itself
            return None
        if "--prism-emulate" not in sys.argv:  # PRISM_ARGS reach every program of a script
            print(
                "prism: this program uses Megatron and trains nothing: it ran as it is",
                file=sys.stderr,
            )
            return None
        return NotTrainedError(
            "the script ended without calling Megatron's pretrain(), so nothing trained",
            fix="--prism-emulate belongs on a script that trains, such as pretrain_gpt.py",
        )

    def idle() -> bool:
        return not monitor.steps and not exit_status.is_worker()

    exit_status.at_good_end(untrained, session.changes, idle)
