"""Layouts side by side: chances against closed forms, one network for all, text, JSON and page."""

import json
import math
import statistics

import numpy as np
import pytest
from helpers.pricing import priced

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.predict import compare
from megatron_prism.predict.variability import Variability

TEXT = """prism-program 1
world size=4 tp=2
{source}program ranks=0-3
0F compute ns={ns}
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum
"""


def spread(**parts):
    return Variability("test", *(parts.get(p, 0.0) for p in ("gpu", "step", "call", "network")), "")


def alone(ns):
    """One rank that computes ``ns``."""
    ops = [Op("compute", ns=ns)]
    return priced(Programs(World(1), (Program.from_ops(0, ops),), np.zeros(1, dtype=np.int64)))


def test_chances_have_their_closed_form():
    """Two lognormal durations; three alike."""
    varied = spread(gpu=0.1)
    two = {"a": alone(1_000_000), "b": alone(1_050_000)}
    found = compare(two, variability=varied, samples=40_000)
    expected = statistics.NormalDist().cdf(math.log(1.05) / (0.1 * math.sqrt(2)))
    chance = found.layouts[1].slower
    assert chance.share == pytest.approx(expected, abs=0.01)
    assert chance.low < expected < chance.high
    assert found.layouts[0].slower is None
    assert found.layouts[0].fastest.share == pytest.approx(expected, abs=0.01)
    assert sum(one.fastest.share for one in found.layouts) == pytest.approx(1)
    p95 = next(q for q in found.layouts[1].quantiles if q.level == 0.95)
    assert p95.low <= 1.05e6 * math.exp(0.1 * 1.644854) <= p95.high
    three = {name: alone(10**6) for name in "abc"}
    for one in compare(three, variability=varied, samples=20_000).layouts:
        assert one.fastest.share == pytest.approx(1 / 3, abs=0.015)


def test_a_regime_of_the_network_is_the_same_for_all():
    """It moves both, so the one that moves less is faster whatever it is."""
    jobs = {}
    for name, size in (("a", 1 << 24), ("b", 1 << 25)):
        call = Op("all_reduce", "TENSOR_MODEL_PARALLEL_GROUP", "bf16", size, size, "sum")
        programs = Programs(World(2, tp=2), (Program.from_ops(0, [call]),), np.zeros(2, np.int64))
        jobs[name] = priced(programs)
    found = compare(jobs, variability=spread(network=0.9), samples=2000, seed=7)
    assert found.layouts[1].slower.share == 1.0
    assert found.seed == 7


def test_equal_draws_count_half():
    jobs = {name: alone(10**6) for name in "ab"}
    found = compare(jobs, variability=spread(), samples=200)
    assert [one.fastest.share for one in found.layouts] == [0.5, 0.5]
    assert found.layouts[1].slower.share == 0.5


def test_what_cannot_be_compared():
    with pytest.raises(UsageError, match="nothing to be compared with"):
        compare({"a": alone(10**6)})


@pytest.fixture
def layouts(tmp_path):
    paths = []
    for name, ns, tokens in (("a", "10ms", 1024), ("b", "10.5ms", 2048)):
        path = tmp_path / f"{name}<b>.txt"
        path.write_text(TEXT.format(ns=ns, source=f"source tokens_per_iteration={tokens}\n"))
        paths.append(str(path))
    return paths


def test_the_command(layouts, tmp_path, capsys):
    first, second = layouts
    page = tmp_path / "c.html"
    words = ["predict", first, "--against", second, "samples=2000"]
    assert cli.main([*words, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert f"{first} is faster" in out
    assert "beware: iterations of different numbers of tokens" in out
    assert "calls: all vary as" in out
    text = page.read_text()
    assert "<b>" not in text
    assert "a&lt;b&gt;.txt" in text
    found = []
    for _ in range(2):
        assert cli.main([*words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["schema"] == "prism.comparison/1"
    assert found[0]["layouts"][1]["slower"]["share"] > 0.9
    assert set(found[0]["rests_on"]) == set(layouts)


def test_bad_words(layouts, capsys):
    for words, says in (
        (["--against", layouts[0]], "compared with itself"),
        (["--against", f"{layouts[0]},machine=h200", "machine=h200"], "compared with itself"),
        (["--against", layouts[1], "slow=3"], "slow with --against"),
        (["--against", layouts[1], "--html", "/dev/null/x"], "/dev/null is no folder"),
    ):
        assert cli.main(["predict", layouts[0], *words]) != 0
        assert says in capsys.readouterr().err
