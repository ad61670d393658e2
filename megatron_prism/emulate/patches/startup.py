"""Patches of Megatron's start-up, groups, data and log, so that one rank can run alone.

Nothing here re-implements a schedule, a bucket or a dispatcher: patches answer questions that only
absent ranks could answer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import PrismError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.world import FAMILIES, World, orthogonal_rank_groups
from megatron_prism.emulate.capture import capture
from megatron_prism.emulate.command_line import job_arguments, options
from megatron_prism.emulate.patch import SPEEDS_UP, Original, PatchContext, Patches
from megatron_prism.emulate.preflight import first_look, stand_ins, unknown_flags

PATCHES = Patches()


# -- groups ----------------------------------------------------------------------------------------


@PATCHES.patch(
    "megatron.core.parallel_state:RankGenerator.get_ranks",
    "create_group",
    at=":241, :506 @0.16.1; :259, :534 @0.19.0",
    purpose=SPEEDS_UP,
)
def _fast_groups(module: ModuleType, context: PatchContext) -> None:
    """65,536 ranks make 77,000 (0.16.1) or 208,000 (0.19.0) new_group calls, 5 to 8 s: enumerate
    only the groups that hold a local rank, the others are nobody's here.
    """

    def get_ranks(original: Original, self: Any, token: str) -> list[list[int]]:
        mask = self.get_mask(self.order, token)
        # tp-ep-pp groups are concatenated by the caller, so all of them count (:1335 @0.16.1)
        wanted = None if set(token.split("-")) >= {"tp", "ep", "pp"} else context.local_ranks
        offset = getattr(self, "rank_offset", 0)
        if offset:
            return original(self, token)
        groups: list[list[int]] = orthogonal_rank_groups(self.ordered_size, mask, wanted).tolist()
        return groups

    def create_group(original: Original, ranks: Any = None, *args: object, **kwargs: object) -> Any:
        if ranks is not None and context.rank not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        return original(ranks, *args, **kwargs)

    context.replace(module, get_ranks, "RankGenerator.get_ranks")
    context.replace(module, create_group, "create_group")


@PATCHES.instead(
    "megatron.core.parallel_state:initialize_model_parallel", at=":545 @0.16.1; :601 @0.19.0"
)
def _sizes_in_code(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> object:
    """A program without Megatron's arguments says its parallel sizes here for the first time."""
    # a program with a loop of its own
    if context.monitor.loop is not None:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        size = torch.distributed.get_world_size()
        context.monitor.world_known(options.parsed_world(size, bound.arguments))
    return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.core.hyper_comm_grid:HyperCommGrid.create_pg", at=":120 @0.16.1; :206 @0.20.0"
)
def _groups_of_grids(
    context: PatchContext, original: Original, self: Any, dims: Any, *args: object, **kwargs: object
) -> object:
    """Groups of a grid have no description, so that all would be one: they get Megatron's own.  A
    grid over all ranks says the parallel sizes of a program without Megatron's arguments.
    """
    axes = [dims] if isinstance(dims, str) else [*dims]
    name, kind = "-".join(axes), "expert" if "ep" in self.dim_names else "dense"
    # groups of a grid over all ranks are those that Megatron names by the same axes
    if self.size == torch.distributed.get_world_size():
        known = {
            frozenset(one.axes): one.desc
            for one in FAMILIES
            if one.grid == kind and one.pick == "all" and one.since == (0, 0)
        }
        name = known.get(frozenset(axes), name)
        # a program without Megatron's arguments: its grid says the sizes, and dp follows from them
        if context.monitor.loop is not None and {*self.dim_names} == {"tp", "cp", "dp", "pp"}:
            sizes = dict(zip(self.dim_names, self.shape, strict=True))
            order = "-".join(self.dim_names).replace("cp", "cp-ep")
            del sizes["dp"]
            context.monitor.world_known(World(int(self.size), order=order, **sizes))
    else:  # of some modules' ranks
        name = f"{name} of {self.size} from {self.rank_offset}"
    kwargs.setdefault("group_desc", name)
    return original(self, dims, *args, **kwargs)


# -- start-up --------------------------------------------------------------------------------------


@PATCHES.instead(
    "megatron.training.arguments:add_megatron_arguments", at=":92 @0.16.1; :121 @0.19.0"
)
def _flags(context: PatchContext, original: Original, *args: object, **kwargs: object) -> Any:
    """Megatron's parser refuses options it does not know."""
    parser = options.add_flags(original(*args, **kwargs))
    if first_look.current is not None:
        first_look.current.known_options = frozenset(parser._option_string_actions)
    return parser


@PATCHES.instead(
    "megatron.training.initialize:_initialize_distributed", at=":320 @0.16.1; :271 @0.19.0"
)
def _virtual_world(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> Any:
    """--distributed-backend knows only nccl and gloo; an initialised default group is kept."""
    if not torch.distributed.is_initialized():
        context.start()
    return original(*args, **kwargs)


@PATCHES.instead("megatron.core.datasets.utils:compile_helpers", at=":20 @0.16.1 and @0.19.0")
def _compile_once(context: PatchContext, original: Original) -> None:
    """The dataset helper is compiled by whoever stands for rank 0, and only if it is missing: the
    0.19.2 wheel has no Makefile, and a job whose make fails ends.
    """
    if context.leads and not _helpers_present():
        original()


def _helpers_present() -> bool:
    """Whether the compiled helper is importable, also from the installed wheel, which a checkout
    beside the script shadows.
    """
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


@PATCHES.instead("megatron.training.initialize:_compile_dependencies", at=":183 @0.16.1")
def _compile_leader(context: PatchContext, original: Original) -> Any:
    """Only rank 0 compiles the dataset helper; without it the leading local rank must."""
    _compile_for_rank_0(context)
    return original()


def _compile_for_rank_0(context: PatchContext) -> None:
    present = _helpers_present()  # every process loads it, from wherever it is
    if not present and context.leads and context.rank != 0:
        from megatron.core.datasets.utils import compile_helpers

        compile_helpers()


# -- data ------------------------------------------------------------------------------------------

_DATA_READERS = (
    "build_train_valid_test_data_loaders",
    "get_batch",
    "get_batch_on_this_tp_rank",
    "is_dataset_built_on_rank",
    "dummy_train_step",
)


@PATCHES.patch(
    "megatron.core.parallel_state:get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    at="training/utils.py:529 @0.16.1; pretrain_gpt.py:104 @0.19.0",
)
def _own_batches(module: ModuleType, context: PatchContext) -> None:
    """A rank whose tensor-parallel source is virtual reads the batch itself.

    Real ranks with tp > 0 receive it; a virtual source has nothing to send (0.16.1 would read an
    uninitialised length and ask for terabytes, training/utils.py:623). So for the functions that
    read data, and for the script itself, this rank is tp rank 0: it reads what the source reads.
    """

    def call(original: Original) -> int:
        rank = original()
        if rank:
            caller = sys._getframe(2)  # behind ``replace``
            reads = caller.f_code.co_name in _DATA_READERS
            if reads or caller.f_globals.get("__name__") == "__main__":
                source = module.get_tensor_model_parallel_src_rank()
                return rank if source in context.local_ranks else 0
        return rank

    context.replace(module, call, "get_tensor_model_parallel_rank")


@PATCHES.instead(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
    at="core/datasets/gpt_dataset.py:442 @0.16.1; :503 @0.19.0",
)
def _build_indices(
    context: PatchContext, original: Original, builder: Any, *args: object, **kwargs: object
) -> object:
    """Rank 0 builds the sample index, the others load it."""
    _compile_for_rank_0(context)  # other scripts had rank 0 do it
    own = torch.distributed.get_rank
    with ProcessChanges() as changes:
        if context.leads:
            answer = lambda group=None: 0 if group is None else own(group)  # noqa: E731
            changes.set(torch.distributed, "get_rank", answer)
        try:
            return original(builder, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__cause__ or error, MemoryError):
                samples = builder.sizes[0] or 0
                message = f"the index of {samples:,} samples does not fit into memory here"
                fix = "--prism-steps 5: data are made for five iterations only"
                raise PrismError(message, fix=fix) from error
            raise


@PATCHES.instead(
    "megatron.training.training:build_train_valid_test_data_loaders",
    at=":3411 @0.16.1; :4593 @0.19.0",
)
def _train_flags(context: PatchContext, original: Original, *args: object, **kwargs: object) -> Any:
    """Ranks without data learn from rank 0 that the job trains; a virtual rank 0 cannot say so:
    with its own zeros, or those of the local rank that rank 0 mirrors, a rank exits 0 without
    training.
    """
    loaders = original(*args, **kwargs)
    settings = megatron_args()
    overwritten = loaders[0] is None or len(context.local_ranks) > 1
    # on meta tensors even rank 0 cannot read its own flags back
    if context.meta or (overwritten and 0 not in context.local_ranks):
        evaluates = bool(getattr(settings, "full_validation", False) or settings.eval_iters)
        settings.do_train = bool(settings.train_iters) or bool(settings.skip_train)
        settings.do_valid = settings.do_test = evaluates
    return loaders


@PATCHES.instead("megatron.training.arguments:parse_args", at=":87 @0.16.1; :116 @0.19.0")
def _without_files(
    context: PatchContext, original: Original, provider: Any = None, *rest: Any, **kwargs: Any
) -> Any:
    """A cluster's tokenizer and data seldom lie on the machine that emulates its job; flags of
    forks and older releases end in a usage text.
    """
    look = first_look.begin()
    args = unknown_flags.parse_all(original, provider, *rest, look=look, **kwargs)
    steps = args.prism_steps
    emulated = not context.is_real(args.world_size)
    # what is captured needs the states that the optimizer makes in its first step
    if args.prism_capture and emulated and not steps and args.train_iters == 1:
        steps = capture.least_steps(context.say, args.train_iters)
    if steps:
        # the iteration with graphs comes one later than others that are recorded
        graphs = getattr(args, "cuda_graph_impl", "") == "transformer_engine"
        more = context.records and context.meta and graphs
        _shorten(args, steps + more)
    if args.yaml_cfg is None and emulated:
        replaced = stand_ins.put(args, look.obstacles, loads_own_layout=context.loads_own_layout)
        look.check_data(args)
        if look.options_without_value:
            text = f"no value: {', '.join(dict.fromkeys(look.options_without_value))}"
            if text not in look.stand_ins:
                look.stand_ins.append(text)
                context.monitor.note(text)
        # scripts of 0.19 parse twice
        if replaced.text and replaced.text not in look.stand_ins:
            look.stand_ins.append(replaced.text)
            context.monitor.note(replaced.text)
            print(f"prism: {replaced.text}", file=sys.stderr)
        if replaced.vocabulary or replaced.without_checkpoint:
            remarks = stand_ins.Remarks(replaced, megatron_args, context.say)
            context.monitor.listen(*context.monitor.listeners, remarks)
    return args


def _shorten(args: argparse.Namespace, steps: int) -> None:
    """End the job behind ``steps`` iterations, without an evaluation.  The data set is made for no
    more than these; the learning rate keeps its schedule, whose warmup has to be shorter than its
    decay.
    """
    if args.train_samples:
        args.lr_decay_samples = args.lr_decay_samples or args.train_samples
        # without --global-batch-size a batch has a microbatch of each data-parallel rank
        batch_size = args.global_batch_size or (args.micro_batch_size or 1) * args.world_size
        args.train_samples = min(args.train_samples, steps * batch_size)
    else:
        args.lr_decay_iters = args.lr_decay_iters or max(steps, args.train_iters or 0)
        args.train_iters = steps
    args.exit_interval = steps


@PATCHES.instead("megatron.training.arguments:validate_args", at=":293 @0.16.1; :388 @0.19.0")
def _all_refusals(
    context: PatchContext, original: Original, namespace: Any, *args: object, **kwargs: object
) -> object:
    """What the parser, the stand-ins and Megatron's validation refuse is said in one list."""
    look = first_look.end()
    if look is None:  # a script that validates twice
        return _refusals(context, original, namespace, *args, **kwargs)
    return look.validate(original, namespace, *args, **kwargs)


@PATCHES.instead(
    "megatron.training.global_vars:set_global_variables", at=":93 @0.16.1; :127 @0.19.0"
)
@PATCHES.instead(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "MLATransformerConfig.__post_init__",
    at=":909, :2066 @0.16.1; :1294, :2964 @0.19.0",
)
def _refusals(context: PatchContext, original: Original, *args: object, **kwargs: object) -> Any:
    """What Megatron refuses of the arguments is said in a line, not by a traceback without a
    word.
    """
    if first_look.notes_of_config is not None:
        original = first_look.going_on(original, first_look.notes_of_config)
    try:
        return original(*args, **kwargs)
    except (AssertionError, ValueError) as error:
        values = job_arguments.parsed()
        raise first_look.refusal(error, {} if values is None else vars(values)) from error


def megatron_args() -> Any:
    """The job's arguments, as Megatron has parsed them."""
    from megatron.training.global_vars import get_args

    return get_args()


# -- log -------------------------------------------------------------------------------------------


@PATCHES.patch(
    "megatron.training.utils:print_rank_0",
    "print_rank_last",
    at=":427 @0.16.1",
    purpose=SPEEDS_UP,
    releases="<0.19",
)
@PATCHES.patch(
    "megatron.training.utils.common_utils:print_rank_0",
    "print_rank_last",
    at=":470 @0.19.0",
    purpose=SPEEDS_UP,
    releases=">=0.19",
)
def _log(module: ModuleType, context: PatchContext) -> None:
    """What a virtual rank 0 or last rank would print, the leading local rank prints."""

    def call(last: bool, original: Original, message: Any, *args: object, **kwargs: object) -> None:
        teller = torch.distributed.get_world_size() - 1 if last else 0
        # the rank that prints in the real job is here, or another local rank prints in its place
        if teller in context.local_ranks or not context.leads:
            original(message, *args, **kwargs)
        else:
            print(message, flush=True)

    context.replace(module, partial(call, False), "print_rank_0")
    context.replace(module, partial(call, True), "print_rank_last")
