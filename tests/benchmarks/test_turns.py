"""Jobs that take turns: nobody makes a step before it may, and errors are of the right pairs."""

import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.accuracy import run as turns
from benchmarks.accuracy import turnstile
from megatron_prism.core import program
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program, Programs


@pytest.fixture
def modules():
    return turns, turnstile


class Alive:
    """A process that has not ended, or has."""

    def __init__(self, status=None):
        self.status = status

    def poll(self):
        return self.status


def test_steps_are_made_in_turns_and_the_first_of_each_does_not_count(modules, tmp_path):
    turns, turnstile = modules
    gate = turnstile.Turnstile(tmp_path)
    runner = turns.Runner(tmp_path, 1, Alive())
    assert gate.allowed() == -1  # the program has not been started

    def job():
        for _ in range(5):
            gate.step()
            time.sleep(0.02)
        gate.tell()

    runner.open(0)
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    assert runner.wait()
    assert gate.starts == []
    assert turns.together([runner], 2)
    assert len(gate.starts) == 2
    time.sleep(0.03)
    assert len(gate.starts) == 2  # it waits for its next turn
    assert turns.together([runner], 3)
    assert len(gate.starts) == 5
    thread.join(5)
    assert [len(turn) for turn in runner.turns] == [1, 2]
    assert all(ms > 15 for turn in runner.turns for ms in turn)
    assert runner.memory() == [dict.fromkeys(turns.KEPT, 0)]


def test_a_job_that_ended_is_not_waited_for(modules, tmp_path):
    turns, _ = modules
    runner = turns.Runner(tmp_path, 2, Alive(1))
    (tmp_path / "rank-0.json").write_text(json.dumps({"steps": 0, "starts_ns": []}))
    assert not runner.wait()
    assert not turns.together([runner], 3)
    assert runner.turns == []


class Stepping:
    """A runner whose steps take no time; it writes down who was let through."""

    def __init__(self, name, heard, status=0):
        self.name, self.heard, self.steps, self.turns = name, heard, 0, []
        self.process = SimpleNamespace(wait=lambda limit: status)

    def open(self, steps):
        self.heard.append((self.name, steps))

    def wait(self):
        return True

    def lead(self):
        return [1.0] * self.steps

    def end(self):
        self.heard.append((self.name, "end"))


@pytest.mark.parametrize(("status", "between"), [(0, 0), (0, 5), (1, 5)])
def test_captures_alternate_with_the_real_job_and_all_must_succeed(modules, status, between):
    turns, _ = modules
    heard = []
    real = Stepping("real", heard)
    ranks = [Stepping(0, heard), Stepping(1, heard, status)]
    sitting = SimpleNamespace(alone_steps=11, beside=4, between=between)
    assert turns.captured(sitting, real, ranks) == (status == 0)
    order = [(name, steps) for name, steps in heard if name in ("real", 0) and steps != "end"]
    first = turns.WARM_UP + 4
    alternate = [(0, 5), ("real", first + 5), (0, 10), ("real", first + 10)] if between else []
    wanted = [("real", 0), (0, 0), ("real", first), *alternate, (0, turns.ENDLESS)]
    assert order[: len(wanted)] == wanted
    last = first + (10 if between else 0) + 4
    assert order[len(wanted) :] == ([("real", last)] if not status else [])
    assert heard.count((0, "end")) == 1


def test_what_the_host_did_is_added_up(modules, monkeypatch):
    from torch import distributed as dist

    _, turnstile = modules

    class Group:
        def allreduce(self, tensors):
            time.sleep(0.002)
            return tensors

    for name in turnstile._METHODS:
        if not hasattr(Group, name):
            setattr(Group, name, lambda self: None)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", Group)
    monkeypatch.setattr(turnstile.gc, "callbacks", [])
    host = turnstile.Host()
    host.install()
    assert Group().allreduce([1]) == [1]
    assert Group().barrier() is None
    calls, in_calls, in_gc, cpu = host.read()
    assert calls == 2
    assert in_calls > 1_500_000
    assert in_gc == 0 < cpu
    assert {name: len(ns) for name, ns in host.methods.items()} == {"allreduce": 1, "barrier": 1}


def test_errors_are_of_medians_and_slowdowns_each_of_its_own_run(modules, capsys):
    turns, _ = modules

    def runs(*lists):
        return [{"turns_ms": found} for found in lists]

    row = {
        "config": "pp2",
        "captured": True,
        "whole": True,
        "real_ms": 100.0,
        "predicted_ms": 101.0,
        "groups": {
            "real": runs([[100, 102], [98, 100]]),
            "paced": runs([[100.5, 100.5]], [[99.0, 101.0]]),
            "real, 1 x 2": runs([[150, 150]]),
            "paced, 1 x 2": runs([[156.0, 156.0]]),
        },
    }
    assert turns.table([row]) == 0
    shown = capsys.readouterr().out
    assert "replayed 101.0 ms (+1.00 %)" in shown
    assert "paced: 100.5 ms, 100.0 ms (+0.50 %, +0.00 %), spread +0.00 %, +0.00 %" in shown
    assert "real: 100.0 ms (+0.00 %), spread +2.00 %" in shown
    # 156 of 100.5 beside 150 of 100
    assert "paced, 1 x 2: 156.0 ms (+3.48 %)" in shown
    alone = {key: value for key, value in row.items() if key != "groups"}
    assert turns.table([alone]) == 0  # without rounds the replay is what was asked for
    assert turns.table([{**alone, "captured": False}]) == 1
    assert turns.table([{**row, "whole": False}]) == 1
    paced = row["groups"]["paced"]
    row["groups"]["paced"] = runs([[103.0]], [[100.0]])
    assert turns.table([row]) == 1
    row["groups"]["paced"] = [*paced[:1], *runs([])]  # rank 1 ended before its first turn
    assert turns.table([row]) == 1
    assert turns.table([{"config": "pp2"}]) == 1  # nothing was measured


def test_kernels_of_a_job_that_failed_are_compared_with_nothing(modules, tmp_path, capsys):
    turns, _ = modules
    groups = {}
    for name in ("real", "paced"):
        (tmp_path / name).mkdir()
        groups[name] = [turns.Runner(tmp_path / name, 1, Alive(1))]
    kernel = json.dumps([["nvjet_tst_128", 7, 0, 2_000_000]])
    (tmp_path / "real" / "kernels-0.json").write_text(kernel)
    turns.kernels(turns.Turns, groups)
    said = capsys.readouterr()
    assert "not everybody" in said.err
    assert said.out == ""
    (tmp_path / "paced" / "kernels-0.json").write_text(kernel)
    kept = turns.kernels(turns.Turns, groups)
    assert [len(side) for side in kept.values()] == [1, 1]
    assert set(kept["real"][0]) == {"ms", "calls", "gaps", "products_by_eighths_ms"}
    assert "kernels of rank 0" in capsys.readouterr().out


def test_a_results_file_keeps_what_captures_took(modules, tmp_path):
    turns, _ = modules
    ops = [Op("compute", ns=3_000_000, host=2_000_000), Op("mark"), Op("compute", ns=1_000_000)]
    timed = np.array([[3_100_000, 900_000], [2_900_000, 1_150_000]])
    one = dataclasses.replace(Program.from_ops(0, ops), samples=timed)
    program.save(Programs.one_per_rank([one]), tmp_path / "w.prism")
    assert turns.of_captures(tmp_path / "w.prism") == [
        {"rank": 0, "device_ms": 4.0, "host_ms": 2.0, "timed_ms": [4.0, 4.0]}
    ]


def test_reserved_bytes_are_told_by_pool_and_stream(modules):
    def segment(kind, stream, total, used):
        return {"segment_type": kind, "stream": stream, "total_size": total,
                "allocated_size": used}  # fmt: skip

    snapshot = [segment("small", 0, 2, 1), segment("large", 0, 20, 9), segment("large", 7, 30, 8),
                segment("large", 0, 20, 20)]  # fmt: skip
    assert modules[1]._segments(snapshot) == [
        ["large", True, 2, 40, 29, {20: 2}], ["large", False, 1, 30, 8, {30: 1}],
        ["small", True, 1, 2, 1, {2: 1}],
    ]  # fmt: skip


def test_a_paced_rank_says_at_each_stop_which_calls_were_late(modules, monkeypatch):
    from megatron_prism.runtime import virtual_world
    from megatron_prism.runtime.pacing import pacer as pace_report

    stamps = {"came": 1}
    monkeypatch.setattr(virtual_world, "current", lambda: SimpleNamespace(listeners=(object(),)))
    assert modules[1]._paced() == {}  # a capture has a recorder, too
    pacer = SimpleNamespace(launcher=SimpleNamespace(stamps=lambda: stamps), record=None)
    monkeypatch.setattr(virtual_world, "current", lambda: SimpleNamespace(listeners=(pacer,)))
    found = {"calls_paced": 3, "late_calls": 1, "late_us": 7.5, "groups": {}}
    monkeypatch.setattr(pace_report, "summary", lambda *args: found if args[1] is stamps else None)
    assert modules[1]._paced() == {"calls_paced": 3, "late_calls": 1, "late_us": 7.5}
    monkeypatch.setattr(virtual_world, "current", lambda: None)
    assert modules[1]._paced() == {}


def test_memory_of_paced_ranks_stands_beside_that_of_the_real_ones(modules, tmp_path):
    turns, _ = modules
    summary = {"memory": {"nccl": 300}}
    (tmp_path / "pp2-capture-0").mkdir()
    (tmp_path / "pp2-capture-0" / "rank-000000.json").write_text(json.dumps(summary))
    nccl = turns.nccl_of(tmp_path, "pp2", 2)
    assert nccl == [300, None]  # nobody measured communicators, or the capture failed

    def held(peak, used):
        return {"allocated_peak": peak, "reserved_peak": 2 * peak, "device_bytes": {"own": used}}

    real = [{"memory": [held(1000, 3000) | {"watts": [90.0, 690.4]}, held(500, 2000)]}]
    late = {"paced": {"calls_paced": 700, "late_calls": 131, "late_us": 12_345.6}}
    paced = [{"memory": [held(999, 2730) | late]}, {"memory": [held(500, 1500)]}]
    row = {"nccl": nccl, "groups": {"real": real, "paced": paced}}
    wanted = [
        "  allocated peak, paced ranks: -1 B (-0.10 %), +0 B (+0.00 %)",
        "  reserved peak, paced ranks: -2 B (-0.10 %), +0 B (+0.00 %)",
        "  device, with NCCL's part (modelled), paced ranks: +30 B (+1.00 %)",
        "  power, last turn: real 690 W, -; paced -, -",
        "  late calls, last iteration: 131 of 700 (all together 12.35 ms), -",
    ]
    assert turns.memory_lines(row) == wanted
    row["nccl"] = [None, None]
    assert (
        turns.memory_lines(row)[2]
        == "  device, with NCCL's part (modelled): not told by the driver"
    )
    row["groups"]["paced"] = paced[:1]
    assert turns.memory_lines(row) == []
    assert turns.memory_lines({}) == []
