"""The smallest dumps of single rules: who is named, who is not, and what is said of it."""

import dataclasses
import json
import os
import pickle

import numpy as np
import pytest
from helpers.dump_values import NAMES, Dump, verdict
from helpers.flight_dumps import said
from helpers.programs import drop, with_rank
from helpers.random_hangs import dumps_of

from megatron_prism.cli import main as cli
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.hang.diagnose import diagnose
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.verdict import Culprit, Diagnosis
from megatron_prism.graph import stall


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([100, 100, 200, 300, 400, 500, 600, 700], set()),
        ([100] * 4 + [200] * 4, set()),
        ([100] * 5 + [200, 300, 400], {5, 6, 7}),
        ([100] * 4 + [200, None, None, None], set()),
        ([100] * 5 + [200, None, None], {5}),
    ],
)
def test_only_a_majority_of_all_members_names_anybody(sizes, named):
    """The most common of several sizes is no majority; members without a dump count."""
    dumps = {r: Dump({"dp": tuple(range(8))}) for r in range(8) if sizes[r] is not None}
    for rank, dump in dumps.items():
        dump.call("dp", done=True)
        dump.call("dp", "_allgather_base", size=sizes[rank])
    found_named, found = verdict(dumps)
    assert found_named == named, found
    assert found.exit_code == (1 if named else 3)


def test_who_left_out_a_call_is_named_though_another_s_dump_is_lost():
    """Rank 1 waits in the gather behind the all_reduce that it left out; 3 only lost its file."""
    groups = {r: {"mp": tuple(range(8))} | ({"dp": (0, 1)} if r < 2 else {}) for r in range(8)}
    dumps = {r: Dump(g) for r, g in groups.items()}
    for rank, dump in dumps.items():
        dump.call("mp", done=True, count=2)
        if rank < 2:
            dump.call("dp", done=True, count=2)
        dump.call(*(("dp",) if rank == 1 else ("mp",)))
    del dumps[3]
    named, found = verdict(dumps)
    assert (named, found.culprits[0].kind) == ({1}, "skipped call")


def test_a_dead_rank_is_named_beside_a_call_that_differs():
    """Rank 3 calls otherwise; in another replica three wait for 7, which left no dump."""
    dumps = {r: Dump({"tp": tuple(range(r // 4 * 4, r // 4 * 4 + 4)), "mp": tuple(range(8))})
             for r in range(8)}  # fmt: skip
    for rank, dump in dumps.items():
        dump.call("tp", done=True, count=4)
        dump.call("mp", done=True, count=2)
        dump.call("tp", size=9 if rank == 3 else 8)
    del dumps[7]
    named, found = verdict(dumps)
    assert named == {3, 7}, found
    assert {c.rank: c.kind for c in found.culprits} == {3: "shape", 7: "missing dump"}
    assert [c.rank for c in found.possibly] == [7]
    value = found.to_json()
    assert ([c["rank"] for c in value["culprits"]], value["candidates"]) == ([3], [7])
    assert (found.exit_code, found.confidence) == (1, "likely")


@pytest.mark.parametrize("steps", [5, 6])
def test_who_stands_between_two_iterations_may_wait_outside_nccl(steps):
    """Rank 0 gathers a checkpoint by gloo, or is stuck; inside an iteration it is stuck."""
    dumps = {r: Dump({"dp": (0, 1), "tp": (r,)}) for r in range(2)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True, count=32 * 5 + (32 if rank else 16 * (steps - 5)))
        dump.call("dp", done=True, count=3 * 5)
        dump.call("dp", count=rank)
    named, found = verdict(dumps)
    if steps == 6:
        assert named == {0}
        return
    assert (named, found.exit_code, found.candidates) == (set(), 3, (0,))
    assert said(found, "rank 0 waits outside NCCL (gloo, the store, files, data), or is stuck")


@pytest.mark.parametrize(("seconds", "named"), [(7, set()), (700, {2})])
def test_nothing_is_stuck_before_a_tenth_of_its_time_out(seconds, named, tmp_path, capsys):
    begin = 1_780_000_000 * 10**9
    for rank in range(4):
        dump = Dump({"dp": tuple(range(4))})
        dump.call("dp", done=True, count=4, time_created_ns=begin - 10**9)
        dump.call("dp", state="scheduled" if rank == 2 else "started", time_created_ns=begin)
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump.value(), protocol=2))
        os.utime(tmp_path / f"_dump_{rank}", ns=(begin + seconds * 10**9,) * 2)
    code = cli.main(["hang", "--dumps", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {row["rank"] for row in found["culprits"]} == named
    assert code == (1 if named else 3)
    assert any("of its 600 s" in line for line in found["evidence"]) == (not named)


# of the record that closes a batch
CLOSING = {"profiling_name": "nccl:coalesced", "is_p2p": False, "input_sizes": [],
           "output_sizes": []}  # fmt: skip


def batches(dump, *rows, number=0):
    """Batches of messages, as outstanding-only dumps keep them: none of their records ends."""
    for row in rows:
        number += 1
        for way in row:
            dump.call("pp", way, p2p_seq_id=number, collective_seq_id=0)
    return number


@pytest.mark.parametrize(("wrong", "kind"), [("recv 0<-1", "skipped call"), (None, None)])
def test_a_rank_s_own_earlier_iterations_say_what_it_left_out(wrong, kind):
    """Two ranks, no majority: the third iteration's second batch has no send."""
    dumps = {r: Dump({"pp": (0, 1), "dp": (r,)}) for r in range(2)}
    for dump in dumps.values():
        dump.made["dp"] = dump.ended["dp"] = 2  # optimizer steps
    both, first, last = ("send 0->1", "recv 0<-1"), ("send 0->1",), ("recv 0<-1",)
    whole = (first, both, both, last)
    turns = (*whole, *whole, first, both, (wrong,) if wrong else both)
    done = batches(dumps[0], *turns)
    back = ("send 1->0", "recv 1<-0")
    theirs = (("recv 1<-0",), back, back, ("send 1->0",))
    batches(dumps[1], *theirs, *theirs, *theirs[:3])
    for dump in dumps.values():
        dump.made["pp"], dump.ended["pp"] = done, done - 1
        dump.entries[-1]["is_p2p"] = True
    for rank in range(2):
        dumps[rank].entries.append(dumps[rank].entries[-1] | {"record_id": 99, **CLOSING})
    named, found = verdict(dumps)
    assert named == ({0} if kind else set()), found
    assert [c.kind for c in found.culprits] == [kind] * bool(kind)


def test_the_message_that_was_not_posted_is_said_not_the_first_of_its_batch():
    """Rank 0 took the send of rank 1's batch: what it did not post answers the receive."""
    dumps = {r: Dump({"pp": (0, 1), "mp": (0, 1)}) for r in range(2)}
    batches(dumps[0], ("send 0->1",), ("recv 0<-1",))
    batches(dumps[1], ("recv 1<-0",), ("send 1->0", "recv 1<-0"))
    last = dumps[1].entries[-1]
    dumps[1].entries.append(last | {"record_id": 3, **CLOSING})
    dumps[0].call("mp")
    dumps[0].made["pp"] = dumps[0].ended["pp"] = dumps[1].made["pp"] = 2
    dumps[1].ended["pp"] = 1
    named, found = verdict(dumps)
    assert named == set()
    assert any("rank 1 in recv from group rank 0 #2" in line for line in found.chain), found
    assert "OpType=COALESCED, NumelIn=0" in found.watchdog or not found.watchdog


def test_a_call_that_is_over_on_its_root_is_not_queued_behind_another():
    dumps = {r: Dump({"tp": (0, 1, 2, 3)}) for r in range(4)}
    for rank, dump in dumps.items():
        dump.call("tp", done=True, count=6 if rank == 0 else 4)
        dump.call("tp", *(("_allgather_base",) if rank == 0 else ("broadcast",)))
        if rank:
            dump.entries = dump.entries[-1:]
    dumps[0].entries = dumps[0].entries[-1:]
    named, found = verdict(dumps)
    assert named == set()
    assert not any("queued behind" in line for line in found.chain)
    assert said(found, "only rank 0 left it")


NORM, MP = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "MODEL_PARALLEL_GROUP"


def step(known):
    """Two ranks whose step reduces the norm and a flag; ``known``: what came before it, too."""
    ops = [Op("all_reduce", name, "fp32", 1, 1, "sum") for name in (NORM, MP)]
    program = Program.from_ops(0, [*ops, Op("host_wait", note="device")])
    rows = [[0, 0], *([program.strings.index(name), 0] for name in (NORM, MP))]
    if known:
        program = dataclasses.replace(program, earlier=np.array(rows))
    return Programs(World(2, tp=2), (program,), np.zeros(2, np.int32))


@pytest.mark.parametrize("known", [True, False])
def test_calls_since_the_job_began_tell_one_left_out_from_one_twice(known):
    """Rank 1 left out the norm: rank 0 made it twice leaves the same but for the counters."""
    programs, ops = step(known), list(step(known).of(1))
    drop("all_reduce", NORM)(ops)
    state = stall.run_until_stalled(with_rank(programs, 1, ops))
    found = diagnose(dumps_of(state, active_only=True, stacks=False), programs=programs)
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, "skipped call")] * known, found


@pytest.mark.parametrize(("more", "kind"), [(True, "extra call"), (False, "skipped call")])
def test_all_messages_of_a_rank_are_held_against_its_program(more, kind):
    """Rank 1 runs one microbatch more, or fewer, than rank 0 and the programs."""
    dumps = {r: Dump({"pp": (0, 1), "mp": (0, 1)}) for r in range(2)}
    ops = {r: [] for r in range(2)}
    for turn in range(4):
        ways = [(r, *(("send", "recv") if r == 0 else ("recv", "send"))) for r in range(2)]
        for rank, *names in ways:
            for name in names if 0 < turn < 3 else names[turn == 3 :][:1]:
                size = {"num_in": 8} if name == "send" else {"num_out": 8}
                ops[rank].append(Op(name, NAMES["pp"], "fp32", peer=1, batch=turn,
                                    microbatch=turn, **size))  # fmt: skip
    mine = (("send 0->1",), ("send 0->1", "recv 0<-1"), ("send 0->1", "recv 0<-1"), ("recv 0<-1",))
    both = ("send 1->0", "recv 1<-0")
    theirs = (("recv 1<-0",), both, both, both) if more else (("recv 1<-0",), both, both[:1])
    for rank, rows in enumerate((mine, theirs)):
        batches(dumps[rank], *rows)
        dumps[rank].made["pp"] = dumps[rank].ended["pp"] = len(rows)
        dumps[rank].call("mp", count=rank == 0 or not more)
    last = dumps[1].entries[-1 if more else -2]
    if more:
        dumps[1].ended["pp"] = 3
        dumps[1].entries.append(last | {"record_id": 20, **CLOSING})
    programs = Programs(
        World(2, pp=2), tuple(Program.from_ops(r, ops[r]) for r in range(2)), np.arange(2)
    )
    made = DumpSet({rank: of_value(dump.value(), rank) for rank, dump in dumps.items()})
    found = diagnose(made, programs=programs)
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, kind)], found


@pytest.mark.parametrize("how", ["DIR", "--dumps", "--logs"])
def test_a_launch_line_behind_dumps_is_the_job_that_left_them(how, tmp_path, monkeypatch):
    """Its programs are captured for these dumps, not judged by themselves."""
    dumps = {rank: Dump({"tp": (0, 1)}) for rank in range(2)}
    for rank, dump in dumps.items():
        dump.call("tp", count=rank)
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump.value(), protocol=2))
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(cli, "capture_line", None)
    line = ["torchrun", "--nproc-per-node", "2", str(tmp_path / "pretrain_gpt.py"), "--bf16"]
    words = [*([how] if how[0] == "-" else []), str(tmp_path), *line]
    args = cli.read_words("hang", words)
    assert (args.job, args.ours[:2]) == (line[3:], ["--prism-world-size", "2"])


def test_only_a_missing_dump_is_no_culprit_of_the_json():
    found = Diagnosis("missing dump", (Culprit(7, "missing dump", ""),), confidence="possible")
    assert found.exit_code == 3
    assert (found.to_json()["culprits"], found.to_json()["candidates"]) == ([], [7])
