"""Types that the stand-ins share.

For annotations alone: modules import it where types are checked and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist
from torch.autograd.function import FunctionCtx

Device = torch.device | str | int | None
Group = dist.ProcessGroup | None  # None: no group, or the default one
Groups = Group | list[dist.ProcessGroup] | tuple[dist.ProcessGroup, ...]
Grads = tuple[torch.Tensor | None, ...]  # one for each argument of forward
Init = Callable[[torch.Tensor], object]  # fills a parameter in place


class AutogradContext(FunctionCtx):
    """What forward keeps for backward: tensors, and any attributes that a function sets."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...
        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...


class Weight(torch.nn.Parameter):
    """A parameter with what Transformer Engine and Megatron's DDP set on it."""

    main_grad: torch.Tensor
    grad_added_to_main_grad: bool
    skip_backward_post_hook: bool
    tensor_model_parallel: bool
    partition_dim: int
    partition_stride: int
    sequence_parallel: bool


class Handle(Protocol):
    """Of a call that was started."""

    def wait(self) -> object: ...


class Tracker(Protocol):
    """Megatron's tracker of random states."""

    def fork(self, name: str = ..., /) -> AbstractContextManager[None]: ...
    def get_states(self) -> dict[str, torch.Tensor]: ...
    def set_states(self, states: dict[str, torch.Tensor], /) -> None: ...


Trackers = Callable[[], Tracker]
