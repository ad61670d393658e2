"""Faults planted in Megatron's code are named by their lines; without them order is proved.

Each fault is a copy of the installed megatron.core in which lines that order streams are gone.
"""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import SCRIPT

pytestmark = [TRAINING, pytest.mark.ci, pytest.mark.megatron]

PLANNED = pathlib.Path(SCRIPT).with_name("pretrain_planned.py")
JOB = """
--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 16 --train-iters 3 --lr 1e-3
--mock-data --vocab-size 1000 --bf16 --use-distributed-optimizer --overlap-grad-reduce
--no-gradient-accumulation-fusion --eval-iters 0 --log-interval 1 --no-persist-layer-norm
--no-masked-softmax-fusion --no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --attention-backend unfused --num-workers 0
""".split()
DENSE = ["--transformer-impl", "local", "--tensor-model-parallel-size", "2",
         "--sequence-parallel", "--pipeline-model-parallel-size", "2",
         "--num-layers-per-virtual-pipeline-stage", "2"]  # fmt: skip
EXPERTS = """
--expert-model-parallel-size 4 --num-experts 8 --moe-token-dispatcher-type alltoall
--moe-router-topk 2 --moe-grouped-gemm --transformer-impl transformer_engine
--moe-shared-expert-intermediate-size 64 --disable-bias-linear
""".split()
OVERLAPPED = [*EXPERTS, "--overlap-moe-expert-parallel-comm"]
SHARED = [*EXPERTS, "--moe-shared-expert-overlap"]
OFFLOADED = [*EXPERTS, *"""
--fine-grained-activation-offloading --offload-modules moe_act core_attn --num-layers 4
--seq-length 1024 --max-position-embeddings 1024 --hidden-size 256
--min-offloaded-tensor-size 1024
""".split()]  # fmt: skip

# fault -> flags, file of megatron/core, the line that goes, kind, line that the first access is in
FAULTS = {
    "record_stream of a freed input": (
        OVERLAPPED,
        "pipeline_parallel/utils.py",
        "input.record_stream(self.stream)",
        "reused",
        "core/tensor_parallel/mappings.py",
    ),
    "event between the streams of a plan": (
        OVERLAPPED,
        "pipeline_parallel/utils.py",
        "self.event.wait(self.stream)",
        "unfinished",
        "core/tensor_parallel/mappings.py",
    ),
    "stream of shared experts waits for its input": (
        SHARED,
        "transformer/moe/shared_experts.py",
        "self.stream.wait_stream(torch.cuda.current_stream())",
        "unfinished",
        "transformer_engine/pytorch/ops/basic/layer_norm.py",
    ),
    "handle of an asynchronous reduce-scatter": (
        DENSE,
        "tensor_parallel/layers.py",
        "handle.wait()",
        "unfinished",
        "core/tensor_parallel/layers.py",
    ),
    "handle of a received activation": (
        DENSE,
        "pipeline_parallel/schedules.py",
        "recv_prev_wait_handle.wait()",
        "unfinished",
        "core/pipeline_parallel/p2p_communication.py",
    ),
    "copy back of an offloaded activation": (
        OFFLOADED,
        "pipeline_parallel/fine_grained_activation_offload.py",
        "stream.wait_event(self._reload_event)",
        "unfinished",
        "core/pipeline_parallel/fine_grained_activation_offload.py",
    ),
    "record_stream of an offloaded activation": (
        OFFLOADED,
        "pipeline_parallel/fine_grained_activation_offload.py",
        "tensor_on_device.record_stream(self.d2h_stream)",
        "reused",
        "core/pipeline_parallel/fine_grained_activation_offload.py",
    ),
}


def without_line(tree, file, line):
    """A copy of Megatron below ``tree`` in which ``line`` of ``file`` is ``pass``."""
    home = pathlib.Path(importlib.util.find_spec("megatron.core").origin).parents[1]
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(home, tree / "megatron", ignore=ignored)
    path = tree / "megatron" / "core" / file
    lines = path.read_text(encoding="utf-8").split("\n")
    gone = 0
    for number, text in enumerate(lines):
        if text.strip() == line:
            lines[number] = text.replace(line, "pass")
            gone += 1
    assert gone, f"{file} has no line {line}"
    path.write_text("\n".join(lines), encoding="utf-8")


def answer(folder, flags, tree=None):
    """What ``prism check --streams --json`` answers about a job, and its exit status."""
    script = PLANNED if "--overlap-moe-expert-parallel-comm" in flags else SCRIPT
    env = {**os.environ, "NVTE_CPU_OFFLOAD_V1": "1", "OMP_NUM_THREADS": "1"}
    if tree is not None:
        env["PYTHONPATH"] = str(tree)
    prism = [sys.executable, "-W", "ignore", "-m", "megatron_prism"]
    ours = ["--prism-tier", "meta", "--prism-world-size", "8", "--prism-streams"]
    capture = [*prism, "capture", "-o", str(folder), *ours, "--", str(script), *JOB, *flags]
    done = subprocess.run(capture, env=env, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    check = [*prism, "check", str(folder), "--streams", "--json"]
    done = subprocess.run(check, env=env, capture_output=True, text=True)
    return json.loads(done.stdout), done.returncode


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_its_line(name, tmp_path):
    flags, file, line, kind, site = FAULTS[name]
    without_line(tmp_path / "tree", file, line)
    value, status = answer(tmp_path / "slices", flags, tmp_path / "tree")
    assert status == 1
    named = [(fault["kind"], fault["first_site"].rpartition(":")[0]) for fault in value["faults"]]
    assert (kind, site) in named


@pytest.mark.parametrize("flags", [DENSE, OVERLAPPED, SHARED, OFFLOADED])
def test_megatron_as_it_is_has_none(flags, tmp_path):
    value, status = answer(tmp_path / "slices", flags)
    assert value["faults"] == []
    assert status == 0
    assert all(rank["waits"] > 100 and rank["proved"] for rank in value["ranks"])
