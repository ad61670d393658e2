"""Host a program that starts ``torch.distributed`` itself and has a training loop of its own.

Megatron's ``pretrain`` is not the only way to train with megatron-core: its quick start, frameworks
on top of it and hand-written scripts call ``init_process_group`` and step an optimizer.  ``host``
makes that call bring the virtual world up where it would wait for the other ranks; ``OwnLoop``
tells the monitor of train steps by what they do, and stands back where Megatron's own trains.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_prism.core.errors import UsageError
from megatron_prism.core.process_changes import ProcessChanges

if TYPE_CHECKING:
    from megatron_prism.emulate.monitor import TrainingMonitor
    from megatron_prism.emulate.options import Options

__all__ = ["OwnLoop", "host"]

WANTED = 3  # steps that listeners are told of: nobody knows how many there will be
_PLACES = (dist, distributed_c10d, device_mesh)  # who has the name init_process_group


def host(
    start: Callable[[], object],
    options: Options,
    monitor: TrainingMonitor,
    changes: ProcessChanges,
) -> None:
    """Have ``init_process_group`` call ``start`` until ``changes`` are undone."""
    original = distributed_c10d.init_process_group
    original = getattr(original, "__prism_original__", original)  # what attached us calls this
    signature = inspect.signature(original)

    def init_process_group(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("backend") == "prism" or dist.is_initialized():
            original(*args, **kwargs)  # type: ignore[arg-type]
            return
        _check(options, given)
        if not monitor.started:
            monitor.loop = OwnLoop(monitor, changes)
        start()

    for place in _PLACES:
        changes.set(place, "init_process_group", init_process_group)
    changes.set(dist, "TCPStore", _store_of(dist.TCPStore, options))


def _store_of(base: type[dist.TCPStore], options: Options) -> type[dist.TCPStore]:
    """A store that does not wait for ranks which have no process."""

    class TCPStore(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            names = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            size, waits = given.get("world_size"), given.get("wait_for_workers", True)
            if waits and isinstance(size, int) and size > options.num_processes:
                raise UsageError(
                    f"the script waits at a store of its own for {size} processes, and virtual "
                    "ranks have none",
                    fix="leave the rendezvous to init_process_group without a store",
                )
            super().__init__(*args, **kwargs)

    return TCPStore


def _check(options: Options, given: dict[str, object]) -> None:
    """UsageError unless the program means the world, and the rank, that is emulated."""
    size, rank = given.get("world_size", -1), given.get("rank", -1)
    if size not in (-1, None, options.world.size):
        raise UsageError(
            f"the script starts torch.distributed with {size} ranks, and the emulated job has "
            f"{options.world.size}",
            fix=f"--prism-world-size {size}",
        )
    if rank not in (-1, None, options.rank):
        raise UsageError(
            f"the script starts torch.distributed as rank {rank}, and this process is rank "
            f"{options.rank} of the emulated job",
            fix=f"--prism-ranks {rank}, or a script that reads RANK",
        )


class OwnLoop:
    """Train steps of a loop that is not Megatron's.

    A step ends with the last update by an optimizer of torch's kind (Megatron's are built on them)
    before the next schedule, forward pass with gradients, or backward pass; there the next begins.
    """

    def __init__(self, monitor: TrainingMonitor, changes: ProcessChanges) -> None:
        self._monitor, self._open = monitor, contextlib.ExitStack()
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
        """Begin a step with the first module that is called; the hook is gone then."""

        def called(module: torch.nn.Module, args: object) -> None:
            if torch.is_grad_enabled():
                hook.remove()
                self.begin(module)

        hook = register_module_forward_pre_hook(called)
        self._changes.on_undo(hook.remove)

    def begin(self, model: object) -> None:
        """A training schedule or a forward pass of ``model`` starts: a train step, if it is the
        first after an update."""
        monitor = self._monitor
        if monitor.iterations and not self._updates:
            return
        self._close()
        models = model if isinstance(model, list | tuple) else [model]
        self._open.enter_context(monitor.iteration(self._optimizer, models, WANTED))
        part = "first iteration" if len(monitor.iterations) == 1 else "steady iteration"
        self._open.enter_context(monitor.part(part))

    def _close(self) -> None:
        if self._updates:
            self._monitor.stepped({}, skipped=False, grad_norm=None)
        self._open.close()
        self._updates = 0

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not self._monitor.iterations:  # no forward pass was seen
            self.begin([])
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
        self._monitor.finish_steps()
