"""Four hangs that were made on 2 x H100 (torch 2.11, megatron-core 0.19.2) with Megatron's default
recorder: dumps of outstanding calls only, and programs that are captured here on tier meta.

Truth: skip (tp 2, sp): rank 1 left out the all_reduce of the gradient norm in iteration 6; batch
(pp 2): rank 1 had --global-batch-size 9; nosave (dp 2): rank 1 did not enter the save after
iteration 5, in which rank 0 waits in gloo; skipsend (pp 2): rank 0 left out its third send of the
steady state in iteration 6.
"""

from pathlib import Path

import pytest
from helpers.needs import TRAINING

from megatron_prism.core.programs.slices import open_programs
from megatron_prism.features.hang import logs
from megatron_prism.features.hang.analyze import diagnose_dumps
from megatron_prism.features.hang.diagnose import diagnose

DUMPS = Path(__file__).parents[2] / "golden" / "flight" / "h100"
JOB = """
--bf16 --use-distributed-optimizer --transformer-impl transformer_engine --lr 1e-4 --mock-data
--no-gradient-accumulation-fusion --tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0
--eval-interval 1000 --log-interval 1 --num-layers 4 --hidden-size 1024 --num-attention-heads 16
--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8
--train-iters 20 --no-create-attention-mask-in-dataloader --prism-emulate --prism-world-size 2
--prism-tier meta
"""
LAYOUTS = {
    "skip": ("--tensor-model-parallel-size 2 --sequence-parallel", (0,)),
    "batch": ("--pipeline-model-parallel-size 2", (0, 1)),
}
LOG = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "megatron/training/checkpointing.py", line 694, in save_checkpoint
[rank0]:     optimizer.save_parameter_state(optim_checkpoint_name)
[rank0]:   File "megatron/core/optimizer/distrib_optimizer.py", line 1380, in {function}
[rank0]:     torch.distributed.gather(
[rank0]:   File "torch/distributed/distributed_c10d.py", line 4273, in gather
[rank0]:     work.wait()
[rank0]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Case -> the programs of its job, as captured from its command line."""
    from helpers import stock_jobs

    place = tmp_path_factory.mktemp("two_h100")
    script = Path(__file__).parents[2] / "helpers" / "pretrain_tiny.py"
    jobs = [["--", script, *JOB.split(), *flags.split(), "--prism-ranks", rank,
             "--prism-capture", place / name]
            for name, (flags, ranks) in LAYOUTS.items() for rank in ranks]  # fmt: skip
    for status, text in stock_jobs.run(jobs):
        assert status == 0, text[-3000:]
    return {name: open_programs(place / name) for name in LAYOUTS}


@pytest.mark.slow
@pytest.mark.megatron
@TRAINING
def test_a_skipped_all_reduce_is_named_by_programs_and_absolute_counters(programs):
    """Without the host's waits for copies and the calls of start-up either rank fits."""
    found = diagnose(DUMPS / "skip", programs=programs["skip"])
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, "skipped call")], found
    assert (found.op, found.seq) == ("all_reduce", 7)
    assert found.group == "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
    assert "clip_grads.py" in found.stop
    assert any("iteration 6" in place for place in found.places)
    sites = {op.site for op in programs["skip"].of(0) if op.note == "copy"}
    lines = ("core/rerun_state_machine.py:268", "training/utils/common_utils.py:308")
    assert all(any(site.endswith(line) for site in sites) for line in lines)


@pytest.mark.slow
@pytest.mark.megatron
@TRAINING
def test_a_ninth_microbatch_is_named_by_the_program_of_eight(programs):
    found = diagnose(DUMPS / "batch", programs=programs["batch"])
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, "extra call")], found
    assert "more than the 8 microbatches of its program" in found.culprits[0].why
    assert found.confirmed
    assert "PIPELINE_MODEL_PARALLEL_GROUP" in found.stop


@pytest.mark.parametrize("case", ["skip", "batch"])
def test_without_programs_either_rank_may_err(case):
    assert not diagnose(DUMPS / case).culprits


def test_a_skipped_send_breaks_the_rank_s_own_rhythm():
    found = diagnose(DUMPS / "skipsend")
    assert [(c.rank, c.kind) for c in found.culprits] == [(0, "skipped call")], found


def test_who_skips_a_save_is_named_by_the_other_s_log_only(tmp_path):
    """Rank 0 waits outside NCCL: that alone names nobody."""
    silent = diagnose(DUMPS / "nosave")
    assert (silent.culprits, silent.exit_code) == ((), 3)
    log = tmp_path / "job.log"
    log.write_text(LOG.format(function="get_parameter_state_dp_zero"))
    found = diagnose_dumps(logs.together(logs.read_folder(DUMPS / "nosave"), [log]))
    assert [(c.rank, c.kind) for c in found.culprits] == [(1, "skipped call")], found


def test_the_first_watchdog_is_named_as_far_as_dumps_know_it():
    """nosave's log has OpType=COALESCED; in skip rank 1's watchdog fired 0.9 ms before rank 0's,
    whose call was issued 6 ms earlier: a watchdog looks every 100 ms."""
    coalesced = diagnose(DUMPS / "nosave").watchdog
    assert "SeqNum=16, OpType=_REDUCE_SCATTER_BASE or COALESCED, NumelIn=84203520" in coalesced
    due = diagnose(DUMPS / "skip").watchdog
    assert due.startswith("rank 0 (or rank 1, due within 0.1 s), 60.0 s after the first call")
