"""NCCL's environment: what it leaves of the model's ways, what it refuses, what it cannot tell."""

import dataclasses
import json

import pytest

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program_text import parse as parse_program
from megatron_prism.replay.costs import collectives
from megatron_prism.replay.costs.collectives import Shape, modelled
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, parse, recorded

H100 = machine("h100")
EIGHT, SIZE = Shape(8, 8), 1 << 28
TP8 = """prism-program 1
world size=8 tp=8
program ranks=0-7
- all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=134217728 reduce=sum
"""


def ways(name, text):
    return set(collectives.times(name, 8, 8, SIZE, H100, parse(text)))


def ns(text, shape=EIGHT):
    return modelled("all_reduce", shape, SIZE, H100, parse(text))


def test_algorithms_and_protocols_that_are_named_are_left():
    assert {way for way, _ in ways("all_reduce", "NCCL_ALGO=Ring")} == {"ring"}
    assert {way for way, _ in ways("all_reduce", "NCCL_ALGO=^NVLS,NVLSTree")} == {"ring", "tree"}
    assert {way for way, _ in ways("all_reduce", "NCCL_NVLS_ENABLE=0")} == {"ring", "tree"}
    assert {to for _, to in ways("all_to_all", "NCCL_PROTO=Simple NCCL_ALGO=Tree")} == {"Simple"}
    assert {to for _, to in ways("all_reduce", "NCCL_PROTO=^LL")} == {"LL128", "Simple"}
    per_call = "NCCL_ALGO=allreduce:tree;broadcast:ring"
    assert {way for way, _ in ways("all_reduce", per_call)} == {"tree"}
    assert {way for way, _ in ways("all_gather", per_call)} == {"ring"}


def test_a_ring_without_the_switch_takes_as_much_longer_as_its_rate_is_lower():
    ratio = H100.nvls_rate / H100.link_rate
    assert ns("NCCL_ALGO=Ring") / ns("NCCL_ALGO=NVLS") == pytest.approx(ratio, rel=0.02)
    assert ns("") == ns("NCCL_ALGO=NVLS") == ns("TORCH_NCCL_HIGH_PRIORITY=1")


def test_fewer_channels_reach_less_and_more_do_not_reach_more():
    ring = "NCCL_ALGO=Ring NCCL_PROTO=Simple"
    assert ns(f"{ring} NCCL_MAX_CTAS=6") / ns(ring) == pytest.approx(4, rel=0.05)
    assert ns(f"{ring} NCCL_MAX_NCHANNELS=64") == ns(ring)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NCCL_ALGO=Rign", "no rign"),
        ("NCCL_MIN_CTAS=32 NCCL_MAX_CTAS=8", "contradict each other"),
        ("NCCL_ALGO=NVLS NCCL_NVLS_ENABLE=0", "no way is left"),
    ],
)
def test_settings_that_cannot_be_are_refused(text, says, tmp_path, capsys):
    world = tmp_path / "w.txt"
    world.write_text(TP8)
    words = [f"nccl={word}" for word in text.split()]
    assert cli.main(["replay", str(world), *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "fix:" in said


def test_a_call_without_a_way_is_refused():
    with pytest.raises(UsageError, match="no way for all_gather"):
        ways("all_gather", "NCCL_ALGO=Tree")


def test_slices_keep_what_may_change_times():
    environment = {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "HOME": "/", "NCCL_PROTO": "",
                   "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_HIGH_PRIORITY": "1"}  # fmt: skip
    text = recorded(environment)
    assert text == "CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_ALGO=Ring TORCH_NCCL_HIGH_PRIORITY=1"
    assert parse(text).unmodelled == ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_HIGH_PRIORITY")


def test_a_replay_follows_the_slices_and_then_what_is_typed():
    programs = parse_program(TP8)
    ring = dataclasses.replace(programs, source={NCCL_ENV: "NCCL_ALGO=Ring"})
    h100 = dataclasses.replace(machine("h100"), calls="")  # the model alone
    slow, quick = (prism.replay(one, machine=h100) for one in (ring, programs))
    assert slow.iteration_ns == ns("NCCL_ALGO=Ring") > quick.iteration_ns == ns("")
    typed = prism.WhatIf(nccl=("NCCL_ALGO=NVLS,Ring", "TORCH_NCCL_HIGH_PRIORITY=1"))
    again = prism.replay(ring, machine=h100, what_if=typed)
    assert again.iteration_ns == quick.iteration_ns
    (source,) = again.prices.used()
    assert "the model ignores TORCH_NCCL_HIGH_PRIORITY" in source


def test_measured_calls_are_scaled_to_other_settings(tmp_path):
    """Half as fast in the model, half as fast than measured; as measured if nobody kept them."""
    rows = [{"op": "all_reduce", "ranks": 8, "bytes": SIZE, "ns": 1_000_000}]
    stored = {"format": 1, "source": "8 x here", "collectives": rows}
    path, ring = tmp_path / "c.json", prism.WhatIf(nccl=("NCCL_ALGO=Ring",))
    for known, factor in (({"nccl_env": ""}, ns("NCCL_ALGO=Ring") / ns("")), ({}, 1)):
        path.write_text(json.dumps({**stored, **known}))
        found = prism.replay(parse_program(TP8), machine="h100", calibration=path, what_if=ring)
        assert found.iteration_ns == pytest.approx(1e6 * factor, abs=1)
