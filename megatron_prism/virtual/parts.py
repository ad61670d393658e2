"""What do members contribute that are not there, where mirrors of the local member would be wrong?

``Rows``: a sum to which exactly one member gives each part.  Of a table whose rows are dealt out
over a group (Megatron's VocabParallelEmbedding) every member looks up its own rows and leaves zeros
for the others; the sum over the group is the whole lookup.  Mirrored zeros stay zeros, and whole
sequences of zeros are no activations: a norm's backward multiplies by 1 / sqrt(eps) there, layer
after layer, and matrix products run faster on zeros than on data.  So what a virtual member looks
up is a row of the local table, as its own looks alike.

``Once``: sums over a vocabulary that is dealt out (Megatron's vocabulary-parallel loss).  Mirrored,
no target could be likelier than 1 / n, so the loss would never fall, and its gradients would grow.
The vocabulary of such a run is what the local members hold: virtual ones add nothing.

``Blocks``: counts of what goes to every expert.  Mirrored, a rank that likes its own experts would
be liked by everybody, and get more tokens than there are.  So virtual members send what they are
sent: every rank gets as many tokens as it routes, and the experts of all ranks are as the local
ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Blocks", "Once", "Parts", "Rows", "holds_sequences"]


def holds_sequences(desc: str) -> bool:
    """Whether members hold stretches of one sequence (Megatron's sequence parallelism).

    Stretches gathered from mirrors are n copies of the local one.  A reduce-scatter that took n
    times the local chunk would not be the transpose of that: through causal attention the first
    chunk collects gradients from all copies, so the first rank's would grow with every layer.  Its
    transpose is the sum of all chunks, and gradients are then those of the mirrored network.
    """
    return desc == "TENSOR_MODEL_PARALLEL_GROUP"


class Parts:
    """What calls made inside ``Values.of_parts`` are answered with; by itself it changes nothing.

    once : whether sums are those of the local members alone
    """

    once = False

    def fill(
        self, out: torch.Tensor, n: int = 1, p: int = 0, held: Sequence[bool] | None = None
    ) -> bool:
        """Write the p-th of n equal chunks of a sum into ``out``; False if it is no such chunk."""
        return False

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """Change in place what was gathered from mirrors.

        slots   : [n, k], one slot of every member
        shard   : what the local member gave, in its own shape
        mirrors : for each member the member whose slot it holds a copy of; its own place if local
        """


class Once(Parts):
    """Members that are not there add nothing to sums, and gather nothing but zeros."""

    once = True

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """See Parts."""
        for position, source in enumerate(mirrors):
            if position != source:
                slots[position].zero_()


class Blocks(Parts):
    """The last dimension of what is gathered counts experts, in blocks, one for every rank.

    experts : of all ranks
    block   : of one rank
    ways    : neighbours in the group that share one block (expert tensor parallelism)
    """

    def __init__(self, experts: int, block: int, ways: int = 1) -> None:
        self.experts, self.block, self.ways = experts, block, ways

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """See Parts.  Payloads, whose last dimension is another one, stay mirrored."""
        if not shard.dim() or shard.shape[-1] != self.experts:
            return
        for position, source in enumerate(mirrors):
            blocks = source // self.ways - position // self.ways
            if blocks:
                rows = slots[position].view(-1, self.experts)
                rows.copy_(rows.roll(blocks * self.block, -1))


class Rows(Parts):
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
        """See Parts.

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
