"""How often is a verdict exact?  Single faults drawn by seed, judged by what their dumps hold.

``python -m benchmarks.accuracy.hang_scores [FIRST [LAST [MOST]]]``: seeds FIRST to LAST (0 to 199),
worlds of 16 to MOST (512) ranks (``tests/helpers/random_hangs.py``).  Prints, per kind and in all,
how many culprits are exact and how many innocents are named: with history and timing, and with
outstanding calls only (Megatron's default).
``python -m benchmarks.accuracy.hang_scores programs [FIRST [LAST [MOST]]]``: also with outstanding
calls and the programs of the job (``hang/hypotheses.py``; half an hour on one core, minutes up to
64 ranks), and how often the culprit is at least among the ranks that remain.
``python -m benchmarks.accuracy.hang_scores 8192``: how long each kind takes on 8,192 ranks.
``python -m benchmarks.accuracy.hang_scores history FIRST LAST``: with history and timing only,
worlds of 16 to 8,192 ranks, a third of them of 1,024 and more.
``python -m benchmarks.accuracy.hang_scores running [N]``: N (40) sets of dumps of each of ten jobs
that run, of 8 to 64 ranks, eight of them captured now; then of the same with stragglers.  How many
sets name somebody?  None should.
``python -m benchmarks.accuracy.hang_scores lost|logs|two [FIRST [LAST]]``: the same faults on up to
128 ranks (seeds 0 to 199), where the dump of one innocent rank, or of a fifth of them, is lost; by
what the job would have printed alone; and two faults of two kinds at once.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]


from helpers import hang_worlds, random_hangs, rendered_logs, running_jobs  # noqa: E402
from helpers.healthy_jobs import RECIPES  # noqa: E402
from helpers.programs import healthy  # noqa: E402
from helpers.random_hangs import dumps_of  # noqa: E402

import megatron_prism as prism  # noqa: E402
from megatron_prism.core.world import World  # noqa: E402
from megatron_prism.emulate import recipe_job  # noqa: E402
from megatron_prism.graph import stall  # noqa: E402
from megatron_prism.graph.stall import StalledJob  # noqa: E402
from megatron_prism.hang import export  # noqa: E402
from megatron_prism.hang.dumps import DumpSet  # noqa: E402
from megatron_prism.hang.logs import read_logs  # noqa: E402

LARGE = [World(1024, tp=8, pp=8, ep=8), World(4096, tp=8, pp=8, cp=2, ep=8),
         World(8192, tp=8, pp=16, cp=2, ep=8)]  # fmt: skip
ACTIVE = {"active_only": True, "stacks": False}


def left(found) -> set[int]:
    """The ranks of which a single fault would leave these dumps."""
    text = re.search(r"leave these dumps, of ranks ([\d,:-]+)$", found.evidence[-1])
    return set(World(1 << 20).select(text[1])) if text else set()


def scored(found, culprits, finished) -> str:
    named = random_hangs.named(found)
    if named == culprits or finished and found.verdict == "healthy":
        return "exact"
    if named:
        return "innocent"
    return "among" if culprits <= left(found) else "open"


def large(size: int) -> None:
    """How long a verdict on a world of ``size`` ranks takes after everybody stands still."""
    for kind in random_hangs.KINDS:
        programs, faults, culprits = random_hangs.draw(
            kind, World(size, tp=8, pp=16, cp=2, ep=8), seed=7
        )
        state = stall.run_until_stalled(programs, faults)
        dumps, begin = dumps_of(state, **ACTIVE), time.perf_counter()
        found = prism.hang(dumps)
        took = time.perf_counter() - begin
        print(f"{kind:14} {scored(found, culprits, state.finished):8} {took:.1f} s", flush=True)


def history(first: int, last: int) -> None:
    """Verdicts on worlds of every size, from dumps that hold everything."""
    total: dict[bool, Counter[str]] = defaultdict(Counter)
    slowest = 0.0
    for seed in range(first, last + 1):
        rng = random.Random(seed)
        kind, small, large = (
            rng.choice(list(random_hangs.KINDS)), rng.choice(random_hangs.WORLDS), rng.choice(LARGE)
        )  # fmt: skip
        world = large if seed % 3 == 0 else small
        programs, faults, culprits = random_hangs.draw(kind, world, seed)
        state = stall.run_until_stalled(programs, faults)
        dumps, begin = dumps_of(state, timing=True), time.perf_counter()
        verdict = scored(prism.hang(dumps), culprits, state.finished)
        slowest = max(slowest, time.perf_counter() - begin)
        total[world.size >= 1024][verdict] += 1
        if verdict != "exact":
            print(f"seed {seed}: {kind} of {world.size:,} ranks: {verdict}", flush=True)
    for large, counts in sorted(total.items()):
        print(f"{'1,024 and more' if large else 'below 1,024'}: {dict(counts)}")
    print(f"slowest verdict {slowest:.1f} s")


RUNNING = ("tp2pp2_sp_overlap", "large", "ep8_tp2pp2", "tp2pp2vpp2_gather", "ep2_pp2vpp2",
           "tp2cp2pp2vpp2", "pp4vpp2", "dp8_zero1_gather")  # fmt: skip


def running(sets: int) -> None:
    """Whom dumps of a job that runs name."""
    worlds = {name: hang_worlds.world(name) for name in ("moe", "interleaved")}
    with tempfile.TemporaryDirectory() as place:
        for name in RUNNING:
            worlds[name] = recipe_job.capture(RECIPES[name], Path(place, name))
    for straggles in (False, True):
        named: Counter[str] = Counter()
        for programs in worlds.values():
            run = running_jobs.TimedRun(running_jobs.repeated(programs, 3), 5, straggles)
            for seed in range(sets):
                held, dumps = running_jobs.any_dumps(run, seed)
                found = prism.hang(dumps)
                named[held] += 1
                named[f"{held}, somebody named"] += bool(found.culprits)
        print("with stragglers" if straggles else "no stragglers", dict(named), flush=True)


Draw = tuple[random.Random, World, str, StalledJob, set[int]]


def drawn(first: int, last: int) -> Iterator[Draw]:
    """(what draws on, world, kind, the stalled job, its culprits), where it stalls."""
    for seed in range(first, last + 1):
        rng = random.Random(seed)
        kind, world = rng.choice(list(random_hangs.KINDS)), rng.choice(random_hangs.WORLDS)
        if world.size <= 128:
            programs, faults, culprits = random_hangs.draw(kind, world, seed)
            state = stall.run_until_stalled(programs, faults)
            if not state.finished:
                yield rng, world, kind, state, culprits


def lost(first: int, last: int) -> None:
    """How often lost files change who is named."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for rng, world, kind, state, culprits in drawn(first, last):
        innocent = sorted(set(range(world.size)) - culprits)
        for share, number in (("one", 1), ("a fifth", world.size // 5)):
            gone = set(rng.sample(innocent, number))
            for name, how in (("history", {"timing": True}), ("active only", ACTIVE)):
                kept = {r: d for r, d in dumps_of(state, **how).dumps.items() if r not in gone}
                found = prism.hang(DumpSet(kept)) if kind != "killed" else None
                if found is not None:  # exit status 3: a dump is missing, perhaps its rank
                    says = scored(found, culprits, False) if found.exit_code == 1 else "open"
                    table[f"{share} lost, {name}"][says] += 1
    for name, counts in table.items():
        print(f"{name}: {dict(counts)}")


def logs(first: int, last: int) -> None:
    """Who is named from logs alone."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "job.log")
        for _, world, kind, state, culprits in drawn(first, last):
            values = dict(export.dumps_of(state, **ACTIVE))
            killed = culprits if kind == "killed" else ()
            path.write_text(rendered_logs.text(values, world, killed))
            found = prism.hang(read_logs([path]))
            table[kind][scored(found, culprits, False)] += 1
    print(f"logs alone: {dict(sum(table.values(), Counter()))}")
    for kind, counts in sorted(table.items()):
        print(f"    {kind:14} {dict(counts)}")


def two(first: int, last: int) -> None:
    """Who is named of two ranks that err in two ways."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(first, last + 1):
        rng = random.Random(seed)
        world, kinds = rng.choice(random_hangs.WORLDS[:5]), rng.sample([*random_hangs.KINDS], 2)
        ranks, programs, faults = rng.sample(range(world.size), 2), healthy(world), {}
        for kind, rank in zip(kinds, ranks, strict=True):
            programs, more = random_hangs.KINDS[kind](rng, programs, rank)
            faults |= more
        state = stall.run_until_stalled(programs, faults)
        for name, how in (("history", {"timing": True}), ("active only", ACTIVE)):
            named = random_hangs.named(prism.hang(dumps_of(state, **how)))
            innocent = named - set(ranks)
            table[name]["innocent" if innocent else f"{len(named)} named"] += 1
    for name, counts in table.items():
        print(f"two faults, {name}: {dict(counts)}")


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("lost", "logs", "two"):
        bounds = [*map(int, sys.argv[2:]), *(0, 199)[len(sys.argv) - 2 :]]
        {"lost": lost, "logs": logs, "two": two}[sys.argv[1]](*bounds)
        return
    if sys.argv[1:2] == ["running"]:
        running(int(sys.argv[2]) if len(sys.argv) > 2 else 40)
        return
    if sys.argv[1:2] == ["history"]:
        history(int(sys.argv[2]), int(sys.argv[3]))
        return
    explained = sys.argv[1:2] == ["programs"]
    words = [int(word) for word in sys.argv[1 + explained :]]
    if words[:1] == [8192]:
        large(8192)
        return
    first, last, most = (*words, *(0, 199, 512)[len(words) :])
    table: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for seed in range(first, last + 1):
        rng = random.Random(seed)
        kind, world = rng.choice(list(random_hangs.KINDS)), rng.choice(random_hangs.WORLDS)
        if world.size > most:
            continue
        programs, faults, culprits = random_hangs.draw(kind, world, seed)
        state = stall.run_until_stalled(programs, faults)
        full = prism.hang(dumps_of(state, timing=True))
        dumps = dumps_of(state, **ACTIVE)
        found = prism.hang(dumps)
        verdicts = {"history": full, "active only": found}
        if explained:
            more = found if state.finished else prism.hang(dumps, programs=healthy(world))
            verdicts["and programs"] = more
        for name, verdict in verdicts.items():
            table[name][kind][scored(verdict, culprits, state.finished)] += 1
        print(seed, kind, world.size, {n: dict(t[kind]) for n, t in table.items()}, flush=True)
    for name, kinds in table.items():
        print(f"{name}: {dict(sum(kinds.values(), Counter()))}")
        for kind, counts in sorted(kinds.items()):
            print(f"    {kind:14} {dict(counts)}")


if __name__ == "__main__":
    main()
