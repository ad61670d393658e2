"""Groups that share a name are told apart by their members."""

import json

import pytest
from helpers import production
from helpers.production import DP, TP, stands, without_calls

from megatron_prism.features.hang import analyze, export
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.graph import stall

HOWS = {"history": {"active_only": False, "stacks": True}, "outstanding": production.ACTIVE}


def number_by_process(values):
    """Each process names its groups by a number of its own: the same ones on all ranks."""
    for value in values.values():
        number_of_name = {}
        for number, name in enumerate(value["pg_config"]):
            number_of_name[name] = str(number)
        value["pg_config"] = {
            number_of_name[name]: config | {"name": number_of_name[name]}
            for name, config in value["pg_config"].items()
        }
        for entry in value["entries"]:
            name, desc = entry["process_group"]
            entry["process_group"] = (number_of_name.get(name, name), desc)


FAULTS = [
    (stands(7), 7, "history"),
    (stands(7), 7, "outstanding"),
    (stands(11, silent=True), 11, "history"),
    (stands(11, silent=True), 11, "outstanding"),
    (without_calls(11, "3", "all_gather", TP, 1), 11, "history"),
]


@pytest.mark.parametrize(("fault", "culprit", "how"), FAULTS)
def test_a_fault_is_named_though_groups_share_their_names(fault, culprit, how):
    it = production.job("moe")
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    faults = fault(it) or {}
    state = stall.run_until_stalled(it.programs(), faults)
    values = dict(export.dumps_of(state, **HOWS[how]))
    number_by_process(values)
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert [found_culprit.rank for found_culprit in found.culprits] == [culprit], found


def of_releases_without_descriptions(values):
    """To torch 2.3 a recorder has no descriptions."""
    for value in values.values():
        for config in value["pg_config"].values():
            config["desc"] = ""
        for entry in value["entries"]:
            entry["process_group"] = (entry["process_group"][0], "")


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rank", [0, 5, 7, 11])
def test_a_number_may_be_of_groups_that_overlap(rank, how, silent):
    """The first and last stages also have embedding groups, so their later numbers are others.

    A rank of another stage was named beside rank 0, or in place of ranks 5, 7 and 11.
    """
    it = production.job("interleaved")
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    state = stall.run_until_stalled(it.programs(), stands(rank, silent=silent)(it))
    values = dict(export.dumps_of(state, **HOWS[how]))
    number_by_process(values)
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert [culprit.rank for culprit in found.culprits] == [rank], found
    assert not any("disagree" in text for text in found.missing), found
    of_releases_without_descriptions(values)
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert {culprit.rank for culprit in found.culprits} <= {rank}, found
    assert not any("disagree" in text for text in found.missing), found


def test_names_that_one_rank_exchanged_stay_a_fault():
    """Members that list one group under two names do not meet: that is no name of two groups."""
    it = production.job("moe")
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    state = stall.run_until_stalled(it.programs(), stands(3)(it))
    values = dict(export.dumps_of(state, **HOWS["history"]))
    production.other_names(10, TP, DP)(values)
    found = analyze.diagnose_dumps(DumpSet({r: of_value(v, r) for r, v in values.items()}))
    assert any("dumps disagree about who is in group" in text for text in found.missing)


def test_one_rank_with_other_members_makes_no_numbers_of_processes():
    """Rank 10's dump is of a job with other parallel sizes: no other rank lists its groups."""
    it = production.job("moe")
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    state = stall.run_until_stalled(it.programs(), stands(3)(it))
    values = dict(export.dumps_of(state, **HOWS["history"]))
    for config in values[10]["pg_config"].values():
        ranks = json.loads(config["ranks"])
        # the next rank is in none of the groups of rank 10 but the world
        if len(ranks) < len(values) and 11 not in ranks:
            config["ranks"] = json.dumps(sorted({10, 11, *ranks[2:]}))
    observed = DumpSet({rank: of_value(value, rank) for rank, value in values.items()})
    found = analyze.diagnose_dumps(observed)
    assert not any(" of rank " in text for text in found.missing), found
    assert [culprit.rank for culprit in found.culprits] == [3], found


@pytest.mark.parametrize("small_set", [0, 1])
def test_names_of_two_sets_are_no_movement(small_set):
    """One of two sets lacks ranks, so that its groups alone share no name: nothing moved."""
    it = production.job("moe")
    it.parts = {rank: [(name, list(ops)) for name, ops in it.parts[rank]] for rank in it.parts}
    state = stall.run_until_stalled(it.programs(), stands(7)(it))
    values = dict(export.dumps_of(state, **HOWS["history"]))
    number_by_process(values)
    whole = DumpSet({rank: of_value(value, rank) for rank, value in values.items()})
    part = DumpSet({rank: whole.dumps[rank] for rank in (0, 1)})
    sets = [whole, whole]
    sets[small_set] = part
    found = analyze.diagnose_dumps(sets[0], sets[1])
    assert found.verdict != "healthy", found
    assert any(text.startswith("0 of 2 ranks made calls") for text in found.evidence), found
