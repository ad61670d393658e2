"""Contributions of absent members where mirrors of the local member would be wrong.

``PartialLookup``: a sum to which exactly one member gives each part.  Of a table whose rows are
dealt out over a group (Megatron's VocabParallelEmbedding) every member looks up its own rows and
leaves zeros for the others; the sum over the group is the whole lookup.  Mirrored zeros stay zeros,
and whole sequences of zeros are no activations: a norm's backward multiplies by 1 / sqrt(eps)
there, layer after layer, and matrix products run faster on zeros than on data.  So what a virtual
member looks up is a row of the local table, as its own looks alike.

``LocalVocabularySum``: sums over a vocabulary that is dealt out (Megatron's
vocabulary-parallel loss).  Mirrored,
no target could be likelier than 1 / n, so the loss would never fall, and its gradients would grow.
The vocabulary of such a run is what the local members hold: virtual ones add nothing.

``BalancedExpertCounts``: counts of what goes to every expert.  Mirrored, a rank that likes its own
experts would be liked by everybody, and get more tokens than there are.  So virtual members send
what they are sent: a rank alone gets as many tokens as it routes, and the experts of all ranks are
as the local ones.  Of several local ranks, each of whom some virtual ones mirror, this holds about.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "BalancedExpertCounts",
    "LocalVocabularySum",
    "PartialSums",
    "PartialLookup",
    "holds_sequences",
]

_NOTHING = -1e4  # far below logits, and half precision has it, too


def holds_sequences(desc: str) -> bool:
    """Whether members hold stretches of one sequence (Megatron's sequence parallelism).

    Stretches gathered from mirrors are n copies of the local one.  A reduce-scatter that took n
    times the local chunk would not be the transpose of that: through causal attention the first
    chunk collects gradients from all copies, so the first rank's would grow with every layer.  Its
    transpose is the sum of all chunks, and gradients are then those of the mirrored network.
    """
    return desc == "TENSOR_MODEL_PARALLEL_GROUP"


class PartialSums:
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


class LocalVocabularySum(PartialSums):
    """Members that are not there add nothing to sums.

    What is gathered from them is so small that it is no maximum and its exponential is 0:
    Transformer Engine's loss gathers (maximum, sum of exponentials, logit of the target) of every
    token, and takes the largest of the logits (pytorch/triton/cross_entropy.py @v2.9).  Zeros would
    be larger than a negative logit; infinities times 0 would be NaN.
    """

    once = True

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """See Parts."""
        for position, source in enumerate(mirrors):
            if position != source:
                slots[position].fill_(_NOTHING if shard.is_floating_point() else 0)


class BalancedExpertCounts(PartialSums):
    """The last dimension of what is gathered counts experts, in blocks, one for every rank.

    experts : of all ranks
    block   : of one rank
    ways    : neighbours in the group that share one block (expert tensor parallelism)
    """

    def __init__(self, experts: int, block: int, ways: int = 1) -> None:
        self.experts, self.block, self.ways = experts, block, ways

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """See Parts.  Payloads, whose last dimension is another one, stay mirrored.

        Three kernels if one member is local, however large the group: every layer asks for this,
        and the host's time counts.  Allocates twice the shard.
        """
        if not shard.dim() or shard.shape[-1] != self.experts:
            return
        for source in set(mirrors):
            rows, own = slots[source].view(-1, self.experts), source // self.ways
            twice = torch.cat((rows, rows), -1)  # windows[i]: rows seen from i ranks further on
            size, strides = (len(slots) // self.ways, *rows.shape), (self.block, *twice.stride())
            windows = twice.as_strided(size, strides)
            if len(set(mirrors)) == 1:
                every = slots.view(len(windows), self.ways, *rows.shape)
                every[own:].copy_(windows[: len(windows) - own, None])
                every[:own].copy_(windows[len(windows) - own :, None])
                return
            for position, mirrored in enumerate(mirrors):
                if mirrored == source and position != source:
                    slots[position].view_as(rows).copy_(windows[position // self.ways - own])


class PartialLookup(PartialSums):
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
