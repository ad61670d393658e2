"""Sends into NCCL's buffers: who waits for whom, and until when."""

import json

import pytest

import megatron_prism as prism
from megatron_prism.core.programs.program_text import parse

MIB, MS = 1 << 20, 1_000_000
TWO = """prism-program 1
world size=2 pp=2
program rank=0 ranks=0
{sends}- compute ns=5ms
program rank=1 ranks=1
- compute ns=20ms
{recvs}"""
SEND = "- send PIPELINE_MODEL_PARALLEL_GROUP bf16 n={n} peer={peer}\n"


@pytest.fixture
def ends(tmp_path):
    """ms at which each rank is through with its last op, in one iteration, where a calibration saw
    ``held`` bytes of sends that did not wait."""

    def run(messages, mib, held=32 * MIB, **what_if):
        file = tmp_path / "calibration.json"
        rows = [{"bytes": 1, "held": held}]
        file.write_text(json.dumps({"source": "2 x H200", "held": rows}))
        sends, recvs = (SEND.format(n=mib * MIB // 2, peer=peer) * messages for peer in (1, -1))
        programs = parse(TWO.format(sends=sends, recvs=recvs.replace("- send", "- recv")))
        how = {"machine": "h200", "iterations": 1, "what_if": prism.WhatIf(**what_if)}
        found = prism.replay(programs, calibration=file, **how)
        call = int(found.prices.collective_ns.max()) / MS
        return [int(found.spans(index)["end"].max()) / MS for index in (0, 1)], call, found

    return run


def test_a_send_that_the_buffers_hold_does_not_wait(ends):
    """Rank 0 computes behind its send; rank 1 receives once it is ready, as before."""
    waits, call, _ = ends(1, 32, held=0)
    assert waits == pytest.approx([25 + call, 20 + call])
    sent, call, found = ends(1, 32)
    assert sent == pytest.approx([5 + call, 20 + call])
    assert sum(part["ns"] for part in found.to_json()["path"]) == found.iteration_ns


@pytest.mark.parametrize(("messages", "mib", "held"), [(1, 64, 32), (2, 32, 32), (1, 32, 1)])
def test_one_that_they_do_not_hold_waits(ends, messages, mib, held):
    (first, _), call, _ = ends(messages, mib, held=held * MIB)
    assert first >= 25 + call


def test_eight_messages_fit_however_small(ends):
    """Each takes a whole step of the buffers."""
    for messages, waits in ((8, False), (9, True)):
        (first, _), call, _ = ends(messages, 1, held=64 * MIB)
        assert (first > 20) == waits


def test_the_buffers_are_those_of_the_job_s_settings(ends):
    (first, _), call, _ = ends(1, 32, nccl=("NCCL_BUFFSIZE=1048576",))
    assert first == pytest.approx(25 + call)
