"""One call of attention, and what it computes on tier cpu: in fp32, row by row.

Knows no kernel: cuDNN's and flash-attn's calls are both an ``Attention``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor | None, Tensor | None]  # what goes in, and where its gradient goes


@dataclass(frozen=True)
class Attention:
    """Who sees whom, and the tensors.

    layout  : of queries, keys and values; ``form``: sbhd, bshd or thd, of the queries
    lengths : cumulated, of queries and of keys
    tensors : q, k, v; of backward also the output and its gradient
    rest    : what else the kernel was given
    """

    layout: str
    mask: str
    bias: str
    scale: float
    dropout: float
    window: tuple[int, int]
    lengths: Sequence[Tensor]
    tensors: tuple[Tensor, ...]
    rest: tuple[Any, ...] = ()

    @property
    def biased(self) -> bool:
        return self.bias in ("pre_scale_bias", "post_scale_bias")

    @property
    def form(self) -> str:
        return self.layout.split("_")[0].translate(str.maketrans("", "", "23"))

    @property
    def size(self) -> tuple[int, int, int]:
        """(sequences, rows of one's queries, of its keys); packed ones are one long sequence."""
        q, k = self.tensors[:2]
        if self.form == "thd":
            return 1, q.shape[0], k.shape[0]
        s, b = self.form.index("s"), self.form.index("b")
        return q.shape[b], q.shape[s], k.shape[s]

    def _sequences(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Views [b, s, h, …] of tensors of queries and, second and third, of keys and values, for
        all sequences or for each packed one."""
        if self.form != "thd":
            yield [t if self.form == "bshd" else t.transpose(0, 1) for t in tensors]
            return
        bounds = [of.tolist() for of in self.lengths]
        for i in range(len(bounds[0]) - 1):
            rows, columns = (slice(of[i], of[i + 1]) for of in bounds)
            yield [t[columns if n in (1, 2) else rows][None] for n, t in enumerate(tensors)]

    def _hidden(self, rows: int, columns: int) -> Tensor:
        """bool [b or 1, 1, rows, columns]: which keys a query does not see."""
        distance = torch.arange(columns) - torch.arange(rows)[:, None]
        if "bottom_right" in self.mask:
            distance = distance - (columns - rows)
        left, right = self.window
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if "causal" in self.mask:
            hidden |= distance > 0
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        hidden = hidden[None, None]
        if "padding" in self.mask and self.form != "thd":
            there = (self.lengths[1][1:] - self.lengths[1][:-1]).view(-1, 1, 1, 1)
            hidden = hidden | (torch.arange(columns) >= there)
        return hidden

    def _logits(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        scores = _heads(q, q.shape[2]) @ _heads(k, q.shape[2]).transpose(-1, -2) * self.scale
        scores = scores if bias is None else scores + bias.float()
        return scores.masked_fill(self._hidden(q.shape[1], k.shape[1]), float("-inf"))

    def _kept(self, shape: Sequence[int], state: Tensor | None) -> Tensor | float:
        """What dropout leaves, the same in forward and backward."""
        if not self.dropout or state is None:
            return 1.0
        generator = torch.Generator().manual_seed(int(state.view(-1)[0]))
        return (torch.rand(tuple(shape), generator=generator) >= self.dropout) / (1 - self.dropout)

    def _by_rows(self, statistics: Tensor) -> Tensor:
        """View of [b, h, s, 1], or of [t, h, 1], as the rows of the queries lie."""
        if self.form == "thd":
            return statistics
        b, h, s = statistics.shape[:3]
        order = (2, 0, 1, 3) if self.form == "sbhd" else (0, 2, 1, 3)
        return statistics.view(b, h, s, 1).permute(order)

    def forward(
        self, out: Tensor, kept: Sequence[Tensor], state: Tensor, bias: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write ``out``, ``kept`` (log of the sum, and largest, of a row's scores) and ``state``.

        sink : one more logit a head, which takes its share and brings no value
        """
        state.random_(1 << 31)
        q, k, v = self.tensors[:3]
        rows = [self._by_rows(t) for t in kept]
        for q1, k1, v1, out1, *rows1 in self._sequences(q, k, v, out, *rows):
            scores = self._logits(q1, k1, bias)
            largest = scores.amax(-1, keepdim=True)
            if sink is not None:
                more = sink.float().expand(len(scores), -1, q1.shape[1], 1)
                scores = torch.cat([scores, more], -1)
            found = scores.logsumexp(-1, keepdim=True)
            shares = (scores - found).exp().nan_to_num()[..., : k1.shape[1]]
            shares = shares * self._kept(shares.shape, state)
            out1.copy_((shares @ _heads(v1, q1.shape[2])).transpose(1, 2))
            for to, of in zip(rows1, (found, largest), strict=False):
                to.copy_(of.transpose(1, 2))

    def backward(
        self, grads: Sequence[Tensor], statistics: Tensor, state: Tensor | None,
        bias: Pair = (None, None), sink: Pair = (None, None),
    ) -> None:  # fmt: skip
        """Write ``grads`` of q, k, v, and those of the bias and the sink."""
        q, _, _, out, grad = self.tensors
        for to in (*grads, bias[1], sink[1]):
            if to is not None:
                to.zero_()
        together = (*self.tensors, grads[0], self._by_rows(statistics))
        keys = self._sequences(q, grads[1], grads[2])
        for (q1, k1, v1, out1, grad1, dq1, lse), (_, dk1, dv1) in zip(
            self._sequences(*together), keys, strict=True
        ):
            heads, groups = q1.shape[2], k1.shape[2]
            lse = lse.transpose(1, 2)
            shares = (self._logits(q1, k1, bias[0]) - lse).exp().nan_to_num()
            keep, dout = self._kept(shares.shape, state), _heads(grad1, heads)
            delta = (dout * _heads(out1, heads)).sum(-1, keepdim=True)
            dscores = shares * (dout @ _heads(v1, heads).transpose(-1, -2) * keep - delta)
            dq1.copy_((dscores @ _heads(k1, heads) * self.scale).transpose(1, 2))
            dk = dscores.transpose(-1, -2) @ _heads(q1, heads) * self.scale
            dv = (shares * keep).transpose(-1, -2) @ dout
            for to, of in ((dk1, dk), (dv1, dv)):
                to.copy_(of.unflatten(1, (groups, -1)).sum(2).transpose(1, 2))
            if bias[0] is not None and bias[1] is not None:
                bias[1].add_(dscores.sum_to_size(bias[0].shape))
            if sink[0] is not None and sink[1] is not None:
                sink[1].sub_(((sink[0].float() - lse).exp() * delta).sum((0, 2), keepdim=True))


def _heads(t: Tensor, heads: int) -> Tensor:
    """[b, heads, s, d] in fp32; groups of heads share keys and values."""
    return t.transpose(1, 2).float().repeat_interleave(heads // t.shape[2], 1)
