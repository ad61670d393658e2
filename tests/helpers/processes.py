"""Code in a Python of its own; also as one local rank of a virtual world on tier cpu, patched."""

import os
import subprocess
import sys

import pytest

START = """
import sys
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
from megatron_prism.emulate import patch
from megatron_prism.emulate.patches import moe, pipeline, training
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values, rms
here = tiers.prepare("cpu", ProcessChanges())
size, rank = {size}, {rank}
world = virtual_world.VirtualWorld(size, rank, [rank], Values(rank=rank), here.device)
patch.apply({patches}, patch.PatchContext(lambda: world, TrainingMonitor(), False, (rank,), rank))
virtual_world.start(world)
from megatron.core import parallel_state
torch.manual_seed(1)
"""


def python(code, *words, timeout=300, **env):
    """The ended process of ``code``, with what it printed."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, words)],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def patched(code, *words, size, rank, patches):
    """(lines that ``code`` prints, its stderr); ``patches``: an expression that lists them."""
    pytest.importorskip("megatron.core")
    done = python(START.format(size=size, rank=rank, patches=patches) + code, *words)
    return done.stdout.splitlines(), done.stderr[-3000:]
