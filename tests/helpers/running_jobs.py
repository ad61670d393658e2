"""A job that runs, and dumps of it: every rank's at a moment of its own, counters older than calls.

``TimedRun`` gives every op of every rank a time: hosts issue ahead of their devices, calls end when
all have come.  ``dumps_of`` writes down what was issued at a rank's moment, and of what ended what
its watchdog saw at its last look.
"""

import dataclasses
import heapq
import random

from oracles import naive_stall

from megatron_prism.core.programs.program import Program
from megatron_prism.features.hang import export
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.graph import stall

MS = 1_000_000
BEGIN_NS = 1_790_000_000 * 10**9


def repeated(programs, times):
    """The programs of several iterations."""
    made = []
    for program in programs.programs:
        ops = list(program)
        step = 1 + max(max(op.handle, op.batch) for op in ops)
        more = [dataclasses.replace(
                    op, handle=op.handle + i * step if op.handle >= 0 else -1,
                    batch=op.batch + i * step if op.batch >= 0 else -1)
                for i in range(times) for op in ops]  # fmt: skip
        made.append(Program.from_ops(program.rank, more))
    return dataclasses.replace(programs, programs=tuple(made))


class TimedRun(naive_stall.Run):
    """When every op of every rank was issued, started and ended, in ns."""

    def __init__(self, programs, seed, straggles=False):
        """straggles: now and then a host pauses for up to 2 s, as for a data loader."""
        super().__init__(programs)
        self.straggles = straggles
        self.rng, self.events = random.Random(seed), []
        self.times = {what: [[-1] * len(plan.names) for plan in self.plan]
                      for what in ("issued", "started", "ended")}  # fmt: skip
        costs = random.Random(seed)
        self.cost = {id(plan): [int(MS * costs.choice((0.1, 0.3, 1, 3))) for _ in plan.names]
                     for plan in self.plans}  # fmt: skip
        self.waiting = [False] * programs.world.size
        for rank in range(programs.world.size):
            self._at(self.rng.randrange(MS), rank, -1)
        while self.events:
            self.now, rank, op = heapq.heappop(self.events)
            self.host(rank) if op < 0 else self.end(rank, op)

    def _at(self, when, rank, op):
        if self.straggles and op < 0 and self.rng.random() < 0.0006:
            when += self.rng.randrange(2000 * MS)
        heapq.heappush(self.events, (when, rank, op))

    def host(self, rank):
        plan, at = self.plan[rank], self.issued[rank]
        if at and plan.hosts[at - 1] and not self.done[rank][at - 1]:
            self.waiting[rank] = True
            return
        end = at
        while end < len(plan.names) and plan.opens[end] == plan.opens[at]:
            end += 1
        for op in range(at, end):
            self.issued[rank], self.times["issued"][rank][op] = op + 1, self.now
            if self.left[rank][op] == 0:
                self.start(rank, op)
        pause = self.rng.randrange(20 * MS) if self.rng.random() < 0.02 else 0
        if end > at:
            self._at(self.now + self.rng.randrange(10_000, 30_000) + pause, rank, -1)

    def start(self, rank, op):
        plan, here = self.plan[rank], [(rank, op)]
        self.times["started"][rank][op] = self.now
        needed, cost = 1, self.cost[id(plan)][op] * self.rng.uniform(1, 1.2)
        if naive_stall.TALK[plan.names[op]]:
            key, needed = self.meeting(rank, op)
            here = self.met[key]
            here.append((rank, op))
        elif plan.hosts[op] or plan.names[op] in (naive_stall.WAIT, naive_stall.RECORD):
            cost = 0
        for one in here if len(here) == needed else ():
            self._at(self.now + int(cost), *one)

    def end(self, rank, op):
        self.done[rank][op] = 1
        self.times["ended"][rank][op] = self.now
        left = self.left[rank]
        for other in self.plan[rank].followers[op]:
            left[other] -= 1
            if left[other] == 0 and other < self.issued[rank]:
                self.start(rank, other)
        if self.waiting[rank] and self.done[rank][self.issued[rank] - 1]:
            self.waiting[rank] = False
            self._at(self.now, rank, -1)


def dumps_of(run, seed, spread_ms=0, poll_ms=100, ring=0, written="copied", **how):
    """Dumps of a random moment of ``run``, up to ``spread_ms`` apart, with clocks.

    ring: so many calls at the end are recorded, 0 is all; written: what files say of their times
    """
    rng, size = random.Random(seed), run.programs.world.size
    end = max(map(max, run.times["ended"]))
    moment, poll = end * rng.uniform(0.1, 0.9), poll_ms * MS
    at = [int(moment + spread_ms * MS * rng.uniform(-0.5, 0.5)) for _ in range(size)]
    phase = [rng.randrange(poll) for _ in range(size)]
    seen = [(a - p) // poll * poll + p for a, p in zip(at, phase, strict=True)]

    def until(what, limits):
        return [bytearray(0 <= t <= limits[r] for t in run.times[what][r]) for r in range(size)]

    issued = [sum(flags) for flags in until("issued", at)]
    job = stall.StalledJob(run.programs, run.groups, {}, issued, until("ended", seen),
                           until("started", at))  # fmt: skip
    dumps = {}
    for rank, value in export.dumps_of(job, **how):
        tables = {key[1]: table for key, table in job.said.items() if key[0] == "calls"}
        table = tables[int(run.programs.program_of[rank])]
        op_of = dict(zip(table.numbers.records, table.index.tolist(), strict=True))
        value["entries"] = [
            row | {"time_created_ns": BEGIN_NS + run.times["issued"][rank][
                op_of.get(row["record_id"], op_of.get(row["record_id"] - 1))]}
            for row in value["entries"][-ring:]
        ]  # fmt: skip
        when = {"unknown": 0, "true": BEGIN_NS + at[rank] + 10 * MS, "copied": BEGIN_NS + 10**15,
                "random": BEGIN_NS + at[rank] + rng.randrange(10**13)}[written]  # fmt: skip
        dumps[rank] = dataclasses.replace(of_value(value, rank), written_ns=when)
    return DumpSet(dumps)


def any_dumps(run, seed):
    """The same with everything drawn; ("active" or "history", DumpSet)."""
    rng = random.Random(seed)
    how = rng.choice([{"active_only": True, "stacks": False}, {}, {"timing": True}])
    return ("active" if "active_only" in how else "history"), dumps_of(
        run, seed, rng.choice([0, 100, 1000, 3000]), rng.choice([10, 100, 100]),
        rng.choice([0, 0, 5, 20, 100, 500]), rng.choice(["unknown", "true", "copied", "random"]),
        **how,
    )  # fmt: skip
