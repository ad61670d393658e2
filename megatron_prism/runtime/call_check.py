"""Check every call of a local rank against what its peers would call, before data moves.

``CallCheck`` compares with what the derived programs of the peers say (group, sequence, operation,
dtype, size, root, reduction, splits); ``LocalCallCheck`` with what other local ranks are about to
call, through their store.  Both count per group as NCCL does: collectives in one FIFO, messages in
one per directed pair.  Comparison is only inside a group.  What differs goes to ``fail``, which
raises.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from megatron_prism.core import code_files
from megatron_prism.core.ops import DTYPES, Op

if TYPE_CHECKING:
    from torch import distributed as dist

_MOST = 12


def frames() -> list[str]:
    """Return ``file:line function`` of the callers, innermost first; at most 12.

    Frames of this package and of other installed packages than Megatron are left out.
    """
    stack: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(stack) < _MOST:
        short = _job_file(frame.f_code.co_filename)
        if short:
            stack.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return stack


def _job_file(file: str) -> str:
    """Return the short name of a file of Megatron or of the job's own code; "" of any other."""
    if code_files.is_ours(file) or file.startswith("<"):
        return ""
    # Megatron's is shown wherever it is installed
    inside = code_files.below_package("megatron", file)
    if inside is not None:
        return f"megatron/{inside}"
    return "" if code_files.is_installed(file) else code_files.last_two(file)


_BY_OUTPUT = ("reduce_scatter", "scatter", "recv")
_PATIENCE_S = 120.0  # until a local rank that does not come counts as lost


class Peers(Protocol):
    """What the programs of a world say of one rank's groups."""

    def collectives(self, desc: str) -> list[tuple[int, int, list[Op]]]:
        """(a member, how many call like it, its collectives) for all other members."""

    def messages(self, desc: str, offset: int, name: str) -> tuple[int, list[Op]]:
        """(the rank ``offset`` places further, its counterparts of our ``name``)."""

    def expected(self) -> Mapping[tuple[str, str, int], list[Op]]:
        """All calls of the local rank in an iteration: (group, "" or send or recv, peer) -> them,
        but for those of groups of one.
        """

    def position(self, desc: str, rank: int) -> int:
        """Group rank of ``rank``."""


Fail = Callable[..., None]


def _count(op: Op) -> int:
    if op.name in ("all_to_all", "dispatch", "combine", "barrier"):
        return 0
    if op.splits:  # shares of members differ, their sum does not
        return op.num_out
    return op.num_out if op.name in _BY_OUTPUT else op.num_in


def differences(mine: Op, theirs: Op) -> list[str]:
    """In which words two calls that should be one differ: ``shape: 64 here, 32 there``."""
    pairs = [
        ("dtype", mine.dtype, theirs.dtype),
        ("shape", _count(mine), _count(theirs)),
        ("reduce op", mine.reduce, theirs.reduce),
        ("root", mine.root, theirs.root),
    ]
    if mine.name in ("send", "recv"):
        pairs = pairs[:2]
    else:
        pairs.insert(0, ("operation", mine.name, theirs.name))
    return [f"{what}: {a} here, {b} there" for what, a, b in pairs if a != b]


def nccl_lets_through(mine: Op, theirs: Op | None) -> bool:
    """Whether NCCL would not notice that these two calls differ, and go on with wrong data.

    It moves words of 8 bytes and compares nothing.  Measured on 2 x H200 (NCCL 2.28.9, 2026-11-21),
    all-reduce and send: 5 against 6 floats pass on both sides, as do equal bytes of different types
    (fp32 against int32; 1,024 fp32 against 2,048 bf16).  Of 4 against 5 floats the side with 4
    passes and the other hangs, and 4 against 4,194,304 hangs on both.  What was not measured
    (another operation, reduction, root, splits) counts as a hang.
    """
    if theirs is None or {text.partition(":")[0] for text in differences(mine, theirs)} - _BYTES:
        return False
    if mine.splits or theirs.splits:
        return False
    here, there = (_count(op) * DTYPES.get(op.dtype, 0) for op in (mine, theirs))
    return here == there or max(here, there) <= _FEW and -(-here // 8) == -(-there // 8)


def gloo_does(mine: Op, theirs: Op | None, sends: bool | None = None) -> str:
    """What gloo makes of these two calls: passes (with wrong data), aborts or hangs.

    sends : of a broadcast, whether this side is the root; None: neither or unknown

    It moves bytes and compares nothing; a process into whose buffer more comes than it has room for
    is aborted.  Measured between two processes (torch 2.13): other
    dtypes of as many bytes and other reductions pass, messages and broadcasts also where the
    receiver has more room than it needs; other sizes abort; other operations and roots hang.
    """
    if theirs is None:
        return "hangs"
    found = {text.partition(":")[0] for text in differences(mine, theirs)}
    if found & {"operation", "root"}:
        return "hangs"
    here, there = (_count(op) * DTYPES.get(op.dtype, 0) for op in (mine, theirs))
    if here == there:
        return "passes" if found else "aborts"  # nothing but splits: what was measured aborted
    if mine.name in ("send", "recv"):
        sends = mine.name == "send"
    elif mine.name != "broadcast":
        sends = None
    if sends is None:
        return "aborts"
    return "passes" if (here <= there if sends else there <= here) else "aborts"


_BYTES = {"dtype", "shape"}
_FEW = 1 << 12  # bytes: of larger messages only equal ones were measured


class CallCheck:
    """Counts the calls of one rank and asks the programs of its peers."""

    def __init__(self, peers: Peers, fail: Fail) -> None:
        self.peers, self.fail = peers, fail
        self.counts: Counter[tuple[str, str, int]] = Counter()  # group, "" or send or recv, peer
        self.order: list[Op] | None = None
        self.made = 0
        self.open = False

    def begin(self, peers: Peers | None = None, order: list[Op] | None = None) -> None:
        """A new iteration: count from 0.  ``order``: all calls that this rank itself will make."""
        self.peers, self.order, self.made = peers or self.peers, order, 0
        self.counts.clear()
        self.open = True

    def end(self) -> None:
        """The iteration is over: whatever the program has beyond was not called."""
        if not self.open:
            return
        self.open = False
        for key, own in self.peers.expected().items():
            made = self.counts[key]
            if made < len(own):
                text = f"the derived program calls it, the rank did not: {made} of {len(own)} calls"
                self.fail("missing", own[made], made, None, [text], None, own[made])

    def check(self, call: Op, position: int, size: int) -> None:
        """``call`` is about to be made by the member at ``position`` of ``size``."""
        if not self.open:
            return
        self._own_order(call)
        if size < 2:
            return
        pair = call.name in ("send", "recv")
        key = (call.group, call.name if pair else "", call.peer if pair else 0)
        number = self.counts[key]
        self.counts[key] += 1
        if pair:
            self._message(call, number)
        else:
            self._collective(call, number, position)

    def _own_order(self, call: Op) -> None:
        """Return the first call that the rank's own program does not have here."""
        if self.order is None:
            return
        number, self.made = self.made, self.made + 1
        mine = self.order[number] if number < len(self.order) else None
        if mine is None:
            what = "its program is over"
        elif (mine.group, mine.name) == (call.group, call.name) and not differences(call, mine):
            return
        else:
            where = mine.site or "no known line"
            what = f"its program calls {mine.name} of {mine.group} at {where}"
        self.fail("divergence", call, number, None, [what], None, mine)

    def _message(self, call: Op, number: int) -> None:
        peer, fifo = self.peers.messages(call.group, call.peer, call.name)
        if number >= len(fifo):
            back = "recv" if call.name == "send" else "send"
            what = f"rank {peer} posts {len(fifo)} {back}, this is number {number}"
            self.fail("unmatched " + call.name, call, number, None, [what], peer)
        elif found := differences(call, fifo[number]):
            self.fail(_kind(found), call, number, fifo[number], found, peer)

    def _collective(self, call: Op, number: int, position: int) -> None:
        for rank, alike, fifo in self.peers.collectives(call.group):
            if number >= len(fifo):
                what = f"rank {rank} ({alike} alike) makes {len(fifo)} calls there"
                self.fail("missing", call, number, None, [what], rank)
                continue
            theirs = fifo[number]
            found = differences(call, theirs)
            if not found and call.splits and theirs.splits and alike == 1:
                there = self.peers.position(call.group, rank)
                found = _splits(call, theirs, position, there)
            if found:
                self.fail(_kind(found), call, number, theirs, found, rank)


def _splits(mine: Op, theirs: Op, here: int, there: int) -> list[str]:
    assert mine.splits is not None
    assert theirs.splits is not None
    sent, wanted = mine.splits[0][there], theirs.splits[1][here]
    return [f"splits: {sent} rows sent, {wanted} expected"] if sent != wanted else []


def _kind(found: list[str]) -> str:
    return found[0].partition(":")[0]


class LocalCallCheck:
    """Local ranks tell each other their next collective before they make it.

    A store of all local processes holds, per group and sequence, one line per rank.
    """

    def __init__(
        self, store: dist.Store, rank: int, fail: Fail, patience_s: float = _PATIENCE_S
    ) -> None:
        self.store, self.rank, self.fail, self.patience_s = store, rank, fail, patience_s
        self.counts: Counter[str] = Counter()

    def check(self, call: Op, key: str, locals_: Mapping[int, int], site: str) -> None:
        """``call`` is about to be made in the group ``key``; locals_: global rank -> group rank."""
        number = self.counts[key]
        self.counts[key] += 1
        base = f"call_check/{key}/{number}/"
        self.store.set(base + str(self.rank), json.dumps({**asdict(call), "site": site}))
        self.store.set(f"call_check/at/{self.rank}", f"{call.name} #{number + 1} of {call.group}")
        deadline = time.monotonic() + self.patience_s
        for other in locals_:
            if other != self.rank:
                places = locals_[self.rank], locals_[other]
                self._meet(call, number, base, other, deadline, places)

    def _meet(
        self, call: Op, number: int, base: str, other: int, deadline: float, places: tuple[int, int]
    ) -> None:
        left = max(0.1, deadline - time.monotonic())
        try:
            self.store.wait([base + str(other)], timedelta(seconds=left))
        except Exception as error:  # c10d raises DistStoreError or RuntimeError by release
            at = f"call_check/at/{other}"
            where = self.store.get(at).decode() if self.store.check([at]) else "nowhere yet"
            why = f"rank {other} has not come within {self.patience_s:.0f} s; it is in {where}"
            self.fail("missing", call, number, None, [f"{why} ({type(error).__name__})"], other)
            return
        there = Op(**json.loads(self.store.get(base + str(other))))
        found = differences(call, there)
        if not found and there.splits and call.splits and call.name != "all_to_all":
            found = _splits(call, there, *places) or _splits(there, call, *places[::-1])
        if found:
            found += self._stacks(base, other)
            self.fail(_kind(found), call, number, there, found, other)

    def _stacks(self, base: str, other: int) -> list[str]:
        """Where both stand: both find the difference, so both write it down."""
        self.store.set(f"{base}stack/{self.rank}", json.dumps(frames()))
        found = []
        for rank in (self.rank, other):
            key = f"{base}stack/{rank}"
            with contextlib.suppress(Exception):  # of the other; DistStoreError by release
                self.store.wait([key], timedelta(seconds=min(5.0, self.patience_s)))
            if self.store.check([key]):
                stack = json.loads(self.store.get(key))
                found += [f"rank {rank} stands at", *(f"  {frame}" for frame in stack)]
        return found
