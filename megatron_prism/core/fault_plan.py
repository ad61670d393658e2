"""Faults to plant: ``KIND@SELECTOR[:PARAM=VALUE,…]``, and plans of them.

In : a line of text (``load_plan`` has lists of them and other people's words).
Out: ``Fault``s, and ``FaultMatcher``, which is told of a rank's calls one by one and says which is
hit.  Whatever plants faults, in programs or in running ranks, asks the same matcher, so that a plan
hits the same call in both.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.call_selector import CallSelector, NthCall
from megatron_prism.core.errors import UsageError, did_you_mean, refuse
from megatron_prism.core.ops import DTYPES, NAMES, REDUCE, CallLabel, Op
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
WATCHDOG_MS = 600_000  # Megatron's --distributed-timeout-minutes; who is later than that is lost
_WHOLE = ("n", "rows", "code", "at_bytes", "ms", "s", "after", "bit", "latency_us")
_FACTORS = ("factor", "bw_factor")
FIX = "write KIND@rank=R[,iter=I,mb=M,chunk=C,group=G,op=NAME,nth=N,site=REGEX][:PARAM=VALUE]"


@dataclass(frozen=True)
class Fault:
    """One fault, at the call of ``select``; ``params`` are those of the kind, as text."""

    kind: str
    select: CallSelector
    params: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        how = _assignments(self.params)
        return f"{self.kind}@{self.select}" + (f":{how}" if how else "")

    def ranks(self, world: World, seed: int = 0) -> tuple[int, ...]:
        """The ranks it happens to; ``any:2`` are two drawn by ``seed``."""
        text = self.select.rank
        if text.startswith("any"):
            drawn_by = re.fullmatch(r"any(:[0-9]{1,9})?", text)
            count = int((drawn_by and drawn_by[1] or ":1")[1:])
            if drawn_by is None or not 0 < count <= world.size:
                raise UsageError(
                    f"{self}: {text} of {counted(world.size, 'rank')}", fix="rank=any:1"
                )
            drawn = random.Random(f"{seed}:{self}").sample(range(world.size), count)
            return tuple(sorted(drawn))
        if text.startswith(("node=", "rail=")):
            return self._of_hosts(world, text)
        return world.select(text)

    def _of_hosts(self, world: World, text: str) -> tuple[int, ...]:
        """``node=2``: its 8 GPUs (``node=2/4``: 4); ``rail=3``: the fourth GPU of every node."""
        which, _, numbers = text.partition("=")
        number, _, per = numbers.partition("/")
        size = int(per or 8)
        found = range(int(number), world.size, max(1, size))
        if which == "node":
            found = range(int(number) * size, min(world.size, (int(number) + 1) * size))
        if not found or which == "rail" and int(number) >= size:
            raise UsageError(f"{self}: {text} of {counted(world.size, 'rank')}, {size} to a node",
                             fix=f"{which}=0/{size}")  # fmt: skip
        return tuple(found)

    def number(self, name: str, default: int = 0) -> int:
        """A parameter that is a whole number."""
        return int(self.params.get(name, default))

    def factor(self, name: str, default: float = 1.0) -> float:
        """A parameter that is a number above 0, perhaps with a fraction."""
        return float(self.params.get(name, default))

    def of(self, ranks: Iterable[int]) -> Fault:
        """The same for ``ranks`` of its ranks."""
        return replace(self, select=replace(self.select, rank=format_ranks(ranks)))

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
        """Whether the job goes on, later: nobody's watchdog loses patience."""
        late = self.late_ms
        return self.kind in ("slow", "nic") or late is not None and late < WATCHDOG_MS


def parse(text: str) -> Fault:
    """One fault as a person writes it.  UsageError says what is wrong with it."""
    head, *rest = re.split(r":(?=[A-Za-z_]\w*=)", text.strip(), maxsplit=1)
    kind, _, where = head.partition("@")
    kind = kind.lower()
    refuse(
        (kind not in KINDS, f"{text!r}: there is no fault {kind}",
         did_you_mean(kind, KINDS, f"one of {', '.join(KINDS)}")),
        (not where, f"{text!r} does not say where", FIX),
    )  # fmt: skip
    select, takes = CallSelector.parse(where, repr(text)), KINDS[kind][0]
    words = rest[0].split(",") if rest else []
    params = dict(word.partition("=")[::2] for word in (words if kind != "env" else rest))
    for key, value in params.items() if kind != "env" else ():
        refuse(
            (not value or key not in takes, f"{text!r}: {kind} has no parameter {key}={value}",
             f"it takes: {', '.join(takes) or 'none'}"),
            (key in _WHOLE and not re.fullmatch(r"-?\d{1,18}", value),
             f"{text!r}: {key}={value} is no number", f"{key}=16"),
            (key in _WHOLE and key != "rows" and value.startswith("-"),
             f"{text!r}: {key} is below 0", f"{key}=16"),
            (key in _FACTORS and not _FACTOR.fullmatch(value),
             f"{text!r}: {key}={value} is no factor", f"{key}=0.5"),
        )  # fmt: skip
    fault = Fault(kind, select, params)
    _check(text, fault)
    return fault


_FACTOR = re.compile(r"(?=.*[1-9])\d{1,9}(\.\d{1,9})?")  # above 0
_OTHER_CALL = re.compile(r"[A-Za-z_-]+:[a-z_]+(:\d+)?")


def _check(text: str, fault: Fault) -> None:
    """UsageError for what is missing, or too much."""
    kind, select, params = fault.kind, fault.select, fault.params
    to, tensor = params.get("to", ""), params.get("tensor", "grad")
    known = {"dtype": DTYPES, "reduce_op": REDUCE, "op": NAMES}.get(kind)
    single = replace(select, nth=None, op="", site="") != select
    refuse(
        (not select.rank, f"{text!r} names no rank", "rank=5, rank=pp=1,tp=0 or rank=any:1"),
        (known is not None and to not in ("", *known), f"{text!r}: {kind} cannot be {to}",
         f"to= one of {', '.join(filter(None, known or ()))}"),
        (kind == "root" and not (to or "0").isdecimal(), f"{text!r}: to={to} is no number", "to=1"),
        (kind == "swap" and not _OTHER_CALL.fullmatch(params.get("with", "")),
         f"{text!r}: swap with what?", "with=ep:all_to_all:0"),
        (kind == "oom" and not ("at_bytes" in params or select.phase),
         f"{text!r}: how much memory is there, or when does it run out?",
         ":at_bytes=85899345920, or phase=backward"),
        (kind == "group" and not to, f"{text!r}: in which group then?", "to=tp"),
        (kind == "env" and not params, f"{text!r}: which variable?",
         "env@rank=3:NCCL_ALGO=Ring"),
        (kind in ("slow", "nic", "env") and single,
         f"{text!r}: {kind} happens to no single call, so nth=, op= and site= are too much",
         f"{kind}@rank={select.rank}"),
        (tensor not in TENSORS, f"{text!r}: there is no tensor {tensor}",
         f"tensor= one of {', '.join(TENSORS)}"),
        (tensor != "grad" and replace(select, op="", group="", site="") != select,
         f"{text!r}: the model's output is no call, so op=, group= and site= are too much",
         f"{kind}@rank={select.rank},mb=0:tensor=loss"),
        (kind == "slow" and fault.factor("factor", 2) < 1, f"{text!r}: how much slower?",
         "slow@rank=3:factor=1.5"),
        (kind == "nic" and (not params or fault.factor("bw_factor") > 1),
         f"{text!r}: how much slower?", "nic@rank=0-7:bw_factor=0.5,latency_us=50"),
    )  # fmt: skip


class FaultMatcher(NthCall):
    """Counts the calls that ``fault`` can happen to."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.select)
        self.fault = fault
        self.after = fault.number("after", -1) or -1  # microbatches that the data loader gives

    def matches(self, call: CallLabel) -> bool:
        """Whether ``call`` fits the selector and is of a kind that the fault happens to."""
        op, kind = self.select.op, self.fault.kind
        if call.microbatch < self.after or not self.select.fits(call):
            return False
        gradients = call.op in ("reduce_scatter", "all_reduce") and (
            "DATA_PARALLEL_GROUP" in call.group
        )  # of a replica, reduced with those of the others
        if kind in VALUES and self.fault.params.get("tensor") == "grad" and not gradients:
            return False
        pair = call.op in ("send", "recv")
        if kind in MESSAGES and not pair or kind == "splits" and call.op != "all_to_all":
            return False
        if call.op not in {"root": _ROOTED, "reduce_op": _REDUCING}.get(kind, (call.op,)):
            return False
        if kind in VALUES and not op and call.op == "broadcast":
            return False  # token numbers and masks of a batch have no NaN
        if kind in ("op", "shape", "dtype") and not op and pair:
            return False  # asked of collectives, unless a message is named
        # the sizes of an all-to-all are its splits
        return not (kind == "shape" and call.op in ("all_to_all", "barrier"))


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
# kinds that change one call and leave all others as they are
CHANGES = ("shape", "dtype", "splits", "root", "reduce_op", "op", "p2p_swap")


def changed_call(fault: Fault, call: Op, place: int, size: int) -> Op:
    """``call`` as the fault has it made, by member ``place`` of a group of ``size``.

    Raises:
        UsageError: the call has nothing that could change so.
    """
    kind, to = fault.kind, fault.params.get("to")
    if kind == "shape":
        whole = max(call.num_in, call.num_out)
        new = fault.number("n", whole // 2 if whole > 1 else whole + 1)

        def scaled(now: int) -> int:  # what grows in a gather shrinks with its part
            return now if now < 0 else new * now // whole if whole else new

        return replace(call, num_in=scaled(call.num_in), num_out=scaled(call.num_out))
    if kind == "dtype":
        return replace(call, dtype=to or ("bf16" if call.dtype == "fp32" else "fp32"))
    if kind == "root":
        return replace(call, root=fault.number("to", (call.root + 1) % max(1, size)))
    if kind == "reduce_op":
        return replace(call, reduce=to or ("sum" if call.reduce == "max" else "max"))
    if kind == "op":
        name = to or ("all_reduce" if call.name == "broadcast" else "broadcast")
        root, reduce = 0 if name in _ROOTED else -1, "sum" if name in _REDUCING else ""
        return replace(call, name=name, root=root, reduce=reduce)
    if kind == "p2p_swap":
        if 2 * call.peer % size == 0:
            raise UsageError(f"{fault}: previous and next are one rank there",
                             fix="a pipeline of three stages, or p2p_lost")  # fmt: skip
        return replace(call, peer=-call.peer)
    if call.splits is None or size < 2:
        raise UsageError(f"{fault}: that all-to-all says nothing of splits", fix="another nth")
    sent, rows = list(call.splits[0]), fault.number("rows", 1)
    others = [member for member in range(size) if member != place or size == 2]
    giver, taker = sorted(others, key=lambda member: -sent[member])[:2]
    sent[giver], sent[taker] = sent[giver] - rows, sent[taker] + rows  # the total stays as it is
    return replace(call, splits=(tuple(sent), call.splits[1]))


_Row = str | dict[str, str | int | float | dict[str, str | int | float]]
_Plan = Annotated[list[_Row], msgspec.Meta(min_length=1, max_length=10_000)]


def load_plan(path: str | Path) -> tuple[Fault, ...]:
    """A YAML list of faults: texts, or mappings with ``kind``, ``at`` and parameters."""
    import yaml

    with foreign.reading(path, "a plan of faults", "a YAML list: - drop@rank=3,group=tp,nth=1"):
        try:
            stored = yaml.safe_load(foreign.read_yaml(path))
        except yaml.YAMLError as error:
            raise ValueError(f"it is no YAML: {error}") from None
        rows = foreign.shaped(stored, _Plan)
    return tuple(parse(row if isinstance(row, str) else _text(dict(row))) for row in rows)


def _text(row: dict[str, Any]) -> str:
    """A row of a plan as a person would write it."""
    kind, where = row.pop("kind", ""), row.pop("at", "")
    where = where if not isinstance(where, dict) else _assignments(where)
    return f"{kind}@{where}" + (f":{_assignments(row)}" if row else "")


def _assignments(values: Mapping[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in values.items())


def truth_line(**fields: object) -> str:
    """One injected fault as a line of JSON: ``fault`` as it was asked for, its ``kind``, ``where``
    it happened (local, virtual, programs), and the call that was hit as it should have been.
    """
    return json.dumps({"schema": "prism.fault-truth/1", **fields})
