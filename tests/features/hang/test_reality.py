"""Dumps as real jobs leave them after the hang itself: aborted, restarted, of other attempts.

Expectations come from ProcessGroupNCCL.cpp (torch 2.9): its watchdog takes calls of aborted
communicators for completed (``isCompleted``, ``retire_id``), a communicator is created before its
first call is recorded, and the recorder outlives the groups of a process.
"""

import copy
from collections import Counter

import pytest
from helpers import production
from helpers.dump_values import Dump, verdict
from helpers.flight_dumps import FULL, GIL, judged, said, values
from helpers.production import ACTIVE, DP, EP, another, stands

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.hang import export
from megatron_prism.graph import stall

FURTHER = stands(3, part="save", at=0)
BEFORE = stands(3, part="2", at=33)
HOWS = pytest.mark.parametrize("how", [ACTIVE, FULL], ids=["outstanding only", "history"])


# -- dumps of another moment ----------------------------------------------------------------------
def aborted(value, how):
    """As the watchdog leaves it: whatever was outstanding is retired and counted as completed."""
    retired = [e | {"retired": True} for e in value["entries"]]
    value["entries"] = [] if how["active_only"] else retired
    for status in value["pg_status"].values():
        status["last_completed_collective"] = status["last_enqueued_collective"]


@HOWS
@pytest.mark.parametrize("rank", [9, 11, 14])
def test_calls_of_aborted_communicators_did_not_end(rank, how):
    """Five innocents were "device stuck" with certainty, and 10 was of an earlier moment."""
    made = values(GIL, how)
    aborted(made[rank], how)
    named, found = judged(made)
    assert named == {10}
    assert (found.verdict, found.confidence) == ("host stuck", "likely")
    known = not how["active_only"]  # the calls are there, and did not end
    assert ("calls that were aborted count as outstanding" in found.missing) == known
    said_so = said(found, f"the dump of rank {rank} is of another moment: all_to_all #61")
    assert len(said_so) == (not known)
    assert len(said(found, "after its communicators were aborted")) == (not known)


def test_a_call_that_ended_on_one_of_three_members_makes_no_dump_one_of_another_moment():
    """gpu_error_1st of nvidia-resiliency-ext (devices 12 and 14 fail), the dumps of 10 and 15 lost:
    a collective ended on 13 and not on 12 and 14.  The dump of 13 was set apart, and 12 named as a
    host.  Nothing says that a member did not come, and rank 1 was not aborted.
    """
    dumps = {}
    for rank in (0, 1, 2):
        dump = Dump({"mp": [0, 1, 2, 3], "dp": [0, 1, 2, 3]})
        dump.call("dp", "all_gather", done=True)
        dump.call("dp", done=rank == 1)
        dump.call("mp")
        dumps[rank] = dump
    _, found = verdict(dumps)
    assert found.candidates == (0, 2)
    assert not said(found, "another moment")
    # rank 3 is not among the others: nothing is known of it
    for rank in (0, 2):
        text = f"rank {rank}: all_reduce #2 of DATA_PARALLEL_GROUP ended on rank 1 (up to #2), not"
        assert said(found, text)


@HOWS
@pytest.mark.parametrize("ranks", [(9, 11), (9, 14), (9, 11, 14), (11, 12, 13, 14), (0, 3, 12)])
def test_several_aborted_dumps_name_nobody_else(ranks, how):
    """Two of a group of four were as many as still waited there."""
    made = values(GIL, how)
    for rank in ranks:
        aborted(made[rank], how)
    named, found = judged(made)
    assert named == {10}
    assert found.confidence in ("likely", "possible")


@HOWS
@pytest.mark.parametrize("ranks", [(4, 6), (1, 5, 9), (0, 8), (12, 13, 15)])
def test_dumps_of_a_node_that_was_swapped(ranks, how):
    made, further = values(GIL, how), values(FURTHER, how)
    for rank in ranks:
        made[rank] = further[rank]
    named, found = judged(made)
    assert named == ({10} if len(ranks) < 3 else set()), found  # a running job looks like that


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


# -- what hosts wait for is not always recorded ---------------------------------------------------
def created_first(it):
    """NCCL's communicators are created by their first call, where the host waits for everybody."""
    for parts in it.parts.values():
        known = set()
        for _, ops in parts:
            for place in range(len(ops) - 1, -1, -1):
                name = ops[place].group
                if name and name not in known and all(o.group != name for o in ops[:place]):
                    ops.insert(place, Op("barrier", name, "uint8", 1, 1))
            known |= {op.group for op in ops}


def uncreated(made):
    """Take the creations out of the dumps; who stands in one has nothing of that group."""
    for value in made.values():
        left, seen, ids = [], Counter(), {}
        for entry in value["entries"]:
            name = entry["process_group"][0]
            seen[name] += 1
            if seen[name] > 1:
                left.append(entry | {"collective_seq_id": entry["collective_seq_id"] - 1})
                ids[name] = str(entry["pg_id"])
        value["entries"] = left
        value["pg_config"] = {n: c for n, c in value["pg_config"].items() if n in ids}
        value["pg_status"] = {
            i: {word: count - 1 for word, count in value["pg_status"][i].items()}
            for i in ids.values()
        }
    return made


def test_who_waits_for_a_communicator_looks_idle():
    """Rank 10 never comes to its first call of experts; its stage waits there without a record."""
    made = uncreated(values(stands(10, part="1", at=5), FULL, change=created_first))
    named, found = judged(made)
    assert named == set(range(8, 16))
    assert found.confidence == "possible"


def test_a_whole_group_that_stands_still_may_wait_for_one_of_its_ranks():
    """DeepEP's calls are not NCCL's: ranks 1 to 7 of the group may be victims of one of them."""
    made = values(stands(1, 3, 5, 7, part="3", at=0), ACTIVE)
    named, found = judged(made)
    assert named == {1, 3, 5, 7}
    assert found.confidence == "possible"
    assert len(said(found, "ranks 1-7:2 are all members of ")) == 1
    named, found = judged(values(stands(1, 3, 5, part="3", at=0), ACTIVE))
    assert (named, found.candidates) == (set(), (1, 3, 5, 7))  # three on their way, or 7 went on
    assert (
        len(said(found, "they may wait for it in DATA_PARALLEL_GROUP_WITH_CP, outside NCCL")) == 1
    )


def test_one_rank_in_a_barrier_and_all_others_outside_can_be_two_things():
    """Rank 0 may make a call of its own; or the others still write the checkpoint."""
    named, found = judged(values(stands(*range(1, 16), part="save", at=0), ACTIVE))
    assert (named, found.confidence) == ({0}, "possible")
    assert len(said(found, "or ranks 1-15 are held up before it")) == 1


@HOWS
@pytest.mark.parametrize("rank", [0, 8, 11])
def test_one_dump_of_sixteen_says_nothing_of_those_without_one(rank, how):
    named, found = judged({rank: values(GIL, how)[rank]})
    assert (named, found.verdict, found.exit_code) == (set(), "undetermined", 3)
    assert len(said(found, "waited for: ")) == 1


def test_a_batch_waits_for_all_that_is_in_it():
    """In a ring who sends has been answered, and waits for what it receives: the state of both is
    that of the batch, so the message that is not there tells whom it waits for."""
    ring = "prism-program 1\nworld size=4 cp=4\n"
    step = "- send CONTEXT_PARALLEL_GROUP bf16 in=8 peer=1 batch={0}\n"
    step += "- recv CONTEXT_PARALLEL_GROUP bf16 out=8 peer=-1 batch={0}\n- host_wait note=device\n"
    for rank in range(4):
        ring += f"program ranks={rank}\n" + "".join(step.format(i) for i in range(4))
    state = stall.run_until_stalled(parse(ring, "ring"), {2: stall.RankFault(host=3)})
    named, found = judged(dict(export.dumps_of(state)))
    assert (named, found.verdict) == ({2}, "host stuck")
    waits = {row.rank: row.waits_for for row in found.victims}
    assert waits[3] == (2,)


# -- started with other sizes; calls outside NCCL; splits that do not fit --------------------------
def regrouped(value, **groups):
    for config in value["pg_config"].values():
        config["ranks"] = groups.get(config["desc"], config["ranks"])


def test_ranks_that_were_started_with_other_parallel_sizes_are_named():
    """Rank 5 with tp 4: members of its tensor group have another one.  Nobody met there."""
    made = values(lambda it: {r: stall.RankFault(host=1 + (r != 5)) for r in range(16)}, ACTIVE)
    regrouped(made[5], TENSOR_MODEL_PARALLEL_GROUP="[4, 5, 6, 7]")
    named, found = judged(made)
    assert (named, found.verdict, found.confidence) == ({5}, "mismatch", "possible")
    assert {c.kind for c in found.culprits} == {"groups"}


@pytest.mark.parametrize("ranks", [(5,), (4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14)])
def test_a_node_that_counts_other_ranks_is_named(ranks):
    made = values(lambda it: {r: stall.RankFault(host=0) for r in range(16)}, ACTIVE)
    for rank in ranks:
        regrouped(made[rank], default_pg=str(list(range(15))))
    named, found = judged(made)
    assert (named, found.exit_code) == (set(ranks), 1)
    assert "compare its parallel sizes and world size" in found.evidence[0]


def test_a_barrier_of_gloo_that_one_rank_leaves_out():
    """15 hosts wait for nobody, and rank 5 makes its next call: they looked late, 5 did not."""
    others = [rank for rank in range(16) if rank != 5]
    named, found = judged(values(stands(*others, part="3", at=0), ACTIVE))
    assert (named, found.confidence) == ({5}, "possible")


@pytest.mark.parametrize("pair", [(5, 3), (1, 5)])
def test_an_all_to_all_that_ends_on_all_members_but_two(pair):
    """Each member waits for its own pairs: of two whose splits do not fit either may err."""
    fault = another(5, "3", "all_to_all", EP, 4, splits=((7, 9, 8, 8), (8, 8, 8, 8)))
    made = values(fault, FULL)
    ends = {1, 3, 5, 7} - set(pair)
    for rank in ends:
        row = next(e for e in made[rank]["entries"] if e["process_group"][1] == EP
                   and not e["retired"])  # fmt: skip
        row["retired"], row["state"] = True, "completed"
        status = made[rank]["pg_status"][str(row["pg_id"])]
        status["last_completed_collective"] = row["collective_seq_id"]
    named, found = judged(made)
    assert (named, found.candidates, found.exit_code) == (set(), tuple(sorted(pair)), 3)
    assert len(said(found, "what one of them sends another does not expect (splits)")) == 1


@HOWS
@pytest.mark.parametrize("rank", [0, 5, 13])
def test_one_rank_of_many_that_gets_no_data_is_named(rank, how):
    """It stands between two iterations.  Who enters a save that nobody else enters errs as well;
    of two ranks (see test_logs) either may."""
    it = production.plain_job(production.job("interleaved").base)
    state = stall.run_until_stalled(it.programs(), stands(rank, part="3", at=0)(it))
    named, found = judged(dict(export.dumps_of(state, **how)))
    assert (named, found.verdict) == ({rank}, "host stuck")
    assert len(said(found, f"rank {rank} waits outside NCCL (gloo, the store, files, data)")) == 1


@pytest.mark.parametrize("forced", [False, True])
def test_gathers_of_the_next_forward_do_not_hide_the_end_of_an_iteration(forced):
    """--overlap-param-gather: 4 reductions and, but for the first, 3 gathers an iteration.  Rank 0
    waits outside NCCL after the fifth (of a save it has gathered before); rank 1 went on."""
    dumps = {r: Dump({"dp": (0, 1), "tp": (r,)}) for r in range(2)}
    dumps[0].call("tp", done=True, count=160)
    dumps[1].call("tp", done=True, count=192)
    dumps[0].call("dp", done=True, count=5 * 7 - 3 + 3 * forced)
    dumps[1].call("dp", done=True, count=5 * 7 - 3 + 3 * forced)
    dumps[1].call("dp", count=3)
    named, found = verdict(dumps)
    assert (named, found.candidates, found.exit_code) == (set(), (0,), 3), found
    assert said(found, "it stands between two iterations")
