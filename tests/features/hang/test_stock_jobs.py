"""Whole stock jobs under --prism-world: healthy ones give no verdict, whatever comes between their
train steps, and a fault right after an evaluation is found.

Needs megatron.training (0.19).  Every job is captured and compared under the same command line.
"""

import re
from pathlib import Path

import pytest
from helpers.needs import TRAINING

from megatron_prism.cli import main as cli

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

JOB = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-3
--mock-data --vocab-size 1000 --bf16 --use-distributed-optimizer --log-interval 1 --num-workers 0
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
--no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--pipeline-model-parallel-size 2 --prism-emulate
"""
LOCAL = "--transformer-impl local --attention-backend unfused --prism-tier meta"
GATHER = "--overlap-grad-reduce --overlap-param-gather"
EVALUATION = "--eval-interval 2 --eval-iters 1"
NONE = "--eval-interval 1000 --eval-iters 0"
SFT = """--sft --tensor-model-parallel-size 2 --transformer-impl transformer_engine --swiglu
--normalization RMSNorm --disable-bias-linear --no-create-attention-mask-in-dataloader
--prism-tier cpu --prism-world-size 8"""
# name -> (flags, the first rank of the last stage, iterations of 6 that are compared)
HEALTHY = {
    "evaluation": (f"{LOCAL} {EVALUATION}", 2, 4),
    "checkpoints": (f"{LOCAL} {NONE} --save {{save}} --save-interval 2", 2, 4),
    # what an evaluation gathered the next iteration does not gather: 3 and 5 are left out
    "evaluation, gathered": (f"{LOCAL} {EVALUATION} {GATHER}", 2, 2),
    "sft": (f"{SFT} {EVALUATION}", 4, 4),
}
PP, DP = "PIPELINE_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"


def words(flags, place, *more):
    flags = (JOB + flags).format(save=place / "checkpoints").split()
    world = [] if "--prism-world-size" in flags else ["--prism-world-size", "4"]
    return ["--", HERE.parents[1] / "helpers" / "pretrain_tiny.py", *flags, *world, *more]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """(name, stage or what else) -> (status, output); and where the programs are."""
    from helpers import stock_jobs

    place = tmp_path_factory.mktemp("jobs")
    captures, checks = {}, {}
    for name, (flags, last, _) in HEALTHY.items():
        for rank in (0, last):
            here = words(flags, place, "--prism-ranks", rank)
            captures[name, rank] = [*here, "--prism-capture", place / name]
            checks[name, rank] = [*here, "--prism-world", place / name]
    name = "evaluation"
    flags = HEALTHY[name][0]
    after = words(flags, place, "--prism-ranks", 2, "--prism-world", place / name)
    for fault in FAULTS:
        checks[fault] = [*after, "--prism-fault", fault]
    names = [("captured", key) for key in captures] + [("compared", key) for key in checks]
    answers = stock_jobs.run(captures.values(), checks.values())
    return dict(zip(names, answers, strict=True)), place


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_gives_no_verdict(name, jobs):
    found, _ = jobs
    _, last, iterations = HEALTHY[name]
    for rank in (0, last):
        status, said = found["captured", (name, rank)]
        assert status == 0, said[-3000:]
    for rank in (0, last):
        status, said = found["compared", (name, rank)]
        assert status == 0, said[-3000:]
        assert "HANG" not in said
        assert f"calls of rank {rank} in {iterations} iterations were compared with" in said
        assert int(re.search(r"([\d,]+) calls of", said)[1].replace(",", "")) > 15 * iterations


# the evaluation is after iteration 2; 4 ranks, 2 and 3 are the replicas of the last stage
FAULTS = {
    "dtype@rank=3,iter=3,group=dp,op=reduce_scatter": (DP, "reduce_scatter", 3, "dtype"),
    "drop@rank=2,iter=3,group=pp,op=recv": (PP, "recv", 2, "skipped call"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_right_after_an_evaluation_is_found(fault, jobs):
    found, _ = jobs
    group, op, culprit, kind = FAULTS[fault]
    status, said = found["compared", fault]
    assert status == 1, said[-3000:]
    (verdict,) = re.findall(r"^HANG at .*$", said, re.M)
    assert verdict.startswith(f"HANG at {op} #"), verdict
    assert f" of {group}: rank {culprit} ({kind});" in verdict


def test_a_suspects_real_code_is_run_to_where_its_dump_stands(jobs, tmp_path, capsys):
    _, place = jobs
    programs, dumps = str(place / "evaluation"), str(tmp_path / "dumps")
    fault = "fault=drop@rank=3,group=dp,op=reduce_scatter"
    assert cli.main(["hang", programs, fault, "-o", dumps]) == 1
    script = map(str, words(HEALTHY["evaluation"][0], place))
    assert cli.main(["hang", "--dumps", dumps, "--confirm", "--programs", programs, *script]) == 1
    said = capsys.readouterr().out
    assert "rank 3's real code ran on tier meta" in said
    assert re.search(r"it comes to reduce_scatter of DATA_PARALLEL_GROUP_WITH_CP", said)
    assert "CONFIRMED" in said, said
