"""Tiny stock jobs that combine what changes first, steady and last microbatches.

Each is captured with two numbers of microbatches: what one says of the other must be the other.
"""

import random
from dataclasses import dataclass

from helpers import stock_jobs

from megatron_prism.core.programs.ops import OP, TEXTS
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.emulate.schedule import with_microbatches

BASE = """
--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 1 --train-iters 3 --exit-interval 3 --lr 1e-3 --mock-data --vocab-size 1000
--tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 1000 --log-interval 1
--num-workers 0 --disable-bias-linear --position-embedding-type rope --no-rope-fusion
--use-distributed-optimizer --transformer-impl transformer_engine
""".split()
LATE = "--overlap-grad-reduce --ddp-bucket-size 20000"
GATHER = "--overlap-param-gather"
FSDP = f"--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce {GATHER}"
MOE = "--num-experts 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
COMBINED = "--overlap-moe-expert-parallel-comm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SOME = "--recompute-granularity selective --recompute-modules core_attn"
DEFER = "--untie-embeddings-and-output-weights --defer-embedding-wgrad-compute"
UNEVEN = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
THEMES = "any", "fsdp", "combined", "fp8 full vpp", "fp16", "uneven", "defer", "mtp cp"


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

    @property
    def ranks(self):
        """One of every stage; with MTP one of every place in its ring, too."""
        ring = self.cp if "--mtp-num-layers" in self.flags else 1
        first = range(0, self.size, self.size // self.pp)
        return [*first, *(first[-1] + place * self.tp for place in range(1, ring))]

    def words(self, folder, rank, count):
        """Of ``prism run``, before the script and behind it."""
        ours = ["--prism-tier", "meta", "--prism-world-size", self.size, "--prism-ranks", rank,
                "--prism-capture", folder]  # fmt: skip
        job = [*BASE, *self.flags.split(), "--global-batch-size", count * self.dp]
        job += [] if "--fp16" in self.flags else ["--bf16"]
        for flag, size in (("pipeline", self.pp), ("tensor", self.tp)):
            job += [f"--{flag}-model-parallel-size", size]
        job += ["--context-parallel-size", self.cp]
        if self.vpp > 1:
            job += ["--num-virtual-stages-per-pipeline-rank", self.vpp]
        return ours, job


def draw(seed):
    """A random composition that Megatron accepts; every eighth has the same theme."""
    rng, theme = random.Random(seed), THEMES[seed % len(THEMES)]
    pp = rng.choice(_STAGES.get(theme, (1, 2, 2, 4)))
    late = pp > 1 and rng.random() < 0.4
    vpp = 2 if pp > 1 and (late or theme in ("combined", "fp8 full vpp")) else 1
    tp, cp = rng.choice(((1, 2), (1, 2), (2, 2)) if theme == "mtp cp" else _SPLITS)
    layers = pp * vpp * rng.choice((1, 2) if pp < 4 else (1,))
    parts = ["--sequence-parallel"] if tp > 1 else []
    if theme == "fsdp":
        sharded = rng.choice(("optim_grads_params", "optim_grads_params", "optim_grads", "optim"))
        parts.append(f"{FSDP} --data-parallel-sharding-strategy {sharded}")
    elif rng.random() < 0.7:
        parts += [LATE, rng.choice(("", GATHER))]
    if theme == "combined" or rng.random() < 0.3:
        parts.append(f"{MOE} --expert-model-parallel-size")
        parts.append("2" if theme == "combined" else rng.choice("12"))
    if theme == "combined":
        parts.append(rng.choice((COMBINED, f"{COMBINED} --delay-wgrad-compute")))
    if theme == "fp8 full vpp" or rng.random() < 0.25:
        recipe = rng.choice(("delayed", "tensorwise"))
        parts.append(f"--fp8-format hybrid --fp8-recipe {recipe}")
    elif theme == "fp16":
        parts.append(rng.choice(("--fp16", "--fp16 --initial-loss-scale 1024")))
    if theme == "fp8 full vpp" or (theme != "combined" and rng.random() < 0.2):
        parts.append(FULL)
    elif rng.random() < 0.15:
        parts.append(SOME)
    if theme == "mtp cp" or (theme != "defer" and rng.random() < 0.2):
        parts.append("--mtp-num-layers 1")
    elif pp > 1 and (theme == "defer" or rng.random() < 0.2):
        parts.append(f"{DEFER} --wgrad-deferral-limit {rng.choice('232')}")
    if theme == "uneven":
        vpp, layers, parts = 1, 2 * pp - 2, [*parts, UNEVEN]
    parts.append(f"--num-layers {layers}")
    few = 3 * pp if vpp > 1 else pp + rng.choice((2, 3))
    many = few + (pp * rng.choice((1, 2)) if vpp > 1 else rng.choice((1, 3, 5)))
    return Composition(" ".join(filter(None, parts)), pp, vpp, 2, tp, cp, few, many)


_STAGES = {"fsdp": (1,), "combined": (1, 2, 2), "uneven": (4,), "defer": (2, 2, 4),
           "fp8 full vpp": (2, 2, 4)}  # fmt: skip
_SPLITS = (1, 1), (1, 1), (2, 1), (1, 2)


def captured(jobs, folder, script):
    """(slices of few, of many microbatches) of every job; a log for one that Megatron refuses."""
    runs = [(i, count, rank) for i, job in enumerate(jobs) for count in (job.few, job.many)
            for rank in job.ranks]  # fmt: skip
    commands = []
    for i, count, rank in runs:
        ours, job = jobs[i].words(folder / f"{i}-{count}", rank, count)
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
        if name in ("note", "host", "lead"):  # a host takes another time each time
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
