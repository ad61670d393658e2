"""The parts of a process's life in the answer of fit: peaks, what decides, what does not fit."""

import argparse
import dataclasses
import itertools
import re

import pytest

from megatron_prism.core.programs.program import WHAT_IF, Builder, Programs
from megatron_prism.core.programs.slices import ASSUMED_PARTS, MEMORY_PARTS, SAVED_BYTES
from megatron_prism.core.world import World
from megatron_prism.features.fit.fit import fit
from megatron_prism.features.life.ending import shorten
from megatron_prism.memory import part_peaks, saved_bytes

MIB = 1 << 20
STEADY = 320 * MIB
MODEL, LOAD = 100 * MIB, 400 * MIB


def job(peaks, assumed=()):
    """One rank whose step allocates ``STEADY`` at most, and the parts of its life."""
    made = Builder()
    made.memory(0, 20 * MIB, "param:all")
    made.add("compute", phase="forward", microbatch=0)
    made.memory(1, 300 * MIB, "first @a.py:1")
    made.add("compute", phase="backward", microbatch=0)
    made.memory(1, -300 * MIB)
    made.add("compute", phase="optimizer")
    source = {"tier": "meta"}
    if peaks:
        source[MEMORY_PARTS] = f"0={part_peaks.as_text(peaks)}"
    if assumed:
        source[ASSUMED_PARTS] = f"0={part_peaks.names_as_text(assumed)}"
    return Programs(World(1), (made.build(0),), [0], source=source)


def answer(peaks, limit=1 << 40, assumed=()):
    return fit(job(peaks, assumed), limit=limit, device=None)


def test_text_of_parts_is_read_back():
    peaks = {"model": 5, "first iteration": 7, "end": 0}
    text = part_peaks.as_text(peaks)
    assert " " not in text
    source = {MEMORY_PARTS: f"3={text} 12=load:9", ASSUMED_PARTS: "12=load"}
    assert part_peaks.of_source(source) == {
        3: part_peaks.PartPeaks(peaks),
        12: part_peaks.PartPeaks({"load": 9}, ("load",)),
    }


@pytest.mark.parametrize("text", ["", "0=", "model:5", "x=model:5", "0=model:-5", "0=model"])
def test_a_source_that_says_no_parts_has_none(text):
    ranks = part_peaks.of_source({MEMORY_PARTS: text})
    assert not any(parts.peaks for parts in ranks.values())


def test_a_part_that_needs_more_than_a_step_decides():
    answered = answer({"model": MODEL, "load": LOAD, "steady iteration": STEADY})
    life = answered.to_json()["life"]["all"]
    assert life["decides"] == "load"
    assert life["parts"]["load"] == LOAD
    assert life["parts"]["steady iteration"] == STEADY
    assert answered.fits
    text = answered.to_text()
    assert "loading decides: 400 MiB beside 320 MiB" in text
    # rows in the order in which the parts run, with what they differ by from a step
    assert re.search(r"building the model +100 MiB +-220 MiB\n +loading +400 MiB +\+80 MiB", text)


def test_a_step_decides_where_it_needs_most():
    answered = answer({"model": MODEL, "load": STEADY})
    assert answered.to_json()["life"]["all"]["decides"] == "steady iteration"
    assert "a steady step decides: 320 MiB" in answered.to_text()


def test_the_step_is_that_of_the_slice():
    """Where few microbatches ran, the part's own peak is less than that of all of them."""
    life = answer({"steady iteration": MODEL}).to_json()["life"]["all"]
    assert life["parts"]["steady iteration"] == STEADY


def test_what_did_not_run_is_unknown_and_not_nothing():
    answered = answer({"model": MODEL})
    parts = answered.to_json()["life"]["all"]["parts"]
    assert parts["load"] is parts["evaluation"] is parts["checkpoint"] is None
    text = answered.to_text()
    assert "evaluation, saving: did not run; --prism-life" in " ".join(text.split())
    assert not re.search(r"^ +evaluation", text, re.MULTILINE)


def test_a_part_that_exceeds_the_limit_does_not_fit_though_steps_do():
    answered = answer({"load": LOAD}, limit=360 * MIB)
    assert answered.steps_fit
    assert not answered.fits
    assert answered.to_json()["fits"] is False
    assert not answered.to_rows()[0]["fits"]
    text = answered.to_text()
    assert text.startswith("does not fit")
    assert "all runs out in loading, which needs 400 MiB at least" in text
    # changes are tried on iterations, which fit
    assert "what frees memory" not in text
    assert "nothing that can be tried" not in text
    assert "It does not fit" in answered.to_html()


def test_a_part_that_ran_on_an_assumption_says_so():
    answered = answer({"load": LOAD}, limit=360 * MIB, assumed=["load"])
    assert "checkpoint" in answered.to_json()["life"]["all"]["assumed"]["load"]
    text = " ".join(answered.to_text().split())
    assumption = "of an assumed checkpoint of the job's own layout"
    assert f"loading: {assumption}" in text
    # the verdict rests on it, too
    assert f"needs 400 MiB at least: {assumption}" in text


def test_a_part_that_ran_as_in_the_job_says_nothing_of_assumptions():
    answered = answer({"load": LOAD})
    assert answered.to_json()["life"]["all"]["assumed"] == {}
    assert "assumed checkpoint" not in answered.to_text()


@pytest.mark.parametrize("text", ["", "0=", "0=Load", "x=load", "0=load,,", "0=load:3"])
def test_a_source_that_lies_of_assumptions_names_none(text):
    source = {MEMORY_PARTS: "0=load:9", ASSUMED_PARTS: text}
    assert part_peaks.of_source(source)[0].assumed == ()


def test_slices_that_keep_no_parts_have_no_section():
    answered = answer({})
    assert "life" not in answered.to_json()
    assert "the parts of the process's life" not in answered.to_text()


@pytest.mark.parametrize(
    ("eval_iters", "shortened"), [(32, 1), (0, 0), ([7, 9], [1, 1]), (None, None)]
)
def test_a_job_ends_behind_the_step_that_begins(eval_iters, shortened):
    settings = argparse.Namespace(
        curr_iteration=2,
        train_iters=1000,
        exit_interval=500,
        save_interval=None,
        eval_interval=100,
        eval_iters=eval_iters,
        full_validation=True,
        do_test=True,
    )
    shorten(settings)
    assert settings.train_iters == 3
    assert settings.save_interval == 3
    # not within the loop, and once behind it
    assert settings.train_iters % settings.eval_interval
    assert settings.eval_iters == shortened
    assert (settings.exit_interval, settings.full_validation, settings.do_test) == (
        None,
        False,
        False,
    )


def writes(text, world=None, program_of=(0,)):
    """A job whose first rank writes what ``text`` says."""
    made = job({"load": LOAD})
    source = {**made.source, SAVED_BYTES: f"0={text}"}
    return Programs(world or World(1), made.programs, list(program_of), source=source)


DIVIDED = "own:100,dense:100x8,expert:,first_dense:,first_expert:,divided:dp,async:1,expanded:0"
DENSE, EXPERT = saved_bytes.Holders.DENSE, saved_bytes.Holders.EXPERT


def test_what_ranks_write_is_read_back():
    shards = {DENSE: {9: 1, 7: 20}, saved_bytes.Holders.FIRST_EXPERT: {5: 2}}
    written = saved_bytes.SavedBytes(7, shards, saved_bytes.Division.NONE, True, 3)
    text = written.as_text()
    assert " " not in text
    assert saved_bytes.of_source({SAVED_BYTES: f"4={text}"}) == {4: written}


@pytest.mark.parametrize("text", ["", "own:1", DIVIDED + ",", DIVIDED.replace("own:", "own:-")])
def test_a_source_that_lies_of_writes_has_none(text):
    assert saved_bytes.of_source({SAVED_BYTES: f"0={text}"}) == {}


def test_ranks_of_a_group_divide_what_all_of_them_have():
    need = saved_bytes.saving_need(writes(DIVIDED, World(8, tp=2), [0] * 8))
    # four replicas
    assert need.rank_bytes == 100 + 200
    assert need.node_bytes == 8 * 300
    assert need.node_ranks == 8


def test_whole_shards_are_divided():
    """A vocabulary's rows are one shard, which a single rank writes."""
    text = DIVIDED.replace("100x8", "10x4+1000x1")
    need = saved_bytes.saving_need(writes(text, World(4), [0] * 4))
    assert need.rank_bytes == 100 + 1000
    assert need.node_bytes == 4 * 100 + 1000 + 40


def test_without_parallel_saving_the_first_replica_writes_all():
    text = DIVIDED.replace("divided:dp", "divided:none")
    need = saved_bytes.saving_need(writes(text, World(8, tp=2), [0] * 8))
    assert need.rank_bytes == 900
    # two tensor-parallel ranks of the first replica, and six others' own states
    assert need.node_bytes == 2 * 900 + 6 * 100
    # of experts each rank of the first replica has others
    text = text.replace("expert:,", "expert:50x2,", 1)
    need = saved_bytes.saving_need(writes(text, World(8, tp=2, ep=2, etp=2), [0] * 8))
    assert need.rank_bytes == 1000
    assert need.node_bytes == 2 * 1000 + 2 * 200 + 4 * 100


@pytest.mark.parametrize("division", ["dp", "ep_dp"])
@pytest.mark.parametrize(
    "world",
    [
        World(16, tp=2, ep=4),
        World(16, tp=2, ep=4, etp=1),
        World(16, cp=2, pp=2, ep=2),
        World(8, ep=8),
    ],
)
def test_experts_are_divided_as_megatron_divides_them(world, division):
    """Megatron's own groups and its own division of their shards."""
    exchange = pytest.importorskip("megatron.core.dist_checkpointing.exchange_utils")
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    order = "tp-cp-ep-dp-pp"
    dense = parallel_state.RankGenerator(
        tp=world.tp, ep=1, dp=world.dp, pp=world.pp, cp=world.cp, order=order
    ).get_ranks("dp-cp")
    expert = parallel_state.RankGenerator(
        tp=world.etp, ep=world.ep, dp=world.edp, pp=world.pp, cp=1, order=order
    ).get_ranks("dp")
    counts = {DENSE: {700: 3, 90: 6}, EXPERT: {400: 4, 30: 1}}
    expected = [0] * world.size
    for group in dense if division == "dp" else expert:
        places_of_shard, size_of_shard = {}, {}
        for place, rank in enumerate(group):
            places_of_shard["own", rank], size_of_shard["own", rank] = [place], 100
            for holders, replica_groups in ((DENSE, dense), (EXPERT, expert)):
                first = next(replicas[0] for replicas in replica_groups if rank in replicas)
                for size, number in itertools.product(counts[holders], range(6)):
                    if first in group and number < counts[holders][size]:
                        shard = (holders.value, 1000 * first + number + size / 1000)
                        places_of_shard.setdefault(shard, []).append(place)
                        size_of_shard[shard] = size
        writer_of_shard = exchange.distribute_shards_to_ranks(
            places_of_shard, size_of_shard, len(group), set()
        )
        for shard, place in writer_of_shard.items():
            expected[group[place]] += size_of_shard[shard]
    text = saved_bytes.SavedBytes(100, counts, saved_bytes.Division(division)).as_text()
    need = saved_bytes.saving_need(writes(text, world, [0] * world.size))
    assert need.rank_bytes == max(expected)
    nodes = [sum(expected[start : start + 8]) for start in range(0, world.size, 8)]
    assert need.node_bytes == max(nodes)


def test_states_that_the_first_rank_gathers_are_not_divided():
    text = DIVIDED.replace("first_dense:,", "first_dense:4000x2,")
    need = saved_bytes.saving_need(writes(text, World(8, tp=2), [0] * 8))
    assert need.rank_bytes == 100 + 8000
    # the others of a group divide the rest
    assert need.node_bytes == 8 * 100 + 2 * (8000 + 800)


def test_what_is_written_is_not_known_with_another_number_of_replicas():
    made = writes(DIVIDED, World(8, tp=2), [0] * 8)
    source = {**made.source, WHAT_IF: "data-parallel 8 for 4: assumed"}
    assert saved_bytes.saving_need(dataclasses.replace(made, source=source)) is None


def test_the_answer_says_what_saving_takes_of_the_host():
    answered = fit(writes(DIVIDED), limit=1 << 40, device=None)
    saving = answered.to_json()["saving"]
    assert (saving["rank_bytes"], saving["is_async"]) == (900, True)
    text = " ".join(answered.to_text().split())
    sentence = "saving copies up to 900 B of a rank to its host, up to 900 B of a node of 1 rank"
    assert f"{sentence}; the copies stay" in text
    assert "in bf16" not in text
    text = DIVIDED.replace("async:1,expanded:0", "async:0,expanded:2048")
    answered = fit(writes(text), limit=1 << 40, device=None)
    text = " ".join(answered.to_text().split())
    assert "the copies stay" not in text
    assert "on the device in bf16, too: 2 KiB" in text
    assert "saving copies" not in fit(job({"load": LOAD}), limit=1 << 40, device=None).to_text()
