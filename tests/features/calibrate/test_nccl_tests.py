"""nccl-tests' output, by its own format strings of three releases, becomes a calibration."""

# ruff: noqa: E501 - lines as nccl-tests prints them

import json

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UsageError
from megatron_prism.features.calibrate import nccl_tests
from megatron_prism.replay.costs.collectives import read_calibration

# printed as src/common.cu of 2019, src/util.cu of 2.17.9 and all_gather.cu of 2022 do
RANKS = (
    "#  Rank {r:2d} Group  0 Pid   {p} on {h:>10s} device {d:2d} [0000:{d:02x}:00] NVIDIA H200\n"
)
NEW = """# nccl-tests version 2.17.9 nccl-headers=22809 nccl-library=22809
# Collective test starting: {program}
# nThread 1 nGpus 4 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0
#
# Using devices
{ranks}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
{rows}# Out of bounds values : 0 OK
# Avg bus bandwidth    : 100.1
"""
OLD = """# nThread 1 nGpus 4 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{ranks}#
#                                               out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}# Out of bounds values : 0 OK
"""


def ranks(count=4, per_host=4, old=False):
    text = "".join(
        RANKS.format(r=r, p=100 + r, h=f"node{r // per_host}", d=r % per_host) for r in range(count)
    )
    return text.replace(" Group  0", "") if old else text


def line(size, us, factor, redop="sum", wrong="0"):
    algorithm = size / us / 1e3
    one = f"  {us:7.2f}  {algorithm:6.2f}  {algorithm * factor:6.2f}  {wrong:>6}"
    return f"{size:12d}  {size // 4:12d}     float  {redop:>6}      -1{one}{one}\n"


def all_reduce(count=4, per_host=4, us=(30.0, 700.0), **more):
    factor = 2 * (count - 1) / count
    rows = line(1 << 20, us[0], factor) + line(1 << 27, us[1], factor, **more)
    return NEW.format(program="all_reduce_perf", ranks=ranks(count, per_host), rows=rows)


def put(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_text_of_today(tmp_path):
    run = nccl_tests.read(put(tmp_path, "log.txt", all_reduce()))
    assert (run.op, run.ranks, run.per_node) == ("all_reduce", 4, 4)
    assert run.rows == ((1 << 20, 30.0), (1 << 27, 700.0))
    assert (run.device, run.version) == ("NVIDIA H200", "22809")


def test_text_of_2019_that_does_not_name_its_program(tmp_path):
    size, us = 1 << 27, 500.0
    algorithm = size / us / 1e3
    one = f"  {us:7.1f}  {algorithm:6.2f}  {algorithm * 0.75:6.2f}  {0.0:5.0e}"
    text = OLD.format(
        ranks=ranks(old=True), rows=f"{size:12d}  {size // 4:12d}   float{one}{one}\n"
    )
    run = nccl_tests.read(put(tmp_path, "h200_all_gather_perf.txt", text))
    assert (run.op, run.ranks, run.rows) == ("all_gather", 4, ((size, us),))
    with pytest.raises(UsageError, match="does not say which collective") as caught:
        nccl_tests.read(put(tmp_path, "log.txt", text))
    assert "all_reduce_perf" in caught.value.fix
    with pytest.raises(UsageError, match="that of all_reduce among 4 is 1.500"):
        nccl_tests.read(put(tmp_path, "all_reduce_perf.txt", text))


def as_json(**more):
    point = {"time": 700.0, "alg_bw": 191.7, "bus_bw": 287.6, "nwrong": 0.0}
    one = {"group": 0, "pid": 9, "hostname": "a", "device_info": "NVIDIA B200"}
    devices = [{**one, "rank": r, "device": r} for r in range(4)]
    result = {"size": 1 << 27, "count": 1 << 25, "type": "float", "redop": "sum", "root": "-1",
              "out_of_place": {**point, **more}, "in_place": point}  # fmt: skip
    stored = {"version": 1, "args": ["./build/all_reduce_perf", "-b", "8"], "nccl_version": 22809,
              "config": {"devices": devices}, "results": [result]}  # fmt: skip
    return json.dumps(stored)


def test_its_json(tmp_path):
    run = nccl_tests.read(put(tmp_path, "x.json", as_json()))
    assert (run.op, run.ranks, run.rows) == ("all_reduce", 4, ((1 << 27, 700.0),))
    with pytest.raises(UsageError, match="results are wrong"):
        nccl_tests.read(put(tmp_path, "x.json", as_json(nwrong=3.0)))
    with pytest.raises(UsageError, match="host's time"):
        nccl_tests.read(put(tmp_path, "x.json", as_json(cpu_time=3.0)))


def test_a_calibration_from_files(tmp_path, capsys):
    put(tmp_path, "one.txt", all_reduce())
    put(tmp_path, "two.txt", all_reduce(16, 8, us=(90.0, 1500.0)))
    out = tmp_path / "cal.json"
    words = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    assert cli.main(["calibrate", "--from-nccl-tests", *words, "-o", str(out)]) == 0
    assert "16 ranks, 8 per host, 2 sizes" in capsys.readouterr().out
    found = read_calibration(out)
    assert found.source == "nccl-tests: NVIDIA H200 NCCL 22809"
    assert found.look_up("all_reduce", 4, 1 << 20) == 30_000
    assert found.look_up("all_reduce", 16, 1 << 27, 8) == 1_500_000
    assert found.look_up("all_reduce", 16, 1 << 27) is None
    again = [words[1], "--node-gpus=72", "-o", str(out), "--force"]
    assert cli.main(["calibrate", "--from-nccl-tests", *again]) == 0
    assert read_calibration(out).look_up("all_reduce", 16, 1 << 27) == 1_500_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "no line '#  Rank"),
        (all_reduce().split("# Out of")[0].rsplit("\n", 3)[0], "no line of results"),
        (all_reduce(wrong="7"), "results are wrong (7 elements)"),
        (all_reduce().replace("  time ", "  cputime "), "host's time"),
        (all_reduce(1, 1), "one GPU"),
        (all_reduce() + "all_gather_perf", "names several collectives"),
        (all_reduce().replace("   30.00", "    0.00"), "take 0.0 us"),
        (all_reduce() + line(1 << 27, 1500.0, 1.5), "take 700.0 us and 1500.0 us"),
        (all_reduce(4).replace(ranks(4), ranks(8, 8)), "that of all_reduce among 8"),
    ],
)
def test_what_it_is_not(tmp_path, capsys, text, says):
    path, out = put(tmp_path, "log.txt", text), tmp_path / "cal.json"
    assert cli.main(["calibrate", "--from-nccl-tests", str(path), "-o", str(out)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert str(path) in said
    assert "fix: " in said
    assert not out.exists()
