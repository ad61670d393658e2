"""A host slower than at the captures: noticed where the device waits for it, and only there."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from megatron_prism import costs, graph
from megatron_prism.costs.machine import machine
from megatron_prism.errors import PrismError
from megatron_prism.ops import Op
from megatron_prism.plugin.pace_drift import Drift, slower, stretches
from megatron_prism.program import Program
from megatron_prism.program_parse import parse
from megatron_prism.replay import timeline, whatif
from megatron_prism.replay.release import releases
from megatron_prism.virtual.pace_kernel import Launcher, _columns
from megatron_prism.virtual.pace_source import RING, TABLE

MS = 1_000_000
CALLS = 6
TWO = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0-1
0F compute ns=1ms host=2ms lead=1ms
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
0F compute ns=1ms host=3ms lead=1ms
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
-  host_wait note=device
"""


def call(batch=-1):
    return Op("send", group="PP", dtype="bf16", num_in=4, peer=1, batch=batch)


def segment(host):
    return Op("compute", ns=MS, host=host, lead=0)


def test_a_stretch_is_what_the_host_issues_between_two_calls():
    ops = [
        segment(9), call(), segment(1), Op("record", handle=5), segment(2), call(0), call(0),
        segment(4), Op("host_wait", note="device"), segment(8), call(), call(),
        Op("all_reduce", group="ALONE", dtype="bf16", num_in=4), segment(3), call(),
    ]  # fmt: skip
    ns, plain = stretches(Program.from_ops(0, ops), [1, 5, 10, 11, 14])
    assert ns.tolist() == [3, 12, 0, 3]
    # the third waits for the device, and the fifth is a call that is nobody's launch
    assert plain.tolist() == [True, False, True, False]


class Job:
    """A pacer and its launcher whose host takes ``factor`` times the 5 ms between two calls."""

    shared = None

    def __init__(self, factor=1.0, queued=0):
        self.factor, self.queued = factor, queued
        self.launcher, self.launches = self, [[i] for i in range(CALLS)]
        self.lags, self.host_factor, self.iteration = [(0, 500)], 1.0, -1
        self.issued, self.left = ([[0] * CALLS for _ in range(RING)] for _ in range(2))
        self.tag = np.zeros((RING, CALLS), np.int64)
        self.now, self.tables = 0, []

    def lag(self):
        return self.now, 500

    def retime(self, table):
        self.tables.append(table)

    def stamps(self):
        return {"tag": self.tag, "came": np.array(self.issued) + 500 + 10_000 + self.queued}

    def iterate(self, watch):
        self.iteration += 1
        watch.begin(self.iteration)
        slot = self.iteration % RING
        for launch in range(CALLS):
            self.now += round(5 * MS * self.factor)
            self.issued[slot][launch] = self.now
            self.now += MS  # in the call, which does not count
            self.left[slot][launch] = self.now
        self.tag[slot] = self.iteration + 1


def drift_of(job, retimed=lambda factor: factor, **several):
    ops = [op for _ in range(CALLS) for op in (segment(5 * MS), call())]
    firsts = [2 * i + 1 for i in range(CALLS)]
    return Drift(job, Program.from_ops(0, ops), firsts, retimed, **several)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_host_that_is_slower_or_quicker_is_followed(factor):
    job = Job(factor)
    drift = drift_of(job)
    for _ in range(3 * RING):
        job.iterate(drift)
    assert job.tables == [pytest.approx(factor)]
    assert (job.host_factor, drift.factor) == (job.tables[0], job.tables[0])
    assert f"need {factor:.2f} times" in str(drift)
    job.factor = 1.0  # and back again
    for _ in range(20 * RING):
        job.iterate(drift)
    assert job.tables[-1] == pytest.approx(1.0)
    said = drift.summary()
    assert (said["factor"], said["changes"]) == (1.0, len(job.tables))
    assert said["looks"] >= 2
    json.dumps(said)


def test_what_the_device_holds_up_says_nothing_about_the_host():
    job = Job(3.0, queued=MS)
    drift = drift_of(job)
    for _ in range(4 * RING):
        job.iterate(drift)
    assert (job.tables, drift.seen, drift.factor) == ([], [], 1.0)
    assert "seldom waits" in str(drift)


def test_iterations_that_strayed_do_not_count():
    job = Job(1.5)
    drift = drift_of(job)
    for _ in range(RING):
        job.iterate(drift)
    job.tag[:] = 0
    job.iterate(drift)
    assert (drift.looks, drift.seen) == (1, [])


def test_slight_changes_are_left_alone():
    job = Job(1.005)
    drift = drift_of(job)
    for _ in range(2 * RING):
        job.iterate(drift)
    assert (job.tables, drift.changes) == ([], 0)
    assert drift.seen


def test_looking_takes_a_small_part_of_the_time():
    job = Job(1.0)
    job.stamps, plain = lambda: (threading.Event().wait(0.01), plain())[1], job.stamps
    drift = drift_of(job)
    for _ in range(100 * RING):
        job.iterate(drift)
    each_s = CALLS * 6e-3
    assert drift.looks <= 1 + 100 * RING * each_s * 0.005 / 0.01 + 1


class Store(dict):
    """A store whose ``get`` waits."""

    def __init__(self):
        self.arrived = threading.Condition()

    def set(self, key, value):
        with self.arrived:
            self[key] = value
            self.arrived.notify_all()

    def get(self, key):
        with self.arrived:
            assert self.arrived.wait_for(lambda: key in self, 20)
            return self[key]


def test_local_ranks_take_the_same_factor_at_the_same_iteration():
    store, jobs = Store(), [Job(1.0), Job(1.4)]
    drifts = [drift_of(job, store=store, process=i, processes=2) for i, job in enumerate(jobs)]

    def run(job, drift):
        for _ in range(9 * RING):
            job.iterate(drift)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(jobs, drifts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert jobs[0].tables == jobs[1].tables == [pytest.approx(1.2)]
    assert drifts[0].looks == drifts[1].looks


def world_of(factor=1.0):
    """Two ranks of a tp group, each a class of its own."""
    programs = whatif.apart(parse(TWO), [0], "rank 0")
    found = graph.build(programs)
    return found, slower(costs.price(found, machine("h200")), factor)


def test_hosts_that_need_longer_answer_later():
    found, prices = world_of()
    plain = releases(found, prices, [0])
    slow = releases(found, slower(prices, 2.0), [0])
    assert np.array_equal(plain.of, slow.of)
    assert (slow.weight >= plain.weight).all()
    kept = {}
    for factor in (1.0, 2.0):  # the graph is followed once
        again = releases(found, slower(prices, factor), [0], kept)
        assert np.array_equal(again.weight, (plain if factor == 1 else slow).weight)
    assert len(kept) == 1
    assert slow.weight.max() > 1.5 * plain.weight.max()
    iteration = timeline.replay(found, prices).iteration_ns
    assert timeline.replay(*world_of(2.0)).iteration_ns > 1.5 * iteration


class Memory:
    """A driver whose device is a dict."""

    def __init__(self):
        self.there, self.top = {}, 4096

    def allocate(self, size):
        self.top += 1 << 20
        return self.top

    def write(self, address, array):
        self.there[address] = array.copy()


def launcher_of(table):
    made = object.__new__(Launcher)
    made.driver, made.launches, made.shared = Memory(), [[j] for j in range(len(table))], None
    made._put(_columns(table, made.launches, 0), {})
    return made


def held(launcher, name):
    """What the kernel finds: through the struct of addresses."""
    words = launcher.driver.there[launcher._table].view(np.int64)
    return launcher.driver.there[int(words[TABLE.index(name)])]


def test_new_releases_take_the_place_of_the_old():
    found, prices = world_of()
    plain, slow = (releases(found, slower(prices, factor), [0]) for factor in (1.0, 2.0))
    launcher = launcher_of(plain)
    assert np.array_equal(held(launcher, "weight"), plain.weight)
    before = launcher.driver.there[launcher._table].copy()
    launcher.retime(slow)
    assert np.array_equal(held(launcher, "weight"), slow.weight)
    assert np.array_equal(launcher.driver.there[launcher._table], before)  # there was room
    more = 500  # terms: more than there is room for
    start = slow.start.copy()
    start[1:] += more
    columns = {name: getattr(slow, name) for name in ("cause", "back", "weight")}
    longer = {n: np.concatenate([np.zeros(more, c.dtype), c]) for n, c in columns.items()}
    wide = dataclasses.replace(slow, start=start, **longer)
    launcher.retime(wide)
    assert np.array_equal(held(launcher, "weight"), wide.weight)
    assert np.array_equal(held(launcher, "start"), wide.start)
    launcher.launches = launcher.launches[::-1]
    with pytest.raises(PrismError, match="other interactions"):
        launcher.retime(wide)
