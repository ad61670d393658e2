"""Faults to plant: ``KIND@SELECTOR[:PARAM=VALUE,…]``, and plans of them.

In : a line of text, or a file with a list of faults (``load_plan``).
Out: ``Fault``s, and ``FaultMatcher``, which is told of a rank's calls one by one and says which is
hit.  Whatever plants faults, in programs or in running ranks, asks the same matcher, so that a plan
hits the same call in both.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError, did_you_mean
from megatron_prism.core.programs.call_selector import CallSelector, NthCall
from megatron_prism.core.programs.ops import DTYPES, NAMES, REDUCE, CallLabel, Op
from megatron_prism.core.units import counted
from megatron_prism.core.world import World, format_ranks

# kind -> (parameters it takes, what happens)
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "drop": ((), "the call is not made"),
    "skip_microbatch": ((), "the calls of a microbatch are not made"),
    "swap": (("with",), "the call changes places with group:op:nth"),
    "shape": (("n",), "n elements instead (default: half of them)"),
    "dtype": (("to",), "another dtype (default: fp32, or bf16)"),
    "splits": (("rows",), "an all-to-all sends rows more to one member, fewer to the next"),
    "root": (("to",), "another root (default: the next member)"),
    "reduce_op": (("to",), "another reduction (default: max, or sum)"),
    "op": (("to",), "another collective (default: broadcast, or all_reduce)"),
    "group": (("to",), "made in another group"),
    "p2p_lost": ((), "a message is not sent, or not received"),
    "p2p_dup": ((), "a message is sent, or received, twice"),
    "p2p_swap": ((), "a message goes to, or is awaited from, the other side"),
    "exception": (("code",), "the rank raises and leaves no dump"),
    "exit": (("code",), "the process ends"),
    "sigkill": ((), "the process is killed"),
    "segfault": ((), "the process is killed by itself"),
    "sigstop": ((), "the process is stopped"),
    "gil": ((), "the host thread is blocked, its watchdog is not"),
    "data_end": (("after",), "the data loader ends: the rank leaves"),
    "data_stall": (("after", "s"), "the data loader does not answer"),
    "gpu_hang": ((), "a kernel does not end"),
    "gpu_error": ((), "completions are not seen any more, a few calls later the host stops"),
    "nan": (("tensor",), "a value becomes NaN; the rank that checks raises"),
    "inf": (("tensor",), "a value becomes infinite"),
    "oom": (("at_bytes",), "an allocation beyond at_bytes, or in the phase, fails"),
    "bitflip": (("tensor", "bit"), "one bit of a value flips (default: its highest exponent bit)"),
    "delay": (("ms",), "the call is made later"),
    "slow": (("factor",), "the rank computes factor times as long"),
    "nic": (("bw_factor", "latency_us"), "calls between nodes take longer: modelled time only"),
    "env": (("NAME",), "an environment variable that the other ranks do not have"),
}
MESSAGES = ("p2p_lost", "p2p_dup", "p2p_swap")
VALUES = ("nan", "inf", "bitflip")  # of data: programs have none
TENSORS = ("loss", "act", "grad")  # what of a rank they happen to; without, what a call gives
WATCHDOG_MS = 600_000  # Megatron's --distributed-timeout-minutes: a later call ends the job
_WHOLE = ("n", "rows", "code", "at_bytes", "ms", "s", "after", "bit", "latency_us")
_FACTORS = ("factor", "bw_factor")
_FACTOR = re.compile(r"(?=.*[1-9])\d{1,9}(\.\d{1,9})?")  # above 0
_OTHER_CALL = re.compile(r"[A-Za-z_-]+:[a-z_]+(:[1-9]\d*)?")  # calls count from 1
_ANY_RANKS = re.compile(r"any(?::([0-9]{1,9}))?")
_GPUS_OF_NODE = 8  # where a selector does not say

# calls that have a root, calls that reduce
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
# kinds that change one call and leave all others as they are
CHANGES = ("shape", "dtype", "splits", "root", "reduce_op", "op", "p2p_swap")
# kinds that happen to a rank, not to a call
_WITHOUT_CALL = ("slow", "nic", "env")
FIX = "write KIND@rank=R[,iter=I,mb=M,chunk=C,group=G,op=NAME,nth=N,site=REGEX][:PARAM=VALUE]"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of KINDS.
        select: The call that the fault happens to.
        params: Parameters of the kind, as text.
    """

    kind: str
    select: CallSelector
    params: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Write the fault as a person would write it."""
        text = f"{self.kind}@{self.select}"
        if self.params:
            text += f":{_assignments(self.params)}"
        return text

    def ranks(self, world: World, seed: int = 0) -> tuple[int, ...]:
        """List the ranks that the fault happens to.

        Args:
            world: The world.
            seed: Draws the ranks of ``any:2``.

        Raises:
            UsageError: The selector fits no rank of the world.
        """
        text = self.select.rank
        # ranks that are drawn
        if text.startswith("any"):
            words = _ANY_RANKS.fullmatch(text)
            count = 0
            if words is not None:
                count = int(words[1] or 1)
            if not 0 < count <= world.size:
                raise UsageError(
                    f"{self}: {text} of {counted(world.size, 'rank')}", fix="rank=any:1"
                )
            generator = random.Random(f"{seed}:{self}")
            return tuple(sorted(generator.sample(range(world.size), count)))
        # ranks by their places in nodes
        if text.startswith(("node=", "rail=")):
            return self._ranks_of_hosts(world, text)
        # numbers and coordinates
        return world.select(text)

    def _ranks_of_hosts(self, world: World, text: str) -> tuple[int, ...]:
        """List the ranks of a node or of a rail.

        Args:
            world: The world.
            text: ``node=2``: the 8 GPUs of the third node (``node=2/4``: 4 GPUs to a node);
                ``rail=3``: the fourth GPU of every node.
        """
        host_kind, _, numbers = text.partition("=")
        number_text, _, size_text = numbers.partition("/")
        number = int(number_text)
        node_size = int(size_text or _GPUS_OF_NODE)
        if host_kind == "node":
            first = number * node_size
            ranks = range(first, min(world.size, first + node_size))
            is_there = len(ranks) > 0
        else:
            ranks = range(number, world.size, max(1, node_size))
            is_there = len(ranks) > 0 and number < node_size
        if not is_there:
            raise UsageError(
                f"{self}: {text} of {counted(world.size, 'rank')}, {node_size} to a node",
                fix=f"{host_kind}=0/{node_size}",
            )
        return tuple(ranks)

    def number(self, name: str, default: int = 0) -> int:
        """Read a parameter that is a whole number."""
        return int(self.params.get(name, default))

    def factor(self, name: str, default: float = 1.0) -> float:
        """Read a parameter that is a number above 0, perhaps with a fraction."""
        return float(self.params.get(name, default))

    def of(self, ranks: Iterable[int]) -> Fault:
        """Give the same fault for ``ranks`` alone."""
        select = replace(self.select, rank=format_ranks(ranks))
        return replace(self, select=select)

    @property
    def late_ms(self) -> int | None:
        """By how many ms a call is later; None if it never comes, or is no such fault."""
        if self.kind == "delay":
            return self.number("ms", 1000)
        if self.kind == "data_stall" and "s" in self.params:
            return 1000 * self.number("s")
        return None

    @property
    def only_time(self) -> bool:
        """Whether the job goes on, later, before a watchdog ends it."""
        if self.kind in ("slow", "nic"):
            return True
        late_ms = self.late_ms
        return late_ms is not None and late_ms < WATCHDOG_MS


def parse(text: str) -> Fault:
    """Read one fault as a person writes it.

    Raises:
        UsageError: A word is not understood, something is missing or too much.
    """
    # parameters begin with a colon and a name
    head, *parameter_texts = re.split(r":(?=[A-Za-z_]\w*=)", text.strip(), maxsplit=1)
    kind, _, where = head.partition("@")
    kind = kind.lower()
    if kind not in KINDS:
        meant = did_you_mean(kind, KINDS, f"one of {', '.join(KINDS)}")
        raise UsageError(f"{text!r}: there is no fault {kind}", fix=meant)
    if not where:
        raise UsageError(f"{text!r} does not say where", fix=FIX)
    select = CallSelector.parse(where, repr(text))

    # a value of an environment variable may have commas
    words = parameter_texts
    if kind != "env" and parameter_texts:
        words = parameter_texts[0].split(",")
    params = {}
    for word in words:
        name, _, value = word.partition("=")
        params[name] = value
    if kind != "env":
        for name, value in params.items():
            _check_parameter(text, kind, name, value)
    fault = Fault(kind, select, params)
    _check(text, fault)
    return fault


def _check_parameter(text: str, kind: str, name: str, value: str) -> None:
    """Refuse a parameter that the kind does not take, or that is no such number."""
    takes = KINDS[kind][0]
    if not value or name not in takes:
        fix = f"it takes: {', '.join(takes) or 'none'}"
        raise UsageError(f"{text!r}: {kind} has no parameter {name}={value}", fix=fix)
    if name in _WHOLE and not re.fullmatch(r"-?\d{1,18}", value):
        raise UsageError(f"{text!r}: {name}={value} is no number", fix=f"{name}=16")
    # rows may go the other way
    if name in _WHOLE and name != "rows" and value.startswith("-"):
        raise UsageError(f"{text!r}: {name} is below 0", fix=f"{name}=16")
    if name in _FACTORS and not _FACTOR.fullmatch(value):
        raise UsageError(f"{text!r}: {name}={value} is no factor", fix=f"{name}=0.5")


def _check(text: str, fault: Fault) -> None:
    """Refuse a fault in which something is missing, or too much."""
    if not fault.select.rank:
        raise UsageError(f"{text!r} names no rank", fix="rank=5, rank=pp=1,tp=0 or rank=any:1")
    _check_new_value(text, fault)
    _check_what_a_kind_needs(text, fault)
    _check_selector(text, fault)
    # how much slower
    if fault.kind == "slow" and fault.factor("factor", 2) < 1:
        raise UsageError(f"{text!r}: how much slower?", fix="slow@rank=3:factor=1.5")
    if fault.kind == "nic" and (not fault.params or fault.factor("bw_factor") > 1):
        fix = "nic@rank=0-7:bw_factor=0.5,latency_us=50"
        raise UsageError(f"{text!r}: how much slower?", fix=fix)


def _check_new_value(text: str, fault: Fault) -> None:
    """Refuse ``to=`` with a value that the call cannot have."""
    value = fault.params.get("to", "")
    names: dict[str, Collection[str]] = {"dtype": DTYPES, "reduce_op": REDUCE, "op": NAMES}
    if fault.kind in names and value not in ("", *names[fault.kind]):
        choices = [name for name in names[fault.kind] if name]
        raise UsageError(
            f"{text!r}: {fault.kind} cannot be {value}", fix=f"to= one of {', '.join(choices)}"
        )
    if fault.kind == "root" and not (value or "0").isdecimal():
        raise UsageError(f"{text!r}: to={value} is no number", fix="to=1")


def _check_what_a_kind_needs(text: str, fault: Fault) -> None:
    """Refuse a kind without the parameter that it cannot do without."""
    kind, params = fault.kind, fault.params
    if kind == "swap" and not _OTHER_CALL.fullmatch(params.get("with", "")):
        raise UsageError(f"{text!r}: swap with what?", fix="with=ep:all_to_all:1")
    if kind == "oom" and "at_bytes" not in params and not fault.select.phase:
        raise UsageError(
            f"{text!r}: how much memory is there, or when does it run out?",
            fix=":at_bytes=85899345920, or phase=backward",
        )
    if kind == "group" and not params.get("to"):
        raise UsageError(f"{text!r}: in which group then?", fix="to=tp")
    if kind == "env" and not params:
        raise UsageError(f"{text!r}: which variable?", fix="env@rank=3:NCCL_ALGO=Ring")


def _check_selector(text: str, fault: Fault) -> None:
    """Refuse words that choose a call where the fault happens to no call."""
    kind, select = fault.kind, fault.select
    names_single_call = replace(select, nth=None, op="", site="") != select
    if kind in _WITHOUT_CALL and names_single_call:
        raise UsageError(
            f"{text!r}: {kind} happens to no single call, so nth=, op= and site= are too much",
            fix=f"{kind}@rank={select.rank}",
        )
    tensor = fault.params.get("tensor", "grad")
    if tensor not in TENSORS:
        fix = f"tensor= one of {', '.join(TENSORS)}"
        raise UsageError(f"{text!r}: there is no tensor {tensor}", fix=fix)
    names_call = replace(select, op="", group="", site="") != select
    if tensor != "grad" and names_call:
        raise UsageError(
            f"{text!r}: the model's output is no call, so op=, group= and site= are too much",
            fix=f"{kind}@rank={select.rank},mb=0:tensor=loss",
        )


class FaultMatcher(NthCall):
    """Counts the calls that ``fault`` can happen to."""

    def __init__(self, fault: Fault) -> None:
        """Begin before the first call."""
        super().__init__(fault.select)
        self.fault = fault
        self.after = fault.number("after", -1) or -1  # microbatches that the data loader gives

    def matches(self, call: CallLabel) -> bool:
        """Say whether ``call`` fits the selector and is of a kind that the fault happens to."""
        if call.microbatch < self.after or not self.select.fits(call):
            return False
        kind = self.fault.kind
        is_message = call.op in ("send", "recv")
        names_op = bool(self.select.op)
        if kind in VALUES:
            return self._has_values(call)
        if kind in MESSAGES:
            return is_message
        if kind == "splits":
            return call.op == "all_to_all"
        if kind == "root":
            return call.op in _ROOTED
        if kind == "reduce_op":
            return call.op in _REDUCING
        # the sizes of an all-to-all are its splits
        if kind == "shape" and call.op in ("all_to_all", "barrier"):
            return False
        # these are asked of collectives, unless the selector names messages
        if kind in ("op", "shape", "dtype") and is_message:
            return names_op
        return True

    def _has_values(self, call: CallLabel) -> bool:
        """Say whether a call gives values that the fault can change."""
        # gradients of a replica, reduced with those of the others
        if self.fault.params.get("tensor") == "grad":
            is_of_replicas = "DATA_PARALLEL_GROUP" in call.group
            if call.op not in ("reduce_scatter", "all_reduce") or not is_of_replicas:
                return False
        # token numbers and masks of a batch have no NaN
        return bool(self.select.op) or call.op != "broadcast"


def changed_call(fault: Fault, call: Op, place: int, size: int) -> Op:
    """Change a call as the fault has a rank make it.

    Args:
        fault: A fault of one of CHANGES.
        call: The call as it should be.
        place: The place of the rank in the group.
        size: How many members the group has.

    Raises:
        UsageError: The call has nothing that could change so.
    """
    kind = fault.kind
    new_value = fault.params.get("to")
    if kind == "shape":
        return _with_elements(fault, call)
    if kind == "dtype":
        default_dtype = "fp32"
        if call.dtype == "fp32":
            default_dtype = "bf16"
        return replace(call, dtype=new_value or default_dtype)
    if kind == "root":
        next_member = (call.root + 1) % max(1, size)
        return replace(call, root=fault.number("to", next_member))
    if kind == "reduce_op":
        default_reduce = "max"
        if call.reduce == "max":
            default_reduce = "sum"
        return replace(call, reduce=new_value or default_reduce)
    if kind == "op":
        return _with_op(fault, call)
    if kind == "p2p_swap":
        if 2 * call.peer % size == 0:
            raise UsageError(
                f"{fault}: previous and next are one rank there",
                fix="a pipeline of three stages, or p2p_lost",
            )
        return replace(call, peer=-call.peer)
    return _with_splits(fault, call, place, size)


def _with_elements(fault: Fault, call: Op) -> Op:
    """Change how many elements a call has: ``n`` in its larger side, by default half of them."""
    whole = max(call.num_in, call.num_out)
    default = whole + 1
    if whole > 1:
        default = whole // 2
    elements = fault.number("n", default)

    # what grows in a gather shrinks with its part; a side below 0 is not known
    sides = []
    for side in (call.num_in, call.num_out):
        if side < 0:
            sides.append(side)
        elif whole:
            sides.append(elements * side // whole)
        else:
            sides.append(elements)
    return replace(call, num_in=sides[0], num_out=sides[1])


def _with_op(fault: Fault, call: Op) -> Op:
    """Make a call another collective, with a root and a reduction where the collective has any."""
    name = fault.params.get("to")
    if not name and call.name == "broadcast":
        name = "all_reduce"
    elif not name:
        name = "broadcast"
    root, reduce = -1, ""
    if name in _ROOTED:
        root = 0
    if name in _REDUCING:
        reduce = "sum"
    return replace(call, name=name, root=root, reduce=reduce)


def _with_splits(fault: Fault, call: Op, place: int, size: int) -> Op:
    """Send more rows to one member and fewer to another; the total stays as it is."""
    if call.splits is None or size < 2:
        raise UsageError(f"{fault}: that all-to-all says nothing of splits", fix="another nth")
    sent, wanted = call.splits
    rows = fault.number("rows", 1)
    # the rank itself, too, where there is only one peer
    members = [member for member in range(size) if member != place or size == 2]
    giver, taker = sorted(members, key=lambda member: -sent[member])[:2]
    changed_rows = list(sent)
    changed_rows[giver] -= rows
    changed_rows[taker] += rows
    return replace(call, splits=(tuple(changed_rows), wanted))


_Row = str | dict[str, str | int | float | dict[str, str | int | float]]
_Plan = Annotated[list[_Row], msgspec.Meta(min_length=1, max_length=10_000)]


def load_plan(path: str | Path) -> tuple[Fault, ...]:
    """Read a YAML list of faults: texts, or mappings with ``kind``, ``at`` and parameters.

    Raises:
        UsageError: The file is no such list, or one of the faults is not understood.
    """
    with foreign.reading(path, "a plan of faults", "a YAML list: - drop@rank=3,group=tp,nth=1"):
        rows = foreign.shaped(foreign.load_yaml(path), _Plan)
    faults = []
    for row in rows:
        text = row
        if not isinstance(text, str):
            text = _text(dict(text))
        faults.append(parse(text))
    return tuple(faults)


def _text(row: dict[str, Any]) -> str:
    """Write a row of a plan as a person would write it."""
    kind = row.pop("kind", "")
    where = row.pop("at", "")
    if isinstance(where, dict):
        where = _assignments(where)
    text = f"{kind}@{where}"
    if row:
        text += f":{_assignments(row)}"
    return text


def _assignments(values: Mapping[str, object]) -> str:
    """Write ``key=value``, with commas between them."""
    return ",".join(f"{key}={value}" for key, value in values.items())


def truth_line(**fields: object) -> str:
    """Write one injected fault as a line of JSON.

    Args:
        fields: ``fault`` as it was asked for, its ``kind``, ``where`` it happened (local, virtual,
            programs), and the call that was hit as it should have been.
    """
    return json.dumps({"schema": "prism.fault-truth/1", **fields})
