"""Hangs as production has them: what ``prism hang --dumps`` says of the files, and controls."""

import json

import pytest
from helpers import production, rendered_logs
from helpers.production import CASES

from megatron_prism.cli import main as cli
from megatron_prism.core.programs import program
from megatron_prism.features.hang import export
from megatron_prism.features.hang.diagnose import diagnose
from megatron_prism.features.hang.logs import read_logs


def command(folder, capsys, *more):
    """(exit status, the JSON object) of ``prism hang --dumps``."""
    code = cli.main(["hang", "--dumps", str(folder), *more, "--json"])
    said = capsys.readouterr()
    return code, (json.loads(said.out) if code != 2 else {})


@pytest.mark.parametrize("one", CASES, ids=lambda c: c.name)
def test_what_dumps_of_production_say(one, tmp_path, capsys):
    production.dumps(one, tmp_path / "d")
    code, found = command(tmp_path / "d", capsys)
    assert production.judge(one, code, found) == "", found


@pytest.mark.slow
def test_with_megatron_s_default_settings_nobody_innocent_is_named(tmp_path):
    """Outstanding calls alone, without stacks: of the 86 that have a culprit 77 are right."""
    right = 0
    cases = [one for one in CASES if one.named]
    for number, one in enumerate(cases):
        one = production.dataclasses.replace(one, how={**one.how, **production.ACTIVE})
        production.dumps(one, tmp_path / str(number))
        found = diagnose(tmp_path / str(number))
        named = {culprit.rank for culprit in found.culprits}
        assert named <= one.named, one.name
        right += named == one.named
    assert (right, len(cases)) == (77, 86)


@pytest.mark.slow
def test_logs_alone_name_nobody_innocent(tmp_path):
    """Watchdogs name one call of each rank: 21 of the 51 that leave all files are right."""
    cases = [one for one in CASES if one.named and one.files is None]
    # a log does not show that experts exchange outside NCCL (docs/limitations.md)
    right, cases = 0, [one for one in cases if one.world != "flex"]
    for number, one in enumerate(cases):
        state = production.standstill(one.fault, one.world)
        killed = {rank for rank, fault in state.faults.items() if fault.silent}
        values = dict(export.dumps_of(state, **production.ACTIVE))
        log = tmp_path / f"{number}.log"
        log.write_text(rendered_logs.text(values, state.programs.world, killed))
        named = {culprit.rank for culprit in diagnose(read_logs([log])).culprits}
        assert named <= one.named, one.name
        right += named == one.named
    assert (right, len(cases)) == (21, 51)


@pytest.mark.parametrize("name", ["moe", "interleaved", "line", "dynamic", "ring"])
def test_the_same_job_without_a_fault_is_clean(name, tmp_path, capsys):
    """Evaluations and checkpoints among its iterations: ends, and is healthy."""
    control = next(c for c in CASES if c.name == "healthy")
    one = production.dataclasses.replace(control, world=name)
    assert production.dumps(one, tmp_path / "d").finished
    code, found = command(tmp_path / "d", capsys)
    assert (code, found["verdict"], found["culprits"]) == (0, "healthy", [])
    assert "py-spy" in found["missing"][-1], "dumps know of no gloo, no store and no files"


def test_without_a_majority_the_rank_s_program_decides(tmp_path, capsys):
    """Dumps alone leave it open; with the programs of the job it is rank 2."""
    one = next(c for c in CASES if c.name == "receives before it sends")
    production.dumps(production.dataclasses.replace(one, how=production.ACTIVE), tmp_path / "d")
    program.save(production.line(4), tmp_path / "w.prism")
    code, found = command(tmp_path / "d", capsys, "--programs", str(tmp_path / "w.prism"))
    assert (code, [row["rank"] for row in found["culprits"]]) == (1, [2])
    assert found["culprits"][0]["kind"] == "order"


@pytest.mark.parametrize(
    ("rank", "calls", "active"),
    [(4, 45, True), (9, 45, True), (12, 25, False), (12, 100, True)],
)
def test_who_was_written_down_earlier_is_not_late(rank, calls, active, tmp_path, capsys):
    """A call that needs everybody ended elsewhere: the rank has made it since."""
    made = next(c for c in CASES if c.name == "dumps of one moment, one earlier")
    made = production.dataclasses.replace(
        made, files=production.earlier_of(rank, calls, active), verdict=("host stuck",)
    )
    production.dumps(made, tmp_path / "d")
    code, found = command(tmp_path / "d", capsys)
    assert production.judge(made, code, found) == "", found
    said = [line for line in found["evidence"] if "of an earlier moment" in line]
    assert len(said) == 1
    assert f"the dump of rank {rank} " in said[0]


@pytest.mark.parametrize(
    ("name", "rank", "culprit", "confidence"),
    [
        ("restarted alone", 4, 4, "possible"),
        ("dumps of one moment, one earlier", 9, 10, "likely"),
        ("dumps of one moment, one earlier", 3, 10, "likely"),
    ],
)
def test_who_made_no_call_is_named_where_nothing_else_explains_the_hang(
    name, rank, culprit, confidence, tmp_path, capsys
):
    """A rank that was started again leaves the same dump as one of before its first call."""
    one = next(c for c in CASES if c.name == name)
    one = production.dataclasses.replace(one, files=production.started_again(rank))
    production.dumps(one, tmp_path / "d")
    code, found = command(tmp_path / "d", capsys)
    assert (code, [row["rank"] for row in found["culprits"]]) == (1, [culprit])
    assert found["confidence"] == confidence
    said = f"rank {rank} has made no call, though #1 to #"
    assert [line.startswith(said) for line in found["evidence"]].count(True) == 1
    assert any("or its dump is of before its first call" in line for line in found["evidence"])


def test_who_was_cut_off_while_it_wrote_is_not_who_wrote_nothing(tmp_path, capsys):
    """Ranks 14 and 15 are both needed for one call: 15 is dead, of 14 half a file is there."""
    one = next(c for c in CASES if c.name == "healthy")
    dead = production.stands(15, part="2", at=30, silent=True)
    production.dumps(
        production.dataclasses.replace(one, fault=dead, world="interleaved"), tmp_path / "d"
    )
    file = tmp_path / "d" / "_dump_14"
    file.write_bytes(file.read_bytes()[:2000])
    code, found = command(tmp_path / "d", capsys)
    assert (code, found["culprits"], found["candidates"]) == (3, [], [15])
    assert found["verdict"] == "missing dump"


@pytest.mark.parametrize("how", [{}, production.ACTIVE])
def test_a_dump_under_another_rank_s_name_is_refused(how, tmp_path, capsys):
    """Else the rank of that name would be the culprit: here 11 for 10."""
    one = next(c for c in CASES if c.name == "half of the dumps lost")
    one = production.dataclasses.replace(one, files=None, how=how)
    production.dumps(one, tmp_path / "d")
    a, b = (tmp_path / "d" / f"_dump_{rank}" for rank in (10, 11))
    was = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(was)
    assert cli.main(["hang", "--dumps", str(tmp_path / "d")]) == 2
    said = capsys.readouterr().err
    assert "named as rank 10's was written by rank 11" in said
    assert "fix: name every file after the global rank" in said
