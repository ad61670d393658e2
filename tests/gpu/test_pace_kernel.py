"""The pacing kernels on a real GPU: ends equal the table's, streams are held until then."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prism.replay.release import Releases
from megatron_prism.virtual.pacing import Call, Pacer
from megatron_prism.virtual.work import Done

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ITERATIONS = 4


def table_of(seed, count=40):
    """Random terms, each to an earlier interaction or into the last iteration."""
    rng = np.random.default_rng(seed)
    start, cause, back, weight = [0], [], [], []
    for j in range(count):
        for _ in range(int(rng.integers(0, 5))):
            earlier = j > 0 and rng.random() < 0.8
            cause.append(int(rng.integers(0, j if earlier else count)))
            back.append(0 if earlier else 1)
            weight.append(int(rng.integers(0, 200_000)))
        start.append(len(cause))
    return Releases(
        (0,),
        np.zeros(count, np.int32),
        np.arange(count, dtype=np.int32),
        np.arange(count, dtype=np.int32),
        rng.integers(1_000, 60_000, count),
        0,
        np.array(start),
        np.array(cause, np.int32),
        np.array(back, np.int32),
        np.array(weight, np.int64),
    )


@pytest.mark.parametrize("seed", range(3))
def test_ends_are_those_of_the_table(seed):
    from megatron_prism.virtual.pace_kernel import RING, Launcher

    table = table_of(seed)
    launches = [[2 * i, 2 * i + 1] for i in range(len(table) // 2)]
    device = torch.device("cuda", torch.cuda.current_device())
    launcher = Launcher(table, launches, device)
    size = [torch.zeros(1 << 18, device=device), torch.zeros(1 << 10, device=device)]
    calls = [
        Call("all_reduce", "TP", i, 1 + 4 * (i % 3), large=i % 2 == 0) for i in range(len(launches))
    ]
    pacer, group = Pacer(calls, launcher, device), SimpleNamespace(desc="TP")
    answer = lambda group, tensors, opts: Done(tensors)  # noqa: E731
    for _ in range(ITERATIONS):
        pacer.begin()
        for i in range(len(calls)):
            opts = SimpleNamespace(asyncOp=i % 4 == 3)
            work = pacer.record(group, "all_reduce", answer, ([size[i % 2]], opts), {})
            work.wait()
    pacer.end()
    torch.cuda.synchronize()
    stamps = launcher.stamps()
    assert stamps["stuck"][0] == 0
    assert pacer.tally.paced == ITERATIONS
    before = []
    for iteration in range(ITERATIONS):
        slot = iteration % RING
        assert (stamps["tag"][slot] == iteration + 1).all()
        arrivals = np.repeat(stamps["came"][slot], 2)
        ends = table.ends(arrivals, before)
        assert np.array_equal(stamps["end"][slot], ends)
        # the next call on the stream comes after the end, and soon
        gaps = stamps["came"][slot][1:] - np.maximum.reduceat(ends, range(0, len(ends), 2))[:-1]
        assert gaps.min() >= 0
        before.insert(0, ends)
    assert np.median(gaps) < 100_000
