"""Peaks of parts by blocks: what is not split off counts, also behind the end of the history."""

import pytest

pytest.importorskip("torch")

import torch

from megatron_prism.emulate.capture.part_blocks import block_peaks
from megatron_prism.runtime.devices.live_bytes import History, LiveBytes

MIB = 1 << 20
ODD, BLOCK = 11 * MIB + MIB // 2, 12 * MIB  # a segment of 12 MiB, of which 0.5 MiB is not split off


def weights():
    return torch.empty(ODD, dtype=torch.uint8, device="meta")


def lived(keeps_history):
    """What a job with one tensor of its own and another one in its step has allocated."""
    live = LiveBytes()
    if keeps_history:
        live.history = History(lambda: 0)
    with live:
        with live.part("model"):
            kept = weights()
        with live.part("steady iteration"):
            weights()
        live.end_history()
        with live.part("evaluation"):
            weights()
        with live.part("end"):
            pass
    del kept
    return live


def test_parts_count_blocks_as_torch_does():
    assert block_peaks(lived(keeps_history=True)) == {
        "model": BLOCK,
        "steady iteration": 2 * BLOCK,
        # of the tensor that is new there nobody knows the block
        "evaluation": BLOCK + ODD,
        "end": BLOCK,
    }


def test_without_a_history_they_count_tensors():
    live = lived(keeps_history=False)
    assert block_peaks(live) == live.parts
    assert live.parts["steady iteration"] == 2 * ODD


def test_options_that_are_not_modelled_leave_tensors(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert block_peaks(lived(keeps_history=True))["model"] == ODD
