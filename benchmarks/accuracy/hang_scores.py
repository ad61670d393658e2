"""How often is a verdict exact?  Single faults drawn by seed, judged by what their dumps hold.

``python -m benchmarks.accuracy.hang_scores [FIRST [LAST [MOST]]]``: seeds FIRST to LAST (0 to 199),
worlds of 16 to MOST (512) ranks (``tests/helpers/random_hangs.py``).  Prints, per kind and in all,
how many culprits are exact and how many innocents are named: with history and timing, and with
outstanding calls only (Megatron's default).
``python -m benchmarks.accuracy.hang_scores running [N]``: N (40) sets of dumps of each of ten jobs
that run, of 8 to 64 ranks, eight of them captured now; then of the same with stragglers.  How many
sets name somebody?  None should.
``python -m benchmarks.accuracy.hang_scores lost|logs|two [FIRST [LAST]]``: the same faults on up to
128 ranks (seeds 0 to 199), where the dump of one innocent rank, or of a fifth of them, is lost; by
what the job would have printed alone; and two faults of two kinds at once.
"""

from __future__ import annotations

import random
import sys
import tempfile
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
from megatron_prism.emulate.jobs import recipe_job  # noqa: E402
from megatron_prism.features.hang import export  # noqa: E402
from megatron_prism.features.hang.dumps import DumpSet  # noqa: E402
from megatron_prism.features.hang.logs import read_logs  # noqa: E402
from megatron_prism.graph import stall  # noqa: E402
from megatron_prism.graph.stall import StalledJob  # noqa: E402

ACTIVE = {"active_only": True, "stacks": False}


def scored(found, culprits, finished) -> str:
    named = random_hangs.named(found)
    if named == culprits or finished and found.verdict == "healthy":
        return "exact"
    return "innocent" if named else "open"


Table = dict[str, Counter[str]]  # what the dumps hold -> verdicts


def show(table: Table) -> None:
    for name, counts in sorted(table.items()):
        print(f"{name:24} {dict(counts)}")


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


def drawn(first: int, last: int, most: int = 128) -> Iterator[Draw]:
    """(what draws on, world, kind, the stalled job, its culprits) of worlds of up to ``most``."""
    for seed in range(first, last + 1):
        rng = random.Random(seed)
        kind, world = rng.choice(list(random_hangs.KINDS)), rng.choice(random_hangs.WORLDS)
        if world.size <= most:
            programs, faults, culprits = random_hangs.draw(kind, world, seed)
            yield rng, world, kind, stall.run_until_stalled(programs, faults), culprits


def single(first: int, last: int, most: int = 512) -> Table:
    """Who is named from all dumps, by kind and in all."""
    table: Table = defaultdict(Counter)
    for _, _, kind, state, culprits in drawn(first, last, most):
        for name, how in (("history", {"timing": True}), ("active only", ACTIVE)):
            verdict = scored(prism.hang(dumps_of(state, **how)), culprits, state.finished)
            table[name][verdict] += 1
            table[f"{name}, {kind}"][verdict] += 1
    return table


def lost(first: int, last: int) -> Table:
    """How often lost files change who is named."""
    table: Table = defaultdict(Counter)
    for rng, world, kind, state, culprits in drawn(first, last):
        innocent = sorted(set(range(world.size)) - culprits)
        for share, number in (("one", 1), ("a fifth", world.size // 5)):
            gone = set(rng.sample(innocent, number))
            if kind == "killed" or state.finished:
                continue
            for name, how in (("history", {"timing": True}), ("active only", ACTIVE)):
                kept = {r: d for r, d in dumps_of(state, **how).dumps.items() if r not in gone}
                found = prism.hang(DumpSet(kept))
                # exit status 3: a dump is missing, perhaps its rank
                says = scored(found, culprits, False) if found.exit_code == 1 else "open"
                table[f"{share} lost, {name}"][says] += 1
    return table


def logs(first: int, last: int) -> Table:
    """Who is named from logs alone, by kind and in all."""
    table: Table = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "job.log")
        for _, world, kind, state, culprits in drawn(first, last):
            if state.finished:
                continue
            values = dict(export.dumps_of(state, **ACTIVE))
            killed = culprits if kind == "killed" else ()
            path.write_text(rendered_logs.text(values, world, killed))
            verdict = scored(prism.hang(read_logs([path])), culprits, False)
            table["logs alone"][verdict] += 1
            table[f"logs alone, {kind}"][verdict] += 1
    return table


def two(first: int, last: int) -> Table:
    """Who is named of two ranks that err in two ways."""
    table: Table = defaultdict(Counter)
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
            table[f"two faults, {name}"]["innocent" if innocent else f"{len(named)} named"] += 1
    return table


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["running"]:
        running(int(words[1]) if len(words) > 1 else 40)
        return
    scores = {"lost": lost, "logs": logs, "two": two}
    score = scores[words.pop(0)] if words and words[0] in scores else single
    show(score(*map(int, words), *(0, 199)[len(words) :]))


if __name__ == "__main__":
    main()
