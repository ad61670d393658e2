"""What public reports print, and what is said of it: nothing false, and no innocent rank.

``public_logs_*.txt`` hold excerpts of public issues, shortened and with other names.  In front of
each stands what is true of it, who may be named, and what must and must not be said.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_prism.core.errors import DumpError
from megatron_prism.features.hang import analyze
from megatron_prism.features.hang.logs import read_logs

FOLDER = Path(__file__).parent
# no log of a job that failed is of one in health, and no log says what recorders did
NEVER = ("HEALTHY", "the recorders were off")


def cases():
    """(whose report, what the header says by word, the log)."""
    for path in sorted(FOLDER.glob("public_logs_*.txt")):
        for block in re.split(r"(?m)^### ", path.read_text())[1:]:
            lines = block.rstrip("\n").split("\n")
            header = {}
            report = lines.pop(0)
            while lines[0].startswith("# "):
                word, _, value = lines.pop(0)[2:].partition(":")
                header[word] = value.strip()
            yield report, header, "\n".join(lines) + "\n"


CASES = [pytest.param(header, text, id=report) for report, header, text in cases()]


def parts(header, word):
    return [part.strip() for part in header.get(word, "").split("|") if part.strip()]


@pytest.mark.parametrize(("header", "text"), CASES)
def test_a_public_log_is_read_as_its_thread_says(header, text, tmp_path):
    path = tmp_path / "job.log"
    path.write_text(text)
    if "error" in header:
        with pytest.raises(DumpError, match=header["error"]):
            read_logs([path])
        return
    found = analyze.diagnose_dumps(read_logs([path]))
    named = {str(culprit.rank) for culprit in found.culprits}
    culprits = set(filter(None, header["named"].split(",")))
    # who is likely, though the log does not decide it
    suspects = set(filter(None, header.get("may", "").split(",")))
    assert not named - culprits - suspects, found
    assert [part for part in parts(header, "says") if part not in str(found)] == []
    assert [part for part in (*NEVER, *parts(header, "never")) if part in str(found)] == []
    assert named >= culprits


# -- neighbours of what was corrected -------------------------------------------------------------
FAILURE = (
    "[{number}]:\n  time      : 2026-09-07_13:{time}\n  host      : n1\n  rank      : {rank} "
    "(local_rank: {rank})\n  exitcode  : {code} (pid: 14{rank})\n  error_file: <N/A>\n"
)


def table(*failures):
    """A report of torchrun: (rank, exit code, time), the first failure last, as it prints it."""
    rows = [
        FAILURE.format(number=number, rank=rank, code=code, time=time)
        for number, (rank, code, time) in enumerate(failures)
    ]
    return "Failures:\n" + "".join(rows[:-1]) + "Root Cause (first observed failure):\n" + rows[-1]


def judged(folder, text):
    path = folder / "job.log"
    path.write_text(text)
    found = analyze.diagnose_dumps(read_logs([path]))
    return {culprit.rank for culprit in found.culprits}, str(found)


@pytest.mark.parametrize(
    ("failures", "named"),
    [
        # SIGKILL behind SIGTERM takes half a minute
        ([(0, -9, "03:29"), (1, 1, "02:58")], set()),
        ([(0, -9, "03:29"), (1, -6, "02:58")], set()),
        ([(0, -9, "03:29"), (1, -11, "02:58")], {1}),
        # the kernel kills two processes of a host at once
        ([(0, -9, "02:59"), (1, -9, "02:58")], {0, 1}),
        # what torchrun asked to end ended no other
        ([(0, -15, "02:58"), (1, -9, "03:29")], {1}),
        # of another report
        ([(0, -9, "02:58")], {0}),
    ],
)
def test_a_process_that_torchrun_killed_behind_another_is_not_named(failures, named, tmp_path):
    sizes = "using world size: 8, data-parallel size: 8, tensor-model-parallel size: 1\n"
    assert judged(tmp_path, sizes + table(*failures))[0] == named


def test_a_table_of_another_node_does_not_say_who_ended_whom(tmp_path):
    """Each node has a torchrun of its own."""
    sizes = "using world size: 8, data-parallel size: 8, tensor-model-parallel size: 1\n"
    text = sizes + table((1, 1, "02:58")) + table((5, -9, "03:40"))
    assert judged(tmp_path, text)[0] == {5}


COMPOSER = "ERROR:composer.cli.launcher:Global rank {} (PID 20{}) exited with code {}\n"


@pytest.mark.parametrize(
    ("codes", "named"),
    [((-9, -15, -15), {0}), ((-9, -11, -9), {1}), ((-9, 1, -15), set()), ((-9, -9, -15), set())],
)
def test_composer_kills_the_others_as_well(codes, named, tmp_path):
    text = "".join(COMPOSER.format(rank, rank, code) for rank, code in enumerate(codes))
    sizes = "using world size: 8, data-parallel size: 8, tensor-model-parallel size: 1\n"
    assert judged(tmp_path, sizes + text)[0] == named


def test_a_process_of_mpirun_that_starts_torchrun_is_a_node(tmp_path):
    text = "W1010 11:39:41.4 140 torch/distributed/run.py:757] Setting OMP_NUM_THREADS\n"
    line = "mpirun noticed that process rank 1 with PID 0 on node n7 exited on signal 9 (Killed).\n"
    named, found = judged(tmp_path, text + line)
    assert not named
    assert "noticed that process rank 1 with PID 0 on node n7 exited on signal 9" in found


def test_an_error_of_an_actor_is_what_ray_prints_behind_its_own(tmp_path):
    text = (
        "Traceback (most recent call last):\n"
        '  File "/a/train.py", line 5, in main\n'
        "ray.exceptions.RayTaskError(ValueError): ray::Trainer.fit() (pid=7, ip=10.0.0.4)\n"
        '  File "/a/trainer.py", line 9, in fit\n'
        "ValueError: bad reward\n"
    )
    _, found = judged(tmp_path, text)
    assert "ValueError: bad reward in fit (" in found
    assert "RayTaskError" not in found


def test_a_mark_in_front_of_another_is_a_local_rank(tmp_path):
    """[rank0]: alone is a mark, too, where a message of no length ends a line."""
    text = "[rank0]:[rank4]: one\n[rank1]: two\n[rank2]:\n"
    path = tmp_path / "job.log"
    path.write_text(text)
    assert read_logs([path]).logged == {1, 2, 4}


WORLD = "using world size: 2, data-parallel size: 2, tensor-model-parallel size: 1\n"
CALL = (
    "[rank1]:[E307 05:29:18.1 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=13, OpType=ALLREDUCE, "
    "NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n"
)
FIRED = (
    "[rank0]:[E307 05:30:18.2 ProcessGroupNCCL.cpp:744] [Rank 0] Some NCCL operations have failed "
    "or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations m\n"
)


def test_a_rank_whose_watchdog_fired_is_not_missing_though_its_call_is_not_shown(tmp_path):
    """axolotl-ai-cloud/axolotl#3476 with the sizes of the job: rank 0 waits, too."""
    named, text = judged(tmp_path, WORLD + CALL)
    assert named == {0}, "without a word of it rank 0 is the one"
    named, text = judged(tmp_path, WORLD + CALL + FIRED)
    assert not named
    assert "do not say whether rank 0 came to it" in text


def test_of_several_calls_each_is_said_with_the_ranks_that_may_lack(monkeypatch):
    """Not those of the first call alone."""
    monkeypatch.setattr(analyze, "call_text", lambda call: call.launch)
    groups = {"a": SimpleNamespace(ranks=(0, 1), partial=False)}
    groups["b"] = SimpleNamespace(ranks=(2, 3), partial=False)
    unsure = SimpleNamespace(assumed={"b"})
    state = SimpleNamespace(groups=groups, dumps={2: unsure})
    calls = [SimpleNamespace(group=group, launch=f"call of {group}") for group in "aab"]
    assert analyze._complete_text(state, calls).startswith(
        "ranks 0,1 wait in call of a; rank 3 wait in call of b, and the logs do not say whether "
        "rank 2 came to it: "
    )


@pytest.mark.parametrize(
    ("enqueued", "completed", "oldest"), [(855, 12, 13), (70, -1, 1), (9, 8, 9)]
)
def test_a_rank_waits_in_the_oldest_of_many_calls_that_counters_tell(
    enqueued, completed, oldest, tmp_path
):
    line = (
        "[rank1]:[E307 05:29:18.1 ProcessGroupNCCL.cpp:1858] "
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] "
        f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
    )
    _, text = judged(tmp_path, line)
    assert f"#{oldest} of default_pg" in text


def test_an_exception_of_a_host_is_read_behind_the_mark_of_pdsh(tmp_path):
    lines = (
        "Traceback (most recent call last):",
        '  File "/a/train.py", line 5, in main',
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.",
    )
    _, text = judged(tmp_path, "".join(f"g002: {line}\n" for line in lines))
    assert "(g002): RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed" in text


@pytest.mark.parametrize(
    "error",
    [
        "OPS function error: HcclAllreduce, error code is 6",
        "NPU function error: aclrtSynchronizeDevice, error code is 507046",
        "NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507048",
    ],
)
def test_a_device_of_ascend_that_ran_out_of_time_waited(error, tmp_path):
    text = (
        "[rank7]: Traceback (most recent call last):\n"
        '[rank7]:   File "/a/train.py", line 5, in main\n'
        f"[rank7]: RuntimeError: {error}\n"
    )
    assert not judged(tmp_path, text)[0]
    # another error of such a device is its own
    error = "NPU function error: aclrtMalloc, error code is 207001"
    text = text[: text.index("RuntimeError")] + f"RuntimeError: {error}\n"
    assert judged(tmp_path, text)[0] == {7}
