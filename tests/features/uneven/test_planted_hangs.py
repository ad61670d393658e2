"""Ten planted hangs that depend on data, each from a launch line or a recipe, and named.

Six are in a script whose ranks are captured each for itself; the others are inputs of Megatron's
own jobs.  Beside each kind stands the job that is healthy.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import forks

from megatron_prism.cli import main as cli
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.emulate.jobs import recipe_job

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.ci]

SCRIPT = Path(__file__).parents[2] / "helpers" / "data_dependent.py"
DP, EP = "DATA_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"
PP, TP_EP = "PIPELINE_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
# what is planted -> kind and group of the mismatch, the odd rank, words of the picture
OF_SCRIPT = {
    "loader": ("missing", EP, 1, "rank 1 stops 1 call before rank 0"),
    "dropped": ("missing", EP, 2, "rank 2 stops 1 call before rank 3"),
    "expert": ("missing", EP, 0, "rank 0 stops 1 call before rank 1"),
    "length": ("shape", DP, 1, "512 elements on rank 0, 256 elements on rank 1"),
    "images": ("missing", DP, 3, "all_reduce fp32 n=5"),
    "evaluation": ("missing", DP, 0, "all_reduce fp32 n=1"),
}
TINY = """
    data_path=null train_iters=1 micro_batch_size=1 world_size=8 hidden_size=32 ffn_hidden_size=64
    num_attention_heads=4 prism.tier=meta
""".split()
PIPELINE = "pp=2 tp=2 global_batch_size=8"
EXPERTS = "ep=4 num_experts=4 global_batch_size=16"
RECIPES = {
    "long": f"{PIPELINE} seq_length=64",
    "short": f"{PIPELINE} seq_length=32",
    "varies-long": f"{PIPELINE} seq_length=64 variable_seq_lengths=true",
    "varies-short": f"{PIPELINE} seq_length=32 variable_seq_lengths=true",
    "experts": f"{EXPERTS} seq_length=64",
    "gathers-long": f"{EXPERTS} seq_length=64 moe_token_dispatcher_type=allgather",
    "gathers-short": f"{EXPERTS} seq_length=32 moe_token_dispatcher_type=allgather",
}
# words of prism uneven -> words of the answer; none: every call is matched
OF_RECIPES = {
    "long lengths=dp=1:64,32,64,64 capture=short": (
        "smallest example: lengths=2,3,6,7:64,32,64,64",
        f"shape in {PP}, call #2",
        "variable_seq_lengths of the model's configuration",
    ),
    "varies-long lengths=dp=1:64,32,64,64 capture=varies-short": (),
    "long microbatches=dp=1:3": (),
    "long microbatches=2,3:3": (f"unmatched receive in {PP}", "posts 1 more recv"),
    "experts microbatches=dp=5:1": (
        f"missing in {EP}",
        "ranks 4 and 5",
        "core/tensor_parallel/mappings.py",
    ),
    "gathers-long lengths=dp=1:32 capture=gathers-short": (
        "smallest example: lengths=1:",
        f"shape in {TP_EP}",
        "--moe-token-dispatcher-type alltoall",
    ),
    "long loader=pp=1,dp=1:2": ("ranks 6,7 (host stuck)", "raises StopIteration"),
}


def capture(*words, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "megatron_prism", "capture", "-o", *map(str, words)]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A folder with the slices of each recipe, all captured by forks of one process."""
    folder = tmp_path_factory.mktemp("captured")
    ranks = []
    for name, words in RECIPES.items():
        dispatcher = "moe_token_dispatcher_type=alltoall"
        recipe = recipes.load("tiny-gpt_1cpu", [*TINY, dispatcher, *words.split()])
        ranks += [(recipe, rank, folder / name) for rank in recipe_job.ranks_of(recipe)]
    for answer in forks.capture(ranks).values():
        assert "error" not in answer, answer["error"]
    return folder


@pytest.mark.one_release
@pytest.mark.parametrize("planted", ["none", *OF_SCRIPT])
def test_ranks_of_a_script_are_captured_each_for_itself(planted, tmp_path, capsys):
    ranks = "--prism-world-size 4 --prism-tier meta --prism-ranks 0-3".split()
    capture("slices", *ranks, "--", SCRIPT, planted, folder=tmp_path)
    status = cli.main(["check", str(tmp_path / "slices"), "--json"])
    findings = json.loads(capsys.readouterr().out)
    if planted == "none":
        assert (status, findings) == (0, [])
        return
    kind, group, odd_rank, words = OF_SCRIPT[planted]
    (finding,) = findings
    assert status == 1
    assert (finding["kind"], finding["group"]) == (kind, group)
    assert finding["ranks"][1] == odd_rank
    assert words in finding["likely"] + finding["picture"]


@pytest.mark.parametrize("line", OF_RECIPES)
def test_inputs_of_a_job_of_megatron(line, captured, capsys, monkeypatch):
    monkeypatch.chdir(captured)
    expected = OF_RECIPES[line]
    status = cli.main(["uneven", *line.split()])
    out = capsys.readouterr().out
    assert status == int(bool(expected)), out
    for words in expected:
        assert words in out
    if not expected:
        assert "every call is matched" in out
