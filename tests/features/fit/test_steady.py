"""Later iterations: holes that are lost, by how far the host is ahead; jobs that get through."""

import numpy as np
import pytest

from megatron_prism.core.programs.ops import BEGUN, WAITED
from megatron_prism.core.programs.program import Builder, Programs
from megatron_prism.core.world import World
from megatron_prism.features.fit import report
from megatron_prism.features.fit.fit import EXPANDABLE, fit
from megatron_prism.memory import allocator, steady
from megatron_prism.memory.host_lead import OpTimes

MIB = 1 << 20
LARGE, SMALL = 100 * MIB, 20 * MIB
LIMIT = 156 * MIB  # enough for a host that is just ahead, and for one that is far ahead
NEEDS = 222 * MIB  # of segments, however far the host is ahead


def program(*, beside=True, with_history=True):
    """Two iterations of a rank, the second of them recorded.

    A large block and then a small one go that another stream uses.  Where the large one alone is
    back when a small one is asked for, it is split, and the large one behind it needs a segment.
    """
    made = Builder()
    made.memory(0, 2 * MIB, "param:all")
    made.add("compute", phase="forward", microbatch=0)
    made.memory(1, LARGE, "first @a.py:1")
    made.memory(2, SMALL, "first @a.py:2")
    made.add("compute", phase="forward", microbatch=0)
    made.memory(1, -LARGE)
    made.memory(2, -SMALL)
    made.memory(3, SMALL, "between @b.py:2")
    made.add("compute", phase="backward", microbatch=0)
    made.memory(4, LARGE, "second @c.py:3")
    made.add("compute", phase="optimizer")
    made.memory(3, -SMALL)
    made.memory(4, -LARGE)
    history, launches = [(0, 2 * MIB, 0, 0)], 0
    for number in (1, 2):
        history.append((BEGUN, 0, 0, launches))
        history += [(1, LARGE, 0, launches), (2, SMALL, 0, launches)]
        history += [(1, 0, 7, launches), (2, 0, 7, launches)] * beside
        history.append((1, -LARGE, 0, launches + 1))
        history.append((2, -SMALL, 0, launches + 25))
        launches += 30
        if number == 2:  # the first one, which still builds things, does without
            history += [(3, SMALL, 0, launches), (WAITED, 0, 0, launches)]
            history += [(4, LARGE, 0, launches)]
            history += [(3, -SMALL, 0, launches), (4, -LARGE, 0, launches)]
        history.append((WAITED, 0, 0, launches))
    history.append((BEGUN, 0, 0, launches))
    if with_history:
        made.history = np.array(history, dtype=np.int64)
    return made.build(0)


def test_draws_differ_where_a_block_comes_back_late():
    risk = steady.risk(program(), LIMIT)
    assert 0 < risk.failed <= risk.draws == steady.DRAWS
    assert risk.size == LARGE
    assert risk.where == "O c.py:3"
    assert risk.first >= 2
    assert risk.unused >= LARGE - SMALL
    # another seed draws other leads
    failed = {steady.risk(program(), LIMIT, seed=seed).failed for seed in range(4)}
    assert len(failed) > 1


@pytest.mark.parametrize(("host_ns", "splits"), [(1e6, False), (30.0, True)])
def test_the_lead_follows_from_what_launches_take(host_ns, splits):
    """A slow host has both blocks back before it asks again, a faster one the large one alone."""
    made = program()
    ops = np.ones(len(made))
    times = OpTimes(host_ns * ops, 100.0 * ops)
    risk = steady.risk(made, LIMIT, times=times)
    assert risk.follows_times
    assert risk.draws == steady.DRAWS == len(risk.reserved)
    # the large block is split, so the request behind it takes a segment more
    assert (risk.reserved[0] > LIMIT) == splits
    assert risk.reserved == tuple(sorted(risk.reserved))


def test_without_the_requests_of_the_process_leads_are_drawn_and_the_answer_says_so():
    made = program(with_history=False)
    ops = np.ones(len(made))
    risk = steady.risk(made, LIMIT, times=OpTimes(ops, ops))
    assert not risk.follows_times
    assert risk == steady.risk(made, LIMIT)


def test_shares_of_draws():
    risk = steady.Risk(0, 4, 9, reserved=(10, 20, 30, 40))
    assert [risk.reserved_at(share) for share in (0.0, 0.25, 0.5, 0.9, 1.0)] == [10, 10, 20, 40, 40]


@pytest.mark.parametrize(("is_routed", "margin"), [(False, 0.004), (True, 0.045)])
def test_the_band_is_wider_than_the_draws(is_routed, margin):
    """Draws are of the host's speed alone; where tokens go nobody has drawn."""
    risk = steady.Risk(0, 3, 9, reserved=(1000, 2000, 4000), is_routed=is_routed)
    low, high = risk.reserved_band
    assert low == pytest.approx(1000 * (1 - margin), abs=1)
    assert high == pytest.approx(4000 * (1 + margin), abs=1)
    told = risk.to_json()
    assert told["reserved_band"] == [low, high]
    assert told["reserved_at"]["0.5"] == 2000
    assert "reserved" not in told
    assert steady.Risk(0, 0, 0).to_json()["reserved_band"] is None


@pytest.mark.parametrize(
    ("draws", "words"),
    [
        (3, "reserved within 9 iterations: 1 GiB to 3 GiB in 3 draws"),
        (20, "1 GiB in half of 20 draws, 3 GiB or more in a tenth; 1 GiB to 3 GiB in all"),
    ],
)
def test_few_draws_are_a_range(draws, words):
    """Of three draws nobody can tell a tenth."""
    few = draws // 2 + 1
    reserved = (*[1 << 30] * few, *[3 << 30] * (draws - few))
    risk = steady.Risk(0, draws, 9, reserved=reserved)
    assert words in report.reserved_of_draws(risk)


def test_what_is_enough_for_any_lead_is_no_risk():
    risk = steady.risk(program(), NEEDS)
    assert (risk.failed, risk.draws) == (0, steady.DRAWS)
    assert risk.iterations == steady.ITERATIONS + 1


@pytest.mark.parametrize("with_history", [True, False])
def test_without_blocks_of_two_streams_one_draw_is_all(with_history):
    alone = program(beside=False, with_history=with_history)
    assert (steady.risk(alone, LIMIT).failed, steady.risk(alone, LIMIT).draws) == (0, 1)
    tight = steady.risk(alone, 110 * MIB)
    assert (tight.failed, tight.draws, tight.size) == (1, 1, LARGE)


def test_a_program_that_is_too_long_is_not_replayed():
    assert steady.risk(program(), NEEDS, most_rows=1).draws == 0


def test_every_repeat_holds_what_the_recorded_iteration_holds():
    """A storage that an iteration leaves to the next, and one that is made once."""
    before = [(0, 500, 0, 0), (1, 70, 0, 0)]
    iteration = [(BEGUN, 0, 0, 0), (1, -70, 0, 1), (2, 70, 0, 2), (3, 11, 0, 3)]
    requests = steady._Requests(before, iteration, 2)
    rows, starts = steady._repeated(requests, 3)
    levels = []
    allocator.replay_requests(rows, levels=levels)  # a free of what is not there would be refused
    assert len(starts) == 4
    ends = [*starts[1:], len(rows)]
    held = [sum(steady._alive(rows[:end]).values()) for end in ends]
    assert held == [581] * 4


def test_a_job_that_may_run_out_later_is_not_said_to_fit():
    made = Programs(World(1), (program(),), np.zeros(1, dtype=np.int32), source={"tier": "meta"})
    close = fit(made, limit=LIMIT, device=None)
    assert close.memory.classes["all"]["peak_reserved"] < LIMIT
    assert not close.fits
    assert not close.overruns
    assert close.at_risk == ("all",)
    text = close.to_text()
    assert text.startswith("at risk: the limit is")
    assert f"of {steady.DRAWS} draws" in " ".join(text.split())
    assert close.to_json()["risks"]["all"]["failed"] == close.risks["all"].failed
    assert [change.words for change in close.changes] in ([EXPANDABLE], [])
    wide = fit(made, limit=4 * NEEDS, device=None)
    assert wide.fits
    assert wide.risks["all"].failed == 0
    assert wide.to_text().startswith("fits")
