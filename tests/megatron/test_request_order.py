"""Tier meta asks for memory in the order of a real process, request by request.

The processes ran on an H100 with the compiled Transformer Engine (benchmarks/results/snapshots).
A sum of live bytes alone hides a buffer that is made twice.  Needs megatron.training (0.19).
"""

import json
from pathlib import Path

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.core.programs.program import load
from megatron_prism.features.fit import oom
from megatron_prism.features.snapshots import snapshot
from megatron_prism.memory import peaks
from megatron_prism.memory.allocator import replay_requests

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

REAL = Path(__file__).parents[2] / "benchmarks" / "results" / "snapshots"
INDEX = json.loads((REAL / "index.json").read_text())
JOBS = ("one_recompute", "one_moe", "one_fp8", "one_fp8_blockwise", "one_graphs",
        "one_offload")  # fmt: skip


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """job -> (status, output), and where their slices are."""
    place = tmp_path_factory.mktemp("place")
    own = "--prism-emulate --prism-world-size 1 --prism-tier meta --num-workers 0"
    words = {}
    for name in JOBS:
        flags = INDEX["snapshots"][f"{name}-rank0.pickle.xz"]["arguments"]
        words[name] = [*f"{INDEX['common']} {flags} {own}".split(), "--prism-capture", place / name]
    return stock_jobs.named(stock_jobs.TINY, words), place


# a slice's job captures its graphs after one iteration, the real one after three
@pytest.mark.parametrize("name", [name for name in JOBS if name != "one_graphs"])
def test_large_requests_come_in_the_order_of_the_gpus(name, captured):
    answers, place = captured
    status, said = answers[name]
    assert status == 0, said[-3000:]
    programs = load(place / name / "slice-000000.prism")
    found = snapshot.compare(snapshot.read(REAL / f"{name}-rank0.pickle.xz"), programs)
    assert (found.aligned, found.only_real, found.only_emulated) == (found.asked, (), ())
    assert found.asked > 6 << 30


@pytest.mark.parametrize("name", JOBS)
def test_an_error_s_text_alone_names_the_request(name, captured):
    """Of the real requests on smaller devices: the line and the phase of the slices are the same.

    Microbatches are alike, so the text does not say which."""
    programs = load(captured[1] / name / "slice-000000.prism")
    real = snapshot.read(REAL / f"{name}-rank0.pickle.xz")
    born = {storage: event for event, (_, storage, size, _) in
            enumerate(real.program.allocations.tolist()) if size > 0}  # fmt: skip
    # below, an MoE runs out where sizes follow its routing, which the text does not say
    limits = (real.modelled * share // 100 for share in (99, 97, 95, 92, 89))
    ends = [replay_requests(real.requests, real.settings, limit).full for limit in limits]
    for full in filter(None, ends):
        event = born[real.requests[full.event][0]]
        at, site = peaks.op_at(real.program, event), peaks.site_of(real.program, event)
        sizes = real.settings.segment(full.size), full.allocated, full.reserved - full.allocated
        asked, used, cached = (
            f"{n / 2**30:.2f} GiB" if n > 1 << 30 else f"{n / 2**20:.2f} MiB" for n in sizes
        )
        text = (f"Tried to allocate {asked}. Of the allocated memory {used} is allocated by "
                f"PyTorch, and {cached} is reserved by PyTorch but unallocated.")  # fmt: skip
        best = oom.candidates(programs.programs, oom.parse(text))[0]
        assert (best.op.phase, best.first) == (real.program[at].phase, real.iterations[at] == 1)
        assert site in (best.site, "")
    assert any(ends)
