"""Tier meta asks for memory in the order of a real process, request by request.

The processes ran on an H100 with the compiled Transformer Engine (benchmarks/results/snapshots).
A sum of live bytes alone hides a buffer that is made twice.  Needs megatron.training (0.19).
"""

import json
from pathlib import Path

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.core.program import load
from megatron_prism.memory import snapshot

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


@pytest.mark.parametrize("name", JOBS)
def test_large_requests_come_in_the_order_of_the_gpus(name, captured):
    answers, place = captured
    status, said = answers[name]
    assert status == 0, said[-3000:]
    (program,) = load(place / name / "slice-000000.prism").programs
    found = snapshot.compare(snapshot.read(REAL / f"{name}-rank0.pickle.xz"), program)
    assert (found.aligned, found.only_real, found.only_emulated) == (found.asked, (), ())
    assert found.asked > 6 << 30
