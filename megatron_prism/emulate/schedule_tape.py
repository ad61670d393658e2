"""A tape of what Megatron's scheduler asks of one stage, and the tokens on it.

In : calls that the scheduler makes to what it takes for torch, torch.distributed and the model.
Out: a Program.  A ``Token`` stands for a tensor that stages exchange; it remembers the event that
made it, so that a receive learns which step its tensor was for, and a send which step made it.
Nothing here knows the order of anything: it writes down what it is told, in that order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Union

from megatron_prism.core.program import Builder, Program
from megatron_prism.runtime.recorder.fields import Fields, _nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["TapeGroup", "ModuleProxy", "ReplacedNames", "Tape", "Token"]

PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
WORLD = "default_pg"


Label = tuple[str, int, int]  # phase, microbatch, chunk
Tokens = Union["Token", "list[Token | None]", None]  # as Megatron hands them on
Issue = Callable[..., "Request"]
P2P = tuple[Issue, "Token", int, "TapeGroup"]


class TapeRow(Fields, total=False):
    """An event: what ``Builder.add`` is told besides its name."""

    stream: str
    phase: str
    microbatch: int
    chunk: int


class ReplacedNames:
    """Names of modules that are replaced for a while; ``with`` puts all of them back."""

    def __init__(self) -> None:
        self._old: list[tuple[object, str, object]] = []

    def __enter__(self) -> ReplacedNames:
        return self

    def __exit__(self, *error: object) -> None:
        while self._old:
            owner, name, value = self._old.pop()
            setattr(owner, name, value)

    def set(self, owner: object, **names: object) -> None:
        """Replace names of ``owner`` (those that this release has)."""
        for name, value in names.items():
            if hasattr(owner, name):
                self._old.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)


class ModuleProxy:
    """A module with some names of our own."""

    def __init__(self, module: object, **names: object) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class TapeGroup:
    """A process group of which only size, own position and name are asked."""

    def __init__(self, desc: str, rank: int, size: int) -> None:
        self.desc, self._rank, self._size = desc, rank, size

    def rank(self) -> int:
        """Own position."""
        return self._rank

    def size(self) -> int:
        """Members."""
        return self._size


class Token:
    """A tensor that is not there.

    row   : the receive it comes from, or None
    label : (phase, microbatch, chunk) of the step that made it or will use it
    sizes : shape, () if unknown
    tells : for a tensor that is itself a shape, which one; else None
    The rest is what Megatron's combined schedule keeps on tensors, and a loss's input, ``parent``.
    """

    __slots__ = (
        "grad",
        "label",
        "loss_func",
        "parent",
        "requires_grad",
        "row",
        "schedule_plan",
        "sizes",
        "tells",
    )
    device = "cuda"

    def __init__(
        self,
        label: Label = ("", -1, -1),
        sizes: Sequence[int] = (),
        tells: Sequence[int] | None = None,
    ) -> None:
        self.row: TapeRow | None = None
        self.label, self.sizes, self.tells = label, sizes, tells
        self.grad: Token | None = None
        self.requires_grad = True
        self.schedule_plan: Any = None
        self.loss_func: Any = None
        self.parent: Token | None = None

    def used_by(self, phase: str, microbatch: int, chunk: int) -> None:
        """The step that uses the tensor says what its receive was for."""
        if self.row is not None:
            self.row.update({"phase": phase, "microbatch": microbatch, "chunk": chunk})

    def size(self) -> Sequence[int]:
        """Shape."""
        return self.sizes

    def tolist(self) -> list[int]:
        """Of a received shape: the shape that all stages exchange."""
        return list(self.tells or ())

    def detach(self) -> Token:
        """A leaf of the same tensor."""
        return Token(self.label, self.sizes)

    def retain_grad(self) -> None:
        """Gradients are kept anyway."""

    def record_stream(self, stream: object) -> None:
        """No allocator listens."""


class Request:
    """The handle of a send or receive; a wait is an event."""

    __slots__ = ("handle", "tape")

    def __init__(self, tape: Tape, handle: int) -> None:
        self.tape, self.handle = tape, handle

    def wait(self) -> None:
        """The current stream waits."""
        self.tape.add("wait", handle=self.handle)


class Tape:
    """The events of one stage, in order.

    stage, pp : own position and size of the pipeline
    dtype     : of what is exchanged
    """

    def __init__(self, stage: int, pp: int, dtype: str) -> None:
        self.stage, self.pp, self.dtype = stage, pp, dtype
        self.rows: list[tuple[str, TapeRow]] = []
        self.stream = "main"
        self.synchronizing = True  # no no_sync() is open
        self.pipeline = TapeGroup(PIPELINE, stage, pp)
        self.everyone = TapeGroup(WORLD, stage, pp)
        self._batches = 0
        self._sites: dict[int, str] = {}

    def add(self, name: str, **fields: Unpack[TapeRow]) -> TapeRow:
        """Append an event on the current stream."""
        if self.stream != "main":
            fields.setdefault("stream", self.stream)
        self.rows.append((name, fields))
        return fields

    def program(self) -> Program:
        """The tape as a program of rank ``stage``."""
        builder = Builder()
        for name, row in self.rows:
            builder.add(name, **row)
        return builder.build(self.stage)

    # -- steps ------------------------------------------------------------------------------------
    def forward(self, inputs: Tokens, microbatch: int, chunk: int, shape: Sequence[int]) -> Tokens:
        """A forward; returns its output in the form of its input (a tensor or a list of one)."""
        for token in inputs if isinstance(inputs, list) else [inputs]:
            if token is not None:
                token.used_by("forward", microbatch, chunk)
        self.add("compute", phase="forward", microbatch=microbatch, chunk=chunk)
        output = Token(("forward", microbatch, chunk), shape)
        return [output] if isinstance(inputs, list) else output

    def backward(self, inputs: Tokens, outputs: Tokens, grads: Tokens) -> Tokens:
        """The backward of what made ``outputs``; returns gradients in the form of ``inputs``."""
        output = outputs[0] if isinstance(outputs, list) else outputs
        assert output is not None, "a backward of nothing"
        _, microbatch, chunk = output.label
        for token in grads if isinstance(grads, list) else [grads]:
            if token is not None:
                token.used_by("backward", microbatch, chunk)
        self.add("compute", phase="backward", microbatch=microbatch, chunk=chunk)
        self.own_grad_sync(chunk)
        label = ("backward", microbatch, chunk)
        if isinstance(inputs, list):
            return [None if token is None else Token(label, token.sizes) for token in inputs]
        return None if inputs is None else Token(label, inputs.sizes)

    # -- gradients and parameters -----------------------------------------------------------------
    def own_grad_sync(self, chunk: int) -> None:
        """Outside no_sync, a backward starts each bucket as it fills: DDP's own hooks."""
        if self.synchronizing:
            self.add("grad_sync", phase="sync", chunk=chunk, note="in backward")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards only accumulate."""
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = True

    # -- p2p --------------------------------------------------------------------------------------
    def isend(
        self, tensor: Token, dst: int, group: TapeGroup, at: int = 0, batch: int = -1
    ) -> Request:
        """torch.distributed.isend."""
        phase, microbatch, chunk = tensor.label
        row = self._pair("send", tensor, dst, group, at or sys._getframe(1).f_lineno, batch)
        row.update({"phase": phase, "microbatch": microbatch, "chunk": chunk})
        return Request(self, row["handle"])

    def irecv(
        self, tensor: Token, src: int, group: TapeGroup, at: int = 0, batch: int = -1
    ) -> Request:
        """torch.distributed.irecv."""
        row = self._pair("recv", tensor, src, group, at or sys._getframe(1).f_lineno, batch)
        tensor.row = row
        return Request(self, row["handle"])

    def _pair(
        self, name: str, tensor: Token, peer: int, group: TapeGroup, at: int, batch: int
    ) -> TapeRow:
        site = self._sites.get(at)
        if site is None:
            site = self._sites[at] = f"core/pipeline_parallel/p2p_communication.py:{at}"
        fields: TapeRow = {
            "group": group.desc,
            "peer": _nearest(peer - self.stage, self.pp),
            "handle": len(self.rows),
            "batch": batch,
            "site": site,
        }
        if tensor.sizes:
            count = 1
            for size in tensor.sizes:
                count *= size
            fields["dtype"] = self.dtype if tensor.tells is None else "int64"
            fields["num_in" if name == "send" else "num_out"] = count
            fields["shape"] = "x".join(map(str, tensor.sizes))
        return self.add(name, **fields)

    def p2p_op(self, op: Issue, tensor: Token, peer: int, group: TapeGroup) -> P2P:
        """torch.distributed.P2POp."""
        return op, tensor, peer, group

    def batch(self, ops: list[P2P]) -> list[Request]:
        """torch.distributed.batch_isend_irecv: one call to NCCL."""
        number, self._batches = self._batches, self._batches + 1
        at = sys._getframe(1).f_lineno
        return [op(tensor, peer, group, at, number) for op, tensor, peer, group in ops]

    def synchronize(self) -> None:
        """torch.cuda.synchronize."""
        self.add("host_wait", note="device")
