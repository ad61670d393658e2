"""Patches that keep an emulated job from writing to the real job's places.

A copied command line names the folders of the real job's curves and traces; an emulated job has no
business there, on whatever tier and however many of its ranks are local.  Only the real job
itself, of which ``--prism-record`` makes a recording, writes.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from megatron_prism.emulate.patch import ENABLES, PROTECTS, Original, PatchContext, Patches
from megatron_prism.emulate.patches.startup import megatron_args

PATCHES = Patches(purpose=PROTECTS)
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
        # this run is the real job
        if context.writes(args.world_size):
            return original(args)
        # the job has asked for it
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
    # traces are asked for, and would be among the real job's
    asked = settings.profile and settings.use_pytorch_profiler
    if asked and not context.writes():
        settings.profile = context.profiles is not None
        if context.profiles is not None:
            settings.tensorboard_dir = str(context.profiles / "tensorboard")
            context.say(f"--use-pytorch-profiler writes to {context.profiles}")
        else:
            context.say(
                "--use-pytorch-profiler is off: it would write among the real job's traces"
                "\n  fix: --prism-out DIR, beside which it writes then"
            )
    return original(*args, **kwargs)
