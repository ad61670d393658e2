"""Run pretrain_tiny.py in a fork of one process that has imported everything."""

from helpers import stock_jobs

SCRIPT = stock_jobs.TINY

JOB = """
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 64 --train-iters 3 --lr 1e-3
--mock-data --vocab-size 1000 --transformer-impl local --bf16 --use-distributed-optimizer
--no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 1000 --log-interval 1
--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --attention-backend unfused --num-workers 0
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
""".split()


def forked(*flags, job=JOB):
    """(status, everything it printed) of ``prism run``; a second or two instead of seven."""
    ((status, said),) = stock_jobs.run([["--", SCRIPT, *job, *flags]])
    return status, said
