"""Patches of the training loop, optimizers, FSDP, and vocabulary-parallel layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import PrismError, UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.patch import (
    META,
    NO_CUDA,
    PROTECTS,
    SPEEDS_UP,
    VALUES,
    Original,
    PatchContext,
    Patches,
    refused,
)
from megatron_prism.emulate.patches.startup import megatron_args
from megatron_prism.runtime.values import LocalVocabularySum, PartialLookup
from megatron_prism.runtime.virtual_world import current, values_of

PATCHES = Patches()


@PATCHES.instead(
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    at=":490 @0.16.1; :686 @0.19.0",
)
def _token_count(
    context: PatchContext,
    original: Original,
    model: Any,
    num_tokens: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The last stage counts the tokens; for a virtual one they are what the flags say. Without it
    gradients of the other stages are never scaled.
    """
    # the last stage is virtual: nobody has counted
    if num_tokens is not None and not context.meta and not int(num_tokens):
        num_tokens = num_tokens + context.monitor.tokens_per_iteration()
    return original(model, num_tokens, *args, **kwargs)


@PATCHES.instead(
    "megatron.core.models.common.language_module.language_module",
    "LanguageModule.setup_embeddings_and_output_layer",
    at=":245 @0.16.1",
)
def _tied_embedding(context: PatchContext, original: Original, self: Any) -> None:
    """First and last stage add their embeddings (weights + zeros); mirrored, both come out wrong:
    the first keeps its weights, the last one draws weights of the same distribution.
    """
    group = getattr(self, "embd_group", None)
    # several local ranks add real embeddings, which come out right
    alone = group is not None and values_of(group) is not None and group.real is None
    tied = self.share_embeddings_and_output_weights or getattr(self.config, "mtp_num_layers", None)
    before = None
    if alone and tied and self.pre_process:
        before = self.shared_embedding_or_output_weight().detach().clone()
    original(self)
    if not (alone and tied) or context.meta:
        return
    weight = self.shared_embedding_or_output_weight()
    if before is not None:
        with torch._C.DisableTorchFunction():  # it is as if nobody had written to it
            weight.data.copy_(before)
    # the last stage: zeros that wait for the first stage's weights
    elif getattr(weight, "shared", False):
        world = current()
        assert world is not None
        generator = world.values.generator(weight.device)
        weight.data.normal_(0.0, self.config.init_method_std, generator=generator)


# -- monitor --------------------------------------------------------------------------------------


def _label_optimizer(optimizer: Any, monitor: Any) -> None:
    """What runs in ``optimizer.step`` has the phase ``optimizer``."""
    if optimizer is None or "step" in vars(optimizer):
        return
    original = optimizer.step

    def step(*args: object, **kwargs: object) -> Any:
        with monitor.phase("optimizer"), monitor.part("optimizer step"):
            return original(*args, **kwargs)

    optimizer.step = step


def _followed_by_more(args: Any) -> bool:
    """Whether an evaluation or a checkpoint comes before the next train step (training.py:2914
    @0.16.1; :4005 @0.19.0): their timers, barriers and gathers are of such iterations alone.
    """
    # Megatron asks after the step, when it has counted it
    number = getattr(args, "curr_iteration", 0) + 1
    intervals = [
        args.eval_interval if getattr(args, "do_valid", False) else None,
        getattr(args, "save_interval", None),
    ]
    return any(interval and number % interval == 0 for interval in intervals)


@PATCHES.patch(
    "megatron.training.training:train_step",
    "dummy_train_step",
    "evaluate",
    "disable_forward_pre_hook",
    "save_checkpoint_and_time",
    "pretrain",
    at=":1603, :2754 @0.16.1; :2336, :3800 @0.19.0",
    purpose=PROTECTS,
)
def _monitor(module: ModuleType, context: PatchContext) -> None:
    """Count the optimizer steps that really happen: a run without any must not exit 0."""
    monitor = context.monitor

    def outside_step(begun: bool = True) -> None:
        """What comes now leaves gathered parameters behind where gathers overlap."""
        monitor.outside_step(bool(getattr(megatron_args(), "overlap_param_gather", False)), begun)

    def step(original: Original, *args: object, **kwargs: object) -> Any:
        # train_step(forward_step, data, model, optimizer, …)
        optimizer = kwargs.get("optimizer", args[3] if len(args) > 3 else None)
        _label_optimizer(optimizer, monitor)
        wanted = monitor.steps_to_make(megatron_args())
        # a job that continues from a checkpoint counts its steps from there
        if not monitor.iterations and (before := getattr(megatron_args(), "curr_iteration", 0)):
            monitor.resumed(before)
        model = args[2] if len(args) > 2 else None
        which = "steady iteration" if monitor.iterations else "first iteration"
        with monitor.iteration(optimizer, model, wanted), monitor.part(which):
            result = original(*args, **kwargs)
            monitor.stepped(losses=result[0], skipped=bool(result[1]), grad_norm=result[5])
        if _followed_by_more(megatron_args()):
            outside_step(begun=False)
        return result

    def whole(original: Original, *args: object, **kwargs: object) -> Any:
        with monitor.training(megatron_args):
            return original(*args, **kwargs)

    def evaluate(original: Original, *args: object, **kwargs: object) -> Any:
        outside_step()
        with monitor.part("evaluation"):
            return original(*args, **kwargs)

    def skip(original: Original, *args: object, **kwargs: object) -> Any:
        result = original(*args, **kwargs)
        monitor.skipped += 1
        return result

    def gathers(original: Original, *args: object, **kwargs: object) -> Any:
        outside_step()
        return original(*args, **kwargs)

    context.replace(module, step, "train_step")
    context.replace(module, skip, "dummy_train_step")  # once per iteration of --iterations-to-skip
    context.replace(module, evaluate, "evaluate")
    # before evaluations and checkpoints
    context.replace(module, gathers, "disable_forward_pre_hook", "save_checkpoint_and_time")
    context.replace(module, whole, "pretrain")


@PATCHES.instead(
    "megatron.training.initialize:initialize_megatron",
    at=":41 @0.16.1; :42 @0.19.0",
    purpose=SPEEDS_UP,
)
def _start(context: PatchContext, original: Original, *args: object, **kwargs: object) -> object:
    """Keep the memory peak of the process's start apart: fused kernels are warmed up in it."""
    with context.monitor.part("start"):
        return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.training.training:setup_model_and_optimizer",
    at=":1438 @0.16.1; :2017 @0.19.0",
    purpose=SPEEDS_UP,
)
def _model(context: PatchContext, original: Original, *args: object, **kwargs: object) -> object:
    """Keep the memory peak of building the model apart."""
    with context.monitor.model_part():
        return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.core.optimizer:get_megatron_optimizer",
    at="core/optimizer/__init__.py:505 @0.16.1; :988 @0.19.0",
    purpose=SPEEDS_UP,
)
def _optimizer(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> object:
    """Keep the memory peak of building the optimizer apart: the model is there by then."""
    context.monitor.model_built()
    with context.monitor.part("optimizer"):
        return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.training.inprocess_restart:maybe_wrap_for_inprocess_restart", at=":131 @0.19.0"
)
def _no_restarts(context: PatchContext, original: Original, *args: object, **kwargs: object) -> Any:
    """In-process restart waits at a store of its own until every rank of the job has come."""
    if any(word.partition("=")[0] == "--inprocess-restart" for word in sys.argv):
        message = "--inprocess-restart restarts processes, and virtual ranks have none"
        raise UnsupportedError(message, fix="leave it out")
    return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor:validate_uneven_dtensor",
    at=":142 @0.19.0",
)
def _unchecked_pieces(context: PatchContext, original: Original, dtensor: object) -> None:
    """Ranks tell each other how large their pieces of a parameter are; mirrored ones say our size,
    and such pieces do not add up.
    """
    if context.is_real():
        original(dtensor)


@PATCHES.instead(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
    "DataParallelBuffer.init_data",
    at=":1281 @0.19.0",
)
def _filled_shards(
    context: PatchContext, original: Original, self: object, data: torch.Tensor
) -> object:
    """The last shard of a bucket ends in padding that no rank reads; a virtual rank's copy of it
    has it where parameters are, so it must be numbers (--deterministic-mode fills it with NaN).
    """
    if not context.is_real():
        data.zero_()
    return original(self, data)


@PATCHES.instead(
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:_load_rng_state_dict", at=":483 @0.19.0"
)
def _own_random_state(context: PatchContext, original: Original, state: object) -> None:
    """Ranks take over the random state of their group's first; a virtual one sends none."""
    if state is not None:
        original(state)


@PATCHES.instead(
    "megatron.core.transformer.spec_utils:build_module",
    at=":119 @0.16.1; :127 @0.19.0",
    purpose=SPEEDS_UP,
)
def _own_words(context: PatchContext, original: Original, *args: object, **kwargs: object) -> Any:
    """A refusal ends with what to type; this adds "when instantiating …" to each exception."""
    try:
        return original(*args, **kwargs)
    except PrismError as error:
        first = error
        # builders nest, and each has wrapped the exception of the one inside
        while isinstance(first.__context__, PrismError):
            first = first.__context__
    raise first from None  # out here: else the copy would become its context


def labels_of_locals(
    labels: torch.Tensor, owners: list[int], rows: int, sequence: bool
) -> torch.Tensor:
    """``labels`` [b, s] as a network has them whose virtual members are ``owners``' mirrors.

    owners   : for each member of the group the local member that it is or mirrors
    rows     : of the vocabulary that one member holds; padding (no label of any member) becomes a
               label, which Megatron's loss mask leaves out as before
    sequence : whether members hold stretches of the sequence: mirrored ones come with their labels

    Two kernels if one member is local, and no copy from the host, which would wait for the device.
    """
    if sequence and labels.shape[-1] % len(owners) == 0:
        # each member has a stretch of the sequence; a mirror repeats that of its owner
        stretches = labels.chunk(len(owners), -1)
        labels = torch.cat([stretches[owner] for owner in owners], -1)
    # a label of a virtual member's vocabulary: the same place in that of its owner
    places = labels.remainder(rows)
    mapped = places + rows * owners[0]
    for member, owner in enumerate(owners):
        if owner != owners[0]:
            its = (labels >= rows * member) & (labels < rows * (member + 1))
            mapped = torch.where(its, places + rows * owner, mapped)
    return mapped


@PATCHES.instead(
    "megatron.core.models.common.language_module.language_module",
    "LanguageModule.compute_language_model_loss",
    at=":128 @0.16.1; :155 @0.19.0",
    tiers=VALUES,
)
def _mirrored_labels(
    context: PatchContext, original: Original, self: Any, labels: torch.Tensor, logits: torch.Tensor
) -> Any:
    """Labels of virtual ranks' vocabulary teach nothing, those of mirrored tokens contradict: the
    network that mirrors make up is trained on labels that it can learn.
    """
    values = values_of(self.tp_group)
    # a real group has all labels
    if values is None:
        return original(self, labels, logits)
    owners, sequence = self.tp_group.owners(), bool(self.config.sequence_parallel)
    labels = labels_of_locals(labels, owners, logits.shape[-1], sequence)
    with values.of_parts(LocalVocabularySum()):
        return original(self, labels, logits)


def _rows(embedding: Any, tokens: torch.Tensor) -> PartialLookup | None:
    """What the embedding's sum over tp is complete with; None if nothing is missing or known.

    A weight that is not this rank's whole partition (DTensor, 0.19's gtp_remat) is not known here.
    """
    weight = embedding.weight
    if type(weight) is not torch.nn.Parameter or getattr(embedding, "gtp_remat_size", 1) > 1:
        return None
    if weight.shape[0] != embedding.num_embeddings_per_partition:
        return None
    # [b, s] is looked up, and [s, b, h] reduced and scattered
    order = tokens.transpose(0, 1) if embedding.reduce_scatter_embeddings else tokens
    return PartialLookup(weight, order)


@PATCHES.instead(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    at=":289 @0.16.1; :359 @0.19.0",
    tiers=VALUES,
)
def _whole_lookup(
    context: PatchContext, original: Original, self: Any, input_: torch.Tensor
) -> Any:
    """Tokens of virtual ranks' vocabulary would be zeros, whose gradients explode. Only data of the
    call's answer changes: gradients go where the local mask lets them.
    """
    values = values_of(self.tp_group)
    rows = _rows(self, input_) if values is not None else None
    # a real group, or a table that is not known
    if values is None or rows is None:
        return original(self, input_)
    with values.of_parts(rows):
        return original(self, input_)


@PATCHES.patch(
    "megatron.core.distributed.torch_fully_sharded_data_parallel",
    "TorchFullyShardedDataParallel.__init__",
    at=":45 @0.19.0",
    tiers=NO_CUDA,
)
def _fsdp2(module: ModuleType, context: PatchContext) -> None:
    """torch's FSDP2 wants its parameters on a CUDA device: it refuses meta, for somebody may have
    forgotten to initialise them; on tier meta they are what they will ever be.
    """
    if not context.meta:
        what = "--use-torch-fsdp2 shards parameters on a CUDA device"
        context.replace(module, refused(what, "leave it out, or --prism-tier meta or cuda"))
        return
    from torch.distributed.fsdp import _fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    group = _fsdp_param_group.FSDPParamGroup
    context.changes.set(group, "_validate_no_meta_params", lambda self: None)
    for part in vars(_fully_shard).values():  # modules that ask for the streams of a device's type
        if hasattr(part, "_get_device_handle"):
            context.changes.set(part, "_get_device_handle", lambda device_type: torch.cuda)


@PATCHES.patch(
    "megatron.core.optimizer.optimizer",
    "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
    at=":496 @0.16.1; :713 @0.19.0",
    tiers=META,
)
def _always_finite(module: ModuleType, context: PatchContext) -> None:
    """Shapes have no infinities: the check reads a number that is not there."""
    context.replace(module, lambda original, self: False)


@PATCHES.patch(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
    "ParamAndGradBuffer.__init__",
    at=":2880 @0.19.0",
    tiers=META,
)
def _materialised(module: ModuleType, context: PatchContext) -> None:
    """Megatron-FSDP initialises parameters on meta, or fails; on tier meta they are what they will
    ever be.
    """
    is_meta: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
    package = module.__name__.rpartition(".")[0]

    def is_meta_to_others(tensor: torch.Tensor) -> bool:
        by_fsdp = sys._getframe(1).f_globals.get("__name__", "").startswith(package)
        return not by_fsdp and is_meta(tensor)

    def call(original: Original, *args: object, **kwargs: object) -> object:
        # one of the arguments is the configuration, by position or by name
        if any(getattr(one, "fp8_param_gather", False) for one in (*args, *kwargs.values())):
            message = "Megatron-FSDP reaches into FP8 parameters, and virtual ones have no data"
            raise UnsupportedError(
                message, fix="leave --fp8-param-gather out, or --prism-tier cuda"
            )
        with ProcessChanges() as changes:
            changes.set(torch.Tensor, "is_meta", property(is_meta_to_others))
            return original(*args, **kwargs)

    context.replace(module, call)
