"""Other replicas: what follows a rank's part of the parameters, by hand."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.program_text import parse
from megatron_prism.memory.peaks import known_peak
from megatron_prism.replay.costs.kernels import scaled_kernels
from megatron_prism.replay.replicas import with_data_parallel
from megatron_prism.replay.whatif import host_factors

DP = "DATA_PARALLEL_GROUP_WITH_CP"
SITE = "@core/distributed/param_and_grad_buffer.py:504"
STEP = "zeros(1)float32:0:4; multi_tensor_l2norm(8)float32:0:32; adam(64,64)float32:0:2048*8"
WHOLE = "fp8_transpose(4x4)float8_e4m3fn:0:32"
TEXT = f"""
prism-program 1
world size=4
program ranks=0-3
-    alloc storage=1 bytes=4096 note="param:[64]"
-    alloc storage=2 bytes=1024 note="optim:exp_avg"
-    alloc storage=3 bytes=1024 note="optim:exp_avg"
-    alloc storage=4 bytes=4 note="optim:exp_avg"
0F   compute flops=100 traffic=1000 kernels=1
G    reduce_scatter {DP} fp32 in=1024 out=256 reduce=avg {SITE}
-    alloc storage=5 bytes=2048 note="@core/optimizer/optimizer.py:786"
O    compute flops=0 traffic=16420 kernels=10 host=100us note="{STEP}"
-    free storage=5 bytes=2048
O    all_gather {DP} bf16 in=256 out=1024 {SITE}
-    alloc storage=6 bytes=4096 note="@core/fp8_utils.py:415"
O    compute flops=0 traffic=32 kernels=1 note="{WHOLE}"
-    free storage=6 bytes=4096
"""


@pytest.mark.parametrize(
    "buffer",
    ["[64]", "buffer of 64 parameters", "buffer of 64 parameters of decoder"],
)
@pytest.mark.parametrize(("dp", "states"), [(2, 4), (4, 2), (8, 1), (16, 0.5)])
def test_the_optimizers_work_and_memory_follow_the_shard(dp, states, buffer):
    program = with_data_parallel(parse(TEXT.replace("[64]", buffer)), dp).programs[0]
    step, whole = (op for op in program if op.name == "compute" and op.phase == "optimizer")
    assert step.traffic == 4 + (32 + 8 * 2048) * 4 / dp
    assert step.kernels == 2 + max(1, 32 // dp)
    # a loop over the parts of parameters, whatever their size; the rest takes as long as four
    assert step.host == math.ceil(100_000 * (4 + max(1, 8 / dp)) / (4 + 2))
    assert (whole.traffic, whole.kernels) == (32, 1)  # of whole parameters
    held = known_peak(program)
    assert held.by_kind["optim"] == 1024 * states + 4
    assert held.num_bytes == 4096 + 1024 * states + 4 + max(4096, 2048 * 4 / dp)
    assert program.live_bytes()[-1] == 4096 + 1024 * states + 4  # who comes goes


def test_a_shard_of_a_larger_world_is_the_first_part_of_each_kind():
    program = with_data_parallel(parse(TEXT), 8).programs[0]
    events = program.allocations[["storage", "bytes"]].tolist()
    assert [row for row in events if row[0] in (2, 3)] == [(2, 1024)]


def test_without_a_shard_nothing_follows():
    text = TEXT.replace("reduce_scatter", "all_reduce").replace("out=256", "out=1024")
    before = parse(text.replace("all_gather", "broadcast"))
    after = with_data_parallel(before, 2).programs[0]
    assert list(after) == list(before.programs[0])
    assert np.array_equal(after.allocations, before.programs[0].allocations)


@pytest.mark.parametrize(
    "site", ["@core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:1",
             "@core/models/gpt/gpt_model.py:345"],
)  # fmt: skip
def test_whoever_shares_more_out_is_refused(site):
    with pytest.raises(ProgramError, match="share more out than the optimizer's states"):
        with_data_parallel(parse(TEXT.replace(SITE, site)), 2)


def test_fp8_parameters_are_refused():
    text = TEXT.replace(f"all_gather {DP} bf16", f"all_gather {DP} uint8")
    with pytest.raises(ProgramError, match="each FP8 parameter"):
        with_data_parallel(parse(text), 2)


def test_kernels_are_as_many_as_parameters_and_have_their_bytes_together():
    note, num_bytes, kernels = scaled_kernels("adam(64,64)float32:0:2048*3", Fraction(1, 6))
    assert note == "adam(32,32)float32:0:1024"
    assert (num_bytes, kernels) == (1024 - 3 * 2048, -2)
    assert scaled_kernels("mul_()float32:0:8*40", Fraction(1, 4))[0] == "mul_()float32:0:8*10"


def test_measured_ranks_of_one_stage_are_one_replica_with_the_times_of_the_first():
    """Two ranks of a GPU job take other times, and update other parameters."""
    text = TEXT.replace("ranks=0-3", "ranks=0,2,3").replace("compute flops=100", "compute ns=500")
    body = text.partition("ranks=0,2,3")[2]
    other = body.replace("ns=500", "ns=600").replace("kernels=10", "kernels=12")
    both = parse(f"{text}program ranks=1{other}")
    with pytest.raises(ProgramError, match="run different programs"):
        with_data_parallel(both, 8)
    measured = dataclasses.replace(both, source={"tier": "cuda"})
    made = with_data_parallel(measured, 8)
    assert [op.ns for op in made.of(7) if op.phase == "forward"] == [500]
    assert made.source["what-if"].endswith("times of the first replica")
    shapes = parse(f"{text}program ranks=1{other.replace('in=1024', 'in=1028')}")
    with pytest.raises(ProgramError, match="run different programs"):
        with_data_parallel(dataclasses.replace(shapes, source={"tier": "cuda"}), 8)


def test_what_slices_say_of_a_host_follows_its_rank():
    """Two stages on hosts of two speeds: the second stage's first rank gets another number."""
    text = f"""
prism-program 1
world size=8 pp=2
program ranks=0-3
0F   compute flops=100 traffic=1000 kernels=1 host=100us
program ranks=4-7
0F   compute flops=100 traffic=1000 kernels=1 host=100us note="{STEP}"
"""
    programs = parse(text)
    states = "0=1500/1980MHz,600/700W,0.9,58C 4=1700/1980MHz,600/700W,0.9,58C"
    source = {"host_index": "0=0.93 4=1.48", "gpu_clock": states, "tier": "cuda"}
    larger = with_data_parallel(dataclasses.replace(programs, source=source), 8)
    assert [program.rank for program in larger.programs] == [0, 8]
    assert larger.source["host_index"] == "0=0.93 8=1.48"
    assert larger.source["gpu_clock"] == states.replace(" 4=", " 8=")
    # on a host of index 1 each takes what its own host says
    factors = host_factors(larger, "1.0")
    assert [round(float(factor), 2) for factor in factors] == [1.08, 0.68]
