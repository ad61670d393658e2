"""A running job on this host: its recorders are asked, NCCL's RAS is read, a verdict is written."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
from helpers.dump_values import Dump

from megatron_prism.cli import main as cli
from megatron_prism.features.hang import live
from megatron_prism.features.hang.ras import parse_ras

RANK = """
import sys, time
import torch
from torch import distributed
from torch.distributed.elastic.control_plane import worker_main
with worker_main():
    distributed.init_process_group("gloo")
    for call in range(10**9):
        if (distributed.get_rank(), call) == (1, int(sys.argv[1])):
            time.sleep(600)
        distributed.all_reduce(torch.ones(4))
        time.sleep(0.02)
"""
TEXT = """
Job summary
===========
  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32
Communicators... (0.00s)
=============
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH
Errors
======
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5
#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5
Warnings
========
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
"""


def of_json(counts, dead=()):
    ranks = [{"rank": r, "host": "10.0.0.1", "pid": 100 + r, "cuda_dev": r,
              "status": {"init_state": 0, "abort_flag": False},
              "collective_counts": {"AllReduce": n, "Broadcast": 1}}
             for r, n in enumerate(counts)]  # fmt: skip
    status = {"unresponsive": True, "considered_dead": True}
    missing = [{"rank": r, "host": "10.0.0.2", "pid": 200 + r, "status": status} for r in dead]
    comm = {"hash": "0xabc", "size": len(ranks) + len(dead), "ranks": ranks,
            "missing_ranks": missing}  # fmt: skip
    return "SERVER PROTOCOL 2\nOK\n" + json.dumps({"communicators": [comm]}, indent=2)


def test_ras_as_text():
    found = parse_ras(TEXT)
    assert found.lost == ("process 3487984 on 172.16.64.213 does not answer",)
    assert [line[:32] for line in found.behind] == [f"rank {r} of communicator 27a079b828f"[:32]
                                                     for r in (0, 2)]  # fmt: skip
    assert found.pids == (3487984, 483072, 483074)
    assert found.counts == {("27a079b828ff1a75", 30): 6650, ("27a079b828ff1a75", 2): 6649}


def test_ras_as_json():
    found = parse_ras(of_json([7, 7, 6], dead=[3]))
    assert found.behind == ("rank 2 of communicator 0xabc launched 7 operations, others 8 "
                            "(process 102 on 10.0.0.1)",)  # fmt: skip
    assert found.lost == ("rank 3 of communicator 0xabc is dead (process 203 on 10.0.0.2)",)
    assert parse_ras(of_json([7, 7])).counts != found.counts


def test_something_else_than_ras_is_refused(tmp_path, capsys):
    file = tmp_path / "ras"
    file.write_text("Connection refused")
    assert cli.main(["hang", "--live", "--ras", str(file)]) == 2
    assert "it has no line Communicators" in capsys.readouterr().err


@pytest.fixture
def job(tmp_path):
    """Starts two ranks of gloo whose rank 1 stops before a call."""
    started = []

    def start(call):
        port = str(20_000 + os.getpid() % 20_000)
        for rank in range(2):
            env = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                   "TORCH_FR_BUFFER_SIZE": 100, "OMP_NUM_THREADS": 1,
                   "TORCH_WORKER_SERVER_SOCKET": tmp_path / f"s{rank}"}  # fmt: skip
            env = os.environ | {key: str(value) for key, value in env.items()}
            started.append(subprocess.Popen([sys.executable, "-c", RANK, str(call)], env=env))
        proc = tmp_path / "proc"  # other jobs may run on this host
        proc.mkdir()
        for process in started:
            (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        end = time.monotonic() + 120
        while time.monotonic() < end:
            dumps = live.look(proc=proc).dumps.dumps
            if len(dumps) == 2 and all(d.entries for d in dumps.values()):
                return proc
            time.sleep(0.5)
        raise AssertionError("the job did not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_job_that_stands_still_is_judged_where_it_runs(job, tmp_path, monkeypatch, capsys):
    proc, look = job(5), live.look
    monkeypatch.setattr(live, "look", lambda ras=None: look(ras, proc))
    numbers = tmp_path / "prism.prom"
    words = ["hang", "--live", "--watch", "1s", "--json", "--prometheus", str(numbers)]
    assert cli.main(words) == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [(c["rank"], c["kind"]) for c in found["culprits"]] == [(1, "host stuck")]
    assert found["seq"] == 6
    assert 'prism_hang_culprit{rank="1",kind="host stuck"} 1' in numbers.read_text()


@pytest.mark.slow
def test_a_job_that_runs_names_nobody(job):
    proc = job(10**9)
    before = live.look(proc=proc)
    time.sleep(1)
    found = live.judge(before, live.look(proc=proc))
    assert (found.verdict, found.exit_code) == ("healthy", 0), found


def test_a_recorder_is_asked_through_its_pipe_and_ranks_elsewhere_are_not_named(tmp_path):
    """Rank 0 waits for rank 1, which is not on this host."""
    dump = Dump({"tp": (0, 1)})
    dump.call("tp", done=True)
    dump.call("tp")
    os.mkfifo(tmp_path / "pipe0.pipe")

    def recorder():
        pipe = os.open(tmp_path / "pipe0.pipe", os.O_RDWR)
        for _ in range(2):
            os.read(pipe, 2)
            (tmp_path / "trace0").write_bytes(pickle.dumps(dump.value()))

    threading.Thread(target=recorder, daemon=True).start()
    process = tmp_path / "proc" / "17"
    process.mkdir(parents=True)
    env = {"RANK": "0", "WORLD_SIZE": "2", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace",
           "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe"}  # fmt: skip
    (process / "environ").write_text("\0".join(f"{k}={v}" for k, v in env.items()))
    time.sleep(0.2)
    looks = []
    for _ in range(2):
        looks.append(live.look(proc=tmp_path / "proc"))
        time.sleep(0.2)
    found = live.judge(*looks)
    assert looks[0].dumps.unreadable == {}
    assert (found.culprits, found.candidates, found.exit_code) == ((), (1,), 3), found
    assert "which are not on this host" in found.evidence[0]
