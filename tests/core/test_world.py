"""Ranks, coordinates, groups: equal to Megatron's own arithmetic, and quick at a million ranks."""

import itertools
import math
import time
import warnings

import pytest
from helpers.megatron_groups import groups_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prism.core.errors import WorldError
from megatron_prism.core.world import (
    FAMILIES,
    World,
    format_ranks,
    implied_size,
    orthogonal_rank_groups,
)

SWEEP = [
    {"size": 1},
    {"size": 64, "tp": 8, "pp": 4},
    {"size": 64, "tp": 2, "cp": 2, "pp": 2, "ep": 4},
    {"size": 96, "tp": 2, "cp": 3, "pp": 4, "ep": 2, "etp": 1},
    {"size": 32, "tp": 4, "ep": 8, "etp": 1},
    {"size": 64, "tp": 2, "cp": 2, "pp": 4, "ep": 2, "order": "tp-cp-ep-pp-dp", "etp": 2},
    {"size": 24, "tp": 2, "pp": 3, "order": "tp-cp-ep-pp-dp"},
    {"size": 128, "tp": 4, "cp": 2, "pp": 8, "ep": 2, "etp": 4},
]
IDS = [" ".join(f"{k}{v}" for k, v in sizes.items()) for sizes in SWEEP]


@st.composite
def worlds(draw):
    tp, cp, pp, ep, more = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(5))
    etp = draw(st.sampled_from([None, 1, tp]))
    return World(implied_size(tp, cp, pp, ep, etp) * more, tp, cp, pp, ep, etp)


@given(worlds(), st.data())
def test_coordinates_and_ranks_are_inverse(world, data):
    rank = data.draw(st.integers(0, world.size - 1))
    at = world.coordinates(rank)
    assert world.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
    assert world.rank_at(etp=at.etp, ep=at.ep, edp=at.edp, pp=at.pp) == rank
    assert rank in world.matching(**at._asdict())


@given(worlds(), st.data())
def test_members_of_a_group_agree_on_it(world, data):
    rank = data.draw(st.integers(0, world.size - 1))
    for name, members in world.groups(rank, megatron=(0, 19)).items():
        assert rank in members
        assert list(members) == sorted(set(members))
        assert world.group(members[-1], name) == members


@given(worlds(), st.data())
def test_format_ranks_reads_back(world, data):
    ranks = data.draw(st.lists(st.integers(0, world.size - 1), min_size=1))
    assert world.select(format_ranks(ranks)) == tuple(sorted(set(ranks)))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        (range(0, 128, 8), "0-120:8"),
        ([9, 0, 1, 2, 3, 9], "0-3,9"),
    ],
)
def test_format_ranks(ranks, text):
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("17, 0,0", (0, 17)),
        ("0-31:8", (0, 8, 16, 24)),
        ("pp=3,tp=0;5", (5, 48, 56)),
        ("dp=1,pp=0", tuple(range(8, 16))),
    ],
)
def test_select(text, ranks):
    assert World(64, tp=8, pp=4).select(text) == ranks


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp=4", "choose pp from 0 to 3"),
        ("pp=1,pp=2", "given twice"),
        ("0-9:0", "step of at least 1"),
        ("", "no rank, range or condition"),
        ("tp=0,etp=1", "drop one condition"),
    ],
)
def test_a_bad_selector_says_what_to_type(text, says):
    with pytest.raises(WorldError) as error:
        World(64, tp=8, pp=4).select(text)
    assert says in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"size": 64, "tp": 8, "pp": 3}, "tp 8 x cp 1 x pp 3 = 24 does not divide 64 ranks"),
        ({"size": 64, "tp": 8, "pp": 3}, "size=48 or size=72, or parallel sizes"),
        ({"size": 64, "tp": 8, "ep": 3}, "etp 8 x ep 3 x pp 1 = 24 does not divide 64 ranks"),
        ({"size": 8, "vpp": 2}, "nothing to interleave"),
        ({"size": 8, "order": "tp-dp"}, None),
        ({"size": 8, "cp": 2, "order": "tp-dp-pp"}, "leaves out cp 2"),
        ({"size": 16, "tp": 2, "pp": 2, "order": "tp-pp-dp", "etp": 1}, "use the order"),
    ],
)
def test_sizes_that_do_not_fit_show_the_arithmetic(sizes, says):
    if says is None:
        World(**sizes)
        return
    with pytest.raises(WorldError) as error:
        World(**sizes)
    assert says in str(error.value)


def test_the_fix_for_a_bad_size_works():
    for size, tp, pp, ep in itertools.product((24, 60, 64, 100), (2, 3, 8), (1, 3, 5), (1, 3)):
        try:
            World(size, tp=tp, pp=pp, ep=ep)
        except WorldError as error:
            unit = implied_size(tp, 1, pp, ep)
            offered = [
                int(w.strip(",").removeprefix("size=")) for w in error.fix.split() if "size=" in w
            ]
            assert offered
            for other in offered:
                World(other, tp=tp, pp=pp, ep=ep)
                assert abs(other - size) < unit


def test_no_rank_has_coordinates_that_exclude_each_other():
    with pytest.raises(WorldError, match="no rank has tp=0, etp=1"):
        World(64, tp=8).rank_at(tp=0, etp=1)


def test_a_group_that_megatron_does_not_make():
    with pytest.raises(WorldError, match="makes no group called DP"):
        World(8).group(0, "DP")


def test_gloo_twins_and_releases():
    world = World(8, tp=2)
    later = world.groups(3, megatron=(0, 19))
    assert later["DATA_PARALLEL_GROUP_GLOO"] == later["DATA_PARALLEL_GROUP"] == (1, 3, 5, 7)
    assert set(later) - set(world.groups(3)) == {f.desc for f in FAMILIES if f.since == (0, 19)}


def test_a_million_ranks_are_cheap():
    start = time.process_time()
    world = World(1_048_576, tp=8, cp=2, pp=16, ep=8)
    groups = world.groups(400_000, megatron=(0, 19))
    assert world.coordinates(400_000).pp == 6
    assert len(groups["PIPELINE_MODEL_PARALLEL_GROUP"]) == 16
    assert time.process_time() - start < 2  # 0.05 s


@given(st.data())
def test_containing_is_a_subset_in_the_same_order(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    mask = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    world = math.prod(sizes)
    some = data.draw(st.sets(st.integers(0, world - 1), max_size=4))
    every = orthogonal_rank_groups(sizes, mask).tolist()
    assert sorted(itertools.chain(*every)) == list(range(world))
    assert orthogonal_rank_groups(sizes, mask, containing=some).tolist() == [
        group for group in every if some & set(group)
    ]


# -- against Megatron ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parallel_state():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.parallel_state")


@pytest.mark.megatron
@settings(deadline=None)
@given(st.data())
def test_orthogonal_rank_groups_equal_megatrons(parallel_state, data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    mask = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    world = math.prod(sizes)
    theirs = parallel_state.generate_masked_orthogonal_rank_groups(world, sizes, mask)
    assert orthogonal_rank_groups(sizes, mask).tolist() == theirs


@pytest.mark.megatron
@pytest.mark.parametrize("sizes", SWEEP, ids=IDS)
@pytest.mark.usefixtures("parallel_state")
def test_groups_are_what_initialize_model_parallel_creates(sizes, monkeypatch):
    """Run Megatron's own function for every rank, recording what it would create."""
    from megatron.core import __version__

    world = World(**sizes)
    release = tuple(int(part) for part in __version__.split(".")[:2])
    made = groups_of(monkeypatch, world)
    for rank in range(world.size):
        theirs = {desc: [g for g in groups if rank in g] for desc, groups in made.items()}
        ours = world.groups(rank, megatron=release)
        assert {desc: [members] for desc, members in ours.items()} == {
            desc: groups for desc, groups in theirs.items() if groups
        }
        assert list(ours) == [desc for desc in made if theirs[desc]]  # and in their order
