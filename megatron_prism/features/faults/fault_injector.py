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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import distributed as dist

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.groups import named_group
from megatron_prism.core.programs.call_selector import CallSelector
from megatron_prism.core.programs.ops import CallLabel, Op
from megatron_prism.emulate.rank import exit_status
from megatron_prism.features.faults.call_check import nccl_lets_through
from megatron_prism.features.hang.fault_plan import (
    CHANGES,
    FIX,
    VALUES,
    Fault,
    FaultMatcher,
    changed_call,
    truth_line,
)
from megatron_prism.runtime.process_group import CompletedWork, arguments
from megatron_prism.runtime.recorder.recorder import details

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

_SIGNALS = {"sigkill": signal.SIGKILL, "segfault": signal.SIGSEGV, "sigstop": signal.SIGSTOP}
_IN_PLACE = ("all_reduce", "broadcast", "reduce", "send", "recv")
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
}
_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class _Method:
    """A collective that may be made in place of another.

    Attributes:
        name: Of c10d's method.
        options: That it takes.
    """

    name: str
    options: Callable[[], object]


_METHODS = {
    "all_reduce": _Method("allreduce", dist.AllreduceOptions),
    "broadcast": _Method("broadcast", dist.BroadcastOptions),
    "barrier": _Method("barrier", dist.BarrierOptions),
}


def arguments_of(
    fault: Fault, healthy: Op, wanted: Op, args: Args, group: PrismGroup
) -> list[object]:
    """Return the arguments of a call that is made instead of another.

    Args:
        fault: Which changes the call.
        healthy: The call as it should be.
        wanted: The call as it is made.
        args: The arguments of the healthy call.
        group: In which it is made.

    Raises:
        UnsupportedError: A running rank cannot make it.
    """
    kind = fault.kind
    if kind in ("shape", "dtype"):
        return [[_changed_tensor(fault, healthy, wanted, args[0][0])], *args[1:]]
    # options are the last argument of c10d's methods
    if kind == "root":
        args[-1].rootRank = wanted.root
        return list(args)
    if kind == "reduce_op":
        args[-1].reduceOp = dist.ReduceOp(_REDUCE[wanted.reduce])
        return list(args)
    # c10d's arguments: output, input, rows received and sent by peer, options
    if kind == "splits":
        send_rows = list(wanted.splits[0]) if wanted.splits else []
        return [*args[:3], send_rows, *args[4:]]
    if kind == "p2p_swap":
        peer = (group.rank() + wanted.peer) % group.size()
        return [args[0], peer, *args[2:]]

    # another operation
    if wanted.name not in _METHODS:
        text = f"{fault}: a running rank cannot make that of {healthy.name}"
        raise UnsupportedError(text, fix=f"to= one of {', '.join(_METHODS)}")
    options = _METHODS[wanted.name].options()
    if wanted.name == "barrier":
        return [options]
    inputs, outputs = arguments(healthy.name, args)
    return [(inputs or outputs)[:1], options]


def _changed_tensor(fault: Fault, healthy: Op, wanted: Op, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another size, or of another type."""
    # gathers and scatters: the sizes of their two tensors depend on each other
    if healthy.name not in _IN_PLACE:
        text = f"{fault}: {healthy.name} has two tensors that must fit"
        raise UnsupportedError(text, fix=f"prism hang DIR fault={fault}")
    if fault.kind == "shape":
        count = max(wanted.num_in, wanted.num_out)
        return torch.zeros(count, dtype=tensor.dtype, device=tensor.device)
    if wanted.dtype not in _DTYPES:
        fix = f"to= one of {', '.join(_DTYPES)}"
        raise UnsupportedError(f"{fault}: {wanted.dtype}", fix=fix)
    return tensor.detach().to(_DTYPES[wanted.dtype])


def spoil_tensors(fault: Fault, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Spoil the first number of each tensor: nan, inf, bitflip.

    Args:
        fault: How.
        tensors: Which.
        what: The tensors are of, for messages.

    Raises:
        UnsupportedError: No tensor has fractions, or there is no such bit.
    """
    fractions = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # Megatron's first calls broadcast whole numbers
    if not fractions:
        raise UnsupportedError(
            f"{fault}: {what} gives no fractions that could be {fault.kind}",
            fix=f"another call: {fault.kind}@rank={fault.select.rank},phase=backward",
        )
    for tensor in fractions:
        first = (0,) * tensor.dim()
        if fault.kind == "bitflip":
            _flip_bit(fault, tensor, first, what)
        else:
            tensor.data[first] = float(fault.kind)


def _flip_bit(fault: Fault, tensor: torch.Tensor, place: tuple[int, ...], what: str) -> None:
    """Flip a bit of a number: the highest of the exponent, unless the fault names another."""
    num_bytes = tensor.element_size()
    sign_bit = 8 * num_bytes - 1
    bit = fault.number("bit", sign_bit - 1)
    if bit > sign_bit:
        fix = f"bit={sign_bit - 1}"
        raise UnsupportedError(f"{fault}: {what} has {8 * num_bytes} bits", fix=fix)
    word = tensor.data[place].reshape(1).clone().view(_WORDS[num_bytes])
    mask = 1 << bit
    # the mask of a sign does not fit the signed word
    if bit == sign_bit:
        mask = -mask
    tensor.data[place] = (word ^ mask).view(tensor.dtype)[0]


def leave(fault: Fault) -> None | NoReturn:
    """Raise, end or stand still, as a fault of the rank says."""
    kind = fault.kind
    # a process that stops cannot say so afterwards
    is_endless_stall = kind == "data_stall" and "s" not in fault.params
    if kind in ("gil", "sigstop") or is_endless_stall:
        text = f"prism: this process (pid {os.getpid()}) now hangs for good, as {fault} says: end "
        text += "it with kill -9; a verdict without waiting is prism hang DIR fault=…"
        print(text, file=sys.stderr, flush=True)
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    elif kind == "exit":
        exit_status.leave(fault.number("code", 1))
    elif kind == "gil":
        ctypes.PyDLL(None).pause()  # PyDLL keeps the interpreter's lock while it waits
    elif kind == "data_stall":
        time.sleep(fault.number("s", _FOR_GOOD_S))
    elif kind == "data_end":
        raise StopIteration("[prism-fault] the data loader ended")
    elif kind == "oom":
        raise torch.OutOfMemoryError(f"[prism-fault] {fault}")
    else:
        raise RuntimeError(f"[prism-fault] {fault}")
    return None


_FOR_GOOD_S = 1 << 30
_FOR_GOOD_CYCLES = 1 << 62
_GOES_ON = (*VALUES, "delay", "slow", "data_stall", "env")  # wrong, or late, and no rank waits
_LOST = ("drop", "p2p_lost", "skip_microbatch")
_MESSAGES = ("send", "recv")

Model = torch.nn.Module | Sequence[torch.nn.Module]
Make = Callable[[str, "Answer"], "Answer"]  # of a collective and its answer


@dataclass(frozen=True)
class _Finder:
    """Finds the calls of a fault.

    Attributes:
        matcher: Of the fault's call.
        partner: Of the other call of a swap.
    """

    matcher: FaultMatcher
    partner: FaultMatcher | None

    @property
    def fault(self) -> Fault:
        """The fault."""
        return self.matcher.fault


@dataclass(frozen=True)
class _HeldCall:
    """A call that waits until another one was made."""

    call: Answer
    group: PrismGroup
    args: Args
    kwargs: Kwargs

    def make(self) -> dist.Work | None:
        """Make the call."""
        return self.call(self.group, *self.args, **self.kwargs)


class Injector:
    """Makes ``features.hang.planting`` happen on this rank.

    Attributes:
        rank: The rank.
        tier: Its tier.
        live: The tracker of live bytes (meta) or None.
        dry: Say it, do nothing.
        truth: File that gets a line for every fault that fires, before it does.
        fired: Fault -> how often it fired.
        first: Fault -> the train step in which it fired first.
        survived: Fault -> the call after which this rank went on.
        sequence: (group, whether messages) -> calls up to now.
        groups: Description -> this rank's group, once it was used.
        steps: Train steps that began.
        finders: Of faults that happen to calls.
        faults: All.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        tier: str,
        live: LiveBytes | None,
        dry: bool,
        truth: Path | None = None,
    ) -> None:
        self.rank = rank
        self.tier = tier
        self.live = live
        self.dry = dry
        self.truth = truth
        self.fired: Counter[str] = Counter()
        self.first: dict[str, int] = {}
        self.survived: dict[str, str] = {}
        self.sequence: Counter[tuple[str, bool]] = Counter()
        self.groups: dict[str, PrismGroup] = {}
        self.steps = 0
        self.faults = tuple(faults)
        self.finders: list[_Finder] = []
        self._since = time.perf_counter()  # the last call came back
        self._watches_model = False
        self._held: dict[str, _HeldCall] = {}
        self._of_tensors: list[FaultMatcher] = []  # of what the model gives
        self._slow: list[FaultMatcher] = []
        for fault in faults:
            self._check_possible(fault)
        for fault in faults:
            # values of the model: a hook on its output
            if fault.params.get("tensor") in ("loss", "act"):
                self._of_tensors.append(FaultMatcher(fault))
            elif fault.kind == "slow":
                self._slow.append(FaultMatcher(fault))
            # two calls change places: two matchers
            elif fault.kind == "swap":
                self.finders.append(_Finder(FaultMatcher(fault), FaultMatcher(_partner(fault))))
            elif fault.kind != "env":
                self.finders.append(_Finder(FaultMatcher(fault), None))
        # the whole process has the variable, before any call
        for fault in faults:
            if fault.kind == "env":
                self._set_variables(fault)

    def _set_variables(self, fault: Fault) -> None:
        """Set environment variables that the other ranks do not have."""
        for name, value in fault.params.items():
            self._say(fault, CallLabel(f"{name}={value}", ""), 0)
            if not self.dry:
                os.environ[name] = value

    def _check_possible(self, fault: Fault) -> None:
        """Raise UnsupportedError for a fault that this rank cannot have."""
        # hardware cannot be made to fail: prism hang plants such faults in programs
        if fault.kind in ("gpu_error", "nic"):
            text = f"{fault}: a running rank cannot be made to do that"
            raise UnsupportedError(text, fix=f"prism hang DIR fault={fault}")
        if fault.kind == "gpu_hang" and self.tier != "cuda":
            raise UnsupportedError(f"{fault}: it needs a CUDA device", fix="--prism-tier cuda")
        # its bytes are those of live tensors, which other tiers do not count
        if _is_of_bytes(fault) and self.live is None:
            raise UnsupportedError(f"{fault}: it is for tier meta", fix="--prism-tier meta")
        # there are no values to spoil
        if fault.kind in VALUES and self.tier == "meta":
            text = f"{fault}: tier meta has shapes only, and no values"
            raise UnsupportedError(text, fix="--prism-tier cpu")

    # -- what the guard says ----------------------------------------------------------------------
    def begin(self, model: Model | None, labels: Callable[[], CallLabel]) -> None:
        """A train step starts.

        Args:
            model: The model, or its chunks.
            labels: Says where the rank is, while its model runs.
        """
        self.steps += 1
        self._since = time.perf_counter()
        # hooks stay on the model, so that one time is enough
        if model is None or self._watches_model:
            return
        self._watches_model = True
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        for matcher in self._of_tensors:
            watched = chunks
            # only the last stage has a loss
            if matcher.fault.params["tensor"] == "loss":
                watched = [chunk for chunk in chunks if _ends_in_loss(chunk)]
            if not watched:
                text = f"{matcher.fault}: rank {self.rank} has no loss"
                raise UsageError(text, fix="a rank of the last stage, or tensor=act")
            for chunk in watched:
                chunk.register_forward_hook(partial(self._spoil_output, matcher, labels))

    def _spoil_output(
        self,
        matcher: FaultMatcher,
        labels: Callable[[], CallLabel],
        module: torch.nn.Module,
        inputs: object,
        output: object,
    ) -> None:
        """Spoil what a model chunk gives, if its forward is meant."""
        call = labels()
        if not matcher.hit(call):
            return
        self._say(matcher.fault, call, matcher.seen)
        if not self.dry:
            outputs = output if isinstance(output, (list, tuple)) else [output]
            tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
            spoil_tensors(matcher.fault, tensors, "the model's output")

    def record(
        self,
        group: PrismGroup,
        op: str,
        make: Make,
        answer: Answer,
        args: Args,
        kwargs: Kwargs,
        call: CallLabel,
    ) -> dist.Work | None:
        """Make the call, or what the plan makes of it."""
        counter = (group.desc, op in _MESSAGES)
        self.sequence[counter] += 1
        self.groups.setdefault(group.desc, group)
        # nothing happens before the first step
        if not call.iteration:
            return make(op, answer)(group, *args, **kwargs)
        self._stretch(call)
        try:
            for finder in self.finders:
                if not self._is_hit(finder, call):
                    continue
                self._say(finder.fault, call, self.sequence[counter], group)
                if not self.dry:
                    own_args, own_kwargs = list(args), dict(kwargs)
                    return self._fire(finder.fault, group, op, make, answer, own_args, own_kwargs)
            return make(op, answer)(group, *args, **kwargs)
        finally:
            self._since = time.perf_counter()

    def _is_hit(self, finder: _Finder, call: CallLabel) -> bool:
        """Tell whether a fault happens to a call."""
        fault = finder.fault
        # memory ran out, once
        if self.live is not None and _is_of_bytes(fault):
            is_over = self.live.now > fault.number("at_bytes")
            return is_over and not self.fired[str(fault)]
        # each call of a microbatch
        if fault.kind == "skip_microbatch":
            is_of_microbatch = call.microbatch == (fault.select.microbatch or 0)
            return is_of_microbatch and finder.matcher.matches(call)
        # one call, and of a swap the other; both count each call
        is_other = finder.partner is not None and finder.partner.hit(call)
        return finder.matcher.hit(call) or is_other

    def _stretch(self, call: CallLabel) -> None:
        """Let what was computed since the last call take ``factor`` times as long."""
        for matcher in self._slow:
            if not matcher.matches(call):
                continue
            self._say(matcher.fault, call, 0)
            if self.dry:
                continue
            # the device's work is part of what takes longer
            if self.tier == "cuda":
                torch.cuda.synchronize()
            took_s = time.perf_counter() - self._since
            time.sleep(took_s * (matcher.fault.factor("factor", 2) - 1))

    def _say(
        self, fault: Fault, call: CallLabel, seq: int, group: PrismGroup | None = None
    ) -> None:
        """Say that a fault fires, the first time."""
        name = str(fault)
        self.fired[name] += 1
        if self.fired[name] > 1:
            return
        self.first[name] = call.iteration
        microbatch = f" mb={call.microbatch}" if call.microbatch >= 0 else ""
        text = f"[prism-fault] {'would fire' if self.dry else 'fired'} id={fault} kind={fault.kind}"
        text += f" rank={self.rank} iter={call.iteration}{microbatch} op={call.op}"
        text += f" group={call.group} seq={seq} site={call.site}"
        print(text, file=sys.stderr, flush=True)
        if self.truth is None or self.dry:
            return
        members = [] if group is None else list(group.ranks)
        line = truth_line(
            fault=name,
            kind=fault.kind,
            where="local",
            rank=self.rank,
            members=members,
            seq=seq,
            **asdict(call),
        )
        # the process may end with the fault
        with self.truth.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def check_fired(self) -> None:
        """Check that every fault happened.

        Raises:
            UsageError: One never did.
        """
        for fault in self.faults:
            is_half_swapped = str(fault) in self._held
            if not self.fired[str(fault)] or is_half_swapped:
                raise self._never_fired(fault, is_half_swapped)

    def _never_fired(self, fault: Fault, is_half_swapped: bool) -> UsageError:
        """Return the error of a fault that never happened."""
        fitting_calls = 0
        for matcher in (*(finder.matcher for finder in self.finders), *self._of_tensors):
            if matcher.fault == fault:
                fitting_calls = max(fitting_calls, matcher.seen)
        fix = FIX
        iteration = 1
        if fault.select.iteration is not None:
            iteration = fault.select.iteration
        # the iteration was not reached
        if self.steps and not 1 <= iteration <= self.steps:
            fix = f"iter= from 1 to {self.steps}"
        # there were not so many calls that fit
        elif 0 < fitting_calls <= (fault.select.nth or 0):
            fix = f"nth= from 1 to {fitting_calls}"
        half = "only one of the two calls came; " if is_half_swapped else ""
        text = f"{fault} never fired on rank {self.rank}: {half}{self.steps} iterations ran, and "
        text += f"{fitting_calls} calls in them fit, whichever nth= says"
        return UsageError(text, fix=fix)

    # -- what happens -----------------------------------------------------------------------------
    def _fire(
        self,
        fault: Fault,
        group: PrismGroup,
        op: str,
        make: Make,
        answer: Answer,
        args: list[Any],
        kwargs: Kwargs,
    ) -> dist.Work | None:
        """Let a fault happen to a call."""
        kind = fault.kind
        self._note_survived(fault, group, op)
        inputs, outputs = arguments(op, args)

        # faults in which the call is not made, or is another one
        if kind in _LOST:
            return CompletedWork(outputs)
        if kind in CHANGES:
            return self._make_changed(fault, group, op, make, answer, args, kwargs)
        call = make(op, answer)
        if kind == "swap":
            return self._swap(fault, _HeldCall(call, group, args, kwargs), outputs)

        # faults of a call that is made: where, how often, with which values and when
        if kind == "group":
            group = self._other_group(fault, group)
        elif kind == "p2p_dup":
            call(group, *args, **kwargs)
        elif kind in VALUES:
            spoil_tensors(fault, inputs, f"{op} of {group.desc}")
        elif kind == "delay":
            time.sleep(fault.number("ms", 1000) / 1000)
        elif kind == "gpu_hang":
            torch.cuda._sleep(_FOR_GOOD_CYCLES)
        else:
            leave(fault)
        return call(group, *args, **kwargs)

    def _note_survived(self, fault: Fault, group: PrismGroup, op: str) -> None:
        """Note a call that the real job would not survive, and this rank does."""
        # nobody waits for it there
        is_alone = group.size() < 2 and fault.kind not in ("group", "swap")
        # its peers are real, and wait as they should
        has_real_peers = len(group.local) > 1 and not group.has_virtual
        if fault.kind not in _GOES_ON and not has_real_peers and not is_alone:
            number = self.sequence[group.desc, op in _MESSAGES]
            self.survived[str(fault)] = f"{op} #{number} of {group.desc}"

    def _make_changed(
        self,
        fault: Fault,
        group: PrismGroup,
        op: str,
        make: Make,
        answer: Answer,
        args: Args,
        kwargs: Kwargs,
    ) -> dist.Work | None:
        """Make a call with another size, type, root and the like, or another one."""
        healthy = _op(fault, group, op, args, kwargs)
        wanted = changed_call(fault, healthy, group.rank(), group.size())
        changed_args = arguments_of(fault, healthy, wanted, args, group)
        if fault.kind == "op":
            method = _METHODS[wanted.name].name

            other_call = make(wanted.name, lambda own, *values: getattr(own, method)(*values))
            return other_call(group, *changed_args)
        # NCCL moves as many bytes and notices nothing
        if fault.kind in ("shape", "dtype") and nccl_lets_through(wanted, healthy):
            self.survived.pop(str(fault), None)
        return make(op, answer)(group, *changed_args, **kwargs)

    def _swap(
        self, fault: Fault, call: _HeldCall, outputs: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        """Hold the first of the two calls until the second was made."""
        held = self._held.pop(str(fault), None)
        if held is None:
            self._held[str(fault)] = call
            return CompletedWork(outputs)
        work = call.make()
        held.make()
        return work

    def _other_group(self, fault: Fault, group: PrismGroup) -> PrismGroup:
        """Return the group in which the call is made instead."""
        for desc, other in self.groups.items():
            if named_group(fault.params["to"], desc) and other is not group:
                return other
        raise UnsupportedError(f"{fault}: rank {self.rank} has used no such group yet", fix="to=tp")


def _is_of_bytes(fault: Fault) -> bool:
    """Tell whether memory runs out at a number of bytes."""
    return fault.kind == "oom" and "at_bytes" in fault.params


def _partner(fault: Fault) -> Fault:
    """Return the other call of a swap, as a fault of its own."""
    group, op, *numbers = fault.params["with"].split(":")
    select = CallSelector(
        fault.select.rank,
        fault.select.iteration,
        group=group,
        op=op,
        nth=int(numbers[0]) - 1 if numbers else 0,
    )
    return replace(fault, select=select)


def _op(fault: Fault, group: PrismGroup, op: str, args: Args, kwargs: Kwargs) -> Op:
    """Return the healthy call that a fault is to change, with the splits that this rank gives."""
    fields = details(group, op, args, kwargs)
    if fault.kind == "splits":
        fields["splits"] = _splits_of_all_to_all(fault, group, args)
    fields["group"] = group.desc
    return Op(op, **fields)


def _splits_of_all_to_all(
    fault: Fault, group: PrismGroup, args: Args
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows that this rank sends to and receives from each member of a group.

    Raises:
        UnsupportedError: The call takes a list of tensors, or has no two other members, between
            which the fault could move rows.
    """
    size = group.size()
    # c10d's alltoall takes two lists of tensors; alltoall_base (output, input, rows received from
    # each member, rows sent to each, options)
    is_of_lists = len(args) < 4 or isinstance(args[1], (list, tuple))
    if is_of_lists or size < 3:
        text = f"{fault}: that all-to-all has no splits among two others"
        raise UnsupportedError(text, fix=f"another group=, or prism hang DIR fault={fault}")
    _, sent_tensor, received_rows, sent_rows = args[:4]
    # no splits: the same number of rows to each member
    if not sent_rows:
        sent_rows = [len(sent_tensor) // size] * size
    return tuple(sent_rows), tuple(received_rows)


def _ends_in_loss(chunk: torch.nn.Module) -> bool:
    """Tell whether a model chunk ends in a loss."""
    for module in chunk.modules():
        if hasattr(module, "post_process"):
            return bool(module.post_process)
    return False
