"""What lines of job logs say, in the forms of all releases, launchers and public reports."""

import gzip

import pytest
from helpers import random_hangs
from helpers.random_hangs import WORLDS

from megatron_prism.features.hang import analyze, export, log_errors
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.log_lines import logical_lines
from megatron_prism.features.hang.logs import is_log, read_folder, read_logs, together
from megatron_prism.graph import stall

TIME = "E1125 06:25:13.2 ProcessGroupNCCL.cpp:689"
WORK = "WorkNCCL(SeqNum={seq}, OpType={kind}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
RAN = "ran for 600034 milliseconds before timing out."


def caught(rank, seq=77, kind="ALLREDUCE", size=1000, inner=None, mark="[rank{}]:"):
    inner = rank if inner is None else inner
    work = WORK.format(seq=seq, kind=kind, size=size)
    return (f"{mark.format(rank)}[{TIME}] [Rank {inner}] Watchdog caught collective operation "
            f"timeout: {work} {RAN}\n")  # fmt: skip


def counted(rank, seq=77, group="0(default_pg)", inner=None, mark="[rank{}]:"):
    inner = rank if inner is None else inner
    return (f"{mark.format(rank)}[{TIME}] [PG ID 0 PG GUID {group} Rank {inner}]  failure detected "
            f"by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq + 1}, "
            f"last completed work: {seq - 1}\n")  # fmt: skip


def waits(rank, seq=77, kind="ALLREDUCE", group="0(default_pg)", inner=None, mark="[rank{}]:"):
    return (caught(rank, seq, kind, inner=inner, mark=mark)
            + counted(rank, seq, group, inner, mark))  # fmt: skip


def world(size):
    return (f"using world size: {size}, data-parallel size: {size}, context-parallel size: 1, "
            "tensor-model-parallel size: 1, pipeline-model-parallel size: 1\n")  # fmt: skip


def judged(folder, *texts):
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"job{number}.log")
        paths[-1].write_text(text)
    return analyze.diagnose_dumps(read_logs(paths))


def test_a_rank_that_prints_no_counters_is_not_behind_those_that_do(tmp_path):
    """Of four ranks that wait for one call two print how many calls they enqueued."""
    found = judged(tmp_path, waits(0) + caught(4) + counted(3) + caught(2))
    assert found.culprits == ()
    assert "never came" not in " ".join(found.evidence)
    assert {rank for rank, *_ in victims(found)} == {0, 2, 3, 4}


def victims(found):
    return [(wait.rank, wait.op, wait.seq) for wait in found.victims]


# -- calls in all forms ---------------------------------------------------------------------------
BODY = WORK.format(seq=77, kind="ALLREDUCE", size=1000)
ENDED = (f"Process group watchdog thread terminated with exception: [Rank 3] Watchdog caught "
         f"collective operation timeout: {BODY} {RAN}")  # fmt: skip
FORMS = {
    "torch 2.0": "[E ProcessGroupNCCL.cpp:821] [Rank 3] Watchdog caught collective operation "
                 f"timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, Timeout(ms)=600000) {RAN}",
    "torch 2.1": "[E ProcessGroupNCCL.cpp:474] [Rank 3] NCCL watchdog thread terminated with "
                 f"exception: [Rank 3] Watchdog caught collective operation timeout: {BODY} {RAN}",
    "torch 2.3": f"[rank3]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 3] {ENDED}",
    "torch 2.4": f"[rank3]:[E419 10:42:28.86 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 3] "
                 f"{ENDED}",
    "torch 2.5": f"[rank3]:[{TIME}] [PG ID 0 PG GUID 0(default_pg) Rank 3] {ENDED}",
    "what()": f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] {ENDED}",
    "Ray": f"\x1b[36m(WorkerDict pid=123, ip=10.0.0.4)\x1b[0m [rank=3]:[{TIME}] [Rank 3] Watchdog "
           f"caught collective operation timeout: {BODY} {RAN}\x1b[32m [repeated 3x across "
           "cluster]\x1b[0m",
    "Ray, old": f"(RayWorkerWrapper pid=4009) [rank3]:[E ProcessGroupNCCL.cpp:1414] {ENDED}",
    "a logger": f"[RANK 3] 2026-05-19 10:10:29,604 [ERROR] {ENDED}",
    "Lightning": f"[rank: 3] {ENDED}",
    "srun": f"3: [{TIME}] {ENDED}",
    "mpirun": f"[1,3]<stderr>:[{TIME}] {ENDED}",
    "kubectl": f"2024-05-31T12:37:42.149713550Z [rank3]:[{TIME}] {ENDED}",
    "numbered": f"[80747] [rank3]:[{TIME}] {ENDED}",
    "a cut bracket": f"rank3]:[{TIME}] {ENDED}",
    "torchrun": f"[default3]:[rank3]:[{TIME}] {ENDED}",
    "a progress bar": f"Train:   0%|   | 6/15000 [10:46:01<23855:30:25][rank3]:[{TIME}] {ENDED}",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_in_every_form(form, tmp_path):
    found = judged(tmp_path, FORMS[form] + "\n")
    assert victims(found) == [(3, "all_reduce", 77)]
    assert (found.verdict, found.op, found.seq) == ("undetermined", "all_reduce", 77)
    assert "the recorders were off" not in str(found)


@pytest.mark.parametrize("width", [80, 100, 132, 168])
def test_lines_that_a_screen_wrapped_are_whole(width, tmp_path):
    wrapped = ""
    for line in (waits(0) + waits(1)).splitlines():
        for start in range(0, len(line), width):
            wrapped += line[start : start + width].ljust(width) + "\n"
    assert victims(judged(tmp_path, wrapped)) == [(0, "all_reduce", 77), (1, "all_reduce", 77)]


def test_lines_of_one_length_are_not_taken_for_those_of_a_screen(tmp_path):
    """The longest lines of two ranks are alike; what follows is torchrun's table."""
    signal = (
        f"[rank{{}}]:[{TIME}] [PG ID 0 PG GUID 0(default_pg) Rank {{}}] Received a dump signal "
        "due to a collective timeout from rank 0 and we will try our best to dump the debug "
        "info. Last enqueued NCCL work: 77, last completed NCCL work: 76." + " etc" * 60 + "\n"
    )
    table = "  rank      : 3 (local_rank: 3)\n  exitcode  : -9 (pid: 827)\n"
    text = world(4) + waits(0) + signal.format(1, 1) + signal.format(2, 2) + table
    assert [culprit.rank for culprit in judged(tmp_path, text).culprits] == [3]


def test_a_line_that_mail_wrapped_between_words_is_whole(tmp_path):
    text = waits(0).replace("SeqNum=77, ", "SeqNum=77,\n")
    text = text.replace("last completed work", "last\ncompleted work")
    assert victims(judged(tmp_path, text)) == [(0, "all_reduce", 77)]


def test_lines_that_two_ranks_glued_are_two(tmp_path):
    text = waits(0).replace("\n", "") + waits(1)
    assert victims(judged(tmp_path, text)) == [(0, "all_reduce", 77), (1, "all_reduce", 77)]


@pytest.mark.parametrize("end", ["SeqNum=77, OpType=ALLRED", "NumelIn=10", "Timeout(ms)=6000"])
def test_what_stands_before_a_cut_is_read(end, tmp_path):
    """Rank 1 waits in the call of rank 0, whatever of its line is left."""
    text = caught(1).partition(end)[0] + end
    assert victims(judged(tmp_path, waits(0) + text)) == [(0, "all_reduce", 77),
                                                          (1, "all_reduce", 77)]  # fmt: skip


def test_a_number_that_is_cut_is_none(tmp_path):
    found = judged(tmp_path, waits(0) + caught(1).partition("7, OpType")[0])
    assert victims(found) == [(0, "all_reduce", 77)]
    assert "rank 1 waits in a call; its number is not printed" in found.evidence
    found = judged(tmp_path, waits(0, 1377) + waits(1, 1377)[:-3])
    assert [(wait.rank, wait.seq) for wait in found.victims] == [(0, 1377), (1, 1377)]


def test_whole_lines_are_left_as_they_are():
    text = "a" * 70 + "\n" + "b" * 70 + "\n[rank0]: x\n"
    assert logical_lines(text) == ["a" * 70, "b" * 70, "[rank0]: x", ""]


def test_a_task_of_srun_that_is_a_node_is_no_rank(tmp_path):
    text = "".join(
        "0: " + waits(rank, mark="[rank{}]:").replace("\n", "\n0: ", 1) for rank in (4, 5)
    )
    found = judged(tmp_path, text + "0: Traceback (most recent call last):\n0: ValueError: x\n")
    assert [rank for rank, *_ in victims(found)] == [4, 5]
    assert found.culprits == ()


def test_lines_of_an_actor_of_ray_are_of_its_rank(tmp_path):
    actor = "(WorkerDict pid=7, ip=10.0.0.4) "
    lines = [actor + "Traceback (most recent call last):", actor + '  File "a.py", line 7, in step',
             actor + "ValueError: 7 is no token", actor + f"[rank7]:[{TIME}] x"]  # fmt: skip
    found = judged(tmp_path, waits(0) + waits(1) + "\n".join(lines) + "\n")
    assert [(culprit.rank, culprit.kind) for culprit in found.culprits] == [(7, "exception")]


# -- groups ---------------------------------------------------------------------------------------
def test_who_prints_one_call_waits_in_one_call(tmp_path):
    """One of them prints the group, too."""
    found = judged(tmp_path, "".join(map(caught, range(4))) + counted(2, group="1"))
    assert victims(found) == [(rank, "all_reduce", 77) for rank in range(4)]
    assert any("ranks 0-3 wait in all_reduce #77" in line for line in found.evidence)


def test_ranks_with_one_number_in_their_groups_are_in_several(tmp_path):
    """Rank 8 and 10 are both the second of their groups."""
    text = caught(8, inner=1) + caught(10, inner=1) + counted(10, group="1", inner=1)
    dumps = read_logs([_written(tmp_path, text)]).dumps
    assert not dumps[8].groups.keys() & dumps[10].groups.keys()


def test_a_rank_of_an_older_call_is_not_in_the_newer_one(tmp_path):
    """Nothing says in which group rank 3 waits: it is not said to have come to #808."""
    text = "".join(waits(rank, 808) for rank in range(3)) + caught(3, 807)
    found = judged(tmp_path, text)
    assert victims(found) == [(0, "all_reduce", 808), (1, "all_reduce", 808),
                              (2, "all_reduce", 808), (3, "all_reduce", 807)]  # fmt: skip
    assert found.culprits == ()
    assert "every member" not in str(found)
    assert "the call of ranks 0-3" not in str(found)


def test_messages_of_pipelines_are_said_as_the_log_has_them(tmp_path):
    lost = (1 << 64) - 1
    text = "".join(
        f"[rank{rank}]:[{TIME}] [PG ID 6 PG GUID {name}(PIPELINE_MODEL_PARALLEL_GROUP) Rank 1] "
        "Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught "
        f"collective operation timeout: {WORK.format(seq=1, kind=kind, size=lost)} {RAN}\n"
        for rank, name, kind in ((10, 90, "COALESCED"), (8, 88, "SEND"))
    )
    found = judged(tmp_path, text)
    assert victims(found) == [(8, "send", 1), (10, "coalesced", 1)]
    assert found.group == "PIPELINE_MODEL_PARALLEL_GROUP"
    assert found.culprits == ()


def test_splits_of_one_rank_are_no_mismatch(tmp_path):
    text = waits(13, kind="ALLTOALL_BASE", group="33(mesh_ep)", inner=5).replace(
        "NumelOut=1000", "NumelOut=700")  # fmt: skip
    found = judged(tmp_path, text)
    assert found.verdict == "undetermined"
    assert victims(found) == [(13, "all_to_all", 77)]


def test_a_size_that_a_line_does_not_show_is_no_other_one(tmp_path):
    text = waits(0) + waits(1).replace("NumelIn=1000, ", "") + waits(2)
    assert judged(tmp_path, text).verdict == "undetermined"


# -- torch's own check of collectives -------------------------------------------------------------
PRINT = ("CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes={}, "
         "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided "
         "(default), requires_grad=false (default), pinned_memory=false (default), memory_format="
         "(nullopt)))")  # fmt: skip
SHORT = "CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)"
SAYS = ("[rank{0}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {0} is "
        "running collective: {1}, but Rank {2} is running collective: {3}.Collectives differ in "
        "the following aspects:   Op type: ALLREDUCEvs GATHER\n")  # fmt: skip
MINE = PRINT.format(32, "ALLREDUCE", 25, "Float")


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (SHORT, "operation"),
        ("REDUCE", "operation"),
        (PRINT.format(32, "BROADCAST", 1, "Long"), "operation"),
        (PRINT.format(32, "ALLREDUCE", 26, "Float"), "shape"),
        (PRINT.format(32, "ALLREDUCE", 25, "BFloat16"), "dtype"),
        (PRINT.format(31, "ALLREDUCE", 25, "Float"), "skipped call"),
        (PRINT.format(33, "ALLREDUCE", 25, "Float"), "extra call"),
    ],
)
def test_torch_s_own_check_is_taken_at_its_word(other, kind, tmp_path):
    """It stops at the first that differs: ranks before it agree, also those that say nothing."""
    found = judged(tmp_path, SAYS.format(2, MINE, 3, other) + SAYS.format(0, MINE, 3, other))
    assert [(culprit.rank, culprit.kind) for culprit in found.culprits] == [(3, kind)]
    assert found.verdict == "mismatch"
    assert [wait.rank for wait in found.victims] == [0, 1, 2]
    assert found.evidence[0].startswith("torch's own check of collectives: ranks 0-2 make all_red")


def test_of_two_that_differ_nobody_is_named(tmp_path):
    found = judged(tmp_path, SAYS.format(0, MINE, 1, SHORT))
    assert (found.verdict, found.culprits, found.candidates) == ("mismatch", (), (0, 1))


def test_ranks_of_a_group_are_not_taken_for_global_ones(tmp_path):
    text = SAYS.format(2, MINE, 3, SHORT).replace("[rank2]", "[rank18]")
    found = judged(tmp_path, text)
    assert (found.verdict, found.culprits, found.candidates) == ("mismatch", (), ())
    assert "as their group numbers them" in found.evidence[0]


def test_who_did_not_come_to_a_monitored_barrier(tmp_path):
    text = ("[rank0]: RuntimeError: Rank 3 failed to pass monitoredBarrier in 60000 ms\n"
            "[rank1]: RuntimeError: Rank 1 successfully reached monitoredBarrier, but received "
            "errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty "
            "rank.\n")  # fmt: skip
    assert [culprit.rank for culprit in judged(tmp_path, text).culprits] == [3]


# -- exceptions -----------------------------------------------------------------------------------
TRACE = """{0}Traceback (most recent call last):
{0}  File "/env/wandb/internal_api.py", line 320, in upload
{0}    raise x
{0}ConnectionError: no route
"""
HANDLED = {
    "it retries": TRACE + "{0}upload failed, retrying in 5 s\n",
    "it trains on": TRACE + "{0} iteration        6/      20 | lm loss: 9.5\n",
    "a progress bar goes on": TRACE + "{0} 12%|#     | 6/50 [00:10<01:00]\n",
    "logged": "{0}2026-05-19 10:10:29,604 [ERROR] upload failed\n" + TRACE,
    "logging's own form": "{0}ERROR:root:upload failed\n" + TRACE,
    "ignored": "{0}Exception ignored in: <function Pool.__del__ at 0x7f83>\n" + TRACE,
    "of a thread": "{0}Exception in thread Thread-3 (upload):\n" + TRACE,
    "it waits like the others": TRACE,
    "chained": TRACE + "\n{0}During handling of the above exception, another exception occurred:\n"
               "\n" + TRACE + "{0}retrying\n",
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["1: ", "[rank1]: "])
@pytest.mark.parametrize("form", HANDLED)
def test_an_exception_that_a_rank_handled_names_nobody(form, prefix, tmp_path):
    """Rank 2 is silent, and it is the one."""
    mark = {"mark": "{0}: [rank{0}]:"} if prefix == "1: " else {}
    text = world(3) + HANDLED[form].format(prefix) + waits(0, **mark) + waits(1, **mark)
    found = judged(tmp_path, text)
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert found.exit_code == 3
    assert [wait.rank for wait in found.victims] == [0, 1]
    assert any(line.startswith("rank 1 went on after an exception: ConnectionError")
               for line in found.evidence)  # fmt: skip


FATAL = {
    "behind a record of something else": "{0}2026-05-19 10:10:29,604 [INFO] loading\n" + TRACE,
    "behind a warning of something else": "{0}WARNING:root:deprecated\n" + TRACE,
    "in front of a summary": TRACE + "{0}wandb: Run summary:\n{0}wandb:   epoch 3\n",
    "after one that it handled": TRACE + "{0}retrying\n" + TRACE,
}


@pytest.mark.parametrize("form", FATAL)
def test_an_exception_that_ended_a_rank_names_it(form, tmp_path):
    found = judged(tmp_path, world(3) + FATAL[form].format("[rank1]: ") + waits(0) + waits(2))
    assert [(culprit.rank, culprit.kind) for culprit in found.culprits] == [(1, "exception")]


def test_logs_of_nodes_one_behind_the_other_are_of_one_attempt(tmp_path):
    found = judged(tmp_path, waits(2) + world(4) + waits(0) + waits(1))
    assert [wait.rank for wait in found.victims] == [0, 1, 2]


@pytest.mark.parametrize("form", ["logged", "ignored", "it retries"])
def test_the_silent_rank_is_named_before_one_that_spoke(form, tmp_path):
    """Rank 1 prints nothing of its calls; rank 2 prints nothing."""
    found = judged(tmp_path, world(4) + HANDLED[form].format("[rank1]: ") + waits(0) + waits(3))
    assert [culprit.rank for culprit in found.culprits] == [2]


def test_a_fatal_exception_of_a_rank_that_does_not_wait_is_named(tmp_path):
    found = judged(tmp_path, world(3) + TRACE.format("[rank1]: ") + waits(0) + waits(2))
    assert [(culprit.rank, culprit.kind) for culprit in found.culprits] == [(1, "exception")]


def test_advice_does_not_ask_for_a_log_that_is_there(tmp_path):
    (tmp_path / "rank2.log").write_text("[rank2]: loading\n")
    (tmp_path / "rank0.log").write_text(world(3) + waits(0))
    (tmp_path / "rank1.log").write_text(waits(1))
    found = analyze.diagnose_dumps(read_folder(tmp_path))
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert found.decides.startswith("the stack of rank 2 (py-spy dump")


# -- files ----------------------------------------------------------------------------------------
def _written(folder, data, name="job.log"):
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_packed_log_is_read_up_to_its_cut(tmp_path):
    noise = "".join(f"line {number * 7919 % 10007}\n" for number in range(3000))
    packed = gzip.compress((waits(0) + waits(1) + noise).encode())
    path = _written(tmp_path, packed[: len(packed) // 2], "job.log.gz")
    assert is_log(path)
    found = analyze.diagnose_dumps(read_folder(tmp_path))
    assert victims(found) == [(0, "all_reduce", 77), (1, "all_reduce", 77)]
    assert "job.log.gz is cut off: it is read up to there" in found.evidence


def test_who_is_silent_in_a_log_that_is_cut_off_may_have_spoken_behind_its_cut(tmp_path):
    """Of the whole log ranks 2 and 3 are named; of the cut one they may have lines behind it."""
    noise = "".join(f"line {number * 7919 % 10007}\n" for number in range(3000))
    packed = gzip.compress((world(4) + waits(0) + waits(1) + noise).encode())
    _written(tmp_path, packed, "job.log.gz")
    whole = analyze.diagnose_dumps(read_folder(tmp_path))
    assert [culprit.rank for culprit in whole.culprits] == [2, 3]
    _written(tmp_path, packed[: len(packed) // 2], "job.log.gz")
    found = analyze.diagnose_dumps(read_folder(tmp_path))
    assert (found.verdict, found.culprits, found.candidates) == ("undetermined", (), (2, 3))


@pytest.mark.parametrize("place", ["end", "start", "between"])
def test_nuls_of_a_full_disk_are_no_lines(place, tmp_path):
    nuls = b"\0" * 5000
    log = (waits(0) + waits(1)).encode()
    half = len(waits(0))
    data = {"end": log + nuls, "start": nuls + log, "between": log[:half] + nuls + log[half:]}
    _written(tmp_path, data[place])
    found = analyze.diagnose_dumps(read_folder(tmp_path))
    assert victims(found) == [(0, "all_reduce", 77), (1, "all_reduce", 77)]


def test_a_dump_is_no_log(tmp_path):
    assert not is_log(_written(tmp_path, b'{"version": "2.4"}'))
    assert not is_log(_written(tmp_path, b"\x80\x02}q\x00X\x00\x00"))
    assert not is_log(_written(tmp_path, b"\0" * 100))


# -- attempts -------------------------------------------------------------------------------------
def _at(text, hour):
    return text.replace("06:25:13.2", f"{hour:02}:25:13.2")


FIRST = world(4) + "".join(waits(rank, 5000) for rank in (0, 1, 2))
SECOND = _at(world(4) + "".join(waits(rank, 120) for rank in (0, 1, 3)), 9)


@pytest.mark.parametrize(
    "texts",
    [
        (FIRST + SECOND,),
        (FIRST, SECOND),
        (SECOND, FIRST),
        (FIRST + SECOND.partition("\n")[2],),
        (FIRST.partition("\n")[2] + SECOND.partition("\n")[2] + world(4),),
    ],
    ids=["one file", "two files", "in another order", "no start", "a start at the end"],
)
def test_of_two_attempts_the_last_is_judged(texts, tmp_path):
    """Rank 3 held up the first, rank 2 the second."""
    found = judged(tmp_path, *texts)
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert victims(found) == [(rank, "all_reduce", 120) for rank in (0, 1, 3)]
    assert found.evidence[0].startswith("the logs are of several attempts")


def test_attempts_that_got_further_are_told_apart_too(tmp_path):
    later = FIRST.replace("5000", "9000").replace("4999", "8999").replace("5001", "9001")
    found = judged(tmp_path, SECOND.replace("09:25", "01:25"), later)
    assert [(wait.rank, wait.seq) for wait in found.victims] == [(r, 9000) for r in (0, 1, 2)]


def test_attempts_of_torchrun_s_folders_are_told_apart(tmp_path):
    paths = []
    for attempt, text in enumerate((FIRST, SECOND.replace("09:25", "06:25"))):
        folder = tmp_path / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        paths.append(_written(folder, text, "stderr.log"))
    found = analyze.diagnose_dumps(read_logs(paths))
    assert [culprit.rank for culprit in found.culprits] == [2]


def test_one_attempt_is_not_parted(tmp_path):
    """Watchdogs fire minutes apart, and clocks may be wrong."""
    late = waits(2, 808).replace("06:25", "06:31")
    found = judged(tmp_path, waits(0, 808) + waits(1, 808) + late)
    assert [wait.rank for wait in found.victims] == [0, 1, 2]
    other = waits(2, 808).replace("E1125 06:25", "E101 10:00")
    found = judged(tmp_path, waits(0, 808) + waits(1, 808) + other)
    assert [wait.rank for wait in found.victims] == [0, 1, 2]


# -- dumps beside logs ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["killed", "host_stuck", "gil", "drop"])
@pytest.mark.parametrize("form", ["it waits like the others", "logged", "it trains on"])
def test_a_handled_exception_beside_dumps_changes_nobody(kind, form, tmp_path):
    """Innocent ranks print exceptions; their dumps show that they wait as the others do."""
    world = WORLDS[1]
    programs, faults, culprits = random_hangs.draw(kind, world, 3)
    state = stall.run_until_stalled(programs, faults)
    values = dict(export.dumps_of(state, active_only=True, stacks=False))
    dumps = DumpSet({rank: of_value(value, rank) for rank, value in values.items()})
    before = random_hangs.named(analyze.diagnose_dumps(dumps))
    innocent = sorted(set(range(world.size)) - culprits)[:2]
    text = "".join(HANDLED[form].format(f"[rank{rank}]: ") for rank in innocent)
    both = together(dumps, [_written(tmp_path, text)])
    assert random_hangs.named(analyze.diagnose_dumps(both)) == before
    assert before <= culprits


def test_a_fatal_exception_beside_dumps_is_named(tmp_path):
    """Rank 5 died by it: it left no dump, and others wait for it."""
    world = WORLDS[1]
    programs, faults, culprits = random_hangs.draw("killed", world, 3)
    state = stall.run_until_stalled(programs, faults)
    values = dict(export.dumps_of(state, active_only=True, stacks=False))
    dumps = DumpSet({rank: of_value(value, rank) for rank, value in values.items()})
    text = "".join(TRACE.format(f"[rank{rank}]: ") for rank in culprits)
    found = analyze.diagnose_dumps(together(dumps, [_written(tmp_path, text)]))
    assert {culprit.rank: culprit.kind for culprit in found.culprits} == dict.fromkeys(
        culprits, "exception"
    )


@pytest.mark.parametrize(
    ("error", "is_its_own"),
    [
        ("KeyError: 'rccl_channels'", True),
        ("ImportError: cannot import name 'hccl_plan' from 'mylib'", True),
        ("RuntimeError: NCCL error: remote process exited", False),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted", False),
    ],
)
def test_python_raises_some_errors_for_the_code_of_the_rank_alone(error, is_its_own):
    tracebacks = log_errors.Tracebacks()
    for line in ("Traceback (most recent call last):", '  File "train.py", line 3, in f', error):
        tracebacks.read(line)
    (raised,) = tracebacks.raised
    assert raised.kind == ("exception" if is_its_own else "")
