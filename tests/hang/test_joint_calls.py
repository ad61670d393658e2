"""Calls compared as numbers: what is left out cannot be odd."""

import random

import pytest
from helpers.mutations import mutated
from helpers.random_hangs import KINDS, WORLDS, draw

from megatron_prism.core.errors import DumpError
from megatron_prism.graph import stall
from megatron_prism.hang import export, mismatch
from megatron_prism.hang.dumps import DumpSet, of_value, parse
from megatron_prism.hang.state import JobState


def one_by_one(state):
    """Every call of every group compared, in the order of ``votes.mismatches``."""
    calls = {}
    for rank, dump in state.dumps.items():
        for e in dump.entries:
            if not e.pair and e.op != "coalesced" and e.group in state.groups:
                calls.setdefault(e.group, {}).setdefault(e.seq, {}).setdefault(rank, []).append(e)
    found = []
    for by_seq in calls.values():
        odds = [mismatch._compare(mismatch._Made(state), by_seq[seq]) for seq in sorted(by_seq)]
        found += [odd for odd in odds if odd is not None][:1]
    found += mismatch._messages(mismatch._Made(state))
    return sorted(found, key=lambda odd: odd.entry.created_ns)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_planted_faults(kind):
    for seed in range(2):
        programs, faults, _ = draw(kind, WORLDS[seed], seed)
        values = export.dumps_of(stall.run_until_stalled(programs, faults))
        dumps = {rank: of_value(value, rank) for rank, value in values}
        state = JobState(DumpSet(dumps))
        assert mismatch.find_mismatches(state) == one_by_one(state)


@pytest.mark.slow
def test_of_damaged_dumps():
    seen = 0
    for seed in range(60):
        dumps = {}
        for rank, data in mutated(random.Random(seed)).items():
            try:
                dumps[rank] = parse(data, rank)
            except DumpError:
                continue
        state = JobState(DumpSet(dumps))
        found = mismatch.find_mismatches(state)
        assert found == one_by_one(state)
        seen += len(found)
    assert seen


def test_of_nothing():
    assert mismatch.find_mismatches(JobState(DumpSet({}))) == []
