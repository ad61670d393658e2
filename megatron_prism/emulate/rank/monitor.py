"""The training monitor: counts steps, keeps what the summary needs, says whether the rank trained.

``TrainingMonitor.training`` encloses the job's ``pretrain``; ``iteration`` and ``stepped`` each
train step; ``step`` each forward or backward of a microbatch.  A run that ends without the
optimizer steps it was asked for raises NotTrainedError (exit 1), whatever the job's own exit code
would have been.

Megatron's ``pretrain`` is not the only way to train with megatron-core: its quick start, frameworks
on top of it and hand-written scripts call ``init_process_group`` and step an optimizer.  ``host``
makes that call bring the virtual world up where it would wait for the other ranks; ``OwnLoop``
tells the monitor of train steps by what they do, and stands back where Megatron's own trains.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_prism.core.errors import NotTrainedError, PrismError, UsageError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.world import World
from megatron_prism.emulate.rank.device_memory import explain
from megatron_prism.memory.saved_bytes import SavedBytes
from megatron_prism.runtime.listeners import CallListener, TrainingListener, overriding
from megatron_prism.runtime.recorder.repeats import Repeats

if TYPE_CHECKING:
    from megatron_prism.emulate.command_line.options import Options

# With these settings no step may stand for another one.  A step leaves work to others, or runs
# beside one, or depends on the steps before it: Megatron's offloading keeps the activations of a
# microbatch whose backward is next (should_bulk_offload,
# fine_grained_activation_offload.py:1066 @0.19.0).
_BEYOND = (
    "defer_embedding_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "fine_grained_activation_offloading",
)
_SCHEDULE = ("num_microbatches", "seq_length", "micro_batch_size")
# Of which memory's peak is kept apart; a job without evaluation has none of it.
PARTS = (
    "start",
    "model",
    "optimizer",
    "load",
    "first iteration",
    "steady iteration",
    "optimizer step",
    "evaluation",
    "checkpoint",
    "graph capture",
    "end",
)


@dataclass
class Iteration:
    """One train step: losses (last stage only), gradient norm, whether the step was applied.

    start_ns : when it began, ns of a clock of this process's own
    """

    number: int
    start_ns: int = 0
    wall_ns: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    skipped: bool = False


class TrainingMonitor:
    """What happened in this process, and who is told of it while it happens.

    peak_source : the live-byte tracker, which is told before any listener, or None
    """

    def __init__(self, peak_source: Any = None, shapes_only: bool = False) -> None:
        self.peak_source = peak_source
        self.shapes_only = shapes_only
        self.listen()
        self.who = "this rank"
        self.labels: dict[str, Any] = {}  # of what runs now, or of what failed
        self.held: Callable[[], int] = lambda: 0  # bytes held in reserve
        self.iterations: list[Iteration] = []
        self.before = 0  # iterations that the job's checkpoint has behind it
        self.started = False  # pretrain was entered
        self.left = False  # by sys.exit(0)
        self.finished = False  # the verdict was given
        self.failure: PrismError | None = None  # it, where it was bad
        self.expected: int | None = None
        # iterations Megatron passed over: --iterations-to-skip counts from 0 in 0.16, 1 in 0.19
        self.skipped = 0
        self.num_parameters = 0
        self.moved: bool | None = None  # whether a master parameter changed; None: unknown
        self._forwards: dict[int | None, int] = {}
        self._outputs: dict[int, dict[str, Any]] = {}
        self.schedule = dict.fromkeys(
            _SCHEDULE, 0
        )  # numbers among the arguments of the one that runs
        self._before: tuple[torch.Tensor, float] | None = None
        self.on_step: Callable[[int], None] | None = None  # told how many steps are done
        self.saved_bytes: SavedBytes | None = None  # what this rank writes into a checkpoint
        self.assumed_parts: set[str] = set()  # of PARTS: those that ran on an assumption
        self.notes: list[str] = []  # what this run does otherwise than the real job
        self.on_note: Callable[[str], None] = lambda text: None
        self._done = 0
        self.loop: OwnLoop | None = None  # of a program that has no pretrain
        self.few: Callable[[int, Any], int] | None = None  # see ``new_schedule``
        self.repeats: Repeats | None = None  # who writes steps that repeat themselves
        self.not_repeated: Callable[[], object] = lambda: None  # told that they did not
        self._building = contextlib.ExitStack()  # the part in which the model is built

    def listen(self, *listeners: TrainingListener) -> None:
        """Tell ``listeners`` from here on, in this order, instead of those before."""
        self.listeners: tuple[TrainingListener, ...] = tuple(listeners)
        # found once: every forward and backward has a scope
        self._scopes = tuple(listener.scope for listener in self._hearing("scope"))
        self._parts = tuple(listener.part for listener in self._hearing("part"))

    def note(self, text: str) -> bool:
        """Keep what this run does otherwise; False if it is known."""
        if text in self.notes:
            return False
        self.notes.append(text)
        self.on_note(text)
        return True

    def _tell(self, name: str, *args: object) -> None:
        for listener in self._hearing(name):
            getattr(listener, name)(*args)

    def _hearing(self, name: str) -> tuple[Any, ...]:
        source = () if self.peak_source is None else (self.peak_source,)
        return overriding((*source, *self.listeners), TrainingListener, name)

    @property
    def hears_calls(self) -> bool:
        """Whether a listener follows the rank's communication calls, too."""
        return bool(overriding(self.listeners, CallListener, "record"))

    # -- phases -----------------------------------------------------------------------------------
    def new_schedule(self, settings: dict[str, Any], config: Any = None) -> None:
        """A forward-backward schedule starts; ``settings`` are its keyword arguments, among which
        ``few`` may lower the number of microbatches; ``config``: the model's.
        """
        trains = not settings.get("forward_only")
        # an evaluation ends what counts as an iteration of a program's own loop
        if self.loop is not None and not trains:
            self.loop.check_end()
        if self.few is not None and trains:
            settings["num_microbatches"] = self.few(settings["num_microbatches"], config)
        self._forwards.clear()
        self._outputs.clear()
        self.schedule = {key: int(settings.get(key) or 0) for key in _SCHEDULE}
        if self.loop is not None and trains:
            self.loop.begin(settings.get("model"))
        # with these options, steps of a microbatch are not alike
        if any(getattr(config, name, None) for name in _BEYOND):
            self.repeats = None
        if self.repeats is not None:
            self.repeats.reset(self.schedule["num_microbatches"] if trains else 0)

    def forward_labels(self, chunk: int | None) -> dict[str, Any]:
        """Labels of the next forward of ``chunk``: the schedule runs microbatches in order."""
        number = self._forwards.get(chunk, 0)
        self._forwards[chunk] = number + 1
        place = {} if chunk is None else {"chunk": chunk}
        return {"phase": "forward", "microbatch": number, **place}

    def remember_output(self, output: Any, labels: dict[str, Any]) -> None:
        """Keep which microbatch made ``output``: its backward is told nothing but that tensor."""
        self._outputs[id(_single(output))] = labels

    def backward_labels(self, output: Any) -> dict[str, Any]:
        """Labels of the backward that starts from ``output``."""
        return {**self._outputs.pop(id(_single(output)), {}), "phase": "backward"}

    @contextlib.contextmanager
    def step(self, labels: dict[str, Any]) -> Iterator[None]:
        """One forward or backward of one microbatch (of one model chunk)."""
        with self.phase(**labels):
            yield
        self._done += 1
        if self.on_step is not None:
            self.on_step(self._done)

    @contextlib.contextmanager
    def phase(self, phase: str, **labels: Any) -> Iterator[None]:
        """Label what runs inside for whoever keeps labels: the memory tracker, the recorder."""
        before, self.labels = self.labels, {**self.labels, "phase": phase, **labels}
        with contextlib.ExitStack() as scopes:
            for scope in self._scopes:
                scopes.enter_context(scope(phase=phase, **labels))
            yield
        self.labels = before  # not after an error, which these labels then explain

    def world_known(self, world: World) -> None:
        """Tell who listens the sizes of the job's parsed arguments, or of the script's own code."""
        self._tell("world_known", world)

    def outside_step(self, gathered: bool, begun: bool) -> None:
        """Mark everything until the next train step as not part of a steady iteration (evaluation,
        checkpointing); arguments as ``TrainingListener.outside_step``.
        """
        self._tell("outside_step", gathered, begun)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is one of PARTS: those who follow memory keep its peak apart."""
        with contextlib.ExitStack() as followers:
            for part in self._parts:
                followers.enter_context(part(name))
            yield

    @contextlib.contextmanager
    def model_part(self) -> Iterator[None]:
        """What runs inside is the part ``model``, until ``model_built``."""
        with contextlib.ExitStack() as self._building:
            self._building.enter_context(self.part("model"))
            yield

    def model_built(self) -> None:
        """The model is there: what comes now is another part."""
        self._building.close()

    def tokens_per_iteration(self) -> int:
        """Tokens that one data-parallel rank sees in an iteration, by the schedule's arguments."""
        return math.prod(self.schedule.values()) or 1

    # -- iterations -------------------------------------------------------------------------------
    @contextlib.contextmanager
    def iteration(self, optimizer: Any, model: Any, wanted: int = 0) -> Iterator[None]:
        """One of ``wanted`` train steps; the first remembers a master parameter to see it move."""
        if not self.iterations:
            if self.shapes_only:  # what building left in circles is long gone in a job of hours
                gc.collect()
            # now the optimizer is there, and has not moved anything
            self.num_parameters = _count_parameters(model)
            self.remember(optimizer)
        number = self.before + len(self.iterations) + 1
        self.iterations.append(Iteration(number, time.perf_counter_ns()))
        self._tell("iteration_started", len(self.iterations), wanted, model, optimizer)
        start = time.perf_counter_ns()
        with self.device_memory():
            yield
        self.iterations[-1].wall_ns = time.perf_counter_ns() - start

    def resumed(self, iteration: int) -> None:
        """The job goes on behind ``iteration``, and has made no train step yet."""
        self.before = iteration
        self._tell("resumed", iteration)

    def remember(self, optimizer: object) -> None:
        """Keep a master parameter of ``optimizer``, to see whether it moves."""
        if not self.shapes_only and optimizer is not None:
            self._before = _fingerprint(optimizer)

    @contextlib.contextmanager
    def device_memory(self) -> Iterator[None]:
        """Where device memory runs out, the error says whose, in which step and at which line."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._tell("out_of_memory")
            # before the first iteration there is no number
            labels = {"iteration": len(self.iterations) or None, **self.labels}
            raise explain(error, self.who, labels, self.held()) from error

    def stepped(self, losses: Any, skipped: bool, grad_norm: Any) -> None:
        """The train step's own results."""
        entry = self.iterations[-1]
        entry.skipped = skipped
        entry.losses = {} if self.shapes_only else {k: float(v) for k, v in (losses or {}).items()}
        entry.grad_norm = None if grad_norm is None or self.shapes_only else float(grad_norm)

    def steps_to_make(self, args: Any) -> int:
        """Train steps that this run makes: from 0 or where its checkpoint was (args.iteration) to
        --train-iters, or to where Megatron leaves before (training.py:3317 @0.19.0).
        """
        begin, end = int(getattr(args, "iteration", 0) or 0), args.train_iters or 0
        ends = [i for i in getattr(args, "phase_transition_iterations", None) or () if i > begin]
        # the next multiple of it, counted from where the job begins
        if every := getattr(args, "exit_interval", None):
            ends.append((begin // every + 1) * every)
        return max(0, min([end, *ends]) - begin)

    @property
    def steps(self) -> int:
        """Optimizer steps that were applied."""
        return sum(1 for entry in self.iterations if not entry.skipped)

    # -- verdict ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def training(self, get_args: Callable[[], Any]) -> Iterator[None]:
        """Encloses ``pretrain``; gives the verdict on a normal end and on ``sys.exit(0)``."""
        self.started = True
        # it is Megatron's own loop, so steps need not be guessed from updates
        if self.loop is not None:
            self.loop.stand_back()
        try:
            with self.device_memory():
                yield
        except SystemExit as end:
            if end.code in (None, 0):
                self.left = True
                self.finish(get_args)
            raise
        # an interrupted job is told, and gets no verdict
        except KeyboardInterrupt:
            self._tell("interrupted")
            raise
        self.finish(get_args)

    def finish(self, get_args: Callable[[], Any]) -> None:
        """Raise NotTrainedError unless the steps that were asked for happened."""
        if self.finished:
            return
        args = get_args()
        wanted = max(0, self.steps_to_make(args) - self.skipped)
        early = any(  # nobody knows after how many steps
            getattr(args, name, None) for name in ("exit_duration_in_mins", "exit_signal_handler")
        )
        self.finish_steps(
            wanted, 1 if early else max(1, wanted), getattr(args, "skip_train", False)
        )

    def finish_steps(self, expected: int, wanted: int = 1, skips: bool = False) -> None:
        """As ``finish`` with at least ``wanted`` of ``expected`` steps; ``skips``: the job was told
        to make none.
        """
        self.finished = True
        # said in the summary, whatever the verdict is
        self.expected, self.moved = expected, self.has_moved()
        self.check(wanted, skips)
        try:
            self._tell("finished")
        except PrismError as error:
            self.failure = error  # kept: scripts catch what pretrain raises
            raise

    def has_moved(self) -> bool | None:
        """Whether the remembered master parameter changed; None if none was remembered."""
        if self._before is None or not self.steps:
            return None
        parameter, before = self._before
        return _sum(parameter) != before

    def check(self, wanted: int, skips: bool = False) -> None:
        """Raise NotTrainedError if fewer than ``wanted`` optimizer steps were applied.

        The error is kept, too: scripts catch what pretrain raises, and the exit status is judged by
        it as the process ends (``launch.untrained``).
        """
        if self.steps >= wanted:
            return
        ran = len(self.iterations)
        if not ran:
            message = "the job ended without a single train step"
            fix = "check --train-iters and the data flags; a real job would idle too"
            if skips:
                fix = "leave --skip-train out; what it evaluated is in the log above"
            elif self.left:  # --exit-on-missing-checkpoint, say
                fix = "Megatron itself left it, and says why in the log above; a real job would too"
        else:
            message = (
                f"{ran} train steps ran, but only {self.steps} updates of {wanted} were applied"
            )
            fix = (
                "gradients were not finite or the run stopped early: look at the log, try "
                "--prism-values noise, or lower --initial-loss-scale under --fp16"
            )
        self.failure = NotTrainedError(message, fix=fix)  # kept: scripts catch what pretrain raises
        raise self.failure


def _single(output: Any) -> Any:
    """Schedules hand a stage's output over bare or in a list of one."""
    return output[0] if isinstance(output, (list, tuple)) and output else output


def _count_parameters(model: Any) -> int:
    """Parameters of all chunks; interleaved schedules have several."""
    chunks = [model]
    if isinstance(model, (list, tuple)):
        chunks = list(model)
    count = 0
    for chunk in chunks:
        if chunk is not None:
            count += sum(parameter.numel() for parameter in chunk.parameters())
    return count


def _sum(parameter: torch.Tensor) -> float:
    return float(parameter.detach().sum(dtype=torch.float64))


def _fingerprint(optimizer: Any) -> tuple[torch.Tensor, float] | None:
    """The smallest non-empty master parameter and its sum: cheap, and no copy of it is made."""
    parameters = []
    for group in getattr(optimizer, "param_groups", None) or []:
        for parameter in group["params"]:
            if parameter is not None and parameter.numel():
                parameters.append(parameter)
    if not parameters:
        return None
    # its sum costs least after every step
    smallest = min(parameters, key=lambda p: p.numel())
    return smallest, _sum(smallest)


WANTED = 3  # steps that listeners are told of: nobody knows how many there will be
_PLACES = (dist, distributed_c10d, device_mesh)  # who has the name init_process_group


def host(
    start: Callable[[], object], options: Options, monitor: TrainingMonitor, changes: ProcessChanges
) -> None:
    """Have ``init_process_group`` call ``start`` until ``changes`` are undone."""
    original = distributed_c10d.init_process_group
    original = getattr(original, "__prism_original__", original)  # what attached us calls this
    signature = inspect.signature(original)

    def init_process_group(*args: object, **kwargs: object) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        # our own start, or a second call, which torch refuses in its words
        if arguments.get("backend") == "prism" or dist.is_initialized():
            original(*args, **kwargs)  # type: ignore[arg-type]
            return
        _check(options, arguments)
        # pretrain counts its steps itself
        if not monitor.started:
            monitor.loop = OwnLoop(monitor, changes, options.steps)
        start()

    for place in _PLACES:
        changes.set(place, "init_process_group", init_process_group)
    changes.set(dist, "TCPStore", _store_of(dist.TCPStore, options))


def _store_of(base: Any, options: Options) -> type[dist.TCPStore]:
    """A store that does not wait for ranks which have no process."""

    class TCPStore(base):
        def __init__(self, *args: object, **kwargs: object) -> None:
            names = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            size, waits = arguments.get("world_size"), arguments.get("wait_for_workers", True)
            # the real store would wait for ranks without a process until its timeout
            if waits and isinstance(size, int) and size > options.num_processes:
                message = (
                    f"the script waits at a store for {size} processes: virtual ranks have none"
                )
                fix = "leave the rendezvous to init_process_group without a store"
                raise UsageError(message, fix=fix)
            super().__init__(*args, **kwargs)

    return TCPStore


def _check(options: Options, arguments: dict[str, object]) -> None:
    """UsageError unless the program means the world, and the rank, that is emulated."""
    size, rank = arguments.get("world_size", -1), arguments.get("rank", -1)
    # -1 and None: the script leaves it to the environment
    if size not in (-1, None, options.world.size):
        message = f"the script starts {size} ranks, and the emulated job has {options.world.size}"
        raise UsageError(message, fix=f"--prism-world-size {size}")
    if rank not in (-1, None, options.rank):
        message = f"the script starts as rank {rank}, and this process is rank {options.rank}"
        raise UsageError(message, fix=f"--prism-ranks {rank}, or a script that reads RANK")


class OwnLoop:
    """Train steps of a loop that is not Megatron's.

    A step ends with the last update by an optimizer of torch's kind (Megatron's are built on them)
    before the next schedule, forward pass with gradients, or backward pass; there the next begins.
    Behind ``steps`` of them the process ends.
    """

    def __init__(
        self, monitor: TrainingMonitor, changes: ProcessChanges, steps: int | None = None
    ) -> None:
        self._monitor, self._open, self._steps = monitor, contextlib.ExitStack(), steps
        self._updates = 0  # by optimizers, in the step that is open
        self._optimizer: torch.optim.Optimizer | None = None
        self._changes = ProcessChanges()
        changes.on_undo(self.stand_back)
        for hook in (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ):
            self._changes.on_undo(hook.remove)
        self._inside = contextlib.ExitStack()  # of an update
        self._wait_for_forward()

    def _wait_for_forward(self) -> None:
        """Begin a step with the next forward pass that computes gradients.

        Evaluation calls modules without gradients and begins none.  The hook removes itself, and
        each first update of a step sets another.
        """

        def called(module: torch.nn.Module, args: object) -> None:
            if torch.is_grad_enabled():
                hook.remove()
                self.begin(module)

        hook = register_module_forward_pre_hook(called)
        self._changes.on_undo(hook.remove)

    def begin(self, model: object) -> None:
        """A training schedule or a forward pass of ``model`` starts: a train step, if it is the
        first after an update.
        """
        monitor = self._monitor
        # one more microbatch of the step that is open
        if monitor.iterations and not self._updates:
            return
        self.check_end()
        self._close()
        models = model if isinstance(model, list | tuple) else [model]
        wanted = self._steps or WANTED
        self._open.enter_context(monitor.iteration(self._optimizer, models, wanted))
        part = "first iteration" if len(monitor.iterations) == 1 else "steady iteration"
        self._open.enter_context(monitor.part(part))

    def check_end(self) -> None:
        """End the process if it has made its steps: what comes now is no part of one."""
        # the last of the wanted steps has updated its parameters
        if self._updates and len(self._monitor.iterations) == self._steps:
            sys.stdout.flush()
            os._exit(0)  # asks for the verdict

    def _close(self) -> None:
        if self._updates:
            self._monitor.stepped({}, skipped=False, grad_norm=None)
        self._open.close()
        self._updates = 0

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not self._monitor.iterations:  # no forward pass was seen
            self.begin([])
        # the first optimizer stands for all: its parameter shows whether any moves
        if self._optimizer is None:
            self._optimizer = optimizer
            self._monitor.remember(optimizer)
        self._inside.enter_context(self._monitor.phase("optimizer"))
        self._inside.enter_context(self._monitor.part("optimizer step"))

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._inside.close()
        if not self._updates:
            self._wait_for_forward()
        self._updates += 1

    def stand_back(self) -> None:
        """Follow no longer: the program trains with Megatron's train step, or has ended."""
        if self._monitor.loop is self:
            self._monitor.loop = None
        self._changes.undo()

    def finish(self) -> None:
        """The program has ended: close the last step and give the verdict."""
        if self._monitor.iterations and not self._updates:  # an evaluation, or it broke off
            self._monitor.iterations[-1].skipped = True
        self._close()
        self.stand_back()
        self._monitor.finish_steps(self._monitor.steps)
