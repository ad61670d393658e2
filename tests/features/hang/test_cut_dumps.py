"""Dumps that are cut in the middle: read to the cut, and said."""

import gzip
import json
import pickle

import pytest
from helpers import random_hangs
from helpers.random_hangs import dumps_of, named

from megatron_prism.core.errors import DumpError
from megatron_prism.core.world import World
from megatron_prism.features.hang import analyze, export
from megatron_prism.features.hang.dumps import DumpSet, load, read_in_process
from megatron_prism.graph import stall

WORLD = World(16, tp=2, pp=2, ep=2)


def stalled(kind):
    programs, faults, culprits = random_hangs.draw(kind, WORLD, 3)
    return stall.run_until_stalled(programs, faults), culprits


@pytest.mark.parametrize("kind", ["operation", "drop", "shape"])
def test_what_others_call_is_their_call(kind):
    """Where no other member left a dump the siblings vote: the text says what they called, and the
    call is one of the culprit's group."""
    state, culprits = stalled(kind)
    (culprit,) = culprits
    odd_ranks = {rank: dump for rank, dump in dumps_of(state).dumps.items() if rank % 2}
    verdict = analyze.diagnose_dumps(DumpSet(odd_ranks))
    assert named(verdict) == culprits
    own_words, others_words = verdict.evidence[0].partition(f"rank {culprit} calls ")[2].split(", ")
    assert others_words.startswith("3 others all_reduce 64 ")
    assert own_words not in others_words
    assert verdict.op == "all_reduce"


def as_json(value):
    """As torch's HTTP handler writes it: keys are sorted, so calls come first."""
    return json.dumps(value, sort_keys=True).encode()


def as_unsorted_json(value):
    return json.dumps(value).encode()


def as_pickle(value):
    return pickle.dumps(value, protocol=2)


def written(folder, state, part, packed=False, form=as_pickle, **how):
    """The dumps of all ranks, of even ranks cut after a part of their bytes, and where."""
    for rank, value in export.dumps_of(state, **how):
        data = form(value)
        data = gzip.compress(data, 1) if packed else data
        size = int(part * len(data)) if rank % 2 == 0 else len(data)
        (folder / f"dump_{rank}").write_bytes(data[:size])
    return read_in_process(folder)


@pytest.mark.parametrize("part", [0.4, 0.7, 0.97])
@pytest.mark.parametrize("kind", random_hangs.KINDS)
def test_cut_dumps_name_nobody_who_is_innocent(tmp_path, kind, part):
    """Calls behind a cut are neither missing nor made: counters and calls that ended tell."""
    state, culprits = stalled(kind)
    if state.finished:
        pytest.skip("no rank waits")
    for how in ({"timing": True}, {"active_only": True, "stacks": False}):
        verdict = analyze.diagnose_dumps(written(tmp_path, state, part, **how))
        assert named(verdict) <= culprits, how
        assert any("cut off" in line for line in verdict.missing), how


@pytest.mark.parametrize("form", [as_json, as_unsorted_json])
@pytest.mark.parametrize("part", [0.4, 0.97])
@pytest.mark.parametrize("kind", ["drop", "host_stuck", "gpu_hang", "swap"])
def test_cut_json_names_nobody_who_is_innocent(tmp_path, kind, part, form):
    """A dump in JSON that ends too early is read to its cut, like a pickle."""
    state, culprits = stalled(kind)
    found = written(tmp_path, state, part, form=form, timing=True)
    cut_dumps = [dump for rank, dump in found.dumps.items() if rank % 2 == 0]
    assert len(cut_dumps) == 8
    assert all(dump.is_cut for dump in cut_dumps)
    verdict = analyze.diagnose_dumps(found)
    assert named(verdict) <= culprits
    assert any("cut off" in line for line in verdict.missing)


@pytest.mark.parametrize("form", [as_json, as_unsorted_json])
def test_calls_of_cut_json_are_those_of_the_whole_dump(tmp_path, form):
    state, _ = stalled("host_stuck")
    whole = written(tmp_path, state, 1.0, form=form).dumps[0]
    cut = written(tmp_path, state, 0.7, form=form).dumps[0]
    assert 0 < len(cut.entries) < len(whole.entries)
    assert cut.entries == whole.entries[: len(cut.entries)]


@pytest.mark.parametrize("size", [1, 20, 200])
def test_json_that_is_cut_before_its_first_call_is_not_read(tmp_path, size):
    state, _ = stalled("host_stuck")
    value = dict(export.dumps_of(state))[0]
    (tmp_path / "dump_0").write_bytes(as_json(value)[:size])
    error = load(0, tmp_path / "dump_0")
    assert isinstance(error, DumpError)
    assert "is no dump, or damaged" in error.message


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_cut_dump_has_its_counters_and_the_calls_that_ended(tmp_path, packed):
    """What is read of a dump cut in the middle of its calls is as in the whole dump."""
    state, _ = stalled("host_stuck")
    whole = written(tmp_path, state, 1.0)
    cut = written(tmp_path, state, 0.8, packed)
    dump, same = cut.dumps[0], whole.dumps[0]
    assert dump.is_cut
    assert not same.is_cut
    assert not cut.dumps[1].is_cut
    assert dump.status == same.status
    assert dump.entries
    assert dump.entries == same.entries[: len(dump.entries)]
    assert len(dump.entries) < len(same.entries)


def test_a_dump_that_is_cut_before_its_counters_is_not_read(tmp_path):
    """Nothing says how far its rank has come."""
    state, _ = stalled("host_stuck")
    (value,) = [value for rank, value in export.dumps_of(state) if rank == 0]
    data = pickle.dumps(value, protocol=2)
    (tmp_path / "dump_0").write_bytes(data[: data.index(b"pg_status") + 40])
    error = load(0, tmp_path / "dump_0")
    assert isinstance(error, DumpError)
    assert "cut off" in error.message
