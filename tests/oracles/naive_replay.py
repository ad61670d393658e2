"""A simulation of every single rank, with queues that are popped, to hold replay against.

It shares nothing with megatron_prism.replay: no graph, no classes, no longest path.  CUDA and NCCL
are played as they are documented: streams are queues of kernels and events, a call to NCCL is an
event on the issuing stream, a kernel on the communicator's stream that spins until all peers' do,
and an event that whoever waits for it waits for.
"""

import heapq
import random
from collections import Counter, defaultdict, deque
from fractions import Fraction
from itertools import count, pairwise

import numpy as np
from helpers.programs import members_of

from megatron_prism.core.programs.ops import CODE, Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.replay.costs import Prices

NUM = count()
CALL_NS = 4  # of the host for every call, in programs that know their host's time


class Event:
    done = False


class Part:
    """One collective or message: who must come, who has, how much is left to move."""

    def __init__(self, expected, ns, ports):
        self.expected, self.ns, self.ports = expected, ns, ports
        self.arrived, self.left, self.start, self.end = [], Fraction(ns), None, None


class Rank:
    def __init__(self, rank, ops, iterations):
        self.rank, self.todo = (
            rank,
            deque((i, k) for i in range(iterations) for k in range(len(ops))),
        )
        self.ops, self.iteration = ops, -1
        self.hosted = any(op.host >= 0 for op in ops)
        self.queues = defaultdict(deque)  # streams by name, communicators by (group, peer)
        self.blocked, self.handles, self.counts, self.issued = [], {}, Counter(), set()
        self.paid = None  # the op that the host may issue now


class Simulation:
    """ready, start, end: (rank, iteration, op) -> ns; ``hangs`` if something never came."""

    def __init__(self, programs, iterations=2, contention=False):
        self.programs, self.contention = programs, contention
        self.ranks = [Rank(r, list(programs.of(r)), iterations) for r in range(programs.world.size)]
        self.ready, self.start, self.end = {}, {}, {}
        self.parts, self.moving, self.heap, self.now, self.arrivals = {}, [], [], 0, 0
        while True:
            while sum(self.step(rank) for rank in self.ranks):
                pass
            later = [self.heap[0][0]] if self.heap else []
            later += [self.now + -(-p.left // self.rate(p)) for p in self.moving]
            if not later:
                break
            self.advance(int(min(later)))
        self.hangs = any(rank.todo or any(rank.queues.values()) for rank in self.ranks)

    # -- time -------------------------------------------------------------------------------------
    def rate(self, part):
        if not self.contention:
            return Fraction(1)
        used = Counter(port for other in self.moving for port in other.ports)
        return Fraction(1, max((used[port] for port in part.ports), default=1))

    def advance(self, to):
        rates = [self.rate(part) for part in self.moving]
        for part, rate in zip(self.moving, rates, strict=True):
            part.left -= rate * (to - self.now)
        self.now = to
        while self.heap and self.heap[0][0] == to:
            heapq.heappop(self.heap)[2].done = True
        for part in [p for p in self.moving if p.left <= 0]:
            self.moving.remove(part)
            part.end = to

    # -- one rank ---------------------------------------------------------------------------------
    def step(self, rank):
        moved, arrivals = False, self.arrivals
        while rank.todo and all(event.done for event in rank.blocked):
            if not self.prepared(rank, *rank.todo[0]):
                break
            self.issue(rank, *rank.todo.popleft())
            moved = True
        for queue in list(rank.queues.values()):
            while queue and self.run(rank, queue[0]):
                queue.popleft()
                moved = True
        return moved or self.arrivals > arrivals

    def run(self, rank, entry):
        """Whether the head of a queue is done, now."""
        what, value = entry[:2]
        if what == "set":
            value.done = True
        elif what == "kernel":
            return self.kernel(rank, value, *entry[2:])
        elif what == "call":
            return sum(self.meet(key, part) for key, part in value) == len(value)
        return value.done

    def kernel(self, rank, key, ns, event):
        if key not in self.start:
            self.start[key] = self.now
            event.done = ns == 0
            if ns:
                heapq.heappush(self.heap, (self.now + ns, next(NUM), event))
        if event.done:
            self.end[key] = self.now
        return event.done

    def meet(self, key, part):
        if key not in self.ready:
            self.ready[key] = self.now
            part.arrived.append(key)
            self.arrivals += 1
            if len(part.arrived) == part.expected:
                part.start = self.now
                if part.ns:
                    self.moving.append(part)
                else:
                    part.end = self.now
        if part.start is not None:
            self.start[key] = part.start
        if part.end is not None:
            self.end[key] = part.end
        return part.end is not None

    # -- the host ---------------------------------------------------------------------------------
    def busy(self, ns):
        """What keeps the host for ``ns``, to be waited for."""
        event = Event()
        event.done = ns == 0
        if ns:
            heapq.heappush(self.heap, (self.now + ns, next(NUM), event))
        return [event]

    def prepared(self, rank, iteration, index):
        """Whether the host is through with what an op takes it before anything is launched; it
        begins with that if need be."""
        op = rank.ops[index]
        again = iteration == rank.iteration and index in rank.issued
        ns = CALL_NS if op.group else max(0, op.lead)
        if not rank.hosted or again or not ns or rank.paid == (iteration, index):
            return True
        rank.blocked, rank.paid = self.busy(ns), (iteration, index)
        return False

    def issue(self, rank, iteration, index):
        if iteration != rank.iteration:
            rank.iteration, rank.handles, rank.counts, rank.issued = iteration, {}, Counter(), set()
        op = rank.ops[index]
        stream = rank.queues[op.stream]
        if op.name == "compute":
            stream.append(("kernel", (rank.rank, iteration, index), op.ns, Event()))
            if rank.hosted:
                rank.blocked = self.busy(max(0, op.host) - max(0, op.lead))
        elif op.name == "record":
            rank.handles[op.handle] = self.marker(stream)
        elif op.name == "wait" and op.handle in rank.handles:
            stream.append(("await", rank.handles[op.handle]))
            if any(o.name == "barrier" and o.handle == op.handle for o in rank.ops):
                rank.blocked = [self.marker(stream)]
        elif op.name == "host_wait":
            queues = rank.queues.values() if op.note == "device" else [stream]
            rank.blocked = [self.marker(queue) for queue in queues]
        elif op.group and index not in rank.issued:
            together = [i for i, o in enumerate(rank.ops) if i == index or o.batch == op.batch >= 0]
            rank.issued.update(together)
            self.call(rank, iteration, together, stream)
            if op.name == "barrier" and op.handle < 0:
                rank.blocked = [self.marker(stream)]

    def marker(self, queue):
        event = Event()
        queue.append(("set", event))
        return event

    def call(self, rank, iteration, together, stream):
        first = rank.ops[together[0]]
        lane = "collectives"
        if first.batch < 0 and first.name in ("send", "recv"):
            group = members_of(self.programs, rank.rank, first.group)
            lane = group[(group.index(rank.rank) + first.peer) % len(group)]
        comm = rank.queues[first.group, lane]
        comm.append(("await", self.marker(stream)))
        parts = [((rank.rank, iteration, i), self.part(rank, iteration, i)) for i in together]
        comm.append(("call", parts))
        done = self.marker(comm)
        for i in together:
            if rank.ops[i].handle >= 0:
                rank.handles[rank.ops[i].handle] = done
            else:
                stream.append(("await", done))

    def part(self, rank, iteration, index):
        op = rank.ops[index]
        group = members_of(self.programs, rank.rank, op.group)
        if op.name in ("send", "recv"):
            peer = group[(group.index(rank.rank) + op.peer) % len(group)]
            way = (rank.rank, peer) if op.name == "send" else (peer, rank.rank)
            fifo, expected = (op.group, "pair", way), 2
            ports = [(way[0], "out"), (way[1], "in")]
        else:
            fifo, expected = (op.group, "all", group), len(group)
            ports = [(r, way) for r in group for way in ("out", "in")]
        number = rank.counts[op.name, fifo]
        if op.name not in ("send", "recv"):
            number = rank.counts["all", fifo]
            rank.counts["all", fifo] += 1
        rank.counts[op.name, fifo] += 1
        key = (iteration, fifo, number)
        if key not in self.parts:
            self.parts[key] = Part(expected, max(0, op.num_in, op.num_out), ports)
        return self.parts[key]


# -- random worlds --------------------------------------------------------------------------------
WORLDS = [
    World(2, pp=2),
    World(4, tp=2),
    World(8, tp=2, pp=2),
    World(6, pp=3),
    World(16, tp=2, pp=4, cp=2),
    World(12, tp=3, pp=2),
]
TP, PP = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"
DP, CP = "DATA_PARALLEL_GROUP_WITH_CP", "CONTEXT_PARALLEL_GROUP"


def random_groups(rng, size):
    """A partition of the ranks into groups of any sizes, in any order."""
    ranks = rng.sample(range(size), size)
    cuts = sorted(rng.sample(range(1, size), rng.randint(0, min(3, size - 1))))
    return tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True) if b > a)


def skeleton(rng, world):
    """What all ranks do together, in an order that cannot hang by itself."""
    steps = []
    for _ in range(rng.randint(1, 7)):
        kind = rng.choice(["all", "all", "ring", "halo", "down", "up", "batch"])
        group = rng.choice([TP, DP, CP, PP, "A", "B", "default_pg"])
        steps.append((kind, group, [rng.choice([0, 1, 7, 30, 100]) for _ in range(3)]))
    return steps


class Writer:
    """One program: the skeleton with local ops, streams and handles of its own."""

    def __init__(self, rng, stage, world):
        self.rng, self.stage, self.world = rng, stage, world
        self.ops, self.open, self.handles, self.batches = [], [], count(), count()
        self.hosted = rng.random() < 0.4

    def local(self):
        rng = self.rng
        for _ in range(rng.randint(0, 2)):
            stream = rng.choice(["main", "main", "side"])
            what = rng.random()
            if what < 0.6:
                host = rng.choice([-1, 0, 2, 15, 40]) if self.hosted else -1
                lead = rng.choice([-1, 0, host // 2, host]) if host >= 0 else -1
                ns = rng.choice([0, 3, 20, 55])
                self.ops.append(Op("compute", ns=ns, stream=stream, host=host, lead=lead))
            elif what < 0.7:
                self.open.append(next(self.handles))
                self.ops.append(Op("record", stream=stream, handle=self.open[-1]))
            elif what < 0.77:
                note = rng.choice(["", "device"])
                self.ops.append(Op("host_wait", stream=stream, note=note))
            elif self.open:
                handle = self.open.pop(rng.randrange(len(self.open)))
                self.ops.append(Op("wait", stream=stream, handle=handle))

    def handle(self, chance=0.4):
        if self.rng.random() > chance:
            return -1
        self.open.append(next(self.handles))
        return self.open[-1]

    def write(self, steps):
        for kind, group, sizes in steps:
            self.local()
            stream = self.rng.choice(["main", "main", "side"])
            n, batch = sizes[0], next(self.batches)
            more = {"group": group, "dtype": "int8", "stream": stream}
            if kind == "all" and sizes[1] == 7:
                self.ops.append(Op("barrier", group=group, stream=stream, handle=self.handle()))
            elif kind == "all":
                self.ops.append(Op("all_reduce", **more, num_in=n, num_out=n, handle=self.handle()))
            elif kind == "batch":
                self.ops += [
                    Op("all_reduce", **more, num_in=s, num_out=s, batch=batch) for s in sizes
                ]
            elif kind in ("ring", "halo") and group not in "AB":
                joint = {"batch": batch} if kind == "ring" else {}
                for name, peer in (("send", 1), ("recv", -1)):
                    size = {"num_in" if name == "send" else "num_out": n}
                    self.ops.append(
                        Op(name, **more, **size, **joint, peer=peer, handle=self.handle(0.9))
                    )
            elif kind in ("down", "up"):
                step = 1 if kind == "down" else -1
                more["group"] = PP
                if 0 <= self.stage - step < self.world.pp:
                    self.ops.append(Op("recv", **more, num_out=n, peer=-step, handle=self.handle()))
                self.local()
                if 0 <= self.stage + step < self.world.pp:
                    self.ops.append(Op("send", **more, num_in=n, peer=step, handle=self.handle()))
        self.local()
        return self.ops


def random_programs(seed, disorder=False):
    """A random world; with ``disorder`` one program swaps two calls of different groups."""
    rng = random.Random(seed)
    world = rng.choice(WORLDS)
    groups = {name: random_groups(rng, world.size) for name in "AB"}
    steps = skeleton(rng, world)
    of = np.zeros(world.size, dtype=np.int32)
    programs = [
        (stage, Writer(rng, stage, world).write(steps))
        for stage in range(world.pp)
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    for rank in range(world.size):
        fit = [i for i, (s, _) in enumerate(programs) if s == world._along("pp", np.array([rank]))]
        of[rank] = fit[0] if rng.random() < 0.7 else rng.choice(fit)
    if disorder:
        ops = rng.choice(programs)[1]
        calls = [i for i, op in enumerate(ops) if op.group]
        pairs = [(a, b) for a, b in pairwise(calls) if ops[a].group != ops[b].group]
        pairs = [(a, b) for a, b in pairs if ops[a].batch < 0 and ops[b].batch < 0]
        if pairs:
            a, b = rng.choice(pairs)
            ops[a], ops[b] = ops[b], ops[a]
    made = tuple(
        Program.from_ops(int(np.flatnonzero(of == i)[0]) if (of == i).any() else 0, ops)
        for i, (_, ops) in enumerate(programs)
    )
    return Programs(world, made, of, groups)


def prices_of(graph):
    """Prices that say what the ops themselves say: ns of segments, a byte a nanosecond."""
    meet = graph.matched_calls
    meetings = np.zeros(len(meet), dtype=np.int64)
    for number in range(len(meet)):
        index, at = meet.members(number)[0]
        op = graph.program_list[index][at]
        meetings[number] = max(0, op.num_in, op.num_out)
    compute = tuple(np.maximum(p.ops["ns"], 0) for p in graph.program_list)
    zeros = tuple(np.zeros(len(c), dtype=np.uint8) for c in compute)
    none = np.zeros(len(meet), dtype=np.uint8)
    lead = tuple(np.maximum(p.ops["lead"], 0) for p in graph.program_list)
    host = tuple(
        np.where(p.ops["name"] == CODE["compute"], np.maximum(p.ops["host"], 0) - first, CALL_NS)
        for p, first in zip(graph.program_list, lead, strict=True)
    )
    return Prices(compute, zeros, meetings, none, ("test",), lead, host, zeros)
