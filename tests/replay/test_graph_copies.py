"""What CUDA graphs of Transformer Engine cost: copies into static tensors, and one launch each.

Kept slices of tier meta beside real iterations of the same jobs: one H100 with and without graphs,
and Megatron-LM's own test on NVIDIA's two kinds of hosts.
"""

import gzip
import json
import statistics
from pathlib import Path

import pytest

from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.costs.host_index import REFERENCE, HostIndex
from megatron_prism.replay.costs.kernels import KERNEL
from megatron_prism.replay.priced_graph import WhatIf, replay

FILE = Path(__file__).parents[2] / "benchmarks/results/without_gpu.json.gz"
KEPT = json.loads(gzip.decompress(FILE.read_bytes()))
WITH_GRAPHS = KEPT["graphs"]["dense, 16 layers, graphs of layers"]
WITHOUT = KEPT["one_gpu"]["nograph_te"]
SCOPED = KEPT["tests"]["moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph"]
HIDDEN, FFN, HEAD, TOKENS = 2048, 5632, 128, 2048
LAYERS, MICROBATCHES = 16, 16
BF16 = 2


def seconds(stored, index, folder):
    """What an iteration takes on a host of an index."""
    file = folder / "host.json"
    host = HostIndex(index, 0.15, dict.fromkeys(REFERENCE, index), "a test")
    file.write_text(host.to_json(), encoding="utf-8")
    programs = parse(stored["program"])
    return replay(programs, machine="h100", what_if=WhatIf(host=file)).iteration_ns / 1e9


def bytes_of(stored, kernel):
    """What all kernels of a name move in an iteration."""
    total = 0
    for program in parse(stored["program"]).programs:
        for row in program.ops:
            for match in KERNEL.finditer(program.strings[row["note"]]):
                if match["name"].strip() == kernel:
                    total += int(match["bytes"]) * int(match["count"] or 1)
    return total


def test_static_gradients_are_copied_once_a_microbatch():
    """Autograd clones a gradient that a graph holds (accumulate_grad.h @v2.11): read and write."""
    attention = HIDDEN * 3 * HIDDEN + HIDDEN * HIDDEN
    norms = 2 * HIDDEN
    parameters = LAYERS * (attention + HIDDEN * 2 * FFN + FFN * HIDDEN + norms)
    cloned = bytes_of(WITH_GRAPHS, "clone_dense") - bytes_of(WITHOUT, "clone_dense")
    assert cloned == 2 * BF16 * parameters * MICROBATCHES


def test_what_is_handed_to_a_graph_is_copied_into_its_static_tensor():
    """Of each layer: input, gradient of the output, mask and rotary angles (fp32); what is changed
    counts as read and as written."""
    hidden_states = TOKENS * HIDDEN * BF16
    mask = TOKENS * TOKENS
    angles = TOKENS * HEAD * 4
    handed = 2 * hidden_states + mask + angles
    copied = bytes_of(WITH_GRAPHS, "copy_") - bytes_of(WITHOUT, "copy_")
    assert copied == 3 * handed * LAYERS * MICROBATCHES


@pytest.mark.parametrize("stored", [WITH_GRAPHS, WITHOUT])
def test_a_job_with_graphs_and_without_takes_what_it_took_on_an_h100(stored, tmp_path):
    real_ms = stored["real_ms"]
    if isinstance(real_ms, dict):
        real_ms = real_ms["h100"]
    assert seconds(stored, 1.0, tmp_path) == pytest.approx(
        statistics.median(real_ms) / 1e3, rel=0.05
    )


@pytest.mark.parametrize(("hosts", "index"), [("faster", 0.6), ("slower", 0.894)])
def test_graphs_of_parts_of_a_layer_take_what_nvidia_published(hosts, index, tmp_path):
    real = SCOPED["seconds"][hosts]
    assert seconds(SCOPED, index, tmp_path) == pytest.approx(real, rel=0.13)
