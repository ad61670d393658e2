"""Tier cpu: what a job of one rank starts from, and what the ranks of other layouts do."""

from pathlib import Path

import pytest
import torch
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.emulate.patches import initial_parameters

pytestmark = [pytest.mark.megatron, pytest.mark.slow, TRAINING]
SCRIPT = Path(stock_jobs.__file__).with_name("initial_parameters.py")
JOB = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-3 --mock-data --vocab-size 1000
--eval-iters 0 --eval-interval 1000 --num-workers 0 --save-interval 1000
"""
DENSE = "--fp16"  # learned positions, tied embeddings
EXPERTS = """--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --bf16
--untie-embeddings-and-output-weights --position-embedding-type rope --num-query-groups 2"""
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
LAYOUTS = {
    DENSE: {
        f"{TP} 2 {PP} 2": 4,
        f"{TP} 4": 4,
        f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1": 2,
        "--context-parallel-size 2 --use-distributed-optimizer": 4,
    },
    EXPERTS: {f"{TP} 2 --sequence-parallel --expert-tensor-parallel-size 1 {EP} 2": 2},
    f"{EXPERTS} --moe-grouped-gemm": {f"{PP} 2 {EP} 2": 4, f"{TP} 2 --sequence-parallel {EP} 2": 4},
}
BY_NAME = "--use-cpu-initialization"
CASES = [(model, layout, world) for model, layouts in LAYOUTS.items()
         for layout, world in layouts.items()]  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(flags, ranks of the world) of several jobs -> the parameters of each one's ranks."""
    place, known = tmp_path_factory.mktemp("parameters"), {}

    def of(*jobs):
        wanted = [(flags, world, rank) for flags, world in jobs for rank in range(world)
                  if (flags, world) not in known]  # fmt: skip
        lines = [
            ["--prism-tier", "cpu", "--prism-world-size", world, "--prism-ranks", rank, "--",
             SCRIPT, *JOB.split(), *flags.split(), "--save", place / f"{len(known)}.{number}"]
            for number, (flags, world, rank) in enumerate(wanted)
        ]  # fmt: skip
        said = stock_jobs.run(lines) if lines else []
        for (flags, world, _), line, answer in zip(wanted, lines, said, strict=True):
            assert line[-1].exists(), answer
            known.setdefault((flags, world), []).append(torch.load(line[-1]))
        return [known[job] for job in jobs]

    return of


def whole(name, ranks):
    """The parameter that the ranks hold together; rows of the vocabulary's padding left out."""
    parts, dim, gated = [], None, False
    for rank in ranks:
        if name in rank:
            values, dim, gated = rank[name]
            if not any(torch.equal(values, part) for part in parts):
                parts.append(values)
    if dim is None:
        (one,) = parts
        return one
    if gated:
        parts = [half for pair in zip(*(p.chunk(2, dim) for p in parts), strict=True)
                 for half in pair]  # fmt: skip
    rows = 1000 if "embeddings" in name or "output_layer" in name else None
    return torch.cat(parts, dim)[:rows]


@pytest.mark.parametrize(("model", "layout", "world"), CASES)
def test_a_layout_starts_from_the_shards_of_one_rank(model, layout, world, started):
    (one,), ranks = started(
        (f"{model} {BY_NAME}", 1), (f"{model} {BY_NAME} --no-warm-up {layout}", world)
    )
    assert set().union(*ranks) - set(one) <= {"output_layer.weight"}  # the last stage's, if tied
    for name in one:
        expected = whole(name, [one])
        if not torch.equal(expected, expected.reshape(-1)[0].expand_as(expected)):
            assert torch.equal(whole(name, ranks), expected), name
    if tied := [rank["output_layer.weight"][0] for rank in ranks if "output_layer.weight" in rank]:
        first = [rank["embedding.word_embeddings.weight"][0] for rank in ranks
                 if "embedding.word_embeddings.weight" in rank]  # fmt: skip
        assert model != DENSE or all(any(torch.equal(a, b) for b in first) for a in tied)


def test_nothing_but_megatrons_seeds_tells_layouts_apart(started):
    """Without the flag: data and context parallel ranks start alike, with and without the warm-up,
    and so does what tp ranks hold twice; their shards differ by their seeds, as on GPUs."""
    ((one,), (bare,), cp, dp, tp) = started(
        (DENSE, 1), (f"{DENSE} --no-warm-up", 1), (f"{DENSE} --context-parallel-size 2", 2),
        (DENSE, 2), (f"{DENSE} {TP} 2", 2),
    )  # fmt: skip
    for name, (values, dim, _) in one.items():
        for rank in (bare, *cp, *dp, *(tp if dim is None else ())):
            assert torch.equal(rank[name][0], values), name
    shards = [rank["decoder.layers.0.mlp.linear_fc2.weight"][0] for rank in tp]
    assert not torch.equal(*shards)


def test_parameters_that_are_made_of_drawn_numbers_are_drawn_whole():
    """As Mamba's and the gated delta net's decay and steps are."""

    def log_of_drawn(n):
        return torch.log(torch.empty(n).uniform_(1, 16))

    def steps(n):
        dt = torch.exp(torch.rand(n) * 2 - 1).clamp(min=0.5)
        return dt + torch.log(-torch.expm1(-dt))

    with initial_parameters._Fills() as fills:
        made = [(one, torch.nn.Parameter(one(4))) for one in (log_of_drawn, steps)]
        copied = torch.nn.Parameter(torch.empty(4))
        copied.data.copy_(log_of_drawn(4))
    for make, parameter in [*made, (log_of_drawn, copied)]:
        torch.manual_seed(5)
        whole = initial_parameters._filled(torch.empty(8), *fills.of(parameter))
        torch.manual_seed(5)
        assert torch.equal(whole, make(8))
