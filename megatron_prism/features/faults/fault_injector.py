"""Make faults happen to a running rank: change the calls of its plan, or leave them out.

In : the faults of this rank.  ``record`` makes every call, as the recorder does; the one that a
Finder picks goes wrong and says so on stderr (``[prism-fault] fired …``) and in the file of
``--prism-fault-truth``.  The ranks of a plan that are virtual are ``call_guard``'s affair.
``survived`` are those that a real job would not have survived.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import distributed as dist

from megatron_prism.core.call_selector import CallSelector
from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.fault_plan import (
    CHANGES,
    FIX,
    VALUES,
    Fault,
    FaultMatcher,
    changed_call,
    truth_line,
)
from megatron_prism.core.groups import named_group
from megatron_prism.core.ops import CallLabel, Op
from megatron_prism.emulate import exit_status
from megatron_prism.runtime.call_check import nccl_lets_through
from megatron_prism.runtime.process_group import CompletedWork, arguments
from megatron_prism.runtime.recorder.recorder import details

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

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


def arguments_of(
    fault: Fault, healthy: Op, wanted: Op, args: Args, group: PrismGroup
) -> list[object]:
    """The arguments of ``wanted``, which is made instead of ``healthy``."""
    kind = fault.kind
    if kind in ("shape", "dtype"):
        what, old = f"{fault}: {healthy.name} has two tensors that must fit", args[0][0]
        if healthy.name not in _IN_PLACE:
            raise UnsupportedError(what, fix=f"prism hang DIR fault={fault}")
        if kind == "shape":
            count = max(wanted.num_in, wanted.num_out)
            return [[torch.zeros(count, dtype=old.dtype, device=old.device)], *args[1:]]
        if wanted.dtype not in _DTYPES:
            known = f"to= one of {', '.join(_DTYPES)}"
            raise UnsupportedError(f"{fault}: {wanted.dtype}", fix=known)
        return [[old.detach().to(_DTYPES[wanted.dtype])], *args[1:]]
    if kind == "root":
        args[-1].rootRank = wanted.root
    elif kind == "reduce_op":
        args[-1].reduceOp = dist.ReduceOp(_REDUCE[wanted.reduce])
    elif kind == "splits":
        return [*args[:3], list(wanted.splits[0] if wanted.splits else ()), *args[4:]]
    elif kind == "p2p_swap":
        return [args[0], (group.rank() + wanted.peer) % group.size(), *args[2:]]
    elif wanted.name not in _OTHERS:
        raise UnsupportedError(f"{fault}: a running rank cannot make that of {healthy.name}",
                               fix=f"to= one of {', '.join(_OTHERS)}")  # fmt: skip
    else:
        ins, outs = arguments(healthy.name, args)
        options = _OTHERS[wanted.name][1]()
        return [options] if wanted.name == "barrier" else [(ins or outs)[:1], options]
    return list(args)


def spoil_tensors(fault: Fault, tensors: Sequence[torch.Tensor], what: str) -> None:
    """nan, inf, bitflip: the first number of each of ``tensors``, which are of ``what``."""
    values = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not values:  # Megatron's first calls broadcast whole numbers
        raise UnsupportedError(
            f"{fault}: {what} gives no fractions that could be {fault.kind}",
            fix=f"another call: {fault.kind}@rank={fault.select.rank},phase=backward",
        )
    for tensor in values:
        first = (0,) * tensor.dim()
        if fault.kind != "bitflip":
            tensor.data[first] = float(fault.kind)
            continue
        bits = 8 * tensor.element_size()
        bit = fault.number("bit", bits - 2)  # below the sign: the highest of the exponent
        if bit >= bits:
            raise UnsupportedError(f"{fault}: {what} has {bits} bits", fix=f"bit={bits - 2}")
        word = tensor.data[first].reshape(1).clone().view(_WORDS[tensor.element_size()])
        mask = 1 << bit if bit < bits - 1 else -(1 << bit)  # the sign of a signed word
        tensor.data[first] = (word ^ mask).view(tensor.dtype)[0]


def leave(fault: Fault) -> None | NoReturn:
    """The rank raises, ends or stands still."""
    if fault.kind in ("gil", "sigstop") or (fault.kind == "data_stall" and "s" not in fault.params):
        print(f"prism: this process (pid {os.getpid()}) now hangs for good, as {fault} says: end "
              "it with kill -9; a verdict without waiting is prism hang DIR fault=…",
              file=sys.stderr, flush=True)  # fmt: skip
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
    elif fault.kind == "exit":
        exit_status.leave(fault.number("code", 1))
    elif fault.kind == "gil":
        ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter's lock while it waits
    elif fault.kind == "data_stall":
        time.sleep(fault.number("s", 1 << 30))
    elif fault.kind == "data_end":
        raise StopIteration("[prism-fault] the data loader ended")
    elif fault.kind == "oom":
        raise torch.OutOfMemoryError(f"[prism-fault] {fault}")
    else:
        raise RuntimeError(f"[prism-fault] {fault}")
    return None


_GOES_ON = (*VALUES, "delay", "slow", "data_stall", "env")  # wrong, or late, and no rank waits
_LOST = ("drop", "p2p_lost", "skip_microbatch")

Model = torch.nn.Module | Sequence[torch.nn.Module]
Make = Callable[[str, "Answer"], "Answer"]  # of a collective and its answer


class Injector:
    """Makes ``features.hang.planting`` happen on this rank.

    live  : the tracker of live bytes (meta) or None;  dry: say it, do nothing
    truth : file that gets a line for every fault that fires, before it does
    """

    def __init__(
        self, faults: Sequence[Fault], rank: int, tier: str, live: LiveBytes | None, dry: bool,
        truth: Path | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.tier, self.live, self.dry, self.truth = rank, tier, live, dry, truth
        self.fired: Counter[str] = Counter()
        self.first: dict[str, int] = {}  # fault -> the train step in which it fired
        self.survived: dict[str, str] = {}  # fault -> the call after which this rank went on
        self.sequence: Counter[tuple[str, bool]] = Counter()
        self.groups: dict[str, PrismGroup] = {}  # description -> this rank's, once it was used
        self.steps = 0  # train steps that began
        self._since = time.perf_counter()  # the last call came back
        self._watched = False
        self._held: dict[str, tuple[Answer, PrismGroup, Args, Kwargs]] = {}
        for fault in faults:
            self._possible(fault)
        of_tensors = [f for f in faults if f.params.get("tensor") in ("loss", "act")]
        self._tensors = [FaultMatcher(f) for f in of_tensors]
        calls = [f for f in faults if f not in of_tensors and f.kind not in ("slow", "env")]
        self.finders = [(FaultMatcher(f), FaultMatcher(_partner(f)) if f.kind == "swap" else None)
                        for f in calls]  # fmt: skip
        self._slow = [FaultMatcher(f) for f in faults if f.kind == "slow"]
        self.faults = tuple(faults)
        for fault in (f for f in faults if f.kind == "env"):
            for name, value in fault.params.items():
                self._say(fault, CallLabel(f"{name}={value}", ""), 0)
                if not dry:
                    os.environ[name] = value

    def _possible(self, fault: Fault) -> None:
        of_bytes = fault.kind == "oom" and "at_bytes" in fault.params
        for broken, what, fix in (
            (fault.kind in ("gpu_error", "nic"), "a running rank cannot be made to do that",
             f"prism hang DIR fault={fault}"),
            (fault.kind == "gpu_hang" and self.tier != "cuda", "it needs a CUDA device",
             "--prism-tier cuda"),
            (of_bytes and self.live is None, "it is for tier meta", "--prism-tier meta"),
            (fault.kind in VALUES and self.tier == "meta",
             "tier meta has shapes only, and no values", "--prism-tier cpu"),
        ):  # fmt: skip
            if broken:
                raise UnsupportedError(f"{fault}: {what}", fix=fix)

    # -- what the guard says ----------------------------------------------------------------------
    def begin(self, model: Model | None, labels: Callable[[], CallLabel]) -> None:
        """A train step starts.  ``labels``: where the rank is, while its model runs."""
        self.steps += 1
        self._since = time.perf_counter()
        if model is None or self._watched:
            return
        self._watched = True
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        for finder in self._tensors:
            chosen = [c for c in chunks if finder.fault.params["tensor"] == "act" or _last(c)]
            if not chosen:
                raise UsageError(f"{finder.fault}: rank {self.rank} has no loss",
                                 fix="a rank of the last stage, or tensor=act")  # fmt: skip
            for chunk in chosen:
                chunk.register_forward_hook(partial(self._spoil, finder, labels))

    def _spoil(
        self, finder: FaultMatcher, labels: Callable[[], CallLabel],
        module: torch.nn.Module, inputs: object, output: object,
    ) -> None:  # fmt: skip
        call = labels()
        if finder.hit(call):
            self._say(finder.fault, call, finder.seen)
            if not self.dry:
                outputs = output if isinstance(output, (list, tuple)) else [output]
                tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
                spoil_tensors(finder.fault, tensors, "the model's output")

    def record(
        self, group: PrismGroup, op: str, make: Make, answer: Answer, args: Args, kwargs: Kwargs,
        call: CallLabel,
    ) -> dist.Work | None:  # fmt: skip
        """Make the call, or what the plan makes of it."""
        pair = op in ("send", "recv")
        self.sequence[group.desc, pair] += 1
        self.groups.setdefault(group.desc, group)
        if not call.iteration:  # nothing before the first step
            return make(op, answer)(group, *args, **kwargs)
        self._stretch(call)
        try:
            for finder, partner in self.finders:
                if self._hit(finder, partner, call):
                    self._say(finder.fault, call, self.sequence[group.desc, pair], group)
                    if not self.dry:
                        how = op, make, answer, list(args), dict(kwargs)
                        return self._fire(finder.fault, group, *how)
            return make(op, answer)(group, *args, **kwargs)
        finally:
            self._since = time.perf_counter()

    def _hit(self, finder: FaultMatcher, partner: FaultMatcher | None, call: CallLabel) -> bool:
        fault = finder.fault
        if self.live is not None and fault.kind == "oom" and "at_bytes" in fault.params:
            return self.live.now > fault.number("at_bytes") and not self.fired[str(fault)]
        if fault.kind == "skip_microbatch":
            return call.microbatch == (fault.select.microbatch or 0) and finder.matches(call)
        other = partner is not None and partner.hit(call)
        return finder.hit(call) or other

    def _stretch(self, call: CallLabel) -> None:
        """Slow: what was computed since the last call takes ``factor`` times as long."""
        for finder in self._slow:
            if finder.matches(call):
                self._say(finder.fault, call, 0)
                if not self.dry:
                    if self.tier == "cuda":
                        torch.cuda.synchronize()
                    took = time.perf_counter() - self._since
                    time.sleep(took * (finder.fault.factor("factor", 2) - 1))

    def _say(
        self, fault: Fault, call: CallLabel, seq: int, group: PrismGroup | None = None
    ) -> None:
        self.fired[str(fault)] += 1
        if self.fired[str(fault)] > 1:
            return
        self.first[str(fault)] = call.iteration
        what = "would fire" if self.dry else "fired"
        at = f" mb={call.microbatch}" if call.microbatch >= 0 else ""
        print(f"[prism-fault] {what} id={fault} kind={fault.kind} rank={self.rank} "
              f"iter={call.iteration}{at} op={call.op} group={call.group} seq={seq} "
              f"site={call.site}", file=sys.stderr, flush=True)  # fmt: skip
        if self.truth is not None and not self.dry:
            line = truth_line(fault=str(fault), kind=fault.kind, where="local", rank=self.rank,
                              members=list(group.ranks) if group is not None else [], seq=seq,
                              **asdict(call))  # fmt: skip
            with self.truth.open("a", encoding="utf-8") as file:  # the process may end with it
                file.write(line + "\n")

    def check_fired(self) -> None:
        """UsageError for a fault that never happened."""
        matchers = [*(matcher for matcher, _ in self.finders), *self._tensors]
        for fault in self.faults:
            half = str(fault) in self._held
            if self.fired[str(fault)] and not half:
                continue
            seen = max((m.seen for m in matchers if m.fault == fault), default=0)
            fix, wanted = FIX, 1 if fault.select.iteration is None else fault.select.iteration
            if self.steps and not 1 <= wanted <= self.steps:
                fix = f"iter= from 1 to {self.steps}"
            elif 0 < seen <= (fault.select.nth or 0):
                fix = f"nth= from 1 to {seen}"
            raise UsageError(
                f"{fault} never fired on rank {self.rank}: "
                f"{'only one of the two calls came; ' * half}{self.steps} iterations ran, "
                f"and {seen} calls in them fit, whichever nth= says",
                fix=fix,
            )

    # -- what happens -----------------------------------------------------------------------------
    def _fire(
        self, fault: Fault, group: PrismGroup, op: str, make: Make, answer: Answer, args: list[Any],
        kwargs: Kwargs,
    ) -> dist.Work | None:  # fmt: skip
        kind, call = fault.kind, make(op, answer)
        ins, outs = arguments(op, args)
        alone = group.size() < 2 and kind not in ("group", "swap")  # nobody waits for it there
        others = len(group.local) > 1 and not group.has_virtual
        if kind not in _GOES_ON and not (others or alone):
            number = self.sequence[group.desc, op in ("send", "recv")]
            self.survived[str(fault)] = f"{op} #{number} of {group.desc}"
        if kind in _LOST:
            return CompletedWork(outs)
        if kind == "swap":
            return self._swap(fault, group, call, args, kwargs, outs)
        if kind in CHANGES:
            healthy = _op(fault, group, op, args, kwargs)
            wanted = changed_call(fault, healthy, group.rank(), group.size())
            args = arguments_of(fault, healthy, wanted, args, group)
            if kind == "op":
                method = _OTHERS[wanted.name][0]
                call, kwargs = make(wanted.name, lambda g, *a: getattr(g, method)(*a)), {}
            elif kind in ("shape", "dtype") and nccl_lets_through(wanted, healthy):
                self.survived.pop(str(fault), None)
        elif kind == "group":
            group = self._other_group(fault, group)
        elif kind == "p2p_dup":
            call(group, *args, **kwargs)
        elif kind in VALUES:
            spoil_tensors(fault, ins, f"{op} of {group.desc}")
        elif kind == "delay":
            time.sleep(fault.number("ms", 1000) / 1000)
        elif kind == "gpu_hang":
            torch.cuda._sleep(1 << 62)
        else:
            leave(fault)
        return call(group, *args, **kwargs)

    def _swap(
        self, fault: Fault, group: PrismGroup, call: Answer, args: Args, kwargs: Kwargs,
        outs: Sequence[torch.Tensor],
    ) -> dist.Work | None:  # fmt: skip
        """The first of the two calls is held until the second was made."""
        held = self._held.pop(str(fault), None)
        if held is None:
            self._held[str(fault)] = (call, group, args, kwargs)
            return CompletedWork(outs)
        done = call(group, *args, **kwargs)
        first, its_group, its_args, its_kwargs = held
        first(its_group, *its_args, **its_kwargs)
        return done

    def _other_group(self, fault: Fault, group: PrismGroup) -> PrismGroup:
        for desc, other in self.groups.items():
            if named_group(fault.params["to"], desc) and other is not group:
                return other
        raise UnsupportedError(f"{fault}: rank {self.rank} has used no such group yet", fix="to=tp")


def _partner(fault: Fault) -> Fault:
    """The other call of a swap, as a fault of its own."""
    group, op, *nth = fault.params["with"].split(":")
    where, number = fault.select, int(nth[0]) - 1 if nth else 0
    select = CallSelector(where.rank, where.iteration, group=group, op=op, nth=number)
    return replace(fault, select=select)


def _op(fault: Fault, group: PrismGroup, op: str, args: Args, kwargs: Kwargs) -> Op:
    """The call that is to change, with the splits that this rank gives."""
    fields = details(group, op, args, kwargs)
    if fault.kind == "splits":
        size = group.size()
        if len(args) < 4 or isinstance(args[1], (list, tuple)) or size < 3:
            what = f"{fault}: that all-to-all has no splits among two others"
            raise UnsupportedError(what, fix=f"another group=, or prism hang DIR fault={fault}")
        rows = tuple(args[3]) or (len(args[1]) // size,) * size
        fields["splits"] = rows, tuple(args[2])
    fields["group"] = group.desc
    return Op(op, **fields)


def _last(chunk: torch.nn.Module) -> bool:
    """Whether the model chunk ends in a loss."""
    found = [m.post_process for m in chunk.modules() if hasattr(m, "post_process")]
    return bool(found and found[0])
