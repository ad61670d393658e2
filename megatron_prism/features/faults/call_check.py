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
from megatron_prism.core.programs.ops import DTYPES, Op

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
    if code_files.is_installed(file):
        return ""
    return code_files.last_two(file)


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
    """Elements by which calls are compared: those that all members have alike."""
    if op.name in ("all_to_all", "dispatch", "combine", "barrier"):
        return 0
    # shares of members differ, their sum does not
    if op.splits:
        return op.num_out
    if op.name in _BY_OUTPUT:
        return op.num_out
    return op.num_in


def _differing_properties(own: Op, peer: Op) -> list[tuple[str, object, object]]:
    """List what differs in two calls that should be one: its name, its value here and there."""
    properties: list[tuple[str, object, object]] = [
        ("dtype", own.dtype, peer.dtype),
        ("shape", _count(own), _count(peer)),
    ]
    if own.name not in ("send", "recv"):
        properties.insert(0, ("operation", own.name, peer.name))
        properties.append(("reduce op", own.reduce, peer.reduce))
        properties.append(("root", own.root, peer.root))
    return [row for row in properties if row[1] != row[2]]


def differences(own: Op, peer: Op) -> list[str]:
    """In which words two calls that should be one differ: ``shape: 64 here, 32 there``."""
    rows = _differing_properties(own, peer)
    return [f"{name}: {own_value} here, {peer_value} there" for name, own_value, peer_value in rows]


def _bytes_of(op: Op) -> int:
    return _count(op) * DTYPES.get(op.dtype, 0)


def nccl_lets_through(own: Op, peer: Op | None) -> bool:
    """Whether NCCL would not notice that these two calls differ, and go on with wrong data.

    It moves words of 8 bytes and compares nothing.  Measured on 2 x H200 (NCCL 2.28.9, 2026-11-21),
    all-reduce and send: 5 against 6 floats pass on both sides, as do equal bytes of different types
    (fp32 against int32; 1,024 fp32 against 2,048 bf16).  Of 4 against 5 floats the side with 4
    passes and the other hangs, and 4 against 4,194,304 hangs on both.  What was not measured
    (another operation, reduction, root, splits) counts as a hang.
    """
    # the peer makes no call
    if peer is None:
        return False
    differing = {name for name, *_ in _differing_properties(own, peer)}
    # another operation, reduction or root: not measured
    if differing - _BYTES:
        return False
    # counts that differ between members were not measured either
    if own.splits or peer.splits:
        return False
    own_bytes, peer_bytes = _bytes_of(own), _bytes_of(peer)
    if own_bytes == peer_bytes:
        return True
    # the measured rule: the same number of words of 8 bytes, of a small message
    own_words, peer_words = -(-own_bytes // 8), -(-peer_bytes // 8)
    return max(own_bytes, peer_bytes) <= _FEW and own_words == peer_words


def gloo_does(own: Op, peer: Op | None, sends: bool | None = None) -> str:
    """What gloo makes of these two calls: passes (with wrong data), aborts or hangs.

    sends : of a broadcast, whether this side is the root; None: neither or unknown

    It moves bytes and compares nothing; a process into whose buffer more comes than it has room for
    is aborted.  Measured between two processes (torch 2.13): other
    dtypes of as many bytes and other reductions pass, messages and broadcasts also where the
    receiver has more room than it needs; other sizes abort; other operations and roots hang.
    """
    if peer is None:
        return "hangs"
    differing = {name for name, *_ in _differing_properties(own, peer)}
    if differing & {"operation", "root"}:
        return "hangs"
    own_bytes, peer_bytes = _bytes_of(own), _bytes_of(peer)
    if own_bytes == peer_bytes:
        # nothing but splits: what was measured aborted
        if not differing:
            return "aborts"
        return "passes"
    # which side sends, where only one does
    if own.name in ("send", "recv"):
        sends = own.name == "send"
    elif own.name != "broadcast":
        sends = None
    if sends is None:
        return "aborts"
    sent, room = peer_bytes, own_bytes
    if sends:
        sent, room = own_bytes, peer_bytes
    if sent <= room:
        return "passes"
    return "aborts"


_BYTES = {"dtype", "shape"}
_FEW = 1 << 12  # bytes: of larger messages only equal ones were measured


class CallCheck:
    """Counts the calls of one rank and asks the programs of its peers."""

    def __init__(self, peers: Peers, fail: Fail) -> None:
        self.peers = peers
        self.fail = fail
        self.counts: Counter[tuple[str, str, int]] = Counter()  # group, "" or send or recv, peer
        self.order: list[Op] | None = None
        self.calls_made = 0
        self.open = False

    def begin(self, peers: Peers | None = None, order: list[Op] | None = None) -> None:
        """A new iteration: count from 0.  ``order``: all calls that this rank itself will make."""
        self.peers = peers or self.peers
        self.order = order
        self.calls_made = 0
        self.counts.clear()
        self.open = True

    def end(self) -> None:
        """The iteration is over: whatever the program has beyond was not called."""
        if not self.open:
            return
        self.open = False
        for key, expected in self.peers.expected().items():
            count = self.counts[key]
            if count < len(expected):
                missing = expected[count]
                text = "the derived program calls it, the rank did not: "
                text += f"{count} of {len(expected)} calls"
                self.fail("missing", missing, count, None, [text], None, missing)

    def check(self, call: Op, position: int, size: int) -> None:
        """``call`` is about to be made by the member at ``position`` of ``size``."""
        # outside of what the programs record (an evaluation, say) nothing is compared
        if not self.open:
            return
        self._own_order(call)
        # a group of one rank
        if size < 2:
            return
        # collectives of a group have one order, messages one for each peer and direction
        is_message = call.name in ("send", "recv")
        key = (call.group, "", 0)
        if is_message:
            key = (call.group, call.name, call.peer)
        number = self.counts[key]
        self.counts[key] += 1
        if is_message:
            self._message(call, number)
        else:
            self._collective(call, number, position)

    def _own_order(self, call: Op) -> None:
        """Fail where the rank's own program has another call in this place, or none."""
        # only --prism-check-order compares the order of a rank's own calls
        if self.order is None:
            return
        number = self.calls_made
        self.calls_made += 1
        if number >= len(self.order):
            self.fail("divergence", call, number, None, ["its program is over"], None, None)
            return
        expected = self.order[number]
        is_same = (expected.group, expected.name) == (call.group, call.name)
        if is_same and not differences(call, expected):
            return
        where = expected.site or "no known line"
        text = f"its program calls {expected.name} of {expected.group} at {where}"
        self.fail("divergence", call, number, None, [text], None, expected)

    def _message(self, call: Op, number: int) -> None:
        """Compare a message with what its peer does in the same place."""
        peer, fifo = self.peers.messages(call.group, call.peer, call.name)
        # the peer posts no such message in an iteration
        if number >= len(fifo):
            counterpart = "send"
            if call.name == "send":
                counterpart = "recv"
            text = f"rank {peer} posts {len(fifo)} {counterpart}, this is number {number}"
            self.fail("unmatched " + call.name, call, number, None, [text], peer)
            return
        texts = differences(call, fifo[number])
        if texts:
            self.fail(_kind(texts), call, number, fifo[number], texts, peer)

    def _collective(self, call: Op, number: int, position: int) -> None:
        """Compare a collective with what all other members do in the same place."""
        for rank, equal_ranks, fifo in self.peers.collectives(call.group):
            # the other rank makes fewer calls in the group
            if number >= len(fifo):
                text = f"rank {rank} ({equal_ranks} alike) makes {len(fifo)} calls there"
                self.fail("missing", call, number, None, [text], rank)
                continue
            peer_call = fifo[number]
            texts = differences(call, peer_call)
            # ranks that call alike have splits of their own, so one stands for none of the others
            if not texts and call.splits and peer_call.splits and equal_ranks == 1:
                peer_position = self.peers.position(call.group, rank)
                texts = _split_difference(call, peer_call, position, peer_position)
            if texts:
                self.fail(_kind(texts), call, number, peer_call, texts, rank)


def _split_difference(
    sender: Op, receiver: Op, sender_position: int, receiver_position: int
) -> list[str]:
    """In which words rows that one member sends another differ from those that it expects."""
    assert sender.splits is not None
    assert receiver.splits is not None
    sent = sender.splits[0][receiver_position]
    expected = receiver.splits[1][sender_position]
    if sent == expected:
        return []
    return [f"splits: {sent} rows sent, {expected} expected"]


def _kind(texts: list[str]) -> str:
    """The property that the first of ``differences`` is about."""
    return texts[0].partition(":")[0]


class LocalCallCheck:
    """Local ranks tell each other their next collective before they make it.

    A store of all local processes holds, per group and sequence, one line per rank.
    """

    def __init__(
        self, store: dist.Store, rank: int, fail: Fail, patience_s: float = _PATIENCE_S
    ) -> None:
        self.store = store
        self.rank = rank
        self.fail = fail
        self.patience_s = patience_s
        self.counts: Counter[str] = Counter()

    def check(self, call: Op, key: str, locals_: Mapping[int, int], site: str) -> None:
        """``call`` is about to be made in the group ``key``; locals_: global rank -> group rank."""
        number = self.counts[key]
        self.counts[key] += 1
        base = f"call_check/{key}/{number}/"
        self.store.set(base + str(self.rank), json.dumps({**asdict(call), "site": site}))
        self.store.set(f"call_check/at/{self.rank}", f"{call.name} #{number + 1} of {call.group}")
        deadline = time.monotonic() + self.patience_s
        for peer in locals_:
            if peer != self.rank:
                positions = locals_[self.rank], locals_[peer]
                self._meet(call, number, base, peer, deadline, positions)

    def _meet(
        self,
        call: Op,
        number: int,
        base: str,
        peer: int,
        deadline: float,
        positions: tuple[int, int],
    ) -> None:
        """Compare ``call`` with that of ``peer``; ``positions`` are group ranks of both."""
        seconds_left = max(0.1, deadline - time.monotonic())
        try:
            # the other rank publishes its call under the same key
            self.store.wait([base + str(peer)], timedelta(seconds=seconds_left))
        except Exception as error:  # c10d raises DistStoreError or RuntimeError by release
            key = f"call_check/at/{peer}"
            where = self.store.get(key).decode() if self.store.check([key]) else "nowhere yet"
            text = f"rank {peer} has not come within {self.patience_s:.0f} s; it is in {where}"
            self.fail("missing", call, number, None, [f"{text} ({type(error).__name__})"], peer)
            return
        peer_call = Op(**json.loads(self.store.get(base + str(peer))))
        texts = differences(call, peer_call)
        # rows that one side sends must be those that the other receives, in both directions
        if not texts and peer_call.splits and call.splits and call.name != "all_to_all":
            own_position, peer_position = positions
            texts = _split_difference(call, peer_call, own_position, peer_position)
            if not texts:
                texts = _split_difference(peer_call, call, peer_position, own_position)
        if texts:
            texts += self._stacks(base, peer)
            self.fail(_kind(texts), call, number, peer_call, texts, peer)

    def _stacks(self, base: str, peer: int) -> list[str]:
        """Where both stand: both find the difference, so both write it down."""
        self.store.set(f"{base}stack/{self.rank}", json.dumps(frames()))
        texts = list[str]()
        for rank in (self.rank, peer):
            key = f"{base}stack/{rank}"
            with contextlib.suppress(Exception):  # of the peer; DistStoreError by release
                self.store.wait([key], timedelta(seconds=min(5.0, self.patience_s)))
            if self.store.check([key]):
                stack = json.loads(self.store.get(key))
                texts.append(f"rank {rank} stands at")
                texts += [f"  {frame}" for frame in stack]
        return texts
