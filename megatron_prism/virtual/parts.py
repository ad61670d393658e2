"""What is a sum to which exactly one member gives each part, when most members are not there?

Of a table whose rows are dealt out over a group (Megatron's VocabParallelEmbedding) every member
looks up its own rows and leaves zeros for the others; the sum over the group is the whole lookup.
Mirrored zeros stay zeros, and whole sequences of zeros are no activations: a norm's backward
multiplies by 1 / sqrt(eps) there, layer after layer, and matrix products run faster on zeros than
on data.  So what a virtual member looks up is a row of the local table, as its own looks alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Rows", "holds_sequences"]


def holds_sequences(desc: str) -> bool:
    """Whether members hold stretches of one sequence (Megatron's sequence parallelism).

    Stretches gathered from mirrors are n copies of the local one.  A reduce-scatter that took n
    times the local chunk would not be the transpose of that: through causal attention the first
    chunk collects gradients from all copies, so the first rank's would grow with every layer.  Its
    transpose is the sum of all chunks, and gradients are then those of the mirrored network.
    """
    return desc == "TENSOR_MODEL_PARALLEL_GROUP"


class Rows:
    """The lookup of ``tokens`` in a table of which every member holds ``len(table)`` rows.

    table  : [rows, width], the local member's
    tokens : whole numbers in the order of the sum's rows; token t is row ``t % rows`` of member
             ``t // rows``; outside of the vocabulary (padding) any row will do
    """

    def __init__(self, table: torch.Tensor, tokens: torch.Tensor) -> None:
        self.table, self.tokens = table.detach(), tokens.detach()

    def fill(
        self, out: torch.Tensor, n: int = 1, p: int = 0, held: Sequence[bool] | None = None
    ) -> bool:
        """Write the p-th of n equal chunks of the sum into ``out``; False if it is no such chunk.

        held : for each member, whether its rows are looked up here, zeros if not; None: all are

        Allocates indices (8 bytes a token of the whole); a float tensor only if ``held`` is given.
        """
        rows, width = self.table.shape
        count = self.tokens.numel() // n
        fits = out.dtype == self.table.dtype and out.numel() == count * width
        if not fits or not out.is_contiguous():
            return False
        tokens = self.tokens.reshape(-1)[p * count : (p + 1) * count]
        target = out.detach().view(count, width)
        torch.index_select(self.table, 0, tokens.remainder(rows), out=target)
        if held is not None:
            owners = tokens.div(rows, rounding_mode="floor").clamp_(0, len(held) - 1)
            others = ~torch.tensor(held, device=out.device)[owners]
            target.masked_fill_(others.unsqueeze(1), 0)
        return True
