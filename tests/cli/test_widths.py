"""What every command prints fits a terminal of 80 columns, and breaks between words alone."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_prism.cli import main as cli
from megatron_prism.cli import output
from megatron_prism.core import columns
from megatron_prism.core.jobs.recipe import load
from megatron_prism.emulate.jobs import recipe_job

ROOT = Path(__file__).parents[2]
SLICES = ROOT / "tests/golden/slices"
REAL = ROOT / "benchmarks/results/snapshots"
TIMED, DENSE = str(SLICES / "gpu_tp2pp2vpp2"), str(SLICES / "dense_pp2")
COMMANDS = [
    ["--help"],
    ["recipes"],
    ["patches"],
    ["show", TIMED],
    ["check", DENSE],
    ["replay", TIMED, "-v"],
    ["replay", DENSE, "slow=1:1.2", "dp=8", "--machine", "h100"],
    ["predict", TIMED, "--samples", "100"],
    ["fit", DENSE, "--limit", "36MiB", "--top", "30"],
    ["fit", str(REAL)],
    ["fit", str(REAL / "one_moe-rank0.pickle.xz")],
    ["compare", DENSE, str(SLICES / "interleaved")],
    ["compare", str(REAL / "one_moe-rank0.pickle.xz"), DENSE],
    ["memory", "record", DENSE, "-o", "m.json"],
    ["hang", DENSE, "fault=drop@rank=1,group=tp,nth=3"],
    ["hang", "--dumps", str(ROOT / "tests/golden/flight/h100/skip")],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2])[-40:])
def test_output_fits_80_columns_and_breaks_between_words(words, tmp_path, monkeypatch, capsys):
    """The same words, whole, as where lines are as long as one likes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    said = []
    for width in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(columns.folded, "__defaults__", (2, width))
        (tmp_path / "m.json").unlink(missing_ok=True)
        status = cli.main(words)
        assert status in (0, 1, 3)
        said.append(capsys.readouterr().out)
    narrow, wide = said
    shown = [line for line in narrow.splitlines() if not _to_paste(line)]
    assert [line for line in shown if len(line) > 80 and len(line.split()) > 1] == []
    assert {*narrow.split()} <= {*wide.split()}


def _to_paste(line):
    return line.strip().startswith(("next: ", "prism run ", "torchrun "))


def test_tables_of_a_recipe_fit_80_columns():
    call = {"group": "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "group_size": 1024, "calls": 9,
            "op": "reduce_scatter", "bytes": 1 << 40}  # fmt: skip
    peak = {"bytes": 1 << 36, "at": {"phase": "backward", "microbatch": 100, "chunk": 12}}
    stage = {"rank": 1_000, "layers": [4] * 5, "parameters": 2_271_543_296, "iteration_s": [1.0],
             "memory": {"peaks": [peak], "provenance": "modelled"}, "communication": [call],
             "losses": [], "communication_of": "one", "megatron_core": "0.16.1", "tier": "meta",
             "stand_ins": [], "host_peak_rss": 1 << 28}  # fmt: skip
    stages = [{**stage, "stage": number} for number in range(4)]
    said = io.StringIO()
    recipe_job.body(load("tiny-gpt_1cpu"), stages, 1.0, Console(file=said, width=80))
    assert max(map(len, said.getvalue().splitlines())) <= 80
    assert said.getvalue().count("2,271,543,296") == 4
    assert "optim " in said.getvalue()
