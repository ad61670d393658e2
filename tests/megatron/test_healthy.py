"""A healthy job checks clean: every kind of configuration that Megatron trains, captured on shapes
and joined, has no mismatch; and its programs do the work that arithmetic says."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import forks
from helpers.healthy_jobs import EVERY, LINES, PLAIN, RECIPES, names_with_new_settings
from helpers.one_answer import assert_one_answer

from megatron_prism.core.programs import slices
from megatron_prism.emulate.jobs import recipe_job
from megatron_prism.graph import world_graph
from megatron_prism.replay.priced_graph import price

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.ci, pytest.mark.every_release]


PP = "PIPELINE_MODEL_PARALLEL_GROUP"
PARAMETERS = {}  # (name, rank) -> parameters that Megatron built there


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """name -> folder of slices, or what went wrong."""
    jobs, names, folders = [], [], {}
    for name, recipe in RECIPES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        for rank in recipe_job.ranks_of(recipe):
            jobs.append((recipe, rank, folders[name]))
            names.append(name)
    for index, answer in forks.capture(jobs).items():
        if "error" in answer:
            folders[names[index]] = answer["error"]
        else:
            PARAMETERS[names[index], jobs[index][1]] = answer["summary"]["parameters"]
    return folders


def world_of(worlds, name):
    found = worlds[name]
    assert isinstance(found, Path), found
    return world_graph.build(slices.assemble(found))


def test_there_are_enough_configurations():
    assert len(EVERY) >= 40
    with_new_settings = names_with_new_settings(LINES)
    assert "tp2" in with_new_settings
    assert "pp4" not in with_new_settings  # pp2 sets pp before it
    settings = {word for line in LINES for word in line.partition(": ")[2].split()}
    kept = [line for line in LINES if line.partition(":")[0] in with_new_settings]
    kept_settings = {word for line in kept for word in line.partition(": ")[2].split()}
    sizes = re.compile(r"(world|m|layers|micro_batch_size|tp|cp|ep|pp|vpp)=")
    assert {word for word in settings - kept_settings if not sizes.match(word)} == set()


@pytest.mark.parametrize("name", RECIPES)
def test_a_healthy_world_is_clean(worlds, name):
    made = world_of(worlds, name)
    assert [str(finding) for finding in made.check()] == []
    assert len(made.classes) <= RECIPES[name].world.pp


@pytest.mark.parametrize("name", RECIPES)
def test_a_prediction_without_variation_is_the_replay(worlds, name):
    assert_one_answer(price(slices.assemble(worlds[name]), machine="h200"))


def flops_of(recipe):
    """Forward and backward of every matrix product: 6 per weight and token, and causal flash
    attention's 2 s h forward and 5 s h backward per token and layer."""
    m = recipe
    h, tokens = m.hidden_size, recipe.global_batch_size * m.seq_length
    layer = 2 * h * h + 2 * h * recipe.groups * recipe.head_size
    gated = 3 if m.swiglu else 2
    if m.num_experts:
        layer += m.moe_router_topk * gated * h * m.moe_ffn_hidden_size + h * m.num_experts
        layer += gated * h * (m.moe_shared_expert_intermediate_size or 0)
    else:
        layer += gated * h * m.ffn_hidden_size
    weights = m.num_layers * layer + recipe.padded_vocab_size * h
    # fused kernels do half of the square, backward one product more; local layers and, in fp32,
    # Transformer Engine have unfused attention alone, which does all of it
    attention = 7 if recipe.bf16 and recipe.transformer_impl != "local" else 12
    return 6 * tokens * weights + attention * tokens * m.num_layers * m.seq_length * h


@pytest.mark.parametrize("name", PLAIN)
def test_all_ranks_together_do_the_flops_of_the_model(worlds, name):
    """However the model is split: nothing is done twice, nothing is left out."""
    made = world_of(worlds, name)
    pairs = zip(made.program_list, made.classes.counts, strict=True)
    done = sum(int(p.ops["flops"].clip(0).sum()) * count for p, count in pairs)
    assert done == flops_of(RECIPES[name])


@pytest.mark.parametrize("name", [n for n in RECIPES if RECIPES[n].world.pp > 1])
def test_every_chunk_boundary_is_crossed_both_ways(worlds, name):
    recipe, made = RECIPES[name], world_of(worlds, name)
    chunks, stages = recipe.world.vpp or 1, recipe.world.pp
    for program in made.programs.programs:
        stage = recipe.world.coordinates(program.rank).pp
        crossings = recipe.num_microbatches * (2 * chunks - (stage in (0, stages - 1)))
        # with two stages one way goes through the world's group (p2p_communication.py:72 @0.16.1)
        pairs = [op for op in program if op.name in ("send", "recv")]
        pairs = [op for op in pairs if op.group != "CONTEXT_PARALLEL_GROUP"]
        for name in ("send", "recv"):
            assert len([op for op in pairs if op.name == name]) == crossings
        for op in pairs:
            assert op.group in (PP, "default_pg")
            away = abs(op.peer)
            assert away == 1 if op.group == PP else away * stages == recipe.world.size


@pytest.mark.parametrize("name", [n for n in RECIPES if RECIPES[n].world.dp > 1])
def test_every_gradient_is_reduced_once(worlds, name):
    recipe, made = RECIPES[name], world_of(worlds, name)
    for program in made.programs.programs:
        reduced = sum(
            op.num_in
            for op in program
            if op.name in ("all_reduce", "reduce_scatter") and "DATA_PARALLEL" in op.group
            and op.num_in > 1
        )  # fmt: skip
        parameters = PARAMETERS[name, program.rank]
        if recipe.use_distributed_optimizer:  # its buckets are padded
            assert parameters <= reduced <= parameters * 1.1 + 100_000
        else:
            assert reduced == parameters


# cuBLAS workspaces on Hopper: Transformer Engine's own and four of its grouped GEMM, and two of
# torch's own products (main thread, autograd)
WORKSPACES = 7 * 32 << 20


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_allocated_in_an_iteration_is_freed(worlds, name):
    """But for what the first iteration leaves behind: optimizer states and a workspace."""
    for program in world_of(worlds, name).programs.programs:
        live, before = program.live_bytes(), program.allocations["before"]
        assert live.min() >= 0
        start = program.allocations["bytes"][before == 0].sum()
        assert live[-1] <= start + 12 * PARAMETERS[name, program.rank] + WORKSPACES + (1 << 18)
        left = np.zeros(program.allocations["storage"].max() + 1, dtype=np.int64)
        np.add.at(left, program.allocations["storage"], program.allocations["bytes"])
        assert left.min() >= 0
