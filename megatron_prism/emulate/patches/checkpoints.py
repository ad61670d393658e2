"""Patches of checkpoints: which are written, which are read, and what a rank alone can read.

A copied command line names the folders of the real job's checkpoints; an emulated job does not
write there, on whatever tier and however many of its ranks are local.  It may read there.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_prism.core.errors import PrismError, UnsupportedError, UsageError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.patch import ENABLES, PROTECTS, Original, PatchContext, Patches
from megatron_prism.emulate.patches import own_layout, planned_reads, planned_writes
from megatron_prism.emulate.patches.shifted_states import shifted_states
from megatron_prism.emulate.patches.startup import megatron_args
from megatron_prism.memory.saved_bytes import SavedBytes

PATCHES = Patches(purpose=PROTECTS)
_NO_CHECKPOINTS = (
    "checkpoints are not written: --save names the real job's folder\n"
    "  fix: --prism-record DIR, if this run is the real job and all its ranks are local"
)
_LONGEST_REFUSAL = 300  # letters of an error of Megatron's; it may list every tensor
_SHOWN_ITERATIONS = 8  # of the checkpoints in a folder, in an error


# -- writing ---------------------------------------------------------------------------------------


@PATCHES.patch("megatron.training.checkpointing:save_checkpoint", at=":471 @0.16.1; :552 @0.19.0")
def _no_checkpoints(module: ModuleType, context: PatchContext) -> None:
    """Keep ``save_checkpoint`` from the real job's folder.

    Virtual ranks have no shards to put there, and rank 0, which looks for the shards of all ranks,
    would fail.
    """

    def call(original: Original, iteration: Any, *args: object, **kwargs: object) -> Any:
        job = megatron_args()
        gathered = bool(getattr(job, "overlap_param_gather", False))
        context.monitor.outside_step(gathered, begun=True)

        # the real job, of which a recording is made
        if context.writes():
            with context.monitor.part("checkpoint"):
                return original(iteration, *args, **kwargs)

        context.say(_NO_CHECKPOINTS)
        is_watched = context.monitor.hears_calls
        if context.meta and not is_watched and job.ckpt_format == "torch_dist":
            save = partial(original, iteration, *args, **kwargs)
            weigh(module, context.monitor, save)
        return None

    context.replace(module, call)


@PATCHES.patch("megatron.core.dist_checkpointing.serialization:save", "load", at=":349 @0.19.0")
def _no_own_checkpoints(module: ModuleType, context: PatchContext) -> None:
    """Keep a program that calls megatron.core itself from writing among the real job's shards.

    A checkpoint that it has not saved, or that shapes could not hold, it "loads" as the model has
    it.
    """
    unsaved_folders: set[str] = set()

    def arguments_if_emulated(
        original: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> dict[str, Any] | None:
        if context.monitor.loop is None or context.writes():
            return None
        return inspect.signature(original).bind(*args, **kwargs).arguments

    def save(original: Original, *args: object, **kwargs: object) -> object:
        arguments = arguments_if_emulated(original, args, kwargs)
        if arguments is None:
            return original(*args, **kwargs)
        context.monitor.outside_step(gathered=False, begun=True)
        context.say(_NO_CHECKPOINTS)
        unsaved_folders.add(str(arguments["checkpoint_dir"]))
        # the caller of an asynchronous save awaits a request
        if arguments.get("async_sharded_save"):
            return module.AsyncRequest(None, (), [])
        return None

    def load(original: Original, *args: object, **kwargs: object) -> object:
        arguments = arguments_if_emulated(original, args, kwargs)
        if arguments is None:
            return original(*args, **kwargs)
        # a checkpoint with values, of a job before this one
        if not context.meta and str(arguments["checkpoint_dir"]) not in unsaved_folders:
            return original(*args, **kwargs)
        loaded = _content(arguments["sharded_state_dict"])
        # a strictness that returns has (state, missing keys, unexpected keys)
        if "return" in str(arguments.get("strict", "")).lower():
            return loaded, set(), set()
        return loaded

    context.replace(module, save, "save")
    context.replace(module, load, "load")


def _content(sharded_state: object) -> object:
    """Return what the shards of a state dict hold, in place of the shards."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

    def content(shard: object) -> object:
        return getattr(shard, "data", getattr(shard, "obj", shard))

    return dict_list_map_outplace(content, sharded_state)


PATCHES.left_out(
    "no-gradients",
    "megatron.training.checkpointing:save_grads",
    at=":437 @0.16.1; :516 @0.19.0",
    reason="--save-wgrads-interval and --save-dgrads-interval write to folders in --save",
    unless=PatchContext.writes,
    said="gradients are not written: --save names the real job's folder",
)


# -- reading ---------------------------------------------------------------------------------------


@PATCHES.patch(
    "megatron.training.checkpointing:load_checkpoint",
    at=":1479 @0.16.1; :2066 @0.19.0",
    purpose=ENABLES,
)
def _read_checkpoint(module: ModuleType, context: PatchContext) -> None:
    """Begin where the wanted iteration does, and read what a rank alone can.

    On shapes there is no value to read: the iteration of a checkpoint comes back through a device
    tensor, and so does the rest.  Ranks that share the reading (--ckpt-fully-parallel-load) would
    get a part from virtual ones.
    """

    def call(
        original: Original,
        model: object,
        optimizer: object,
        scheduler: object,
        *args: object,
        **kwargs: object,
    ) -> tuple[int, int]:
        job = megatron_args()
        # a checkpoint of --pretrained-checkpoint begins no iteration
        is_own = kwargs.get("load_arg", "load") == "load"
        wanted = context.iterations if is_own else None
        if not context.is_real():
            job.ckpt_fully_parallel_load = False
        if wanted is not None:
            first, last = wanted
            if not context.meta:
                job.ckpt_step = _last_before(job.load, first, job.ckpt_step)
            job.exit_interval = last  # a multiple of it: training ends there

        if context.meta:
            # a schedule that --prism-steps has cut is not that of the checkpoint
            kept_scheduler = None if getattr(job, "prism_steps", None) else scheduler
            load = partial(original, model, optimizer, kept_scheduler, *args, **kwargs)
            _load_shapes(module, context, optimizer, load)
            begun, operations = 0, 0
        else:
            begun, operations = original(model, optimizer, scheduler, *args, **kwargs)

        if wanted is not None:
            _go_on(job, scheduler, begun, first - 1)
            begun = first - 1
        return begun, operations

    context.replace(module, call)


def _load_shapes(
    module: ModuleType, context: PatchContext, optimizer: object, load: Callable[[], object]
) -> None:
    """Do on shapes what loading does: by Megatron's own code where metadata are enough for it.

    Args:
        module: Megatron's module of checkpoints.
        context: of the run.
        optimizer: of the job.
        load: Megatron's load_checkpoint with all its arguments.
    """
    job = megatron_args()
    folder = job.load
    if folder is not None and module.checkpoint_exists(folder) and _is_planned(module, folder):
        _plan_load(context, optimizer, load)
        context.say(
            f"--load {folder}: read as the checkpoint's metadata say, without values; the job "
            "begins with iteration 1"
        )
        return
    # not here, and one of the job's own layout is enough
    if folder is not None and context.loads_own_layout and job.ckpt_format == "torch_dist":
        with own_layout.OwnLayout(module, job).installed():
            _plan_load(context, optimizer, load)
        context.monitor.assumed_parts.add("load")
        context.say(
            f"--load {folder}: not here, a checkpoint of the job's own layout is read, without "
            "values; the job begins with iteration 1"
        )
        return

    # other formats, and no checkpoint at all
    has_states = _loads_optimizer(module, job)
    if has_states:
        _make_states(optimizer)
    context.say(_unread(module, job, has_states))


def _is_planned(module: ModuleType, folder: str) -> bool:
    """Return whether a checkpoint is of the format torch_dist, whose metadata say where all is."""
    job = megatron_args()
    iteration, is_release = -1, False
    tracker = Path(module.get_checkpoint_tracker_filename(folder))
    # the tracker names the last checkpoint, unless --ckpt-step chooses another one
    if tracker.is_file():
        iteration, is_release = module.read_metadata(str(tracker))
    iteration = getattr(job, "ckpt_step", None) or iteration
    place = module.get_checkpoint_name(folder, iteration, is_release, return_base_dir=True)
    return (Path(place) / ".metadata").is_file() and job.ckpt_format == "torch_dist"


def _tell(reading: planned_reads.PlannedReading) -> None:
    """Tell those who asked what the rank reads, or why Megatron refuses to."""
    for tell in planned_reads.observers:
        tell(reading.result)


def _plan_load(context: PatchContext, optimizer: object, load: Callable[[], object]) -> None:
    """Run Megatron's load_checkpoint on shapes, as the part ``load`` of the rank's memory.

    Raises:
        UnsupportedError: Megatron refuses the checkpoint.
    """
    from megatron.core import num_microbatches_calculator as batches
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.optimizer import distrib_optimizer

    job = megatron_args()
    samples = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    before = {name: getattr(job, name) for name in samples if hasattr(job, name)}
    reading = planned_reads.PlannedReading(strategies, job)
    try:
        with ProcessChanges() as changes, reading.installed(), context.monitor.part("load"):
            # Megatron cannot load states into torch's optimizer, which stands in for another one
            if not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
                changes.set(job, "no_load_optim", True)
                _make_states(optimizer)
            load()
    except PrismError:
        # a refusal of ours says nothing of the checkpoint
        raise
    except (Exception, CheckpointException, SystemExit) as error:
        reading.result.refusal = planned_reads.refusal_of(error)
        refusal = reading.result.refusal.partition("\n")[0][:_LONGEST_REFUSAL]
        _tell(reading)
        raise UnsupportedError(
            f"--load {job.load}: Megatron refuses the checkpoint: {refusal}",
            fix=f"prism reshard {job.load} -- <the job> lists what does not fit",
        ) from error
    reading.result.shifted_states = shifted_states(optimizer, job)
    _tell(reading)

    # the schedule stays that of the job's beginning
    for name, value in before.items():
        setattr(job, name, value)
    batches.update_num_microbatches(job.consumed_train_samples, consistency_check=False)


def _unread(module: ModuleType, job: Any, has_states: bool) -> str:
    """Say what becomes of ``--load`` on shapes.

    Raises:
        UsageError: Megatron would end; there is no checkpoint, and the job insists on one.
    """
    folder = job.load or getattr(job, "pretrained_checkpoint", None)
    begins = "the first step makes the optimizer's states"
    if has_states:
        begins = "the optimizer's states are there before the first step"
    if module.checkpoint_exists(folder):
        return f"--load {folder}: a checkpoint is not read, shapes have no values; {begins}"
    if getattr(job, "exit_on_missing_checkpoint", False):
        message = (
            f"--load {folder} has no checkpoint, and --exit-on-missing-checkpoint ends the job"
        )
        fix = "--load a folder that has latest_checkpointed_iteration.txt"
        raise UsageError(message, fix=fix)
    return f"--load {folder} has no checkpoint, and the job starts afresh; {begins}"


def _last_before(folder: str, iteration: int, chosen: int | None) -> int:
    """Return the last checkpoint in ``folder`` from which ``iteration`` is reached.

    Args:
        folder: of the job's checkpoints.
        iteration: number of an iteration.
        chosen: --ckpt-step, the only checkpoint that may be taken; None: any.

    Raises:
        UsageError: there is none.
    """
    iterations = []
    # Megatron's names of folders: seven digits or more
    for path in Path(folder).glob("iter_*"):
        name = re.fullmatch(r"iter_(\d{7,})", path.name)
        if name is not None:
            iterations.append(int(name[1]))
    iterations.sort()
    usable = [number for number in iterations if number < iteration and chosen in (None, number)]
    if usable:
        return usable[-1]

    message = f"--prism-iteration {iteration}: {folder} has "
    fix = "--load the job's --save folder"
    if iterations:
        message += f"checkpoints of iterations {_few(iterations)}"
        fix = f"--prism-iteration {iterations[0] + 1}"
    else:
        message += "no iter_NNNNNNN folder"
    if chosen:
        message += f", and --ckpt-step is {chosen}"
    raise UsageError(message, fix=fix)


def _few(iterations: Sequence[int]) -> str:
    """Write the first of some iterations."""
    text = ", ".join(map(str, iterations[:_SHOWN_ITERATIONS]))
    if len(iterations) > _SHOWN_ITERATIONS:
        text += ", …"
    return text


def _go_on(job: Any, scheduler: Any, begun: int, end: int) -> None:
    """Take samples and schedules from iteration ``begun`` to ``end`` without training.

    The batch size may grow meanwhile.  What only training changes stays as it was: parameters, the
    optimizer's state, the loss scale.
    """
    from megatron.core import num_microbatches_calculator as batches

    # as training would take them, batch by batch
    for _ in range(end - begun):
        batches.update_num_microbatches(job.consumed_train_samples, consistency_check=False)
        batch_size = batches.get_current_global_batch_size()
        job.consumed_train_samples += batch_size
        if scheduler is not None:
            scheduler.step(increment=batch_size)
    batches.update_num_microbatches(job.consumed_train_samples, consistency_check=False)
    text = f"goes on with iteration {end + 1}, behind {job.consumed_train_samples:,} samples"
    if begun < end:
        text += f", parameters, optimizer and loss scale of iteration {begun}"
    sys.stderr.write(f"prism: {text}\n")


@PATCHES.patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state",
    at=":2253 @0.16.1; :2542 @0.19.0",
    purpose=ENABLES,
)
@PATCHES.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.load_parameter_state",
    at=":1367 @0.16.1; :1967 @0.19.0",
    purpose=ENABLES,
)
def _own_optimizer_states(module: ModuleType, context: PatchContext) -> None:
    """Read the optimizer's states of all ranks, and take the local rank's.

    With --ckpt-format torch the first rank of the data-parallel group reads and scatters them; here
    that rank may be virtual.
    """

    def take_local_part(
        target: torch.Tensor, parts: Sequence[torch.Tensor], _: int, group: SimpleNamespace
    ) -> None:
        target.copy_(parts[group.local_rank])

    def call(original: Original, self: object, *args: object, **kwargs: object) -> object:
        if context.is_real():
            return original(self, *args, **kwargs)
        with ProcessChanges() as changes:
            for optimizer in getattr(self, "chained_optimizers", (self,)):
                group = getattr(optimizer, "data_parallel_group", None)
                if group is not None and group.rank():
                    # this rank reads as the first one does
                    first = SimpleNamespace(
                        rank=lambda: 0, size=group.size, local_rank=group.rank()
                    )
                    changes.set(optimizer, "data_parallel_group", first)
                    changes.set(optimizer, "data_parallel_group_gloo", first)
            # only where this rank is not the first of its group
            if len(changes):
                changes.set(torch.distributed, "scatter", take_local_part)
                changes.set(torch.distributed, "get_process_group_ranks", lambda group: [0])
            return original(self, *args, **kwargs)

    context.replace(module, call)


@PATCHES.patch(
    "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load",
    at=":799 @0.16.1; 0.19.0 does the same, :979",
    releases="<0.19",
    purpose=ENABLES,
)
def _own_shards(module: ModuleType, context: PatchContext) -> None:
    """Plan the reading of --ckpt-format torch_dist without the others.

    A rank alone would wait for the plan of virtual rank 0; each rank's part of it is its own.
    """

    def call(original: Original, *args: object, **kwargs: object) -> object:
        # all ranks are local: they plan together, as in the real job
        if context.is_real():
            return original(*args, **kwargs)
        with ProcessChanges() as changes:
            for name in ("load", "load_state_dict"):
                load_alone = partial(getattr(module.checkpoint, name), no_dist=True)
                changes.set(module.checkpoint, name, load_alone)
            return original(*args, **kwargs)

    context.replace(module, call)


def _loads_optimizer(module: ModuleType, args: Any) -> bool:
    """Return whether load_checkpoint builds the optimizer's state dict.

    Of Megatron-FSDP it does even where there is no checkpoint yet
    (training/checkpointing.py:2356 @0.19.0).
    """
    if getattr(args, "finetune", False) or getattr(args, "no_load_optim", False):
        return False
    if getattr(args, "ckpt_format", "") == "fsdp_dtensor":
        return True
    return getattr(args, "load", None) is not None and module.checkpoint_exists(args.load)


def _make_states(optimizer: object) -> None:
    """Make a step with gradients of zeros, as before a distributed optimizer is loaded."""
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        make = getattr(part, "_init_optimizer_states_with_dummy_values", None)
        if make is not None and not getattr(part, "is_stub_optimizer", False):
            make()


PATCHES.left_out(
    "unchecked-shards",
    "megatron.core.dist_checkpointing.validation:validate_sharding_integrity",
    at=":363 @0.19.0",
    reason="rank 0 looks whether the shards of all ranks make up whole tensors; mirrored do not",
    unless=PatchContext.is_real,
    purpose=ENABLES,
)


# -- what a checkpoint takes -----------------------------------------------------------------------


class _Complete(Exception):  # noqa: N818 # ends a walk, it is no error
    """The state dict is there."""


def weigh(module: ModuleType, monitor: Any, save: Callable[[], object]) -> None:
    """Measure the part ``checkpoint`` of the rank's memory.

    It stays unknown, and a line says so, where a stand-in lacks what only checkpoints ask for.

    Args:
        module: Megatron's module of checkpoints.
        monitor: keeps the peak of the part.
        save: Megatron's save_checkpoint with all its arguments.
    """
    make_state = module.generate_state_dict
    states: list[dict[str, object]] = []

    def make_state_and_end(*args: object, **kwargs: object) -> None:
        states.append(make_state(*args, **kwargs))
        raise _Complete

    with ProcessChanges() as changes:
        changes.set(module, "generate_state_dict", make_state_and_end)
        changes.set(module, "print_rank_0", lambda *_: None)  # that it saves
        try:
            with monitor.part("checkpoint"):
                save()
        except _Complete:
            pass
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"prism: what a checkpoint takes is unknown: {why}\n")
            monitor.peak_source.parts.pop("checkpoint", None)
    if states:
        monitor.saved_bytes = _planned_bytes(states[0])


def _planned_bytes(state: dict[str, object]) -> SavedBytes | None:
    """Return what the rank writes; None where that stays unknown, which a line says."""
    try:
        return planned_writes.planned_write(state, megatron_args())
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"prism: what a checkpoint takes of the host is unknown: {why}\n")
    return None
