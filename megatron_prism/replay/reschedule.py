"""What if an iteration had more or fewer microbatches?  The steady state, longer or shorter.

In : Programs, and how many microbatches.  Out: Programs.  In the middle of every pipeline schedule
one period repeats: a forward and a backward, or pp of each of every chunk where it is interleaved.
Megatron's own order of a captured period is taken over as often as it must be; the beginning (first
parameter gathers), the end (gradient reductions) and what each rank does in between stay as
captured, so times in repeated periods are those of the last one.  Equal, op by op, to what
Megatron's scheduler gives for that number (tests/test_reschedule.py).  Storages of periods that are
added are not followed: memory is flat there.  A program without two equal periods is refused.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.ops import CODE, PHASE_NAMES
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.replay.whatif import assumed

__all__ = ["count", "microbatches"]

_FORWARD, _BACKWARD = PHASE_NAMES.index("forward"), PHASE_NAMES.index("backward")
_RELATIVE = ("microbatch", "handle", "batch", "ns", "kernels", "note", "flops", "traffic",
             "host", "lead", "products")  # fmt: skip
_GROWS = {"tokens_per_iteration", "model_flops_per_iteration", "microbatches"}


def count(programs: Programs) -> int:
    """Microbatches of an iteration; 0 if the programs name none."""
    return 1 + max(int(p.ops["microbatch"].max(initial=-1)) for p in programs.programs)


def microbatches(programs: Programs, wanted: int) -> Programs:
    """The world with ``wanted`` microbatches an iteration.

    ProgramError if a program does not repeat itself often enough, or the schedule cannot have that
    number.
    """
    there, world = count(programs), programs.world
    if wanted == there:
        return programs
    if not there:
        raise ProgramError(
            "no op of the programs names a microbatch, so their number cannot be changed",
            fix="capture the job with that many",
        )
    period = world.pp if world.vpp and world.pp > 1 else 1
    found = [_Periods(program, period) for program in programs.programs]
    fewest = min(found, key=lambda one: one.runs)
    if (wanted - there) % period:
        near = there + period * max(1, (wanted - there) // period)
        raise ProgramError(
            f"{there} microbatches come in periods of {period} (interleaved, pp {world.pp}), so "
            f"there cannot be {wanted}",
            fix=f"microbatches={near}" if fewest.runs > 1 else _captured(near, there),
        )
    more = (wanted - there) // period
    if fewest.runs < 2 or fewest.runs + more < 1:
        raise ProgramError(
            f"{there} microbatches have {fewest.runs} equal periods on rank {fewest.program.rank}, "
            f"too few to make {wanted} microbatches of them",
            fix=_captured(wanted, there),
        )
    made = tuple(one.repeated(more) for one in found)
    source = {**programs.source}
    for key in (k for k in _GROWS & set(source) if source[k].isdecimal()):
        source[key] = str(int(source[key]) * wanted // there)
    changed = dataclasses.replace(programs, programs=made, source=source)
    return assumed(
        changed, f"{wanted} microbatches instead of {there}: the steady state's periods repeated"
    )


def _captured(wanted: int, there: int) -> str:
    """What to type for a schedule that cannot be made out of another one."""
    times = f"{wanted // there}" if wanted % there == 0 else f"{wanted}/{there}"
    return (
        "prism capture RECIPE -o DIR train.global_batch_size=N, or the stock job with "
        f"--global-batch-size N, {times} times what it is now"
    )


class _Periods:
    """One program's run of equal periods: ``runs`` times ``length`` ops from ``start``."""

    def __init__(self, program: Program, period: int) -> None:
        self.program, self.period = program, period
        ops = program.ops
        plain = ops.copy()
        for name in _RELATIVE:
            plain[name] = 0
        self.issuer = _issuers(ops)
        distance = np.where(self.issuer >= 0, np.arange(len(ops)) - self.issuer, -1)
        self.rows = np.stack([np.unique(plain, return_inverse=True)[1].ravel(), distance])
        self.start, self.length, self.runs = self._longest()

    def _longest(self) -> tuple[int, int, int]:
        ops = self.program.ops
        forward = (ops["phase"] == _FORWARD) & (ops["name"] == CODE["compute"])
        chunk = ops["chunk"] == ops["chunk"][forward].min(initial=0)
        first: dict[int, int] = {}
        for i in np.flatnonzero(forward & chunk).tolist():
            first.setdefault(int(ops["microbatch"][i]), i)
        best = (0, 0, 0)
        for number, start in sorted(first.items()):
            length = first.get(number + self.period, start) - start
            if length > 0 and self._is_whole(start, length):
                runs = 1
                while self._equal(start, start + runs * length, length, runs):
                    runs += 1
                if runs > max(1, best[2]):
                    best = (start, length, runs)
        return best

    def _is_whole(self, start: int, length: int) -> bool:
        """As many backwards as forwards: neither warm-up nor cool-down."""
        ops = self.program.ops[start : start + length]
        steps = [
            {tuple(row) for row in ops[["microbatch", "chunk"]][
                (ops["phase"] == phase) & (ops["name"] == CODE["compute"])].tolist()}
            for phase in (_FORWARD, _BACKWARD)
        ]  # fmt: skip
        return len(steps[0]) == len(steps[1]) > 0 and len(steps[0]) % self.period == 0

    def _equal(self, one: int, other: int, length: int, apart: int) -> bool:
        if other + length > len(self.program.ops):
            return False
        a, b = slice(one, one + length), slice(other, other + length)
        numbers = self.program.ops["microbatch"]
        shift = np.where(numbers[a] >= 0, apart * self.period, 0)
        same = bool((self.rows[:, a] == self.rows[:, b]).all())
        return same and bool((numbers[b] - numbers[a] == shift).all())

    def repeated(self, more: int) -> Program:
        """With ``more`` periods, or fewer."""
        ops, length = self.program.ops, self.length
        end = self.start + self.runs * length  # of the last equal period
        kept = np.arange(end + min(0, more) * length)
        again = np.tile(np.arange(end - length, end), max(0, more))
        source = np.concatenate([kept, again, np.arange(end, len(ops))])
        new = np.arange(len(source))
        shift = np.zeros(len(source), dtype=np.int64)  # of microbatches, in periods
        copies = 1 + np.arange(len(again)) // length
        shift[len(kept) : len(kept) + len(again)] = copies
        shift[len(kept) + len(again) :] = more
        made = ops[source]
        made["microbatch"] += np.where(made["microbatch"] >= 0, shift * self.period, 0).astype("i4")
        issuer = self.issuer[source]
        moved = (issuer >= self.start) | (source < end)  # else it was issued before the periods
        at = np.where(moved, new - (source - issuer), issuer)
        made["handle"] = np.where(issuer >= 0, at, -1)
        made["batch"] = _numbered(made["batch"], source, ops["batch"])
        memory = self.program.allocations.copy()
        memory = memory[(memory["before"] <= len(kept)) | (memory["before"] > end)]
        late = memory["before"] > end
        memory["before"][late] += more * length
        return dataclasses.replace(
            self.program, ops=made, allocations=memory, samples=self._samples(source)
        )

    def _samples(self, source: np.ndarray) -> np.ndarray:
        """Times of single iterations, those of a repeated segment being its own."""
        compute = self.program.ops["name"] == CODE["compute"]
        if not self.program.samples.size:
            return self.program.samples
        return self.program.samples[:, (np.cumsum(compute) - 1)[source[compute[source]]]]


def _issuers(ops: np.ndarray) -> np.ndarray:
    """int64 [n]: the op that made the handle that each op has or waits for; -1: none."""
    found, last = np.full(len(ops), -1, dtype=np.int64), {}
    for i in np.flatnonzero(ops["handle"] >= 0).tolist():
        handle = int(ops["handle"][i])
        if int(ops["name"][i]) != CODE["wait"]:
            last[handle] = i
        found[i] = last.get(handle, -1)
    return found


def _numbered(batch: np.ndarray, source: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Batches as they come, from 0: members of one lie side by side, so repeated ones differ."""
    found, known, at = np.full(len(batch), -1, dtype=np.int64), -1, -2
    for i in np.flatnonzero(batch >= 0).tolist():
        before = i - 1 >= 0 and i - 1 == at and given[source[i]] == given[source[at]]
        known += 0 if before and source[i] > source[at] else 1
        found[i], at = known, i
    return found
