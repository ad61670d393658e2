"""Flags that the command line of a real job has, copied as they are: they work, or are refused by
name, and what they name of the real job's is left alone.

Needs megatron.training (0.19).  All jobs are forks of one process (``stock_jobs``).
"""

import json

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

JOB = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data
--vocab-size 1000 --bf16 --use-distributed-optimizer --log-interval 1 --num-workers 0
--eval-iters 0 --eval-interval 1000 --transformer-impl transformer_engine --normalization RMSNorm
--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --prism-emulate
"""
TWO = "--pipeline-model-parallel-size 2 --prism-world-size 8 --global-batch-size 8"
ONE = "--prism-world-size 8 --global-batch-size 8"
WRITES = """--tensorboard-dir {place}/curves --log-progress --save {place}/saved --save-interval 2
--profile --profile-step-start 1 --profile-step-end 2 --profile-ranks 7"""
TRACES = """--profile-ranks 0 --use-pytorch-profiler --save-wgrads-interval 2
--save-dgrads-interval 2"""
MOE = "--num-experts 8 --expert-model-parallel-size 8 --moe-grouped-gemm"
OWN = """--prism-world-size 1 --global-batch-size 1 --log-progress --save {place}/own
--save-interval 2 --prism-record {place}/recording"""
ALONE = OWN.replace("own", "alone").partition("--prism-record")[0]
SPARSE = """--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 8
--qk-pos-emb-head-dim 8 --v-head-dim 8 --experimental-attention-variant dsa --no-rope-fusion
--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8"""
LOAD = "--load {place}/own --override-opt-param-scheduler --no-load-optim"
JOBS = {
    "writes": f"{TWO} {WRITES} --prism-ranks 7 --prism-tier cpu --prism-out {{place}}/fused",
    "unfused": f"{TWO} --no-gradient-accumulation-fusion --prism-ranks 7 --prism-tier cpu "
    "--prism-out {place}/unfused",
    "writes, rank 0": f"{TWO} {WRITES} {TRACES} --prism-ranks 0 --prism-tier cpu",
    "skips": f"{ONE} --iterations-to-skip 2 --prism-ranks 0 --prism-tier cpu",
    "DeepEP": f"{ONE} {MOE} --moe-token-dispatcher-type flex --moe-enable-deepep --prism-ranks 3 "
    "--prism-tier cpu",
    "offload, optimizer": f"{ONE} --optimizer-cpu-offload --use-precision-aware-optimizer "
    "--prism-ranks 3 --prism-tier meta",
    "offload, activations": f"{ONE} --fine-grained-activation-offloading --prism-ranks 3 "
    "--offload-modules core_attn --prism-tier meta",
    "graph": f"{ONE} --cuda-graph-impl local --cuda-graph-scope full_iteration --fp16 "
    "--no-check-for-nan-in-loss-and-grad --prism-ranks 3 --prism-tier meta",
    "graphs, layers": f"{ONE} --cuda-graph-impl transformer_engine --cuda-graph-scope attn "
    f"{MOE} --moe-token-dispatcher-type allgather --prism-ranks 3 --prism-tier meta",
    "user buffers": f"{ONE} --use-nccl-ub --prism-ranks 3 --prism-tier cpu",
    "hashes": f"{ONE} --check-weight-hash-across-dp-replicas-interval 1 --test-mode "
    "--qk-layernorm --normalization LayerNorm --prism-ranks 3 --prism-tier meta",
    "sparse attention": f"{ONE} {SPARSE} --prism-ranks 3 --prism-tier cpu",
    "own": f"{OWN} --prism-ranks 0 --prism-tier cpu",
    "alone": f"{ALONE} --prism-ranks 0 --prism-tier cpu {TRACES} --profile "
    "--profile-step-start 1 --profile-step-end 2 --prism-out {place}/traced",
}
LATER = {
    "load, rank 0": f"{ONE} {LOAD} --train-iters 5 --prism-ranks 0 --prism-tier cpu",
    "load, shapes": f"{ONE} {LOAD} --train-iters 5 --prism-ranks 0 --prism-tier meta",
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """name -> (status, output); and where they were told to write."""
    place = tmp_path_factory.mktemp("place")

    def words(flags):
        job = JOB.replace("--bf16", "") if "--fp16" in flags else JOB
        return (job + flags).format(place=place).split()

    phases = ({name: words(flags) for name, flags in some.items()} for some in (JOBS, LATER))
    return stock_jobs.named(stock_jobs.TINY, *phases), place


def trained(jobs, name):
    """(what the job printed, where it was told to write); it ended well."""
    status, said = jobs[0][name]
    assert status == 0, said[-3000:]
    return said, jobs[1]


@pytest.mark.parametrize("name", ["writes", "writes, rank 0"])
def test_nothing_is_added_to_the_real_jobs_records(name, jobs):
    said, place = trained(jobs, name)
    assert not (place / "curves").exists()
    assert not (place / "saved").exists()
    assert not (place / "torch_profile").exists()
    assert "nothing of an emulated job is written there" in said


def test_gradients_and_traces_are_not_written_and_that_is_said(jobs):
    said = jobs[0]["writes, rank 0"][1]
    assert said.count("gradients are not written") == 2  # when it is asked for, and at the end
    assert said.count("--use-pytorch-profiler is off") == 2


def test_a_skipped_iteration_is_not_asked_for(jobs):
    assert "2 optimizer steps applied of 2" in trained(jobs, "skips")[0]


def test_the_fused_weight_gradient_is_the_unfused_one(jobs):
    iterations = []
    for name, folder in (("writes", "fused"), ("unfused", "unfused")):
        _, place = trained(jobs, name)
        summary = json.loads((place / folder / "rank-000007.json").read_text())
        iterations.append([(i["losses"], i["grad_norm"]) for i in summary["iterations"]])
    assert len(iterations[0]) == 3
    for (losses, norm), (other, other_norm) in zip(*iterations, strict=True):
        assert losses == pytest.approx(other, rel=1e-5)  # one adds up in fp32, one rounds to bf16
        assert norm == pytest.approx(other_norm, rel=1e-3)


def test_what_cannot_be_is_refused_by_name(jobs):
    status, said = jobs[0]["DeepEP"]
    assert status == 1, said[-3000:]
    last = said.splitlines()[-2:]
    what = "--moe-token-dispatcher-type flex talks to the other ranks through DeepEP"
    assert last[0].startswith(f"prism: error: {what}")
    assert last[1].startswith("  fix: ")
    assert "instantiating" not in last[1]  # Megatron's build_module adds it to every message


@pytest.mark.parametrize(
    "name",
    [
        "user buffers",
        "hashes",
        "sparse attention",
        "graph",
        "graphs, layers",
        "offload, activations",
        "offload, optimizer",
    ],
)
def test_what_would_need_a_package_or_values_trains(name, jobs):
    assert "3 optimizer steps applied of 3" in trained(jobs, name)[0]


def test_a_job_whose_graph_is_captured_has_no_estimate_of_graphs(jobs):
    assert "optimizer steps applied" in jobs[0]["graph"][1]
    assert "CUDA graphs: counted" not in jobs[0]["graph"][1]


def test_a_job_that_nobody_records_is_none_to_save_also_if_no_rank_is_virtual(jobs):
    said, place = trained(jobs, "alone")
    assert not (place / "alone").exists()
    assert said.count("checkpoints are not written") == 2  # when it is asked for, and at the end
    assert list((place / "traced.profile").rglob("*rank-0.json.gz"))


def test_the_real_job_that_is_recorded_writes(jobs):
    said, place = trained(jobs, "own")
    assert (place / "own" / "progress.txt").read_text().count("Starting job") == 1
    assert (place / "own" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    assert "prism: error" not in said  # nor from the processes that write it


@pytest.mark.parametrize(("name", "steps"), [("load, rank 0", 2), ("load, shapes", 5)])
def test_the_real_jobs_checkpoint_can_be_named(name, steps, jobs):
    said, _ = trained(jobs, name)
    assert f"{steps} optimizer steps applied of {steps}" in said
