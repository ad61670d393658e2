"""``--prism-draw``: the world that a paced rank meets, as it is or as drawn."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_prism import costs
from megatron_prism.costs.machine import machine
from megatron_prism.errors import PrismError, UsageError
from megatron_prism.plugin import draw, flags
from megatron_prism.plugin.pace import check
from megatron_prism.program_parse import parse
from megatron_prism.replay import release, timeline

TEXT = """prism-program 1
world size=16 tp=2 pp=2
program ranks=0-7
0F compute ns=10ms
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4194304 reduce=sum
0F send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=4194304 peer=1
G  all_reduce default_pg fp32 n=1 reduce=max
program ranks=8-15
0F recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=4194304 peer=-1
0F compute ns=12ms
G  all_reduce default_pg fp32 n=1 reduce=max
"""
H200 = machine("h200")


def pricing(world):
    return costs.price(world, H200)


def world_of(text, tmp_path, drawn="", ranks=(9,)):
    options = SimpleNamespace(ranks=ranks, pace=tmp_path, draw=drawn)
    file = tmp_path / "calibration.json"
    return draw.world_of(parse(text), options, pricing, H200, file)


def test_without_the_flag_nothing_is_drawn(tmp_path):
    world, prices, said = world_of(TEXT, tmp_path)
    assert said is None
    assert prices.sources == pricing(world).sources
    assert world.classes.counts[int(world.classes.of[9])] == 1


def test_a_slow_draw_is_slower_than_a_fast_one(tmp_path):
    """And what the local rank is answered to is later by as much."""
    times = []
    for level in ("p5", "p50", "p99"):
        world, prices, said = world_of(TEXT, tmp_path, f"3:{level}")
        assert f"{level} of 2,000 drawn with seed 3" in said
        assert "assumed" in said
        assert all(source.startswith("drawn (") for source in prices.sources)
        table = release.releases(world, prices, [9])
        ends = table.ends(np.zeros(len(table), dtype=np.int64))
        replayed = timeline.replay(world, prices, iterations=3).iteration_ns
        times.append((replayed, int(ends.max())))
    assert times[0][0] < times[1][0] < times[2][0]
    assert times[0][1] < times[2][1]
    again = timeline.replay(*world_of(TEXT, tmp_path, "3:p99")[:2], iterations=3).iteration_ns
    assert again == times[2][0]


def test_calls_are_drawn_from_the_folders_calibration(tmp_path):
    row = {"op": "all_reduce", "ranks": 2, "bytes": 8 << 20, "ns": 50_000}
    row["samples"] = np.linspace(4e4, 6e4, 64).tolist()
    stored = {"format": 1, "source": "here", "collectives": [row]}
    (tmp_path / "calibration.json").write_text(json.dumps(stored))
    from megatron_prism.costs.collective import read_calibration

    known = read_calibration(tmp_path / "calibration.json")
    options = SimpleNamespace(ranks=(9,), pace=tmp_path, draw="1")
    given = (parse(TEXT), options, lambda world: costs.price(world, H200, known), H200)
    assert "samples of the calibration" in draw.world_of(*given, tmp_path / "calibration.json")[2]


def test_slices_that_do_not_fit_are_refused(tmp_path):
    odd = TEXT.replace("bf16 n=4194304 peer=-1", "fp32 n=4194304 peer=-1")
    for drawn in ("", "1:p99"):
        with pytest.raises(PrismError, match="do not fit together"):
            world_of(odd, tmp_path, drawn)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prism-draw", "1"], "--prism-draw is felt only while"),
        (["--prism-pace", "d", "--prism-draw", "x"], "names no draw"),
        (["--prism-pace", "d", "--prism-draw", "1:p100"], "names no draw"),
    ],
)
def test_flags_that_make_no_sense(words, says):
    options = flags.from_command_line(["--prism-emulate", "--prism-world-size", "8", *words], {})
    with pytest.raises(UsageError, match=says):
        check(flags.with_tier(options, "cuda"))
