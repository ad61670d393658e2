"""What a verdict on logs says of ranks is known: sentences that recorded hangs have shown wrong.

``h100`` are the logs of hangs that were made on 2 x H100 (torch 2.11, megatron-core 0.19.2; see
test_two_h100.py), of which a test has the lines that count.
"""

import pytest

from megatron_prism.features.hang.analyze import diagnose_dumps
from megatron_prism.features.hang.logs import read_logs

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
