"""Dumps laid over the programs of their job: where everybody stood, and whether that is it.

Oracle: the standstill that the dumps are of, which placement never sees.
"""

import dataclasses
import json
import re
import shlex
from collections import Counter

import pytest
from helpers import hang_worlds
from helpers.programs import healthy
from helpers.random_hangs import dumps_of

from megatron_prism.cli import main as cli
from megatron_prism.core.programs.call_selector import NthCall
from megatron_prism.core.programs.ops import IS_COLLECTIVE, IS_NCCL, IS_PAIR, CallLabel
from megatron_prism.core.programs.program import Program
from megatron_prism.core.world import World
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.rank.session import Run
from megatron_prism.features.debugger import debugger
from megatron_prism.features.debugger.debugger import Breakpoint
from megatron_prism.features.debugger.options import StopOptions
from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import diagnose, export, hypotheses
from megatron_prism.features.hang.dumps import DumpSet, of_value
from megatron_prism.features.hang.fault_plan import parse
from megatron_prism.features.hang.planting import plant
from megatron_prism.graph import stall

PAIRS = ("send", "recv")


def planted(name, fault):
    """(the call that ``fault`` hits, the standstill, its dumps, the verdict on them)."""
    found = plant(hang_worlds.world(name), [parse(fault)])
    (hit,), state = found.hits, stall.run_until_stalled(found.programs, found.faults)
    dumps = dumps_of(state)
    return hit, state, dumps, hang.diagnose_dumps(dumps)


def placed(name, fault, start=0, **how):
    """(state, Placed); every counter is ``start`` larger, as after other iterations."""
    _, state, *_ = planted(name, fault)
    values = dict(export.dumps_of(state, **how))
    for value in values.values():
        for status in value["pg_status"].values():
            for key in status:
                status[key] = max(status[key], 0) + start if start else status[key]
        for entry in value["entries"]:
            entry["collective_seq_id"] += start
            entry["p2p_seq_id"] += start
            entry["record_id"] += 10 * start
    dumps = DumpSet({r: of_value(v, r) for r, v in values.items()})
    return state, hypotheses.confirm_verdict(
        dumps, hang.diagnose_dumps(dumps), hang_worlds.world(name)
    )


def issued(state, rank):
    ops = state.programs.of(rank).ops["name"][: state.issued[rank]]
    return int((IS_COLLECTIVE | IS_PAIR)[ops].sum())


@pytest.mark.parametrize(
    ("name", "fault", "start"),
    [
        ("moe", "gil@rank=10,group=tp,nth=4", 0),
        ("moe", "gil@rank=3,group=tp,nth=21", 0),
        ("moe", "gil@rank=3,group=tp,nth=21", 1000),
        ("interleaved", "gil@rank=5,nth=21", 0),
        ("interleaved", "gil@rank=5,nth=21", 1000),
        ("moe", "sigkill@rank=9,group=tp,nth=26", 1000),
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


def test_calls_that_nccl_does_not_make_are_in_no_dump(monkeypatch):
    """DeepEP's exchanges are in programs, and neither recorded nor counted by NCCL."""
    moe = hang_worlds.world("moe")
    programs = [Program.from_ops(p.rank, [replaced_exchange(op) for op in p]) for p in moe.programs]
    world = dataclasses.replace(moe, programs=tuple(programs))
    monkeypatch.setattr(hang_worlds, "world", lambda name: world)
    state, found = placed("moe", "gil@rank=3,group=tp,nth=21", 1000)
    assert {entry["profiling_name"] for _, dump in export.dumps_of(state)
            for entry in dump["entries"]}.isdisjoint({"nccl:ep_dispatch"})  # fmt: skip
    for place in found.places:
        here = state.programs.of(place.rank).ops["name"][: state.issued[place.rank]]
        assert place.issued == IS_NCCL[here].sum() < issued(state, place.rank)
    assert found.confirmed


def replaced_exchange(op):
    return dataclasses.replace(op, name="dispatch", splits=None) if op.name == "all_to_all" else op


def test_with_outstanding_calls_only_a_place_is_exact_or_not_named():
    state, found = placed("moe", "gil@rank=3,group=tp,nth=21", active_only=True, stacks=False)
    named = [p for p in found.places if p.index >= 0]
    assert all(p.issued == issued(state, p.rank) for p in named)
    assert all("places in its program fit" in str(p) for p in found.places if p.index < 0)


def test_fewer_turns_of_a_loop_are_said():
    _, found = placed("moe", "skip_microbatch@rank=5,mb=1")
    assert found.confirmed
    text = (
        "rank 5 then issued 12 all_to_all of EXPERT_MODEL_PARALLEL_GROUP less, and 14 other calls: "
        "its loop over microbatches had 1 turn, its program has 2"
    )
    assert found.lines[-1] == text


def test_a_call_that_was_left_out_is_no_turn():
    _, found = placed("moe", "drop@rank=6,group=tp,nth=5")
    assert found.confirmed
    assert "turn" not in " ".join(found.lines)


def test_a_wrong_verdict_is_not_confirmed():
    """Blame another rank: then the others do not stand where they stood."""
    _, _, dumps, verdict = planted("moe", "gil@rank=10,group=tp,nth=21")
    wrong = dataclasses.replace(
        verdict, culprits=(dataclasses.replace(verdict.culprits[0], rank=2),)
    )
    assert hypotheses.confirm_verdict(dumps, verdict, hang_worlds.world("moe")).confirmed
    assert not hypotheses.confirm_verdict(dumps, wrong, hang_worlds.world("moe")).confirmed


@pytest.mark.parametrize(
    "fault",
    ["shape@rank=3,group=tp,nth=3", "dtype@rank=12,group=tp,nth=2", "drop@rank=6,group=tp,nth=5",
     "op@rank=4,group=ep,nth=3:to=all_reduce", "gpu_hang@rank=2,group=tp,nth=4"],
)  # fmt: skip
def test_calls_that_differ_are_tried_as_the_dumps_have_them(fault):
    _, found = placed("moe", fault, timing=True)
    assert found.confirmed
    rank = int(parse(fault).select.rank)
    hit, *_ = planted("moe", fault)
    assert found.stops[rank] in (hit.index, hit.index + 1)  # a dropped call is seen at the next


@pytest.mark.parametrize("iterations", [0, 1, 7])
def test_the_iteration_is_known_where_start_up_is_shorter_than_one(iterations):
    """Counters go on from iteration to iteration, and every group made a few calls before."""
    world = hang_worlds.world("moe")
    _, state, *_ = planted("moe", "gil@rank=10,group=tp,nth=4")
    dumps = {}
    for rank, value in export.dumps_of(state):
        per = Counter(op.group for op in world.of(rank) if op.group and op.name not in PAIRS)
        more = {i: iterations * per[c["desc"]] + 3
                for i, c in enumerate(value["pg_config"].values())}  # fmt: skip
        for number, status in value["pg_status"].items():
            for key in status:
                status[key] = max(status[key], 0) + more[int(number)]
        for entry in value["entries"]:
            entry["collective_seq_id"] += more[entry["pg_id"]]
        dumps[rank] = of_value(value, rank)
    dumps = DumpSet(dumps)
    places = hypotheses.confirm_verdict(dumps, hang.diagnose_dumps(dumps), world).places
    assert {p.iteration for p in places} == {iterations + 1}


def test_real_code_that_calls_otherwise_refutes(monkeypatch, tmp_path):
    """The worker's answer is made up: calls of the program, of another one, and none."""
    from megatron_prism.features.hang import confirm

    world = hang_worlds.world("moe")
    _, _, dumps, verdict = planted("moe", "gil@rank=10,group=tp,nth=21")
    where = hypotheses.confirm_verdict(dumps, verdict, world)

    def answer(change, error=""):
        calls = [op for op in world.of(10) if op.group]
        change(calls)
        run = confirm.RankRun(calls, "0", error)
        monkeypatch.setattr(confirm, "_run", lambda *a: run)
        job = confirm.Job((), (), world.world, "cpu")
        return confirm.confirm(job, world, tmp_path, dumps, verdict, where, None)

    good = answer(lambda calls: None)
    assert good.confirmed
    assert good.lines[-1] == "CONFIRMED"
    for change, error in (
        (lambda calls: calls.pop(3), ""),  # its history is not that of the dump
        (lambda calls: calls.clear(), ""),
        (lambda calls: None, "all_reduce #1: dtype"),
    ):
        bad = answer(change, error)
        assert bad.confirmed is False
        assert bad.lines[-1] == "REFUTED"


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.megatron
def test_the_suspects_real_code_is_run_to_where_it_stood(tmp_path, capsys):
    """Two processes of Megatron capture the world, a third is the suspect; all from the recipe."""
    pytest.importorskip("megatron.core")
    name, folder = "guard-gpt_16gpu_tp2pp2vp2_h200", str(tmp_path / "w")
    other = "num_layers=4"
    assert cli.main(["capture", name, other, "-o", folder]) == 0
    words = ["hang", folder, "fault=gil@rank=5,group=tp,nth=41", "-o", str(tmp_path / "d")]
    assert cli.main(words) == 1
    capsys.readouterr()
    words = ["--recipe", name, "--confirm", "tier=cpu", other, "--json"]  # captures it once more
    assert cli.main(["hang", "--dumps", str(tmp_path / "d"), *words]) == 1
    said = capsys.readouterr()
    assert "for this once; to keep it: prism capture" in said.err
    assert "wrote " not in said.err
    found = json.loads(said.out)
    assert found["confirmed"] is True
    said = "\n".join(found["tried"])
    assert "rank 5's real code ran on tier cpu" in said
    assert "all fit" in said
    assert "15 of 15 other ranks stand where their dumps say" in said
    assert "went on to its last step" in said


@pytest.mark.parametrize("fault", ["gil@rank=3,group=tp,nth=21", "drop@rank=6,group=tp,nth=6",
                                   "gpu_error@rank=13,group=tp,nth=4"])  # fmt: skip
def test_the_verdict_says_how_to_stop_at_the_call_that_the_fault_hit(fault):
    programs = hang_worlds.world("moe")
    hit, _, dumps, verdict = planted("moe", fault)
    verdict, _ = diagnose.judged(dumps, verdict, programs)
    command = r"prism run --prism-world-size \d+ --prism-ranks (\d+) --prism-break '(.*)' -- .*"
    rank, text = re.fullmatch(command, verdict.stop).groups()
    assert int(rank) == hit.rank
    breakpoint = Breakpoint.parse(text)
    matcher = NthCall(breakpoint.select)
    calls = [(i, CallLabel(op.name, op.group, -1, op.microbatch, op.chunk, op.phase, op.site))
             for i, op in enumerate(programs.of(hit.rank)) if op.group]  # fmt: skip
    assert [i for i, call in calls if matcher.hit(call)] == [hit.index]
    assert f"stop there:\n  {verdict.stop}" in str(verdict)


@pytest.mark.parametrize("nth", [3, 4])
def test_two_culprits_are_stopped_by_one_command(nth, monkeypatch):
    """Each at its own call, in a process and at a port of its own."""
    monkeypatch.setattr(debugger, "find_spec", lambda name: name)
    programs, faults = healthy(World(16, tp=2, pp=2)), (f"gil@rank=1,nth={nth}", "gil@rank=6,nth=3")
    found = plant(programs, list(map(parse, faults)))
    state = stall.run_until_stalled(found.programs, found.faults)
    dumps = DumpSet({r: of_value(v, r) for r, v in export.dumps_of(state)})
    verdict = hang.diagnose_dumps(dumps)
    for command in (verdict.stop, diagnose.judged(dumps, verdict, programs)[0].stop):
        words = shlex.split(command)
        assert words[:3] == ["torchrun", "--nproc-per-node", "2"]
        given = options.from_command_line(words[5:], {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"})
        assert given.ranks == (1, 6)
        stops = {}
        for rank in given.ranks:
            mine = dataclasses.replace(given, process=given.ranks.index(rank))
            run = Run(mine, tier=None, monitor=None)
            debugger.add_to(run, None, mine.of(StopOptions))
            stops[rank] = run.calls[0]
        assert [one._at[1] for one in stops.values()] == [5678, 5679]
        assert all(one.rank == rank for rank, one in stops.items())


KINDS = ("drop", "shape", "dtype", "op", "p2p_lost", "p2p_dup", "skip_microbatch")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_has_one_name_planted_dumped_and_in_programs(kind):
    """What was planted, the dumps that it leaves, and the calls that do not match."""
    programs = healthy(World(8, tp=2, pp=2))
    group = "pp" if kind.startswith("p2p") else "tp"
    found = plant(programs, [parse(f"{kind}@rank=1,group={group},nth=2")])
    state = stall.run_until_stalled(found.programs, found.faults)
    dumps = DumpSet({r: of_value(v, r) for r, v in export.dumps_of(state)})
    verdicts = [diagnose.diagnose_stall(state), hang.diagnose_dumps(dumps),
                diagnose.diagnose(programs=found.programs)]  # fmt: skip
    names = {(one.rank, one.kind) for verdict in verdicts for one in verdict.culprits}
    assert len(names) == 1
