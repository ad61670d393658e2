"""Every command's ``--json`` on stored slices, as it was: a change of a figure is a visible diff.

``tests/golden/slices`` holds small jobs, captured on shapes (``prism capture``; in FP8 from a stock
script) and on one H100 (``gpu_*``).  ``pytest tests/test_golden.py --update-golden`` writes what is
printed now to ``tests/golden/json``.
"""

import json
import math
import pathlib

import pytest

from megatron_prism.cli import main as cli

GOLDEN = pathlib.Path(__file__).parent / "golden"
JOBS = sorted(path.name for path in (GOLDEN / "slices").iterdir())
SHAPES = [job for job in JOBS if not job.startswith("gpu_")]  # these recorded memory
CALIBRATED = ["--calibration", "calibration.json"]
TIMES = {
    "replay": ["replay", "JOB"],
    "replay-iterations": ["replay", "JOB", "--iterations", "3"],
    "replay-calibrated": ["replay", "JOB", *CALIBRATED],
    "replay-what-if": ["replay", "JOB", "slow=0:1.5", "faster=all_reduce:2"],
    "replay-moved": ["replay", "JOB", "moved=b200"],
    "replay-dp": ["replay", "JOB", "dp=8"],
    "replay-microbatches": ["replay", "JOB", "microbatches=6"],
    "predict": ["predict", "JOB", "--samples", "200"],
    "predict-calibrated": [
        "predict",
        "JOB",
        "--samples",
        "200",
        "--seed",
        "3",
        "--slow",
        "2",
        *CALIBRATED,
    ],
    "predict-public": ["predict", "JOB", "--samples", "100", "--variability", "public"],
    "classes": ["show", "JOB"],
    "check": ["check", "JOB"],
    "hang": ["hang", "JOB"],
    "hang-drop": ["hang", "JOB", "fault=drop@rank=1,nth=3"],
    "hang-slow": ["hang", "JOB", "fault=slow@rank=1:factor=1.5"],
}
MEMORY = {
    "fit": ["fit", "JOB", "--limit", "80GB"],
    "fit-not": ["fit", "JOB", "--limit", "8MiB", "--device", "none"],
    "memory-record": ["memory", "record", "JOB", "-o", "OUT/made.json"],
    "memory-check": ["memory", "check", "JOB", "--baseline", "OUT/made.json", "--limit", "8MiB"],
}
OTHERS = {
    "compare": ["compare", "slices/dense_pp2", "slices/interleaved"],
    "compare-what-if": ["compare", "slices/dense_pp2", "slow=0:1.5"],
    "recipes": ["recipes"],
    "hang-dumps": ["hang", "--dumps", "OUT/dumps"],
    "hang-dumps-programs": ["hang", "--dumps", "OUT/dumps", "--programs", "slices/dense_pp2"],
    "check-mismatch": ["check", "OUT/odd.txt"],
    "replay-mismatch": ["replay", "OUT/odd.txt"],
}
ODD = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=8 reduce=sum
program rank=1 ranks=1
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=9 reduce=sum
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command beside the stored slices: its status and its JSON, or what went wrong."""
    monkeypatch.chdir(GOLDEN)

    def run(words, job=""):
        words = [word.replace("JOB", f"slices/{job}").replace("OUT", str(tmp_path))
                 for word in words]  # fmt: skip
        capsys.readouterr()
        status = cli.main([*words, "--json"])
        said = capsys.readouterr()
        out, errors = (text.replace(str(tmp_path), "OUT") for text in (said.out, said.err))
        if out:
            return {"status": status, "json": json.loads(out)}
        # a busy host is told how far the command is
        lines = errors.splitlines(keepends=True)
        errors = "".join(line for line in lines if not line.startswith("prism: …"))
        return {"status": status, "error": errors}

    return run


def assert_like(found, expected, where="$"):
    """Equal; floats to nine digits, since libraries sum in different orders."""
    if isinstance(expected, dict) and isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_like(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_like(found[index], value, f"{where}[{index}]")
    elif isinstance(expected, float) and isinstance(found, (int, float)):
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9), (where, found, expected)
    else:
        assert found == expected, where


def hold(request, name, found):
    """Compare with the stored answer, or store it."""
    path = GOLDEN / "json" / f"{name}.json"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        short = {"parse_float": lambda text: float(f"{float(text):.10g}")}
        stored = json.loads(json.dumps(found), **short)
        path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert path.exists(), f"{path.name} is missing: pytest tests/test_golden.py --update-golden"
    assert_like(found, json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("job", JOBS)
def test_times_and_hangs(job, run, request):
    for name, words in TIMES.items():
        hold(request, f"{job}/{name}", run(words, job))


@pytest.mark.parametrize("job", SHAPES)
def test_memory(job, run, request):
    for name, words in MEMORY.items():
        hold(request, f"{job}/{name}", run(words, job))


def test_the_other_commands(run, request, tmp_path, capsys):
    (tmp_path / "odd.txt").write_text(ODD)
    run(["hang", "slices/dense_pp2", "fault=drop@rank=5,nth=4", "-o", "OUT/dumps"])
    for name, words in OTHERS.items():
        hold(request, f"others/{name}", run(words))


def test_programs_as_text(run, request, capsys):
    cli.main(["show", "slices/dense_pp2", "--rank", "0", "--around", "1B0"])
    hold(request, "others/show", {"text": capsys.readouterr().out.splitlines()})
