"""Sends into NCCL's buffers: who waits for whom, and until when."""

import json

import pytest

import megatron_prism as prism
from megatron_prism.core.program_text import parse

MIB, MS = 1 << 20, 1_000_000
TWO = """prism-program 1
world size=2 pp=2
program rank=0 ranks=0
{sends}- compute ns=5ms
program rank=1 ranks=1
- compute ns=20ms
{recvs}"""
SEND = "- send PIPELINE_MODEL_PARALLEL_GROUP bf16 n={n} peer={peer}\n"


def ends(messages, mib, **what_if):
    """ms at which each rank is through with its last op, in one iteration."""
    sends, recvs = (SEND.format(n=mib * MIB // 2, peer=peer) * messages for peer in (1, -1))
    text = TWO.format(sends=sends, recvs=recvs.replace("- send", "- recv"))
    found = prism.replay(parse(text), machine="h200", iterations=1, what_if=prism.WhatIf(**what_if))
    call = int(found.prices.collective_ns.max()) / MS
    return [int(found.spans(index)["end"].max()) / MS for index in (0, 1)], call, found


def test_a_send_that_the_buffers_hold_does_not_wait():
    """Rank 0 computes behind its send; rank 1 receives once it is ready, as before."""
    waits, call, _ = ends(1, 32)
    assert waits == pytest.approx([25 + call, 20 + call])
    sent, call, found = ends(1, 32, buffered=-1)
    assert sent == pytest.approx([5 + call, 20 + call])
    assert sum(part["ns"] for part in found.to_json()["path"]) == found.iteration_ns


@pytest.mark.parametrize(("messages", "mib", "buffered"), [(1, 64, -1), (2, 32, -1), (1, 32, MIB)])
def test_one_that_they_do_not_hold_waits(messages, mib, buffered):
    (first, _), call, _ = ends(messages, mib, buffered=buffered)
    assert first >= 25 + call


def test_eight_messages_fit_however_small():
    """Each takes a whole step of the buffers."""
    for messages, waits in ((8, False), (9, True)):
        (first, _), call, _ = ends(messages, 1, buffered=64 * MIB)
        assert (first > 20) == waits


def test_a_calibration_says_what_sends_wait_for(tmp_path):
    file, text = tmp_path / "c.json", {"source": "2 x H200", "held": [{"bytes": 1, "held": 0}]}
    sends, recvs = (SEND.format(n=16 * MIB, peer=peer) for peer in (1, -1))
    world = parse(TWO.format(sends=sends, recvs=recvs.replace("send", "recv")))
    found = []
    for held, asked in ((0, None), (32 * MIB, None), (32 * MIB, 0)):
        text["held"][0]["held"] = held
        file.write_text(json.dumps(text))
        how = prism.WhatIf(buffered=asked)
        made = prism.replay(world, machine="h200", iterations=1, calibration=file, what_if=how)
        found.append(int(made.spans(0)["end"].max()) / MS > 20)
    assert found == [True, False, True]


def test_the_buffers_are_those_of_the_job_s_settings():
    (first, _), call, _ = ends(1, 32, buffered=-1, nccl=("NCCL_BUFFSIZE=1048576",))
    assert first == pytest.approx(25 + call)
