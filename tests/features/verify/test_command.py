"""``prism verify``: what it prints, and its exit status."""

import json
import math

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World
from megatron_prism.features.verify import verdict
from megatron_prism.features.verify.command import line_of
from megatron_prism.features.verify.compare import LayoutDifference

CHANGES = [["num_layers", "80", "2", "sizes"], ["bf16", "True", "False", "number formats"],
           ["v_head_dim", "128", "16", "sizes"]]  # fmt: skip
FOUND = LayoutDifference(
    "gradient", 1, "output_layer.weight", "rank 0", 0.5, 1e-5, ("2 x: dp",), (3, 9)
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs the command on a job whose verdict is given."""
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    words = [str(script), "--num-layers", "80", "--bf16", "--tensor-model-parallel-size", "8"]

    def run(*before, **found):
        made = verdict.Verdict(tuple(words), World(16, tp=8), World(4, tp=2), CHANGES, **found)
        monkeypatch.setattr(verdict, "verify", lambda *args, **kwargs: made)
        return cli.main(["verify", "--prism-world-size", "16", *before, "--", *words])

    return run


def test_a_job_that_is_the_same_ends_with_0(job, capsys):
    assert job(same=True) == 0
    said = capsys.readouterr().out
    assert "num_layers 80 -> 2" in said
    assert "v_head_dim" not in said  # a default, which nobody asked for
    assert said.splitlines()[-1] == "same: it computes what one rank alone computes"


def test_the_first_difference_is_shown_with_what_makes_it(job, capsys):
    assert job(same=False, difference=FOUND, culprits=["--sequence-parallel"]) == 1
    said = capsys.readouterr().out
    assert "first: gradient of iteration 1, output_layer.weight (rank 0)" in said
    assert "0.5 off, 1e-05 allowed; 3 more of 9" in said
    assert "gone without --sequence-parallel" in said


def test_a_value_of_one_run_alone_is_off_by_no_number(job, capsys):
    lack = LayoutDifference(
        "parameter names", 0, "decoder.layers.2.mlp.weight", "no rank", None, 0.0,
        ("in one rank alone only",), (3, 9),
    )  # fmt: skip
    assert job(same=False, difference=lack) == 1
    *_, first, count, note = capsys.readouterr().out.splitlines()
    assert first.strip() == (
        "first: parameter names of iteration 0, decoder.layers.2.mlp.weight (no rank)"
    )
    assert (count.strip(), note.strip()) == ("3 more of 9", "in one rank alone only")


def test_numbers_that_are_none_are_text_in_json(job, capsys):
    difference = LayoutDifference("loss", 1, "lm loss of microbatch 0", "rank 0", math.nan, 1e-5)
    assert job("--json", same=False, difference=difference, worst={"loss": math.inf}) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["difference"]["error"], said["worst"]) == ("nan", {"loss": "inf"})


def test_what_is_not_compared_is_named(job, capsys):
    unnamed = {"output_layer.weight": (16384, True)}
    assert job(same=True, unnamed=unnamed, not_compared=["the gradient norm: neither"]) == 0
    said = capsys.readouterr().out
    assert "output_layer.weight (16,384 elements that no checkpoint names, no gradient" in said
    assert "the gradient norm: neither" in said


def test_the_page_has_the_verdict_and_what_was_shrunk(job, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert job("--html", str(page), same=False, difference=FOUND, worst={"gradient": 7e3}) == 1
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert data["difference"]["where"] == "output_layer.weight"
    assert data["changes"] == CHANGES[:2]
    assert data["text"] in capsys.readouterr().out


def test_what_could_not_be_decided_ends_with_3(job, capsys):
    assert job("--json", why="rank 1 did not end in 300 s") == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["same"], said["why"]) == (None, "rank 1 did not end in 300 s")


def test_a_job_that_says_no_size_is_taken_to_have_replicas(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    line = line_of([], [str(tmp_path / "job.py"), "--tensor-model-parallel-size", "8"])
    assert (line.world, line.dp_known) == (World(8, tp=8), False)


def test_the_other_job_may_be_one_flag_more(job, capsys):
    assert job("--against", "--overlap-grad-reduce", same=True) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("what the other job computes")


def test_no_job_is_bad_usage():
    with pytest.raises(UsageError, match="verify which job"):
        cli._dispatch(["verify"])
