"""Predicted beside real: where the error is; and graphs that others read back."""

import gzip
import json

import pytest
from helpers.kineto import Trace, two_ranks

from megatron_prism.cli.main import main
from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.traces.compare import compare_traces
from megatron_prism.replay.priced_graph import replay

PREDICTED = """prism-program 1
world size=2
source device="NVIDIA H200"
program rank=0 ranks=0-1
0F0  compute ns=900us
0F0  all_reduce DATA_PARALLEL_GROUP bf16 n=1024 ns=100us
0F0  all_reduce DATA_PARALLEL_GROUP bf16 n=4096 ns=500us handle=2
0B0  compute ns=400us
-    wait handle=2
O    compute ns=400us
"""


def compared(folder, predicted=PREDICTED):
    return compare_traces([folder], replay(parse(predicted)))


def parts(one):
    """name -> (predicted, real) us of a rank's iteration."""
    return {p.what: (round(p.predicted / 1000), round(p.real / 1000)) for p in one.parts}


def test_the_error_is_found_where_it_was_put(tmp_path):
    two_ranks(tmp_path, slow=1.5)
    found = compared(tmp_path)
    assert [one.share for one in found.pairings] == [1, 1]
    times = found.compared
    assert times.predicted_ns == 1_900_000
    assert times.real_ns == pytest.approx(2_600_000, rel=1e-3)
    first, second = times.ranks
    assert parts(first)["computing"] == (1700, 1799)  # a gap of 1 us
    assert sum(part.error for part in first.parts) == pytest.approx(-700_000, abs=2000)
    assert first.ops[0].what.endswith("waiting for others")
    assert round(first.ops[0].error / 1000) == -500
    assert second.ops[0].what.startswith("computing before all_reduce")
    assert round(second.ops[0].error / 1000) == -600


MIXTURE = """prism-program 1
world size=2 ep=2
program rank=0 ranks=0-1
0F0  compute ns=300us
0F0  broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=4096 ns=0
0F0  compute ns=100us
0F0  all_to_all EXPERT_MODEL_PARALLEL_GROUP bf16 in=512 out=512 ns=50us
0B0  compute ns=200us
0B0  all_reduce DATA_PARALLEL_GROUP bf16 n=64 ns=50us
O    compute ns=100us
"""
ALONE, EXPERTS = "TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"


def mixture(folder, **alone):
    """Calls over a group of one rank, routing that is not the capture's, a host that is late for
    half of the time."""
    for rank in (0, 1):
        groups = {"0": ("default_pg", [0, 1]), "1": (ALONE, [rank]), "2": (EXPERTS, [0, 1])}
        trace, now = Trace(rank, groups=groups), 1000.0
        for number in range(3):
            trace.step(number, now - 20, now + 1280)
            trace.kernel(now - 10, now, now + 150)
            trace.kernel(now + 290, now + 300, now + 450)
            trace.bare(now + 460, "broadcast", group="1", sizes=(4096, 4096), **alone)
            trace.kernel(now + 490, now + 500, now + 600)
            sizes = 512, 500 + 10 * number + rank
            trace.call(now + 590, now + 600, now + 650, "all_to_allv", group="2", sizes=sizes)
            trace.kernel(now + 790, now + 800, now + 1000)
            trace.call(now + 990, now + 1000, now + 1050, sizes=(64, 64))
            trace.kernel(now + 1190, now + 1200, now + 1300)
            now += 1300
        trace.write(folder)


def test_computing_is_kernels_that_run_and_the_host_is_what_is_left(tmp_path):
    mixture(tmp_path)
    found = compared(tmp_path, MIXTURE)
    (one, _), times = found.pairings, found.compared
    assert (one.captured, one.traced, one.kernels, one.bare, len(one.pairs)) == (3, 3, 2, 1, 3)
    for rank in times.ranks:
        shown = parts(rank)
        assert shown["computing"] == (700, 700)
        assert shown["host: what is left"] == (0, 500)
        assert sum(real for _, real in shown.values()) == pytest.approx(1300, abs=2)
        by_name = {op.what: (op.predicted, op.real) for op in rank.ops}
        assert by_name[f"computing before broadcast {ALONE} in F"] == (300_000, 300_000)
        assert by_name[f"computing before all_to_all {EXPERTS} in F"] == (100_000, 100_000)
        assert by_name[f"broadcast {ALONE} in F on the wire"] == (0, 0)


def test_a_trace_that_says_no_sizes_is_paired_by_what_it_says(tmp_path):
    mixture(tmp_path)
    for path in tmp_path.iterdir():
        trace = json.loads(gzip.decompress(path.read_bytes()))
        del trace["distributedInfo"]["pg_config"]
        for event in trace["traceEvents"]:
            for key in ("Group size", "Process Group Name", "In msg nelems", "Out msg nelems"):
                event["args"].pop(key, None)
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    found = compared(tmp_path, MIXTURE)
    assert [(one.kernels, one.bare, one.share) for one in found.pairings] == [(2, 1, 1)] * 2
    assert parts(found.compared.ranks[0])["host: what is left"] == (0, 500)


PIPELINE = """prism-program 1
world size=2 pp=2
program rank=0 ranks=0
0F0  broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=4096 ns=0
0F0  compute ns=100us
-    send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=512 peer=1 batch=0 handle=2 ns=50us
-    recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=512 peer=1 batch=0 handle=3 ns=50us
-    wait handle=2
-    wait handle=3
0B0  compute ns=200us
program rank=1 ranks=1
0F0  broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=4096 ns=0
0F0  compute ns=100us
-    send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=512 peer=1 batch=0 handle=2 ns=50us
-    recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=512 peer=1 batch=0 handle=3 ns=50us
-    wait handle=2
-    wait handle=3
0B0  compute ns=200us
"""


def pipeline(folder, lose=0):
    """A broadcast in a group of one rank, a batch of messages; ``lose``: kernels not traced."""
    stages = "PIPELINE_MODEL_PARALLEL_GROUP"
    for rank in (0, 1):
        groups = {"0": ("default_pg", [0, 1]), "1": (ALONE, [rank]), "2": (stages, [0, 1])}
        trace, now = Trace(rank, groups=groups), 1000.0
        for number in range(3):
            trace.step(number, now - 50, now + 350)
            trace.bare(now - 40, "broadcast", group="1", sizes=(4096, 4096))
            trace.kernel(now - 30, now, now + 100)
            span = now - 20, now + 100, now + 180
            trace.messages(*span, ("send", "recv"), group="2", sizes=(512, 512))
            trace.kernel(now - 1, now + 180, now + 380)
            now += 400
        lost = [e for e in trace.events if "SendRecv" in e["name"]][:lose]
        trace.events = [e for e in trace.events if e not in lost]
        trace.write(folder)


def test_the_kernel_of_a_batch_is_of_its_messages(tmp_path):
    pipeline(tmp_path)
    found = compared(tmp_path, PIPELINE)
    assert [(one.kernels, one.bare, one.lost) for one in found.pairings] == [(2, 1, 0)] * 2
    by_name = {op.what: (op.count, op.real) for op in found.compared.ranks[0].ops}
    for op in ("send", "recv"):
        assert by_name[f"{op} PIPELINE_MODEL_PARALLEL_GROUP on the wire"] == (1, 80_000)
    assert by_name[f"broadcast {ALONE} in F on the wire"] == (1, 0)
    assert parts(found.compared.ranks[0])["computing"] == (300, 300)


def test_a_call_whose_kernel_is_lost_is_not_paired(tmp_path):
    pipeline(tmp_path, lose=3)
    found = compared(tmp_path, PIPELINE)
    assert [(one.kernels, one.bare, one.lost) for one in found.pairings] == [(0, 1, 2)] * 2
    assert found.pairings[0].first.startswith("call 1, send")
    assert found.times is None


def test_nothing_is_said_about_times_where_calls_are_not_paired(tmp_path, capsys):
    two_ranks(tmp_path)
    predicted = tmp_path / "p.txt"
    predicted.write_text(
        PREDICTED.replace("0B0  compute", "0F0  barrier DATA_PARALLEL_GROUP\n0B0  compute")
    )
    page = tmp_path / "page.html"
    traces = [str(tmp_path / f"rank{rank}.json.gz") for rank in (0, 1)]
    assert main(["compare", *traces, str(predicted), "--html", str(page)]) == 1
    out, err = capsys.readouterr()
    head, first, _, _, rest, paired, *where = out.splitlines()
    assert {head.split("  ")[0], rest.split("  ")[0]} == {"calls of rank"}
    assert first.split() == ["0", "3", "2", "2", "0", "0"]
    assert paired.split() == ["0", "2", "(66.7", "%)"]
    assert where[1] == "rank 0: call 2 is captured as barrier in a group of 2, traced as nothing"
    assert "ms" not in out
    assert "fewer than 95 % of a rank's calls are paired" in err
    assert not page.exists()
    assert main(["compare", *traces, str(predicted), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ranks"][1]["paired"] == 2
    assert "real_ns" not in shown
    assert "parts" not in shown["ranks"][0]


def test_the_command_writes_a_page_and_a_trace_with_both(tmp_path, capsys):
    two_ranks(tmp_path)
    predicted, page, both = (tmp_path / name for name in ("p.txt", "page.html", "both.json.out"))
    predicted.write_text(PREDICTED)
    traces = [str(tmp_path / f"rank{rank}.json.gz") for rank in (0, 1)]
    words = ["compare", *traces, str(predicted), "--html", str(page), "--trace", str(both)]
    assert main(words) == 0
    assert "an iteration: predicted 1.9 ms" in capsys.readouterr().out
    events = json.loads(both.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["rank 0, predicted", "rank 0, real", "rank 1, predicted", "rank 1, real"]
    assert "default-src &#x27;none&#x27;" in page.read_text()
    assert main(["compare", *traces, str(predicted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "prism.compare/2"
    assert main(["compare", traces[0]]) == 2
