"""What a stage receives where MTP layers have a stage of their own: as long as what its peer sends.

The oracle is the order of Megatron's schedule and the layout: what a stage sends follows from the
layers it has, and the n-th message of one is the n-th of the other.
"""

import sys
from types import SimpleNamespace

import pytest
from helpers import patching

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

LAYERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


def communicator(layout, stages, stage, group=None):
    from megatron.core.transformer.enums import LayerType

    parts = [[LayerType[LAYERS[letter]] for letter in part] for part in layout.split("|")]
    table = [parts[stage::stages] for stage in range(stages)]
    mtp = layout.count("m")
    config = SimpleNamespace(
        pipeline_model_parallel_layout=SimpleNamespace(layout=table),
        microbatch_group_size_per_vp_stage=group or stages,
        mtp_num_layers=mtp,
    )
    return SimpleNamespace(config=config, pp_group=SimpleNamespace(rank=lambda: stage))


def lengths(*args, microbatches, **how):
    from megatron_prism.emulate.patches.pipeline import mtp_lengths

    return [list(side) for side in mtp_lengths(communicator(*args, **how), microbatches)]


@pytest.mark.parametrize("microbatches", [4, 6, 8, 11])
@pytest.mark.parametrize("layout", ["Ettt|tt|tt|tt|tt|tt|m|L", "Et|t|t|t|t|t|tmm|", "Et|t|mmm|L"])
def test_what_comes_is_what_the_peer_sends(layout, microbatches):
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    layout = layout.replace("m|", "m|L") if layout.endswith("|") else layout
    stages, places = 4, layout.split("|")
    chunks = len(places) // stages
    order = [chunk for _, chunk in get_schedule_table(microbatches, chunks, stages)]
    at = next(i for i, held in enumerate(places) if "m" in held)
    long = 1 + layout.count("m")
    for stage in range(stages):
        after, last = (stage + 1) % stages, len(places) - 1
        out = [c * stages + stage for c in order]
        sent = [long if place >= at else 1 for place in out if place < last]
        assert lengths(layout, stages, after, microbatches=microbatches)[0] == sent
        back = [(chunks - 1 - c) * stages + after for c in order]
        returned = [long if place - 1 >= at else 1 for place in back if place > 0]
        assert lengths(layout, stages, stage, microbatches=microbatches)[1] == returned


@pytest.mark.parametrize(
    ("local", "heads", "answer"), [((1,), True, True), ((1,), False, False), ((0, 1), True, False)]
)
def test_a_stage_without_mtp_layers_knows_of_their_norm(local, heads, answer, monkeypatch):
    """Where all ranks are local they have said it themselves."""
    import torch

    from megatron_prism.emulate.patch import PatchContext

    class Optimizer:
        def has_grad_norm_group(self, group):
            return False  # of the mirrored ranks

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    settings = SimpleNamespace(mtp_num_layers=1, mtp_detach_heads=heads)
    known = SimpleNamespace(_GLOBAL_ARGS=settings)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", known)
    context = PatchContext(lambda: None, None, False, local, local[0])
    module = SimpleNamespace(MegatronOptimizer=Optimizer, __name__=Optimizer.__module__)
    patching.apply("norm-of-mtp-heads", module, context)
    assert Optimizer().has_grad_norm_group("mtp") is answer
    known._GLOBAL_ARGS = None
    assert Optimizer().has_grad_norm_group("mtp") is False  # a recipe's job
    assert Optimizer().has_grad_norm_group("another") is False
