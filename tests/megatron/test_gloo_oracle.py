"""What one rank does alone in a virtual world is, call by call, what it does among eight real
processes over gloo: names, groups and their members, types, sizes, reductions, roots, peers, order.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_prism.core.groups import of_family
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.programs import slices
from megatron_prism.core.programs.collectives import BY_NAME as TALK

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.ci]

HERE = Path(__file__).parent
from helpers import forks  # noqa: E402

BASE = """
    world_size=8 data_path=null train_iters=2 micro_batch_size=1
    num_layers=4 hidden_size=32 ffn_hidden_size=64 num_attention_heads=4
    seq_length=16 vocab_size=100 prism.tier=cpu
""".split()
JOBS = {
    "tp2 pp2 dp2, distributed optimizer": """
        tp=2 pp=2 use_distributed_optimizer=true
        overlap_grad_reduce=true overlap_param_gather=true global_batch_size=8
        hidden_dropout=0.1
    """,
    "pp2 vpp2 dp4 ep2, experts": """
        pp=2 vpp=2 ep=2 global_batch_size=16
        num_experts=4 moe_expert_capacity_factor=1.0
        moe_pad_expert_input_to_capacity=true moe_aux_loss_coeff=0.01
    """,
    "tp2 cp2 pp2, sequence parallel": """
        tp=2 cp=2 pp=2 sequence_parallel=true
        transformer_impl=transformer_engine cp_comm_type=all_gather
        global_batch_size=2 num_layers=2
    """,
}
RECIPES = {name: recipes.load("tiny-gpt_1cpu", [*BASE, *words.split()])
           for name, words in JOBS.items()}  # fmt: skip
DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}


@pytest.fixture(scope="module")
def real():
    """name -> what each of the eight ranks asked for."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE.parent / "helpers" / "gloo_ranks.py")],
        input=pickle.dumps(list(RECIPES.values())),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return dict(zip(RECIPES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def virtual(tmp_path_factory):
    """name -> the eight ranks' programs, each captured alone."""
    jobs, folders = [], {}
    for name, recipe in RECIPES.items():
        folders[name] = tmp_path_factory.mktemp("slices")
        jobs += [(recipe, rank, folders[name]) for rank in range(recipe.world.size)]
    for answer in forks.capture(jobs, "cpu").values():
        assert "error" not in answer, answer["error"]
    return {name: slices.assemble(folder) for name, folder in folders.items()}


def calls_of(program, world):
    """The communication of a program in the words of the real run's log."""
    for op in program:
        if op.name not in TALK:
            continue
        group = of_family(world, op.group).group(program.rank).tolist()
        peer = None
        if op.name in ("send", "recv"):
            peer = group[(group.index(program.rank) + op.peer) % len(group)]
        yield {
            "name": op.name,
            "group": op.group,
            "ranks": group,
            "dtype": DTYPE.get(op.dtype, op.dtype),
            "in": op.num_in,
            "out": op.num_out,
            "reduce": op.reduce,
            "root": op.root,
            "peer": peer,
            "async": op.handle >= 0,
        }


@pytest.mark.parametrize("name", RECIPES)
def test_eight_real_processes_make_the_same_calls(real, virtual, name):
    world = RECIPES[name].world
    for rank, answer in enumerate(real[name]):
        assert "error" not in answer, answer["error"]
        asked, found = answer["summary"]["calls"], list(calls_of(virtual[name].of(rank), world))
        assert len(asked) > 20
        for number, (ours, theirs) in enumerate(zip(found, asked, strict=False)):
            assert ours == theirs, f"rank {rank}, call {number}"
        assert len(found) == len(asked)


@pytest.mark.parametrize("name", RECIPES)
def test_the_real_processes_trained(real, name):
    answers = [answer["summary"] for answer in real[name]]
    assert all(answer["moved"] for answer in answers)
    assert any(loss is not None for answer in answers for loss in answer["losses"])
