"""What a verdict on logs says of ranks is known: sentences that recorded hangs have shown wrong.

``h100`` are the logs of hangs that were made on 2 x H100 (torch 2.11, megatron-core 0.19.2; see
test_two_h100.py), of which a test has the lines that count.
"""

import pytest
from helpers.dump_values import Dump

from megatron_prism.features.hang.analyze import diagnose_dumps
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.logs import read_logs, together

SIZES = (
    "using world size: {world}, data-parallel size: {dp}, context-parallel size: 1, "
    "tensor-model-parallel size: {tp}, pipeline-model-parallel size: {pp}\n"
)
CALL = (
    "[rank{rank}]:[E1125 09:00:01.5 ProcessGroupNCCL.cpp:688] [Rank {place}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={kind}, NumelIn={size}, "
    "NumelOut={size}, Timeout(ms)=60000) ran for 60007 milliseconds before timing out.\n"
    "[rank{rank}]:[E1125 09:00:01.5 ProcessGroupNCCL.cpp:2287] [PG ID 1 PG GUID {name}({desc}) "
    "Rank {place}]  failure detected by watchdog at work sequence id: {seq} PG status: last "
    "enqueued work: {seq}, last completed work: {ended}\n"
)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "megatron/training/training.py", line 2100, in train\n'
    "    step()\n"
    "{error}\n"
)
GLOO = (
    "[rank{rank}]: Traceback (most recent call last):\n"
    '[rank{rank}]:   File "megatron/core/optimizer/distrib_optimizer.py", line 1380, in save\n'
    "[rank{rank}]:     torch.distributed.gather(\n"
    '[rank{rank}]:   File "torch/distributed/distributed_c10d.py", line 4273, in gather\n'
    "[rank{rank}]:     work.wait()\n"
    "[rank{rank}]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "60000ms for recv operation to complete\n"
)


def sizes(world, tp=1, pp=1):
    return SIZES.format(world=world, dp=world // tp // pp, tp=tp, pp=pp)


def call(rank, seq=77, kind="ALLREDUCE", name="0", desc="default_pg", place=None, size=1):
    place = rank if place is None else place
    return CALL.format(
        rank=rank, seq=seq, kind=kind, name=name, desc=desc, place=place, size=size, ended=seq - 1
    )


def judged(folder, **texts):
    """Judge files: their names without .log -> what they hold."""
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.log"
        path.write_text(text)
        paths.append(path)
    return diagnose_dumps(read_logs(paths))


# -- what ranks wait for --------------------------------------------------------------------------
def test_a_rank_that_waits_elsewhere_is_not_said_to_have_the_call_queued(tmp_path):
    """h100 skip: rank 1 left the call out.  Its log names the call in which it waits, no other."""
    instance = call(0, 7, name="41", desc="INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")
    model = call(1, 16, name="35", desc="MODEL_PARALLEL_GROUP")
    found = judged(tmp_path, job=sizes(2, tp=2) + instance + model)
    assert not any("queued" in line for line in found.chain)
    assert [line.partition(": ")[2] for line in found.chain] == [
        "rank 1 waits in another call",
        "rank 0 waits in another call",
    ]


def test_what_a_rank_without_a_log_posted_is_not_known(tmp_path):
    """h100 skipsend, of which rank 0's log alone is there: rank 1 had posted its side."""
    stack = "#0 recv_forward from megatron/core/pipeline_parallel/p2p_communication.py:300\n"
    text = call(1, 54, "COALESCED", "7", "PIPELINE_MODEL_PARALLEL_GROUP", size=0)
    text += "[rank1]:[E1125 09:00:01.6 x.cpp:1] Stack trace of the failed collective:\n" + stack
    found = judged(tmp_path, rank1=sizes(2, pp=2) + text)
    assert [line.partition(": ")[2] for line in found.chain] == ["rank 0 left no dump"]


def test_a_log_does_not_say_which_messages_a_rank_did_not_post(tmp_path):
    """h100 batch: rank 0 waits in the embeddings' all_reduce, and its log names that alone."""
    stack = "#0 recv_forward from megatron/core/pipeline_parallel/p2p_communication.py:300\n"
    text = call(1, 9, "COALESCED", "7", "PIPELINE_MODEL_PARALLEL_GROUP", size=0)
    text += "[rank1]:[E1125 09:00:01.6 x.cpp:1] Stack trace of the failed collective:\n" + stack
    text += call(0, 2, name="9", desc="EMBEDDING_GROUP")
    found = judged(tmp_path, job=sizes(2, pp=2) + text)
    assert any("rank 0 has no such message in its log" in line for line in found.chain)
    assert not any("posted" in line for line in found.chain)


SIGNAL = (
    "[rank{rank}]:[E1125 09:00:02.1 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank "
    "{rank}] Received a dump signal due to a collective timeout from  rank 2 and we will try our "
    "best to dump the debug info. Last enqueued NCCL work: 76, last completed NCCL work: 76.\n"
)


def test_counters_of_the_world_do_not_say_that_a_rank_waits_for_nobody(tmp_path):
    """The dump signal of HeartbeatMonitor has the counters of the default group alone."""
    text = sizes(4, tp=2) + call(2, 501, name="5", desc="TENSOR_MODEL_PARALLEL_GROUP", place=0)
    found = judged(tmp_path, job=text + "".join(SIGNAL.format(rank=rank) for rank in range(4)))
    assert [culprit.rank for culprit in found.culprits] == [3]
    expected = "rank 3 never came to all_reduce #501 of TENSOR_MODEL_PARALLEL_GROUP; its log names "
    assert expected + "no call in which it waits" in found.evidence


# -- whose a file is ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["node_rank_1", "machine-rank1", "NODE_RANK=1", "job-rank1-of-2"])
def test_the_number_of_a_node_in_the_name_of_a_file_is_no_rank(name, tmp_path):
    """torchrun's workers print [rank4]: in it; an exception before that has no mark."""
    text = TRACEBACK.format(error="ValueError: bad sample") + call(4) + call(5) + call(7)
    found = judged(tmp_path, **{name: text})
    assert not found.culprits
    assert "rank 1" not in str(found)


def test_a_file_named_after_a_rank_is_its_own_where_that_rank_speaks(tmp_path):
    text = call(1) + TRACEBACK.format(error="ValueError: bad sample")
    found = judged(tmp_path, job_rank1=text, job_rank0=call(0))
    assert any("rank 1" in line and "ValueError" in line for line in found.evidence)


# -- outside NCCL ---------------------------------------------------------------------------------
def test_the_call_outside_nccl_is_the_call_of_the_hang(tmp_path):
    """h100 nosave: rank 1 waits in a reduce_scatter that it did not skip."""
    own = call(1, 16, "_REDUCE_SCATTER_BASE", "21", "DATA_PARALLEL_GROUP_WITH_CP")
    found = judged(tmp_path, rank0=sizes(2) + GLOO.format(rank=0), rank1=sizes(2) + own)
    assert [(culprit.rank, culprit.kind) for culprit in found.culprits] == [(1, "skipped call")]
    expected = "HANG at gather of a group outside NCCL: rank 1 (skipped call); 1 victim"
    assert found.headline() == expected
    assert not found.stop
    assert [victim.rank for victim in found.victims] == [0]
    assert any(line.startswith("rank 1 did not come to gather of save") for line in found.evidence)


def test_a_rank_whose_log_is_not_there_may_wait_outside_nccl_too(tmp_path):
    """h100 nosave, of which rank 0's log alone is there."""
    found = judged(tmp_path, rank0=sizes(2) + GLOO.format(rank=0))
    assert not found.culprits
    assert found.candidates == (1,)
    assert found.exit_code == 3
    assert [victim.rank for victim in found.victims] == [0]


def test_ranks_that_wait_alike_outside_nccl_are_one_line(tmp_path):
    waiting = "".join(GLOO.format(rank=rank) for rank in (0, 1, 2))
    found = judged(tmp_path, job=sizes(4) + waiting)
    lines = [line for line in found.evidence if "outside NCCL" in line]
    assert len(lines) == 1
    assert lines[0].startswith("ranks 0-2 wait outside NCCL, in gather of save")


# -- ranks that end before any call ---------------------------------------------------------------
STORE = (
    "[rank{rank}]: Traceback (most recent call last):\n"
    '[rank{rank}]:   File "pretrain_gpt.py", line 300, in <module>\n'
    '[rank{rank}]:   File "torch/distributed/distributed_c10d.py", line 9, in init_process_group\n'
    "[rank{rank}]: torch.distributed.DistStoreError: Timed out after 601 seconds waiting for "
    "clients. 3/4 clients joined.\n"
)
GONE = (
    "[rank{rank}]:[E1125 09:00:01.5 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank "
    "{rank}] Process group watchdog thread terminated with exception: NCCL error: remote process "
    "exited or there was a network error, NCCL version 2.21.5\n"
)


def test_what_ended_a_process_before_torch_marks_its_lines_is_shown(tmp_path):
    """torch marks lines since init_process_group (_maybe_set_excepthook of distributed_c10d.py)."""
    text = TRACEBACK.format(error="ModuleNotFoundError: No module named 'foo'")
    text += "".join(STORE.format(rank=rank) for rank in (0, 1, 3))
    found = judged(tmp_path, job=text)
    assert any(
        line.startswith("a process whose rank is not printed: ModuleNotFoundError")
        for line in found.evidence
    )
    # the store knows how many ranks there are (TCPStore.cpp, waitForWorkers)
    assert found.candidates == (2,)
    assert found.decides.startswith("the log of rank 2")


def test_an_exception_of_an_earlier_attempt_is_none_of_the_last_one(tmp_path):
    text = TRACEBACK.format(error="ValueError: bad sample")
    text += "[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    found = judged(tmp_path, job=text + call(0) + call(1))
    assert "ValueError" not in str(found)


def test_the_traceback_of_torchruns_table_is_no_process_without_a_rank(tmp_path):
    table = "  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 7)\n  traceback : "
    found = judged(tmp_path, job=call(0) + table + TRACEBACK.format(error="ValueError: bad"))
    assert "rank is not printed" not in str(found)


def test_ranks_whose_peer_is_gone_say_so_and_no_recorder_is_blamed(tmp_path):
    gone = "".join(GONE.format(rank=rank) for rank in (0, 1, 3))
    found = judged(tmp_path, job=sizes(4) + gone)
    assert "ranks 0,1,3: NCCL error: remote process exited or there was a network error" in (
        found.evidence
    )
    assert "recorders were off" not in str(found)
    assert not any("TORCH_INCLUDE_STACK_TRACE" in line for line in found.missing)
    assert found.decides.startswith("the log of rank 2")


def test_a_peer_that_is_gone_is_no_evidence_behind_a_time_out(tmp_path):
    found = judged(tmp_path, job=sizes(4) + call(0) + call(1) + GONE.format(rank=3))
    assert "remote process exited" not in str(found)


def test_a_rank_without_counters_in_a_log_has_no_recorder_that_was_off(tmp_path):
    error = "[rank2]: Traceback (most recent call last):\n[rank2]: ValueError: bad\n"
    found = judged(tmp_path, job=sizes(4) + call(0) + call(1) + call(3) + error)
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert "counters of rank 2, which the log does not have" in found.missing


def test_where_all_ranks_that_print_waited_outside_nccl_no_stack_is_asked_for(tmp_path):
    """Their processes ended with the time-out."""
    found = judged(tmp_path, job="".join(GLOO.format(rank=rank) for rank in (0, 1)))
    assert found.decides == "what the other ranks printed: prism hang DIR with all logs in DIR"


# -- what launchers say of ranks ------------------------------------------------------------------
TABLE = (
    "Failures:\n[1]:\n  rank      : 3 (local_rank: 3)\n  exitcode  : -6 (pid: 124)\n"
    "Root Cause (first observed failure):\n[0]:\n"
    "  rank      : 2 (local_rank: 2)\n  exitcode  : {code} (pid: 123)\n"
)


def test_a_rank_whose_watchdog_spoke_was_killed_after_the_others_waited(tmp_path):
    """All four wait in one call: a SIGKILL is no reason of that."""
    waiting = "".join(call(rank) for rank in range(4))
    found = judged(tmp_path, job=sizes(4) + waiting + TABLE.format(code=-9))
    assert not found.culprits
    text = "rank 2 waited as others do before it ended: killed (SIGKILL) (torchrun's table)"
    assert text in found.evidence


def test_a_rank_that_others_wait_for_and_that_was_killed_is_the_culprit(tmp_path):
    waiting = "".join(call(rank) for rank in (0, 1, 3))
    found = judged(tmp_path, job=sizes(4) + waiting + TABLE.format(code=-9))
    assert [(culprit.rank, culprit.kind) for culprit in found.culprits] == [(2, "killed")]


@pytest.mark.parametrize(("code", "shown"), [(1, True), (-6, False), (134, False)])
def test_the_exit_code_of_the_first_failure_is_shown(code, shown, tmp_path):
    """Watchdogs end their processes by SIGABRT (6): that says nothing."""
    waiting = "".join(call(rank) for rank in (0, 1, 3))
    found = judged(tmp_path, job=sizes(4) + waiting + TABLE.format(code=code))
    text = "rank 2 ended first on its node, with exit code 1 (torchrun's table)"
    assert (text in found.evidence) == shown


def test_an_actor_of_ray_whose_rank_is_not_known_is_shown_with_its_exception(tmp_path):
    """Its lines follow lines of several ranks that are as long as each other, as on a screen."""
    waiting = ""
    for rank in (0, 1, 3):
        actor = f"(WorkerDict pid=400{rank}, ip=10.0.0.4) "
        waiting += "".join(f"{actor}{line}\n" for line in call(rank).splitlines())
    actor = "(WorkerDict pid=4002, ip=10.0.0.4) "
    error = TRACEBACK.format(error="ValueError: bad reward")
    raised = "".join(f"{actor}{line}\n" for line in error.splitlines())
    found = judged(tmp_path, job=waiting + raised)
    process = "a process whose rank is not printed (WorkerDict pid=4002, ip=10.0.0.4)"
    assert any(line.startswith(f"{process}: ValueError: bad reward") for line in found.evidence)
    assert not found.culprits


@pytest.mark.parametrize(
    ("prefix", "shown"), [("1: [default2]:", "1: [default2]"), ("[default2]:", "[default2]")]
)
def test_a_local_process_of_torchrun_is_shown_with_its_exception(prefix, shown, tmp_path):
    """Under srun a task is a node, and torchrun's own mark is the process on it."""
    waiting = ""
    for rank in (0, 1, 5, 7):
        mark = prefix.replace("1:", f"{rank // 4}:").replace("2]", f"{rank % 4}]")
        waiting += "".join(f"{mark}{line}\n" for line in call(rank).splitlines())
    error = TRACEBACK.format(error="ValueError: bad sample")
    raised = "".join(f"{prefix}{line}\n" for line in error.splitlines())
    found = judged(tmp_path, job=waiting + raised)
    start = f"a process whose rank is not printed ({shown}): ValueError: bad sample"
    assert any(line.startswith(start) for line in found.evidence)
    assert not found.culprits


def test_a_task_of_srun_that_runs_torchrun_is_a_node_also_where_its_ranks_are_silent(tmp_path):
    """Rank 0 is on task 0, which alone says nothing of tasks."""
    starts = "1: W1125 09:00:00.1 42 torch/distributed/run.py:793] Setting OMP_NUM_THREADS\n"
    error = TRACEBACK.format(error="ImportError: no module")
    raised = "".join(f"1: {line}\n" for line in error.splitlines())
    waiting = "".join(f"0: {line}\n" for line in call(0).splitlines())
    found = judged(tmp_path, job=starts + waiting + raised)
    assert not found.culprits
    process = "a process whose rank is not printed (task 1): ImportError: no module"
    assert any(line.startswith(process) for line in found.evidence)


# -- what became of a rank, and of the job --------------------------------------------------------
def test_a_silent_rank_is_not_said_to_have_gone_on_after_an_exception_of_a_thread(tmp_path):
    mark = "[rank1]: "
    error = "Exception in thread Thread-5 (run):\n" + TRACEBACK.format(error="OSError: boom")
    raised = "".join(f"{mark}{line}\n" for line in error.splitlines())
    found = judged(tmp_path, job=sizes(4) + raised + call(0) + call(2) + call(3))
    assert "went on" not in str(found)
    assert any(line.startswith("rank 1 had an exception that did not") for line in found.evidence)


def test_no_second_set_of_dumps_is_asked_for_where_a_monitored_barrier_failed(tmp_path):
    error = "[rank0]: RuntimeError: Rank 2 failed to pass monitoredBarrier in 60000 ms\n"
    found = judged(tmp_path, job=sizes(4) + error)
    assert [culprit.rank for culprit in found.culprits] == [2]
    assert not any("--then" in line for line in found.missing)


def test_dumps_say_who_is_in_a_group_where_more_logs_than_dumps_speak_of_it(tmp_path):
    """A log lists the ranks that speak: the dumps do not disagree with it."""
    dumps = {}
    for rank in (0, 1):
        dump = Dump({"mp": range(8)})
        dump.call("mp", done=True, count=76)
        dump.call("mp")
        dumps[rank] = of_value(dump.value(), rank)
    log = tmp_path / "job.log"
    log.write_text("".join(call(rank, name="400", size=8) for rank in (2, 3, 4, 6, 7)))
    found = diagnose_dumps(together(DumpSet(dumps), [log]))
    assert not any("disagree" in line for line in found.missing)
    assert [culprit.rank for culprit in found.possibly] == [5]


def test_the_call_of_a_stack_is_no_wrapper_of_torch(tmp_path):
    """py-spy prints the wrapper of c10d_logger.py around most functions of torch.distributed."""
    stack = (
        'Thread 123 (idle): "MainThread"\n    barrier (torch/distributed/distributed_c10d.py:3)\n'
        "    wrapper (torch/distributed/c10d_logger.py:3)\n    save (train.py:5)\n"
    )
    found = judged(tmp_path, rank2=stack)
    assert "rank 2: barrier of save (train.py:5): its stack" in found.evidence


def test_a_job_whose_watchdogs_fired_is_not_said_to_run(tmp_path):
    """Rank 3 is further on by its counters; no second set of dumps can be taken."""
    text = sizes(4) + "".join(call(rank, 70) for rank in range(3)) + SIGNAL.format(rank=3)
    found = judged(tmp_path, job=text)
    assert not found.culprits
    assert "was running" not in str(found)
    assert "--then" not in str(found)


def test_calls_of_a_rank_that_time_out_together_are_of_one_attempt(tmp_path):
    """A watchdog that does not end its process prints all calls that are queued."""
    queued = call(0, 78).replace("09:00:01.5", "09:00:11.5")
    queued = queued.replace("last completed work: 77", "last completed work: 76")
    text = sizes(4) + call(0) + call(1) + call(2) + queued
    found = judged(tmp_path, job=text)
    assert not any("attempts" in line for line in found.evidence)
    assert [culprit.rank for culprit in found.possibly] == [3]
    assert (found.op, found.seq) == ("all_reduce", 77)
