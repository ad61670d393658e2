"""Tiny stock jobs that combine what changes first, steady and last microbatches.

Each is captured with two numbers of microbatches: what one says of the other must be the other.
"""

import random
from dataclasses import dataclass

from helpers import stock_jobs

from megatron_prism.core.ops import OP, TEXTS
from megatron_prism.core.slices import open_programs
from megatron_prism.emulate.schedule import with_microbatches

BASE = """
--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 1 --train-iters 3 --exit-interval 3 --lr 1e-3 --mock-data --vocab-size 1000
--tokenizer-type NullTokenizer --bf16 --eval-iters 0 --eval-interval 1000 --log-interval 1
--num-workers 0 --disable-bias-linear --position-embedding-type rope --no-rope-fusion
--use-distributed-optimizer --transformer-impl transformer_engine
""".split()
LATE = "--overlap-grad-reduce --ddp-bucket-size 20000"
GATHER = "--overlap-param-gather"
MOE = "--num-experts 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SOME = "--recompute-granularity selective --recompute-modules core_attn"
DEFER = "--defer-embedding-wgrad-compute --wgrad-deferral-limit 2"
UNEVEN = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"


@dataclass(frozen=True)
class Composition:
    """A job: its flags, sizes, and the two numbers of microbatches."""

    flags: str
    pp: int = 1
    vpp: int = 1
    dp: int = 2
    tp: int = 1
    cp: int = 1
    few: int = 3
    many: int = 7

    @property
    def size(self):
        return self.pp * self.dp * self.tp * self.cp

    def words(self, folder, stage, count):
        """Of ``prism run``, before the script and behind it."""
        ours = ["--prism-tier", "meta", "--prism-world-size", self.size, "--prism-ranks",
                stage * (self.size // self.pp), "--prism-capture", folder]  # fmt: skip
        job = [*BASE, *self.flags.split(), "--global-batch-size", count * self.dp]
        for flag, size in (("pipeline", self.pp), ("tensor", self.tp)):
            job += [f"--{flag}-model-parallel-size", size]
        job += ["--context-parallel-size", self.cp]
        if self.vpp > 1:
            job += ["--num-virtual-stages-per-pipeline-rank", self.vpp]
        return ours, job


def draw(seed):
    """A random composition that Megatron accepts."""
    rng = random.Random(seed)
    pp = rng.choice((1, 2, 2, 4))
    vpp = rng.choice((1, 1, 2)) if pp > 1 else 1
    tp, cp = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    parts = [LATE, rng.choice(("", GATHER))] if rng.random() < 0.7 else []
    layers = pp * vpp * rng.choice((1, 2))
    experts = rng.random() < 0.3
    if experts:
        parts.append(f"{MOE} --expert-model-parallel-size {rng.choice((1, 2))}")
    if tp > 1:
        parts.append("--sequence-parallel")
    if rng.random() < 0.3:
        recipe = rng.choice(("delayed", "tensorwise"))
        parts.append(f"--fp8-format hybrid --fp8-recipe {recipe}")
    if rng.random() < 0.3:
        parts.append(FULL if rng.random() < 0.5 else SOME)
    if rng.random() < 0.25:
        parts.append("--mtp-num-layers 1")
    elif pp > 1 and rng.random() < 0.3:
        parts.append(f"--untie-embeddings-and-output-weights {DEFER}")
    if pp == 4 and vpp == 1 and rng.random() < 0.5:
        layers, parts = 2 * pp - 2, [*parts, UNEVEN]
    parts.append(f"--num-layers {layers}")
    few = 3 * pp if vpp > 1 else pp + rng.choice((2, 3))
    many = few + (pp * rng.choice((1, 2)) if vpp > 1 else rng.choice((1, 3, 5)))
    return Composition(" ".join(filter(None, parts)), pp, vpp, 2, tp, cp, few, many)


def captured(jobs, folder, script):
    """(slices of few, of many microbatches) of every job; a log for one that Megatron refuses."""
    runs = [(i, count, stage) for i, job in enumerate(jobs) for count in (job.few, job.many)
            for stage in range(job.pp)]  # fmt: skip
    commands = []
    for i, count, stage in runs:
        ours, job = jobs[i].words(folder / f"{i}-{count}", stage, count)
        commands.append([*ours, "--", script, *job])
    failed = {}
    for (i, _, _), (status, said) in zip(runs, stock_jobs.run(commands), strict=True):
        if status:
            failed[i] = said
    return [failed.get(i) or tuple(open_programs(folder / f"{i}-{count}")
                                   for count in (job.few, job.many))
            for i, job in enumerate(jobs)]  # fmt: skip


def unlike(few, many):
    """Of programs that follow from ``few`` and those captured, what differs, a line each: ops, in
    all but what the mean of the losses at the end reads; the peak by more than 0.1 %."""
    count = 1 + max(int(p.ops["microbatch"].max(initial=-1)) for p in many.programs)
    made, found = with_microbatches(few, count), []
    for mine, real in zip(made.programs, many.programs, strict=True):
        found += [f"rank {real.rank}: {line}" for line in _unlike_ops(mine, real)]
        tops = [int(one.live_bytes().max(initial=0)) for one in (mine, real)]
        if abs(tops[0] - tops[1]) > 1e-3 * tops[1]:
            found.append(f"rank {real.rank}: a peak of {tops[0]:,} bytes for {tops[1]:,}")
    return found


def _unlike_ops(mine, real):
    if len(mine) != len(real):
        return [f"{len(mine)} ops for {len(real)}"]
    ops, others = mine.ops, real.ops
    behind = 1 + max((i for i, op in enumerate(real) if op.microbatch >= 0), default=-1)
    found = []
    for name in OP.names:
        a, b = ops[name], others[name]
        if name == "note":
            continue
        if name in TEXTS:
            a, b = ([p.strings[i] for i in col] for p, col in ((mine, a), (real, b)))
        elif name == "splits":
            a, b = ([p.splits[i] if i >= 0 else None for i in col]
                    for p, col in ((mine, a), (real, b)))  # fmt: skip
        at = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        if name == "traffic":
            at = [i for i in at if i < behind or abs(int(a[i]) - int(b[i])) > 64 * len(ops)]
        if at:
            i = at[0]
            found.append(f"{len(at)} ops differ in {name}, op {i} {real[i].name} {real[i].label}: "
                         f"{a[i]} for {b[i]}")  # fmt: skip
    return found
