"""Recorded histories of the real allocator against the model; and files that are none."""

import gzip
import json
import pathlib

import pytest
from oracles.allocator_trace import load, replay_history

from megatron_prism.core.errors import UsageError
from megatron_prism.memory.allocator import Settings

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "allocator_h200.json.gz"
MIB = 1 << 20


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
    made = replay_history(events)
    assert made.peaks == (34 * MIB, 34 * MIB)
    assert made.modelled[1::1][-1] == made.recorded[-1] == 22 * MIB
    assert made.requests == 4
    assert made.relative == 0.0


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([("free_completed", 1, 5, 0)], "was never out"),
        ([("alloc", 1, 5, 0), ("alloc", 1, 5, 0)], "given out twice"),
        ([("grow", 1, 5, 0)], "no action"),
    ],
)
def test_histories_that_are_incomplete(events, says):
    with pytest.raises(UsageError, match=says) as error:
        replay_history(events)
    assert "record_allocator" in error.value.fix


def of(**columns):
    """A file of one run with these columns."""
    run = {"conf": "", "action": [0], "address": [0], "bytes": [0], "stream": [0], **columns}
    return {"format": 1, "source": "x", "runs": [run]}


@pytest.mark.parametrize(
    "value",
    [[], {"format": 2}, {"format": 1, "source": "x", "runs": [{"conf": ""}]}, of(action=[99]),
     of(address=[]), of(bytes=[-1]), of(bytes=[1.5]), of(stream=None)],
)  # fmt: skip
def test_files_that_are_no_histories(tmp_path, value):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value))
    with pytest.raises(UsageError, match="no recorded history"):
        load(path)
    packed = tmp_path / "x.json.gz"
    packed.write_bytes(gzip.compress(b"{")[:-4])
    with pytest.raises(UsageError):
        load(packed)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "none.json")


def test_the_real_allocator():
    """Reserved peaks of H200's recorded settings, to the byte, requests of two streams included.

    One is off: with divisions, when a block in use by another stream comes back decides which
    request finds it, and two recordings of the same script differ by 2.8 % themselves.
    """
    histories = load(GOLDEN)
    found = {}
    for history in histories:
        made = replay_history(history.events, Settings.parse(history.conf))
        assert made.requests > 400
        found[history.conf] = (*made.peaks, f"{made.relative:+.4%}")
        assert len({event[3] for event in history.events}) > 1
    assert "" in found
    loose = found.pop("roundup_power2_divisions:4")
    assert abs(loose[1] - loose[0]) <= 0.028 * loose[0], loose
    assert len(found) == 5
    assert all(ours == real for real, ours, _ in found.values()), found
