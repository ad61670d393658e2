"""Recorded histories of the real allocator against the model.

Events of ``torch.cuda.memory._record_memory_history``, as columns.  Requests, streams and the
moment at which a block came back (record_stream defers it) are the recording's; which block serves
a request, when a segment is asked for and how large it is are the model's.
"""

import gzip
import json
import pathlib
from itertools import pairwise

from megatron_prism.memory.allocator import CachingAllocator, Settings

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "allocator_h200.json.gz"
MIB = 1 << 20
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
           "segment_map", "segment_unmap", "snapshot", "oom")  # fmt: skip
LESS = ("segment_free", "segment_unmap")


def reserved(events, settings):
    """(recorded, modelled) bytes after every event."""
    machine, real, both = CachingAllocator(settings), 0, []
    for (before, *_), (action, address, num_bytes, stream) in pairwise([("",), *events]):
        if action == "alloc":
            machine.malloc(address, num_bytes, stream)
        elif action == "free_completed":
            machine.free(address)
        elif action in ("segment_alloc", "segment_map"):
            real += num_bytes
        elif action in LESS:
            if before not in LESS:  # empty_cache, or a retry: everything at once
                machine.release()
            real -= num_bytes
        both.append((real, machine.reserved))
    return both


def test_a_history_by_hand():
    """A use on another stream keeps the block until ``free_completed``; its peer gets a segment."""
    events = [
        ("segment_alloc", 1, 20 * MIB, 0),
        ("alloc", 1, 9 * MIB, 0),
        ("free_requested", 1, 9 * MIB, 0),
        ("segment_alloc", 2, 12 * MIB, 0),
        ("alloc", 2, 12 * MIB, 0),
        ("free_completed", 1, 9 * MIB, 0),
        ("alloc", 1, 8 * MIB, 0),
        ("segment_alloc", 3, 2 * MIB, 1),
        ("alloc", 3, 512, 1),
        ("free_completed", 2, 12 * MIB, 0),
        ("segment_free", 2, 12 * MIB, 0),
    ]
    both = reserved(events, Settings())
    assert max(both) == (34 * MIB, 34 * MIB)
    assert both[-1] == (22 * MIB, 22 * MIB)


def test_the_real_allocator():
    """Reserved peaks of H200's recorded settings, to the byte, requests of two streams included.

    One is off: with divisions, when a block in use by another stream comes back decides which
    request finds it, and two recordings of the same script differ by 2.8 % themselves.
    """
    peaks = {}
    for run in json.loads(gzip.decompress(GOLDEN.read_bytes()))["runs"]:
        columns = [run[key] for key in ("action", "address", "bytes", "stream")]
        events = [(ACTIONS[action], *rest) for action, *rest in zip(*columns, strict=True)]
        assert sum(event[0] == "alloc" for event in events) > 400
        assert len({event[3] for event in events}) > 1
        both = reserved(events, Settings.parse(run["conf"]))
        peaks[run["conf"]] = tuple(map(max, zip(*both, strict=True)))
    assert "" in peaks
    real, ours = peaks.pop("roundup_power2_divisions:4")
    assert abs(ours - real) <= 0.028 * real
    assert len(peaks) == 5
    assert all(ours == real for real, ours in peaks.values()), peaks
