"""A data loader that makes masks of long sequences may take longer than the step.

h200_x2_six.json, ``two_cp``: steps of 620 ms whose kernels and calls take 370.
"""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

import megatron_prism as prism
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.uncertainty.data_loader import NO_MASK, loaded_masks
from megatron_prism.replay.uncertainty.interval import interval

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MIB = 1 << 20
PROGRAM = """prism-program 1
world size=1
program rank=0 ranks=0
0F compute ns=1ms kernels=9
0B compute ns=1ms kernels=9
"""


def programs_of(length=16384, tier="meta", **more):
    chosen = {"seq_length": str(length), "micro_batch_size": "1", **more}
    source = {"arguments": job_settings.as_text(chosen), "tier": tier}
    return dataclasses.replace(parse(PROGRAM), source=source)


def test_masks_are_squares_of_the_sequence():
    masks = loaded_masks(programs_of())
    assert masks.bytes_of_sample == 256 * MIB
    assert loaded_masks(programs_of(no_create_attention_mask_in_dataloader="True")) is None
    # a recipe's loader makes none
    assert loaded_masks(parse(PROGRAM)) is None


def test_the_measured_job_waits_for_its_masks():
    real = json.loads((RESULTS / "h200_x2_six.json").read_text())["jobs"]["two_cp"]
    assert "--seq-length 16384" in real["arguments"]
    measured_ms = statistics.median(real["iteration_ms"][2:])
    # twice as long is likely on other hosts
    longest_ms = 4 * loaded_masks(programs_of()).longest_ns / 1e6
    assert longest_ms == pytest.approx(2 * measured_ms, rel=0.02)


@pytest.mark.parametrize(
    ("programs", "waits"),
    [
        (programs_of(), True),
        (programs_of(length=1024), False),  # shorter than the step
        (programs_of(tier="cuda"), False),  # measured
    ],
)
def test_an_interval_has_what_the_loader_may_take_beyond_the_step(programs, waits):
    timeline = prism.replay(programs, machine="h200")
    sources = {source.what: source for source in interval(timeline).sources}
    assert ("data" in sources) == waits
    if waits:
        longest_ns = loaded_masks(programs).longest_ns
        assert sources["data"].high_ns == longest_ns - timeline.iteration_ns
        assert sources["data"].low_ns == 0
        assert sources["data"].fix == NO_MASK
