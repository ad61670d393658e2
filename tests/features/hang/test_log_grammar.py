"""The grammar of job logs: each row reads the line that it names, and launchers name ranks."""

import pytest

from megatron_prism.features.hang import analyze
from megatron_prism.features.hang.log_grammar import LINES, statements
from megatron_prism.features.hang.logs import read_logs

WORLD = "using world size: {0}, data-parallel size: {0}, tensor-model-parallel size: 1\n"
WAITS = (
    "{1}[rank{0}]:[E101 10:00:00.9 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, "
    "Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n"
    "{1}[rank{0}]:[E101 10:00:00.9 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank "
    "{0}]  failure detected by watchdog at work sequence id: 77 PG status: last enqueued work: 78, "
    "last completed work: 76\n"
)


def judged(folder, text):
    path = folder / "job.log"
    path.write_text(text)
    return analyze.diagnose_dumps(read_logs([path]))


def waits(*ranks, prefix=""):
    return "".join(WAITS.format(rank, prefix) for rank in ranks)


@pytest.mark.parametrize("row", LINES, ids=[f"{row.says.name}-{row.word}" for row in LINES])
def test_each_row_reads_its_line(row):
    assert row.source
    assert row.says in [says for says, _ in statements(row.example)]
    assert row.word in row.example
    assert row.pattern.search(row.example)


def test_a_task_that_no_label_says_to_be_a_rank_may_be_a_node(tmp_path):
    """One task of accelerate or deepspeed a node: task 1 is no rank 1, though no line says so."""
    line = "srun: error: n1: task 1: Out Of Memory\n"
    found = judged(tmp_path, WORLD.format(16) + waits(*range(8)) + line)
    assert [culprit for culprit in found.culprits if culprit.kind == "killed"] == []
    assert any("task 1: Out Of Memory" in text for text in found.evidence)


def test_what_srun_ends_itself_names_nobody_until_the_job_starts_again(tmp_path):
    said = "".join(waits(rank, prefix=f"{rank}: ") for rank in (0, 1, 3))
    ends = "srun: Terminating StepId=7.0\n"
    crash = "srun: error: n1: task 2: Segmentation fault (core dumped)\n"
    found = judged(tmp_path, WORLD.format(4) + said + ends + crash)
    assert [culprit for culprit in found.culprits if culprit.kind == "killed"] == []
    again = judged(tmp_path, WORLD.format(4) + ends + WORLD.format(4) + said + crash)
    assert [(culprit.rank, culprit.kind) for culprit in again.culprits] == [(2, "killed")]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("srun: error: n1: task 2: Out Of Memory", "Out Of Memory (srun)"),
        ("srun: error: n1: task 2: Segmentation fault (core dumped)", "Segmentation fault (srun)"),
        ("srun: error: Orion-18-69: tasks 2: Bus error", "Bus error (srun)"),
        ("srun: error: n1: task 2: Killed\nsrun: Terminating StepId=7.0", "Killed (srun)"),
        (
            "  rank      : 2 (local_rank: 2)\n  exitcode  : 137 (pid: 7)",
            "killed (SIGKILL) (torchrun's table)",
        ),
        (
            "  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 7)\n  error_file: <N/A>\n"
            "  traceback : Signal 9 (SIGKILL) received by PID 7",
            "killed (SIGKILL) (torchrun's table)",
        ),
    ],
)
def test_launchers_name_the_rank_that_ended_by_itself(line, cause, tmp_path):
    said = "".join(waits(rank, prefix=f"{rank}: ") for rank in (0, 1, 3))
    found = judged(tmp_path, WORLD.format(4) + said + line + "\n")
    assert [(c.rank, c.kind, c.why) for c in found.culprits] == [(2, "killed", cause)]
    assert [victim.rank for victim in found.victims] == [0, 1, 3]


@pytest.mark.parametrize(
    "line",
    [
        # srun ends the others when one has failed
        "srun: Terminating StepId=7.0\nsrun: error: n1: task 1: Killed",
        "srun: error: n1: tasks 0-2: Killed",
        # tasks that start torchrun are nodes
        "[default0]:starts\nsrun: error: n1: task 1: Out Of Memory",
        # an exit code that a process chose, or an agent's SIGTERM
        "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)",
        "  rank      : 1 (local_rank: 1)\n  exitcode  : -15 (pid: 7)",
        # rows of another program's table, which are no numbers
        "  rank : 0-7\n  exitcode : -9-1\n  exitcode  : -9 (pid: 7)",
        # pods are nodes, too
        "llama-worker-1   0/1   OOMKilled   0   5m",
        "[1234.5] NVRM: Xid (PCI:0000:5e:00): 79, pid=4711, GPU has fallen off the bus.",
        "[1234.5] Memory cgroup out of memory: Killed process 4711 (python)",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 1 "
        "(pid: 812917) of binary: python",
    ],
)
def test_a_launchers_line_that_names_no_rank_blames_nobody(line, tmp_path):
    found = judged(tmp_path, WORLD.format(4) + waits(0, 1, 2) + line + "\n")
    assert [culprit.rank for culprit in found.culprits] == [3]
    assert found.culprits[0].kind == "missing dump"


@pytest.mark.parametrize(
    ("line", "evidence"),
    [
        ("worker-1   0/1   OOMKilled   0   5m", "worker-1   0/1   OOMKilled"),
        ("NVRM: Xid (PCI:0000:5e:00): 79, pid=4711", "NVRM: Xid (PCI:0000:5e:00): 79, pid=4711"),
        ("srun: error: n1: tasks 0-2: Killed", "srun: error: n1: tasks 0-2: Killed"),
        ("out of memory: Killed process 4711 (python)", "out of memory: Killed process 4711"),
    ],
)
def test_what_a_launcher_or_the_kernel_says_of_a_node_is_evidence(line, evidence, tmp_path):
    found = judged(tmp_path, WORLD.format(4) + waits(0, 1, 2) + line + "\n")
    assert any(evidence in text for text in found.evidence)


ACTORS = "".join(f"(Trainer pid=71{rank}, ip=10.0.0.4) [rank={rank}] starts\n" for rank in range(4))
DIED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "        class_name: Trainer\n        pid: 71{}\n        ip: 10.0.0.4\n"
)


def test_an_actor_of_ray_that_died_silently_is_named(tmp_path):
    found = judged(tmp_path, WORLD.format(4) + ACTORS + waits(0, 1, 3) + DIED.format(2))
    assert [(c.rank, c.kind) for c in found.culprits] == [(2, "killed")]


def test_an_actor_of_ray_whose_watchdog_spoke_is_not_named(tmp_path):
    """Its watchdog took it down: that it died says nothing."""
    found = judged(tmp_path, WORLD.format(4) + ACTORS + waits(0, 1, 3) + DIED.format(1))
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert found.culprits[0].kind != "killed"
