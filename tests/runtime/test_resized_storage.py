"""A buffer whose storage is given back and taken anew by resizing, as FSDP does."""

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices.live_bytes import LiveBytes


def test_bytes_follow_a_storage_that_is_resized():
    changes, live = ProcessChanges(), LiveBytes()
    live.follow_resizes(changes)
    try:
        with live:
            buffer = torch.empty(256, device="meta")
            kept = torch.empty(10, device="meta")
            view = buffer[:128]
            buffer._typed_storage()._resize_(0)
            assert live.now == 40
            buffer._typed_storage()._resize_(256)
            assert (live.now, live.peak()) == (1064, 1064)
            del buffer
            assert live.now == 1064  # the view holds it
            del view, kept
            assert live.now == 0
    finally:
        changes.undo()
