"""How does a fault happen to a running rank?  The calls of its plan are changed, or not made.

In : the faults of this rank.  ``record`` makes every call, as the recorder does; the one that a
Finder picks goes wrong and says so on stderr (``[prism-fault] fired …``).  The ranks of a plan that
are virtual are ``strict``'s affair.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import distributed as dist

from megatron_prism.errors import UnsupportedError, UsageError
from megatron_prism.fault_plan import FIX, Call, Fault, Finder
from megatron_prism.virtual.backend import arguments
from megatron_prism.virtual.work import Done

__all__ = ["Injector"]

_SIGNALS = {"sigkill": signal.SIGKILL, "segfault": signal.SIGSEGV, "sigstop": signal.SIGSTOP}
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
           "fp64": torch.float64, "int64": torch.int64, "int32": torch.int32}  # fmt: skip
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
           "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT}  # fmt: skip
_ONLY_PROGRAMS = ("swap", "splits", "group", "op", "gpu_error")

Answer = Callable[..., Any]


class Injector:
    """Makes ``faults`` happen on this rank.  ``live``: the tracker of live bytes (meta) or None."""

    def __init__(self, faults: Sequence[Fault], rank: int, tier: str, live: Any, dry: bool) -> None:
        self.rank, self.tier, self.live, self.dry = rank, tier, live, dry
        self.finders = [Finder(fault) for fault in faults]
        self.fired: Counter[str] = Counter()
        self.sequence: Counter[tuple[str, bool]] = Counter()
        for fault in faults:
            self._possible(fault)

    def _possible(self, fault: Fault) -> None:
        if fault.kind in _ONLY_PROGRAMS:
            raise UnsupportedError(
                f"{fault}: a running rank cannot be made to do that",
                fix=f"prism hang DIR fault={fault}",
            )
        if fault.kind == "gpu_hang" and self.tier != "cuda":
            raise UnsupportedError(f"{fault} needs a CUDA device", fix="--prism-tier cuda")
        if fault.kind == "oom" and self.live is None:
            raise UnsupportedError(f"{fault} is for tier meta", fix="--prism-tier meta")

    def record(
        self, group: Any, op: str, answer: Answer, args: Sequence[Any], kwargs: Any, call: Call
    ) -> Any:
        """Make the call, or what the plan makes of it."""
        pair = op in ("send", "recv")
        self.sequence[group.desc, pair] += 1
        for finder in self.finders if call.iteration else ():  # nothing before the first step
            fault = finder.fault
            if fault.kind == "oom":
                hit = self.live.now > (fault.number("at_bytes") or 0) and not self.fired[str(fault)]
            elif fault.kind == "skip_microbatch":
                hit = call.microbatch == int(fault.select.get("mb", 0)) and finder.matches(call)
            else:
                hit = finder.hit(call)
            if hit:
                self._say(fault, call, self.sequence[group.desc, pair])
                if not self.dry:
                    return self._fire(fault, group, op, answer, list(args), kwargs)
        return answer(group, *args, **kwargs)

    def _say(self, fault: Fault, call: Call, seq: int) -> None:
        self.fired[str(fault)] += 1
        if self.fired[str(fault)] > 1:
            return
        what = "would fire" if self.dry else "fired"
        at = f" mb={call.microbatch}" if call.microbatch >= 0 else ""
        sys.stderr.write(
            f"[prism-fault] {what} id={fault} kind={fault.kind} rank={self.rank} "
            f"iter={call.iteration}{at} op={call.op} group={call.group} seq={seq} "
            f"site={call.site}\n"
        )
        sys.stderr.flush()

    def check_fired(self) -> None:
        """UsageError for a fault that never happened."""
        for finder in self.finders:
            if not self.fired[str(finder.fault)]:
                raise UsageError(f"{finder.fault} never fired on rank {self.rank}", fix=FIX)

    # -- what happens -----------------------------------------------------------------------------
    def _fire(
        self, fault: Fault, group: Any, op: str, answer: Answer, args: list[Any], kwargs: Any
    ) -> Any:
        kind = fault.kind
        ins, outs = arguments(op, args)
        if kind in ("drop", "p2p_lost", "skip_microbatch"):
            return Done(outs)
        if kind in ("shape", "dtype"):
            return self._other_tensor(fault, group, op, answer, args, kwargs)
        if kind in ("root", "reduce_op"):
            _other_options(fault, args[-1], group.size())
        elif kind == "p2p_dup":
            answer(group, *args, **kwargs)
        elif kind == "p2p_swap":
            args[1] = (2 * group.rank() - args[1]) % group.size()
        elif kind in ("nan", "inf"):
            values = [t for t in ins if t.is_floating_point() and t.numel()]
            if not values:  # Megatron's first calls broadcast whole numbers
                raise UnsupportedError(
                    f"{fault}: {op} of {group.desc} gives no fractions that could be {kind}",
                    fix="another call: op=all_reduce, phase=backward, nth=",
                )
            for tensor in values:
                tensor.detach().view(-1)[0] = float(kind)
        elif kind == "delay":
            time.sleep((fault.number("ms", 1000) or 0) / 1000)
        elif kind == "gpu_hang":
            torch.cuda._sleep(1 << 62)
        else:
            _leave(fault)
        return answer(group, *args, **kwargs)

    def _other_tensor(
        self, fault: Fault, group: Any, op: str, answer: Answer, args: list[Any], kwargs: Any
    ) -> Any:
        if op not in _IN_PLACE:
            raise UnsupportedError(
                f"{fault}: {op} has two tensors that must fit", fix=f"prism hang DIR fault={fault}"
            )
        old = args[0][0]
        if fault.kind == "dtype":
            fallback = "bf16" if old.dtype == torch.float32 else "fp32"
            name = fault.params.get("to", fallback)
            if name not in _DTYPES:
                raise UnsupportedError(f"{fault}: {name}", fix=f"to= one of {', '.join(_DTYPES)}")
            new = old.detach().to(_DTYPES[name])
        else:
            count = fault.number("n", old.numel() // 2 if old.numel() > 1 else old.numel() + 1)
            new = torch.zeros(count or 0, dtype=old.dtype, device=old.device)
        return answer(group, [new], *args[1:], **kwargs)


def _other_options(fault: Fault, options: Any, size: int) -> None:
    if fault.kind == "root":
        options.rootRank = fault.number("to", (options.rootRank + 1) % size)
        return
    default = "sum" if options.reduceOp == dist.ReduceOp.MAX else "max"
    options.reduceOp = _REDUCE[fault.params.get("to", default)]


def _leave(fault: Fault) -> None | NoReturn:
    """The rank raises, ends or stands still."""
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
