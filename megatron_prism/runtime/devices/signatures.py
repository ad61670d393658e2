"""Types that the stand-ins share.

For annotations alone: modules import it where types are checked and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.autograd.function import FunctionCtx

Group = dist.ProcessGroup | None  # None: no group, or the default one
Grads = tuple[torch.Tensor | None, ...]  # one for each argument of forward


class AutogradContext(FunctionCtx):
    """What forward keeps for backward: tensors, and any attributes that a function sets."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...
        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
