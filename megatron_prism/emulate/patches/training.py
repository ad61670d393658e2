"""Patches of Megatron's training loop, gradient finalisation, and vocabulary-parallel layers.

Same form as ``startup``: each answers what only an absent rank could answer, or watches what
happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import PrismError, UnsupportedError
from megatron_prism.emulate.patch import PROTECTS, SPEEDS_UP, Patch, PatchContext
from megatron_prism.emulate.patches.startup import _get_args
from megatron_prism.runtime.process_group import PrismGroup
from megatron_prism.runtime.values import LocalVocabularySum, PartialLookup
from megatron_prism.runtime.world import current, values_of

__all__ = [
    "PATCHES",
]


def _token_count(module: ModuleType, context: PatchContext) -> None:
    """The last stage counts the tokens; for a virtual one they are what the flags say.

    Without it gradients of the other stages are never scaled (finalize_model_grads.py:490 @0.16.1).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            if num_tokens is not None and not context.meta and not int(num_tokens):
                num_tokens = num_tokens + context.monitor.tokens_per_iteration()
            return original(model, num_tokens, *args, **kwargs)

        return call

    context.replace(module, "finalize_model_grads", make)


def _tied_embedding(module: ModuleType, context: PatchContext) -> None:
    """First and last stage add their embeddings (weights + zeros); mirrored, both come out wrong.

    The first stage keeps its weights, the last one draws weights of the same distribution
    (language_module.py:245 @0.16.1, :308 @0.19.0).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any) -> None:
            group = getattr(self, "embd_group", None)
            alone = isinstance(group, PrismGroup) and group.real is None and group.size() > 1
            tied = self.share_embeddings_and_output_weights or getattr(
                self.config, "mtp_num_layers", None
            )
            before = None
            if alone and tied and self.pre_process:
                before = self.shared_embedding_or_output_weight().detach().clone()
            original(self)
            if not (alone and tied) or context.meta:
                return
            weight = self.shared_embedding_or_output_weight()
            if before is not None:
                weight.data.copy_(before)
            elif getattr(weight, "shared", False):
                world = current()
                assert world is not None
                generator = world.values.generator(weight.device)
                weight.data.normal_(0.0, self.config.init_method_std, generator=generator)

        return call

    context.replace(module.LanguageModule, "setup_embeddings_and_output_layer", make)


# -- monitor --------------------------------------------------------------------------------------


def _label_optimizer(optimizer: Any, monitor: Any) -> None:
    """What runs in ``optimizer.step`` has the phase ``optimizer``."""
    if optimizer is None or "step" in vars(optimizer):
        return
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with monitor.phase("optimizer"), monitor.part("optimizer step"):
            return original(*args, **kwargs)

    optimizer.step = step


def _followed_by_more(args: Any) -> bool:
    """Whether an evaluation or a checkpoint comes before the next train step (training.py:2914
    @0.16.1; :4005 @0.19.0): their timers, barriers and gathers are of such iterations alone."""
    number = getattr(args, "curr_iteration", 0) + 1
    intervals = [args.eval_interval if getattr(args, "do_valid", False) else None,
                 getattr(args, "save_interval", None)]  # fmt: skip
    return any(interval and number % interval == 0 for interval in intervals)


def _prove(module: ModuleType, context: PatchContext) -> None:
    """Count the optimizer steps that really happen, and turn a run without any into an error."""
    monitor = context.monitor

    def beside(begun: bool = True) -> None:
        """What comes now leaves gathered parameters behind where gathers overlap."""
        monitor.outside_step(bool(getattr(_get_args(), "overlap_param_gather", False)), begun)

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            optimizer = kwargs.get("optimizer", args[3] if len(args) > 3 else None)
            _label_optimizer(optimizer, monitor)
            wanted = monitor.asked(_get_args())
            if not monitor.iterations and (before := getattr(_get_args(), "curr_iteration", 0)):
                monitor.resumed(before)
            model = args[2] if len(args) > 2 else None
            which = "steady iteration" if monitor.iterations else "first iteration"
            with monitor.iteration(optimizer, model, wanted), monitor.part(which):
                result = original(*args, **kwargs)
                monitor.stepped(losses=result[0], skipped=bool(result[1]), grad_norm=result[5])
            if _followed_by_more(_get_args()):
                beside(begun=False)
            return result

        return call

    def whole(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with monitor.training(_get_args):
                return original(*args, **kwargs)

        return call

    def evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            beside()
            with monitor.part("evaluation"):
                return original(*args, **kwargs)

        return call

    def skip(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            monitor.skipped += 1
            return result

        return call

    def gathers(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            beside()
            return original(*args, **kwargs)

        return call

    context.replace(module, "train_step", step)
    context.replace(module, "dummy_train_step", skip)  # once per iteration of --iterations-to-skip
    context.replace(module, "evaluate", evaluate)
    context.replace(
        module, "disable_forward_pre_hook", gathers
    )  # before evaluations and checkpoints
    context.replace(module, "save_checkpoint_and_time", gathers)
    context.replace(module, "pretrain", whole)


def _no_restarts(module: ModuleType, context: PatchContext) -> None:
    """It waits at a store of its own until every rank of the job has come."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(word.partition("=")[0] == "--inprocess-restart" for word in sys.argv):
                raise UnsupportedError(
                    "--inprocess-restart restarts processes, and virtual ranks have none",
                    fix="leave it out",
                )
            return original(*args, **kwargs)

        return call

    context.replace(module, "maybe_wrap_for_inprocess_restart", make)


def _unchecked_pieces(module: ModuleType, context: PatchContext) -> None:
    """Ranks tell each other how large their pieces of a parameter are; mirrored ones say our size,
    and such pieces do not add up.  Megatron leaves the check out under torch's fake groups, too."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(dtensor: object) -> None:
            if context.is_real():
                original(dtensor)

        return call

    context.replace(module, "validate_uneven_dtensor", make)


def _filled_shards(module: ModuleType, context: PatchContext) -> None:
    """The last shard of a bucket ends in padding that no rank reads; a virtual rank's copy of it
    has it where parameters are, so it must be numbers."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(self: object, data: torch.Tensor) -> object:
            if not context.is_real():
                data.zero_()
            return original(self, data)

        return call

    context.replace(module.DataParallelBuffer, "init_data", make)


def _own_random_state(module: ModuleType, context: PatchContext) -> None:
    """Ranks take over the random state of their group's first; a virtual one sends none."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(state: object) -> None:
            if state is not None:
                original(state)

        return call

    context.replace(module, "_load_rng_state_dict", make)


def _own_words(module: ModuleType, context: PatchContext) -> None:
    """It makes a new exception of each, with "when instantiating …" behind what we say to type."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except PrismError as error:
                first = error
                while isinstance(first.__context__, PrismError):
                    first = first.__context__
            raise first from None  # out here: else the copy would become its context

        return call

    context.replace(module, "build_module", make)


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
        stretches = labels.chunk(len(owners), -1)
        labels = torch.cat([stretches[owner] for owner in owners], -1)
    places = labels.remainder(rows)
    mapped = places + rows * owners[0]
    for member, owner in enumerate(owners):
        if owner != owners[0]:
            its = (labels >= rows * member) & (labels < rows * (member + 1))
            mapped = torch.where(its, places + rows * owner, mapped)
    return mapped


def _mirrored_labels(module: ModuleType, context: PatchContext) -> None:
    """The network that mirrors make up is trained on labels that it can learn."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, labels: torch.Tensor, logits: torch.Tensor) -> Any:
            values = values_of(self.tp_group)
            if values is None:
                return original(self, labels, logits)
            owners, sequence = self.tp_group.owners(), bool(self.config.sequence_parallel)
            labels = labels_of_locals(labels, owners, logits.shape[-1], sequence)
            with values.of_parts(LocalVocabularySum()):
                return original(self, labels, logits)

        return call

    context.replace(module.LanguageModule, "compute_language_model_loss", make)


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


def _whole_lookup(module: ModuleType, context: PatchContext) -> None:
    """Only data of the call's answer changes: gradients go where the local mask lets them."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, input_: torch.Tensor) -> Any:
            values = values_of(self.tp_group)
            rows = _rows(self, input_) if values is not None else None
            if values is None or rows is None:
                return original(self, input_)
            with values.of_parts(rows):
                return original(self, input_)

        return call

    context.replace(module.VocabParallelEmbedding, "forward", make)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "own-random-state",
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        "a virtual rank has no random state to hand on",
        "core/distributed/fsdp/mcore_fsdp_adapter.py:483 @0.19.0",
        _own_random_state,
        targets=("_load_rng_state_dict",),
    ),
    Patch(
        "filled-shards",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
        "with --deterministic-mode the padding of the last rank's shard made every loss NaN",
        "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:1281 @0.19.0",
        _filled_shards,
        targets=("DataParallelBuffer.init_data",),
    ),
    Patch(
        "unchecked-pieces",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor",
        "pieces of virtual ranks are as large as the local one's",
        "core/distributed/fsdp/src/megatron_fsdp/uneven_dtensor.py:142 @0.19.0",
        _unchecked_pieces,
        targets=("validate_uneven_dtensor",),
    ),
    Patch(
        "own-words",
        "megatron.core.transformer.spec_utils",
        "a refusal ends with what to type",
        "core/transformer/spec_utils.py:119 @0.16.1; :127 @0.19.0",
        _own_words,
        targets=("build_module",),
        purpose=SPEEDS_UP,
    ),
    Patch(
        "no-restarts",
        "megatron.training.inprocess_restart",
        "in-process restart waits for processes that do not exist",
        "training/inprocess_restart.py:131 @0.19.0",
        _no_restarts,
        targets=("maybe_wrap_for_inprocess_restart",),
    ),
    Patch(
        "token-count",
        "megatron.core.distributed.finalize_model_grads",
        "the number of tokens comes from the last stage",
        "core/distributed/finalize_model_grads.py:490 @0.16.1; :686 @0.19.0",
        _token_count,
        targets=("finalize_model_grads",),
    ),
    Patch(
        "tied-embedding",
        "megatron.core.models.common.language_module.language_module",
        "first and last stage add their copies of the embedding",
        "core/models/common/language_module/language_module.py:245 @0.16.1",
        _tied_embedding,
        targets=("LanguageModule.setup_embeddings_and_output_layer",),
    ),
    Patch(
        "monitor",
        "megatron.training.training",
        "an emulated run that did not train must not exit 0",
        "training/training.py:1603, :2754 @0.16.1; :2336, :3800 @0.19.0",
        _prove,
        targets=(
            "train_step",
            "dummy_train_step",
            "evaluate",
            "disable_forward_pre_hook",
            "save_checkpoint_and_time",
            "pretrain",
        ),
        purpose=PROTECTS,
    ),
    Patch(
        "mirrored-labels",
        "megatron.core.models.common.language_module.language_module",
        "labels of virtual ranks' vocabulary teach nothing; those of mirrored tokens contradict",
        "core/models/common/language_module/language_module.py:128 @0.16.1; :155 @0.19.0",
        _mirrored_labels,
        targets=("LanguageModule.compute_language_model_loss",),
    ),
    Patch(
        "whole-lookup",
        "megatron.core.tensor_parallel.layers",
        "tokens of virtual ranks' vocabulary would be zeros, whose gradients explode",
        "core/tensor_parallel/layers.py:289 @0.16.1; :359 @0.19.0",
        _whole_lookup,
        targets=("VocabParallelEmbedding.forward",),
    ),
)
