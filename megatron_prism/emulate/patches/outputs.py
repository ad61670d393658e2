"""Patches that keep an emulated job from writing to, or reading from, the real job's places.

A copied command line names the folders of the real job's checkpoints and curves; an emulated job
has no business there, on whatever tier and however many of its ranks are local.  Only the real job
itself, of which ``--prism-record`` makes a recording, writes.
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

from megatron_prism.core.errors import UsageError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.patch import ENABLES, PROTECTS, Original, PatchContext, Patches
from megatron_prism.emulate.patches.startup import megatron_args

PATCHES = Patches(purpose=PROTECTS)
_NO_CHECKPOINTS = (
    "checkpoints are not written: --save names the real job's folder\n"
    "  fix: --prism-record DIR, if this run is the real job and all its ranks are local"
)


@PATCHES.patch("megatron.training.checkpointing:save_checkpoint", at=":471 @0.16.1; :552 @0.19.0")
def _no_checkpoints(module: ModuleType, context: PatchContext) -> None:
    """``--save`` names the real job's folder, and virtual ranks have no shards to put there: rank
    0, which looks for the shards of all ranks, would also fail.
    """

    def call(original: Original, iteration: Any, *args: object, **kwargs: object) -> Any:
        gathered = bool(getattr(megatron_args(), "overlap_param_gather", False))
        context.monitor.outside_step(gathered, begun=True)
        if context.writes():
            with context.monitor.part("checkpoint"):
                return original(iteration, *args, **kwargs)
        context.say(_NO_CHECKPOINTS)
        watched = context.monitor.hears_calls
        if context.meta and not watched and megatron_args().ckpt_format == "torch_dist":
            weigh(module, context.monitor, partial(original, iteration, *args, **kwargs))
        return None

    context.replace(module, call)


@PATCHES.patch("megatron.core.dist_checkpointing.serialization:save", "load", at=":349 @0.19.0")
def _no_own_checkpoints(module: ModuleType, context: PatchContext) -> None:
    """A program that calls megatron.core itself would write among the real job's shards. What it
    has not saved, or shapes could not hold, it "loads" as the model has it.
    """
    unsaved: set[str] = set()

    def arguments_if_emulated(
        original: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> dict[str, Any] | None:
        if context.monitor.loop is None or context.writes():
            return None
        return inspect.signature(original).bind(*args, **kwargs).arguments

    def save(original: Original, *args: object, **kwargs: object) -> object:
        asked = arguments_if_emulated(original, args, kwargs)
        if asked is None:
            return original(*args, **kwargs)
        context.monitor.outside_step(gathered=False, begun=True)
        context.say(_NO_CHECKPOINTS)
        unsaved.add(str(asked["checkpoint_dir"]))
        return module.AsyncRequest(None, (), []) if asked.get("async_sharded_save") else None

    def load(original: Original, *args: object, **kwargs: object) -> object:
        asked = arguments_if_emulated(original, args, kwargs)
        if asked is None or not (context.meta or str(asked["checkpoint_dir"]) in unsaved):
            return original(*args, **kwargs)
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

        held = dict_list_map_outplace(
            lambda one: getattr(one, "data", getattr(one, "obj", one)), asked["sharded_state_dict"]
        )
        returns = "return" in str(asked.get("strict", "")).lower()
        return (held, set(), set()) if returns else held

    context.replace(module, save, "save")
    context.replace(module, load, "load")


PATCHES.left_out(
    "no-gradients",
    "megatron.training.checkpointing:save_grads",
    at=":437 @0.16.1; :516 @0.19.0",
    reason="--save-wgrads-interval and --save-dgrads-interval write to folders in --save",
    unless=PatchContext.writes,
    said="gradients are not written: --save names the real job's folder",
)


@PATCHES.patch(
    "megatron.training.checkpointing:load_checkpoint",
    at=":1479 @0.16.1; :2066 @0.19.0",
    purpose=ENABLES,
)
def _read_checkpoint(module: ModuleType, context: PatchContext) -> None:
    """Begin where the wanted iteration does; read what a rank alone can.

    On shapes there is no value to read: which iteration a checkpoint is of comes back through a
    device tensor, and so does the rest.  Ranks that share the reading (--ckpt-fully-parallel-load)
    would get the others' part from virtual ones.
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
        wanted = context.iterations if kwargs.get("load_arg", "load") == "load" else None
        if not context.is_real():
            job.ckpt_fully_parallel_load = False
        if wanted is not None:
            if not context.meta:
                job.ckpt_step = _last_before(job.load, wanted[0], job.ckpt_step)
            job.exit_interval = wanted[1]  # a multiple of it: training ends there
        if context.meta:
            makes = _loads_optimizer(module, job)
            for part in (getattr(optimizer, "chained_optimizers", None) or [optimizer]) * makes:
                _make_states(part)
            context.say(_unread(module, job, makes))
            begun, operations = 0, 0
        else:
            begun, operations = original(model, optimizer, scheduler, *args, **kwargs)
        if wanted is not None:
            _go_on(job, scheduler, begun, wanted[0] - 1)
            begun = wanted[0] - 1
        return begun, operations

    context.replace(module, call)


def _unread(module: ModuleType, job: Any, makes: bool) -> str:
    """What becomes of ``--load`` on shapes.

    Raises UsageError where Megatron would end: there is no checkpoint, and the job insists on one.
    """
    folder = job.load or getattr(job, "pretrained_checkpoint", None)
    begins = (
        "the optimizer's states are there before the first step"
        if makes
        else "the first step makes the optimizer's states"
    )
    if module.checkpoint_exists(folder):
        return f"--load {folder}: a checkpoint is not read, shapes have no values; {begins}"
    if getattr(job, "exit_on_missing_checkpoint", False):
        what = f"--load {folder} has no checkpoint, and --exit-on-missing-checkpoint ends the job"
        raise UsageError(what, fix="--load a folder that has latest_checkpointed_iteration.txt")
    return f"--load {folder} has no checkpoint, and the job starts afresh; {begins}"


def _last_before(folder: str, iteration: int, chosen: int | None) -> int:
    """The last checkpoint in ``folder`` (``chosen``, if given) from which ``iteration`` is reached.

    Raises UsageError if there is none.
    """
    names = [re.fullmatch(r"iter_(\d{7,})", one.name) for one in Path(folder).glob("iter_*")]
    there = sorted(int(name[1]) for name in names if name)
    fit = [n for n in there if n < iteration and chosen in (None, n)]
    if not fit:
        shown = ", ".join(map(str, there[:8])) + ", …" * (len(there) > 8)
        raise UsageError(
            f"--prism-iteration {iteration}: {folder} has "
            + (f"checkpoints of iterations {shown}" if there else "no iter_NNNNNNN folder")
            + (f", and --ckpt-step is {chosen}" if chosen else ""),
            fix=f"--prism-iteration {there[0] + 1}" if there else "--load the job's --save folder",
        )
    return fit[-1]


def _go_on(job: Any, scheduler: Any, begun: int, end: int) -> None:
    """Take samples and schedules from iteration ``begun`` to ``end`` without training.

    The batch size may grow meanwhile.  What only training changes stays as it was: parameters, the
    optimizer's state, the loss scale.
    """
    from megatron.core import num_microbatches_calculator as batches

    for _ in range(end - begun):
        batches.update_num_microbatches(job.consumed_train_samples, consistency_check=False)
        size = batches.get_current_global_batch_size()
        job.consumed_train_samples += size
        if scheduler is not None:
            scheduler.step(increment=size)
    batches.update_num_microbatches(job.consumed_train_samples, consistency_check=False)
    behind = f", parameters, optimizer and loss scale of iteration {begun}" * (begun < end)
    sys.stderr.write(
        f"prism: goes on with iteration {end + 1}, behind {job.consumed_train_samples:,} samples"
        f"{behind}\n"
    )


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
    """Read the optimizer's states of all, and take the local rank's, where the first rank of the
    data-parallel group is virtual: it would read and scatter them (--ckpt-format torch).
    """

    def take(
        own: torch.Tensor, parts: Sequence[torch.Tensor], _: int, group: SimpleNamespace
    ) -> None:
        own.copy_(parts[group.mine])

    def call(original: Original, self: object, *args: object, **kwargs: object) -> object:
        with ProcessChanges() as changes:
            for one in () if context.is_real() else getattr(self, "chained_optimizers", (self,)):
                group = getattr(one, "data_parallel_group", None)
                if group is not None and group.rank():
                    first = SimpleNamespace(rank=lambda: 0, size=group.size, mine=group.rank())
                    changes.set(one, "data_parallel_group", first)
                    changes.set(one, "data_parallel_group_gloo", first)
            if len(changes):
                changes.set(torch.distributed, "scatter", take)
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
    """A rank alone waited for the plan of virtual rank 0 (--ckpt-format torch_dist): plan without
    the others, each rank's part of the plan is its own.
    """

    def call(original: Original, *args: object, **kwargs: object) -> object:
        with ProcessChanges() as changes:
            for name in () if context.is_real() else ("load", "load_state_dict"):
                alone = partial(getattr(module.checkpoint, name), no_dist=True)
                changes.set(module.checkpoint, name, alone)
            return original(*args, **kwargs)

    context.replace(module, call)


def _loads_optimizer(module: ModuleType, args: Any) -> bool:
    """Whether load_checkpoint builds the optimizer's state dict: of Megatron-FSDP even where there
    is no checkpoint yet (training/checkpointing.py:2356 @0.19.0).
    """
    if getattr(args, "finetune", False) or getattr(args, "no_load_optim", False):
        return False
    if getattr(args, "ckpt_format", "") == "fsdp_dtensor":
        return True
    return getattr(args, "load", None) is not None and module.checkpoint_exists(args.load)


def _make_states(optimizer: Any) -> None:
    """A step with gradients of zeros, as before a distributed optimizer is loaded."""
    make = getattr(optimizer, "_init_optimizer_states_with_dummy_values", None)
    if make is not None and not getattr(optimizer, "is_stub_optimizer", False):
        make()


PATCHES.left_out(
    "unchecked-shards",
    "megatron.core.dist_checkpointing.validation:validate_sharding_integrity",
    at=":363 @0.19.0",
    reason="rank 0 looks whether the shards of all ranks make up whole tensors; mirrored do not",
    unless=PatchContext.is_real,
    purpose=ENABLES,
)


# who would write -> the option that asks for it
_WRITERS = {
    "_set_tensorboard_writer": "tensorboard_dir",
    "_set_wandb_writer": "wandb_project",
    "_set_one_logger": "",  # on by default, silent where it is not installed
}


@PATCHES.patch(
    "megatron.training.global_vars:_set_tensorboard_writer",
    "_set_wandb_writer",
    "_set_one_logger",
    at=":170 @0.16.1; :210 @0.19.0",
)
def _no_writers(module: ModuleType, context: PatchContext) -> None:
    """An emulated last rank would write its losses among the real job's; Megatron lives without
    writers on all other ranks.
    """

    def call(option: str, original: Original, args: Any) -> Any:
        if context.writes(args.world_size):
            return original(args)
        if option and getattr(args, option, None):
            why = "TensorBoard, W&B and progress.txt are the real job's"
            context.say(f"{why}: nothing of an emulated job is written there")
        return None

    for name, option in _WRITERS.items():
        context.replace(module, partial(call, option), name)


# where else it writes, under its rank's name or one for all -> the flag
_OTHERS = {
    "moe_routing_trace_path": "--moe-routing-trace-path",
    "logits_save_dir": "--logits-save-dir",
    "dump_param_to_param_group_map": "--dump-param-to-param-group-map",
    "record_memory_history": "--record-memory-history",  # writes --memory-snapshot-path
    "ckpt_pg_tensors_cache_path": "--ckpt-pg-tensors-cache-path",  # 0.20
}


@PATCHES.instead(
    "megatron.training.global_vars:set_global_variables",
    at="training/training.py:3566, :2092, :2137 @0.19.0",
)
def _no_others(
    context: PatchContext, original: Original, args: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Routing, logits, parameter groups, snapshots: they begin by emptying the real job's file of
    that rank, or end by replacing it.
    """
    asked = [name for name in _OTHERS if getattr(args, name, None)]
    if asked and not context.writes(args.world_size):
        for name in asked:
            setattr(args, name, None)
        flags = ", ".join(_OTHERS[name] for name in asked)
        context.say(f"{flags} is off: it would write among the real job's files")
    return original(args, *rest, **kwargs)


PATCHES.left_out(
    "no-sniffing",
    "megatron.training.gpu_sniff_test:run_gpu_sniff_test",
    at=":144 @0.19.0",
    reason="--gpu-sniff-test-interval measures GPUs and links; virtual ranks have neither",
    unless=PatchContext.is_real,
    said="--gpu-sniff-test-interval measures nothing: virtual ranks have no GPUs",
    releases=">=0.19",
    purpose=ENABLES,
)


@PATCHES.instead(
    "megatron.training.utils:append_to_progress_log", at=":451 @0.16.1", releases="<0.19"
)
@PATCHES.instead(
    "megatron.training.utils.log_utils:append_to_progress_log", at=":114 @0.19.0", releases=">=0.19"
)
def _no_progress(
    context: PatchContext, original: Original, *args: Any, barrier: bool = True, **kwargs: Any
) -> Any:
    """Rank 0 appends to a file in ``--save`` (--log-progress); its barrier stays."""
    if context.writes():
        return original(*args, barrier=barrier, **kwargs)
    if barrier:
        torch.distributed.barrier()
    return None


PATCHES.left_out(
    "no-throughputs",
    "megatron.training.training:compute_throughputs_and_append_to_progress_log",
    at=":2114 @0.16.1; :2954 @0.19.0",
    reason="at a checkpoint it reads the progress file, which a virtual rank 0 has not begun",
    unless=PatchContext.writes,
    purpose=ENABLES,
)


@PATCHES.instead("megatron.training.training:train", at=":2638 @0.16.1; :3668 @0.19.0")
def _no_traces(context: PatchContext, original: Original, *args: object, **kwargs: object) -> Any:
    """``--use-pytorch-profiler`` writes to ``--tensorboard-dir`` (0.16) or beside it (0.19) under
    this rank's name: that is now beside --prism-out. Without that ``--profile`` is off, too:
    without a profiler it would start the one of CUDA.
    """
    settings = megatron_args()
    asked = settings.profile and settings.use_pytorch_profiler
    if asked and not context.writes():
        settings.profile = context.profiles is not None
        if context.profiles is not None:
            settings.tensorboard_dir = str(context.profiles / "tensorboard")
            context.say(f"--use-pytorch-profiler writes to {context.profiles}")
        else:
            context.say("--use-pytorch-profiler is off: it would write among the real job's traces"
                        "\n  fix: --prism-out DIR, beside which it writes then")  # fmt: skip
    return original(*args, **kwargs)


class _Complete(Exception):  # noqa: N818 # ends a walk, it is no error
    """The state dict is there."""


def weigh(module: ModuleType, monitor: Any, save: Callable[[], object]) -> None:
    """The part ``checkpoint`` of the rank's memory; ``save`` is Megatron's save_checkpoint with all
    its arguments, ``module`` its module.  Stays unknown, and says so, where a stand-in lacks what
    only checkpoints ask for.
    """
    complete = module.generate_state_dict

    def generate(*args: object, **kwargs: object) -> None:
        complete(*args, **kwargs)
        raise _Complete

    with ProcessChanges() as changes:
        changes.set(module, "generate_state_dict", generate)
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
