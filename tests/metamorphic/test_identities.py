"""What changes nothing has the answer of nothing, and the same question the same answer."""

import dataclasses
import json

import pytest
from helpers.metamorphic import JOBS, MACHINE, STORED, about, answer, ns, stored
from helpers.spreads import spread
from helpers.uneven_worlds import length_job

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program_text import dump
from megatron_prism.core.world import World
from megatron_prism.features.predict.predict import predict
from megatron_prism.replay.costs import nccl_settings
from megatron_prism.replay.replicas import with_data_parallel


def of_itself(name, programs):
    """A what-if's words that change nothing of ``programs``."""
    world = programs.world
    return {
        "slow": "slow=0:1",
        "faster": "faster=all_reduce:1",
        "moved": "moved=h100",
        "network": "network=none",
        "dp": f"dp={world.dp}",
    }[name]


@about("slow", "faster", "moved", "network", "dp")
@pytest.mark.parametrize("name", ["slow", "faster", "moved", "network", "dp"])
@pytest.mark.parametrize("job", JOBS)
def test_nothing_changed_is_nothing_changed(job, name):
    programs = stored(job)
    if name == "faster" and "all_reduce" not in answer(programs, MACHINE).to_text(verbose=True):
        pytest.skip("it has no all-reduces")
    words = of_itself(name, programs)
    assert ns(programs, MACHINE, words) == ns(programs, MACHINE)


@about("moved")
@pytest.mark.parametrize("job", JOBS)
def test_moved_to_a_machine_is_asked_of_that_machine(job):
    """Of shapes, which nobody measured anywhere."""
    programs = stored(job)
    assert ns(programs, "machine=h200", "moved=h100") == ns(programs, MACHINE)
    assert ns(programs, "machine=b200", "moved=h100") == ns(programs, MACHINE)


@about("host", "nccl")
@pytest.mark.parametrize("job", JOBS)
def test_hosts_and_settings_as_they_were(job):
    programs = stored(job)
    assert ns(programs, MACHINE, "host=1x") == ns(programs, MACHINE)
    once = ns(programs, MACHINE, "nccl=NCCL_MAX_NCHANNELS=4")
    env = {**programs.source, nccl_settings.NCCL_ENV: "NCCL_MAX_NCHANNELS=4"}
    assert ns(dataclasses.replace(programs, source=env), MACHINE) == once


def test_beside_itself_nothing_differs(capsys):
    path = str(STORED / "dense_pp2")
    assert cli.main(["compare", path, path, "--machine", "h100", "--exit-code", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["parts"]) > 6
    assert {one["difference"] for one in found["parts"]} == {0}
    assert found["difference"] == {"ns": 0, "low_ns": 0, "high_ns": 0, "first_faster": 0.5}
    assert found["first"] == found["settings"] == []


@pytest.mark.parametrize("job", JOBS)
def test_without_spreads_every_drawn_iteration_is_the_replays(job):
    drawn = predict(stored(job), machine="h100", variability=spread(), samples=200, seed=0)
    assert drawn.steady == ns(stored(job), MACHINE)
    assert {q.ns for q in drawn.quantiles if q.ns is not None} == {drawn.steady}


@about("dp")
@pytest.mark.parametrize("job", JOBS)
def test_more_replicas_and_back_are_the_job(job):
    """But for rounding: a shard's kernels and storages are whole numbers."""
    programs = stored(job)
    more = with_data_parallel(programs, 4 * programs.world.dp)
    back = with_data_parallel(more, programs.world.dp)
    assert ns(back, MACHINE) == pytest.approx(ns(programs, MACHINE), rel=0.01)
    for one, other in zip(programs.programs, back.programs, strict=True):
        a, b = (int(p.live_bytes().max(initial=0)) for p in (one, other))
        assert b == pytest.approx(a, rel=0.001)


@about("tp", "pp")
def test_another_split_is_another_capture():
    for word in ("tp=16", "pp=8", "cp=4", "vpp=3"):
        with pytest.raises(UsageError, match="captur"):
            answer(stored("dense_pp2"), MACHINE, word)


def test_nodes_as_the_machine_has_them_change_nothing():
    programs = stored("dense_pp2")
    sizes = {f.name: getattr(programs.world, f.name) for f in dataclasses.fields(World) if f.init}
    known = dataclasses.replace(programs, world=World(**{**sizes, "gpus_per_node": 8}))
    assert ns(known, MACHINE) == ns(programs, MACHINE)


@about("lengths", "capture")
def test_samples_of_the_captured_length_are_the_captured_job(tmp_path, capsys):
    for length in (16, 64):
        (tmp_path / f"s{length}").write_text(dump(length_job(length)))
    (tmp_path / "alike.jsonl").write_text('{"length": 64}')
    job = str(tmp_path / "s64")
    drawn = (f"lengths={tmp_path}/alike.jsonl", f"capture={tmp_path}/s16", "--iterations", "3")
    assert cli.main(["replay", job, "--json"]) == 0
    captured_ns = json.loads(capsys.readouterr().out)["iteration_ns"]
    assert cli.main(["replay", job, *drawn, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["drawn"]["times"]
    assert times["step_ns"] == [captured_ns] * 3
