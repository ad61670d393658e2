"""Costs: files that people write are refused by name, never half believed."""

import dataclasses
import json

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program_text import dump, parse
from megatron_prism.core.world import World
from megatron_prism.replay.costs.collectives import read_calibration
from megatron_prism.replay.costs.machine import (
    default_machine,
    machine,
    machines,
    with_nodes_of,
)
from megatron_prism.replay.priced_graph import WhatIf, price, replay

GOOD = json.loads(machines()["h200"].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gpus_per_node", 0, ">= 1"),
        ("flops", {"fp32": 1.0}, "has no bf16"),
        ("flops", {"bf16": 0}, "> 0"),
        ("memory_rate", float("nan"), "byte 446"),
        ("generation", "pascal", "invalid enum value 'pascal'"),
    ],
)
def test_machines_that_cannot_be(tmp_path, key, value, says):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(GOOD))
    assert machine(path) == machine("h200")
    path.write_text(json.dumps({**GOOD, key: value}))
    with pytest.raises(UsageError, match=f"{key}|byte") as caught:
        machine(path)
    assert says in str(caught.value)


def test_shipped_machines_name_their_source():
    for name in machines():
        one = machine(name)
        assert len(one.source) > 40
        assert one.network_rate
    assert machine("H100") == machine("h100")
    shipped = "a100 a100_40 b200 gb200_nvl72 gh200 h100 h200 mi300x"
    assert sorted(machines()) == shipped.split()
    assert machine("gb200_nvl72").gpus_per_node == 72


def test_a_machine_without_a_network_holds_one_node(tmp_path, capsys):
    path, world = tmp_path / "m.json", tmp_path / "w.txt"
    path.write_text(json.dumps({**GOOD, "network_rate": 0}))
    call = "- all_reduce default_pg bf16 n=64 reduce=sum"
    for size, status in ((8, 0), (16, 2)):
        world.write_text(
            f"prism-program 1\nworld size={size}\nprogram ranks=0-{size - 1}\n{call}\n"
        )
        assert cli.main(["replay", str(world), "--machine", str(path)]) == status
    said = capsys.readouterr().err
    assert "16 ranks need 2 nodes" in said
    assert "it holds 8 ranks" in said


NODES = """prism-program 1
world size=8 tp=4{node}
program ranks=0-7
0F0 all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1048576 reduce=sum
"""


def test_the_launcher_says_how_large_nodes_are_and_the_machine_where_it_does_not(tmp_path):
    path = tmp_path / "h100_2.json"
    given = json.loads(machines()["h100"].read_text())
    path.write_text(json.dumps({**given, "gpus_per_node": 2}))
    apart, unsaid = parse(NODES.format(node=" gpus_per_node=2")), parse(NODES.format(node=""))
    assert parse(dump(apart)).world == apart.world
    together, of_two = replay(unsaid, machine="h100"), replay(unsaid, machine=path)
    assert together.iteration_ns < of_two.iteration_ns
    for asked in ({"machine": "h100"}, {"machine": path}, {"machine": "h200", "moved": "h100"}):
        what_if = WhatIf(moved=asked.pop("moved", None))
        found = replay(apart, what_if=what_if, **asked)
        assert found.iteration_ns == of_two.iteration_ns
        assert found.to_text().startswith(
            "8 ranks = tp 4 x cp 1 x dp 2 x pp 1; nodes of 2, on H100, hosts"
        )


@pytest.mark.parametrize(("ranks", "joined"), [(None, 72), (4, 72), (8, 72), (2, 36)])
def test_nvlink_joins_as_many_hosts_whatever_ranks_they_have(ranks, joined):
    of_nvl72 = with_nodes_of(machine("gb200_nvl72"), World(288, gpus_per_node=ranks))
    assert of_nvl72.gpus_per_node == joined
    assert with_nodes_of(of_nvl72, World(288, gpus_per_node=ranks)) == of_nvl72


def row(**more):
    return {"op": "all_reduce", "ranks": 2, "bytes": 1024, "ns": 5000, **more}


def overlap(**more):
    return {"op": "all_reduce", "ranks": 2, "bytes": 128, "kind": "gemm",
            "compute": 1.0, "call": 1.0, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "rows", "says"),
    [
        ("collectives", [row(), row(ns=6000)],
         "all_reduce of 1024 bytes among 2 takes 5000 ns and 6000 ns"),
        ("collectives", [row(ns=0)], "collectives[0].ns: expected `int` >= 1"),
        ("host", [{"op": "all_reduce", "asynchronous": "no", "ns": 5}], "expected `bool`"),
        ("overlap", [overlap(compute=0)], "compute: expected `float` > 0.0"),
        ("overlap", [overlap(kind="sleep")], "invalid enum value 'sleep'"),
        ("overlap", [overlap(), overlap(call=1.5)],
         "contradicts itself: all_reduce of 128 bytes beside gemm"),
    ],
)  # fmt: skip
def test_calibrations_that_cannot_be(tmp_path, key, rows, says):
    path = tmp_path / "c.json"
    stored = {"format": 1, "source": "here", "collectives": [], key: rows}
    path.write_text(json.dumps(stored))
    with pytest.raises(UsageError, match="not a calibration of ours") as caught:
        read_calibration(path)
    assert says in str(caught.value)


def test_the_same_measurement_twice_is_one(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": 1, "source": "x", "collectives": [row(), row()]}))
    assert read_calibration(path).look_up("all_reduce", 2, 1 << 20) == 5000


@pytest.mark.parametrize(
    ("out", "words", "says"),
    [
        ("c.json", ["--processes", "\u00b2"], "is no number"),
        ("c.json", ["--processes", "99999"], "fix: --processes 4"),
        ("c.json", ["--processes", "0"], "or --host for this host alone"),
        ("no/c.json", [], "cannot write a file"),
        ("/proc/c.json", [], "/proc takes no files"),
        ("there.json", [], "not overwritten"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused_before_it_runs(tmp_path, capsys, out, words, says):
    pytest.importorskip("torch")
    (tmp_path / "there.json").write_text("{}")
    assert cli.main(["calibrate", "-o", str(tmp_path / out), *words]) == 2
    assert says in capsys.readouterr().err


def test_a_job_is_priced_on_the_hardware_that_its_recipe_names():
    assert default_machine("", "") == default_machine("", "CPU") == "h200"
    assert default_machine("", "NVIDIA B200") == default_machine("NVIDIA B200", "B200") == "b200"
    assert default_machine("NVIDIA H100 80GB HBM3", "CPU") == "h100"
    with pytest.raises(
        UsageError, match="measured on NVIDIA H200, and .* meant for B200"
    ) as caught:
        default_machine("NVIDIA H200", "B200")
    assert "moved=b200" in caught.value.fix
    with pytest.raises(UsageError, match=r"meant for Quux \(hardware.name\)"):
        default_machine("", "Quux")


def test_slices_say_for_which_hardware_they_are():
    text = "prism-program 1\nworld size=1\nprogram rank=0 ranks=0\n- compute traffic=5000000000\n"
    for name in ("B200", "H100"):
        source = {"settings": job_settings.as_text({"hardware.name": name})}
        priced = price(dataclasses.replace(parse(text), source=source))
        assert f"8 x {name}" in priced.machine.name
