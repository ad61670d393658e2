"""A whole sweep of a tiny job: two processes, a second run, another batch from the same slices."""

import csv
import io
import json

import pytest

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core import recipe as recipes

TINY = ["model.num_layers=4", "model.hidden_size=64", "model.num_attention_heads=4",
        "model.seq_length=64", "model.vocab_size=256", "train.global_batch_size=96",
        "parallel.world_size=8", "parallel.tp=1", "train.bf16=true",
        "train.use_distributed_optimizer=true", "train.data=mock"]  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    return recipes.load("tiny-gpt_1cpu", TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep") / "out"


@pytest.fixture(scope="module")
def first(recipe, folder):
    return prism.sweep(recipe, {"tp": [1, 3], "pp": [1, 2]}, folder, limit=8 << 30)


def slices(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("slice-*.prism")}


def test_points_are_ranked_and_the_others_say_why(first):
    assert {row.name for row in first.rows} == {"tp=1 pp=1", "tp=1 pp=2"}
    assert [point.by for point in first.dropped] == ["no layout"] * 2
    best = first.rows[0].result
    assert best["low_ns"] <= best["iteration_ns"] <= best["high_ns"]
    text = first.to_text()
    assert "--pipeline-model-parallel-size" in text or "pp" in text
    rows = list(csv.DictReader(io.StringIO(first.to_csv())))
    assert len(rows) == 4
    assert sum(bool(row["reason"]) for row in rows) == 2


def test_the_same_sweep_again_evaluates_nothing_and_says_the_same(recipe, folder, first):
    said = []
    again = prism.sweep(recipe, ["tp=1,3", "pp=1,2"], folder, limit=8 << 30, told=said.append)
    assert again.to_json() == first.to_json()
    assert any("2 of them are there already" in text for text in said)


def test_another_batch_uses_the_slices_and_says_what_a_capture_says(
    recipe, folder, first, tmp_path
):
    before = slices(folder)
    more = prism.sweep(recipe, ["pp=2", "global_batch_size=192"], folder, limit=8 << 30)
    assert slices(folder) == before
    exact = prism.replay(
        prism.capture(
            recipes.load(
                "tiny-gpt_1cpu",
                [*TINY, "parallel.pp=2", "train.global_batch_size=192", "prism.tier=meta"],
            ),
            tmp_path / "exact",
        ),
        machine="h200",
    )
    assert more.rows[0].result["iteration_ns"] == exact.iteration_ns
    assert "microbatches instead of" in more.rows[0].result["provenance"]


def test_a_sweep_over_other_axes_uses_the_results_under_its_own_names(recipe, folder, first):
    other = prism.sweep(recipe, ["pp=2"], folder, limit=8 << 30)
    assert other.rows[0].name == "pp=2"
    assert "pp" in other.to_text()


def test_a_torn_result_is_evaluated_again(recipe, folder, first):
    (path, *_) = sorted((folder / "results").rglob("*.json"))
    whole = path.read_text()
    path.write_text(whole[:20])
    prism.sweep(recipe, ["tp=1,3", "pp=1,2"], folder, limit=8 << 30)
    assert path.read_text() == whole


def test_an_impossible_space_is_a_table_of_reasons(recipe, folder, first):
    none = prism.sweep(recipe, ["tp=1", "pp=1,2"], folder, limit=1 << 10)
    assert none.rows == ()
    assert [point.by for point in none.dropped] == ["memory bound"] * 2
    assert "limit 1 KiB" in none.to_text()


def test_the_command_ends_with_1_where_nothing_runs(tmp_path, capsys):
    words = ["sweep", "tiny-gpt_1cpu", "tp=7,9", "-o", str(tmp_path / "none"), "--json"]
    assert cli.main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["by"] for one in found["dropped"]] == ["no layout"] * 2
