"""Hosts of another speed: the index, files of it, and replays on the target's host."""

import gzip
import json

import numpy as np
import pytest

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.programs.slices import HOST_INDEX, SliceStore, assemble
from megatron_prism.replay.costs import host_index
from megatron_prism.replay.costs.host import indices_of
from megatron_prism.replay.costs.host_index import (
    REFERENCE,
    TRACED,
    HostIndex,
    read_host_index,
)
from megatron_prism.replay.uncertainty.interval import HOST_KNOWN

TWO = "prism-program 1\nworld size=2 pp=2\n"
WAITS = "- compute ns=1ms host=10ms lead=1ms"


def of(times):
    ns = {name: times * base for name, (base, _) in REFERENCE.items()}
    return HostIndex.of(ns, dict.fromkeys(REFERENCE, 0.1), "a host")


@pytest.fixture
def slices(tmp_path):
    """Rank 0 was captured on a host of index 2, rank 1 on one of 1."""
    for rank, index in ((0, 2.0), (1, 1.0)):
        source = {"tier": "cuda", HOST_INDEX: f"{rank}={index:.4f}"}
        world = parse(f"{TWO}program rank={rank} ranks=0,1\n{WAITS}\n- mark note={rank}\n")
        store = SliceStore(tmp_path / "slices", world.world, source)
        store.folder.mkdir(exist_ok=True)
        store.put(world.programs[0])
    return tmp_path / "slices"


def test_an_index_is_how_many_times_as_long_the_host_takes(tmp_path):
    assert sum(weight for _, weight in REFERENCE.values()) == pytest.approx(1)
    assert of(1.7).index == pytest.approx(1.7)
    path = tmp_path / "host.json"
    path.write_text(of(1.7).to_json())
    assert read_host_index(path) == of(1.7)


def trace(times, name="aten::empty", count=200):
    us = TRACED[name] / 1000 * times
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": i * 100.0, "dur": us * (0.9 + i % 3)}
              for i in range(count)]  # fmt: skip
    return json.dumps({"traceEvents": [*events, {"ph": "M", "name": "thread_name"}]}).encode()


def test_traces_of_a_run_say_the_index_of_its_host(tmp_path, slices):
    """The usual time of an operator that does nothing else, whatever the job."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank-0.json").write_bytes(trace(0.5))
    (tmp_path / "run/rank-1.json.gz").write_bytes(gzip.compress(trace(1.5)))
    one = read_host_index(tmp_path / "run/rank-1.json.gz")
    assert one.index == pytest.approx(1.5 * 1.9)
    assert read_host_index(tmp_path / "run").index == pytest.approx(1.9)
    found = prism.replay(prism.load(slices), what_if=prism.WhatIf(host=tmp_path / "run"))
    assert found.iteration_ns == pytest.approx(1.9 * 10_000_000, rel=1e-3)
    (tmp_path / "old.json").write_bytes(trace(2.0, "cudaLaunchKernel"))
    assert read_host_index(tmp_path / "old.json").index == pytest.approx(2.0 * 1.9)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("few.json", trace(1, count=20), "100 events"),
        ("cut.json.gz", gzip.compress(trace(1))[:-20], "cut off"),
        ("bomb.json.gz", gzip.compress(bytes(1 << 20)), "unpacks to more"),
        ("other.json", b"[1]", "host"),
    ],
)
def test_traces_that_do_not_say_it(tmp_path, monkeypatch, name, data, says):
    monkeypatch.setattr(host_index, "_MOST", 1 << 19)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=says):
        read_host_index(tmp_path / name)
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="neither"):
        read_host_index(tmp_path / "none")


def test_slices_keep_the_index_of_each_host(slices):
    """Which is no part of what the job is: they fit together."""
    assert indices_of(assemble(slices).source) == {0: 2.0, 1: 1.0}
    assert indices_of({HOST_INDEX: "0=1.5 x 2=nan 3=0 4= 5=1e9"}) == {0: 1.5}


def test_a_replay_has_the_hosts_of_the_target(slices, tmp_path):
    """Index 1 for 2 halves the host's 10 ms; rank 1's host is as fast already."""
    path = tmp_path / "host.json"
    path.write_text(of(1.0).to_json())
    programs = prism.load(slices)
    assert prism.replay(programs).iteration_ns == 10_000_000
    found = prism.replay(programs, what_if=prism.WhatIf(host=path))
    both = zip(found.prices.host, found.prices.lead, strict=True)
    assert [int((host + lead).sum()) for host, lead in both] == [5_000_000, 10_000_000]
    same = prism.replay(programs, what_if=prism.WhatIf(host=1.0))
    assert same.iteration_ns == found.iteration_ns
    quicker = prism.replay(programs, what_if=prism.WhatIf(host="0.6x")).to_json()
    assert quicker["iteration_ns"] == 6_000_000
    (host,) = (one for one in quicker["uncertainties"] if one["what"] == "host")
    assert host["high_ns"] == pytest.approx((HOST_KNOWN - 1) * 6e6, rel=0.01)
    assert "0.6 x as long on the target's host" in str(quicker["sources"])


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        ({"host_index": {"version": 0, "index": 1.0}}, "calibrate --host"),
        ({"format": 1}, "calibrate --host"),
        (
            {"host_index": {"version": 1, "index": -1, "spread": 0, "parts": {}, "source": ""}},
            "--h",
        ),
        ([], "calibrate --host"),
    ],
)
def test_a_file_that_is_no_index_is_refused(content, fix, tmp_path, slices, capsys):
    path = tmp_path / "host.json"
    path.write_text(json.dumps(content))
    assert cli.main(["replay", str(slices), f"host={path}"]) == 2
    assert fix in capsys.readouterr().err


def test_hosts_that_nobody_measured_cannot_be_others(tmp_path, slices):
    bare = parse(f"{TWO}program ranks=0,1\n- compute ns=1ms\n")
    with pytest.raises(UsageError, match="how long their host takes"):
        prism.replay(bare, what_if=prism.WhatIf(host="0.5x"))
    old = parse(f"{TWO}program ranks=0,1\n{WAITS}\n")
    path = tmp_path / "host.json"
    path.write_text(of(1.0).to_json())
    with pytest.raises(UsageError, match="how fast their host was"):
        prism.replay(old, what_if=prism.WhatIf(host=path))


def test_this_host_is_measured_without_a_gpu(tmp_path, capsys):
    pytest.importorskip("torch")
    from megatron_prism.emulate.capture.host_benchmark import measure

    found = measure(0.0)
    assert set(found.parts) == set(REFERENCE)
    assert 0.05 < found.index < 200
    assert np.isfinite(found.spread)
