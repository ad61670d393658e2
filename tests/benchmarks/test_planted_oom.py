"""The benchmark that plants an out-of-memory: its prediction and how it reads what a rank says."""

import json
import pathlib

import pytest

torch = pytest.importorskip("torch")
from benchmarks.accuracy import planted_oom  # noqa: E402
from megatron_prism.core.program import Builder  # noqa: E402
from megatron_prism.emulate.device_memory import explain  # noqa: E402

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
MIB = 1 << 20


def stage(rank, layers):
    """A stage that keeps ``layers`` activations of 60 MiB."""
    builder = Builder()
    for layer in range(layers):
        builder.memory(layer + 1, 60 * MIB, f"mlp @core/mlp.py:{layer}")
        builder.add("compute", ns=1000, phase="forward", microbatch=layer)
    return builder.build(rank)


def test_the_limit_is_between_the_peaks_and_the_op_is_named():
    found = planted_oom.predicted({0: stage(0, 6), 1: stage(1, 3)})
    assert (found["over"], found["under"]) == (0, 1)
    assert found["reserved"][1] < found["limit"] < found["reserved"][0]
    assert (found["phase"], found["microbatch"]) == ("forward", 5)
    assert found["site"] == "core/mlp.py:5"
    assert found["request"] == 60 * MIB
    assert found["limit"] + found["raise_by"] == found["reserved"][0]


def test_what_a_rank_says_is_read():
    labels = {"iteration": 2, "phase": "backward", "microbatch": 3, "chunk": 1}
    error = explain(torch.OutOfMemoryError("no"), "rank 7 (pp=1)", labels)
    match = planted_oom.RAN_OUT.search(str(error))
    assert match.groups() == ("backward", "3", None)
    said = str(error).replace("microbatch 3, chunk 1", "microbatch 3, at core/a.py:7")
    assert planted_oom.RAN_OUT.search(said).groups() == ("backward", "3", "core/a.py:7")


def test_the_kept_plan_is_one():
    kept = json.loads((RESULTS / "planted_oom_plan.json").read_text())
    assert (
        kept["reserved"][str(kept["under"])] < kept["limit"] < kept["reserved"][str(kept["over"])]
    )
    assert kept["limit"] + kept["raise_by"] == kept["reserved"][str(kept["over"])]
