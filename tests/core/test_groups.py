"""Parts of Megatron's groups, as Megatron itself makes them for every rank."""

import pytest

from megatron_prism.core.groups import subgroups
from megatron_prism.core.world import World

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron


def made(monkeypatch, size, rank, **sizes):
    """description -> all groups that Megatron asks for, in its order."""
    from megatron.core import parallel_state

    found = {}

    def create_group(ranks=None, *args, group_desc=None, **kwargs):
        found.setdefault(group_desc, []).append(tuple(sorted(map(int, ranks))))  # as torch does
        return object()

    monkeypatch.setattr(parallel_state, "create_group", create_group)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: rank)
    state = {
        k: v for k, v in vars(parallel_state).items() if k.startswith("_") and k[1:2].isupper()
    }
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    finally:
        vars(parallel_state).update(state)
    return found


@pytest.mark.parametrize(
    ("world", "more", "cut"),
    [
        (World(16), {"num_distributed_optimizer_instances": 4}, 4),
        (World(64, tp=2, pp=2, cp=2, ep=2), {"num_distributed_optimizer_instances": 2}, 4),
        (World(64, tp=2, cp=8), {"hierarchical_context_parallel_sizes": [2, 4]}, 2),
        # a tied embedding, and MTP layers in the last stage but one
        (World(32, tp=2, pp=8), {"get_embedding_ranks": lambda pp: [pp[0], pp[-2], pp[-1]]}, 1),
        (World(16, pp=4), {"get_embedding_ranks": lambda pp: [pp[0], pp[2]]}, 1),  # untied
    ],
    ids=["instances", "instances of experts", "hierarchical", "embedding and MTP", "untied"],
)
def test_one_group_tells_all(world, more, cut, monkeypatch):
    sizes = {
        "tensor_model_parallel_size": world.tp,
        "pipeline_model_parallel_size": world.pp,
        "context_parallel_size": world.cp,
        "expert_model_parallel_size": world.ep,
    }
    theirs = made(monkeypatch, world.size, 0, **sizes, **more)
    known = 0
    for name, groups in theirs.items():
        for own in (groups[0], groups[-1]):
            found = subgroups(world, name, own)
            if found is not None:
                assert sorted(found) == sorted(groups), name
                known += 1
    assert known == 2 * cut


def test_nothing_is_guessed():
    world = World(16, cp=4)
    assert subgroups(world, "CONTEXT_PARALLEL_GROUP", (0, 1, 2, 3)) is None
    assert subgroups(world, "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0", (0, 3)) is None
    assert subgroups(world, "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0", (0, 5)) is None
    assert subgroups(world, "SOMEBODYS_OWN", (0, 5)) is None
    stages = World(16, pp=4)
    assert subgroups(stages, "EMBEDDING_GROUP", (0, 12)) is None  # as the sizes say
    assert subgroups(stages, "EMBEDDING_GROUP", (0, 5)) is None  # of two pipelines
