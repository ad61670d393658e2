"""Collectives of the layers, random trackers, recomputation (pytorch/distributed.py @v2.9)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist

from megatron_prism.runtime.te.fp8 import FP8GlobalStateManager, autocast

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads, Group, Trackers

_R = TypeVar("_R")
_all_states: dict[str, torch.Tensor] = {}
Answer = tuple[torch.Tensor, dist.Work | None]


def group_size(group: Group) -> int:
    """Members of ``group``; 1 without torch.distributed or without a group."""
    if group is None or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def group_rank(group: Group) -> int:
    return 0 if group is None or not dist.is_initialized() else dist.get_rank(group)


def gather_along_first_dim(inp: torch.Tensor, group: Group, async_op: bool = False) -> Answer:
    """(all members' ``inp``, work handle); ``inp`` itself in a group of one."""
    size = group_size(group)
    if size == 1:
        return inp, None
    out = inp.new_empty(inp.shape[0] * size, *inp.shape[1:])
    work = dist.all_gather_into_tensor(out, inp.contiguous(), group=group, async_op=async_op)
    return out, work


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, group: Group, async_op: bool = False
) -> Answer:
    """(this member's rows of the sum, work handle)."""
    size = group_size(group)
    if size == 1:
        return inp, None
    out = inp.new_empty(inp.shape[0] // size, *inp.shape[1:])
    work = dist.reduce_scatter_tensor(out, inp.contiguous(), group=group, async_op=async_op)
    return out, work


def allreduce(inp: torch.Tensor, group: Group, async_op: bool = False) -> Answer:
    """(the sum, in place; work handle)."""
    if group_size(group) == 1:
        return inp, None
    return inp, dist.all_reduce(inp, group=group, async_op=async_op)


def get_all_rng_states() -> dict[str, torch.Tensor]:
    return _all_states


def set_all_rng_states(states: dict[str, torch.Tensor]) -> None:
    global _all_states
    _all_states = states


class CudaRNGStatesTracker:
    """Named generator states; ``fork`` runs a block under one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


class activation_recompute_forward(contextlib.ContextDecorator):  # noqa: N801
    """Tells FP8 layers which pass of a recompute they are in (distributed.py:241 @v2.20.2)."""

    now = (False, False)  # is this a checkpointed region, is it the second pass
    _firsts: list[bool] = []  # was the first layer of a region the first of all

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.flags = (activation_recompute, recompute_phase)

    def __enter__(self) -> None:
        kind, manager = activation_recompute_forward, FP8GlobalStateManager
        kind.now = self.flags
        if self.flags == (True, False):
            kind._firsts.append(manager.IS_FIRST_FP8_MODULE)
        elif self.flags == (True, True):
            manager.IS_FIRST_FP8_MODULE = kind._firsts.pop(0)

    def __exit__(self, *exc: object) -> None:
        activation_recompute_forward.now = (False, False)


def is_fp8_activation_recompute_enabled() -> bool:
    return activation_recompute_forward.now[0] and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    return activation_recompute_forward.now[1]


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        run: Callable[..., _R],
        tracker: Trackers | None,
        share: Group,
        *args: Any,
    ) -> _R:
        """share : the group whose members keep a part each of the first argument, or None."""
        ctx.run, ctx.tracker, ctx.share = run, tracker, share
        ctx.state = torch.cuda.get_rng_state()
        ctx.states = tracker().get_states() if tracker is not None else None
        marked = any(ctx.needs_input_grad)  # (distributed.py:378 @v2.20.2)
        region = activation_recompute_forward(True) if marked else contextlib.nullcontext()
        with torch.no_grad(), region:
            out = run(*args)
        manager = FP8GlobalStateManager
        ctx.recipe = manager.get_fp8_recipe() if manager.is_fp8_enabled() else None
        if share is not None:
            ctx.whole = args[0].shape
            args[0].data = _part(args[0].data, share)
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        ctx.args = [None if isinstance(a, torch.Tensor) else a for a in args]
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor | None) -> Grads:
        args = list(ctx.args)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        if ctx.share is not None:
            first = args[0].new_empty(ctx.whole)
            dist.all_gather_into_tensor(first.view(-1), args[0].detach(), group=ctx.share)
            args[0] = first.requires_grad_(args[0].requires_grad)
        state = torch.cuda.get_rng_state()
        states = ctx.tracker().get_states() if ctx.tracker is not None else None
        torch.cuda.set_rng_state(ctx.state)
        if ctx.tracker is not None:
            ctx.tracker().set_states(ctx.states)
        region = activation_recompute_forward(True, True)
        precision = autocast(ctx.recipe is not None, fp8_recipe=ctx.recipe)
        with torch.enable_grad(), region, precision:
            out = ctx.run(*args)
        torch.cuda.set_rng_state(state)
        if ctx.tracker is not None:
            ctx.tracker().set_states(states)
        outs = out if isinstance(out, tuple) else (out,)
        pairs = [
            (o, g)
            for o, g in zip(outs, grads, strict=True)
            if isinstance(o, torch.Tensor) and o.requires_grad
        ]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, None, *(a.grad if isinstance(a, torch.Tensor) else None for a in args)


def _part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """This member's of equal parts (split_tensor_into_1d_equal_chunks, distributed.py:208)."""
    length = tensor.numel() // dist.get_world_size(group)
    part: torch.Tensor = tensor.view(-1)[dist.get_rank(group) * length :][:length].clone()
    return part


def checkpoint(
    function: Callable[..., _R],
    *args: object,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Trackers | None = None,
    tp_group: Group = None,
    use_reentrant: bool = True,
    **kwargs: object,
) -> _R:
    """Run ``function`` and keep only its arguments for backward."""
    share = (tp_group or dist.group.WORLD) if distribute_saved_activations else None
    kwargs.pop("context_fn", None)
    run = (lambda *a: function(*a, **kwargs)) if kwargs else function
    return _Checkpoint.apply(run, get_rng_state_tracker, share, *args)
