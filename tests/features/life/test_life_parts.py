"""The parts of a process's life in the answer of fit: peaks, what decides, what does not fit."""

import argparse
import re

import pytest

from megatron_prism.core.program import Builder, Programs
from megatron_prism.core.slices import ASSUMED_PARTS, MEMORY_PARTS, SAVED_BYTES
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


DIVIDED = "own:100,shared:800,divided:1,async:1,expanded:0"


def test_what_ranks_write_is_read_back():
    written = saved_bytes.SavedBytes(7, 9, False, True, 3)
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


def test_without_parallel_saving_the_first_replica_writes_all():
    text = DIVIDED.replace("divided:1", "divided:0")
    need = saved_bytes.saving_need(writes(text, World(8, tp=2), [0] * 8))
    assert need.rank_bytes == 900
    # two tensor-parallel ranks of the first replica, and six others' own states
    assert need.node_bytes == 2 * 900 + 6 * 100


def test_the_answer_says_what_saving_takes_of_the_host():
    answered = fit(writes(DIVIDED), limit=1 << 40, device=None)
    saving = answered.to_json()["saving"]
    assert (saving["rank_bytes"], saving["is_async"]) == (900, True)
    text = " ".join(answered.to_text().split())
    assert "saving copies 900 B to the host a rank, 900 B a node of 1; the copies stay" in text
    assert "in bf16" not in text
    text = DIVIDED.replace("async:1,expanded:0", "async:0,expanded:2048")
    answered = fit(writes(text), limit=1 << 40, device=None)
    text = " ".join(answered.to_text().split())
    assert "the copies stay" not in text
    assert "on the device in bf16, too: 2 KiB" in text
    assert "saving copies" not in fit(job({"load": LOAD}), limit=1 << 40, device=None).to_text()
