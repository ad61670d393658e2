"""Dumps laid over the programs of their job: where everybody stood, and whether that is it.

Oracle: the standstill that the dumps are of, which placement never sees.
"""

import dataclasses
import json

import cases
import pytest

from megatron_prism import cli, flight_export, flight_recorder, hang, placement, quiescence
from megatron_prism.fault_plan import parse
from megatron_prism.faults import plant
from megatron_prism.flight_dump import DumpSet
from megatron_prism.ops import IS_COLLECTIVE, IS_PAIR


def placed(name, fault, start=0, **how):
    """(state, Placed); every counter is ``start`` larger, as after other iterations."""
    found = plant(cases.world(name), [parse(fault)])
    state = quiescence.run(found.programs, found.faults)
    values = dict(flight_export.dumps_of(state, **how))
    for value in values.values():
        for status in value["pg_status"].values():
            for key in status:
                status[key] += start if status[key] >= 0 else 0
        for entry in value["entries"]:
            entry["collective_seq_id"] += start
            entry["p2p_seq_id"] += start
            entry["record_id"] += 10 * start
    dumps = DumpSet({r: flight_recorder.of_value(v, r) for r, v in values.items()})
    return state, placement.place(dumps, hang.of_dumps(dumps), cases.world(name))


def issued(state, rank):
    ops = state.programs.of(rank).ops["name"][: state.issued[rank]]
    return int((IS_COLLECTIVE | IS_PAIR)[ops].sum())


@pytest.mark.parametrize(
    ("name", "fault", "start"),
    [
        ("moe", "gil@rank=10,group=tp,nth=3", 0),
        ("moe", "gil@rank=3,group=tp,nth=20", 0),
        ("moe", "gil@rank=3,group=tp,nth=20", 1000),
        ("interleaved", "gil@rank=5,nth=20", 0),
        ("interleaved", "gil@rank=5,nth=20", 1000),
        ("moe", "sigkill@rank=9,group=tp,nth=25", 1000),
    ],
)
def test_everybody_is_placed_and_the_verdict_is_confirmed(name, fault, start):
    state, found = placed(name, fault, start)
    for place in found.places:
        if place.index >= 0:
            assert place.issued == issued(state, place.rank), place
    unknown = [p.rank for p in found.places if p.index < 0]
    assert unknown == []
    assert found.confirmed
    assert "without a fault the programs come to their end" in found.lines


def test_with_outstanding_calls_only_a_place_is_exact_or_not_named():
    state, found = placed("moe", "gil@rank=3,group=tp,nth=20", active_only=True, stacks=False)
    named = [p for p in found.places if p.index >= 0]
    assert all(p.issued == issued(state, p.rank) for p in named)
    assert all("places in its program fit" in str(p) for p in found.places if p.index < 0)


def test_a_wrong_verdict_is_not_confirmed():
    """Blame another rank: then the others do not stand where they stood."""
    found = plant(cases.world("moe"), [parse("gil@rank=10,group=tp,nth=20")])
    state = quiescence.run(found.programs, found.faults)
    dumps = DumpSet({r: flight_recorder.of_value(v, r) for r, v in flight_export.dumps_of(state)})
    verdict = hang.of_dumps(dumps)
    wrong = dataclasses.replace(
        verdict, culprits=(dataclasses.replace(verdict.culprits[0], rank=2),)
    )
    assert placement.place(dumps, verdict, cases.world("moe")).confirmed
    assert not placement.place(dumps, wrong, cases.world("moe")).confirmed


def test_the_command(tmp_path, capsys):
    found = plant(cases.world("moe"), [parse("gil@rank=10,group=tp,nth=3")])
    folder = flight_export.write(quiescence.run(found.programs, found.faults), tmp_path / "d")
    where = str(cases.HERE / "worlds" / "moe.txt")
    assert cli.main(["hang", "--dumps", str(folder), "--programs", where, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["places"][0].startswith("rank 10: last issued op ")
    assert any("15 of 15 other ranks stand" in line for line in answer["tried"])
    assert cli.main(["hang", "--dumps", str(folder), "fault=drop@rank=1"]) == 2
    assert "does not go with --dumps" in capsys.readouterr().err
    (tmp_path / "small").write_text("prism-program 1\nworld size=1\nprogram ranks=0\n- compute\n")
    assert cli.main(["hang", "--dumps", str(folder), "--programs", str(tmp_path / "small")]) == 2
    assert "rank 15 left a dump" in capsys.readouterr().err
