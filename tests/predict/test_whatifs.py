"""What-ifs of tails and their page: halves, slow GPUs, hot nodes, scale, hostile labels."""

import html.parser
import json

import numpy as np
import pytest
from helpers.pricing import priced
from helpers.spreads import ALL, pipeline, same, spread, still

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import Op
from megatron_prism.core.world import World
from megatron_prism.predict import Sampler, study, whatifs
from megatron_prism.predict.sampler import replica_of
from megatron_prism.predict.whatifs import p95


def test_a_slow_gpu_hurts_where_the_work_is():
    sampler = Sampler(still(pipeline(World(16, tp=2, pp=4))).timeline)
    each = sampler.draw(spread(gpu=0.001), 400)
    found = whatifs.placement(sampler, spread(gpu=0.001), each, (1.5,))
    (row,) = found.p95
    assert np.argmax(row) == 3  # the last stage has four times the first one's work
    assert found.gain[0] == max(row) / min(row) > 1.2
    # 4 microbatches of 400 us at stage 3, after 600 us of the stages before it
    assert max(row) == pytest.approx(600_000 + 4 * 400_000 * 1.5, rel=0.01)
    with pytest.raises(UsageError, match="is no factor"):
        whatifs.placement(sampler, spread(), each, (0,))


def test_a_hot_node_is_in_the_replicas_of_its_ranks():
    world = World(16, tp=2, pp=2)  # 4 replicas; node 0 is stage 0 of all of them
    made = still(pipeline(world))
    assert replica_of(made.graph, np.arange(16)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    sampler = Sampler(made.timeline)
    each = sampler.draw(spread(), 400)
    first = whatifs.hot_node(sampler, spread(), each, 0, 8, (3.0,))
    second = whatifs.hot_node(sampler, spread(), each, 1, 8, (3.0,))
    assert first.ranks == 8
    # stage 0: 4 x 300 us and one of 200 at the end; stage 1: 100 us and 4 x 600
    assert first.p95[0][1] == pytest.approx(1_400_000)
    assert second.p95[0][1] == pytest.approx(2_500_000)
    with pytest.raises(UsageError, match="there is no node 2"):
        whatifs.hot_node(sampler, spread(), each, 2, 8)
    assert whatifs.hot_nodes(sampler, spread(), each, 8, (3.0,)) == (first, second)
    pairs = whatifs.hot_nodes(sampler, spread(), each, 2, (3.0,))
    assert [(one.node, one.ranks) for one in pairs] == [(0, 2), (4, 2)]  # four nodes of each stage
    (all_,) = whatifs.hot_nodes(sampler, spread(), each, 32, (3.0,))  # a node larger than the job
    assert (all_.node, all_.ranks) == (0, 16)


def test_the_sweep_has_the_quantiles_of_each_world():
    ops = [Op("compute", ns=1_000_000), Op("all_reduce", ALL, "bf16", 1, 1, "sum")]
    made = priced(same(World(64), ops))
    points, note = whatifs.scale(Sampler(made.timeline), spread(gpu=0.1), made, (64, 256, 1024))
    assert [point.ranks for point in points] == [64, 256, 1024]
    for point in points:
        own = priced(same(World(point.ranks), ops)).timeline
        drawn = Sampler(own, seed=9).draw(spread(gpu=0.1), 2000).max(axis=1)
        assert point.p95 == pytest.approx(p95(drawn), rel=0.02)
        assert point.steady == own.iteration_ns
    assert "1 ranks a replica" in note


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


TEXT = """prism-program 1
world size=8 tp=2 pp=2
group <script>alert(1)</script> 0,1,2,3,4,5,6,7
program ranks=0-3
0F compute ns=10ms
0F all_reduce <script>alert(1)</script> bf16 n=4096 reduce=sum
program ranks=4-7
0F compute ns=20ms
0F all_reduce <script>alert(1)</script> bf16 n=4096 reduce=sum
"""


def test_the_page_is_whole_and_harmless(tmp_path, capsys):
    source, page = tmp_path / "w.txt", tmp_path / "page.html"
    source.write_text(TEXT)
    words = ["predict", str(source), "--samples", "200", "--html", str(page)]
    status = cli.main(words)
    said = capsys.readouterr()
    assert status == 0, said.err
    text = page.read_text()
    tags = Page(text).tags
    names = {tag for tag, _ in tags}
    assert not names & {"img", "link", "iframe"}
    assert "<script>alert" not in text
    assert not any(key.startswith("on") or key in ("src", "href") for _, a in tags for key in a)
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["classes"] == {"0": "stage 0", "1": "stage 1"}
    assert "worst / best" in said.out
    assert cli.main(words) == 2  # there already
    assert cli.main([*words, "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["study"]["hot"][0]["ranks"] == 8


def test_the_study_prices_other_worlds():
    made, done = priced(pipeline(World(16, tp=2, pp=2))), []
    found = study(Sampler(made.timeline), spread(gpu=0.05), made, progress=done.append)
    assert done[-1] == 1.0
    assert [p.ranks for p in found.scale][0] == 64
    assert found.scale[-1].p95 > found.scale[0].p95
