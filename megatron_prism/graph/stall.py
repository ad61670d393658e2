"""Run programs, with faults, until nothing moves: the stalled job.

In : Programs, and faults.  Out: Standstill: per rank what it issued and what of it ended.  Rules as
in ``replay.dag``, but rank by rank and without times, and for programs that do not fit together: a
call ends when all members are ready and their calls agree; one that disagrees never ends.  This is
what a watchdog finds half an hour later; ``hang.export`` writes it down as dumps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_prism.core.groups import Membership
from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR
from megatron_prism.core.program import Program, Programs, Splits
from megatron_prism.graph.classes import Classes, memberships, partition
from megatron_prism.graph.matching import signature

_WAIT, _RECORD, _HOST, _SEND = (CODE[n] for n in ("wait", "record", "host_wait", "send"))
_BARRIER = CODE["barrier"]
_TALK = IS_COLLECTIVE | IS_PAIR


@dataclass(frozen=True)
class RankFault:
    """What happens to one rank; op indices of its program, None for never.

    host   : the host never issues this op (exception, GIL, SIGSTOP, data loader)
    device : the device never gets to this op (a kernel that does not end)
             of both: nothing of a batch is launched before all of it
    blind  : from this op on completions are not noticed (watchdog or CUDA error)
    silent : the rank leaves no dump
    """

    host: int | None = None
    device: int | None = None
    blind: int | None = None
    silent: bool = False


@dataclass
class StalledJob:
    """issued: rank -> ops its host issued; done, ready: rank -> which ops ended, which started."""

    programs: Programs
    groups: Mapping[str, Membership]
    faults: Mapping[int, RankFault]
    issued: list[int]
    done: list[bytearray]
    ready: list[bytearray]
    said: dict[object, Any] = field(default_factory=dict)  # what an export needs many times

    @property
    def finished(self) -> bool:
        """Whether everybody came to the end."""
        lengths = [len(self.programs.of(r)) for r in range(self.programs.world.size)]
        kinds = {id(done): done for done in self.done}  # ranks of a class share theirs
        return self.issued == lengths and all(map(all, kinds.values()))


def run_until_stalled(
    programs: Programs,
    faults: Mapping[int, RankFault] | None = None,
    plans: dict[int, ProgramPlan] | None = None,
) -> StalledJob:
    """Run all ranks until nobody can go on.

    Nothing depends on times, so ranks of one class stop at one place: a class is run once.

    plans : kept between runs that share programs: by the place of a program, those of the first run
    """
    groups, faults = memberships(programs), dict(faults or {})
    try:
        classes = partition(programs, groups, apart=faults)
        return _Run(programs, faults, plans, groups, classes).to_the_end()
    except _UnlikeGroupsError:
        return _Run(programs, faults, plans, groups).to_the_end()


class _UnlikeGroupsError(Exception):
    """Splits fit in one of two groups that hold the same classes in another order."""


@dataclass
class ProgramPlan:
    """One program: what each op waits for, and who waits for it."""

    names: list[int]
    needs: list[int]
    followers: list[list[int]]
    hosts: list[bool]
    calls: list[tuple[str, int, int, bytes]]  # group, peer or 0, place in its FIFO, signature
    opens: list[int]  # the first op of its batch, or itself

    def place(self, op: int | None) -> int:
        """Where somebody stops who never gets to ``op``; behind all ops for None."""
        return len(self.names) if op is None or op >= len(self.names) else self.opens[op]


class _Run:
    """Classes of ranks; without ``classes`` every rank is one."""

    def __init__(
        self,
        programs: Programs,
        faults: dict[int, RankFault],
        plans: dict[int, ProgramPlan] | None = None,
        groups: Mapping[str, Membership] | None = None,
        classes: Classes | None = None,
    ) -> None:
        self.programs, self.groups = programs, groups or memberships(programs)
        n, of = programs.world.size, programs.program_of.tolist()
        self.of = np.arange(n) if classes is None else classes.of
        self.heads = range(n) if classes is None else classes.representatives
        self.faults, self.fault = faults, [faults.get(rank) for rank in self.heads]
        numbers = of if classes is None else classes.programs
        known = {} if plans is None else plans
        self.plans = {i: known[i] if i in known else _plan(programs.programs[i])
                      for i in dict.fromkeys(numbers)}  # fmt: skip
        if not known:
            known.update(self.plans)
        self.plan = [self.plans[i] for i in numbers]
        self.left = [list(p.needs) for p in self.plan]
        self.issued = [0] * len(self.plan)
        self.done = [bytearray(len(p.names)) for p in self.plan]
        self.ready = [bytearray(len(p.names)) for p in self.plan]
        self.met: dict[object, list[tuple[int, int]]] = defaultdict(list)
        self.came: Counter[object] = Counter()
        self.kinds: dict[tuple[str, int], tuple[bytes, int, int]] = {}
        self.stack: list[tuple[int, int]] = []
        self.hosts = list(range(len(self.plan)))

    def to_the_end(self) -> StalledJob:
        while self.hosts or self.stack:
            while self.stack:
                self._end(*self.stack.pop())
            if self.hosts:
                self._issue(self.hosts.pop())
        of = self.of.tolist()
        return StalledJob(self.programs, self.groups, self.faults, [self.issued[c] for c in of],
                          [self.done[c] for c in of], [self.ready[c] for c in of])  # fmt: skip

    def _issue(self, rank: int) -> None:
        plan, left, at = self.plan[rank], self.left[rank], self.issued[rank]
        fault = self.fault[rank]
        stop = plan.place(None if fault is None else fault.host)
        while at < stop:
            self.issued[rank] = at + 1
            if left[at] == 0:
                self._start(rank, at)
            if plan.hosts[at] and not self.done[rank][at]:
                break
            at += 1

    def _start(self, rank: int, op: int) -> None:
        fault, plan = self.fault[rank], self.plan[rank]
        if fault is not None and op >= plan.place(fault.device):
            return
        self.ready[rank][op] = 1
        if not _TALK[plan.names[op]]:
            if plan.hosts[op]:
                self.done[rank][op] = 1  # at once: its host goes on in the loop that asked
                self._followers(rank, op)
            else:
                self.stack.append((rank, op))
            return
        key, size, mine = self._meeting(rank, op)
        here = self.met[key]
        here.append((rank, op))
        self.came[key] += mine
        if self.came[key] == size:
            first = self.plan[here[0][0]].calls[here[0][1]][3]
            agree = all(self.plan[r].calls[i][3] == first for r, i in here)
            if agree and self._splits_fit(plan.calls[op][0], here):
                self.stack += here

    def _meeting(self, rank: int, op: int) -> tuple[object, int, int]:
        """(which call it is, by how many ranks it is made, how many of them are of this class)."""
        name, peer, place, _ = self.plan[rank].calls[op]
        if not IS_PAIR[self.plan[rank].names[op]]:
            kind, size, mine = self._kind(rank, name)
            return (name, kind, place), size, mine
        group, head = self.groups[name], self.heads[rank]
        members = group.group(head)
        size = max(1, len(members))
        if self.plan[rank].names[op] == _SEND:
            return (name, "p2p", rank, peer % size, place), 2, 1
        sender = int(self.of[members[(int(group.position[head]) + peer) % size]])
        return (name, "p2p", sender, -peer % size, place), 2, 1

    def _kind(self, rank: int, name: str) -> tuple[bytes, int, int]:
        """(the classes in its group, ascending; how many ranks; how many of its own class)."""
        if (name, rank) not in self.kinds:
            found = np.sort(self.of[self.groups[name].group(self.heads[rank])])
            self.kinds[name, rank] = found.tobytes(), len(found), int((found == rank).sum())
        return self.kinds[name, rank]

    def _splits_fit(self, name: str, here: list[tuple[int, int]]) -> bool:
        """Whether every member of an all-to-all sends what the others expect."""
        rows = {}
        for rank, op in here:
            program = self.programs.of(self.heads[rank])
            at = int(program.ops["splits"][op])
            if at < 0:
                return True
            rows[rank] = program.splits[at]
        group, kind = self.groups[name], self._kind(here[0][0], name)[0]
        sets = (self.of[group.group(r)] for r in np.flatnonzero(self.of == here[0][0]).tolist())
        orders = {tuple(one.tolist()) for one in sets if np.sort(one).tobytes() == kind}
        fits = {_fit([rows[member] for member in order]) for order in orders}
        if len(fits) > 1:
            raise _UnlikeGroupsError
        return fits.pop()

    def _end(self, rank: int, op: int) -> None:
        if self.done[rank][op]:
            return
        self.done[rank][op] = 1
        self._followers(rank, op)
        if self.plan[rank].hosts[op]:  # a barrier: its host was waiting
            self.hosts.append(rank)

    def _followers(self, rank: int, op: int) -> None:
        plan, left = self.plan[rank], self.left[rank]
        for other in plan.followers[op]:
            left[other] -= 1
            if left[other] == 0 and other < self.issued[rank]:
                self._start(rank, other)
                if plan.hosts[other] and self.done[rank][other]:
                    self.hosts.append(rank)


def _fit(rows: Sequence[Splits]) -> bool:
    """Whether each member sends what the others expect; rows: (sent, wanted) of each, in order."""
    sent, wanted = ([row[side] for row in rows] for side in (0, 1))
    if any(len(row) != len(rows) for row in (*sent, *wanted)):
        return False
    return bool(np.array_equal(np.array(sent), np.array(wanted).T))


def _plan(program: Program) -> ProgramPlan:
    """The order that streams, handles, communicators and the host impose."""
    ops, n = program.ops, len(program)
    names, sequence = ops["name"].tolist(), program.sequence.tolist()
    streams, handles = ops["stream"].tolist(), ops["handle"].tolist()
    batches, groups, peers = (ops[c].tolist() for c in ("batch", "group", "peer"))
    queue: dict[int, set[int]] = defaultdict(set)
    comms: dict[tuple[int, int], set[int]] = defaultdict(set)
    events: dict[int, set[int]] = {}
    needs: list[set[int]] = []
    together: dict[int, list[int]] = defaultdict(list)
    for i in range(n):
        if batches[i] >= 0:
            together[batches[i]].append(i)
    for i, name in enumerate(names):
        before = set(queue[streams[i]])
        if _TALK[name]:
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
        elif name == _WAIT:
            before |= events.get(handles[i], set())
            queue[streams[i]] = {i}
        elif name == _RECORD:
            events[handles[i]] = {i}
            queue[streams[i]] = {i}
        elif name == _HOST:
            if program.strings[ops["note"][i]] == "device":
                before = before.union(*queue.values(), *comms.values())
        else:
            queue[streams[i]] = {i}
        needs.append({j for j in before if j < i} if not _TALK[name] else before - {i})
    followers: list[list[int]] = [[] for _ in range(n)]
    for i, before in enumerate(needs):
        for j in before:
            followers[j].append(i)
    calls = _calls(program, sequence)
    waits = np.flatnonzero((ops["name"] == _BARRIER) & (ops["handle"] < 0)).tolist()
    hosts = [name == _HOST for name in names]
    for i in waits:  # as NCCL's and gloo's hold the host
        hosts[i] = True
    opens = [together[batch][0] if batch >= 0 else i for i, batch in enumerate(batches)]
    return ProgramPlan(names, [len(b) for b in needs], followers, hosts, calls, opens)


def _calls(program: Program, sequence: Sequence[int]) -> list[tuple[str, int, int, bytes]]:
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
