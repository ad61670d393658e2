"""Dumps as real jobs leave them after the hang itself: aborted, restarted, of other attempts.

Expectations come from ProcessGroupNCCL.cpp (torch 2.9): its watchdog takes calls of aborted
communicators for completed (``isCompleted``, ``retire_id``), a communicator is created before its
first call is recorded, and the recorder outlives the groups of a process.
"""

import copy
import functools
import pickle

import production
import pytest
from production import ACTIVE, DP, EP, stands

from megatron_prism import flight_export, flight_recorder, hang, quiescence
from megatron_prism.flight_dump import DumpSet

FULL = {"active_only": False, "stacks": True}
GIL = stands(10, part="3", at=40)
FURTHER = stands(3, part="save", at=0)
BEFORE = stands(3, part="2", at=33)
HOWS = pytest.mark.parametrize("how", [ACTIVE, FULL], ids=["outstanding only", "history"])


def values(fault, how, change=None):
    """rank -> its dump."""
    return pickle.loads(_values(fault, how["active_only"], change))


@functools.cache
def _values(fault, active_only, change):
    it = production.job("moe")
    if change is not None:
        change(it)
    faults = fault(it) or {}
    how = ACTIVE if active_only else FULL
    state = quiescence.run(it.programs(), faults)
    return pickle.dumps(dict(flight_export.dumps_of(state, **how)))


def judged(made):
    """(who is named, the verdict)."""
    found = hang.of_dumps(DumpSet({r: flight_recorder.of_value(v, r) for r, v in made.items()}))
    return {c.rank for c in found.culprits}, found


def said(found, words):
    return [line for line in found.evidence if words in line]


# -- dumps of another moment ----------------------------------------------------------------------
def aborted(value):
    """As the watchdog leaves it: whatever was outstanding is retired and counted as completed."""
    value["entries"] = [e | {"retired": True} for e in value["entries"]]
    for status in value["pg_status"].values():
        status["last_completed_collective"] = status["last_enqueued_collective"]


@HOWS
@pytest.mark.parametrize("rank", [9, 11, 14])
def test_calls_of_aborted_communicators_did_not_end(rank, how):
    """Five innocents were "device stuck" with certainty, and 10 was of an earlier moment."""
    made = values(GIL, how)
    aborted(made[rank])
    named, found = judged(made)
    assert named == {10}
    assert (found.verdict, found.confidence) == ("host stuck", "likely")
    assert len(said(found, f"the dump of rank {rank} is of another moment: all_to_all #61")) == 1
    assert len(said(found, "after its communicators were aborted")) == 1


@HOWS
@pytest.mark.parametrize(("rank", "named"), [(4, {10}), (10, set())])
def test_a_dump_that_an_attempt_that_got_further_left_behind(rank, named, how):
    """Fifteen ranks were of an earlier moment and nothing was said of anybody."""
    made = values(GIL, how)
    made[rank] = values(FURTHER, how)[rank]
    who, found = judged(made)
    assert who == named
    assert len(said(found, f"the dump of rank {rank} is of ")) == 1
    assert len(said(found, f"waited for: {rank}, and no dump")) == (not named)
    assert found.exit_code == (1 if named else 3)


# -- a process that made its groups again ---------------------------------------------------------
def again(now, before):
    """NVRx's in-process restart: same names, new ids, and the calls that were aborted."""
    for rank, value in now.items():
        old = copy.deepcopy(before.get(rank, {"entries": [], "pg_status": {}}))
        ids, first = len(old["pg_status"]), len(old["entries"])
        for place, entry in enumerate(value["entries"]):
            entry |= {"pg_id": entry["pg_id"] + ids, "record_id": first + place}
        for place, entry in enumerate(old["entries"]):
            entry["record_id"] = place
        value["entries"] = old["entries"] + value["entries"]
        later = {str(int(i) + ids): status for i, status in value["pg_status"].items()}
        value["pg_status"] = old["pg_status"] | later
    return now


@HOWS
@pytest.mark.parametrize("replaced", [(), (3,)])
@pytest.mark.parametrize(("fault", "named"), [(GIL, {10}), (production.nothing, set())])
def test_calls_of_before_an_in_process_restart_are_not_of_this_hang(fault, named, replaced, how):
    """A healthy job was a mismatch of rank 3, with certainty."""
    old = values(BEFORE, how)
    made = again(values(fault, how), {r: v for r, v in old.items() if r not in replaced})
    who, found = judged(made)
    assert who == named
    assert found.verdict == ("host stuck" if named else "healthy")
    assert any("aborted and made again" in line for line in found.missing)


# -- groups without a description of their own ----------------------------------------------------
@HOWS
def test_groups_that_share_a_description_are_told_apart(how):
    """torch calls a group "undefined" that was made without group_desc: 1, 3 and 7 were named."""
    swap = production.swapped(5, "2", ("reduce_scatter", DP, 0), ("all_to_all", EP, 23))
    made = values(swap, how)
    for value in made.values():
        for config in value["pg_config"].values():
            config["desc"] = "undefined"
        for entry in value["entries"]:
            entry["process_group"] = (entry["process_group"][0], "undefined")
    named, found = judged(made)
    assert named <= {5}
    assert found.group.startswith("undefined (group ")
