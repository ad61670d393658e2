"""``microbatches=N`` of a capture is the capture of N microbatches, op by op.

Forty drawn jobs: ``python -m benchmarks.accuracy.microbatches SCRIPT``.
"""

import pytest
from helpers import compositions
from helpers.compositions import DEFER, GATHER, LATE, MOE, Composition
from helpers.needs import TRAINING
from helpers.pretrain import SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

JOBS = {
    "buckets without a pipeline": Composition(f"--num-layers 2 {LATE}", dp=4),
    "interleaved on two stages": Composition(
        f"--num-layers 4 {LATE} {GATHER}", pp=2, vpp=2, few=6, many=10
    ),
    "experts, deferred embedding": Composition(
        f"--num-layers 2 {MOE} {DEFER} --wgrad-deferral-limit 2", pp=2, few=4
    ),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    found = compositions.captured([*JOBS.values()], tmp_path_factory.mktemp("pairs"), SCRIPT)
    return dict(zip(JOBS, found, strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_what_follows_is_what_is_captured(name, pairs):
    assert isinstance(pairs[name], tuple), pairs[name][-3000:]
    few, many = pairs[name]
    assert few.world.vpp == (JOBS[name].vpp if JOBS[name].vpp > 1 else None)
    assert compositions.unlike(few, many) == []
    assert compositions.unlike(many, few) == []
