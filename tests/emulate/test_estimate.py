"""An estimate from few layers is near what the whole job needs."""

import io
import json

import pytest
from helpers.metamorphic import fresh
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT
from rich.console import Console

from megatron_prism.cli import job_slices
from megatron_prism.cli.main import main
from megatron_prism.emulate.jobs import estimate
from megatron_prism.emulate.jobs.estimate import Estimator, JobEstimate, estimated
from megatron_prism.emulate.processes.workers import RankTask
from megatron_prism.memory.job_peaks import needed, peak_memory
from megatron_prism.replay.priced_graph import price

FIGURES = JobEstimate((1, 2, 8), "pp=0", 11 << 30, 9 << 30, 110_000_000, "on H100, some host")


@pytest.mark.ci
@pytest.mark.parametrize("settings", [(), ("pp=2",)])
def test_an_estimate_is_near_the_whole_job(settings):
    stages = 2 if settings else 1
    worlds = [fresh(f"num_layers={layers * stages}", *settings) for layers in (1, 2, 8)]
    found = estimated(worlds[0], worlds[1], (1, 2, 8), "h100")
    classes = peak_memory(worlds[2]).classes
    worst = max(classes, key=lambda name: needed(classes[name]))
    assert found.class_name == worst
    assert found.allocated_bytes == pytest.approx(classes[worst]["peak_allocated"], rel=0.01)
    assert found.device_bytes == pytest.approx(needed(classes[worst]), rel=0.03)
    whole_ns = price(worlds[2], machine="h100").timeline.iteration_ns
    assert found.iteration_ns == pytest.approx(whole_ns, rel=0.1)


def test_an_estimate_says_how_far_off_it_was():
    assert FIGURES.compared(10 << 30, 100_000_000).endswith(
        "off by +10.0 % in memory, +10.0 % in time"
    )
    assert "memory" not in FIGURES.compared(None, 100_000_000)


def test_an_estimate_of_another_machine_is_not_compared(tmp_path):
    assert job_slices.estimate_note(tmp_path, FIGURES.machine, 1) == ""
    estimate.keep(tmp_path, FIGURES)
    assert estimate.kept(tmp_path) == FIGURES
    assert "in time" in job_slices.estimate_note(tmp_path, FIGURES.machine, 100_000_000)
    assert job_slices.estimate_note(tmp_path, "on B200, some host", 100_000_000) == ""


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"layers": 1})])
def test_a_file_that_is_no_estimate_is_none(tmp_path, text):
    (tmp_path / ".estimate").write_text(text)
    assert estimate.kept(tmp_path) is None


def test_why_there_is_no_estimate_is_said_once_behind_the_capture():
    said = io.StringIO()
    estimator = Estimator(Console(file=said, width=200))
    whole = [RankTask(rank, f"rank {rank}", ("--prism-capture", "d")) for rank in (0, 8)]
    tasks = estimator.tasks(whole)
    assert [task.periods for task in tasks] == [1, 1, 2, 2]
    assert all(task.words[1] != "d" for task in tasks)
    for task in tasks:
        estimator.finished(task, {"no_estimate": "layers are unlike"})
    # where the whole job is refused, its own error is enough
    assert said.getvalue() == ""
    assert estimator.has_begun
    estimator.say_reason()
    assert said.getvalue().count("none: layers are unlike") == 1
    assert estimator.result is None


def test_a_result_of_the_whole_job_is_no_part_of_the_estimate():
    estimator = Estimator(Console(file=io.StringIO()))
    whole = [RankTask(0, "rank 0", ("--prism-capture", "d"))]
    estimator.tasks(whole)
    estimator.finished(whole[0], {"rank": 0})
    assert estimator.has_begun
    assert estimator.result is None


@TRAINING
@pytest.mark.slow
def test_a_capture_prints_an_estimate_first_and_its_slices_are_those_without(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    layers = ["--num-layers", "10", "--pipeline-model-parallel-size", "2"]
    ours = ["--prism-tier", "meta", "--prism-world-size", "4"]
    job = ["--", str(SCRIPT), *JOB, *layers]
    assert main(["capture", *ours, "-o", "with", *job]) == 0
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).splitlines()
    place = next(i for i, line in enumerate(lines) if "estimate from 1 and 2 of 5 layers" in line)
    assert place < next(i for i, line in enumerate(lines) if line.startswith("rank 0:"))
    found = estimate.kept(tmp_path / "with")
    assert found.layers == (1, 2, 5)

    # the same capture without an estimate
    monkeypatch.setattr(Estimator, "tasks", lambda self, whole: [])
    (tmp_path / "with").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / ".captured").unlink()
    assert main(["capture", *ours, "-o", "without", *job]) == 0
    for rank in (0, 2):
        name = f"slice-{rank:06d}.prism"
        content = (tmp_path / "elsewhere" / name).read_bytes()
        assert content == (tmp_path / "without" / name).read_bytes()
