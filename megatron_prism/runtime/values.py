"""What tensors of ranks that do not exist hold: the policies behind every virtual answer.

``mirror`` (default)  every virtual member holds what the local member holds.  Sums are n times the
                      local tensor, gathers are copies; counts stay consistent (MoE), losses finite.
``noise``             as mirror for integers; floating-point answers carry independent noise of the
                      local tensor's own scale, so that reductions do not grow n-fold.
``recorded:PATH``     control values (integers, small tensors) and MoE routing come from a recording
                      made by ``--prism-record PATH``; what was not recorded is mirrored.

Received pipeline tensors have no local counterpart: they are noise under every policy, never zeros
(equal router logits send every token to the same experts, and matrix products run measurably faster
on zeros than on data), and where their tokens are known, vectors of these (``TokenVectors``).
Gradients among them carry the job's loss scale.  What comes round a ring has a counterpart, see
``Exchange``.  Noise comes from generators of our own: the job's random streams never move.

``PartialSums`` are contributions where mirrors of the local member would be wrong.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_prism.core.errors import UsageError
from megatron_prism.runtime.cuda_driver import Driver

COUNT = 1 << 16  # vectors; larger numbers of tokens begin anew
_STEP = 8  # elements from one window to the next: 16 B, so that rows begin where words do
_SCATTER = 40_503  # odd, so every number has its place; neighbours (mock data) lie far apart
_SEED = 20_100_913  # of all ranks: a token's vector is the same on each


class TokenVectors:
    """Makes a row for each (device, dtype, hidden size) once."""

    def __init__(self) -> None:
        self._rows: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}

    def fill(self, target: torch.Tensor, tokens: torch.Tensor) -> None:
        """Give each place of ``target`` [s, b, h] (contiguous) the vector of ``tokens`` [s, b]
        (integers, any).  Two kernels of the size of ``tokens``, one of ``target``'s.
        """
        hidden = target.shape[-1]
        places = tokens.reshape(-1).mul(_SCATTER).remainder_(COUNT)
        windows = self.row(target).as_strided((COUNT, hidden), (_STEP, 1))
        torch.index_select(windows, 0, places, out=target.detach().view(-1, hidden))

    def row(self, like: torch.Tensor) -> torch.Tensor:
        """The long row for tensors like this one, [COUNT * 8 + h]."""
        key = (like.device, like.dtype, like.shape[-1])
        if key not in self._rows:
            length = COUNT * _STEP + like.shape[-1]
            # on a GPU the driver's memory: torch's allocator would count it as the job's
            if like.device.type == "cuda":
                words = Driver().words(length * like.element_size(), like.device)
                row = words.view(like.dtype)
            else:
                row = torch.empty(length, dtype=like.dtype, device=like.device)
            generator = torch.Generator(device=like.device)
            self._rows[key] = row.normal_(generator=generator.manual_seed(_SEED))
        return self._rows[key]


POLICIES = ("mirror", "noise", "recorded")
ACTIVATION = "activation"
GRADIENT = "gradient"
_CHUNK = 1 << 20  # elements of noise added at a time: bounds the temporary to a few MiB


def rms(tensor: torch.Tensor) -> torch.Tensor:
    """Root mean square in fp32 (0-dim, same device), without a copy of the tensor."""
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32) / tensor.numel() ** 0.5


class Values:
    """Policy plus the private random generators that make it reproducible.

    loss_scale : answers the factor (one element, on the device) that the job multiplies its loss
                 by now, so that half-precision gradients do not vanish; None if it does not
    parts      : what virtual members give to the calls made now, if no mirrors; mostly None

    Raises UsageError for an unknown policy.
    """

    def __init__(self, policy: str = "mirror", seed: int = 1234, rank: int = 0) -> None:
        name, _, path = policy.partition(":")
        if name not in POLICIES:
            message = f"--prism-values {policy!r} is no policy"
            raise UsageError(message, fix=f"choose one of {', '.join(POLICIES[:2])}, recorded:PATH")
        if (name == "recorded") != bool(path):
            message = f"--prism-values {policy!r}: only 'recorded' takes a path, and it needs one"
            fix = "write --prism-values recorded:PATH with a path from --prism-record PATH"
            raise UsageError(message, fix=fix)
        self.policy = name
        self.path = path or None
        self.loss_scale: Callable[[], torch.Tensor] | None = None
        # whether calls of a group deliver now what real peers did: then nothing is made up for them
        self.replays: Callable[[object], bool] = lambda group: False
        self.parts: PartialSums | None = None
        self._seed = seed * 1_000_003 + rank
        self._generators: dict[torch.device, torch.Generator] = {}
        self._expected: dict[int, str] = {}
        self._noise: dict[int, weakref.ref[torch.Tensor]] = {}  # activations, by id
        self._vectors = TokenVectors()

    def generator(self, device: torch.device) -> torch.Generator:
        """Our own generator for ``device``; never the default one of the job."""
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device=device)
            generator.manual_seed(self._seed)
            self._generators[device] = generator
        return generator

    @contextlib.contextmanager
    def expecting(self, **kinds: torch.Tensor | None) -> Iterator[None]:
        """Declare what receives inside the block carry: ``expecting(activation=a, gradient=g)``."""
        kind_by_id = {id(tensor): kind for kind, tensor in kinds.items() if tensor is not None}
        self._expected.update(kind_by_id)
        try:
            yield
        finally:
            for key in kind_by_id:
                self._expected.pop(key, None)

    def mirrors(self, tensor: torch.Tensor) -> bool:
        """Whether peers hold payloads (floating point) like ``tensor``'s, not noise or integers."""
        return self.policy != "noise" and tensor.is_floating_point()

    @contextlib.contextmanager
    def of_parts(self, parts: PartialSums) -> Iterator[None]:
        """Sums and gathers inside the block are of ``parts``, under any policy."""
        self.parts = parts
        try:
            yield
        finally:
            self.parts = None

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a tensor that a virtual rank sent; shape ``[tokens, micro-batch, hidden]`` or any.

        Activations are N(0, 1), the scale a normalised residual stream has.  Gradients of a mean
        loss over t tokens are of the order 1 / (t * sqrt(hidden)), times the loss scale: one factor
        in fp32, since either alone may leave the range of fp16.
        """
        if tensor.is_meta or not tensor.numel():
            return
        target = tensor.detach()
        if not target.is_floating_point():
            target.zero_()
            return
        if target.element_size() == 1:  # float8 has no random numbers and needs no gradient scale
            wide = torch.empty_like(target, dtype=torch.float32)
            target.copy_(wide.normal_(generator=self.generator(target.device)))
            return
        target.normal_(generator=self.generator(target.device))
        kind = self._expected.get(id(tensor))
        # remembered, since the tokens that it belongs to may come to be known
        if kind == ACTIVATION:
            self._noise = {
                key: reference for key, reference in self._noise.items() if reference() is not None
            }
            self._noise[id(tensor)] = weakref.ref(tensor)
            self._vectors.row(target)  # made now, not in the middle of a forward
        if kind == GRADIENT:
            hidden = 1
            if target.dim():
                hidden = target.shape[-1]
            tokens = max(1, target.numel() // max(1, hidden))
            factor: float | torch.Tensor = 1.0 / (tokens * hidden**0.5)
            if self.loss_scale is not None:
                factor = self.loss_scale().reshape(()) * factor
            target.mul_(factor)

    def is_noise(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is an activation that ``receive`` has filled."""
        reference = self._noise.get(id(tensor))
        return reference is not None and reference() is tensor

    def overwritten(self, tensor: torch.Tensor) -> None:
        """``tensor`` has been given other values since ``receive`` has filled it."""
        self._noise.pop(id(tensor), None)

    def fill_vectors(self, tensor: torch.Tensor, tokens: torch.Tensor) -> None:
        """``tensor`` [s, b, h], which is noise, is of ``tokens`` [s, b]: give it their vectors."""
        self.overwritten(tensor)
        self._vectors.fill(tensor, tokens)

    def like(self, tensor: torch.Tensor, sent: torch.Tensor) -> None:
        """Fill a tensor that a virtual equal sent: what we sent it, or noise of the same scale.

        ``[parts, elements]`` or flat; under ``noise`` each part (keys and values, their gradients)
        keeps its own scale.
        """
        target, source = tensor.detach(), sent.detach()
        if self.policy != "noise" or not target.is_floating_point() or target.element_size() == 1:
            target.copy_(source)
            return
        target.normal_(generator=self.generator(target.device))
        # a flat tensor is one part
        if target.dim() <= 1:
            target.mul_(rms(source))
            return
        for part, part_sent in zip(target, source, strict=True):
            part.mul_(rms(part_sent))

    def add_peers(self, tensor: torch.Tensor, num_virtual: int) -> None:
        """``noise`` policy: add the sum of ``num_virtual`` independent tensors like this one.

        A tensor without a negative element stays so: sums of squares (gradient norm) and of
        exponentials (vocabulary-parallel loss) feed roots and logarithms.  Decided on the device.
        """
        if not tensor.numel():
            return
        # noise is added chunk by chunk of a flat view
        if not tensor.is_contiguous():
            contiguous = tensor.detach().contiguous()
            self.add_peers(contiguous, num_virtual)
            tensor.detach().copy_(contiguous)
            return
        flat = tensor.detach().view(-1)
        scale = rms(flat) * num_virtual**0.5
        positive = flat.min() >= 0
        generator = self.generator(flat.device)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            noise = torch.randn(
                part.shape, device=part.device, dtype=torch.float32, generator=generator
            )
            part.add_((noise * scale).to(part.dtype))
            part.copy_(torch.where(positive, part.abs(), part))


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
        # the send that belongs to it follows
        if source is None:
            self._waiting = (tensor, invented)
        if source is not None and invented and _alike(tensor, source):
            self._values.like(tensor, source)
        elif invented:
            self._values.receive(tensor)


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype


_NOTHING = -1e4  # far below logits, and half precision has it, too


def holds_sequences(desc: str) -> bool:
    """Whether members hold stretches of one sequence (Megatron's sequence parallelism).

    The transpose of n gathered copies of the local stretch is the sum of all chunks: with n times
    the local chunk the first rank's gradients would grow with every layer of causal attention.
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
    """Members that are not there add nothing to sums over a vocabulary that is dealt out: mirrored,
    no target could be likelier than 1 / n, and gradients would grow.

    What is gathered from them is so small that it is no maximum and its exponential is 0:
    Transformer Engine's loss gathers (maximum, sum of exponentials, logit of the target) of every
    token (pytorch/triton/cross_entropy.py @v2.9).  Zeros would be larger than a negative logit;
    infinities times 0 would be NaN.
    """

    once = True

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """See PartialSums."""
        for position, source in enumerate(mirrors):
            if position != source:
                slots[position].fill_(_NOTHING if shard.is_floating_point() else 0)


class BalancedExpertCounts(PartialSums):
    """The last dimension of what is gathered counts experts, in blocks, one for every rank.

    Virtual members send what they are sent, so that a rank alone gets as many tokens as it routes:
    mirrors of a rank that likes its own experts would like them, too.  Of several local ranks, each
    of whom some virtual ones mirror, this holds about.

    experts : of all ranks
    block   : of one rank
    ways    : neighbours in the group that share one block (expert tensor parallelism)
    """

    def __init__(self, experts: int, block: int, ways: int = 1) -> None:
        self.experts, self.block, self.ways = experts, block, ways

    def gathered(self, slots: torch.Tensor, shard: torch.Tensor, mirrors: Sequence[int]) -> None:
        """See PartialSums.  Payloads, whose last dimension is another one, stay mirrored.

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
    """The lookup of ``tokens`` in a table of which every member holds ``len(table)`` rows, zeros
    for the others: mirrored zeros stay zeros, where a norm's backward multiplies by 1 / sqrt(eps).
    What a virtual member looks up is a row of the local table.

    table  : [rows, width], the local member's
    tokens : whole numbers in the order of the sum's rows; token t is row ``t % rows`` of member
             ``t // rows``; outside of the vocabulary (padding) any row will do
    """

    def __init__(self, table: torch.Tensor, tokens: torch.Tensor) -> None:
        self.table, self.tokens = table.detach(), tokens.detach()

    def fill(
        self, out: torch.Tensor, n: int = 1, p: int = 0, held: Sequence[bool] | None = None
    ) -> bool:
        """See PartialSums.

        held : for each member, whether its rows are looked up here, zeros if not; None: all are

        Allocates indices (8 bytes a token of the whole); a float tensor only if ``held`` is given.
        """
        rows, width = self.table.shape
        count = self.tokens.numel() // n
        fits = out.dtype == self.table.dtype and out.numel() == count * width
        if not fits or not out.is_contiguous():
            return False
        # this member's chunk of the tokens
        tokens = self.tokens.reshape(-1)[p * count : (p + 1) * count]
        target = out.detach().view(count, width)
        torch.index_select(self.table, 0, tokens.remainder(rows), out=target)
        # each member holds one block of the vocabulary's rows
        if held is not None:
            owners = tokens.div(rows, rounding_mode="floor").clamp_(0, len(held) - 1)
            held_by_others = ~torch.tensor(held, device=out.device)[owners]
            target.masked_fill_(held_by_others.unsqueeze(1), 0)
        return True
