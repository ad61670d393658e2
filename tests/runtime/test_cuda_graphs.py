"""CUDA graphs in shapes: what a capture keeps, where its memory is, and what a replay does not."""

import subprocess
import sys

import pytest

CODE = """
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
from megatron_prism.runtime.devices import cuda_graphs
changes = ProcessChanges()
live = tiers.prepare("meta", changes, engine=False).live
MIB = 1 << 20
x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
graph, before = torch.cuda.CUDAGraph(), live.now
rows = len(live.history)
with torch.cuda.graph(graph):
    print(torch.cuda.is_current_stream_capturing())
    kept = x + (x + 1)
print(torch.cuda.is_current_stream_capturing(), (live.now - before) / MIB)
print(sorted(set((live.history.rows(rows)[:, 2]).tolist()) - {0}) != [])
at, weak = kept.data_ptr(), cuda_graphs.weak_references((kept, None, 3))
kept.data = weak[0]  # as Megatron does
print(at == weak[0].data_ptr() == kept.data_ptr())
del kept
print((live.now - before) / MIB, tuple(weak[0].shape) == (MIB,), *weak[1:])
graph.replay()
weak[0].detach().view(-1)
print((live.now - before) / MIB, cuda_graphs.replays)
torch.cuda.set_stream(torch.cuda.Stream())  # a pool's blocks stay with their stream
rows = len(live.history)
for pool in (graph.pool(), graph.pool(), torch.cuda.graph_pool_handle()):
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    kept = x + 1
    torch._C._cuda_endAllocateToPool(0, pool)
    torch.cuda.set_stream(torch.cuda.default_stream())
print(len(set(live.history.rows(rows)[:, 2].tolist()) - {0}), torch.cuda.current_stream().stream_id)
changes.undo()
print(torch.cuda.CUDAGraph is not cuda_graphs.CUDAGraph)
"""


@pytest.mark.slow
def test_a_capture_keeps_what_python_does_and_a_replay_takes_nothing():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "False 1.0",
        "True",
        "True",
        "0.0 True None 3",
        "0.0 1",
        "3 0",
        "True",
    ]


RECORDED = """
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
from megatron_prism.runtime.recorder.recorder import Recorder, report_to
changes = ProcessChanges()
live = tiers.prepare("meta", changes, engine=False).live
MIB = 1 << 20
x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
recorder = Recorder(0, "meta", live)
report_to(recorder, changes)
recorder.start()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static = x + (x + 1)  # three at once
eager = static + 1
del static
y = eager + (eager + 1)
left = live.now
program = recorder.stop().program()
changes.undo()
print([level / MIB for level in program.live_bytes().tolist()], left / MIB)
print(program.ops["kernels"].tolist())
"""


@pytest.mark.slow
def test_memory_of_a_capture_is_recorded_and_its_kernels_are_the_graphs():
    """What a capture keeps outlives it, and the most that is alive can be inside it."""
    words = [sys.executable, "-c", RECORDED]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    levels, kernels = done.stdout.splitlines()
    assert levels == "[1.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0, 4.0, 3.0] 3.0"
    assert kernels == "[-1, 3]"  # a wait of the host, and what is outside of the graph
