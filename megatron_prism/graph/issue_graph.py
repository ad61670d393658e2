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
from megatron_prism.core.programs.ops import CODE, IS_CALL, IS_PAIR
from megatron_prism.core.programs.program import Program
from megatron_prism.graph import loops
from megatron_prism.graph.world_graph import WorldGraph

# kinds of nodes
COMPUTE = 0  # a segment
JOIN = 1  # a point in time
MEET = 2  # a matched call; the nodes of all other kinds belong to one class
LEAD = 3  # the host's time for an op until the device may begin the op
HOST = 4  # the host's time for an op after that
SENT = 5  # a send that does not wait for its receiver

NOTHING = int(np.iinfo(np.int64).max)  # stands for no node

# globals of the loop, which numba compiles as constants
_WAIT, _RECORD, _HOST = CODE["wait"], CODE["record"], CODE["host_wait"]
_COMPUTE, _BARRIER = CODE["compute"], CODE["barrier"]
_SEND = CODE["send"]

_STEPS = 8  # of NCCL's buffers (NCCL_STEPS): on H100 eight messages of up to 8 MiB fit into 64
_LEAST_ROOM = 1024  # entries of the list of edges at first


@dataclass(frozen=True)
class Issue:
    """The nodes of one class, numbered from 0.

    ``-1 - k`` is the meeting of call ``k``, where ``k = iteration * ops + op``.

    Attributes:
        kind: uint8 [nodes], COMPUTE, JOIN, LEAD, HOST or SENT.
        op: int64 [nodes], the op that a node is of.
        iteration: int32 [nodes].
        start: int64 [nodes + 1], slices of ``before``.
        before: int64 [edges], nodes and meetings that end before node i:
            ``before[start[i]:start[i + 1]]``.
        calls: int64 [calls], the calls, each an index k.
        ready: int64 [calls], the node at which the rank is ready for each call.
        node: int64 [iterations * ops], node or meeting of every op; NOTHING: none.
        ready_of: int64 [iterations * ops], as ``ready``; NOTHING for ops that are no calls.
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


def issue(program: Program, sizes: Mapping[str, int], iterations: int, buffered: int) -> Issue:
    """Read a program: which node waits for which, when the rank issues it several times in a row.

    Args:
        program: The program of a class.
        sizes: Group description -> ranks in the group.
        iterations: How often the program runs, one iteration straight after the other.
        buffered: Bytes on their way to a peer that NCCL's buffers hold; 0: no buffers.
    """
    ops = program.ops
    names = ops["name"]
    num_ops = len(program)
    is_call = IS_CALL[names]
    has_host = int(program.knows_host)

    # what the ops use: communicators, handles, batches, buffers
    comms, num_comms = _comms_of_ops(program, sizes, is_call)
    handles, num_handles = _numbered(ops["handle"])
    first, following, largest_batch = _batches(ops["batch"])
    pairs, num_pairs = _pairs_of_buffered_sends(program, buffered)
    # NCCL hands its buffers out in whole steps: a send of one byte holds one
    step_bytes = max(1, buffered // _STEPS)
    steps_of_send = np.maximum(1, -(-program.bytes_in // step_bytes))
    held_bytes = steps_of_send * step_bytes
    # a host_wait for the whole device has this note
    is_device_note = np.array([text == "device" for text in program.strings])
    is_device_wait = is_device_note[ops["note"]]

    # in the order of ``_read``'s parameters
    inputs = [
        ops["name"].astype(np.int64),
        ops["stream"].astype(np.int64),
        comms,
        handles,
        first,
        following,
        is_call.astype(np.int64),
        is_device_wait.astype(np.int64),
        pairs,
        held_bytes,
        has_host,
        iterations,
        buffered,
    ]

    # the most nodes that ops can have: a segment one, with its host three; a call four
    nodes_of_op = 1 + 3 * is_call
    nodes_of_op[names == _COMPUTE] = 1 + 2 * has_host
    most_nodes = int(nodes_of_op.sum()) * iterations
    num_calls = num_ops * iterations
    state_sizes = (
        3 * len(program.strings),
        2 * num_comms,
        3 * num_handles,
        3 * num_pairs,
        2 * num_calls,
        largest_batch,
    )

    # the loop says when the edges do not fit: it then runs again with twice the room
    room = 3 * most_nodes + _LEAST_ROOM
    while True:
        state = [np.zeros(size, dtype=np.int64) for size in state_sizes]
        node_columns = [np.zeros(most_nodes, dtype=np.int64) for _ in range(4)]
        call_columns = [np.full(num_calls, NOTHING, dtype=np.int64) for _ in range(4)]
        edges = np.zeros(room, dtype=np.int64)
        done = np.zeros(iterations + 2, dtype=np.int64)
        results = [*state, *node_columns, *call_columns, edges, done]
        loops.run(_read, inputs, results, loops.SHORT)
        if done[-1] >= 0:
            break
        room *= 2

    num_nodes = done[iterations]
    kind, op, edges_begin, num_edges = (column[:num_nodes] for column in node_columns)
    start = np.concatenate(([0], np.cumsum(num_edges)))
    # lists of edges lie anywhere in ``edges``: join them, in the order of the nodes
    shift = np.repeat(edges_begin - start[:-1], num_edges)
    calls, ready, node, ready_of = call_columns
    nodes_of_iteration = np.diff(done[:-1])
    return Issue(
        kind=kind.astype(np.uint8),
        op=op,
        iteration=np.repeat(np.arange(iterations, dtype=np.int32), nodes_of_iteration),
        start=start,
        before=edges[shift + np.arange(start[-1])],
        calls=calls[: done[-1]],
        ready=ready[: done[-1]],
        node=node,
        ready_of=ready_of,
    )


def _comms_of_ops(
    program: Program, sizes: Mapping[str, int], is_call: np.ndarray
) -> tuple[np.ndarray, int]:
    """Number the communicators, each with a stream: (int64 [ops], -1 for no call; how many).

    A group has one for its calls, and one for each peer of its messages outside batches.
    """
    ops = program.ops
    group_sizes = np.array([max(1, sizes.get(text, 1)) for text in program.strings], dtype=np.int64)
    # 1 further and 1 back are the same pair in a group of two, and share its stream
    peers = 1 + ops["peer"] % group_sizes[ops["group"]]
    is_unbatched_message = IS_PAIR[ops["name"]] & (ops["batch"] < 0)
    comm_of_group = np.where(is_unbatched_message, peers, 0)
    keys = _group_keys(program) | comm_of_group
    return _numbered(np.where(is_call, keys, -1))


def _pairs_of_buffered_sends(program: Program, buffered: int) -> tuple[np.ndarray, int]:
    """Number the (group, peer) of sends that fit into buffers: (int64 [ops], -1: none; how many).

    Args:
        program: The program of a class.
        buffered: Bytes of the buffers of a pair.
    """
    ops = program.ops
    fits = (ops["name"] == _SEND) & (program.bytes_in <= buffered) & (buffered > 0)
    # peers may be negative: 2^32 more keeps them apart from the group's bits
    peers = ops["peer"].astype(np.int64) + (1 << 32)
    keys = _group_keys(program) | peers
    return _numbered(np.where(fits, keys, -1))


def _group_keys(program: Program) -> np.ndarray:
    """Put the group of each op above 40 free bits: int64 [ops]."""
    groups = program.ops["group"].astype(np.int64)
    return groups << 40


def _numbered(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Number the values that are not negative, in ascending order.

    Returns:
        int64 [n], the number of each value, -1 for negative values; and how many numbers there are.
    """
    numbers = np.full(len(values), -1, dtype=np.int64)
    places = np.flatnonzero(values >= 0)
    distinct, numbers[places] = np.unique(values[places], return_inverse=True)
    return numbers, len(distinct)


def _batches(batch: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Link the ops of each batch; an op without a batch is one of its own.

    Args:
        batch: int [ops], the batch of each op; negative: none.

    Returns:
        int64 [ops], the first op of the batch of each op; int64 [ops], the next op of the batch
        (-1: none); and how many ops the largest batch has.
    """
    first = np.arange(len(batch))
    following = np.full(len(batch), -1, dtype=np.int64)

    # ops in batches, one batch after the other
    members = np.flatnonzero(batch >= 0)
    members = members[np.argsort(batch[members], kind="stable")]
    batch_of_member = batch[members]
    begins = np.flatnonzero(np.diff(batch_of_member, prepend=-1))
    counts = np.diff(begins, append=len(members))
    first[members] = np.repeat(members[begins], counts)

    has_next = np.flatnonzero(batch_of_member[1:] == batch_of_member[:-1])
    following[members[has_next]] = members[has_next + 1]
    return first, following, int(counts.max(initial=1))


def _read(  # type: ignore[no-untyped-def]
    names,
    op_stream,
    op_comm,
    op_handle,
    first,
    following,
    is_call,
    is_device_wait,
    pair,
    held_bytes,
    has_host,
    iterations,
    buffered,
    streams,
    comms,
    handles,
    pairs,
    sends,
    ends,
    kind,
    op,
    at,
    size,
    called,
    readies,
    node,
    ready_of,
    edges,
    done,
):
    """Read the program: where the rank stands is what the next op of each queue must wait for.

    Numba compiles this loop for large programs, so it fills flat arrays.  Lists of nodes lie in
    ``edges``.

    Args:
        names: Per op: its code.
        op_stream: Per op: its stream.
        op_comm: Per op: its communicator; -1: none.
        op_handle: Per op: its handle; -1: none.
        first: Per op: the first op of its batch.
        following: Per op: the next op of its batch; -1: none.
        is_call: Per op: 1 for calls.
        is_device_wait: Per op: 1 if a host_wait waits for the whole device.
        pair: Per op: the pair of ranks of a send into buffers; -1: none.
        held_bytes: Per op: bytes of buffers that a send needs.
        has_host: 1 if the program says how long the host takes.
        iterations: How many.
        buffered: Bytes of the buffers of a pair.
        streams: Three entries a stream: where the list of its last ops is, its length, and one of
            the streams in the order of their first ops.
        comms: Two entries each: its last node, and one of the communicators in their order.
        handles: Three entries each: where its list is, its length, 1 if it is a barrier's.
        pairs: Three entries each: bytes on their way, the first and the last send in ``sends``.
        sends: Two entries a call: bytes, and the next send of the pair.
        ends: Room for the nodes that end a batch.
        kind: Result, per node: its kind.
        op: Result, per node: its op.
        at: Result, per node: where its predecessors begin in ``edges``.
        size: Result, per node: how many predecessors it has.
        called: Result, per call: the call.
        readies: Result, per call: the node at which the rank is ready.
        node: Result, per iteration and op: its node.
        ready_of: Result, per iteration and op: the node at which the rank is ready.
        edges: Result: lists of nodes.
        done: Result: nodes before each iteration and in all; then the calls, or -1 if ``edges`` is
            too short.
    """
    num_ops = len(names)
    num_comms = len(comms) // 2
    n = 0  # the next node
    top = 0  # the next free entry of ``edges``
    calls = 0
    flying = 0  # sends in buffers
    used_streams = 0
    used_comms = 0
    longest = 1  # list of a stream or a handle
    host = -1  # the node at which the host stands; -1: nothing holds it
    for i in range(num_comms):
        comms[2 * i] = NOTHING
    for iteration in range(iterations):
        done[iteration] = n
        base = iteration * num_ops
        # handles belong to one iteration
        for i in range(len(handles) // 3):
            handles[3 * i + 1] = 0
            handles[3 * i + 2] = 0
        for i in range(num_ops):
            name = names[i]
            stream = op_stream[i]
            handle = op_handle[i]
            # an op adds at most so many edges
            lists = (used_streams + 3) * (longest + 1)
            needed = lists + num_comms + 3 * len(ends) + flying + 8
            if top + needed > len(edges):
                done[iterations + 1] = -1
                return
            queue = streams[3 * stream]
            count = streams[3 * stream + 1]
            blocks_host = False
            waits_for_device = False
            if name == _COMPUTE and has_host:
                # a segment between the two nodes in which the host issues it
                lead = n
                segment = n + 1
                after = n + 2
                for k in range(lead, after + 1):
                    op[k] = i
                kind[lead] = LEAD
                at[lead] = top
                if host >= 0:
                    edges[top] = host
                    top += 1
                size[lead] = top - at[lead]
                kind[segment] = COMPUTE
                at[segment] = top
                for j in range(queue, queue + count):
                    edges[top] = edges[j]
                    top += 1
                edges[top] = lead
                top += 1
                size[segment] = top - at[segment]
                kind[after] = HOST
                at[after] = top
                edges[top] = lead
                top += 1
                size[after] = 1
                node[base + i] = segment
                edges[top] = segment
                used_streams = _set(streams, stream, top, 1, used_streams)
                top += 1
                host = after
                n += 3
            elif name == _COMPUTE:
                # a segment that the host issued ahead
                kind[n] = COMPUTE
                op[n] = i
                at[n] = top
                top = _queue(queue, count, host, edges, top)
                size[n] = top - at[n]
                node[base + i] = n
                edges[top] = n
                used_streams = _set(streams, stream, top, 1, used_streams)
                top += 1
                n += 1
            elif is_call[i] and first[i] == i:
                # a call, or a batch: the rest of a batch is issued with its first call
                if has_host:
                    kind[n] = HOST
                    op[n] = i
                    at[n] = top
                    size[n] = 0
                    if host >= 0:
                        edges[top] = host
                        top += 1
                        size[n] = 1
                    host = n
                    n += 1

                # the rank is ready when its stream, its host and the group's stream are
                comm = op_comm[i]
                ready = n
                begin = top
                top = _queue(queue, count, host, edges, top)
                if comms[2 * comm] != NOTHING:
                    top = _append(edges, begin, top, comms[2 * comm])
                else:
                    comms[2 * used_comms + 1] = comm
                    used_comms += 1
                kind[n] = JOIN
                op[n] = i
                at[n] = begin
                size[n] = top - begin
                n += 1

                # the calls of the batch
                member = i
                num_members = 0
                while member >= 0:
                    call = base + member
                    called[calls] = call
                    readies[calls] = ready
                    calls += 1
                    node[call] = -1 - call
                    ready_of[call] = ready
                    if pair[member] >= 0:
                        # a send into NCCL's buffers, once they have room
                        row = 3 * pair[member]
                        kind[n] = SENT
                        op[n] = member
                        at[n] = top
                        edges[top] = ready
                        top += 1
                        sends[2 * call] = held_bytes[member]
                        sends[2 * call + 1] = -1
                        if pairs[row] > 0:
                            last_send = pairs[row + 2]
                            sends[2 * last_send + 1] = call
                        else:
                            pairs[row + 1] = call
                        pairs[row + 2] = call
                        pairs[row] += held_bytes[member]
                        flying += 1
                        # the oldest sends must have been received first
                        while pairs[row] > buffered:
                            oldest = pairs[row + 1]
                            edges[top] = -1 - oldest
                            top += 1
                            pairs[row] -= sends[2 * oldest]
                            pairs[row + 1] = sends[2 * oldest + 1]
                            flying -= 1
                        size[n] = top - at[n]
                        node[call] = n
                        n += 1
                    ends[num_members] = node[call]
                    num_members += 1
                    member = following[member]

                # a batch ends when all its calls have ended
                end = ends[0]
                if num_members > 1:
                    kind[n] = JOIN
                    op[n] = i
                    at[n] = top
                    size[n] = num_members
                    for j in range(num_members):
                        edges[top] = ends[j]
                        top += 1
                    end = n
                    n += 1
                comms[2 * comm] = end
                edges[top] = end

                # who waits for the end: handles, else the stream
                member = i
                while member >= 0:
                    row = 3 * op_handle[member]
                    if row >= 0:
                        handles[row] = top
                        handles[row + 1] = 1
                    else:
                        used_streams = _set(streams, stream, top, 1, used_streams)
                    member = following[member]
                top += 1
                if name == _BARRIER and handle < 0:
                    blocks_host = True
                elif name == _BARRIER:
                    handles[3 * handle + 2] = 1
            elif name == _WAIT:
                # the stream waits for what it had, for the host and for the handle's list
                begin = top
                top = _queue(queue, count, host, edges, top)
                if handle >= 0:
                    where = handles[3 * handle]
                    num_awaited = handles[3 * handle + 1]
                    is_same_list = num_awaited == top - begin
                    for j in range(num_awaited):
                        is_same_list = is_same_list and edges[where + j] == edges[begin + j]
                    for j in range(num_awaited):
                        top = _append(edges, begin, top, edges[where + j])
                    # nothing new: the stream keeps its list
                    if is_same_list:
                        top = begin
                    # WorkNCCL blocks the host in the wait for a barrier, too
                    blocks_host = handles[3 * handle + 2] == 1
                if top > begin:
                    used_streams = _set(streams, stream, begin, top - begin, used_streams)
                    longest = max(longest, top - begin)
            elif name == _RECORD and handle >= 0:
                # the event is where the stream and the host stand
                handles[3 * handle] = top
                top = _queue(queue, count, host, edges, top)
                handles[3 * handle + 1] = top - handles[3 * handle]
                longest = max(longest, handles[3 * handle + 1])
            elif name == _HOST:
                blocks_host = True
                waits_for_device = is_device_wait[i] == 1
            if blocks_host:
                # the host waits for the op's stream
                begin = top
                queue = streams[3 * stream]
                count = streams[3 * stream + 1]
                for j in range(queue, queue + count):
                    top = _append(edges, begin, top, edges[j])
                # … or for all streams and communicators
                if waits_for_device:
                    for k in range(used_streams):
                        used_stream = streams[3 * k + 2]
                        queue = streams[3 * used_stream]
                        count = streams[3 * used_stream + 1]
                        for j in range(queue, queue + count):
                            top = _append(edges, begin, top, edges[j])
                    for k in range(used_comms):
                        comm = comms[2 * k + 1]
                        top = _append(edges, begin, top, comms[2 * comm])
                if top > begin:
                    if host >= 0:
                        top = _append(edges, begin, top, host)
                    kind[n] = JOIN
                    op[n] = i
                    at[n] = begin
                    size[n] = top - begin
                    host = n
                    n += 1
    done[iterations] = n
    done[iterations + 1] = calls


def _queue(queue: int, count: int, host: int, edges: np.ndarray, top: int) -> int:
    """Write what the next op of a stream waits for at ``top``: the stream's list, and the host.

    Args:
        queue: Where the stream's list is in ``edges``.
        count: The length of the list.
        host: The node at which the host stands; -1: nothing holds it.
        edges: Lists of nodes.
        top: The first free entry of ``edges``.

    Returns:
        The first free entry afterwards.
    """
    begin = top
    for j in range(queue, queue + count):
        edges[top] = edges[j]
        top += 1
    if host < 0:
        return top
    return _append(edges, begin, top, host)


def _append(edges: np.ndarray, begin: int, top: int, value: int) -> int:
    """Add a node to the list from ``begin`` to ``top`` unless the list has it; give the new end."""
    for j in range(begin, top):
        if edges[j] == value:
            return top
    edges[top] = value
    return top + 1


def _set(streams: np.ndarray, stream: int, where: int, count: int, used: int) -> int:
    """Give a stream a list; return how many streams have had a list."""
    row = 3 * stream
    if streams[row + 1] == 0:
        streams[3 * used + 2] = stream
        used += 1
    streams[row] = where
    streams[row + 1] = count
    return used


@dataclass(frozen=True)
class IssueGraph:
    """Nodes and their predecessors: the nodes of class 0, of class 1, …, then the matched calls.

    Attributes:
        kind: uint8 [n], COMPUTE, JOIN (takes no time), MEET, LEAD and HOST (the host issues an
            op) or SENT (a send into buffers).
        owner: int32 [n], the class of a node; -1 for MEET.
        op: int64 [n], the matched call of a MEET node, else the op that the node is of.
        iteration: int32 [n].
        start: int64 [n + 1], slices of ``before``.
        before: int64 [edges], the nodes that must end first.
        node_of: Per class and iteration: op -> its node (-1: none).
        ready_of: Per class and iteration: op -> the node at which its rank is ready (-1: none).
        sent: int64 [sends, 2], nodes of sends into buffers, and their matched calls.
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
        """Count the nodes."""
        return len(self.kind)

    @cached_property
    def followers(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n + 1] slices of, int64 [edges]) the nodes that wait for each node."""
        return loops.transposed(self.start, self.before)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [m]: nodes such that predecessors come first; m < n if the job hangs."""
        num_predecessors = np.diff(self.start)
        return loops.order(num_predecessors, *self.followers)

    def check_ends(self) -> None:
        """Refuse a graph in which some nodes wait for each other.

        Raises:
            PrismError: The job hangs.
        """
        num_waiting = len(self) - len(self.order)
        if num_waiting == 0:
            return
        fix = "prism check names calls that do not match; prism hang draws who waits for whom"
        raise PrismError(f"the job hangs: {num_waiting} steps wait for each other", fix=fix)


def build_issue_graph(graph: WorldGraph, iterations: int = 1, buffered: int = 0) -> IssueGraph:
    """Build the dependencies of several iterations, one straight after the other.

    Args:
        graph: The world graph.
        iterations: How many iterations.
        buffered: Bytes on their way to a peer that NCCL's buffers hold; 0: sends wait for their
            receivers.
    """
    issues = []
    for program, rank in zip(graph.program_list, graph.classes.representatives, strict=True):
        sizes = {name: len(graph.groups[name].group(rank)) for name in program.groups()}
        # classes that run the same program in groups of the same sizes share the nodes
        key = (*sizes.items(), iterations, buffered)
        if key not in program.derived:
            program.derived[key] = issue(program, sizes, iterations, buffered)
        issues.append(program.derived[key])
    return _assemble(graph, issues, iterations)


def _assemble(graph: WorldGraph, issues: list[Issue], iterations: int) -> IssueGraph:
    """Number the nodes of all classes, then their meetings, iteration after iteration."""
    num_matched_calls = len(graph.matched_calls)
    num_meetings = iterations * num_matched_calls
    counts = [len(class_issue.kind) for class_issue in issues]
    base = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    first_meeting = int(base[-1])

    # the parts of each class, in numbers of the whole graph
    before, meetings, ready_nodes, sends = [], [], [], []
    node_of, ready_of = [], []
    matched_call_of_ops = graph.matched_calls.of
    first_meetings = [first_meeting + i * num_matched_calls for i in range(iterations)]
    bases = base[:-1].tolist()
    for class_issue, class_base, matched in zip(issues, bases, matched_call_of_ops, strict=True):
        meeting_of_call = np.concatenate([begin + matched for begin in first_meetings])
        before.append(_global(class_issue.before, class_base, meeting_of_call))
        meetings.append(meeting_of_call[class_issue.calls])
        ready_nodes.append(class_base + class_issue.ready)
        nodes = _global(class_issue.node, class_base, meeting_of_call)
        node_of.append(tuple(nodes.reshape(iterations, -1)))
        ready = _global(class_issue.ready_of, class_base, meeting_of_call)
        ready_of.append(tuple(ready.reshape(iterations, -1)))
        sent_nodes = np.flatnonzero(class_issue.kind == SENT)
        sent_calls = matched[class_issue.op[sent_nodes]]
        sends.append(np.stack([class_base + sent_nodes, sent_calls], axis=1))

    # what the meetings wait for: the nodes at which their members are ready
    nothing = np.empty(0, dtype=np.int64)
    meeting = np.concatenate([*meetings, nothing])
    arrivals = np.bincount(meeting - first_meeting, minlength=num_meetings)
    ready_node = np.concatenate([*ready_nodes, nothing])
    by_meeting = np.argsort(meeting, kind="stable")
    before.append(ready_node[by_meeting])
    num_predecessors = [np.diff(class_issue.start) for class_issue in issues]
    num_predecessors.append(arrivals)
    lengths = np.concatenate(num_predecessors)

    # the columns: those of the classes, then those of the meetings
    kinds = [class_issue.kind for class_issue in issues]
    kinds.append(np.full(num_meetings, MEET, dtype=np.uint8))
    owners = np.repeat(np.arange(len(issues), dtype=np.int32), counts)
    no_owner = np.full(num_meetings, -1, dtype=np.int32)
    ops = [class_issue.op for class_issue in issues]
    ops.append(np.tile(np.arange(num_matched_calls, dtype=np.int64), iterations))
    iterations_of_nodes = [class_issue.iteration for class_issue in issues]
    iteration_numbers = np.arange(iterations, dtype=np.int32)
    iterations_of_nodes.append(np.repeat(iteration_numbers, num_matched_calls))
    return IssueGraph(
        kind=np.concatenate(kinds),
        owner=np.concatenate([owners, no_owner]),
        op=np.concatenate(ops),
        iteration=np.concatenate(iterations_of_nodes),
        start=np.concatenate(([0], np.cumsum(lengths))),
        before=np.concatenate(before),
        node_of=tuple(node_of),
        ready_of=tuple(ready_of),
        sent=np.concatenate([*sends, np.empty((0, 2), dtype=np.int64)]),
    )


def _global(local: np.ndarray, base: int, meeting_of_call: np.ndarray) -> np.ndarray:
    """Number nodes and meetings of one class as nodes of the whole graph.

    Args:
        local: int64 [k], nodes of the class; ``-1 - call`` for a meeting; NOTHING for none.
        base: The first node of the class.
        meeting_of_call: int64 [iterations * ops], the node of the meeting of each call.

    Returns:
        int64 [k], -1 for NOTHING.
    """
    is_meeting = local < 0
    meetings = local
    if meeting_of_call.size:
        calls = np.where(is_meeting, -1 - local, 0)
        meetings = meeting_of_call[calls]
    nodes = np.where(is_meeting, meetings, local + base)
    return np.where(local == NOTHING, -1, nodes)
