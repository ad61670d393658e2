"""Who goes on past a call that all others make is named; a job that runs names nobody."""

import dataclasses

import pytest
from helpers import hang_worlds, random_hangs, running_jobs
from helpers.dump_values import Dump, verdict
from helpers.programs import healthy

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.world import World
from megatron_prism.features.hang import analyze
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.graph import stall

WORLD = World(16, tp=2, pp=2)
ALL = "default_pg"


def saving(*skips):
    """Two iterations with a save between them, which some ranks leave out."""
    base = healthy(WORLD)
    programs = []
    for rank in range(WORLD.size):
        ops = [op for op in base.of(rank) if op.name != "wait"]
        ops = [dataclasses.replace(op, handle=-1) for op in ops]
        save = [Op("all_gather", ALL, "uint8", 8, 128), Op("host_wait", note="device")]
        again = [dataclasses.replace(op, batch=op.batch + (op.batch >= 0) * 1000) for op in ops]
        programs.append([*ops, *(save if rank not in skips else ()), *again])
    return programs


@pytest.mark.parametrize("active", [True, False], ids=["outstanding only", "history"])
@pytest.mark.parametrize("skips", [(5,), (11,), (8, 9, 10, 11, 12, 13, 14, 15)])
def test_who_skips_a_call_and_goes_on_is_named(skips, active):
    from megatron_prism.core.programs.program import Program, Programs

    ops = saving(*skips)
    programs = Programs.one_per_rank([Program.from_ops(r, o) for r, o in enumerate(ops)], WORLD)
    state = stall.run_until_stalled(programs)
    assert not state.finished
    found = analyze.diagnose_dumps(random_hangs.dumps_of(state, active_only=active))
    even = 2 * len(skips) == WORLD.size
    assert random_hangs.named(found) == (set() if even else set(skips)), found
    assert found.exit_code == (3 if even else 1)


def test_a_call_that_everybody_is_in_elsewhere_says_that_the_job_runs():
    """Counters are as old as the watchdog's last look: rank 1 has not come yet, others end."""
    dumps = {r: Dump({"tp": (r - r % 2, r - r % 2 + 1)}) for r in range(8)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True)
        dump.call("tp", count=rank != 1)
    named, found = verdict(dumps)
    assert (named, found.exit_code, found.candidates) == (set(), 3, (1,))
    assert "perhaps the job was running" in found.evidence[0]


def test_a_call_to_which_all_came_ended_and_was_not_aborted():
    """Rank 7 saw it end and waits elsewhere; the others' counters are older."""
    dumps = {r: Dump({"dp": tuple(range(8)), "mp": tuple(range(8))}) for r in range(8)}
    for rank, dump in dumps.items():
        dump.call("dp", done=True, count=2)
        dump.call("mp", done=True)
        dump.call("dp", done=rank != 6)
        dump.call("dp", count=rank != 6)
        dump.call("mp", count=rank not in (4, 6))
        dump.ended["dp"] = 3 if rank == 7 else 2
        for entry in dump.entries if rank != 7 else ():
            entry["retired"] &= entry["collective_seq_id"] < 3
    named, found = verdict(dumps)
    assert (named, found.exit_code) == (set(), 3), found


def test_counters_alone_do_not_say_that_a_call_ended_on_others():
    """They may be of messages or broadcasts, which end on one side first."""
    dumps = {r: Dump({"tp": tuple(range(8)), "mp": tuple(range(8))}) for r in range(8)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True)
        dump.call("tp", count=rank != 1)
        dump.made["mp"] = 26
        dump.ended["mp"] = 26 if rank != 1 else 0
    named, found = verdict(dumps)
    assert (named, found.exit_code) == (set(), 3), found


@pytest.mark.parametrize("old", [1, 3])
def test_where_many_dumps_are_of_another_moment_nobody_is_late(old):
    """Those of a job that starts: some ranks have made no call, though one ended elsewhere."""
    dumps = {r: Dump({"tp": tuple(range(8))}) for r in range(8)}
    for rank in range(old, 8):
        dumps[rank].call("tp", done=True)
        dumps[rank].call("tp", count=rank == 7)
    named, found = verdict(dumps)
    assert named == ({7} if old == 1 else set()), found
    assert found.exit_code == (1 if old == 1 else 3)


def pairs(late, calls):
    """Four pairs after so many calls; the first of them waits for ``late``."""
    dumps = {r: Dump({"tp": (r - r % 2, r - r % 2 + 1)}) for r in range(8)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True, count=calls)
        dump.call("tp", count=rank != late, done=rank > 1)
    return DumpSet({r: of_value(dump.value(), r) for r, dump in dumps.items()})


@pytest.mark.parametrize(
    ("later", "exit_code", "named", "candidates"),
    [((1, 3), 1, {1}, ()), ((1, 5), 0, set(), ()), ((0, 4), 0, set(), ())],
    ids=["nothing moved", "all moved", "another is late"],
)
def test_a_second_set_tells_whether_the_job_runs(later, exit_code, named, candidates):
    found = analyze.diagnose_dumps(pairs(1, 3), pairs(*later))
    assert (random_hangs.named(found), found.exit_code) == (named, exit_code), found
    assert found.candidates == candidates
    assert "ranks made calls, or saw one end, in between" in found.evidence[0]


def test_where_only_some_moved_nobody_is_named():
    before, after = pairs(1, 3), pairs(1, 3)
    mixed = DumpSet({r: (pairs(1, 5) if r > 5 else after).dumps[r] for r in range(8)})
    found = analyze.diagnose_dumps(before, mixed)
    assert (found.culprits, found.candidates, found.exit_code) == ((), (1,), 3)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("moe", (18, 20, 26)), ("interleaved", (1, 3, 15, 24, 28)), ("synthetic", (0, 1))],
)
def test_dumps_of_a_running_job_name_nobody(name, seeds):
    """Dumps of moments up to 5 s apart, counters up to a poll behind, and the times of a copy.

    Where all others happen to wait for one rank, no dump tells that it is on its way: 2 of 270.
    """
    world = World(32, tp=2, pp=4, ep=2)
    programs = healthy(world) if name == "synthetic" else hang_worlds.world(name)
    run = running_jobs.TimedRun(running_jobs.repeated(programs, 2), seed=7)
    assert all(map(all, run.done))
    for seed in seeds:
        for spread in (0, 100, 5000):
            for how in ({"active_only": True, "stacks": False}, {"timing": True})[: 2 - seed % 2]:
                poll = (10, 100)[seed % 2]
                dumps = running_jobs.dumps_of(run, seed, spread, poll_ms=poll, **how)
                found = analyze.diagnose_dumps(dumps)
                assert (found.culprits, found.exit_code) in {((), 0), ((), 3)}, (seed, found)
