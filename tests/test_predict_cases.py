"""PRISM's use cases: every command of recipes/README.md runs, and figures follow their inputs."""

import json
import pathlib
import re

import numpy as np
import pytest

from megatron_prism import cli, costs, graph, stochastic
from megatron_prism.costs.machine import machine
from megatron_prism.costs.variability import Variability, variability
from megatron_prism.errors import UsageError
from megatron_prism.program_parse import parse

README = pathlib.Path(__file__).parent.parent / "recipes" / "README.md"
TEXT = """prism-program 1
world size=64 tp=8 pp=2
program ranks=0-31
0F compute flops=20T traffic=1GiB kernels=1
0F all_gather TENSOR_MODEL_PARALLEL_GROUP bf16 in=524288 out=4194304
0F send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=4194304 peer=1
G  all_reduce default_pg fp32 n=1 reduce=max
program ranks=32-63
0F recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=4194304 peer=-1
0F compute flops=10T traffic=1GiB kernels=1
0F all_gather TENSOR_MODEL_PARALLEL_GROUP bf16 in=524288 out=4194304
G  all_reduce default_pg fp32 n=1 reduce=max
"""


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "w.txt"
    path.write_text(TEXT)
    return str(path)


def commands():
    if not README.exists():
        return ["predict llama case=hot-node"]
    section = README.read_text(encoding="utf-8").split("## PRISM's use cases")[1].split("\n## ")[0]
    found = re.findall(r"^prism (predict [^#\n]*)", section, re.MULTILINE)
    assert len(found) == 7
    return [line.strip() for line in found]


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_readme(line, world, tmp_path, capsys):
    """On a small world in place of the jobs."""
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("20T", "25T"))
    third = tmp_path / "third.txt"
    third.write_text(TEXT.replace("20T", "15T"))
    words = line.split()
    eight, mixtral = "llama3-8b_64gpu_tp4cp2_h200", "mixtral-8x7b_256gpu_pp4vp8ep8_h200"
    for name, path in ((eight, other), (mixtral, third), ("llama", world)):
        words = [re.sub(rf"^{name}(?=,|$)", str(path), word) for word in words]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "published" in out or "is faster" in out
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] in ("prism.case/1", "prism.comparison/1")
    if "machine=b200" in line:
        assert found["layouts"][1]["steady"] < found["layouts"][0]["steady"]


def asked(name, spread):
    made = graph.build(parse(TEXT))
    sampler = stochastic.Sampler(made, costs.price(made, machine("h200")))
    return stochastic.answer(name, sampler, spread, 8)


def test_a_hot_node_without_any_variation_is_as_slow_as_its_factor():
    """Eight GPUs of one node are a whole stage: its computing, and nothing else, is longer."""
    still = Variability("still", 0.0, 0.0, 0.0, 0.0, "")
    made = graph.build(parse(TEXT))
    prices = costs.price(made, machine("h200"))
    first = float(prices.compute[int(made.classes.of[0])].sum())
    steady = stochastic.Sampler(made, prices).steady()
    found = asked("hot-node", still)
    ours = [float(row[1].strip("+ %")) for row in found.rows]
    factors = [float(row[0].split()[1]) for row in found.rows]
    wanted = [100 * (factor - 1) * first / steady for factor in factors]
    assert ours == pytest.approx(wanted, abs=0.06)
    marked = [9 <= over <= 35 for over in wanted]
    assert [bool(row[2]) for row in found.rows] == marked
    assert found.reached is any(marked)


def test_a_large_run_loses_what_the_slowest_of_all_gpus_loses():
    spread = Variability("gpu", 0.02, 0.0, 0.0, 0.0, "")
    found = asked("large", spread)
    lost = float(found.rows[2][2].removesuffix(" %"))
    assert [row[3] for row in found.rows] == [
        "as published" if abs(float(row[2].split()[0]) - float(row[1].split()[0])) <= off else ""
        for row, off in zip(found.rows, (0.005, 0.005, 3), strict=True)
    ]
    # the computing of both stages takes the slowest of 4,096 replicas' tp groups of eight
    drawn = np.random.default_rng(0).standard_normal((400, 4096, 2, 8)).max(axis=3)
    made = graph.build(parse(TEXT))
    prices = costs.price(made, machine("h200"))
    stages = np.array([prices.compute[int(made.classes.of[rank])].sum() for rank in (0, 32)])
    steady = stochastic.Sampler(made, prices).steady()
    slowest = ((np.exp(0.02 * drawn) - 1) * stages).sum(axis=2).max(axis=1)
    assert lost == pytest.approx(100 * np.median(slowest) / steady, abs=0.3)


def test_what_is_refused(world, capsys):
    for words, says in (
        (["case=nobody"], "there is no case nobody"),
        (["case=large", "--html", "x.html"], "a case has no page"),
        (["--against", f"{world},speed=3"], "does not understand speed=3"),
        (["case=large", "samples=10"], "samples: case=large has its own"),
        (["case=calls", "iterations=3", "slow=2"], "slow, iterations: case=calls has its own"),
    ):
        assert cli.main(["predict", world, *words]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(UsageError):
        asked("", variability("public"))
