"""``prism predict`` from the command line: the page, the JSON and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.programs import program
from megatron_prism.core.programs.program_text import parse

TEXT = """prism-program 1
world size=4 tp=2
program ranks=0-3
0F compute ns=10ms
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum
G  all_reduce default_pg fp32 n=1 reduce=max
"""


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "w.txt"
    path.write_text(TEXT)
    return str(path)


def test_json_is_the_same_every_time(world, capsys):
    found = []
    for _ in range(2):
        assert cli.main(["predict", world, "--samples", "500", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["schema"] == "prism.prediction/1"
    levels = {q["level"]: q["ns"] for q in found[0]["quantiles"]}
    assert 9.9e6 < levels[0.05] < levels[0.5] < levels[0.95] < 14e6
    assert levels[0.99] is None  # 500 samples do not reach that far


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--samples", "many"], "is no number"),
        (["--slow", "-1"], "slow is a factor"),
        (["--samples", "10"], "10 samples say little"),
        (["--samples", "1B"], "take hours"),
        (["--variability", "fitted"], "hold no repeated times"),
        (["--variability", "none"], "cannot read a file of spreads, none"),
    ],
)
def test_bad_words(world, words, says, capsys):
    assert cli.main(["predict", world, *words]) == (
        1 if words == ["--variability", "fitted"] else 2
    )
    assert says in capsys.readouterr().err


def test_times_of_several_iterations_say_how_much_they_vary(tmp_path, capsys):
    made = parse(TEXT)
    one = made.programs[0]
    path, few = str(tmp_path / "w.prism"), str(tmp_path / "few.prism")
    for file, count in ((path, 6), (few, 3)):
        samples = np.linspace(9_000_000, 11_000_000, count).astype(np.int64)[:, None]
        timed = dataclasses.replace(one, samples=samples)
        program.save(dataclasses.replace(made, programs=(timed,)), file)
    for words, source in (
        ([], "fitted to 6 timed iterations"), (["--variability", "public"], "assumed"),
    ):  # fmt: skip
        assert cli.main(["predict", path, *words]) == 0
        out = capsys.readouterr().out
        assert source in out, words
        assert ("fitted to" in out) == (not words)
    # hosts of four iterations say nothing, whatever the segments say
    hosts = dataclasses.replace(
        timed, samples=np.tile(timed.samples, (2, 1)), hosts=timed.samples[:, 0]
    )
    program.save(dataclasses.replace(made, programs=(hosts,)), tmp_path / "h.prism")
    assert cli.main(["predict", str(tmp_path / "h.prism")]) == 0
    assert "fitted to 6 timed iterations" in capsys.readouterr().out
    assert cli.main(["predict", few]) == 0
    assert "spreads: published ranges: assumed" in capsys.readouterr().out
