"""Dumps that another attempt of the job left are told by their clocks, and name nobody."""

import dataclasses
import random

import pytest
from helpers import random_hangs
from helpers.dump_values import Dump
from helpers.flight_dumps import FULL, GIL, said, values
from helpers.production import ACTIVE, stands

from megatron_prism.core.world import World
from megatron_prism.features.hang import analyze, export
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.graph import stall

SECOND_NS = 10**9
BEGIN_NS = 1_790_000_000 * SECOND_NS
HOUR_S = 3600
TIMEOUT_S = 600
EARLIER = stands(3, part="3", at=33)  # where an earlier attempt stopped
HOWS = pytest.mark.parametrize("how", [ACTIVE, FULL], ids=["outstanding only", "history"])


def at(value, begin_s, rank=0, written_s=None):
    """A dump of an attempt that began then; its file is written when the time-out is over."""
    for entry in value["entries"]:
        entry["time_created_ns"] += BEGIN_NS + int(begin_s * SECOND_NS)
    written_s = begin_s + TIMEOUT_S + 10 if written_s is None else written_s
    written_ns = BEGIN_NS + int(written_s * SECOND_NS)
    return dataclasses.replace(of_value(value, rank), written_ns=written_ns)


def judged(dumps):
    verdict = analyze.diagnose_dumps(DumpSet(dict(sorted(dumps.items()))))
    return {culprit.rank for culprit in verdict.culprits}, verdict


def mixed(how, old_ranks, age_s, **more):
    """Dumps of a job that rank 10 holds up, some of them left by an earlier attempt."""
    earlier, now = values(EARLIER, how), values(GIL, how)
    dumps = {rank: at(value, 0, rank, **more) for rank, value in now.items()}
    for rank in old_ranks:
        dumps[rank] = at(earlier[rank], -age_s, rank, **more)
    return dumps


@HOWS
@pytest.mark.parametrize("more", [{}, {"written_s": 9 * HOUR_S}], ids=["", "copied files"])
@pytest.mark.parametrize("age_s", [TIMEOUT_S + 90, 2 * HOUR_S, 240 * HOUR_S])
@pytest.mark.parametrize("old_ranks", [(9,), (0,), (14,), (5, 12), (4, 5, 6, 7)])
def test_a_dump_of_an_earlier_attempt_names_nobody(old_ranks, age_s, more, how):
    """ "Host stuck (likely)" and "device stuck" were said of such ranks."""
    named, found = judged(mixed(how, old_ranks, age_s, **more))
    assert named <= {10}
    lines = said(found, "is of another attempt")
    assert [line.split()[4] for line in lines] == [str(rank) for rank in old_ranks]


@HOWS
def test_the_culprit_s_dump_of_an_earlier_attempt_says_nothing_of_it(how):
    named, found = judged(mixed(how, (10,), 2 * HOUR_S))
    assert (named, found.exit_code) == (set(), 3)
    assert said(found, "the dump of rank 10 is of another attempt: its last call was issued 7200 s")


@HOWS
@pytest.mark.parametrize("old_ranks", [range(8), range(5), range(11, 16)])
def test_of_many_dumps_of_another_attempt_nobody_is_named(old_ranks, how):
    named, found = judged(mixed(how, old_ranks, 2 * HOUR_S))
    assert (named, found.exit_code) == (set(), 3)
    assert said(found, "are of another attempt than the others")


@HOWS
def test_a_dump_of_a_later_attempt_is_said_to_be_one(how):
    named, found = judged(mixed(how, (9,), -2 * HOUR_S))
    assert named <= {10}
    assert said(found, "the dump of rank 9 is of another attempt: its first call was issued ")


def test_of_two_dumps_of_two_attempts_nobody_is_named():
    dumps = {}
    for rank, calls in ((0, 3), (1, 4)):
        dump = Dump({"tp": (0, 1)})
        dump.call("tp", done=True, count=calls - 1)
        dump.call("tp")
        dumps[rank] = at(dump.value(), -HOUR_S * rank, rank)
    named, found = judged(dumps)
    assert (named, found.exit_code) == (set(), 3)
    assert said(found, "the dump of rank 1 is of another attempt")


# -- attempts that follow one another soon --------------------------------------------------------
def pair_of(calls, begin_s, from_start=True, **more):
    """Ranks 0 to 7 in a group of all, which issued so many calls, one a second."""
    dumps = {}
    for rank in range(8):
        dump = Dump({"mp": range(8)})
        dump.call("mp", done=True, count=calls - 1)
        dump.call("mp")
        for number, entry in enumerate(dump.entries):
            entry["time_created_ns"] = number * SECOND_NS
            entry["record_id"] += 0 if from_start else 5000
        dumps[rank] = at(dump.value(), begin_s, rank, **more)
    return dumps


@pytest.mark.parametrize("rank", [0, 5])
def test_an_attempt_that_ended_before_others_issued_their_first_call_is_another(rank):
    """The job ended by an exception, and began again within the time-out."""
    dumps = pair_of(20, 0, written_s=9 * HOUR_S)
    dumps[rank] = pair_of(14, -120, written_s=9 * HOUR_S)[rank]
    named, found = judged(dumps)
    assert not named
    assert said(found, f"the dump of rank {rank} is of another attempt: its last call was issued")


def test_a_rank_that_starts_late_is_of_the_same_attempt():
    """Rank 7 calls first after two minutes; no call of the others ended before that."""
    dumps = pair_of(1, 0)
    dumps |= {7: pair_of(1, 120)[7]}
    _, found = judged(dumps)
    assert not said(found, "another attempt")


def test_a_file_that_was_written_before_the_others_called_is_of_another_attempt():
    """Recorders that lost their first calls do not show when their processes began."""
    dumps = pair_of(20, 0, from_start=False)
    dumps[3] = pair_of(14, -240, from_start=False, written_s=-120)[3]
    named, found = judged(dumps)
    assert not named
    assert said(found, "the dump of rank 3 is of another attempt")


def test_a_dump_without_a_call_is_dated_by_its_file():
    """It looked as if its host had not come to any call."""
    dumps = mixed(ACTIVE, (), 0)
    empty = values(EARLIER, ACTIVE)[9] | {"entries": []}
    dumps[9] = at(empty, -HOUR_S, 9)
    named, found = judged(dumps)
    assert named <= {10}
    assert said(found, "the dump of rank 9 is of another attempt: it was written 2990 s before")


# -- what is one attempt --------------------------------------------------------------------------
@HOWS
@pytest.mark.parametrize("written_s", [None, 9 * HOUR_S, -9 * HOUR_S], ids=["", "copied", "zipped"])
def test_files_of_any_age_are_of_one_attempt_where_their_calls_are(written_s, how):
    dumps = mixed(how, (), 0, written_s=written_s)
    dumps[9] = dataclasses.replace(dumps[9], written_ns=BEGIN_NS - HOUR_S * SECOND_NS)
    named, found = judged(dumps)
    assert named == {10}
    assert not said(found, "another attempt")


def test_a_host_that_stopped_some_minutes_before_the_others_wait_is_still_named():
    """The others wrote a checkpoint in between."""
    dumps = {}
    for rank in range(8):
        dump = Dump({"mp": range(8)})
        dump.call("mp", done=True, count=20)
        dump.call("mp", count=rank != 3)
        for entry in dump.entries[20:]:
            entry["time_created_ns"] += 500 * SECOND_NS
        dumps[rank] = at(dump.value(), 0, rank)
    named, found = judged(dumps)
    assert named == {3}
    assert not said(found, "another attempt")


def test_where_recorders_reach_back_a_long_pause_is_of_one_attempt():
    """Two hours of a save: the others called before and behind it."""
    dumps = {}
    for rank in range(8):
        dump = Dump({"mp": range(8)})
        dump.call("mp", done=True, count=20)
        dump.call("mp", count=rank != 3)
        for entry in dump.entries[20:]:
            entry["time_created_ns"] += 2 * HOUR_S * SECOND_NS
        dumps[rank] = at(dump.value(), 0, rank, written_s=3 * HOUR_S)
    named, found = judged(dumps)
    assert named == {3}
    assert not said(found, "another attempt")


@pytest.mark.parametrize("seed", range(24))
def test_drawn_attempts_accuse_no_rank_of_which_an_old_dump_is_there(seed):
    """Two drawn faults: the dumps of one to three ranks are those of the first."""
    rng = random.Random(seed)
    world = World(16, tp=2, pp=2, ep=2)
    how = rng.choice([{"timing": True}, ACTIVE])
    attempts = []
    for number in range(2):
        kind = rng.choice(sorted(set(random_hangs.KINDS) - {"inversion"}))
        programs, faults, culprits = random_hangs.draw(kind, world, 100 * seed + number)
        state = stall.run_until_stalled(programs, faults)
        attempts.append((dict(export.dumps_of(state, **how)), culprits))
    (earlier, _), (now, culprits) = attempts
    dumps = {rank: at(value, 0, rank) for rank, value in now.items()}
    for rank in rng.sample(sorted(earlier), rng.randint(1, 3)):
        dumps[rank] = at(earlier[rank], -rng.choice([900, HOUR_S, 100 * HOUR_S]), rank)
    named, found = judged(dumps)
    assert named <= culprits, found
