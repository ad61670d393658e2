"""The stalled job, rank by rank and event by event, to hold ``graph.stall`` against.

It knows no classes and no graph: every rank's ops wait for each other as CUDA and NCCL document it,
and a call ends when all members came and their calls agree.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.ops import CODE, IS_COLLECTIVE, IS_PAIR
from megatron_prism.graph.classes import memberships
from megatron_prism.graph.matching import signature

WAIT, RECORD, HOST, SEND, BARRIER = (
    CODE[n] for n in ("wait", "record", "host_wait", "send", "barrier")
)
TALK = IS_COLLECTIVE | IS_PAIR


@dataclass
class Plan:
    """One program: what each op waits for, and who waits for it."""

    names: list[int]
    needs: list[int]
    followers: list[list[int]]
    hosts: list[bool]
    calls: list[tuple[str, int, int, bytes]]  # group, peer or 0, place in its FIFO, signature
    opens: list[int]  # the first op of its batch, or itself

    def place(self, op):
        """Where somebody stops who never gets to ``op``; behind all ops for None."""
        return len(self.names) if op is None or op >= len(self.names) else self.opens[op]


class Run:
    def __init__(self, programs, faults=None):
        self.programs, self.groups, n = programs, memberships(programs), programs.world.size
        self.fault = [(faults or {}).get(rank) for rank in range(n)]
        self.plans = [plan_of(program) for program in programs.programs]
        self.plan = [self.plans[i] for i in programs.program_of.tolist()]
        self.left = [list(p.needs) for p in self.plan]
        self.issued = [0] * n
        self.done = [bytearray(len(p.names)) for p in self.plan]
        self.ready = [bytearray(len(p.names)) for p in self.plan]
        self.met = defaultdict(list)
        self.stack, self.hosts = [], list(range(n))

    def to_the_end(self):
        while self.hosts or self.stack:
            while self.stack:
                self.end(*self.stack.pop())
            if self.hosts:
                self.issue(self.hosts.pop())
        return self

    def issue(self, rank):
        plan, left, at = self.plan[rank], self.left[rank], self.issued[rank]
        fault = self.fault[rank]
        stop = plan.place(None if fault is None else fault.host)
        while at < stop:
            self.issued[rank] = at + 1
            if left[at] == 0:
                self.start(rank, at)
            if plan.hosts[at] and not self.done[rank][at]:
                break
            at += 1

    def start(self, rank, op):
        fault, plan = self.fault[rank], self.plan[rank]
        if fault is not None and op >= plan.place(fault.device):
            return
        self.ready[rank][op] = 1
        if not TALK[plan.names[op]]:
            if plan.hosts[op]:
                self.done[rank][op] = 1  # at once: its host goes on in the loop that asked
                self.followers(rank, op)
            else:
                self.stack.append((rank, op))
            return
        key, size = self.meeting(rank, op)
        here = self.met[key]
        here.append((rank, op))
        if len(here) == size:
            first = self.plan[here[0][0]].calls[here[0][1]][3]
            agree = all(self.plan[r].calls[i][3] == first for r, i in here)
            if agree and self.splits_fit(plan.calls[op][0], here):
                self.stack += here

    def meeting(self, rank, op):
        """(which call it is, by how many ranks it is made)."""
        name, peer, place, _ = self.plan[rank].calls[op]
        group = self.groups[name]
        members, size = group.group(rank), max(1, len(group.group(rank)))
        if not IS_PAIR[self.plan[rank].names[op]]:
            return (name, int(group.group_of[rank]), place), size
        if self.plan[rank].names[op] == SEND:
            return (name, "p2p", rank, peer % size, place), 2
        sender = int(members[(int(group.position[rank]) + peer) % size])
        return (name, "p2p", sender, -peer % size, place), 2

    def splits_fit(self, name, here):
        """Whether every member of an all-to-all sends what the others expect."""
        rows = {}
        for rank, op in here:
            program = self.programs.of(rank)
            at = int(program.ops["splits"][op])
            if at < 0:
                return True
            rows[rank] = program.splits[at]
        rows = [rows[rank] for rank in self.groups[name].group(here[0][0]).tolist()]
        sent, wanted = ([row[side] for row in rows] for side in (0, 1))
        if any(len(row) != len(rows) for row in (*sent, *wanted)):
            return False
        return bool(np.array_equal(np.array(sent), np.array(wanted).T))

    def end(self, rank, op):
        if self.done[rank][op]:
            return
        self.done[rank][op] = 1
        self.followers(rank, op)
        if self.plan[rank].hosts[op]:  # a barrier: its host was waiting
            self.hosts.append(rank)

    def followers(self, rank, op):
        plan, left = self.plan[rank], self.left[rank]
        for other in plan.followers[op]:
            left[other] -= 1
            if left[other] == 0 and other < self.issued[rank]:
                self.start(rank, other)
                if plan.hosts[other] and self.done[rank][other]:
                    self.hosts.append(rank)


def plan_of(program):
    """The order that streams, handles, communicators and the host impose."""
    ops, n = program.ops, len(program)
    names, sequence = ops["name"].tolist(), program.sequence.tolist()
    streams, handles = ops["stream"].tolist(), ops["handle"].tolist()
    batches, groups, peers = (ops[c].tolist() for c in ("batch", "group", "peer"))
    queue = defaultdict(set)
    comms = defaultdict(set)
    events = {}
    needs = []
    together = defaultdict(list)
    for i in range(n):
        if batches[i] >= 0:
            together[batches[i]].append(i)
    for i, name in enumerate(names):
        before = set(queue[streams[i]])
        if TALK[name]:
            alone = batches[i] < 0 and IS_PAIR[name]
            comm = (groups[i], peers[i] if alone else 1 << 40)
            before = (before | comms[comm]) - set(together.get(batches[i], ()))
            if batches[i] >= 0 and together[batches[i]][0] != i:
                before = set(needs[together[batches[i]][0]])
            ends = set(together.get(batches[i], (i,)))
            comms[comm] = ends
            if handles[i] >= 0:
                events[handles[i]] = ends
            else:
                queue[streams[i]] = ends
        elif name == WAIT:
            before |= events.get(handles[i], set())
            queue[streams[i]] = {i}
        elif name == RECORD:
            events[handles[i]] = {i}
            queue[streams[i]] = {i}
        elif name == HOST:
            if program.strings[ops["note"][i]] == "device":
                before = before.union(*queue.values(), *comms.values())
        else:
            queue[streams[i]] = {i}
        needs.append({j for j in before if j < i} if not TALK[name] else before - {i})
    followers = [[] for _ in range(n)]
    for i, before in enumerate(needs):
        for j in before:
            followers[j].append(i)
    calls = calls_of(program, sequence)
    waits = np.flatnonzero((ops["name"] == BARRIER) & (ops["handle"] < 0)).tolist()
    hosts = [name == HOST for name in names]
    for i in waits:  # as NCCL's and gloo's hold the host
        hosts[i] = True
    opens = [together[batch][0] if batch >= 0 else i for i, batch in enumerate(batches)]
    return Plan(names, [len(b) for b in needs], followers, hosts, calls, opens)


def calls_of(program, sequence):
    signs = signature(program, np.arange(len(program)))
    pair = IS_PAIR[program.ops["name"]]
    signs[pair, 0] = 0  # a send and its receive agree in dtype and size
    splits = program.ops["splits"]
    signs[splits >= 0, 2] = 0
    signs[pair, 3:] = 0
    return [
        (program.strings[g], int(p), k, sign.tobytes())
        for g, p, k, sign in zip(
            program.ops["group"], program.ops["peer"], sequence, signs, strict=True
        )
    ]
