"""What is changed in Megatron so that one rank can run alone, and why.  The only place that knows it.

Each :class:`Seam` names the module it changes, the reason, and the lines it was read at.  ``hooks``
applies it right after that module's import, so no copy of the old function survives.  Seams of the
CPU and meta tiers are in ``seams_tiers``.  Nothing here re-implements a schedule, a bucket or a
dispatcher: seams answer questions that only absent ranks could answer.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_prism.plugin import flags, hooks
from megatron_prism.plugin.proof import Proof
from megatron_prism.virtual.backend import PrismGroup
from megatron_prism.virtual.session import VirtualWorld, current
from megatron_prism.world import orthogonal_rank_groups

__all__ = ["SEAMS", "Context", "Seam", "apply"]


@dataclass
class Context:
    """What the seams need to know of this run; ``start`` brings the virtual world up."""

    start: Callable[[], VirtualWorld]
    proof: Proof
    meta: bool
    local_ranks: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        """Whether this process does what rank 0 does once for all (build indices, compile)."""
        return self.rank == min(self.local_ranks)


@dataclass(frozen=True)
class Seam:
    """One change: which module, why, where that was read, and the function that applies it."""

    name: str
    module: str
    reason: str
    source: str
    apply: Callable[[ModuleType, Context], None]


def apply(seams: tuple[Seam, ...], context: Context) -> None:
    """Apply every seam, now or when its module is imported."""
    for seam in seams:
        hooks.after_import(
            seam.module, lambda module, seam=seam: seam.apply(module, context)
        )


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)``; a name this release lacks is left alone."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "__prism__", False):
        return
    replacement = functools.wraps(original)(make(original))
    replacement.__prism__ = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


# -- groups -----------------------------------------------------------------------------------------


def _fast_groups(module: ModuleType, context: Context) -> None:
    """Enumerate only the groups that hold a local rank; the others are nobody's here."""
    local = context.local_ranks

    def get_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, token: str) -> list[list[int]]:
            mask = self.get_mask(self.order, token)
            # tp-ep-pp groups are concatenated by the caller, so all of them count (:1335 @0.16.1)
            wanted = None if set(token.split("-")) >= {"tp", "ep", "pp"} else local
            offset = getattr(self, "rank_offset", 0)
            if offset:
                return original(self, token)
            return orthogonal_rank_groups(
                self.world_size, self.ordered_size, mask, containing=wanted
            )

        return call

    def create_group(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if ranks is not None and context.rank not in ranks:
                return torch.distributed.GroupMember.NON_GROUP_MEMBER
            return original(ranks, *args, **kwargs)

        return call

    _wrap(module.RankGenerator, "get_ranks", get_ranks)
    _wrap(module, "create_group", create_group)


# -- start-up ---------------------------------------------------------------------------------------


def _our_flags(module: ModuleType, context: Context) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parser, *args, **kwargs: flags.add_flags(original(parser, *args, **kwargs))

    _wrap(module, "add_megatron_arguments", make)


def _virtual_first(module: ModuleType, context: Context) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.distributed.is_initialized():
                context.start()
            return original(*args, **kwargs)

        return call

    _wrap(module, "_initialize_distributed", make)


def _compile_once(module: ModuleType, context: Context) -> None:
    """The dataset helper is compiled by whoever stands for rank 0, and only if it is missing."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> None:
            if context.leads and not _helpers_present():
                original()

        return call

    _wrap(module, "compile_helpers", make)


def _helpers_present() -> bool:
    """Whether the compiled helper is importable, also from another part of the namespace package.

    A checkout beside the script shadows the installed wheel, which has the compiled helper.
    """
    import importlib
    import importlib.util

    name = "megatron.core.datasets.helpers_cpp"
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return True
    for entry in sys.path:
        for file in Path(entry or ".").glob("megatron/core/datasets/helpers_cpp*.so"):
            spec = importlib.util.spec_from_file_location(name, file)
            if spec is None or spec.loader is None:
                continue
            helper = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(helper)
            except ImportError:  # built for another Python: keep looking
                continue
            sys.modules[name] = helper
            return True
    return False


def _compile_as_leader(module: ModuleType, context: Context) -> None:
    """Rank 0 compiles; without it the leading local rank must (initialize.py:183 @0.16.1)."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> Any:
            if context.leads and context.rank != 0:
                from megatron.core.datasets.utils import compile_helpers

                compile_helpers()
            return original()

        return call

    _wrap(module, "_compile_dependencies", make)


# -- data -------------------------------------------------------------------------------------------

_DATA_READERS = frozenset(
    {
        "build_train_valid_test_data_loaders",
        "get_batch",
        "get_batch_on_this_tp_rank",
        "is_dataset_built_on_rank",
        "dummy_train_step",
    }
)


def _own_batches(module: ModuleType, context: Context) -> None:
    """A rank whose tensor-parallel source is virtual reads the batch itself.

    Real ranks with tp > 0 receive it; a virtual source has nothing to send (0.16.1 would read an
    uninitialised length and ask for terabytes, training/utils.py:623).  So for the functions that
    read data, and for the script itself, this rank is tp rank 0: it reads what the source reads.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> int:
            rank = original()
            if rank:
                caller = sys._getframe(1)
                reads = caller.f_code.co_name in _DATA_READERS
                if reads or caller.f_globals.get("__name__") == "__main__":
                    source = module.get_tensor_model_parallel_src_rank()
                    return rank if source in context.local_ranks else 0
            return rank

        return call

    _wrap(module, "get_tensor_model_parallel_rank", make)


@contextlib.contextmanager
def _acting_as_rank_0(context: Context) -> Iterator[None]:
    """``torch.distributed.get_rank()`` answers 0 on the leading local rank inside."""
    if not context.leads or context.rank == 0:
        yield
        return
    original = torch.distributed.get_rank
    torch.distributed.get_rank = lambda group=None: 0 if group is None else original(group)
    try:
        yield
    finally:
        torch.distributed.get_rank = original


def _build_indices(module: ModuleType, context: Context) -> None:
    """Rank 0 builds the sample index, the others load it (gpt_dataset.py:442 @0.16.1)."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _acting_as_rank_0(context):
                return original(*args, **kwargs)

        return call

    _wrap(module.BlendedMegatronDatasetBuilder, "build", make)


def _train_flags(module: ModuleType, context: Context) -> None:
    """Ranks without data learn from rank 0 that the job trains; a virtual rank 0 cannot say so.

    With its own zeros such a rank exits 0 without training (training/training.py:3411 @0.16.1).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            loaders = original(*args, **kwargs)
            settings = _get_args()
            # on meta tensors even rank 0 cannot read its own flags back
            if context.meta or (loaders[0] is None and 0 not in context.local_ranks):
                evaluates = bool(getattr(settings, "full_validation", False) or settings.eval_iters)
                settings.do_train = bool(settings.train_iters) or bool(settings.skip_train)
                settings.do_valid = settings.do_test = evaluates
            return loaders

        return call

    _wrap(module, "build_train_valid_test_data_loaders", make)


def _get_args() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


# -- pipeline ---------------------------------------------------------------------------------------


def _label_receives(module: ModuleType, context: Context) -> None:
    """Say which received tensor is an activation and which a gradient: their scales differ."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            world = current()
            if world is None:
                return original(**kwargs)
            with world.values.expecting(
                activation=kwargs.get("tensor_recv_prev"), gradient=kwargs.get("tensor_recv_next")
            ):
                return original(**kwargs)

        return call

    _wrap(module, "_p2p_ops", make)
    _wrap(module, "_batched_p2p_ops", make)

    def shapes(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, send_next: Any, send_prev: Any, recv_prev: Any, recv_next: Any) -> Any:
            prev, after = original(self, send_next, send_prev, recv_prev, recv_next)
            known = _shape_here(self.config, send_next, send_prev)
            return (
                known if recv_prev and not all(prev) else prev,
                known if recv_next and not all(after) else after,
            )

        return call

    _wrap(module.P2PCommunicator, "_communicate_shapes", shapes)


def _shape_here(config: Any, *sent: Any) -> list[int]:
    """The shape a peer would announce: what we send it, else [sequence, micro-batch, hidden]."""
    for tensor in sent:
        if tensor is not None:
            return list(tensor.shape)
    settings = _get_args()
    tokens = settings.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    return [tokens, settings.micro_batch_size, config.hidden_size]


def _label_phases(module: ModuleType, context: Context) -> None:
    """Tell the proof (and through it the memory tracker) which microbatch runs."""
    proof = context.proof

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with proof.step("forward", kwargs.get("vp_stage")):
                return original(*args, **kwargs)

        return call

    def backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with proof.step("backward", None):
                return original(*args, **kwargs)

        return call

    _wrap(module, "forward_step", forward)
    _wrap(module, "backward_step", backward)

    def schedule(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            proof.new_schedule(kwargs)
            return original(*args, **kwargs)

        return call

    for name in (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ):
        _wrap(module, name, schedule)


def _token_count(module: ModuleType, context: Context) -> None:
    """The last stage counts the tokens; for a virtual one they are what the flags say.

    Without it gradients of the other stages are never scaled (finalize_model_grads.py:490 @0.16.1).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            if num_tokens is not None and not context.meta and not int(num_tokens):
                num_tokens = num_tokens + context.proof.tokens_per_iteration()
            return original(model, num_tokens, *args, **kwargs)

        return call

    _wrap(module, "finalize_model_grads", make)


def _tied_embedding(module: ModuleType, context: Context) -> None:
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

    _wrap(module.LanguageModule, "setup_embeddings_and_output_layer", make)


# -- log --------------------------------------------------------------------------------------------


def _speak(module: ModuleType, context: Context) -> None:
    """What rank 0 and the last rank would print, the leading local rank prints if they are virtual."""

    def make(is_local: Callable[[], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(message: Any, *args: Any, **kwargs: Any) -> None:
                if is_local() or not context.leads:
                    original(message, *args, **kwargs)
                else:
                    print(message, flush=True)

            return call

        return replace

    _wrap(module, "print_rank_0", make(lambda: 0 in context.local_ranks))
    last = make(lambda: torch.distributed.get_world_size() - 1 in context.local_ranks)
    _wrap(module, "print_rank_last", last)


# -- proof ------------------------------------------------------------------------------------------


def _prove(module: ModuleType, context: Context) -> None:
    """Count the optimizer steps that really happen, and turn a run without any into an error."""
    proof = context.proof

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            optimizer = kwargs.get("optimizer", args[3] if len(args) > 3 else None)
            with proof.iteration(optimizer, args[2] if len(args) > 2 else None):
                result = original(*args, **kwargs)
                proof.stepped(losses=result[0], skipped=bool(result[1]), grad_norm=result[5])
            return result

        return call

    def whole(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with proof.training(_get_args):
                return original(*args, **kwargs)

        return call

    _wrap(module, "train_step", step)
    _wrap(module, "pretrain", whole)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "fast-groups",
        "megatron.core.parallel_state",
        "65,536 ranks make 77,000 (0.16.1) or 208,000 (0.19.0) new_group calls, 5 to 8 s",
        "core/parallel_state.py:241, :506 @0.16.1; :259, :534 @0.19.0",
        _fast_groups,
    ),
    Seam(
        "own-batches",
        "megatron.core.parallel_state",
        "a virtual tensor-parallel source broadcasts no batch",
        "training/utils.py:529 @0.16.1; pretrain_gpt.py:104 @0.19.0",
        _own_batches,
    ),
    Seam(
        "flags",
        "megatron.training.arguments",
        "Megatron's parser refuses options it does not know",
        "training/arguments.py:92 @0.16.1; :121 @0.19.0",
        _our_flags,
    ),
    Seam(
        "virtual-world",
        "megatron.training.initialize",
        "--distributed-backend knows only nccl and gloo; an initialised default group is kept",
        "training/initialize.py:320 @0.16.1; :271 @0.19.0",
        _virtual_first,
    ),
    Seam(
        "compile-leader",
        "megatron.training.initialize",
        "only rank 0 compiles the dataset helper",
        "training/initialize.py:183 @0.16.1",
        _compile_as_leader,
    ),
    Seam(
        "compile-once",
        "megatron.core.datasets.utils",
        "the 0.19.2 wheel has the compiled helper but no Makefile: make fails, the job exits",
        "core/datasets/utils.py:21",
        _compile_once,
    ),
    Seam(
        "build-indices",
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "only rank 0 builds the sample index",
        "core/datasets/gpt_dataset.py:442 @0.16.1; :503 @0.19.0",
        _build_indices,
    ),
    Seam(
        "train-flags",
        "megatron.training.training",
        "ranks without data learn from rank 0 whether to train",
        "training/training.py:3411 @0.16.1; :4593 @0.19.0",
        _train_flags,
    ),
    Seam(
        "label-receives",
        "megatron.core.pipeline_parallel.p2p_communication",
        "received activations and gradients have different scales; shapes need an oracle",
        "core/pipeline_parallel/p2p_communication.py:48, :66, :160",
        _label_receives,
    ),
    Seam(
        "label-phases",
        "megatron.core.pipeline_parallel.schedules",
        "the summary says in which phase and microbatch a peak occurred",
        "core/pipeline_parallel/schedules.py:311, :446 @0.16.1",
        _label_phases,
    ),
    Seam(
        "token-count",
        "megatron.core.distributed.finalize_model_grads",
        "the number of tokens comes from the last stage",
        "core/distributed/finalize_model_grads.py:490 @0.16.1; :686 @0.19.0",
        _token_count,
    ),
    Seam(
        "tied-embedding",
        "megatron.core.models.common.language_module.language_module",
        "first and last stage add their copies of the embedding",
        "core/models/common/language_module/language_module.py:245 @0.16.1",
        _tied_embedding,
    ),
    Seam(
        "log",
        "megatron.training.utils",
        "the iteration log comes from the last rank, start-up messages from rank 0",
        "training/utils.py:427 @0.16.1",
        _speak,
    ),
    Seam(
        "log-0.19",
        "megatron.training.utils.common_utils",
        "the same in its new home",
        "training/utils/common_utils.py:470 @0.19.0",
        _speak,
    ),
    Seam(
        "proof",
        "megatron.training.training",
        "an emulated run that did not train must not exit 0",
        "training/training.py:1603 @0.16.1; :2336 @0.19.0",
        _prove,
    ),
)
