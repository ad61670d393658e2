"""Mixed lengths are, call by call, what eight real processes with these lengths ask gloo for."""

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
from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.ci]

from helpers import forks  # noqa: E402

HELPER = Path(__file__).parents[2] / "helpers" / "unequal_lengths.py"
BASE = """
    world_size=8 data_path=null train_iters=2 micro_batch_size=1
    num_layers=2 hidden_size=32 ffn_hidden_size=64 num_attention_heads=4
    vocab_size=100 prism.tier=cpu moe_token_dispatcher_type=alltoall
""".split()
JOBS = {
    "tp2 pp2 dp2": ("tp=2 pp=2 variable_seq_lengths=true global_batch_size=8",
                    {0: (16, 16, 16, 16), 1: (16, 8, 16, 4)}),
    "pp4 dp2": ("pp=4 num_layers=4 variable_seq_lengths=true global_batch_size=12",
                {0: (4, 8, 16, 4, 8, 16), 1: (16, 16, 4, 4, 8, 8)}),
    "pp2 vpp2 dp4": ("pp=2 vpp=2 num_layers=4 variable_seq_lengths=true global_batch_size=16",
                     {0: (16, 8, 4, 16), 1: (4, 8, 16, 8), 2: (8, 8, 16, 4), 3: (16, 16, 4, 4)}),
    "pp4 vpp2 dp2": ("pp=4 vpp=2 num_layers=8 variable_seq_lengths=true global_batch_size=16",
                     {0: (4, 8, 16, 4, 8, 16, 4, 16), 1: (16, 16, 4, 4, 8, 8, 16, 8)}),
    "dp8 ep4, experts": ("ep=4 num_experts=4 global_batch_size=16",
                         {rank: ((16, 8), (8, 4), (4, 16))[rank % 3] for rank in range(8)}),
}  # fmt: skip
LENGTHS = (16, 8, 4)
DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
TOKENS = "EXPERT_MODEL_PARALLEL_GROUP"  # its sizes follow what the router chose


def recipe_of(words, length):
    return recipes.load("tiny-gpt_1cpu", [*BASE, f"seq_length={length}", *words.split()])


@pytest.fixture(scope="module")
def real():
    """name -> what each of the eight ranks asked for."""
    jobs = [(recipe_of(words, 16), lengths) for words, lengths in JOBS.values()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HELPER)],
        input=pickle.dumps(jobs),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return dict(zip(JOBS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """name -> captures of the stages at every length."""
    jobs, folders = [], {}
    for name, (words, _) in JOBS.items():
        for length in LENGTHS:
            recipe = recipe_of(words, length)
            folder = tmp_path_factory.mktemp("slices")
            folders[name, length] = folder
            stages = [recipe.world.rank_at(pp=stage) for stage in recipe.world.stages]
            jobs += [(recipe, rank, folder) for rank in stages]
    for answer in forks.capture(jobs, "cpu").values():
        assert "error" not in answer, answer["error"]
    opened = {}
    for name in JOBS:
        base, *others = [slices.assemble(folders[name, length]) for length in LENGTHS]
        opened[name] = LengthCaptures(base, others)
    return opened


def calls_of(program, rank, world):
    """The communication of a program in the words of the real run's log."""
    for op in program:
        if op.name not in BY_NAME:
            continue
        group = of_family(world, op.group).group(rank).tolist()
        peer = None
        if op.name in ("send", "recv"):
            peer = group[(group.index(rank) + op.peer) % len(group)]
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
        }


def without_routing(calls):
    """Calls without what depends on values: how many tokens go to which expert."""
    kept = []
    for call in calls:
        call = {key: value for key, value in call.items() if key != "async"}
        if call["group"] == TOKENS:
            call["in"] = call["out"] = None
        kept.append(call)
    return kept


@pytest.mark.parametrize("name", JOBS)
def test_real_processes_with_these_lengths_make_the_same_calls(real, captured, name):
    captures, lengths = captured[name], JOBS[name][1]
    world = captures.captured.world
    sizes = set()
    for rank, answer in enumerate(real[name]):
        assert "error" not in answer, answer["error"]
        mixed = captures.programs_of(lengths[world.coordinates(rank).dp])
        ours = without_routing(calls_of(mixed.of(rank), rank, world))
        theirs = without_routing(answer["summary"]["calls"])
        assert len(theirs) > 15
        for number, (our_call, their_call) in enumerate(zip(ours, theirs, strict=False)):
            assert our_call == their_call, f"rank {rank}, call {number}"
        assert len(ours) == len(theirs)
        sizes |= {call["in"] for call in theirs}
    assert len(sizes) > 5  # lengths did differ


@pytest.mark.parametrize("name", JOBS)
def test_the_real_processes_trained(real, name):
    assert all(answer["summary"]["moved"] for answer in real[name])
