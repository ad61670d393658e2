"""``--prism-capture DIR``: record what this rank does in an iteration of a stock script.

Records from the start of one train step to the start of the next, so that what comes between train
steps (logging, timers, their barriers) is in the program too.  The last nine such iterations count,
of longer jobs up to ``KEPT`` of those after the fourth: the first is written down, the others only
timed; the slice has the median time of each segment, and all times beside it.  A job of one or two
steps has only its last recorded.  The slice is written when the job has trained.

On a GPU the last one is traced (``recorder.kernel_times``), so that the host's delays can be told
from kernels, and behind two timed ones, and then behind every four, the host alone is clocked in
two (``recorder.measurements``).  The device rests in these, and at its power limit it is 4 to 7 %
quicker behind them: the iteration that follows is left out.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.files import check_writable
from megatron_prism.core.groups import subgroups
from megatron_prism.core.jobs import model_flops
from megatron_prism.core.jobs.megatron_source import versions
from megatron_prism.core.jobs.recipe import Recipe
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs import program
from megatron_prism.core.programs.gpu_state import GPU_CLOCK
from megatron_prism.core.programs.program import Program, RepeatedEvents
from megatron_prism.core.programs.slices import (
    ASSUMED_PARTS,
    HOST_INDEX,
    HOST_MEMORY,
    MEMORY_PARTS,
    SAVED_BYTES,
    Origin,
    SliceStore,
)
from megatron_prism.core.units import format_bytes
from megatron_prism.core.world import World
from megatron_prism.emulate.capture import (
    few_microbatches,
    kept_capture,
    nvlink_keepalive,
    part_blocks,
)
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.jobs import recipe_job
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.rank import exit_status
from megatron_prism.memory import part_peaks, peaks, routing
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, recorded
from megatron_prism.runtime.listeners import TrainingListener
from megatron_prism.runtime.recorder.kernel_times import Tracer, busy_ns, launches

if TYPE_CHECKING:
    from megatron_prism.emulate.processes.workers import Emit
    from megatron_prism.emulate.rank.session import Run, Session
    from megatron_prism.runtime.recorder.measurements import Recording
    from megatron_prism.runtime.recorder.owners import Models


def source_of(megatron: str, tier: str, device: str) -> dict[str, str]:
    """What decides the content of a stock job's slices, besides its arguments, which are not known
    before Megatron has parsed them.
    """
    source = {
        "megatron_core": megatron.partition(" ")[0],
        **versions(),
        "tier": tier,
        "device": device,
    }
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"  # of a device, which only tier cuda has
    variables = {k: v for k, v in os.environ.items() if tier == "cuda" or k != queues}
    if settings := recorded(variables):
        source[NCCL_ENV] = settings
    return source


def of_running_job() -> dict[str, str]:
    """Return what the job in this process does in an iteration; empty if none trains.

    ``tokens_per_iteration`` and ``model_flops_per_iteration`` are as Megatron itself counts them;
    ``without`` has the options that the job does without here.
    """
    # recipes run without megatron.training
    if job_arguments.recipe is not None:
        return model_flops.of_recipe(job_arguments.recipe)
    # a stock script: what Megatron itself prints as its throughput
    training = sys.modules.get("megatron.training.training")
    if job_arguments.parsed() is None:
        return {}
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if training is None or calculator is None:
        return {}
    args, batch = training.get_args(), calculator.get_current_global_batch_size()
    flops = round(training.num_floating_point_operations(args, batch))
    figures = {
        "tokens_per_iteration": str(batch * args.seq_length),
        "model_flops_per_iteration": str(flops),
    }
    if job_arguments.without:
        parts = [f"{name}: {meaning}" for name, meaning in job_arguments.without.items()]
        figures[program.WITHOUT] = "; ".join(parts)
    return figures


def source_of_recipe(source: dict[str, str], recipe: Recipe) -> dict[str, str]:
    """The same of a recipe's slices."""
    return {**source, **recipe_job.source_of(recipe), **model_flops.of_recipe(recipe)}


HOST_S = 0.25  # for the index of the host, around each of some iterations
_HOSTS = 12  # indices that are measured at most
KEPT = 65  # iterations at most: one written down, the others timed, clocked or left out
FEW = 9  # of a short job, though the first ones are still warming up
WARM = 5  # the first iteration that is recorded if the job is long enough
ENDS_SHAPES = 3  # step that ends a worker's capture on tier meta, where it starts no probe
LEAST_STEPS = 2  # of a captured job
_DISTURBED = 1.25  # times the quickest iteration; an idle host's are some percent apart
_RUNS = "PRISM_RUNS"  # environment variable of a worker that has started over: what runs then
_EVERY_STEP, _ALL = "every step", "all microbatches"
_running: list[StockCapture] = []


def first_recorded(wanted: int) -> int:
    """The train step (from 1) of a job of ``wanted`` from which on iterations are recorded."""
    # a job too short to warm up is recorded at its end
    if wanted <= 2:
        return wanted
    return max(2, wanted - KEPT, min(WARM, wanted - FEW))


def least_steps(say: Callable[[str], object], asked: int) -> int:
    """Return how many train steps a job must make to be captured, and say it if it has fewer.

    Optimizers make their states in their first step.  So the first iteration is without them until
    its end, unlike every other one.

    Args:
        say: takes the note.
        asked: the train steps of the job.
    """
    if asked < LEAST_STEPS:
        say(
            f"train_iters={asked}, and {LEAST_STEPS} iterations ran: the optimizer's states begin "
            "at the end of the first, the slice is of the second"
        )
    return LEAST_STEPS


def _first_with_graphs() -> int:
    """The train step (from 1) from which on Transformer Engine's CUDA graphs run; 0: without."""
    settings = job_arguments.parsed()
    if settings is None or getattr(settings, "cuda_graph_impl", "") != "transformer_engine":
        return 0
    return int(settings.cuda_graph_warmup_steps) + 1


def _warms_up() -> bool:
    """Whether the job itself has iterations before its CUDA graphs."""
    return job_arguments.left_out.get("cuda_graph_warmup_steps") != 0


def add_to(run: Run, session: Session) -> None:
    """Record an iteration of this rank, to be kept when the job has trained."""
    import torch

    options, tier = run.options, run.tier
    emit = workers.emitter()
    assert options.capture is not None, "it is why this is called"
    # a worker's folder was checked by the process that started it
    if emit is None:
        check_free(options.capture, options.rank, options.force)
    device = tier.name
    if tier.name == "cuda":
        # times are of this model of GPU; shapes are of none
        device = torch.cuda.get_device_name()
    source = source_of(run.version, tier.name, device)
    capture = StockCapture(options, tier, source, run.monitor)
    if emit is not None:
        capture.ends = ENDS_SHAPES
        capture.may_probe = run.short_layers is None
    session.changes.on_undo(capture.changes.undo)
    run.on_arguments.append(capture.is_of)
    run.follow_training(capture)
    run.places.append(capture.store.path(options.rank))
    if emit is not None:
        reported = _Reported(run, capture, emit)
        run.on_arguments.append(reported.exit_if_captured)
        # microbatches that follow from others do so in shapes alone: times differ in each
        follows = tier.name == "meta" and not options.all_microbatches and not options.per_call
        if follows and os.environ.get(_RUNS) != _ALL:
            run.monitor.few, capture.start_over = reported.few, reported.start_over
            run.monitor.not_repeated = partial(reported.start_over, _EVERY_STEP)
        run.follow_training(reported)


class _Reported(TrainingListener):
    """Tells the process that started this one to capture a rank how far it is."""

    def __init__(self, run: Run, capture: StockCapture, emit: Emit) -> None:
        self.run, self.capture, self.emit = run, capture, emit
        self.of = 1  # forwards and backwards, of all iterations and chunks
        run.monitor.on_step = self._stepped
        run.monitor.on_note = lambda text: emit("note", text=text)

    def iteration_started(self, number: int, wanted: int, model: Any, optimizer: Any) -> None:
        """Follow step ``number`` of ``wanted``, or end the job where nothing is left to record."""
        leaves_early = self.run.tier.name == "meta" and job_arguments.recipe is None
        probes = self.capture.probes_now()
        steps = wanted
        if leaves_early:
            steps = min(wanted, ENDS_SHAPES + 1 if probes else max(number, ENDS_SHAPES))
        # a forward and a backward of each chunk of the model
        self.of = 2 * steps * len(model or (1,))

        # a stock job on tier meta: this step would only end the one before it
        is_last = wanted > 2 and number >= min(wanted, ENDS_SHAPES)
        if leaves_early and is_last and self.capture.kept() and not probes:
            wants_more = [follow(number) for follow in self.run.on_captured]
            if any(wants_more):
                return
            self.run.monitor.finish_steps(number - 1)
            sys.stdout.flush()
            self._leave()

    def _stepped(self, done: int) -> None:
        total = self.of * self.run.monitor.schedule["num_microbatches"]
        self.emit("step", done=min(done, total), total=total)

    def few(self, wanted: int, config: Any) -> int:
        """Of a schedule's microbatches only those run that the others follow from."""
        recipe, few = job_arguments.recipe, wanted
        world = self.capture.store.world if recipe is None else recipe.world
        if world.pp == config.pipeline_model_parallel_size:  # else nobody has said the sizes
            few = few_microbatches.few_of(world, self.run.options.rank, wanted, vars(config))
        # said once for each number of microbatches, which a job may ramp up
        if few < wanted and self.capture.wanted != wanted:
            ran = f"{few} of {wanted} microbatches run, the others follow; "
            fix = "--prism-all-microbatches (prism.all_microbatches of a recipe) runs all"
            self.emit("note", text=ran + fix)
        self.capture.wanted = wanted if few < wanted else 0
        return few

    def start_over(self, what_runs: str, why: str = "") -> None:
        """Replace this process by one in which more runs.

        Args:
            what_runs: ``_EVERY_STEP``: forwards and backwards that repeat run, too; ``_ALL``: all
                microbatches.
            why: said in a note, if given.
        """
        # a new process would run all layers, as nobody tells it again how few are asked for
        if self.run.short_layers is not None:
            reason = why or "steps differ"
            exit_status.end_without_estimate(f"few layers have to run anew: {reason}")
        if why:
            self.emit("note", text=f"all microbatches run: {why}")
        self.run.claims.close()
        os.environ[_RUNS] = what_runs
        # the new process reports through the same pipe
        os.set_inheritable(int(os.environ[workers.EVENTS]), True)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    def finished(self) -> None:
        self.report(self.capture.recorded() + self.capture.remarks())

    def report(self, text: str) -> None:
        """Give the result: that the slice is there, and ``text`` about it."""
        live = self.run.tier.live
        peak = None if live is None else live.high.bytes
        files = kept_capture.imported_files()
        result = {"rank": self.run.options.rank, "said": text, "peak": peak, "files": files}
        if self.run.short_layers is not None:
            result["short_layers"] = self.run.short_layers
        self.emit("result", result=result)

    def _leave(self) -> None:
        """End the process at once: loaders of data live on for seconds and would hold claims."""
        self.run.claims.close()
        exit_status.leave(0)

    def exit_if_captured(self, _: str) -> None:
        """The job's arguments are those of the slice that is there already: that is all."""
        if self.capture.store.path(self.run.options.rank).exists():
            self.report("is there already")
            self._leave()


def check_free(folder: Path, rank: int, force: bool) -> None:
    """UsageError if the slice of ``rank`` is there and may not be replaced."""
    path = folder / f"slice-{rank:06d}.prism"
    try:
        exists = path.exists()
    except OSError as error:  # a name too long, a folder that may not be looked into
        message = f"--prism-capture: {folder} cannot be used: {error.strerror}"
        raise UsageError(message, fix="name another folder") from error
    if exists and not force:
        message = f"--prism-capture: {path} exists and is not overwritten"
        raise UsageError(message, fix="--prism-force, or another folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--prism-capture: {folder} is a file", fix="name a folder")
    check_writable(folder, "--prism-capture DIR")


def disturbed() -> None:
    """For whoever made this process wait: the iteration that is recorded now is left out, as one
    with an evaluation is, as long as there are others.
    """
    for capture in _running:
        capture.outside_step(gathered=False)


class StockCapture(TrainingListener):
    """Starts and stops the recorder around one iteration of a stock job.

    source  : what must be alike in all slices of a folder (versions, tier); the job's arguments
              follow with ``is_of``
    monitor : tells the recorder of phases while there is one
    """

    def __init__(self, options: Any, tier: Any, source: dict[str, str], monitor: Any) -> None:
        self.store = SliceStore(options.capture, options.world, source, parsed=False)
        self.rank, self.tier = options.rank, tier
        self._num_processes = options.num_processes
        self._there: dict[Path, Origin] = {}  # of the slices in the folder
        self._check_others(options.force)
        self.program: Program | None = None
        self.num_iterations = 0  # that the slice is the median of
        self.wanted = 0  # microbatches that follow from those that run; 0: none
        self.start_over: Callable[[str, str], object] | None = None  # where they do not
        self.ends: int | None = None  # step from which on an iteration with an evaluation counts
        self.may_probe = True  # whether an iteration may show what depends on routing
        self.links: nvlink_keepalive.KeepAlive | None = None  # of a GPU
        self._sampler: Any = None  # of its clock, where NVML answers
        self._recorder: Any = None
        self._owner: Any = self  # the optimizer of whoever owns what is recorded
        self._monitor = monitor
        self.changes = ProcessChanges()  # while something is recorded
        self._recordings: list[Any] = []
        self._others: list[Any] = []  # of iterations with an evaluation
        # whether the iteration that is recorded has one, the next one will, some had
        self._beside = self._next = self._evaluates = False
        self._tracer: Any = None
        self._now = self._flops = dict[str, str]()  # of what is written down, of what counts
        self._own_ns = 0  # of the host, that recording adds behind a call
        self._clocks: list[int] = []  # ns of the host for iterations that were not recorded
        self._cool = False  # the device is, behind one
        self._hosts: list[float] = []  # indices, beside iterations in which a GPU is clocked
        self._quick = False  # the iteration that is recorded is not written down, only timed
        self._written = self._traced = False  # of ``_recordings``: one was
        self._eager = False  # it is the last one without CUDA graphs, and counts for its peak alone
        self._before_graphs: Program | None = None  # of that iteration, and of their capture
        self._probes = False  # the iteration that is recorded has other loads of experts
        self._probe: Program | None = None
        self._repeated: list[RepeatedEvents] = []  # of the probe
        self._first_alone = False  # the job made one train step

    def _check_others(self, force: bool) -> None:
        """UsageError if the folder has slices of another job; ``force`` replaces one by one."""
        captured_ranks = self.store.ranks() if self.store.folder.is_dir() and not force else ()
        for rank in captured_ranks:
            programs = program.load(self.store.path(rank))
            self._there[self.store.path(rank)] = Origin(programs.world, programs.source)
        self._compare()

    def is_of(self, arguments: str) -> None:
        """The job's arguments are known now: UsageError if the folder has slices of others."""
        if (recipe := job_arguments.recipe) is not None:
            self.store.source = source_of_recipe(self.store.source, recipe)
        else:
            self.store.source["arguments"] = arguments
        self._compare()

    def _compare(self) -> None:
        for path, origin in self._there.items():
            try:
                self.store.check(origin, path)
            except UsageError as error:
                if workers.EVENTS in os.environ:  # whoever captures has options of its own
                    raise
                fix = "--prism-force replaces them rank by rank, or name another folder"
                raise UsageError(f"--prism-capture: {error.message}", fix=fix) from error

    def world_known(self, world: World) -> None:
        node = self.store.world.gpus_per_node  # the launcher's, which no argument says
        self.store.world = dataclasses.replace(world, gpus_per_node=node)
        self.store.parsed = True
        self._compare()

    def iteration_started(self, number: int, wanted: int, model: Any, optimizer: Any) -> None:
        """Train step ``number`` (from 1) of ``wanted`` is about to start."""
        if self._recorder is not None:
            self._keep()
        if self._has_enough(number, wanted):
            if self._recorder is not None:
                self._probe_or_remove(number < wanted, model, optimizer)
            return
        is_meta = self.tier.name == "meta"
        # a slice has a job's graphs; what it had before them may be the most that it ever has
        graphs_from = _first_with_graphs() if is_meta else 0
        first = max(first_recorded(wanted), graphs_from)
        # on tier meta what is kept from earlier steps has its owners
        if self._recorder is None and (is_meta or number >= first):
            self._install()
        if self._recorder is not None and self._owner is not optimizer:
            self._owner = optimizer
            self._recorder.owned_by(model, optimizer)
        if number == graphs_from - 1 and _warms_up():
            self._eager = True
            self._recorder.start()
        if number >= first:
            iterations_left = wanted - 1 - number
            untraced = 2 if self._evaluates else 0  # where some are evaluated, the last may be
            self._start(number, iterations_left - untraced, iterations_left)

    def _has_enough(self, number: int, wanted: int) -> bool:
        """Whether step ``number`` of ``wanted`` is not to be recorded as an iteration."""
        if wanted > 2 and number >= wanted:
            return True
        if self.tier.name != "meta":
            return False
        # shapes have no times: one recording is enough
        if self.ends is not None and number >= self.ends:  # the command waits no longer
            return bool(self.kept())
        return bool(self._recordings)

    def _probe_or_remove(self, may_probe: bool, model: Models, optimizer: object) -> None:
        """Record this step as a probe, where one is wanted, or take the recorder out."""
        if may_probe and self._starts_probe():
            self._recorder.owned_by(model, optimizer)
            self._recorder.start()
        else:
            self._remove()

    def _start(self, number: int, left: int, spare: int) -> None:
        """Record the iteration that begins, or only clock the host in it, or neither; ``left``
        iterations are to come until one is traced, ``spare`` until the last that could be.
        """
        cuda, timed = self.tier.name == "cuda", len(self._recordings) - 1
        if self._traced:  # which takes the host a second or two afterwards
            return
        # recording delays the host: iterations without say how long it takes by itself
        if cuda and self._clock_next(left, timed):
            if not self._cool:
                self._measure_host()
            self._recorder.clock.start()
            return
        # behind a clocked iteration the GPU has cooled down: the next one is no typical one
        cool, self._cool = self._cool, False
        if cool and spare > 0:
            return
        if cuda and left <= 0 and timed > 0:
            # the last iteration: tracing it disturbs no other
            self._tracer = Tracer()
        hopeless = len(self._others) > 1 and not self._recordings  # all may have an evaluation
        self._quick = self.tier.name != "meta" and (self._written or hopeless)
        if not self._quick:  # the next iteration's batch may be another
            self._now = of_running_job()
        self._recorder.start(quick=self._quick, earlier=self._earlier(number))

    def _earlier(self, number: int) -> dict[str, int]:
        """Collectives by description, and iterations, before iteration ``number``."""
        from megatron_prism.runtime.virtual_world import current

        world = current()
        return {"": number - 1} | (world.tally.collectives() if world is not None else {})

    def _starts_probe(self) -> bool:
        """Whether the iteration that begins shows what depends on routing: one after that which is
        written down, with other loads of the experts.
        """
        if self._probes or not self.may_probe:
            return False
        # no router, so that nothing depends on routing
        routes = self.kept()[0].builder.routes
        if not len(routes):
            return False
        from megatron_prism.runtime.devices.moe_dispatch import loads

        self._probes = True
        # steps with these loads are like none before
        if self._monitor.repeats is not None:
            self._monitor.repeats.forget()
        self.changes.set(loads, "more", routing.more_tokens(routes))
        self.tier.live.begin_probe(self.changes)
        return True

    def probes_now(self) -> bool:
        """Whether the iteration that runs shows what depends on routing."""
        return self._probes and self._probe is None

    def _clock_next(self, left: int, timed: int) -> bool:
        """Whether the iteration is one of the two clocked ones behind two, six, ten ... others."""
        pairs, second = divmod(len(self._clocks), 2)
        return (second > 0 or timed >= 2 + 4 * pairs) and left > (1 if self._cool else 3)

    def _install(self) -> None:
        import torch

        from megatron_prism.runtime.recorder.recorder import Recorder, report_to
        from megatron_prism.runtime.recorder.repeats import Repeats
        from megatron_prism.runtime.virtual_world import current

        world = current()
        assert world is not None
        self._recorder = Recorder(self.rank, self.tier.name, self.tier.live)
        # equal steps of a microbatch run once and are written down again
        if self._monitor.few is not None and _RUNS not in os.environ:
            self._monitor.repeats = Repeats(self.tier.live, self._recorder)
            self.changes.on_undo(lambda: setattr(self._monitor, "repeats", None))
        # a device: its links would power down between rare calls, and its clock is part of the
        # times
        if self.tier.name == "cuda":
            self.links = nvlink_keepalive.keep_awake(
                torch.cuda.current_device(), world.tally.calls_to_others, self._num_processes
            )
            from megatron_prism.runtime.recorder.gpu_clock import sampler

            self._sampler = sampler(torch.cuda.current_device())
        report_to(self._recorder, self.changes)
        _running.append(self)
        self.changes.on_undo(_running.clear)
        self.changes.on_undo(lambda: self._recorder.owners.remove())
        world.listen(*world.listeners, self._recorder)
        self._monitor.listen(self._recorder, *self._monitor.listeners)

    def outside_step(self, gathered: bool, begun: bool = False) -> None:
        """An evaluation follows (``begun``: is here, and not recorded): iterations without one are
        preferred, and without one before that took something off them.
        """
        self._beside = self._recorder is not None
        self._evaluates = True
        if begun and self._beside:
            self._keep()
        self._next = gathered

    def _keep(self) -> None:
        # an iteration of which the host alone was clocked
        if self._recorder.clock.running:
            clocked, self._cool = self._recorder.clock.stop(), True
            self._measure_host()
            self._clocks += [] if self._beside else [clocked]
        elif self._recorder.active:
            recording = self._stopped()
            # the last iteration without CUDA graphs
            if self._eager:
                self._eager = False
                self._keep_peak(recording)
            # loads that differ: shows what depends on routing
            elif self._probes:
                self._probe = recording.program()
                if self._monitor.repeats is not None:
                    self._repeated = self._monitor.repeats.repeated
            # an evaluation is beside it: it counts where no other iteration is written down
            elif self._beside:
                self._others.append(recording)
                self._flops = self._flops or self._now
            else:
                self._flops = self._flops if self._quick else self._now
                self._recordings.append(recording)
                self._written = self._written or not self._quick
                self._traced = recording.busy is not None
        self._beside = self._next
        self._next = False

    def _keep_peak(self, recording: Recording) -> None:
        """Keep what has the peak before CUDA graphs run: an iteration without, and their capture.

        What repeats itself there does not repeat itself with graphs, and the owners of memory are
        looked for again.
        """
        self._before_graphs = recording.program()
        self._owner = self
        if self._monitor.repeats is not None:
            self._monitor.repeats.forget()

    def _stopped(self) -> Any:
        """What was recorded, with the kernels' own times if it was traced."""
        recording, tracer = self._recorder.stop(), self._tracer
        self._tracer = None
        # nothing was traced, or the profiler gave nothing
        if tracer is None or (trace := tracer.stop()) is None:
            return recording
        self._own_ns = self._recorder.own_ns()
        hosts = recording.hosts
        return dataclasses.replace(
            recording, busy=busy_ns(trace, hosts), launches=launches(trace, hosts)
        )

    def _measure_host(self) -> None:
        """A host's speed changes within seconds: it is measured beside what it is to explain."""
        from megatron_prism.emulate.capture import host_benchmark  # needs torch

        if len(self._hosts) < _HOSTS:
            # a job of many iterations does not wait for this again and again
            self._hosts.append(host_benchmark.measure(HOST_S).index)

    def _remove(self) -> None:
        from megatron_prism.runtime.virtual_world import current

        recorder = self._recorder
        self.changes.undo()
        self._recorder = None
        self._monitor.listen(
            *(listener for listener in self._monitor.listeners if listener is not recorder)
        )
        # requests from here on belong to no iteration
        if self.tier.live is not None:
            self.tier.live.end_history()
        if (world := current()) is not None:
            world.listen(*(listener for listener in world.listeners if listener is not recorder))

    def kept(self) -> list[Any]:
        """The recordings that count, of which one at least was written down."""
        return self._recordings if self._written else [*self._others, *self._recordings]

    def finished(self) -> None:
        """Write the slice, and say so."""
        path = self.finish()
        host = f" on {socket.gethostname()}" if self._num_processes > 1 else ""
        print(f"prism: {self.recorded()} in {path}{host}{self.remarks()}", file=sys.stderr)

    def recorded(self) -> str:
        """What was recorded, in words."""
        assert self.program is not None, "after finish"
        median = "" if self.tier.name == "meta" else f" (median of {self.num_iterations})"
        return f"{len(self.program):,} ops of an iteration{median}"

    def finish(self) -> Path:
        """Write the slice; returns where."""
        from megatron_prism.runtime.recorder.measurements import typical

        if self._recorder is not None:
            self._keep()
            self._remove()
        if self.links is not None:
            self.links.stop()
        self._note_facts_of_rank()
        steps = len(self._monitor.iterations)
        # timed iterations have no ops; one that was written down is needed
        if not any(recording.builder is not None for recording in self.kept()):
            raise UsageError(
                f"--prism-capture: nothing was recorded, the job ended after {steps} train steps",
                fix="a --train-iters that it reaches, no --skip-train, or no --prism-capture",
            )
        self._first_alone = steps < LEAST_STEPS
        self.program, self.num_iterations = typical(self.kept(), self._own_ns, self._clocks)
        if self._probe is not None:
            # what differs between the two is what depends on routing
            self.program = routing.learned(self.program, self._probe, self._repeated)
        if self.wanted:
            try:
                self.program, source = few_microbatches.of_all(
                    self.program, self.store.world, self.wanted, self.store.source
                )
                self._flops = source | self._flops  # Megatron's count is of all
            except ProgramError as error:
                # the captured order is not that of the scheduler: all microbatches have to run
                assert self.start_over is not None, "few ran"
                self.start_over(_ALL, error.message)
        if self._before_graphs is not None:
            self.program = peaks.with_earlier(self.program, self._before_graphs)
        self.store.folder.mkdir(parents=True, exist_ok=True)
        self.store.source.update(self._flops)
        if self.tier.name == "cuda":  # the others' hosts are not in their slices
            if not self._hosts:
                self._measure_host()
            self.store.source[HOST_INDEX] = f"{self.rank}={statistics.median(self._hosts):.4f}"
        self.store.put(self.program, _cut_groups(self.store.world, self.program))
        return self.store.path(self.rank)

    def _note_facts_of_rank(self) -> None:
        """Note in the source what is this rank's alone: its GPU, its host, its parts."""
        # the clock of a real GPU, which says how comparable times are
        if self._sampler is not None:
            self._sampler.stop()
            # iterations that were neither traced nor clocked ran at the job's own pace
            spans = list[tuple[int, int]]()
            for recording in self.kept():
                hosts = recording.hosts
                if recording.builder is None and recording.busy is None and hosts:
                    spans.append((hosts[0][0], hosts[-1][1]))
            state = self._sampler.state(spans)
            if state:
                self.store.source[GPU_CLOCK] = f"{self.rank}={state}"
        host_bytes = self._host_bytes()
        if host_bytes:
            self.store.source[HOST_MEMORY] = f"{self.rank}={host_bytes}"
        if self.tier.live is not None and self.tier.live.parts:
            peaks_of_parts = part_peaks.as_text(part_blocks.block_peaks(self.tier.live))
            # tier meta: what each part of the process's life holds at most
            self.store.source[MEMORY_PARTS] = f"{self.rank}={peaks_of_parts}"
        if self._monitor.saved_bytes is not None:
            self.store.source[SAVED_BYTES] = f"{self.rank}={self._monitor.saved_bytes.as_text()}"
        if self._monitor.assumed_parts:
            names = part_peaks.names_as_text(self._monitor.assumed_parts)
            self.store.source[ASSUMED_PARTS] = f"{self.rank}={names}"

    def _host_bytes(self) -> int:
        """The most that large copies on the host would have taken at once; 0 on other tiers."""
        live = self.tier.live
        if live is None:
            return 0
        return int(live.host.high)

    def remarks(self) -> str:
        """What to say of device and host beside the slice."""
        text = ""
        if self.links is not None:
            text = f"; {self.links}"
        copied_bytes = self._host_bytes()
        if copied_bytes:
            text += f"; {format_bytes(copied_bytes)} of host memory for copies there"
        if self._first_alone:
            text += (
                "; it is of the job's first iteration, at whose end the optimizer's states begin: "
                "what later ones hold takes a second one"
            )
        if self._hosts:
            index, took = statistics.median(self._hosts), HOST_S * len(self._hosts)
            text += f"; host index {index:.2f}, which took {took:g} s"
        if self.program is None or len(self.program.hosts) < 2:
            return text
        # the iteration that was recorded, beside the quickest of those that were timed
        recorded_ns = np.maximum(self.program.ops["host"], 0).sum()
        quickest_ns = min(self.program.hosts)
        if recorded_ns > _DISTURBED * quickest_ns:
            text += (
                f"; the host took {recorded_ns / 1e6:,.0f} ms for an iteration, "
                f"{quickest_ns / 1e6:,.0f} for the quickest: it was disturbed, and with it all "
                "that waits for it"
            )
        return text


def _cut_groups(world: Any, program: Program) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of ``program`` that do not follow from the world's sizes; Megatron has them."""
    from torch.distributed import distributed_c10d

    used, cut_groups = program.groups(), {}
    for group in distributed_c10d._world.pg_map:
        name, ranks = getattr(group, "desc", ""), getattr(group, "ranks", ())
        if name in used and program.rank in ranks:
            # None: they follow from the sizes
            groups = subgroups(world, name, ranks)
            cut_groups.update({name: groups} if groups is not None else {})
    return cut_groups
