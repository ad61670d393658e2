"""What a capture does without, answers from its slices say."""

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING
from helpers.pretrain import JOB

import megatron_prism as prism
from megatron_prism.cli.main import main

pytestmark = [pytest.mark.megatron, TRAINING]

_FLAGS = (
    "--transformer-impl transformer_engine --pipeline-model-parallel-size 1 --sequence-parallel"
)


def test_answers_say_that_userbuffers_were_off(tmp_path, capsys):
    """The settings of the slices have the option: without a word its time looks measured."""
    words = f"--prism-world-size 16 --prism-tier meta --prism-ranks 0 --prism-capture {tmp_path}"
    lines = []
    for folder, more in (("off", ()), ("on", ("--tp-comm-overlap",))):
        job = [*JOB, *_FLAGS.split(), *more]
        lines.append([*f"{words}/{folder}".split(), "--", stock_jobs.TINY, *job])
    for status, printed in stock_jobs.run(lines):
        assert status == 0, printed[-3000:]

    assert prism.load(tmp_path / "off").without is None
    programs = prism.load(tmp_path / "on")
    assert programs.without.startswith("--tp-comm-overlap: the same collectives run one after")
    for command in ("replay", "fit"):
        assert main([command, str(tmp_path / "on"), "--machine", "h200"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"without {programs.without}" in shown
        assert main([command, str(tmp_path / "off"), "--machine", "h200"]) == 0
        assert "userbuffers" not in capsys.readouterr().out
