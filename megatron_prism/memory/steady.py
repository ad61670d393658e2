"""Whether a job whose first iterations fit runs out of memory in a later one.

In : a program that recorded memory, and bytes of segments.  Out: ``Risk``, or None.

The same requests in each iteration leave the allocator's free blocks in another order each time: a
request takes the smallest block that is large enough, so a hole that a large request needs may have
been split by a smaller one.  When a block that another stream uses comes back depends on how far
the host is ahead of the device.  The lead follows from what launches take the host and the device
(``host_lead``); how fast the host is nobody knows, and it changes.  So the iteration is replayed
several times behind the process's first requests, each time on a host of a drawn speed that varies
from iteration to iteration, and the draws that run out are counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from megatron_prism.core.programs.program import Program
from megatron_prism.memory import allocator, compiled_replay
from megatron_prism.memory.compiled_replay import ReplayedPeak
from megatron_prism.memory.host_lead import LaunchTimes, OpTimes, cut_history, launch_times
from megatron_prism.memory.peaks import changes, op_at, site_of

ITERATIONS = 8  # that are replayed behind the recorded one
DRAWS = 1000
MOST_ROWS = 1_000_000  # of all draws together, in Python: some 3 s on an idle host
# as many for each of those where the replay is compiled, in which a row takes a sixteenth as long
_COMPILED_ROWS = 30
_FEW_ROWS = 100_000  # of all draws together
# of reserved bytes: what replays of the requests miss of real ones (docs/accuracy.md); where tokens
# are routed requests have other sizes, too
_UNEXPLAINED, _UNEXPLAINED_ROUTED = 0.004, 0.045
_EXPERTS = ".experts"  # in names of modules
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
_FEWEST_DRAWS, _FEWEST_ITERATIONS = 3, 2  # of programs that are longer
# of the logarithm of a host's speed, from one iteration to the next: the index of one host was 1.38
# and 1.02 within five minutes (replay/uncertainty/interval.py)
_DEVIATION_OF_ITERATIONS = 0.1

Row = tuple[int, ...]  # storage, bytes, stream, launches so far
# leads at every row, int64 [rows], and bytes of segments (None: any number) -> what came of it
Replay = Callable[[np.ndarray, int | None], ReplayedPeak]


@dataclass(frozen=True)
class Risk:
    """Draws of the host's speed in which memory runs out.

    Attributes:
        failed: draws that run out.
        draws: all of them; 0 where the program is too long to be replayed.
        iterations: iterations that each draw replays, the recorded one among them.
        first: the earliest iteration that runs out; 1 is the process's first, 0: none.
        size: bytes of the request that fails most often, as the allocator asks the device.
        where: the step and the line that ask; "" where they are not known.
        unused: bytes of free blocks that are reserved then.
        reserved: of each draw the most bytes of segments if none ran out, ascending.
        follows_times: whether leads follow from the times of launches; else they were drawn.
        is_routed: whether sizes of requests depend on where tokens are routed.
    """

    failed: int
    draws: int
    iterations: int
    first: int = 0
    size: int = 0
    where: str = ""
    unused: int = 0
    reserved: tuple[int, ...] = ()
    follows_times: bool = False
    is_routed: bool = False

    def reserved_at(self, share: float) -> int:
        """Return the bytes of segments that this share of the draws does not exceed.

        Args:
            share: 0.5: of half of the draws.
        """
        place = math.ceil(share * len(self.reserved)) - 1
        return self.reserved[min(max(place, 0), len(self.reserved) - 1)]

    @property
    def reserved_band(self) -> tuple[int, int]:
        """Return the bytes of segments between which nine of ten processes are expected.

        Draws are of the host's speed alone; what else replays miss makes the band wider.
        """
        unexplained = _UNEXPLAINED_ROUTED if self.is_routed else _UNEXPLAINED
        low = self.reserved_at(0.05) * (1 - unexplained)
        high = self.reserved_at(0.95) * (1 + unexplained)
        return int(low), int(high)

    def to_json(self) -> dict[str, object]:
        """Return the fields, and of all draws' reserved bytes some shares and the band."""
        fields: dict[str, object] = dict(vars(self))
        del fields["reserved"]
        fields["reserved_at"] = {}
        fields["reserved_band"] = None
        if self.reserved:
            fields["reserved_at"] = {str(share): self.reserved_at(share) for share in _SHARES}
            fields["reserved_band"] = list(self.reserved_band)
        return fields


@dataclass(frozen=True)
class _Requests:
    """A process's requests, cut where the recorded iteration begins.

    Attributes:
        before: rows in front of it.
        iteration: rows of it.
        number: its number in the process, from 1.
    """

    before: list[Row]
    iteration: list[Row]
    number: int


def risk(
    program: Program,
    limit: int,
    settings: allocator.Settings | None = None,
    most_rows: int = MOST_ROWS,
    seed: int = 0,
    times: OpTimes | None = None,
) -> Risk:
    """Replay later iterations of ``program`` in ``limit`` bytes of segments.

    Args:
        program: its iteration counts as the one that all later ones repeat.
        limit: bytes of segments that the allocator may hold.
        settings: the allocator's options.
        most_rows: requests of all draws together, in Python; ``_COMPILED_ROWS`` times as many where
            the replay is compiled.
        seed: of the draws.
        times: of the program's ops; None: the host's lead is anything that CUDA allows, as it is
            where the process's requests are not known.
    """
    requests = _requests(program)
    draws, repeats = _affordable(requests, most_rows)
    # loading what is compiled costs as much as a few draws
    rows_of_draw = len(requests.before) + (repeats + 1) * len(requests.iteration)
    is_long = not draws or draws * rows_of_draw > _FEW_ROWS
    is_compiled = is_long and compiled_replay.is_covered(settings)
    if is_compiled:
        draws, repeats = _affordable(requests, most_rows * _COMPILED_ROWS)
    if not draws:
        return Risk(failed=0, draws=0, iterations=0)

    # replay every draw, and in the limit what would exceed it
    rows, starts = _repeated(requests, repeats)
    launches = None if times is None else launch_times(program, times)
    if times is None or launches is None:
        draw_leads = _drawn_leads(starts, len(rows), draws, seed)
    else:
        draw_leads = _leads_of_hosts(times, launches, requests, rows, starts, draws, seed)
    replay = _interpreted(rows, settings)
    if is_compiled:
        replay = compiled_replay.CompiledReplay(rows).run
    reserved: list[int] = []
    failures: list[tuple[int, allocator.OutOfMemory]] = []  # (place among the starts, request)
    for leads in draw_leads:
        unlimited = replay(leads, None)
        reserved.append(unlimited.reserved)
        # what fits without a limit fits with it
        if unlimited.reserved <= limit:
            continue
        failure = replay(leads, limit).full
        if failure is not None:
            place = int(np.searchsorted(starts, failure.event, side="right")) - 1
            failures.append((place, failure))
    result = Risk(
        failed=len(failures),
        draws=draws,
        iterations=repeats + 1,
        reserved=tuple(sorted(reserved)),
        follows_times=launches is not None,
        is_routed=any(_EXPERTS in text for text in program.strings),
    )
    if not failures:
        return result

    # show the request that fails most often, where it fails first
    sizes = Counter(failure.size for _, failure in failures)
    size = sizes.most_common(1)[0][0]
    of_size = [failure for _, failure in failures if failure.size == size]
    later = [failure for failure in of_size if failure.event >= starts[0]]
    shown = min(later or of_size, key=lambda failure: failure.event)
    first = min(place for place, _ in failures)
    return replace(
        result,
        first=max(requests.number + first, 1),
        size=(settings or allocator.Settings()).segment(size),
        where=_where(program, requests, rows, starts, shown.event),
        unused=shown.reserved - shown.allocated,
    )


def _interpreted(rows: list[Row], settings: allocator.Settings | None) -> Replay:
    """Return the replay of ``rows`` that Python runs, whatever the options are."""

    def replay(leads: np.ndarray, limit: int | None) -> ReplayedPeak:
        machine = allocator.replay_requests(rows, settings, limit, ahead=leads.tolist())
        return ReplayedPeak(machine.peak_reserved, machine.full)

    return replay


def _wanted_draws(requests: _Requests) -> int:
    """How many draws say something."""
    # without blocks that two streams use, the host's lead changes nothing
    for row in requests.before + requests.iteration:
        if row[1] == 0 and row[0] >= 0:
            return DRAWS
    return 1


def _affordable(requests: _Requests, most_rows: int) -> tuple[int, int]:
    """(draws, iterations behind the recorded one) that ``most_rows`` are enough for; (0, 0) where
    they are not enough for the fewest.
    """
    draws = _wanted_draws(requests)
    length = max(1, len(requests.iteration))
    for repeats in (ITERATIONS, ITERATIONS // 2, _FEWEST_ITERATIONS):
        rows = len(requests.before) + (repeats + 1) * length
        affordable = min(draws, most_rows // rows)
        if affordable >= min(draws, _FEWEST_DRAWS):
            return affordable, repeats
    return 0, 0


def reaches(program: Program, spare: int) -> bool:
    """Whether later iterations of ``program`` might need ``spare`` bytes more than the first ones:
    a hole that is lost costs a segment of one of the largest requests.
    """
    sizes = program.allocations["bytes"][program.allocations["before"] > 0]
    largest = np.sort(sizes)[-2:]
    return bool(largest.size) and spare < int(largest.clip(0).sum())


def _requests(program: Program) -> _Requests:
    """All that the process asked for, or where nobody knows that, the iteration's own requests."""
    before, iteration, number = cut_history(program.history)
    if number:
        return _Requests(_rows(before), _rows(iteration), number)
    recorded: list[Row] = [(*row, 0) for row in changes(program)]
    stood = int(np.count_nonzero(program.allocations["before"] == 0))
    return _Requests(recorded[:stood], recorded[stood:], 2)


def _rows(history: np.ndarray) -> list[Row]:
    """Return the rows of an array as tuples."""
    return [tuple(row) for row in history.tolist()]


def _repeated(requests: _Requests, repeats: int) -> tuple[list[Row], list[int]]:
    """The rows with ``repeats`` more iterations, and where each iteration begins.

    A storage that one iteration leaves and the next frees has another number in each; storages that
    only one iteration leaves (made once) are not made again.
    """
    before, after = _alive(requests.before), _alive(requests.before + requests.iteration)
    left = {storage: size for storage, size in after.items() if storage not in before}
    freed = {storage: size for storage, size in before.items() if storage not in after}
    waiting: dict[int, deque[int]] = defaultdict(deque)  # bytes -> storages that were left
    for storage, size in left.items():
        waiting[size].append(storage)
    rows = requests.before + requests.iteration
    starts = [len(requests.before), len(rows)]
    launches = requests.iteration[-1][3] - requests.iteration[0][3] if requests.iteration else 0
    next_number = max((row[0] for row in rows), default=0) + 1

    for repeat in range(1, repeats + 1):
        names: dict[int, int | None] = {}  # None: not there in this repeat
        freed_sizes = Counter(freed.values())
        for storage, size in freed.items():
            names[storage] = waiting[size].popleft() if waiting[size] else None
        # a storage whose size the next repeat frees gets a number of its own
        for storage, size in left.items():
            if freed_sizes[size] > 0:
                freed_sizes[size] -= 1
                names[storage] = next_number
                waiting[size].append(next_number)
                next_number += 1
            else:
                names[storage] = None
        for storage, size, stream, launch in requests.iteration:
            name = names.get(storage, storage)
            if name is not None:
                rows.append((name, size, stream, launch + launches * repeat))
        starts.append(len(rows))
    return rows, starts[:-1]


def _alive(rows: list[Row]) -> dict[int, int]:
    """Bytes of each storage that is there behind ``rows``."""
    alive: dict[int, int] = {}
    for storage, change, *_ in rows:
        if storage < 0 or not change:
            continue
        alive[storage] = alive.get(storage, 0) + change
        if not alive[storage]:
            del alive[storage]
    return alive


def _leads_of_hosts(
    times: OpTimes,
    launches: LaunchTimes,
    requests: _Requests,
    rows: list[Row],
    starts: list[int],
    draws: int,
    seed: int,
) -> Iterator[np.ndarray]:
    """Yield the lead at every row, int64 [rows], for every draw of a host."""
    random = np.random.default_rng(seed)
    counts = _launches_behind_begin(requests, rows, starts)
    law = NormalDist()
    for draw in range(draws):
        # equal parts of the law of hosts, each once
        deviations = law.inv_cdf((draw + 0.5) / draws)
        factor = times.host_factor * math.exp(deviations * times.host_deviation)
        yield _leads_on_host(random, launches, factor, counts, starts)


def _launches_behind_begin(
    requests: _Requests, rows: list[Row], starts: list[int]
) -> list[np.ndarray]:
    """Count the launches from the begin of each iteration to each of its rows."""
    first_launch = requests.iteration[0][3]
    per_iteration = requests.iteration[-1][3] - first_launch
    counts = []
    ends = [*starts[1:], len(rows)]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        begin = first_launch + number * per_iteration
        launches = np.array([row[3] for row in rows[start:end]], dtype=np.int64)
        counts.append(launches - begin)
    return counts


def _leads_on_host(
    random: np.random.Generator,
    launches: LaunchTimes,
    factor: float,
    counts: list[np.ndarray],
    starts: list[int],
) -> np.ndarray:
    """Return the lead at every row, in launches, on a host whose speed varies; int64 [rows].

    In front of the recorded iteration the host builds things and compiles, and the device keeps up.
    """
    parts = [np.zeros(starts[0], dtype=np.int64)]
    for launches_of_rows in counts:
        varied = factor * math.exp(random.normal(0.0, _DEVIATION_OF_ITERATIONS))
        iteration_leads = launches.leads(varied)
        parts.append(iteration_leads[launches_of_rows])
    return np.concatenate(parts)


def _drawn_leads(starts: list[int], num_rows: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the launches by which the host is ahead at every row, for every draw.

    They are 1 to all that CUDA lets be outstanding, each power of two as likely, and the same
    within an iteration.
    """
    random = np.random.default_rng(seed)
    lengths = np.diff([0, *starts, num_rows])
    for _ in range(draws):
        powers = random.uniform(0, np.log2(allocator.AHEAD), lengths.size)
        yield np.repeat(np.exp2(powers).astype(np.int64), lengths)


def _where(
    program: Program, requests: _Requests, rows: list[Row], starts: list[int], event: int
) -> str:
    """The step and the line that make request ``event``; "" where they are not known."""
    # before the iteration nothing says what an op asked for
    if event < starts[0]:
        return ""
    begin = max(start for start in starts if start <= event)
    asked = list(_made(rows[begin : event + 1]))
    # what is asked for in front of the first op of an iteration is none of its requests
    early = sum(1 for _ in _made(requests.iteration))
    events = program.allocations
    made = np.flatnonzero((events["bytes"] > 0) & (events["before"] > 0))
    early -= made.size
    place = len(asked) - 1 - early
    if not 0 <= place < made.size:
        return ""
    index = int(made[place])
    # the sizes differ, so the count above is of other requests
    if int(events["bytes"][index]) != asked[-1]:
        return ""
    return f"{program[op_at(program, index)].label} {site_of(program, index)}".strip()


def _made(rows: list[Row]) -> Iterator[int]:
    """Bytes of every request."""
    for storage, change, *_ in rows:
        if storage >= 0 and change > 0:
            yield change
