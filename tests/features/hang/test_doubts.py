"""What dumps leave open is said: nobody innocent is named as if it were known."""

import dataclasses
import pickle

import pytest
from helpers import production, random_hangs
from helpers.dump_values import Dump, verdict
from helpers.flight_dumps import FULL, GIL, judged, said, values
from helpers.production import ACTIVE, stands

from megatron_prism.cli import main as cli
from megatron_prism.features.hang import analyze
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.state import JobState
from megatron_prism.graph import stall


def test_recorders_that_were_off_say_nothing(tmp_path, capsys):
    for rank in range(4):
        value = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(value))
    assert cli.main(["hang", "--dumps", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    assert "HEALTHY" not in out
    assert "the recorders were off" in out
    assert "TORCH_FR_BUFFER_SIZE" in out


def test_a_message_to_a_rank_that_is_not_known_names_nobody():
    dumps = {r: Dump({"pp": (0, 1)}) for r in range(2)}
    dumps[0].call("pp", "recv 0<-5")
    named, found = verdict(dumps)
    assert -1 not in named
    assert "rank -1" not in str(found)


@pytest.mark.parametrize("left", [True, False], ids=["ended", "outstanding"])
def test_a_message_alone_is_outstanding_only_where_its_groups_counters_say_so(left):
    """torch leaves those of batches that ended among the outstanding ones."""
    dump = Dump({"pp": (0, 1), "tp": (0, 2)})
    dump.call("pp", "send 0->1")
    dump.call("tp")
    dump.ended["pp"] += left
    found = of_value(dump.value(), 0)
    assert [e.op for e in found.entries] == (["all_reduce"] if left else ["send", "all_reduce"])


def test_counters_that_also_count_collectives_do_not_end_a_message():
    """Rank 0 waits in its third message; 100 collectives of that group ended."""
    dumps = {r: Dump({"pp": (0, 1)}) for r in range(2)}
    dumps[0].call("pp", "recv 0<-1")
    dumps[0].made["pp"], dumps[0].ended["pp"] = 3, 100
    named, found = verdict(dumps)
    assert 0 not in named, found


def replicas(count=3):
    """Two stages; stage 0 is ranks 0 to count - 1."""
    first, last = tuple(range(count)), tuple(range(count, 2 * count))
    return {r: Dump({"pp": (r % count, r % count + count), "dp": first if r < count else last})
            for r in range(2 * count)}  # fmt: skip


@pytest.mark.parametrize("lengths", [(512, 1024, 2048), (1024, 1024, 1024)])
def test_messages_of_any_length_tell_nothing_about_the_next(lengths):
    """Rank 2 sends 1,024 words where rank 5 expects 512: if all are alike, 5 errs."""
    dumps = replicas()
    for rank, dump in dumps.items():
        stage = rank // 3
        for turn in range(2):
            size = lengths[(rank + turn) % 3]
            dump.call("pp", "recv 1<-0" if stage else "send 0->1", done=True, size=size)
    dumps[2].call("pp", "send 0->1", size=1024)
    dumps[5].call("pp", "recv 1<-0", size=512)
    for rank in (0, 1, 3, 4):
        dumps[rank].call("dp")
    named, found = verdict(dumps)
    assert named == (set() if len(set(lengths)) > 1 else {5}), found


def test_the_record_that_closes_a_batch_is_no_call_that_others_made():
    """Its number is that of the last collective, so everybody seemed to have made it."""
    dumps = replicas()
    for rank, dump in dumps.items():
        for turn in range(1 if rank == 2 else 2):
            if turn:
                dump.call("dp")
            dump.call("pp", "recv 1<-0" if rank // 3 else "send 0->1", p2p_seq_id=turn + 1)
            dump.call("pp", "coalesced", input_sizes=[], output_sizes=[], collective_seq_id=0)
    made = {r: of_value(dump.value(), r) for r, dump in dumps.items()}
    state = JobState(DumpSet(made))
    (call,) = (e for e in state.dumps[0].entries if not e.pair and e.op != "coalesced")
    assert not state.skipped(2, call)


@pytest.mark.parametrize("how", [ACTIVE, FULL], ids=["outstanding only", "history"])
def test_a_file_that_was_lost_names_its_rank_as_possible_only(how):
    made = values(GIL, how)
    for lost in sorted(set(made) - {10}):
        named, found = judged({r: value for r, value in made.items() if r != lost})
        assert named <= {10} or found.confidence == "possible", (lost, found)


@pytest.mark.parametrize("later", [True, False])
def test_one_of_two_ranks_may_err_as_well_as_the_other(later):
    """Rank 1 makes a call twice, or rank 0 left it out: behind what both wait in, or before it."""
    dumps = {r: Dump({"tp": (0, 1), "dp": (0, 1)}) for r in range(2)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True)
        for kind in ("dp", "tp") if later else ("tp", "dp"):
            dump.call(kind, count=rank if kind == "tp" else 1)
    named, found = verdict(dumps)
    assert (named, found.confidence) == ({0} if later else set(), "possible")
    assert len(said(found, "has one sibling")) == later


def test_a_batch_that_two_ranks_got_wrong_is_still_theirs():
    """A bad batch reaches every tensor-parallel rank of its replica."""
    ranks = {"pp": lambda r: (r % 6, r % 6 + 6), "dp": lambda r: tuple(range(r % 2, 6, 2)),
             "tp": lambda r: (r // 2 * 2, r // 2 * 2 + 1)}  # fmt: skip
    dumps = {r: Dump({kind: of(r) for kind, of in ranks.items() if kind != "dp" or r < 6})
             for r in range(12)}  # fmt: skip
    for rank, dump in dumps.items():
        what = "recv 1<-0" if rank > 5 else "send 0->1"
        dump.call("pp", what, done=True, size=512, count=3)
        dump.call("pp", what, size=1024 if rank in (4, 5) else 512)
    named, found = verdict(dumps)
    assert (named, found.confidence) == ({4, 5}, "certain"), found


def test_who_was_started_anew_is_no_sibling_behind():
    dumps = {r: Dump({"tp": (r // 2 * 2, r // 2 * 2 + 1)}) for r in range(16)}
    for rank, dump in dumps.items():
        if rank == 6:
            continue
        dump.call("tp", done=True, count=30)
        dump.call("tp", count=rank % 2 or rank > 3, done=rank in (4, 5) or rank > 7)
    named, _ = verdict(dumps)
    assert {0, 2} <= named


def test_hosts_that_stand_together_further_on_may_wait_for_the_one_behind():
    """A communicator's first call creates it, and leaves no record before all have come."""
    dumps = {r: Dump({"tp": (r // 2 * 2, r // 2 * 2 + 1)}) for r in range(8)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True, count=7 if rank > 5 else 35)
        dump.call("tp", count=rank % 2)
    named, found = verdict(dumps)
    assert named == {6}
    assert found.confidence == "possible"
    assert len(said(found, "ranks 0-4:2 wait for nobody either, further on than a sibling")) == 1


def four_pairs():
    """Four pairs of tp ranks; the last one has more microbatches than the others."""
    return {r: Dump({"tp": (r - r % 2, r - r % 2 + 1), "dp": tuple(range(r % 2, 8, 2))})
            for r in range(8)}  # fmt: skip


@pytest.mark.parametrize("varying", [False, True], ids=["", "any sizes"])
@pytest.mark.parametrize("shifted", [False, True])
def test_siblings_vote_only_where_their_calls_before_it_are_alike(shifted, varying):
    """Rank 0 was certain, by numbers that siblings with a call more had given to other calls."""
    dumps = four_pairs()
    for rank, dump in dumps.items():
        dump.call("dp", done=True)
        if rank < 2:
            dump.call("tp", count=4, done=True, size=8 + varying * (rank // 2))
            dump.call("tp", ("all_gather", "_reduce_scatter_base")[rank])
        else:
            dump.call("tp", count=3 if shifted else 4, done=True, size=8 + varying * (rank // 2))
            dump.call("tp", "all_gather", count=1 if shifted else 0, done=True)
            dump.call("tp", "_reduce_scatter_base", done=True)
            dump.call("dp")
    named, found = verdict(dumps)
    assert named == (set() if shifted else {0})
    assert found.verdict == "mismatch" or shifted


@pytest.mark.parametrize("late", [(3,), (3, 5)])
def test_a_call_that_ended_elsewhere_is_no_proof_of_a_device(late):
    """All came to the next call: the network broke, or these saw its end later, in a job that runs.
    A second set of dumps tells."""
    dumps = {r: Dump({"mp": tuple(range(r - r % 4, r - r % 4 + 4))}) for r in range(16)}
    for rank, dump in dumps.items():
        dump.call("mp", done=True)
        dump.call("mp", done=rank not in late)
        dump.call("mp", done=not any(rank // 4 == r // 4 for r in late))
    named, found = verdict(dumps)
    assert (named, found.candidates, found.exit_code) == (set(), late, 3)
    assert "or the link to it" in str(found.evidence)
    values = DumpSet({r: of_value(dump.value(), r) for r, dump in dumps.items()})
    found = analyze.diagnose_dumps(values, values)
    assert {c.rank for c in found.culprits} == set(late)


def test_calls_of_a_whole_model_need_everybody():
    """A dump that an earlier attempt left was a rank whose device stands still."""
    dumps = {r: Dump({"mp": (0, 1, 2, 3)}) for r in range(4)}
    for rank, dump in dumps.items():
        dump.call("mp", count=1 if rank == 3 else 5, done=True)
        dump.call("mp")
        dump.entries = dump.entries[-1:]
    named, found = verdict(dumps)
    assert named == set()
    assert "the dump of rank 3 is of an earlier moment" in str(found.evidence)


@pytest.mark.parametrize("how", [FULL, ACTIVE], ids=["history", "outstanding"])
@pytest.mark.parametrize("stuck", [0, 3])
def test_who_waits_while_a_communicator_is_created_is_not_stuck(stuck, how):
    """The first call of a group leaves no record before all members are there."""
    waits = stuck + 8

    def fault(it):
        at = production.index(it.of(waits, "1"), "all_reduce", production.EMBEDDING)
        early = production.index(it.of(stuck, "1"), "all_reduce", production.EMBEDDING) - 30
        stop = production.stands(stuck, part="1", at=early)
        return production.both(stop, production.stands(waits, part="1", at=at))(it)

    named, found = judged(values(fault, how))
    assert named == {stuck}
    assert f"rank {waits} may wait while the communicator" in str(found.evidence)


@pytest.mark.parametrize("rank", [26, 28])
def test_replicas_with_other_numbers_of_microbatches_do_not_say_what_a_rank_left_out(rank):
    """A rank runs a microbatch more: its partner, and a whole pipeline, were named."""
    it = production.plain_job(production.dynamic())
    production.microbatch_more(rank)(it)
    state = stall.run_until_stalled(it.programs())
    verdict = analyze.diagnose_dumps(random_hangs.dumps_of(state, **ACTIVE))
    assert (verdict.culprits, verdict.exit_code) == ((), 3)


@pytest.mark.parametrize("at", [29, 47])
def test_a_rhythm_that_no_sibling_has_come_to_is_not_broken(at):
    """Rank 12 is killed; rank 0 was named for the first messages of an evaluation."""
    state = production.standstill(stands(12, part="3", at=at, silent=True), "interleaved")
    verdict = analyze.diagnose_dumps(random_hangs.dumps_of(state, **ACTIVE))
    assert (verdict.verdict, verdict.exit_code) == ("missing dump", 3)
    assert [c.rank for c in verdict.culprits] == [12]


def test_who_makes_a_call_alone_is_named_though_a_member_s_dump_is_lost():
    it = production.plain_job(production.dynamic())
    ops = it.of(11, "3")
    last = production.index(ops, "all_gather", production.DP, -1)
    ops.insert(last, dataclasses.replace(ops[last], handle=-1))
    dumps = dict(random_hangs.dumps_of(stall.run_until_stalled(it.programs())).dumps)
    del dumps[15]
    verdict = analyze.diagnose_dumps(DumpSet(dumps))
    assert [(c.rank, c.kind) for c in verdict.culprits] == [(11, "extra call")]
