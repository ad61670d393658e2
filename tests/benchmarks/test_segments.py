"""Segments that never ran, held against measured ones (``benchmarks/accuracy/segments.py``)."""

import json
import sys

from benchmarks.accuracy import segments
from megatron_prism.core.programs.program import save
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.costs.kernels import parts_of, table_of
from megatron_prism.replay.costs.machine import machine

PRODUCT = "gemm(4096x4096,4096x4096)bfloat16:137438953472:100663296"
MOVED = "mul(4096x4096)bfloat16:0:67108864"
JOB = """\
prism-program 1
world size=1
program ranks=0
0F compute {forward}
0B compute {backward}
"""
SHAPES = JOB.format(
    forward=f'flops=137438953472 traffic=167772160 kernels=2 note="{PRODUCT};{MOVED}"',
    backward="flops=137438953472 traffic=100663296 kernels=1",
)
MEASURED = JOB.format(forward="ns=200000", backward="ns=400000")


def test_the_part_that_the_table_lacks_is_that_of_rooflines():
    hardware = machine("h200")
    (shapes,) = parse(SHAPES).programs
    parts = parts_of(f"{PRODUCT};{MOVED}", 0, 0, 2, hardware, table_of(hardware))
    assert parts.products > 0
    assert parts.data_movers > 0
    assert segments.by_roofline(shapes, hardware) == {"forward": 0.0, "backward": 1.0}


def test_the_command_writes_a_row_for_each_phase(tmp_path, monkeypatch, capsys):
    for folder, text in (("meta", SHAPES), ("measured", MEASURED)):
        (tmp_path / folder).mkdir()
        save(parse(text), tmp_path / folder / "slice-000000.prism")
    rows_file = tmp_path / "rows.json"
    words = [str(tmp_path / "meta"), str(tmp_path / "measured"), "--json", str(rows_file)]
    monkeypatch.setattr(sys, "argv", ["segments", *words])
    segments.main()
    rows = json.loads(rows_file.read_text())["rows"]
    assert [(row["phase"], row["measured_ms"]) for row in rows] == [
        ("forward", 0.2),
        ("backward", 0.4),
    ]
    assert all(row["table_ms"] > 0 for row in rows)
    assert "backward" in capsys.readouterr().out
