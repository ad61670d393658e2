"""Axes, points, and what falls before anything runs."""

import dataclasses

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.features.sweep import layout, space, sweep

LLAMA = recipes.load("llama3-70b_1024gpu_tp8pp4vp5_h200")


def points(*words):
    return space.points(LLAMA, space.parse_axes(words, LLAMA))


def test_axes_have_short_names_megatrons_names_and_keys_of_a_recipe():
    found = space.parse_axes(
        ["tp=1,2", "--pipeline-model-parallel-size=4", "lr=1", "recompute=none,full"], LLAMA
    )
    assert found == {"tp": (1, 2), "pp": (4,), "lr": (1,), "recompute": (None, "full")}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("tpp=1,2", "--tensor-model-parallel-size"),
        ("zzzz=1", "micro_batch_size"),
        ("tp", "tp=1,2,4"),
        ("tp=two", "tp=1,2,4"),
        ("recompute=some", "recompute=none,full,selective"),
    ],
)
def test_a_typo_names_megatrons_argument(word, says):
    with pytest.raises(UsageError) as error:
        space.parse_axes([word], LLAMA)
    assert says in (error.value.fix or "")


def test_the_same_layout_is_one_point():
    assert len(points("tp=8", "vpp=none,1,5")) == 2


def test_a_point_that_is_no_layout_says_why():
    one, other = points("tp=8", "pp=3,4")
    assert one.by == "no layout"
    assert "does not divide 1,024" in one.reason
    assert not other.by
    assert other.layout.recipe.sequence_parallel


def test_auto_tries_what_divides():
    found = space.parse_axes(["tp=auto", "pp=auto"], LLAMA)
    assert found["tp"] == (1, 2, 4, 8)
    assert found["pp"] == (1, 2, 4, 8, 16)


def test_experts_over_replicas_have_a_family():
    """Whose world with one replica is none."""
    job = dataclasses.replace(SCRIPT, words=(*SCRIPT.words, "--num-experts", "8"))
    points_ = space.points(job, space.parse_axes(["ep=1,4", "dp=4,8", "tp=1"], job))
    assert [point.by for point in points_] == [""] * 4
    assert len({point.layout.family() for point in points_}) == 2
    moe = LLAMA.changed(num_experts=8)
    words = ["tp=1", "pp=1", "vpp=1", "ep=8", "world_size=8,16"]
    same = space.points(moe, space.parse_axes(words, moe))
    assert [point.by for point in same] == ["", ""], same[0].reason
    assert len({point.layout.family() for point in same}) == 1


def test_a_family_differs_in_replicas_and_batch_alone():
    same = points("tp=8", "pp=4", "vpp=5", "world_size=512,1024", "global_batch_size=512,1024")
    assert len({point.layout.family() for point in same}) == 1
    other = points("tp=8", "pp=4", "vpp=5", "micro_batch_size=1,2")
    assert len({point.layout.family() for point in other}) == 2


def test_the_memory_bound_drops_what_cannot_fit():
    small, large = sweep.too_large(points("tp=8", "pp=1,8", "vpp=1"), 45 << 30)
    assert small.by == sweep.MEMORY
    assert "limit 45 GiB" in small.reason
    assert not large.by


SCRIPT = space.Script(
    "pretrain_gpt.py",
    tuple(
        "--num-layers 8 --micro-batch-size 1 --global-batch-size 64 --bf16 --sequence-parallel "
        "--tensor-model-parallel-size=2 --use-distributed-optimizer --recompute-activations".split()
    ),
    ("--prism-world-size", "16"),
)


def of_script(*words):
    return space.points(SCRIPT, space.parse_axes(words, SCRIPT))


@pytest.mark.parametrize(
    ("given", "tp", "expected"),
    [("", 1, False), ("", 2, True), ("--tensor-model-parallel-size 2", 4, False),
     ("--tensor-model-parallel-size 2 --sequence-parallel", 4, True),
     ("--tensor-model-parallel-size 2 --sequence-parallel", 1, False)],
)  # fmt: skip
def test_sequence_parallelism_of_a_script_follows_the_axis_tp(given, tp, expected):
    words = f"--num-layers 8 --micro-batch-size 1 --global-batch-size 64 {given}".split()
    job = space.Script("pretrain_gpt.py", tuple(words), ("--prism-world-size", "8"))
    (one,) = space.points(job, space.parse_axes([f"tp={tp}"], job))
    assert ("--sequence-parallel" in one.layout.command()) == expected


def test_a_script_has_megatrons_options_as_axes():
    one, other = of_script("tensor-model-parallel-size=1,4", "recompute=full", "bf16=none")
    assert (one.layout.world.tp, other.layout.world.tp) == (1, 4)
    assert "--sequence-parallel" not in one.layout.words
    assert "--sequence-parallel" in other.layout.words
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert full in " ".join(other.layout.words)
    assert not {"--recompute-activations", "--bf16"} & set(other.layout.words)
    with pytest.raises(UsageError) as error:
        of_script("tensor-model-paralel-size=1")
    assert "--tensor-model-parallel-size" in (error.value.fix or "")


def test_auto_reads_the_sizes_of_a_script():
    found = space.parse_axes(["pp=auto", "micro_batch_size=auto", "ep=auto"], SCRIPT)
    assert found == {"pp": (1, 2, 4, 8), "micro_batch_size": (1, 2, 4, 8), "ep": (1,)}
    with pytest.raises(UsageError, match="--num-attention-heads"):
        space.parse_axes(["tp=auto"], SCRIPT)


def test_points_of_a_script_that_make_no_layout_say_why():
    one, other, good = of_script("tp=3,1,2", "global_batch_size=64")[:1] + of_script(
        "global_batch_size=60,64"
    )
    assert [point.by for point in (one, other, good)] == ["no layout", "no layout", ""]
    assert "does not divide" in one.reason
    assert "--global-batch-size 60" in other.reason


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--micro-batch-size 0", "--micro-batch-size 0 is no number"),
        ("--micro-batch-size", "--micro-batch-size is no number"),
        ("--pipeline-model-parallel-size two", "--pipeline-model-parallel-size two is no number"),
    ],
)
def test_a_script_s_own_sizes_are_checked(words, says):
    job = dataclasses.replace(SCRIPT, words=(*SCRIPT.words, *words.split()))
    (point,) = space.points(job, space.parse_axes(["dp=2"], job))
    assert says in point.reason


def test_a_script_s_layouts_share_slices_where_replicas_and_batch_differ():
    same = of_script("dp=2,4", "global_batch_size=64,128")
    assert {point.layout.world.size for point in same} == {4, 8}
    assert len({point.layout.family() for point in same}) == 1
    assert same[0].layout.resized(4, 3).num_microbatches == 3
    assert same[0].key != same[1].key


@pytest.mark.megatron
@pytest.mark.parametrize("pp", [1, 2])
def test_a_script_of_any_pipeline_knows_the_fewest_microbatches_to_capture(pp):
    pytest.importorskip("megatron.core")
    words = ["--micro-batch-size", "1", "--global-batch-size", "64"]
    words += ["--pipeline-model-parallel-size", str(pp)]
    one = layout.ScriptLayout.of("pretrain_gpt.py", words, ["--prism-world-size", "8"])
    assert 0 < one.fewest <= 64
