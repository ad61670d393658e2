"""What does a fault make of a running rank's call?  Other arguments, another call, another value.

In : the fault, the group, our name of the collective, the arguments of the c10d method.  Out: what
``Injector`` then calls.  Whatever cannot be done to a running rank is refused, by name.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import distributed as dist

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.hang.fault_plan import Fault
from megatron_prism.runtime.arguments import arguments

if TYPE_CHECKING:
    from megatron_prism.runtime.signatures import Args

__all__ = ["another_call", "another_tensor", "leave", "options", "spoil", "splits"]

_SIGNALS = {"sigkill": signal.SIGKILL, "segfault": signal.SIGSEGV, "sigstop": signal.SIGSTOP}
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
           "fp64": torch.float64, "int64": torch.int64, "int32": torch.int32}  # fmt: skip
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
           "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT}  # fmt: skip
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OTHERS = {  # our name -> c10d's method and the options that it takes
    "all_reduce": ("allreduce", dist.AllreduceOptions),
    "broadcast": ("broadcast", dist.BroadcastOptions),
    "barrier": ("barrier", dist.BarrierOptions),
}


def another_tensor(fault: Fault, op: str, args: Args) -> list[object]:
    """shape, dtype: the arguments with another tensor."""
    if op not in _IN_PLACE:
        raise UnsupportedError(
            f"{fault}: {op} has two tensors that must fit", fix=f"prism hang DIR fault={fault}"
        )
    old = args[0][0]
    if fault.kind == "dtype":
        name = fault.params.get("to", "bf16" if old.dtype == torch.float32 else "fp32")
        if name not in _DTYPES:
            raise UnsupportedError(f"{fault}: {name}", fix=f"to= one of {', '.join(_DTYPES)}")
        new = old.detach().to(_DTYPES[name])
    else:
        count = fault.number("n", old.numel() // 2 if old.numel() > 1 else old.numel() + 1)
        new = torch.zeros(count or 0, dtype=old.dtype, device=old.device)
    return [[new], *args[1:]]


def options(fault: Fault, given: dist.ReduceOptions, size: int) -> None:
    """root, reduce_op: changed in the options of the call."""
    if fault.kind == "root":
        given.rootRank = fault.number("to", (given.rootRank + 1) % size) or 0
        return
    default = "sum" if given.reduceOp == dist.ReduceOp(dist.ReduceOp.MAX) else "max"
    given.reduceOp = dist.ReduceOp(_REDUCE[fault.params.get("to", default)])


def splits(fault: Fault, args: Args, size: int, mine: int) -> list[object]:
    """An all-to-all whose rows go to another member than they should; as many as before."""
    if len(args) < 4 or isinstance(args[1], (list, tuple)) or size < 3:
        raise UnsupportedError(f"{fault}: that all-to-all has no splits among two others",
                               fix=f"another group=, or prism hang DIR fault={fault}")  # fmt: skip
    rows, moved = list(args[3]) or [len(args[1]) // size] * size, fault.number("rows", 1) or 0
    giver, taker = sorted((m for m in range(size) if m != mine), key=lambda m: -rows[m])[:2]
    rows[giver] -= moved
    rows[taker] += moved
    return [*args[:3], rows, *args[4:]]


def another_call(fault: Fault, op: str, args: Args) -> tuple[str, str, list[object]]:
    """(our name, c10d's method, its arguments) of the collective that is made instead."""
    name = fault.params.get("to", "all_reduce" if op == "broadcast" else "broadcast")
    if name not in _OTHERS:
        raise UnsupportedError(f"{fault}: a running rank cannot make that of {op}",
                               fix=f"to= one of {', '.join(_OTHERS)}")  # fmt: skip
    method, kind = _OTHERS[name]
    ins, outs = arguments(op, args)
    return name, method, [kind()] if name == "barrier" else [(ins or outs)[:1], kind()]


def spoil(fault: Fault, tensors: Sequence[torch.Tensor], what: str) -> None:
    """nan, inf, bitflip: the first number of each of ``tensors``, which are of ``what``."""
    values = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not values:  # Megatron's first calls broadcast whole numbers
        raise UnsupportedError(
            f"{fault}: {what} gives no fractions that could be {fault.kind}",
            fix="another call: op=all_reduce, phase=backward, nth=",
        )
    for tensor in values:
        first = (0,) * tensor.dim()
        if fault.kind != "bitflip":
            tensor.data[first] = float(fault.kind)
            continue
        bits = 8 * tensor.element_size()
        bit = fault.number("bit", bits - 2) or 0  # below the sign: the highest of the exponent
        if bit >= bits:
            raise UnsupportedError(f"{fault}: {what} has {bits} bits", fix=f"bit={bits - 2}")
        word = tensor.data[first].reshape(1).clone().view(_WORDS[tensor.element_size()])
        mask = 1 << bit if bit < bits - 1 else -(1 << bit)  # the sign of a signed word
        tensor.data[first] = (word ^ mask).view(tensor.dtype)[0]


def leave(fault: Fault) -> None | NoReturn:
    """The rank raises, ends or stands still."""
    if fault.kind in ("gil", "sigstop") or (fault.kind == "data_stall" and "s" not in fault.params):
        sys.stderr.write(
            f"prism: this process (pid {os.getpid()}) now stands still for good, as {fault} says: "
            "end it with kill -9; a verdict without waiting is prism hang DIR fault=…\n"
        )
        sys.stderr.flush()
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
    elif fault.kind == "exit":
        os._exit(fault.number("code", 1) or 0)
    elif fault.kind == "gil":
        ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter's lock while it waits
    elif fault.kind == "data_stall":
        time.sleep(fault.number("s", 1 << 30) or 0)
    elif fault.kind == "data_end":
        raise StopIteration("[prism-fault] the data loader ended")
    elif fault.kind == "oom":
        raise torch.OutOfMemoryError(f"[prism-fault] {fault}")
    else:
        raise RuntimeError(f"[prism-fault] {fault}")
    return None
