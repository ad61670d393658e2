"""Jobs that take turns: nobody makes a step before it may, and errors are of the right pairs."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks.accuracy import run as turns
from benchmarks.accuracy import turnstile


class Alive:
    """A process that has not ended, or has."""

    def __init__(self, status=None):
        self.status = status

    def poll(self):
        return self.status


def test_steps_are_made_in_turns_and_the_first_of_each_does_not_count(tmp_path):
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


def test_a_job_that_ended_is_not_waited_for(tmp_path):
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
def test_captures_alternate_with_the_real_job_and_all_must_succeed(status, between):
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


def test_errors_are_of_medians(capsys):
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
        },
    }
    assert turns.table([row]) == 0
    shown = capsys.readouterr().out
    assert "replayed 101.0 ms (+1.00 %)" in shown
    assert "paced: 100.5 ms, 100.0 ms (+0.50 %, +0.00 %), spread +0.00 %, +0.00 %" in shown
    assert "real: 100.0 ms (+0.00 %), spread +2.00 %" in shown
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
