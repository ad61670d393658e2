"""What dumps prove is said, also where something else explains the waits."""

import os
import pickle

import pytest
from helpers.dump_values import Dump, verdict
from helpers.flight_dumps import judged, said

from megatron_prism.cli import main as cli


def pairs(count=8):
    return {r: Dump({"tp": (r - r % 2, r - r % 2 + 1), "dp": tuple(range(r % 2, count, 2))})
            for r in range(count)}  # fmt: skip


def test_what_names_the_culprit_is_said_once():
    dumps = pairs()
    for rank, dump in dumps.items():
        dump.call("dp", done=True)
        dump.call("dp", "all_gather" if rank == 3 else "all_reduce")
    named, found = verdict(dumps)
    assert named == {3}
    assert len(said(found, "rank 3 calls all_gather")) == 1
    assert said(found, "besides") == []


def watchdog(dumps, late=None):
    """Retires what is outstanding and counts it as completed; ``late``: it looks ended, too."""
    for dump in dumps:
        for entry in dump.entries:
            if not entry["retired"] and late is not None:
                end = entry["time_created_ns"] + late
                entry |= {"state": "completed", "time_discovered_completed_ns": end}
            entry["retired"] = True
        dump.ended = dict(dump.made)


@pytest.mark.parametrize("late", [None, 600_000_000_001], ids=["as it was", "as if it had ended"])
def test_of_two_ranks_whose_calls_were_aborted_the_one_that_did_not_come_is_named(late):
    """Everything was retired, and the job healthy."""
    dumps = {r: Dump({"tp": (0, 1), "dp": (0, 1)}) for r in range(2)}
    for rank, dump in dumps.items():
        dump.call("dp", done=True)
        dump.call("tp", done=True, count=3)
        dump.call("tp", count=rank)
    watchdog(dumps.values(), late)
    named, found = verdict(dumps)
    assert (named, found.verdict) == ({0}, "host stuck")
    assert found.seq == 4
    assert "calls that were aborted count as outstanding" in found.missing


def test_a_call_that_took_long_and_ended_was_not_aborted():
    """Rank 0 built an index for 11 minutes; with the time-out off the job went on."""
    dumps = {r: Dump({"tp": (0, 1), "dp": (0, 1)}) for r in range(2)}
    for rank, dump in dumps.items():
        dump.call("dp", done=True, time_discovered_completed_ns=660_000_000_000)
        dump.call("tp", done=True, time_created_ns=661_000_000_000, count=2 - rank)
        dump.call("tp", count=rank, time_created_ns=662_000_000_000)
        dump.entries[0]["time_created_ns"] = 1000 if rank else 659_000_000_000
    named, found = verdict(dumps)
    assert "aborted" not in str(found)


@pytest.mark.parametrize("alike", [True, False], ids=["", "one made its groups in another order"])
def test_an_idle_host_whose_groups_have_hashes_for_names_is_known_by_its_siblings(alike):
    """Without calls nothing in its dump says whose the counters are: nobody was named."""
    dumps = pairs()
    for rank, dump in dumps.items():
        dump.call("dp", done=True, count=2)
        dump.call("tp", done=True, count=5)
        if rank != 5:
            dump.call("tp", done=rank != 4)
            dump.call("dp", count=rank != 4)
        if rank == 7 and not alike:
            dump.groups = dict(reversed(dump.groups.items()))
            for entry in dump.entries:
                entry["pg_id"] = 1 - entry["pg_id"]
    values = {rank: dump.value() for rank, dump in dumps.items()}
    for value in values.values():
        value["entries"] = [e for e in value["entries"] if not e["retired"]]
        for entry in value["entries"]:
            entry["process_group"] = (f"h{entry['process_group'][0]}", entry["process_group"][1])
        value["pg_config"] = {f"h{name}": c for name, c in value["pg_config"].items()}
    named, found = judged(values)
    assert named == ({5} if alike else set()), found
    assert any("cannot be named" in line for line in found.missing) == (not alike)


@pytest.mark.parametrize(("age", "code"), [(2, 3), (600, 1), (-30, 1)])
def test_dumps_written_behind_their_last_calls_are_perhaps_of_a_running_job(
    age, code, tmp_path, capsys
):
    """Ranks that had not come to a call a moment ago were likely, with exit 1."""
    dumps, now = pairs(), 1_760_000_000_000_000_000
    for rank, dump in dumps.items():
        dump.call("tp", done=True, time_created_ns=now)
        dump.call("tp", count=rank != 3, done=rank not in (2, 3), time_created_ns=now + 10**6)
        path = tmp_path / f"_dump_{rank}"
        path.write_bytes(pickle.dumps(dump.value()))
        os.utime(path, ns=(0, now + age * 10**9))
    assert cli.main(["hang", "--dumps", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert ("the oldest call waits 2 s of its 600 s" in out) == (code == 3)
    assert ("rank 3 (host stuck)" in out) == (code == 1)
    assert ("among rank 3; 1 rank waiting, nobody is named" in out) == (code == 3)
