"""Peak memory in FP8 on tier meta is that of one H200 with the real Transformer Engine.

Its figures are in benchmarks/results/h200_fp8_peaks.json; benchmarks/accuracy/job_peaks.py compares
all jobs with the stock script.  Needs megatron.training (0.19).
"""

import json
from pathlib import Path

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.core.programs.program import load
from megatron_prism.memory import job_peaks

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

ROOT = Path(__file__).parents[2]
REAL = json.loads((ROOT / "benchmarks/results/h200_fp8_peaks.json").read_text())
JOBS = (
    "delayed_recompute",
    "dp_delayed_param",
    "tensorwise_firstlast",
    "blockwise",
    "moe_tensorwise",
)
BOUND = 0.001  # of the peak: blocks that are not split, norms' workspaces, experts' own shares


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """job -> (status, output, bytes here)."""
    place = tmp_path_factory.mktemp("place")
    own = "--prism-emulate --prism-world-size 2 --prism-ranks 0 --prism-tier meta --num-workers 0 "
    own += "--train-iters 3 --global-batch-size 4"  # four of its eight microbatches: the same peak
    jobs = {name: f"{REAL['arguments']} {REAL['jobs'][name]['arguments']} {own}" for name in JOBS}
    words = {name: [*job.split(), "--prism-capture", place / name] for name, job in jobs.items()}
    return stock_jobs.named(stock_jobs.TINY, words), place


@pytest.mark.parametrize("name", JOBS)
def test_the_peak_in_fp8_is_the_gpus(name, peaks):
    answers, place = peaks
    status, said = answers[name]
    assert status == 0, said[-3000:]
    made = job_peaks.peak_memory(load(place / name / "slice-000000.prism"), device=None)
    (one,) = made.classes.values()
    assert one["peak_allocated"] == pytest.approx(REAL["jobs"][name]["peak"], rel=BOUND)
