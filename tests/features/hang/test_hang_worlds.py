"""The labelled hangs: every case exact, its control clean, and read by PyTorch's fr_trace."""

import json
import re
from pathlib import Path

import pytest
from helpers import hang_worlds
from helpers.hang_worlds import CASES

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.features.hang import diagnose, fault_plan
from megatron_prism.features.hang import planting as fault_planting
from megatron_prism.features.hang.diagnose import diagnose_graph
from megatron_prism.graph import stall, world_graph

HERE = Path(__file__).parent
WORLDS = sorted(path.stem for path in (HERE / "worlds").glob("*.txt"))
BROKEN = {"a1_pp2", "a1_pp4"}
TRACKER = "core/transformer/moe/moe_utils.py:939"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_case_is_exact(case, tmp_path):
    state, truth = hang_worlds.planted(case)
    assert not state.finished
    seen = hang_worlds.score(
        case, truth, hang_worlds.judged(case, tmp_path / "d", state, timing=True)
    )
    assert [name for name, right in seen.items() if right is False] == []
    # Megatron's default, outstanding calls only, names nobody innocent
    found = hang_worlds.judged(case, tmp_path / "less", state, active_only=True, stacks=False)
    assert {c.rank for c in found.culprits} in (truth.culprits, set())


@pytest.mark.parametrize("name", sorted(set(WORLDS) - BROKEN))
def test_controls_are_clean(name, tmp_path):
    """The same worlds without a fault; 0.19 and a coefficient of 0 for A1."""
    assert diagnose_graph(world_graph.build(hang_worlds.world(name))).verdict == "healthy"
    if hang_worlds.world(name).world.size < 100:
        state = stall.run_until_stalled(hang_worlds.world(name))
        found = hang_worlds.judged(CASES[0], tmp_path / "d", state)
        assert (state.finished, found.verdict, found.exit_code) == (True, "healthy", 0)


# -- A1: Megatron 0.16.1 as it is -----------------------------------------------------------------
@pytest.mark.parametrize("from_dumps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a1_names_the_dense_stage_of_1024_ranks(from_dumps):
    """M#3401: three stages of four add 9 numbers, the one without experts 8."""
    programs = hang_worlds.world("a1_pp4")
    assert programs.source["megatron_core"] == "0.16.1"
    if from_dumps:
        found = diagnose.diagnose_stall(stall.run_until_stalled(programs))
    else:
        found = diagnose_graph(world_graph.build(programs))
    assert {c.rank for c in found.culprits} == set(range(256))
    assert {c.kind for c in found.culprits} == {"shape"}
    assert (found.verdict, found.exit_code) == ("mismatch", 1)
    assert (found.group, found.op) == ("PIPELINE_MODEL_PARALLEL_GROUP", "all_reduce")
    text = str(found)
    assert TRACKER in text
    assert "8" in text
    assert "9" in text


def test_a1_with_two_stages_says_that_nobody_can_tell():
    """4 against 5 numbers, one stage each: naming either would be a guess."""
    found = diagnose_graph(world_graph.build(hang_worlds.world("a1_pp2")))
    assert (found.verdict, found.culprits, found.exit_code) == ("mismatch", (), 3)
    assert (found.group, found.op) == ("PIPELINE_MODEL_PARALLEL_GROUP", "all_reduce")
    assert "4 elements on rank 0, 5 elements on rank 1" in found.evidence[0]
    assert TRACKER in str(found)


# -- A7: memory -----------------------------------------------------------------------------------
@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.megatron
def test_a7_the_class_that_runs_out_of_memory_is_named(tmp_path):
    """C29: stages of 1, 2, 2 and 3 layers, a limit between their peaks, then one above them."""
    pytest.importorskip("megatron.core")
    from helpers import make_worlds

    from megatron_prism.core.programs.slices import assemble

    line = "uneven: world=8 pp=4 layers=8 first=1 last=3 m=4"
    programs = assemble(make_worlds.captured(line, tmp_path)["uneven"])
    peaks = [int(p.live_bytes().max()) for p in programs.programs]
    worst = peaks.index(max(peaks))
    # what the iteration starts with (weights, states) fits into the limit
    program = programs.programs[worst]
    before_any_op = program.allocations["before"] == 0
    standing = int(program.live_bytes()[before_any_op].max())
    limit = max(sorted(peaks)[-2], standing) + 1
    planted = fault_planting.plant(programs, [fault_plan.parse(f"oom@rank=0-7:at_bytes={limit}")])
    ranks = set(programs.ranks_of(worst).tolist())
    assert planted.culprits == ranks
    assert all(hit.label[-1] in "FB" or hit.label == "O" for hit in planted.hits)
    parts = []
    state = stall.run_until_stalled(planted.programs, planted.faults)
    found = diagnose.diagnose_stall(state, told=parts.append)
    assert parts == sorted(parts)
    assert len(parts) == 8 - len(ranks)  # the others leave no dump
    assert parts[-1] <= 1
    assert (found.verdict, {c.rank for c in found.culprits}) == ("missing dump", ranks)
    with pytest.raises(UsageError, match="never fires"):
        fault_planting.plant(programs, [fault_plan.parse(f"oom@rank=0-7:at_bytes={max(peaks)}")])


# -- torch's analyser -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrong shape", "A4 inversion", "uneven splits"])
def test_what_fr_trace_says(name, tmp_path):
    """It reads what we write, also batched messages; it is silent on inversions and splits."""
    pytest.importorskip("torch.distributed.flight_recorder")
    case = next(c for c in CASES if c.name == name)
    state, truth = hang_worlds.planted(case)
    hang_worlds.judged(case, tmp_path / "d", state)
    theirs = hang_worlds.fr_trace(tmp_path / "d")
    assert isinstance(theirs, set), "it could not read the dumps"


# -- the command ----------------------------------------------------------------------------------
def test_the_command_plants_and_judges(tmp_path, capsys):
    where = str(HERE / "worlds" / "moe.txt")
    words = ["hang", where, "fault=drop@rank=6,group=tp,nth=5", "-o", str(tmp_path / "d"), "--json"]
    assert cli.main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in found["culprits"]] == [6]
    assert len(found["planted"]) == 1
    assert "reduce_scatter #5 of TENSOR_MODEL_PARALLEL_GROUP[6, 7]" in found["planted"][0]
    assert cli.main(["hang", "--dumps", str(tmp_path / "d")]) == 1
    assert ": rank 6 (skipped call)" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fault=drop@rank=6,group=tp,nth=401"], "never fires"),
        (["fault=dorp@rank=1"], "did you mean drop?"),
        (["fault=drop@rank=1,group=tpp"], "TENSOR_MODEL_PARALLEL_GROUP"),
        (["fault=swap@rank=1"], "swap with what"),
        (["fault=inf@rank=1"], "programs have no values"),
        (["fault=env@rank=1:A=B,C"], "what a variable would change"),
        (["fault=slow@rank=1:factor=2"], "how long segments take"),
        (["fault=nic@rank=1:bw_factor=0"], "fix: bw_factor=0.5"),
        (["fault=oom@rank=1"], "how much memory"),
        (["fault=p2p_swap@rank=12"], "previous and next are one rank there"),
        (["fault=drop@rank=1,layer=3"], "calls do not say of which layer"),
        (["fault=sigkill@node=2"], "node=2 of 16 ranks, 8 to a node"),
        (["--truth", "x"], "truth names them"),
        (["--plan", "/nonexistent"], "cannot read a plan of faults"),
        (["fault=drop@rank=any:0"], "any:0 of 16 ranks"),
        (["-o", "x"], "without a fault"),
    ],
)
def test_bad_faults_are_explained(words, says, capsys):
    assert cli.main(["hang", str(HERE / "worlds" / "moe.txt"), *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "fix:" in said


@pytest.mark.parametrize(
    ("where", "ranks"),
    [("node=1", range(8, 16)), ("node=1/4", range(4, 8)), ("rail=3", (3, 11)),
     ("rail=3/4", (3, 7, 11, 15)), ("rank=node=3/4", range(12, 16))],
)  # fmt: skip
def test_hosts_and_rails_are_ranks(where, ranks):
    fault = fault_plan.parse(f"sigkill@{where},nth=21")
    assert fault.ranks(hang_worlds.world("moe").world) == tuple(ranks)
    assert fault_plan.parse(str(fault)) == fault
    found = fault_planting.plant(hang_worlds.world("moe"), [fault])
    assert found.culprits == set(ranks)


def test_the_other_call_of_a_swap_counts_from_1():
    with pytest.raises(UsageError, match="swap with what") as refused:
        fault_plan.parse("swap@rank=0,op=all_to_all,nth=3")
    fault = fault_plan.parse(f"swap@rank=0,op=all_to_all,nth=3:{refused.value.fix}")
    planted = fault_planting.plant(hang_worlds.world("moe"), [fault])
    assert planted.culprits == {0}
    with pytest.raises(UsageError, match="swap with what"):
        fault_plan.parse("swap@rank=0,op=all_to_all,nth=3:with=ep:all_to_all:0")


def test_faults_that_only_cost_time_are_replayed(tmp_path, capsys):
    """A segment of 4 ms before each of two calls; ranks 0 to 7 and 8 to 15 are two nodes."""
    text = "prism-program 1\nworld size=16\ngroup A " + ",".join(map(str, range(16)))
    text += "\nprogram ranks=0-15\n" + 2 * (
        "- compute ns=4000000\n- all_reduce A bf16 n=1000000 reduce=sum\n"
    )
    (tmp_path / "w").write_text(text)

    def cost(fault, *more, hits=1):
        words = ["hang", str(tmp_path / "w"), f"fault={fault}", "--json", *more]
        assert cli.main(words) == 0
        found = json.loads(capsys.readouterr().out)
        (line,) = found["tried"]
        assert len(found["planted"]) == hits
        return [float(x) for x in re.findall(r"([\d.]+) ms", line)]

    truth = ["--truth", str(tmp_path / "t")]
    after, before = cost("slow@rank=5:factor=1.5", *truth)
    assert after - before == pytest.approx(4.0, abs=0.001)
    (row,) = map(json.loads, (tmp_path / "t").read_text().splitlines())
    assert (row["where"], row["rank"], row["kind"]) == ("programs", 5, "slow")
    after, before = cost("delay@rank=5,nth=2:ms=7")
    assert after - before == pytest.approx(7.0, abs=0.001)
    after, before = cost("nic@rank=5:latency_us=100")
    assert after - before == pytest.approx(0.2, abs=0.001)
    assert cost("nic@node=0:latency_us=100", hits=8) == [after, before]
    after, again = cost("nic@rank=5:bw_factor=0.5")
    assert again == before
    assert after - 8 == pytest.approx(2 * (before - 8), abs=0.01)


def test_a_slow_rank_is_as_slow_as_in_a_replay_by_the_op_table(tmp_path, capsys):
    """A product that the op table has; flops and bytes do not say how long it takes."""
    product = "gemm(8192x8192,7168x8192,8192x7168)bfloat16:962072674304:352321536"
    text = "prism-program 1\nworld size=16\ngroup A " + ",".join(map(str, range(16)))
    text += "\nprogram ranks=0-15\n" + "".join(
        f"{phase} compute kernels=2 flops=1924145348608 traffic=704643072 note={product}*2\n"
        "- all_reduce A bf16 n=1000000 reduce=sum\n"
        for phase in ("0F0", "0B0")
    )
    (tmp_path / "w").write_text(text)

    def cost(fault):
        assert cli.main(["hang", str(tmp_path / "w"), f"fault={fault}", "--json"]) == 0
        (line,) = json.loads(capsys.readouterr().out)["tried"]
        return [float(x) for x in re.findall(r"([\d.,]+) ms", line)]

    assert cli.main(["replay", str(tmp_path / "w"), "slow=5:1.5", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["iteration_ns"] / 1e6
    after, before = cost("slow@rank=5:factor=1.5")
    assert after == pytest.approx(whole, abs=0.001)
    assert after > 1.2 * before
    half, _ = cost("slow@rank=5,phase=backward:factor=1.5")
    assert half - before == pytest.approx((after - before) / 2, abs=0.001)


def test_a_delay_beyond_all_patience_is_a_hang(capsys):
    where = str(HERE / "worlds" / "moe.txt")
    assert cli.main(["hang", where, "fault=delay@rank=3,nth=4:ms=600000"]) == 1
    assert "rank 3 (host stuck)" in capsys.readouterr().out
    assert cli.main(["hang", where, "fault=oom@rank=4,phase=backward"]) == 1
    assert "rank 4 (missing dump)" in capsys.readouterr().out


# -- reports --------------------------------------------------------------------------------------
def test_markdown_and_page_say_the_verdict_and_let_nothing_through(tmp_path, capsys):
    from megatron_prism.features.hang import report
    from megatron_prism.features.hang.verdict import Culprit, Diagnosis, Waiting

    evil = "<script>alert(1)</script>|`*```"
    found = Diagnosis("mismatch", (Culprit(3, "dtype", evil),), (Waiting(1, (3,), evil, evil, 4),),
                      evil, "all_reduce", 4, evidence=(evil,), missing=(evil,))  # fmt: skip
    page, text = report.page(found), report.markdown(found)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "| 3 | dtype | \\<script\\>" in text
    assert text.count("````") == 4  # a fence that the text cannot close
    where = str(HERE / "worlds" / "moe.txt")
    words = ["hang", where, "fault=dtype@rank=12,group=tp,nth=2", "--html", str(tmp_path / "p")]
    assert cli.main([*words, "--markdown", str(tmp_path / "m")]) == 1
    assert "rank 12 (dtype)" in (tmp_path / "m").read_text()
    assert "rank 12 (dtype)" in (tmp_path / "p").read_text()
    assert capsys.readouterr().err == f"wrote {tmp_path / 'm'}\nwrote {tmp_path / 'p'}\n"
    assert cli.main(words) == 2
    assert "not overwritten" in capsys.readouterr().err


def test_the_trace_has_a_track_per_rank_and_arrows_along_the_waits(tmp_path, capsys):
    where = str(HERE / "worlds" / "moe.txt")
    words = ["hang", where, "fault=gil@rank=12,group=tp,nth=2", "--json"]
    assert cli.main([*words, "--trace", str(tmp_path / "t")]) == 1
    found = json.loads(capsys.readouterr().out)
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    spans = {e["tid"]: e for e in events if e["ph"] == "X"}
    waits = {v["rank"]: v for v in found["victims"]}
    assert len(spans) == sum(e["ph"] == "X" for e in events), "one span per rank"
    assert spans.keys() == {12} | waits.keys()
    assert (spans[12]["cat"], spans[12]["name"]) == ("culprit", "host stuck")
    for rank, victim in waits.items():
        assert spans[rank]["name"] == f"{victim['op']} #{victim['seq']} of {victim['group']}"
    starts, ends = ({e["id"]: e["tid"] for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert starts
    assert all(ends[i] in waits[rank]["waits_for"] for i, rank in starts.items())
    to_culprit = {starts[i] for i, rank in ends.items() if rank == 12}
    assert to_culprit == {r for r, v in waits.items() if 12 in v["waits_for"]}
