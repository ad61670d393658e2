"""``network=``: links that calls of a rank share, oversubscribed leaves."""

import dataclasses
import pathlib

import pytest

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core.errors import RecipeError
from megatron_prism.core.jobs import job_settings, recipe
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.costs.collectives import Shape, modelled
from megatron_prism.replay.costs.machine import machine

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "slices"
H200 = machine("h200")
SIZE = 1 << 28
WORLD = "prism-program 1\nworld size={size} tp=8\nprogram ranks=0-{last}\n"
ONE = "- all_reduce DATA_PARALLEL_GROUP bf16 n=134217728 reduce=sum\n"
# two groups at once, over the same NIC: each moves at half its speed
TWO = """- all_reduce DATA_PARALLEL_GROUP bf16 n=134217728 reduce=sum handle=1
- all_reduce default_pg bf16 n=134217728 reduce=sum handle=2
- wait handle=1
- wait handle=2
"""


def iteration(ops, nodes=2, **what_if):
    programs = parse(WORLD.format(size=8 * nodes, last=8 * nodes - 1) + ops)
    return prism.replay(programs, machine="h200", what_if=prism.WhatIf(**what_if))


@pytest.mark.parametrize("job", ["cp2", "dense_pp2", "interleaved"])
def test_where_nothing_is_shared_the_times_are_the_same_integers(job):
    programs = prism.load(GOLDEN / job)
    alone = prism.replay(programs)
    rails = prism.replay(programs, what_if=prism.WhatIf(network="rails"))
    if not any(link["shared"] for link in rails.to_json()["links"]):
        assert rails.ends == alone.ends
    assert rails.iteration_ns >= alone.iteration_ns


def test_one_call_at_a_time_shares_nothing():
    alone, rails = (iteration(ONE, network=network) for network in (None, "rails"))
    assert rails.ends == alone.ends
    links = rails.to_json()["links"]
    assert [(one["network"], one["busy"], one["shared"]) for one in links] == [(True, 1, 0)] * 2


def test_calls_of_two_groups_share_the_rank_s_nic():
    """Alone each takes its time beside the other; on one NIC they take the sum of both."""
    alone, rails = (iteration(TWO, network=network) for network in (None, "rails"))
    both = alone.prices.collective_ns
    assert alone.iteration_ns == both.max()
    assert rails.iteration_ns == pytest.approx(both.sum(), abs=4)
    assert rails.to_json()["links"][0]["shared"] == pytest.approx(2 * both.min() / both.sum())


def test_only_calls_between_leaves_are_held_up_above_them():
    """40 nodes lie below two leaves of 32; 16 below one."""
    quarter = dataclasses.replace(H200, network_rate=H200.network_rate / 4)
    slower = modelled("all_reduce", Shape(40, 1), SIZE, quarter)
    assert slower > 3.5 * iteration(ONE, 40, network="rails").iteration_ns
    tree = iteration(ONE, 40, network="fat-tree:4")
    assert tree.iteration_ns == pytest.approx(slower, abs=2)
    assert any("fat tree, 4 to 1 above leaves of 32 nodes" in text for text in tree.prices.used())
    small = [iteration(ONE, 16, network=words).ends for words in ("rails", "fat-tree:4")]
    assert small[0] == small[1]


def test_a_recipe_and_a_machine_name_their_network():
    """The command line has the last word."""
    programs = parse(WORLD.format(size=320, last=319) + ONE)
    settings = job_settings.as_text({"hardware.network": "fat-tree"})
    programs = dataclasses.replace(programs, source={**programs.source, "settings": settings})
    here = dataclasses.replace(H200, oversubscription=4.0)

    def ends(**what_if):
        return prism.replay(programs, machine=here, what_if=prism.WhatIf(**what_if)).ends

    assert ends() == ends(network="fat-tree:4")
    assert ends(network="none") == iteration(ONE, 40).ends < ends()
    again = prism.price(programs, machine=here, what_if=prism.WhatIf(network="none")).again()
    assert again.timeline.ends == ends(network="none")
    with pytest.raises(RecipeError, match="hardware.network: 'torus' is no network"):
        recipe.load("llama3-70b_1024gpu_tp8pp4vp5_h200", ["hardware.network=torus"])
    made = recipe.load("llama3-70b_1024gpu_tp8pp4vp5_h200", ["hardware.network=fat-tree:4"])
    assert made.hardware.network == "fat-tree:4"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("network=torus", "no network"),
        ("network=fat-tree:0", "no network"),
    ],
)
def test_networks_that_cannot_be_are_refused(word, says, capsys):
    assert cli.main(["replay", str(GOLDEN / "dense_pp2"), word]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "fix:" in said
