"""What does a virtual neighbour send, when every rank sends its neighbour the same kind of thing?

Round a ring of context-parallel ranks go keys, values and their gradients.  A receive there stands
beside a send of the same size (even ranks send first, odd ranks receive first: Transformer Engine's
flash_attn_p2p_communicate), and the neighbour holds what this rank holds.  So what it sends is what
we send it, and has the right scale, whatever it is: noise of unit scale would be a huge gradient.

Pipelines are no such groups: what comes is not of the kind of what goes.
"""

from __future__ import annotations

import torch

from megatron_prism.runtime.values import Values

__all__ = ["Exchange", "is_ring"]


def is_ring(desc: str) -> bool:
    """Whether sends and receives of this group are of one kind (CONTEXT_PARALLEL_GROUP, ..)."""
    return "CONTEXT_PARALLEL_GROUP" in desc


class Exchange:
    """Pairs the sends and receives of one group, one after the other, in either order."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._sent: torch.Tensor | None = None
        self._waiting: tuple[torch.Tensor, bool] | None = None

    def sent(self, tensor: torch.Tensor) -> None:
        """This rank sends ``tensor``; an odd rank's receive before it is answered now."""
        if self._waiting is None:
            self._sent = tensor
            return
        (target, invented), self._waiting = self._waiting, None
        if invented and _alike(target, tensor):
            self._values.like(target, tensor)

    def received(self, tensor: torch.Tensor, invented: bool) -> None:
        """This rank receives ``tensor``, from a virtual rank if ``invented``."""
        source, self._sent = self._sent, None
        if source is None:
            self._waiting = (tensor, invented)
        if source is not None and invented and _alike(tensor, source):
            self._values.like(tensor, source)
        elif invented:
            self._values.receive(tensor)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
