"""Parts of Megatron's groups, as Megatron itself makes them for every rank."""

import pytest
from helpers.megatron_groups import groups_of

from megatron_prism.core.groups import subgroups
from megatron_prism.core.world import World

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron


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
    theirs = groups_of(monkeypatch, world, create_gloo_process_groups=False, **more)
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
