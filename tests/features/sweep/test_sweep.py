"""A whole sweep of a tiny job: two processes, a second run, another batch from the same slices."""

import csv
import dataclasses
import io
import json
import os
import shutil
import signal
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.programs import without_host

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.features.sweep import evaluate, layout
from megatron_prism.features.sweep import sweep as ranking
from megatron_prism.features.sweep.space import SweepPoint

TINY = ["num_layers=4", "hidden_size=64", "num_attention_heads=4",
        "seq_length=64", "vocab_size=256", "global_batch_size=384",
        "world_size=8", "tp=1", "bf16=true",
        "use_distributed_optimizer=true", "data_path=null"]  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    return recipes.load("tiny-gpt_1cpu", TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep") / "out"


@pytest.fixture(scope="module")
def first(recipe, folder):
    axes = {"tp": [1, 3], "global_batch_size": [192, 384]}
    return prism.sweep(recipe, axes, folder, limit=8 << 30, workers=1)


def slices(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("slice-*.prism")}


def test_points_are_ranked_and_the_others_say_why(first):
    assert {row.name for row in first.rows} == {
        "tp=1 global_batch_size=384",
        "tp=1 global_batch_size=192",
    }
    assert [point.by for point in first.dropped] == ["no layout"] * 2
    best = first.rows[0].result
    assert best["low_ns"] <= best["iteration_ns"] <= best["high_ns"]
    rows = list(csv.DictReader(io.StringIO(first.to_csv())))
    assert len(rows) == 4
    assert sum(bool(row["reason"]) for row in rows) == 2


def test_points_of_one_program_are_captured_once(first, folder):
    assert len(slices(folder)) == 1
    assert all("microbatches instead of" in row.result["provenance"] for row in first.rows)


def test_compare_says_of_two_points_what_the_sweep_says(first, folder, capsys):
    one, other = (row.result for row in sorted(first.rows, key=lambda r: r.result["iteration_ns"]))
    words = [str(folder / point["slices"]) for point in (one, other)]
    assert cli.main(["compare", *words, "--machine", "h200", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["difference"]
    # a sweep ranks by the mean over hosts, compare says what was replayed
    as_replayed = [{**point, "headline": None} for point in (one, other)]
    (_, found) = ranking.ranked(as_replayed, "time")
    of_first = [said[key] / one["iteration_ns"] for key in ("ns", "low_ns", "high_ns")]
    assert found.slower == pytest.approx(of_first)


@pytest.mark.ci
def test_slices_of_few_microbatches_bring_those_that_any_number_follows_from(recipe, tmp_path):
    few, many = (
        prism.sweep(recipe, ["pp=2", f"global_batch_size={size}"], tmp_path, limit=8 << 30)
        for size in (32, 384)
    )
    assert few.rows[0].result["provenance"] == "as captured"
    assert sorted(path.name for path in tmp_path.glob("slices/*/*.whole")) == [
        "dp4-m2.whole",
        "dp4-m5.whole",
    ]
    assert "24 microbatches instead of 5" in many.rows[0].result["provenance"]


def test_the_page_holds_every_point_and_ends_no_script_early(first):
    hostile = dataclasses.replace(first, recipe="</script><img src=x>")
    page = hostile.to_html()
    assert "<img" not in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [len(data["rows"]), len(data["dropped"])] == [2, 2]
    assert any(row["front"] for row in data["rows"])
    for one in data["pair"]:
        assert sum(ns for _, ns in one["parts"]) == pytest.approx(one["ns"], rel=1e-6)


def test_a_point_has_a_timeline_of_its_time(first):
    assert first.timeline(1).iteration_ns == first.rows[0].result["iteration_ns"]
    page = first.to_html({first.rows[0].result["key"]: "timelines/1.html"})
    assert "timelines/1.html" in page


def test_on_ray_a_dead_worker_s_family_fails_and_the_others_are_there(tmp_path, monkeypatch):
    """A stand-in for Ray: a task runs when it is waited for, the second one's worker dies."""
    points = [SweepPoint({"tp": size}, None) for size in (1, 2, 4)]
    ended = []

    class WorkerCrashedError(Exception):
        pass

    def get(task):
        ended.append(task)
        if len(ended) == 2:
            raise WorkerCrashedError
        task()

    def remote(**wants):
        assert wants["max_retries"] == 2
        return lambda work: SimpleNamespace(remote=lambda *given: partial(work, *given))

    ray = SimpleNamespace(
        init=lambda address, **how: None, shutdown=lambda: None, remote=remote, get=get,
        wait=lambda tasks: (tasks[:1], tasks[1:]),
        exceptions=SimpleNamespace(WorkerCrashedError=WorkerCrashedError),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(evaluate, "evaluate", lambda point, settings: {"key": point.key})
    told = []
    evaluate.run([[point] for point in points], None, tmp_path / "out", address="auto",
                 told=told.append)  # fmt: skip
    found = [json.loads((tmp_path / "out" / f"{p.key}.json").read_text()) for p in points]
    assert [one.get("by") for one in found] == [None, "failed", None]
    assert told == [1, 2]


@pytest.mark.parametrize("address", ["", "local"])
def test_a_killed_worker_s_family_goes_to_another(tmp_path, monkeypatch, address):
    """SIGKILL, as the kernel sends it where memory ends: once in one family, always in another; the
    one behind both is evaluated all the same."""
    if address:
        pytest.importorskip("ray")
    points = [SweepPoint({"tp": size}, None) for size in (1, 2, 4)]
    mark, sizes = tmp_path / "killed", {point.key: point.axes["tp"] for point in points}

    def deadly(point, settings):
        if sizes[point.key] == 2 or sizes[point.key] == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"key": point.key}

    def work(family, settings, results):  # Ray's workers are no forks: they get this one
        (point,) = family
        (results / f"{point.key}.json").write_text(json.dumps(deadly(point, settings)))

    monkeypatch.setattr(evaluate, "evaluate", deadly)
    if address:
        monkeypatch.setattr(evaluate, "_work", work)
    evaluate.run([[point] for point in points], None, tmp_path / "out", address=address, workers=1)
    found = [json.loads((tmp_path / "out" / f"{p.key}.json").read_text()) for p in points]
    assert [one.get("by") for one in found] == [None, "failed", None]
    assert mark.exists()


@pytest.mark.ci
def test_optuna_picks_points_and_hears_of_them(recipe, folder, first, tmp_path, monkeypatch):
    """A stand-in for Optuna that takes the last value of every axis, then the first, and so on; its
    first worker is killed."""
    told, mark, real = {}, tmp_path / "killed", evaluate.evaluate

    def deadly(point, settings):
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(point, settings)

    monkeypatch.setattr(evaluate, "evaluate", deadly)

    class Study:
        def ask(self):
            number = len(told)
            told[number] = None
            return SimpleNamespace(
                number=number, suggest_categorical=lambda axis, values: values[-1 + number % 2]
            )

        def tell(self, trial, score=None, state="scored"):
            told[trial.number] = (score, state)

    optuna = SimpleNamespace(
        logging=SimpleNamespace(set_verbosity=lambda level: None, WARNING=0),
        samplers=SimpleNamespace(TPESampler=lambda seed: None),
        create_study=lambda sampler: Study(),
        trial=SimpleNamespace(TrialState=SimpleNamespace(PRUNED="pruned")),
    )
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    axes = ["tp=1,3", "global_batch_size=96,384"]
    made = prism.sweep(recipe, axes, folder, limit=8 << 30, objective="time", trials=3)
    assert mark.exists()
    assert [row.name for row in made.rows] == ["tp=1 global_batch_size=96"]
    assert [point.name for point in made.dropped] == ["tp=3 global_batch_size=384"]
    time = made.rows[0].result["iteration_ns"]
    assert list(told.values()) == [(None, "pruned"), (time, "scored"), (None, "pruned")]


def test_without_ray_an_address_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as error:
        evaluate.run([[SweepPoint({"tp": 1}, None)]], None, tmp_path, address="auto")
    assert "megatron_prism[sweep]" in (error.value.fix or "")


def test_the_same_sweep_again_evaluates_nothing_and_says_the_same(recipe, folder, first):
    said = []
    again = prism.sweep(
        recipe, ["tp=1,3", "global_batch_size=192,384"], folder, limit=8 << 30, told=said.append
    )
    assert again.to_json() == first.to_json()
    assert any("2 of them are there already" in text for text in said)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_what_follows_from_a_shorter_capture_is_what_a_capture_says(recipe, folder, tmp_path, pp):
    axes = [f"pp={pp}", "global_batch_size=192"]
    found = prism.sweep(recipe, axes, folder, limit=8 << 30, workers=1)
    settings = [*TINY, f"pp={pp}", "global_batch_size=192", "prism.tier=meta"]
    whole = prism.capture(recipes.load("tiny-gpt_1cpu", settings), tmp_path / "exact")
    exact = prism.replay(whole, machine="h200").iteration_ns  # hosts take another time each time
    assert found.rows[0].result["iteration_ns"] == pytest.approx(exact, rel=0.01)
    assert "microbatches instead of" in found.rows[0].result["provenance"]


def refused(*args):
    raise PrismError("nothing is captured any more")


@pytest.mark.ci
@pytest.mark.slow
def test_memory_of_a_point_is_that_of_its_capture_on_every_machine(recipe, tmp_path, monkeypatch):
    axes, out = ["pp=2", "global_batch_size=32"], tmp_path / "sweep"
    settings = [*TINY, "pp=2", "global_batch_size=32", "prism.tier=meta",
                "train_iters=2"]  # fmt: skip
    whole = prism.capture(recipes.load("tiny-gpt_1cpu", settings), tmp_path / "exact")
    most = max(prism.peak_memory(whole).classes.values(), key=lambda one: one["peak_device"])
    for machine in ("h200", "h100", "b200"):
        made = prism.sweep(recipe, axes, out, machine=machine, workers=1)
        found = made.rows[0].result["memory"]
        assert [found[key] for key in ("allocated", "reserved", "bytes", "level", "history")] == [
            most["peak_allocated"], most["peak_reserved"], most["peak_device"], "device",
            "as captured",
        ]  # fmt: skip
        assert ("not measured on" in made.to_text()) == (machine != "h200")
        assert not prism.sweep(recipe, axes, out, machine=machine, limit=3 << 30).rows
    for program in whole.programs:
        (path,) = out.glob(f"slices/*/dp4-m2/slice-{program.rank:06d}.prism")
        (mine,) = prism.load(path).programs
        assert without_host(mine) == without_host(program)
        assert np.array_equal(mine.history, program.history)
    (beside,) = prism.sweep(recipe, ["pp=2", "global_batch_size=80"], out, workers=1).rows
    assert beside.result["memory"]["history"] == "behind iterations of fewer microbatches"
    monkeypatch.setattr(layout.RecipeLayout, "capture", refused)
    others = prism.sweep(recipe, ["pp=2", "global_batch_size=192,384", "dp=2,4"], out, workers=1)
    assert [one.result["memory"]["history"].count("instead of 5") for one in others.rows] == [1] * 4
    monkeypatch.setattr(layout, "__version__", "0.0.1")  # of which no slice is used
    (failed,) = prism.sweep(recipe, ["pp=2", "global_batch_size=768"], out, workers=1).dropped
    assert failed.by == "failed"


def test_a_sweep_over_other_axes_uses_the_results_under_its_own_names(recipe, folder, first):
    other = prism.sweep(recipe, ["global_batch_size=384"], folder, limit=8 << 30)
    assert other.rows[0].name == "global_batch_size=384"
    assert "global_batch_size" in other.to_text()


@pytest.mark.parametrize(
    ("name", "other"), [("__version__", "0.0.1"), ("versions", lambda: {"torch": "0.0.1"})]
)
def test_results_of_another_release_are_not_mixed(recipe, folder, first, monkeypatch, name, other):
    """They stay in the folder, and this release evaluates its own."""
    monkeypatch.setattr(ranking, name, other)
    monkeypatch.setattr(ranking, "run", lambda families, **how: None)
    said = []
    made = prism.sweep(recipe, ["tp=1", "global_batch_size=192,384"], folder, limit=8 << 30,
                       told=said.append)  # fmt: skip
    assert [point.by for point in made.dropped] == ["not evaluated"] * 2
    assert any("2 to evaluate, 0 of them are there already" in text for text in said)


def test_a_torn_result_is_evaluated_again(recipe, folder, first, tmp_path):
    """In a copy of the folder without results, since other tests leave theirs in it."""
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    shutil.rmtree(copied / "results")
    words = ["tp=1", "global_batch_size=192,384"]
    prism.sweep(recipe, words, copied, limit=8 << 30, workers=1)
    path = min((copied / "results").rglob("*.json"))
    whole = path.read_text()
    path.write_text(whole[:20])
    prism.sweep(recipe, words, copied, limit=8 << 30, workers=1)
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
