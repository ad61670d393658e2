"""The dependency graph: who waits for whom, as a directed acyclic graph of nodes that take time.

In : a WorldGraph (and how many iterations in a row).  Out: IssueGraph.  CUDA's rules, which do not
depend on times, so the graph is built once and evaluated for any durations:

* ops on a stream run one after the other; each group has a stream of its own for its calls, and
  each pair of ranks one for sends and receives that are not batched (ProcessGroupNCCL)
* a call starts when its issuing stream and its group's stream get there, on every member; all
  members end it together.  A batch of sends and receives starts as one and ends as one
* with ``buffered``, a send ends without its receiver as long as NCCL's buffers hold what that has
  not received yet, each message in whole eighths of them; the receive still waits for both
* the host issues ahead without limit, except that ``host_wait`` holds it until the device is done,
  and a barrier, or the wait for one, until its own stream is (ProcessGroupNCCL,
  WorkNCCL::synchronize); in programs that say how long it takes, it issues one op after the other,
  and nothing starts on the device before the host has launched it; what follows a segment on the
  device also waits until the host is through with the segment

A cycle means that the job hangs: ``order`` then holds fewer nodes than there are.  Programs are
read once each (``Issue``); classes that run the same one are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import CODE, IS_CALL, IS_PAIR
from megatron_prism.core.program import Program
from megatron_prism.graph import loops
from megatron_prism.graph.world_graph import WorldGraph

COMPUTE, JOIN = 0, 1  # a segment, a point in time
MEET = 2  # a matched call; the other kinds are of one class each
LEAD, HOST = 3, 4  # the host's time for an op until the device may begin it, and after that
_WAIT, _RECORD, _HOST = CODE["wait"], CODE["record"], CODE["host_wait"]
_COMPUTE, _BARRIER = CODE["compute"], CODE["barrier"]
SENT = 5  # a send that does not wait for its receiver
_SEND = CODE["send"]


@dataclass(frozen=True)
class Issue:
    """The nodes of one class, numbered from 0.  ``-1 - k`` is the meeting of call ``k``, where
    k = iteration * ops + op.

    kind, op, iteration : per node
    start, before       : before[start[i]:start[i + 1]], nodes and meetings that end before node i
    calls, ready        : the calls, and the node at which this rank is ready for each
    node                : int64 [iterations * ops], node or meeting of every op; ``NOTHING``: none
    ready_of            : int64 [iterations * ops], as ``ready``; NOTHING for ops that are no calls
    """

    kind: np.ndarray
    op: np.ndarray
    iteration: np.ndarray
    start: np.ndarray
    before: np.ndarray
    calls: np.ndarray
    ready: np.ndarray
    node: np.ndarray
    ready_of: np.ndarray


NOTHING = int(np.iinfo(np.int64).max)


_STEPS = 8  # of NCCL's buffers (NCCL_STEPS): on H100 eight messages of up to 8 MiB fit into 64


def issue(program: Program, sizes: Mapping[str, int], iterations: int, buffered: int) -> Issue:
    """``iterations`` iterations of ``program``, one straight after the other; buffers of so many
    bytes hold what is on its way to a peer.
    """
    ops, strings = program.ops, program.strings
    names, length = ops["name"], len(program)
    device = np.array([text == "device" for text in strings])[ops["note"]]
    talks = IS_CALL[names]
    # 1 further and 1 back are the same pair in a group of two, and share its stream
    size_of = np.array([max(1, sizes.get(text, 1)) for text in strings], dtype=np.int64)
    alone = IS_PAIR[names] & (ops["batch"] < 0)
    place = np.where(alone, 1 + ops["peer"] % size_of[ops["group"]], 0)
    group = ops["group"].astype(np.int64) << 40
    comms, num_comms = _numbered(np.where(talks, group | place, -1))
    handles, num_handles = _numbered(ops["handle"])
    first, following, largest = _batches(ops["batch"])
    fits = (names == _SEND) & (program.bytes_in <= buffered) & (buffered > 0)
    pairs, num_pairs = _numbered(
        np.where(fits, group | ops["peer"].astype(np.int64) + (1 << 32), -1)
    )
    step = max(1, buffered // _STEPS)
    held = np.maximum(1, -(-program.bytes_in // step)) * step
    given = [
        *(ops[name].astype(np.int64) for name in ("name", "stream")),
        comms, handles, first, following, talks.astype(np.int64), device.astype(np.int64), pairs,
        held, int(program.knows_host), iterations, buffered,
    ]  # fmt: skip
    each = np.where(names == _COMPUTE, 3 if program.knows_host else 1, 1 + 3 * talks)
    most = int(each.sum()) * iterations
    room = 3 * most + 1024
    while True:
        state = [
            np.zeros(size, dtype=np.int64)
            for size in (3 * len(strings), 2 * num_comms, 3 * num_handles, 3 * num_pairs,
                         2 * length * iterations, largest)
        ]  # fmt: skip
        nodes = [np.zeros(most, dtype=np.int64) for _ in range(4)]
        calls = [np.full(length * iterations, NOTHING, dtype=np.int64) for _ in range(4)]
        edges, done = np.zeros(room, dtype=np.int64), np.zeros(iterations + 2, dtype=np.int64)
        loops.run(_read, given, [*state, *nodes, *calls, edges, done], loops.SHORT)
        if done[-1] >= 0:
            break
        room *= 2
    kind, op, at, size = (column[: done[iterations]] for column in nodes)
    start = np.concatenate(([0], np.cumsum(size)))
    called, ready, node, ready_of = calls
    return Issue(
        kind.astype(np.uint8),
        op,
        np.repeat(np.arange(iterations, dtype=np.int32), np.diff(done[:-1])),
        start,
        edges[np.repeat(at - start[:-1], size) + np.arange(start[-1])],
        called[: done[-1]],
        ready[: done[-1]],
        node,
        ready_of,
    )


def _numbered(values: np.ndarray) -> tuple[np.ndarray, int]:
    """int64 [n]: the place of each value among those that are not negative, -1 for these; how many
    there are.
    """
    found = np.full(len(values), -1, dtype=np.int64)
    mine = np.flatnonzero(values >= 0)
    known, found[mine] = np.unique(values[mine], return_inverse=True)
    return found, len(known)


def _batches(batch: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The first op of the batch of each op, and the next one (-1: none); how many are in the
    largest one.  An op without a batch is one of its own.
    """
    first, following = np.arange(len(batch)), np.full(len(batch), -1, dtype=np.int64)
    mine = np.flatnonzero(batch >= 0)
    mine = mine[np.argsort(batch[mine], kind="stable")]
    begins = np.flatnonzero(np.diff(batch[mine], prepend=-1))
    counts = np.diff(begins, append=len(mine))
    first[mine] = np.repeat(mine[begins], counts)
    same = np.flatnonzero(batch[mine[1:]] == batch[mine[:-1]])
    following[mine[same]] = mine[same + 1]
    return first, following, int(counts.max(initial=1))


def _read(  # type: ignore[no-untyped-def]
    names, op_stream, op_comm, op_handle, first, following, talks, device, pair, held,
    hosted, iterations, buffered,
    streams, comms, handles, pairs, sends, ends,
    kind, op, at, size, called, readies, node, ready_of, edges, done,
):  # fmt: skip
    """Reads the program: where the rank stands is what the next op of each queue must wait for.

    Lists of nodes lie in ``edges``.  Three entries each: ``streams`` (where the list of its last
    ops is, its length, and one of the streams in their order), ``handles`` (where, length, whether
    it is a barrier's), ``pairs`` (bytes on their way, the first and the last send in ``sends``);
    two each: ``comms`` (its last node, one of them in their order), ``sends`` (bytes, the next).
    ``done``: nodes before each iteration and in all, calls; -1: ``edges`` are too few.
    """
    length, num_comms = len(names), len(comms) // 2
    n = top = calls = flying = used_streams = used_comms = 0
    longest, host = 1, -1
    for i in range(num_comms):
        comms[2 * i] = NOTHING
    for iteration in range(iterations):
        done[iteration], base = n, iteration * length
        for i in range(len(handles) // 3):
            handles[3 * i + 1] = handles[3 * i + 2] = 0
        for i in range(length):
            name, stream, handle = names[i], op_stream[i], op_handle[i]
            least = (used_streams + 3) * (longest + 1) + num_comms + 3 * len(ends) + flying + 8
            if top + least > len(edges):
                done[iterations + 1] = -1
                return
            queue, count = streams[3 * stream], streams[3 * stream + 1]
            blocks, wanted = False, False  # whether the host waits here; for the whole device
            if name == _COMPUTE and hosted:  # between the two nodes in which the host issues it
                for k in range(3):
                    op[n + k], at[n + k] = i, top
                    if k == 0 and host >= 0:
                        edges[top] = host
                        top += 1
                    elif k == 1:
                        for j in range(queue, queue + count):
                            edges[top] = edges[j]
                            top += 1
                    if k > 0:
                        edges[top] = n
                        top += 1
                    size[n + k] = top - at[n + k]
                kind[n], kind[n + 1], kind[n + 2] = LEAD, COMPUTE, HOST
                node[base + i] = edges[top] = n + 1
                used_streams = _set(streams, stream, top, 1, used_streams)
                host = n + 2
                top += 1
                n += 3
            elif name == _COMPUTE:
                kind[n], op[n], at[n] = COMPUTE, i, top
                top = _queue(queue, count, host, edges, top)
                size[n] = top - at[n]
                node[base + i] = edges[top] = n
                used_streams = _set(streams, stream, top, 1, used_streams)
                top += 1
                n += 1
            elif talks[i] and first[i] == i:  # the rest of a batch is issued with its first
                if hosted:
                    kind[n], op[n], at[n], size[n] = HOST, i, top, 0
                    if host >= 0:
                        edges[top] = host
                        top += 1
                        size[n] = 1
                    host = n
                    n += 1
                comm, ready, begin = op_comm[i], n, top
                top = _queue(queue, count, host, edges, top)
                if comms[2 * comm] != NOTHING:
                    top = _append(edges, begin, top, comms[2 * comm])
                else:
                    comms[2 * used_comms + 1] = comm
                    used_comms += 1
                kind[n], op[n], at[n], size[n] = JOIN, i, begin, top - begin
                n += 1
                member, together = i, 0
                while member >= 0:
                    call = base + member
                    called[calls], readies[calls] = call, ready
                    calls += 1
                    node[call], ready_of[call] = -1 - call, ready
                    if pair[member] >= 0:  # a send into NCCL's buffers, once they have room
                        one = 3 * pair[member]
                        kind[n], op[n], at[n] = SENT, member, top
                        edges[top] = ready
                        top += 1
                        sends[2 * call], sends[2 * call + 1] = held[member], -1
                        if pairs[one] > 0:
                            sends[2 * pairs[one + 2] + 1] = call
                        else:
                            pairs[one + 1] = call
                        pairs[one + 2] = call
                        pairs[one] += held[member]
                        flying += 1
                        while pairs[one] > buffered:
                            oldest = pairs[one + 1]
                            edges[top] = -1 - oldest
                            top += 1
                            pairs[one] -= sends[2 * oldest]
                            pairs[one + 1] = sends[2 * oldest + 1]
                            flying -= 1
                        size[n] = top - at[n]
                        node[call] = n
                        n += 1
                    ends[together] = node[call]
                    together += 1
                    member = following[member]
                end = ends[0]
                if together > 1:
                    kind[n], op[n], at[n], size[n] = JOIN, i, top, together
                    for j in range(together):
                        edges[top] = ends[j]
                        top += 1
                    end = n
                    n += 1
                comms[2 * comm] = edges[top] = end
                member = i
                while member >= 0:
                    if op_handle[member] >= 0:
                        handles[3 * op_handle[member]] = top
                        handles[3 * op_handle[member] + 1] = 1
                    else:
                        used_streams = _set(streams, stream, top, 1, used_streams)
                    member = following[member]
                top += 1
                blocks = name == _BARRIER and handle < 0
                if name == _BARRIER and handle >= 0:
                    handles[3 * handle + 2] = 1
            elif name == _WAIT:
                begin = top
                top = _queue(queue, count, host, edges, top)
                if handle >= 0:
                    where, more = handles[3 * handle], handles[3 * handle + 1]
                    same = more == top - begin
                    for j in range(more):
                        same = same and edges[where + j] == edges[begin + j]
                    for j in range(more):
                        top = _append(edges, begin, top, edges[where + j])
                    if same:
                        top = begin
                    blocks = handles[3 * handle + 2] == 1  # WorkNCCL blocks the host there, too
                if top > begin:
                    used_streams = _set(streams, stream, begin, top - begin, used_streams)
                    longest = max(longest, top - begin)
            elif name == _RECORD and handle >= 0:
                handles[3 * handle] = top
                top = _queue(queue, count, host, edges, top)
                handles[3 * handle + 1] = top - handles[3 * handle]
                longest = max(longest, handles[3 * handle + 1])
            elif name == _HOST:
                blocks, wanted = True, device[i] == 1
            if blocks:
                begin = top
                queue, count = streams[3 * stream], streams[3 * stream + 1]
                for j in range(queue, queue + count):
                    top = _append(edges, begin, top, edges[j])
                if wanted:
                    for k in range(used_streams):
                        other = streams[3 * k + 2]
                        queue, count = streams[3 * other], streams[3 * other + 1]
                        for j in range(queue, queue + count):
                            top = _append(edges, begin, top, edges[j])
                    for k in range(used_comms):
                        top = _append(edges, begin, top, comms[2 * comms[2 * k + 1]])
                if top > begin:
                    if host >= 0:
                        top = _append(edges, begin, top, host)
                    kind[n], op[n], at[n], size[n] = JOIN, i, begin, top - begin
                    host = n
                    n += 1
    done[iterations], done[iterations + 1] = n, calls


def _queue(queue: int, count: int, host: int, edges: np.ndarray, top: int) -> int:
    """Puts what the next op of a stream waits for at ``top``: its list, and the host."""
    begin = top
    for j in range(queue, queue + count):
        edges[top] = edges[j]
        top += 1
    return _append(edges, begin, top, host) if host >= 0 else top


def _append(edges: np.ndarray, begin: int, top: int, value: int) -> int:
    """Adds a node to the list from ``begin`` to ``top``, unless it is in it."""
    for j in range(begin, top):
        if edges[j] == value:
            return top
    edges[top] = value
    return top + 1


def _set(streams: np.ndarray, stream: int, where: int, count: int, used: int) -> int:
    """Gives a stream a list; how many streams have had one."""
    if streams[3 * stream + 1] == 0:
        streams[3 * used + 2] = stream
        used += 1
    streams[3 * stream], streams[3 * stream + 1] = where, count
    return used


@dataclass(frozen=True)
class IssueGraph:
    """Nodes and their predecessors: the nodes of class 0, of class 1, …, then the matched calls.

    kind      : uint8 [n], COMPUTE, MEET, LEAD and HOST (the host issues an op) or
                JOIN (which takes no time)
    owner     : int32 [n], the class of a node; -1 for MEET
    op        : int64 [n], matched call of a MEET node, else the op that the node is of
    iteration : int32 [n]
    start     : int64 [n + 1], slices of ``before``
    before    : int64 [edges], the nodes that must end first
    node_of   : per class and iteration: op -> its node (-1: none)
    ready_of  : per class and iteration: op -> the node at which its rank is ready for it (-1: none)
    sent      : int64 [sends, 2], nodes of sends into buffers, and their matched calls
    """

    kind: np.ndarray
    owner: np.ndarray
    op: np.ndarray
    iteration: np.ndarray
    start: np.ndarray
    before: np.ndarray
    node_of: tuple[tuple[np.ndarray, ...], ...]
    ready_of: tuple[tuple[np.ndarray, ...], ...]
    sent: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def followers(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n + 1] slices of, int64 [edges]) the nodes that wait for each node."""
        return loops.transposed(self.start, self.before)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [m]: nodes such that predecessors come first; m < n if the job hangs."""
        return loops.order(np.diff(self.start), *self.followers)

    def check_ends(self) -> None:
        """PrismError if some nodes wait for each other."""
        if waiting := len(self) - len(self.order):
            fix = "prism check names calls that do not match; prism hang draws who waits for whom"
            raise PrismError(f"the job hangs: {waiting} steps wait for each other", fix=fix)


def build_issue_graph(graph: WorldGraph, iterations: int = 1, buffered: int = 0) -> IssueGraph:
    """The dependencies of ``iterations`` iterations, one straight after the other; ``buffered``:
    bytes on their way to a peer that NCCL's buffers hold, 0: sends wait for their receivers.
    """
    issues = []
    for program, rank in zip(graph.program_list, graph.classes.representatives, strict=True):
        sizes = {name: len(graph.groups[name].group(rank)) for name in program.groups()}
        key = (*sizes.items(), iterations, buffered)
        if key not in program.derived:
            program.derived[key] = issue(program, sizes, iterations, buffered)
        issues.append(program.derived[key])
    return _assemble(graph, issues, iterations)


def _assemble(graph: WorldGraph, issues: list[Issue], iterations: int) -> IssueGraph:
    """Number the nodes of all classes, then their meetings, iteration after iteration."""
    meetings = len(graph.matched_calls)
    counts = [len(one.kind) for one in issues]
    base = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    local, n = int(base[-1]), int(base[-1]) + iterations * meetings
    parts, ready, meets, nodes, readies = [], [], [], [], []
    for one, own, of in zip(issues, base[:-1].tolist(), graph.matched_calls.of, strict=True):
        numbers = np.concatenate([local + i * meetings + of for i in range(iterations)])
        parts.append(_global(one.before, own, numbers))
        meets.append(numbers[one.calls])
        ready.append(own + one.ready)
        nodes.append(tuple(_global(one.node, own, numbers).reshape(iterations, -1)))
        readies.append(tuple(_global(one.ready_of, own, numbers).reshape(iterations, -1)))
    meet = np.concatenate([*meets, np.empty(0, dtype=np.int64)])
    arrivals = np.bincount(meet - local, minlength=n - local)
    lengths = np.concatenate([*(np.diff(one.start) for one in issues), arrivals])
    before = [*parts, np.concatenate([*ready, meet[:0]])[np.argsort(meet, kind="stable")]]
    numbers = np.arange(meetings, dtype=np.int64)
    sent = [
        np.stack([own + (mine := np.flatnonzero(one.kind == SENT)), of[one.op[mine]]], axis=1)
        for one, own, of in zip(issues, base[:-1].tolist(), graph.matched_calls.of, strict=True)
    ]
    return IssueGraph(
        np.concatenate([*(one.kind for one in issues), np.full(n - local, MEET, dtype=np.uint8)]),
        np.concatenate([np.repeat(np.arange(len(issues), dtype=np.int32), counts),
                        np.full(n - local, -1, dtype=np.int32)]),
        np.concatenate([*(one.op for one in issues), np.tile(numbers, iterations)]),
        np.concatenate([*(one.iteration for one in issues),
                        np.repeat(np.arange(iterations, dtype=np.int32), meetings)]),
        np.concatenate(([0], np.cumsum(lengths))),
        np.concatenate(before),
        tuple(nodes),
        tuple(readies),
        np.concatenate([*sent, np.empty((0, 2), dtype=np.int64)]),
    )  # fmt: skip


def _global(local: np.ndarray, own: int, numbers: np.ndarray) -> np.ndarray:
    """Nodes and meetings of one class as nodes of the whole; -1 for NOTHING."""
    meets = numbers[np.where(local < 0, -1 - local, 0)] if numbers.size else local
    return np.where(local == NOTHING, -1, np.where(local < 0, meets, local + own))
