"""Patches of Megatron's start-up, groups, data and log, so that one rank can run alone.

Others are in the modules beside this one, by subject,
gathered for each tier in ``without_cuda``.  Nothing here re-implements a schedule, a bucket
or a dispatcher: patches answer questions that only absent ranks could answer.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import PrismError
from megatron_prism.core.world import orthogonal_rank_groups
from megatron_prism.emulate import job_arguments, options
from megatron_prism.emulate.patch import SPEEDS_UP, Patch, PatchContext

__all__ = ["PATCHES"]


# -- groups ----------------------------------------------------------------------------------------


def _fast_groups(module: ModuleType, context: PatchContext) -> None:
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

    context.replace(module.RankGenerator, "get_ranks", get_ranks)
    context.replace(module, "create_group", create_group)


def _sizes_in_code(module: ModuleType, context: PatchContext) -> None:
    """A program without Megatron's arguments says its parallel sizes here for the first time."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(original)

        def call(*args: object, **kwargs: object) -> object:
            if context.monitor.loop is not None:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                size = torch.distributed.get_world_size()
                context.monitor.world_known(options.world_of_sizes(size, bound.arguments))
            return original(*args, **kwargs)

        return call

    context.replace(module, "initialize_model_parallel", make)


# -- start-up --------------------------------------------------------------------------------------


def _our_flags(module: ModuleType, context: PatchContext) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parser, *args, **kwargs: options.add_flags(original(parser, *args, **kwargs))

    context.replace(module, "add_megatron_arguments", make)


def _virtual_first(module: ModuleType, context: PatchContext) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.distributed.is_initialized():
                context.start()
            return original(*args, **kwargs)

        return call

    context.replace(module, "_initialize_distributed", make)


def _compile_once(module: ModuleType, context: PatchContext) -> None:
    """The dataset helper is compiled by whoever stands for rank 0, and only if it is missing."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> None:
            if context.leads and not _helpers_present():
                original()

        return call

    context.replace(module, "compile_helpers", make)


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


def _compile_as_leader(module: ModuleType, context: PatchContext) -> None:
    """Rank 0 compiles; without it the leading local rank must (initialize.py:183 @0.16.1)."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> Any:
            present = _helpers_present()  # every process loads it, from wherever it is
            if not present and context.leads and context.rank != 0:
                from megatron.core.datasets.utils import compile_helpers

                compile_helpers()
            return original()

        return call

    context.replace(module, "_compile_dependencies", make)


# -- data ------------------------------------------------------------------------------------------

_DATA_READERS = frozenset(
    {
        "build_train_valid_test_data_loaders",
        "get_batch",
        "get_batch_on_this_tp_rank",
        "is_dataset_built_on_rank",
        "dummy_train_step",
    }
)


def _own_batches(module: ModuleType, context: PatchContext) -> None:
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

    context.replace(module, "get_tensor_model_parallel_rank", make)


@contextlib.contextmanager
def _acting_as_rank_0(context: PatchContext) -> Iterator[None]:
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


def _build_indices(module: ModuleType, context: PatchContext) -> None:
    """Rank 0 builds the sample index, the others load it (gpt_dataset.py:442 @0.16.1).

    Of mock data it has the samples that are read until ``--exit-interval``: the index of a whole
    training run may take more memory than a laptop has.
    """

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(builder: Any, *args: object, **kwargs: object) -> object:
            if builder.config.mock:
                builder.sizes = _until_exit(builder.sizes)
            if context.leads and context.rank != 0 and not _helpers_present():
                from megatron.core.datasets.utils import compile_helpers

                compile_helpers()  # other scripts had rank 0 do it
            with _acting_as_rank_0(context):
                try:
                    return original(builder, *args, **kwargs)
                except Exception as error:
                    if isinstance(error.__cause__ or error, MemoryError):
                        samples = builder.sizes[0] or 0
                        raise PrismError(
                            f"the index of {samples:,} samples does not fit into memory here",
                            fix="--exit-interval 5: mock data are made for five iterations only",
                        ) from error
                    raise

        return call

    context.replace(module.BlendedMegatronDatasetBuilder, "build", make)


def _until_exit(sizes: Sequence[int | None]) -> list[int | None]:
    """Samples for training, validation and tests, as many as are read until ``--exit-interval``."""
    settings = job_arguments.parsed()
    last = getattr(settings, "exit_interval", None)
    if settings is None or not last:
        return list(sizes)
    evaluations = 2 + last // (settings.eval_interval or last)
    read = settings.global_batch_size * (last + 1) + getattr(settings, "consumed_train_samples", 0)
    read = max(read, settings.global_batch_size * evaluations * (settings.eval_iters or 0))
    return [size if size is None else min(size, read) for size in sizes]


def _train_flags(module: ModuleType, context: PatchContext) -> None:
    """Ranks without data learn from rank 0 that the job trains; a virtual rank 0 cannot say so.

    With its own zeros, or those of the local rank that rank 0 mirrors, a rank exits 0 without
    training (training/training.py:3411 @0.16.1).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            loaders = original(*args, **kwargs)
            settings = _get_args()
            overwritten = loaders[0] is None or len(context.local_ranks) > 1
            # on meta tensors even rank 0 cannot read its own flags back
            if context.meta or (overwritten and 0 not in context.local_ranks):
                evaluates = bool(getattr(settings, "full_validation", False) or settings.eval_iters)
                settings.do_train = bool(settings.train_iters) or bool(settings.skip_train)
                settings.do_valid = settings.do_test = evaluates
            return loaders

        return call

    context.replace(module, "build_train_valid_test_data_loaders", make)


def _files_are_here(module: ModuleType, context: PatchContext) -> None:
    """A cluster's tokenizer and data seldom lie on the machine that emulates its job."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(args: Namespace, *rest: object, **kwargs: object) -> object:
            if not context.is_real(args.world_size):
                job_arguments.check_files(args)
            return original(args, *rest, **kwargs)

        return call

    context.replace(module, "set_global_variables", make, again=True)


def _get_args() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


# -- log -------------------------------------------------------------------------------------------


def _speak(module: ModuleType, context: PatchContext) -> None:
    """What a virtual rank 0 or last rank would print, the leading local rank prints."""

    def make(is_local: Callable[[], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(message: Any, *args: Any, **kwargs: Any) -> None:
                if is_local() or not context.leads:
                    original(message, *args, **kwargs)
                else:
                    print(message, flush=True)

            return call

        return replace

    context.replace(module, "print_rank_0", make(lambda: 0 in context.local_ranks))
    last = make(lambda: torch.distributed.get_world_size() - 1 in context.local_ranks)
    context.replace(module, "print_rank_last", last)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "fast-groups",
        "megatron.core.parallel_state",
        "65,536 ranks make 77,000 (0.16.1) or 208,000 (0.19.0) new_group calls, 5 to 8 s",
        "core/parallel_state.py:241, :506 @0.16.1; :259, :534 @0.19.0",
        _fast_groups,
        targets=(
            "RankGenerator.get_ranks",
            "create_group",
        ),
        purpose=SPEEDS_UP,
    ),
    Patch(
        "files-are-here",
        "megatron.training.global_vars",
        "a missing tokenizer ended in a traceback",
        "training/global_vars.py:85 @0.16.1; :116 @0.19.0",
        _files_are_here,
        targets=("set_global_variables",),
    ),
    Patch(
        "sizes-in-code",
        "megatron.core.parallel_state",
        "the parallel sizes of a program without Megatron's arguments",
        "core/parallel_state.py:545 @0.16.1; :601 @0.19.0",
        _sizes_in_code,
        targets=("initialize_model_parallel",),
    ),
    Patch(
        "own-batches",
        "megatron.core.parallel_state",
        "a virtual tensor-parallel source broadcasts no batch",
        "training/utils.py:529 @0.16.1; pretrain_gpt.py:104 @0.19.0",
        _own_batches,
        targets=(
            "get_tensor_model_parallel_rank",
            "get_tensor_model_parallel_src_rank",
        ),
    ),
    Patch(
        "flags",
        "megatron.training.arguments",
        "Megatron's parser refuses options it does not know",
        "training/arguments.py:92 @0.16.1; :121 @0.19.0",
        _our_flags,
        targets=("add_megatron_arguments",),
    ),
    Patch(
        "virtual-world",
        "megatron.training.initialize",
        "--distributed-backend knows only nccl and gloo; an initialised default group is kept",
        "training/initialize.py:320 @0.16.1; :271 @0.19.0",
        _virtual_first,
        targets=("_initialize_distributed",),
    ),
    Patch(
        "compile-leader",
        "megatron.training.initialize",
        "only rank 0 compiles the dataset helper",
        "training/initialize.py:183 @0.16.1",
        _compile_as_leader,
        targets=("_compile_dependencies",),
    ),
    Patch(
        "compile-once",
        "megatron.core.datasets.utils",
        "the 0.19.2 wheel has the compiled helper but no Makefile: make fails, the job exits",
        "core/datasets/utils.py:21",
        _compile_once,
        targets=("compile_helpers",),
    ),
    Patch(
        "build-indices",
        "megatron.core.datasets.blended_megatron_dataset_builder",
        "only rank 0 builds the sample index",
        "core/datasets/gpt_dataset.py:442 @0.16.1; :503 @0.19.0",
        _build_indices,
        targets=("BlendedMegatronDatasetBuilder.build",),
    ),
    Patch(
        "train-flags",
        "megatron.training.training",
        "ranks without data learn from rank 0 whether to train",
        "training/training.py:3411 @0.16.1; :4593 @0.19.0",
        _train_flags,
        targets=("build_train_valid_test_data_loaders",),
    ),
    Patch(
        "log",
        "megatron.training.utils",
        "the iteration log comes from the last rank, start-up messages from rank 0",
        "training/utils.py:427 @0.16.1",
        _speak,
        targets=(
            "print_rank_0",
            "print_rank_last",
        ),
        purpose=SPEEDS_UP,
        releases="<0.19",
    ),
    Patch(
        "log-0.19",
        "megatron.training.utils.common_utils",
        "the same in its new home",
        "training/utils/common_utils.py:470 @0.19.0",
        _speak,
        targets=(
            "print_rank_0",
            "print_rank_last",
        ),
        purpose=SPEEDS_UP,
        releases=">=0.19",
    ),
)
