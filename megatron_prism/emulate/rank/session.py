"""The run of one emulated rank, and the process-wide changes that it makes and takes back.

``with Session() as session:`` encloses one emulation; ``close`` undoes everything in reverse order,
after which the same process can emulate another world on another tier.  A process that ends with
its job (``prism run``, a worker of ``prism emulate``) leaves its session open.

Undone are: functions of torch that the tier and the virtual world replace, modes, environment
variables, stand-ins in ``sys.modules``, the import hooks, ``sys.exit`` and the exception hook.
Megatron's own state goes in two steps.  Its destroy functions are called where it has them, for
modules that were imported before the session and stay.  Then every module of ``megatron``,
``transformer_engine`` and ``triton`` that was first imported during the session is dropped from
``sys.modules``: Megatron copies names when it is imported (``from torch.cuda import Stream``,
``from megatron.core.utils import …``, functions compiled by decorators), and such copies are of the
session that they were made in.  Nobody can list them, but the next import makes new ones.

Not undone: what the job itself does to its process (the random state, threads, files, signal
handlers), and device memory that the driver gave for the NCCL reserve.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate import import_hooks
from megatron_prism.emulate.command_line.job_flags import Section
from megatron_prism.emulate.command_line.options import Options
from megatron_prism.emulate.rank.device_memory import MemoryWatch
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.runtime.devices import Tier
from megatron_prism.runtime.listeners import CallListener, TrainingListener

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.emulate.patch import PatchContext
    from megatron_prism.runtime.recorded_values import ValueRecorder, ValueReplayer
    from megatron_prism.runtime.virtual_world import TrafficCounter


@dataclass
class Run:
    """What ``launch`` builds from the options before Megatron is imported.

    monitor  : counts train steps and tells ``training`` of them
    training : listeners of the training, in the order in which they are told
    calls    : listeners of the communication calls, the outermost first; a listener that needs the
               device joins them when the world starts
    tally    : counts the calls; an NCCL reserve takes memory for them, too
    version  : megatron-core's
    store    : of the launcher, through which several local processes find each other
    recording, memory : the recorder or replayer of control values, the MemoryWatch of this run,
               where it has one
    sections : what listeners say of the run when the job has trained
    on_arguments : told the job's arguments, as text, once Megatron has parsed them and before
               anything is trained; what is of another job refuses it there
    on_world : called with the virtual world when it has started
    on_captured : told by a worker whose slice is complete which train step begins; the job ends
               there unless one of them wants what the job does at its end (True)
    places   : what this run will write when the job has trained; ``claims`` holds them
    short_layers : layers of a chunk here and in the job, where it runs with few
    patches  : what the patches know of this run, once they are registered
    """

    options: Options
    tier: Tier
    monitor: TrainingMonitor
    training: tuple[TrainingListener, ...] = ()
    calls: tuple[CallListener, ...] = ()
    tally: TrafficCounter | None = None
    version: str = ""
    store: dist.Store | None = None
    recording: ValueRecorder | ValueReplayer | None = None
    sections: list[Section] = field(default_factory=list)
    memory: MemoryWatch | None = None
    on_arguments: list[Callable[[str], None]] = field(default_factory=list)
    on_world: list[Callable[[Any], None]] = field(default_factory=list)
    on_captured: list[Callable[[int], bool]] = field(default_factory=list)
    places: list[Path] = field(default_factory=list)
    claims: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    patches: PatchContext | None = None
    short_layers: tuple[int, int] | None = None

    def forget_listeners(self) -> None:
        """Drop what the options of another rank have added; ``claims`` were closed before."""
        self.training = ()
        self.calls = ()
        for rows in (self.sections, self.on_arguments, self.on_world, self.on_captured):
            rows.clear()
        self.places.clear()

    def follow_training(self, listener: TrainingListener) -> None:
        """Have ``listener`` follow the training, behind those that follow it already."""
        self.training += (listener,)

    def follow_calls(self, listener: CallListener) -> None:
        """Have ``listener`` follow the calls, inside of those that follow them already."""
        self.calls += (listener,)


_PACKAGES = frozenset({"megatron", "transformer_engine", "triton"})
_DESTROY = (  # module, function: both tested releases have them (core/parallel_state.py and others)
    ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
    ("megatron.training.global_vars", "destroy_global_vars"),
    ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
    ("megatron.core.parallel_state", "destroy_model_parallel"),
)


class Session:
    """Owns every process-wide change of one emulation, in ``changes``."""

    def __init__(self) -> None:
        self.changes = ProcessChanges()
        modules, variables, path = frozenset(sys.modules), dict(os.environ), list(sys.path)
        # undone last, the first of these at the very end
        self.changes.on_undo(lambda: sys.path.__setitem__(slice(None), path))  # Megatron adds to it
        self.changes.on_undo(lambda: _restore_environment(variables))
        self.changes.on_undo(lambda: _forget_modules(modules))
        self.changes.on_undo(import_hooks.clear)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything back, the last change first; harmless a second time.

        Every change is tried.  Raises the first error, if there was one.
        """
        if not len(self.changes):
            return
        for name, function in _DESTROY:
            destroy = getattr(sys.modules.get(name), function, None)
            if destroy is not None:
                self.changes.on_undo(destroy)
        self.changes.undo()


def _restore_environment(variables: dict[str, str]) -> None:
    """Also what Megatron and torch set: NCCL's switches, CUDA_DEVICE_MAX_CONNECTIONS."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _forget_modules(before: frozenset[str]) -> None:
    """Drop modules of ``_PACKAGES`` that are not in ``before``, and parents' names of them."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
        if name in before:
            continue
        module = sys.modules.pop(name)
        parent, _, leaf = name.rpartition(".")
        if parent in before and vars(sys.modules[parent]).get(leaf) is module:
            with contextlib.suppress(AttributeError):
                delattr(sys.modules[parent], leaf)
