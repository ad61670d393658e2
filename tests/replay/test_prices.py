"""Costs: files that people write are refused by name, never half believed."""

import json

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.replay.costs.collectives import read_calibration
from megatron_prism.replay.costs.machine import machine, machines

GOOD = json.loads(machines()["h200"].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gpus_per_node", "8", 'gpus_per_node is "8"'),
        ("gpus_per_node", 1.5, "whole number"),
        ("gpus_per_node", 0, "positive"),
        ("flops", 5, "at least that of bf16"),
        ("flops", {"fp32": 1.0}, "at least that of bf16"),
        ("flops", {"bf16": 0}, "positive rates"),
        ("memory_rate", float("nan"), "memory_rate is NaN"),
        ("network_rate", float("inf"), "network_rate is Infinity"),
        ("network_rate", -1, "positive"),
        ("kernel_ns", True, "kernel_ns is true"),
        ("call_ns", None, "call_ns is null"),
        ("nvls_rate", -1, "positive"),
        ("generation", "pascal", "one of volta"),
        ("link", 4, "one of nvlink"),
        ("source", 5, "text"),
    ],
)
def test_machines_that_cannot_be(tmp_path, key, value, says):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(GOOD))
    assert machine(path) == machine("h200")
    path.write_text(json.dumps({**GOOD, key: value}))
    with pytest.raises(UsageError, match=f"{key} is") as caught:
        machine(path)
    assert says in str(caught.value)


def test_shipped_machines_name_their_source():
    for name in machines():
        one = machine(name)
        assert len(one.source) > 40
        assert one.network_rate
    assert set(machines()) == {"h100", "h200", "b200", "gb200_nvl72"}
    assert machine("gb200_nvl72").gpus_per_node == 72


def test_a_machine_without_a_network_holds_one_node(tmp_path, capsys):
    path, world = tmp_path / "m.json", tmp_path / "w.txt"
    path.write_text(json.dumps({**GOOD, "network_rate": 0}))
    call = "- all_reduce default_pg bf16 n=64 reduce=sum"
    for size, status in ((8, 0), (16, 2)):
        world.write_text(
            f"prism-program 1\nworld size={size}\nprogram ranks=0-{size - 1}\n{call}\n"
        )
        assert cli.main(["replay", str(world), f"machine={path}"]) == status
    said = capsys.readouterr().err
    assert "16 ranks need 2 nodes" in said
    assert "it holds 8 ranks" in said


def row(**more):
    return {"op": "all_reduce", "ranks": 2, "bytes": 1024, "ns": 5000, **more}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(), row(ns=6000)], "all_reduce of 1024 bytes among 2 takes 5000 ns and 6000 ns"),
        ([row(ns=-1)], "takes -1 ns"),
        ([row(ns=0)], "takes 0 ns"),
        ([row(bytes=0)], "of 0 bytes"),
        ([row(ns=float("inf"))], "infinity"),
        ([row(ns=float("nan"))], "NaN"),
        ([{"op": "all_reduce"}], "ranks"),
        ([5], "no calibration"),
        ([row(ns=10**30)], "takes 1000000000000000000000000000000 ns"),
        ([row(op=7)], "7 among 2"),
        ([row(ranks=0)], "among 0"),
        ({"op": "all_reduce"}, "collectives is no list of rows"),
    ],
)
def test_calibrations_that_cannot_be(tmp_path, rows, says):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 1, "source": "here", "collectives": rows}))
    with pytest.raises(UsageError, match="no calibration of ours") as caught:
        read_calibration(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"host": "abc"}, "host is no list of rows"),
        ({"overlap": "abc"}, "overlap is no list of rows"),
        ({"host": [{"op": "all_reduce"}]}, "'asynchronous' is missing"),
        ({"host": [{"op": "all_reduce", "asynchronous": "no", "ns": 5}]}, "asynchronous 'no'"),
        ({"host": [{"op": ["x"], "asynchronous": True, "ns": 5}]}, "['x']"),
        ({"format": "1"}, "format '1'"),
    ],
)
def test_a_calibrations_other_rows_are_checked_too(tmp_path, more, says):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 1, "source": "here", "collectives": [], **more}))
    with pytest.raises(UsageError) as caught:
        read_calibration(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("words", ["machine=", "calibration="])
def test_files_that_nest_without_end_are_refused(tmp_path, words, capsys):
    """Python's parser gives up with a RecursionError, which is no error of the user's."""
    path, world = tmp_path / "deep.json", tmp_path / "w.txt"
    path.write_text("[" * 100_000)
    world.write_text("prism-program 1\nworld size=1\nprogram ranks=0\n0F compute ns=1ms\n")
    assert cli.main(["replay", str(world), f"{words}{path}"]) == 2
    assert "nested too deeply" in capsys.readouterr().err


def test_an_endless_calibration_is_not_read_to_its_end():
    with pytest.raises(UsageError, match="more than 268,435,456 bytes"):
        read_calibration("/dev/zero")


def test_the_same_measurement_twice_is_one(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 1, "source": "x", "collectives": [row(), row()]}))
    assert read_calibration(path).look_up("all_reduce", 2, 1 << 20) == 5000


@pytest.mark.parametrize(
    ("out", "words", "says"),
    [
        ("c.json", ["processes=\u00b2"], "is no number"),
        ("c.json", ["processes=99999"], "fix: processes=4"),
        ("c.json", ["processes=0"], "nobody to talk to"),
        ("c.json", ["processes=1"], "nobody to talk to"),
        ("no/c.json", [], "cannot write a file"),
        (".", ["--force"], "cannot write a file"),
        ("/proc/c.json", [], "/proc takes no files"),
        ("there.json", [], "not overwritten"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused_before_it_runs(tmp_path, capsys, out, words, says):
    pytest.importorskip("torch")
    (tmp_path / "there.json").write_text("{}")
    assert cli.main(["calibrate", "-o", str(tmp_path / out), *words]) == 2
    assert says in capsys.readouterr().err
