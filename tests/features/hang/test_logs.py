"""Verdicts from what a job printed: watchdog lines, tracebacks, launchers' tables."""

import gzip
import json
import pickle
import random

import pytest
from helpers import flight_dumps, production, random_hangs, rendered_logs
from helpers.production import ACTIVE, stands
from helpers.programs import healthy
from helpers.random_hangs import WORLDS, named

from megatron_prism.cli import main as cli
from megatron_prism.features.hang import analyze, export
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.logs import read_folder, read_logs, together
from megatron_prism.graph import stall

GLOO = """[rank0]: Traceback (most recent call last):
[rank0]:   File "megatron/core/optimizer/distrib_optimizer.py", line 1380, in get_parameter_state
[rank0]:     torch.distributed.gather(
[rank0]:   File "torch/distributed/distributed_c10d.py", line 4408, in gather
[rank0]:     work.wait()
[rank0]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv
"""
CAUGHT = """[rank1]:[E1125 ProcessGroupNCCL.cpp:689] [Rank 1] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=16, OpType=COALESCED, NumelIn=64, NumelOut=32, Timeout(ms)=60000) ran for \
60034 milliseconds before timing out.
[rank1]:[E1125 ProcessGroupNCCL.cpp:2303] [PG ID 2 PG GUID 3(DATA_PARALLEL_GROUP_WITH_CP) Rank 1]  \
failure detected by watchdog at work sequence id: 16 PG status: last enqueued work: 16, last \
completed work: 15
[rank0]:[E1125 ProcessGroupNCCL.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump \
signal due to a collective timeout from  rank 1. Last enqueued NCCL work: 39, last completed NCCL \
work: 39.
"""


def judged(folder, *texts, name="job"):
    paths = [folder / f"{name}{i}.log" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return analyze.diagnose_dumps(read_logs(paths))


def test_who_did_not_come_to_a_call_outside_nccl(tmp_path):
    """Rank 0's own log says that it waits for rank 1, which went on without the save."""
    found = judged(tmp_path, CAUGHT + GLOO)
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, "skipped call")]
    assert "next:" not in str(found)
    assert "gather of get_parameter_state" in found.culprits[0].why


def test_of_several_who_may_not_have_come_none_is_named(tmp_path):
    found = judged(tmp_path, "using world size: 4, data-parallel size: 4\n" + CAUGHT + GLOO)
    assert (found.culprits, found.candidates) == ((), (1, 2, 3))
    assert str(found).splitlines()[-1].startswith("next: the log of ranks 2,3, if there is one")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out of memory"),
        ("StopIteration", "exception"),
        ("ValueError: 7 is no token", "exception"),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3", ""),
        ("RuntimeError: Connection closed by peer [10.0.0.1]:3000", ""),
    ],
)
def test_who_failed_by_itself_is_named(line, kind, tmp_path):
    """What a communicator says after its peer is gone is no fault of this rank."""
    text = CAUGHT.replace("[rank0]", "[rank2]") + "\n".join(
        f"[rank0]: {x}" for x in ("Traceback (most recent call last):",
                                  '  File "train.py", line 7, in step', line))  # fmt: skip
    found = judged(tmp_path, text)
    assert [c.kind for c in found.culprits if c.rank == 0] == [kind] * bool(kind)


def test_a_rank_that_the_kernel_killed_is_named_by_torchrun_s_table(tmp_path):
    rows = "  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 7)\n"
    assert [c.rank for c in judged(tmp_path, CAUGHT + rows.format(-9)).culprits] == [0]
    found = judged(tmp_path, CAUGHT.partition("[rank0]")[0] + rows.format(-6))
    assert found.culprits == (), "a watchdog ends its process by SIGABRT"


@pytest.mark.parametrize("prefix", ["", "1: ", "[default1]:"])
def test_lines_of_older_releases_and_other_launchers(prefix, tmp_path):
    """torch 2.2 has neither a global rank nor a group's name in front."""
    line = ("{}[PG 1 Rank 1] Timeout at NCCL work: 4, last enqueued NCCL work: 4, last completed "
            "NCCL work: 3.\n")  # fmt: skip
    (tmp_path / "log_rank1.txt").write_text(line.format(prefix))
    (dump,) = read_logs([tmp_path / "log_rank1.txt"]).dumps.values()
    assert (dump.rank, dump.status["1"].enqueued, dump.status["1"].completed) == (1, 4, 3)


def planted(kind, seed):
    world = random.Random(seed).choice(WORLDS[:4])
    programs, faults, culprits = random_hangs.draw(kind, world, seed)
    state = stall.run_until_stalled(programs, faults)
    return world, dict(export.dumps_of(state, active_only=True, stacks=False)), culprits


@pytest.mark.parametrize("kind", list(random_hangs.KINDS))
def test_logs_alone_name_nobody_innocent(kind, tmp_path):
    for seed in range(4):
        world, values, culprits = planted(kind, seed)
        killed = culprits if kind == "killed" else ()
        found = judged(tmp_path, rendered_logs.text(values, world, killed))
        assert named(found) <= culprits, (seed, found)


def test_dumps_and_logs_of_a_folder_are_one_observation(tmp_path, capsys):
    """A dump of the HTTP handler behind its headers, one packed, and the log of a third."""
    world, values, culprits = planted("host_stuck", 3)
    export.write(
        stall.run_until_stalled(*random_hangs.draw("host_stuck", world, 3)[:2]), tmp_path / "d",
        active_only=True,
    )  # fmt: skip
    for path in [*(tmp_path / "d").iterdir()]:
        path.with_name(f"{path.name}.json").write_text(json.dumps(pickle.loads(path.read_bytes())))
        path.unlink()
    files = sorted((tmp_path / "d").iterdir())
    files[0].write_bytes(b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n\r\n" + files[0].read_bytes())
    (tmp_path / "d" / (files[1].name + ".gz")).write_bytes(gzip.compress(files[1].read_bytes()))
    files[1].unlink()
    (tmp_path / "d" / "job.log").write_text(rendered_logs.text(values, world))
    found = read_folder(tmp_path / "d")
    assert set(found.dumps) == set(values)
    assert cli.main(["hang", str(tmp_path / "d")]) == 1
    assert f"rank {min(culprits)} (host stuck)" in capsys.readouterr().out


def test_a_dump_whose_name_ends_in_a_port_is_of_the_rank_in_all_its_groups(tmp_path):
    state = stall.run_until_stalled(healthy(WORLDS[0]), {3: stall.RankFault(host=4)})
    for rank, value in export.dumps_of(state, active_only=True):
        (tmp_path / f"node{rank}_25999.json").write_bytes(pickle.dumps(value, protocol=2))
        break
    assert set(read_folder(tmp_path).dumps) == {0}


def test_a_dump_says_more_than_the_log_of_its_rank():
    world, values, culprits = planted("operation", 3)
    dumps = DumpSet({rank: of_value(value, rank) for rank, value in values.items()})
    assert together(dumps, []) is dumps


# -- stacks, RAS and rank monitors ----------------------------------------------------------------
RAS = """Communicators... (0.00s)
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 3 -- GPU 2 managed by process 483074 on node 172.16.64.210
"""
SPY = """Process 4711: /usr/bin/python -u pretrain_gpt.py --tensor-model-parallel-size 2
Python v3.12.3 (/usr/bin/python3.12)

Thread 4711 (idle): "MainThread"
{}Thread 4801 (idle): "Thread-1 (watch)"
    wait (threading.py:355)
"""
LOADER = """    _try_get_data (torch/utils/data/dataloader.py:1251)
    __next__ (torch/utils/data/dataloader.py:701)
    get_batch (pretrain_gpt.py:61)
"""
BARRIER = """    wait (torch/distributed/distributed_c10d.py:4408)
    barrier (/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:4890)
    save_checkpoint (megatron/training/checkpointing.py:520)
"""


def with_stacks(folder, values, **stacks):
    for rank, value in values.items():
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(value))
    for name, stack in stacks.items():
        (folder / f"{name}.txt").write_text(SPY.format(stack))
    return analyze.diagnose_dumps(read_folder(folder))


def test_the_stack_of_a_rank_says_where_its_host_stands(tmp_path):
    """Between two iterations a host may wait outside NCCL: py-spy shows that it waits for data."""
    found = with_stacks(
        tmp_path, flight_dumps.values(stands(3, part="3", at=0), ACTIVE), rank3=LOADER
    )
    assert named(found) == {3}
    assert found.culprits[0].why.endswith(
        "its stack: _try_get_data (torch/utils/data/dataloader.py:1251) < __next__ "
        "(torch/utils/data/dataloader.py:701) < get_batch (pretrain_gpt.py:61)"
    )


def test_a_rank_whose_stack_is_in_a_barrier_is_not_late(tmp_path):
    """It waits in gloo for its group, whose other members are further on: they left it out."""
    found = with_stacks(
        tmp_path, flight_dumps.values(stands(3, part="3", at=0), ACTIVE), rank_3=BARRIER
    )
    assert (named(found), found.exit_code) == (set(), 3)
    assert 3 not in found.candidates
    assert any("barrier of save_checkpoint (megatron/training/checkpointing.py:520)" in line
               for line in found.evidence)  # fmt: skip


def test_reports_beside_dumps_are_evidence(tmp_path):
    (tmp_path / "ras.txt").write_text(RAS)
    (tmp_path / "nvrx.log").write_text("[WARNING] [RankMonitorServer:10] Did not get subsequent "
                                       "heartbeat. Waited 171.92 seconds.\n")  # fmt: skip
    found = with_stacks(tmp_path, flight_dumps.values(flight_dumps.GIL, ACTIVE))
    assert named(found) == {10}
    text = str(found)
    assert "RAS: rank 3 of communicator 27a079b828ff1a75 launched fewer operations" in text
    assert "rank monitor of rank 10: Did not get subsequent heartbeat. Waited 171.92" in text


def test_stacks_alone_say_who_stands_elsewhere(tmp_path):
    found = with_stacks(tmp_path, {}, **{f"rank{r}": BARRIER for r in range(7)}, rank7=LOADER)
    assert (found.verdict, named(found), found.candidates) == ("undetermined", set(), (7,))
    assert found.evidence[0].startswith("ranks 0-6: barrier of save_checkpoint (")
    assert found.evidence[1].startswith("rank 7: _try_get_data (")


@pytest.mark.parametrize("rank", [10, 12])
def test_logs_of_some_and_dumps_of_others_are_compared_by_what_both_know(rank, tmp_path):
    """Logs know no dtypes: a call of theirs is not another one than that of the dumps."""
    skipped = production.without_calls(rank, "2", "all_reduce", production.NORM)
    state = production.standstill(skipped, "moe")
    values = dict(export.dumps_of(state, **ACTIVE))
    (tmp_path / "job.log").write_text(rendered_logs.text(values, state.programs.world))
    dumps = DumpSet({r: of_value(value, r) for r, value in values.items() if r > 7})
    found = analyze.diagnose_dumps(together(dumps, [tmp_path / "job.log"]))
    assert named(found) == {rank}


# torch 2.1 to 2.3, and one whose group has a number: what public reports quote
WAITS = """[rank{0}]:[E ProcessGroupNCCL.cpp:754] [Rank {0}] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=305, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for \
600381 milliseconds before timing out.
"""
WORK = """[rank{0}]:[E419 10:42:28.86 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 9 Rank {0}] \
Exception (either an error or timeout) detected by watchdog at work: 305, last enqueued NCCL work: \
306, last completed NCCL work: 304.
"""


@pytest.mark.parametrize("text", [WAITS, WAITS + WORK])
@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)])
def test_a_log_that_does_not_say_who_belongs_to_the_group(tmp_path, text, ranks):
    """Whoever speaks waits; who did not come may be any rank that does not speak."""
    found = judged(tmp_path, "".join(text.format(rank) for rank in ranks))
    assert [(w.rank, w.op, w.seq) for w in found.victims] == [(r, "all_reduce", 305) for r in ranks]
    assert found.verdict == "undetermined"
    assert found.culprits == found.candidates == ()
    assert "the log does not say who else belongs to its group" in found.evidence[-1]


@pytest.mark.parametrize(
    ("lines", "culprits", "evidence"),
    [
        ("[rank3]:[E1101 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process "
         "group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error "
         "encountered", [(3, "exception")], "ECC error"),
        ("node7:88:99 [2] NET/IB: Got completion from peer 10.0.4.7<43210> with status=12 "
         "opcode=0 len=0 vendor err 129 (Recv)", [], "peer 10.0.4.7"),
        ("[55.1] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", [], "Xid"),
    ],
)  # fmt: skip
def test_errors_of_devices_and_the_network(tmp_path, lines, culprits, evidence):
    found = judged(tmp_path, lines + "\n" + WAITS.format(0) + WAITS.format(1))
    assert [(c.rank, c.kind) for c in found.culprits] == culprits
    assert evidence in " ".join(found.evidence)
    assert not found.stop  # no breakpoint can name that call


def test_ranks_of_unnamed_or_unknown_groups_outvote_nobody(tmp_path):
    """Two groups may wait at calls of one number; four of an unknown number decide nothing."""
    other = WAITS.format(5).replace("NumelIn=1, NumelOut=1", "NumelIn=8, NumelOut=8")
    found = judged(tmp_path, "".join(WAITS.format(rank) for rank in range(4)) + other)
    assert (found.verdict, found.culprits) == ("undetermined", ())
    text = "".join((WAITS + WORK).format(rank) for rank in range(4))
    found = judged(tmp_path, text + (other + WORK).format(5))
    assert found.culprits == ()
