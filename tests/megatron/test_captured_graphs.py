"""CUDA graphs are captured in shapes by the job's own Python, with static buffers and pools; in
a slice each of Transformer Engine's costs the host one launch.

Needs megatron.training (0.19).  The figures of the GPU are those of a stored snapshot, which was
taken behind the last iteration of a process on an H100, and of h100_graph_peaks.json.
"""

import dataclasses
import json
import lzma
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.core.programs import program
from megatron_prism.core.programs.ops import IS_CALL, NAMES
from megatron_prism.core.units import format_bytes
from megatron_prism.memory import blocks, peaks
from megatron_prism.memory.job_peaks import peak_memory
from megatron_prism.runtime.recorder.python_calls import KERNEL_NS

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = json.loads((RESULTS / "h100_graph_peaks.json").read_text())
REAL = RESULTS / "snapshots"
INDEX = json.loads((REAL / "index.json").read_text())
STORED = INDEX["snapshots"]["one_graphs-rank0.pickle.xz"]
COMMON = INDEX["common"].replace("--num-workers 1", "--num-workers 0")
OWN = "--prism-emulate --prism-tier meta --eval-iters 0 --eval-interval 100"
SMALL = (
    COMMON.replace("--seq-length 2048", "--seq-length 256")
    .replace("--hidden-size 1024", "--hidden-size 256")
    .replace("--train-iters 5", "--train-iters 3")
    .replace("--global-batch-size 8", "--global-batch-size 32")
)
GRAPHS = "--cuda-graph-impl transformer_engine --te-rng-tracker --use-distributed-optimizer"
EARLY = f"{GRAPHS} --cuda-graph-warmup-steps 1 --prism-world-size 8 --prism-ranks 5"
PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --moe-grouped-gemm"
JOBS = {
    "H100": f"{COMMON} {STORED['arguments']} {OWN} --prism-world-size 1",
    "layers, stages": f"{SMALL} {EARLY} {OWN} {PIPELINE} --tensor-model-parallel-size 2 "
    "--sequence-parallel",
    "experts, FP8": f"{SMALL} {EARLY} {OWN} {EXPERTS} {PIPELINE} --fp8-format hybrid "
    "--fp8-recipe tensorwise --moe-token-dispatcher-type alltoall "
    "--cuda-graph-scope attn moe_router moe_preprocess",
}
ROUTER = "--cuda-graph-scope moe_router moe_preprocess --moe-router-topk 2"
DISPATCHERS = {
    "alltoall": "--moe-token-dispatcher-type alltoall",
    "DeepEP": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
    "HybridEP": "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
}
for name, dispatcher in DISPATCHERS.items():
    # FP32 probabilities, as DeepEP asks for
    JOBS[f"experts by {name}"] = (
        f"{SMALL} {EARLY} {OWN} {EXPERTS} {PIPELINE} {ROUTER} {dispatcher} --moe-router-dtype fp32"
    )
# sixteen microbatches, of which a capture runs seven
STAGES = (
    f"{SMALL} {GRAPHS} --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 "
    "--train-iters 4 --cuda-graph-warmup-steps 2"
)
JOBS["four stages"] = f"{STAGES} {OWN} --prism-world-size 8 --prism-ranks 2"
MEASURED_SLICES = (
    "layers by TE",
    "layers by TE, pp2 vpp2",  # the peak is in a capture
    "attention and router by TE, 8 experts",
)
ON_H100 = ("layers by Megatron, FP8 delayed", "whole iteration, full recomputation")
for name in ON_H100:
    JOBS[name] = (
        f"{MEASURED['arguments']} {MEASURED['jobs'][name]['arguments']} --num-workers 0 "
        "--prism-emulate --prism-tier meta --prism-world-size 1"
    )
WAITS = (
    f"{SMALL} {OWN} {EXPERTS} --prism-world-size 2 --moe-token-dispatcher-type alltoall "
    "--cuda-graph-impl local --te-rng-tracker --cuda-graph-scope attn moe_router"
)
SLICES = {  # and layers of a rank times microbatches
    "sequence parallel": (
        f"{PIPELINE} --tensor-model-parallel-size 2 --sequence-parallel", 2 * 8),
    "experts": (f"{EXPERTS} --moe-token-dispatcher-type alltoall", 4 * 2),
}  # fmt: skip
SCOPE = {  # a capture before the first step would be heard by nobody
    "experts": "--cuda-graph-scope attn moe_router moe_preprocess --cuda-graph-warmup-steps 0"
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def jobs(place):
    """name -> (status, output)."""
    texts = {**JOBS, "waits": WAITS}
    words = {name: [*text.split(), "--prism-out", place / name] for name, text in texts.items()}
    for name, (text, _) in SLICES.items():
        for graphs in ("", f"{GRAPHS} {SCOPE.get(name, '')}"):
            job = f"{SMALL} {text} {graphs} {OWN} --prism-world-size 8 --prism-ranks 5"
            folder = place / f"{name} {bool(graphs)}"
            words[folder.name] = [*job.split(), "--prism-capture", folder]
    for name in MEASURED_SLICES:
        real = MEASURED["jobs"][name]
        job = (
            f"{MEASURED['arguments']} {real['arguments']} --num-workers 0 --prism-emulate "
            f"--prism-tier meta --prism-world-size {real['world']} --prism-ranks {real['rank']}"
        )
        words[f"slices {name}"] = [*job.split(), "--prism-capture", place / f"slices {name}"]
    return stock_jobs.named(stock_jobs.TINY, words)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_with_graphs_trains(name, jobs):
    status, said = jobs[name]
    assert status == 0, said[-3000:]
    assert "B graph capture" in said or "iteration" in name  # which has no part of its own
    assert "CUDA graphs: counted" not in said


def test_what_graphs_keep_is_what_they_keep_on_a_gpu(jobs, place):
    assert jobs["H100"][0] == 0
    (summary,) = (place / "H100").glob("*.json")
    memory = json.loads(summary.read_text())["memory"]
    with lzma.open(REAL / "one_graphs-rank0.pickle.xz") as file:
        left = sum(segment["allocated_size"] for segment in pickle.load(file)["segments"])
    few = 4 << 10
    assert abs(memory["allocated_peak"] - STORED["allocated"]) < few
    assert abs(memory["by_part"]["optimizer step"] - left) < few
    assert memory["reserved_between"][0] < 1.01 * STORED["reserved"]


@pytest.mark.parametrize("name", ON_H100)
def test_pools_of_megatrons_graphs_are_those_of_a_gpu(name, jobs, place):
    assert jobs[name][0] == 0
    (summary,) = (place / name).glob("*.json")
    memory, real = json.loads(summary.read_text())["memory"], MEASURED["jobs"][name]
    assert memory["allocated_peak"] == pytest.approx(real["peak"], rel=1e-3)
    assert memory["reserved_between"][0] == pytest.approx(real["reserved"], rel=1e-3)


@pytest.mark.parametrize("name", MEASURED_SLICES)
def test_slices_have_the_peak_of_the_whole_process(name, jobs, place):
    """Iterations without graphs, their capture and iterations with them; pools are no cache."""
    status, output = jobs[f"slices {name}"]
    assert status == 0, output[-3000:]
    (file,) = (place / f"slices {name}").glob("slice-*.prism")
    programs, real = program.load(file), MEASURED["jobs"][name]
    partial = dataclasses.replace(programs, partial=True)
    lone = partial.programs[0]
    # every request of the process is in its history
    assert lone.peak_bytes() == lone.history[:, 1].cumsum().max()
    in_blocks = peaks.known_peak(blocks.as_blocks(lone)).num_bytes
    assert in_blocks == pytest.approx(real["peak"], rel=1e-3)
    memory = peak_memory(partial)
    (figures,) = memory.classes.values()
    assert figures["peak_allocated"] == partial.programs[0].peak_bytes()
    assert figures["graph_pools"] > 0
    assert "CUDA graphs" not in memory.provenance["peak_allocated"]


def test_a_capture_of_few_microbatches_has_the_peak_of_all(jobs, place):
    """The line of ``prism capture``, ``prism fit`` and the whole process say one figure."""
    assert jobs["four stages"][0] == 0
    (summary,) = (place / "four stages").glob("*.json")
    memory = json.loads(summary.read_text())["memory"]
    folder = place / "few microbatches"
    words = [sys.executable, "-m", "megatron_prism", "capture", "-o", str(folder), "--prism-tier"]
    words += ["meta", "--prism-world-size", "8", "--", str(stock_jobs.TINY), *STAGES.split()]
    words += ["--eval-iters", "0", "--eval-interval", "100", "--prism-ranks", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 of 16 microbatches run" in done.stdout + done.stderr
    lone = program.load(folder / "slice-000002.prism").programs[0]
    assert peaks.peak(lone).earlier
    said = f"rank 2: {len(lone):,} ops of an iteration, {format_bytes(lone.peak_bytes())} allocated"
    assert said in done.stdout
    assert peaks.known_peak(blocks.as_blocks(lone)).num_bytes == memory["allocated_peak"]
    assert list(blocks.reserved(lone)) == memory["reserved_between"]


def test_a_wait_of_the_host_in_a_capture_is_refused_as_by_cuda(jobs):
    status, said = jobs["waits"]
    assert status == 1, said[-3000:]
    assert "the host waits (token counts) while a CUDA graph is captured" in said


@pytest.mark.parametrize("name", SLICES)
def test_a_graph_is_one_launch_of_what_it_captured(name, jobs, place):
    """Its kernels and calls are those of the job without graphs, but for copies of its inputs; the
    host launches them all at once, and what is outside of layers as before."""
    files = [place / f"{name} {graphs}" / "slice-000005.prism" for graphs in (False, True)]
    eager, graphed = (program.load(file).of(5) for file in files)
    assert [jobs[f"{name} {graphs}"][0] for graphs in (False, True)] == [0, 0]
    for phase in ("forward", "backward"):
        ops = [[op for op in one if op.phase == phase] for one in (eager, graphed)]
        calls = [[op.name for op in each if IS_CALL[NAMES.index(op.name)]] for each in ops]
        flops = [sum(max(op.flops, 0) for op in each) for each in ops]
        assert calls[0] == calls[1]
        assert flops[0] == flops[1] > 0
        launched = [op for op in ops[1] if op.host in (0, KERNEL_NS)]
        assert sum(op.host == KERNEL_NS for op in launched) == SLICES[name][1]
        kernels = sum(max(op.kernels, 0) for op in launched)
        assert kernels > 0.4 * sum(max(op.kernels, 0) for op in ops[0])
        assert any(IS_CALL[NAMES.index(op.name)] for op in launched) or phase == "backward"
