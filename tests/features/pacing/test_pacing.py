"""Pacing: which stream each call takes, what it waits for, and what happens when a job strays.

The device is a stand-in that writes down what it is told; the kernels run in tests/gpu.
"""

import contextlib
import dataclasses
import errno
import gc
import json
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prism.core.errors import PrismError, UnsupportedError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.core.world import World
from megatron_prism.emulate.command_line import options as flags
from megatron_prism.features.pacing import pace, shared_memory
from megatron_prism.features.pacing import pacer as pace_report
from megatron_prism.features.pacing.options import PaceOptions
from megatron_prism.features.pacing.pace import (
    capture_missing,
    check,
    expected,
    missing_ranks,
    slow_ranks,
)
from megatron_prism.features.pacing.pacer import PacedCall, Pacer
from megatron_prism.features.pacing.shared_memory import Shared, layout, seats
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.runtime.process_group import CompletedWork


class Device:
    """Driver, streams and launcher in one: a log of what happens on which stream.

    The caller's stream is 0, called main; the others are s1, s2, ..
    """

    def __init__(self):
        self.log, self.made, self.now, self.is_capturing = [], 0, 0, False
        self.free, self.recorded, self.driver = [], {}, self

    @staticmethod
    def name(stream):
        return f"s{stream}" if stream else "main"

    # -- streams
    def current(self):
        return self.now

    def make(self):
        self.made += 1
        return self.made, self.event()

    @contextlib.contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def follow(self, stream, other, event):
        self.record(event, other)
        self.wait(stream, event, 0)

    def capturing(self):
        return self.is_capturing

    def synchronize(self, stream):
        self.log.append(f"host waits for {self.name(stream)}")

    # -- driver
    def event(self):
        self.recorded[event := 100 + len(self.recorded)] = None
        return event

    def record(self, event, stream):
        self.recorded[event] = stream
        return 0

    def wait(self, stream, event, _):
        self.log.append(f"{self.name(stream)} waits for {self.name(self.recorded[event])}")
        return 0

    def query(self, event):
        return 0

    # -- launcher
    def arrive(self, stream, launch, iteration):
        self.log.append(f"{self.name(stream)}: arrive {launch}")

    def release(self, stream, launch, iteration, first, fresh, blocks, move=None):
        more = f" since {first}" if first else ""
        more += f" moving {move.size} B" if move is not None and move.size else ""
        self.log.append(f"{self.name(stream)}: hold {launch} in {iteration}{more} x{blocks}")


@pytest.fixture
def device():
    return Device()


TP = SimpleNamespace(desc="TP", local=(0,))
PP = SimpleNamespace(desc="PP", local=(0,))
SMALL, LARGE = torch.zeros(4), torch.zeros(1 << 17)


def pacer_of(device, *calls):
    pacer = Pacer(calls, device, device, cuda=False)
    pacer.begin()
    return pacer


def answering(device, what="answer"):
    def answer(group, *args, **kwargs):
        device.log.append(f"{device.name(device.now)}: {what}")
        return CompletedWork(args[0] if isinstance(args[0], list) else [args[0]])

    return answer


def opts(asynchronous):
    return SimpleNamespace(asyncOp=asynchronous)


def test_a_synchronous_call_holds_the_callers_stream(device):
    pacer = pacer_of(
        device,
        PacedCall("all_reduce", "TP", 0, 3),
        PacedCall("all_reduce", "TP", 1, 24, large=True),
    )
    pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    pacer.record(TP, "all_reduce", answering(device), ([LARGE], opts(False)), {})
    assert device.log == [
        "main: answer", "main: hold 0 in 0 x3",
        "main: arrive 1", "main: answer", "main: hold 1 in 0 x24",
    ]  # fmt: skip


def test_an_asynchronous_call_has_its_groups_stream_and_wait_orders(device):
    pacer = pacer_of(device, PacedCall("all_gather", "TP", 0), PacedCall("all_reduce", "TP", 1))
    work = pacer.record(TP, "all_gather", answering(device), (SMALL, SMALL, opts(True)), {})
    assert device.log == ["s1 waits for main", "s1: answer", "s1: hold 0 in 0 x1"]
    assert work.is_completed()
    assert work.wait() is True
    assert device.log[-1] == "main waits for s1"
    del device.log[:]
    pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    assert device.log[0] == "main waits for s1"  # one communicator, one order


def test_the_kernel_gives_the_answers_that_it_can(device):
    counted = []
    group = SimpleNamespace(
        desc="TP", _n=4, _p=1, local=(0,), sequence=0,
        _values=SimpleNamespace(policy="mirror", parts=None),
        world=SimpleNamespace(observers=()), _count=lambda *words: counted.append(words),
    )  # fmt: skip
    answer = answering(device)
    answer.__name__ = "_allgather_base"
    pacer = pacer_of(device, *[PacedCall("all_gather", "TP", i, 2) for i in range(3)])
    whole = torch.zeros(16)
    pacer.record(group, "all_gather", answer, (whole, SMALL, opts(False)), {})
    work = pacer.record(group, "all_gather", answer, (whole, SMALL, opts(True)), {})
    assert device.log == [
        "main: hold 0 in 0 moving 64 B x2", "s1 waits for main", "s1: hold 1 in 0 moving 64 B x2",
    ]  # fmt: skip
    assert work.result()[0] is whole
    assert counted == [("TP", 4, "all_gather", 64, 0)] * 2
    pacer.record(group, "all_gather", answer, (whole[::2], SMALL, opts(True)), {})
    assert device.log[-3:] == ["s1 waits for main", "s1: answer", "s1: hold 2 in 0 x2"]


def test_tensors_of_a_dropped_handle_stay_until_the_device_is_done(device):
    pacer = pacer_of(device, *[PacedCall("all_gather", "TP", i) for i in range(3)])
    tensors = [torch.zeros(4) for _ in range(3)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    device.query = lambda event: 600  # not ready
    for _ in range(2):
        tensor = tensors.pop(0)
        pacer.record(TP, "all_gather", answering(device), (tensor, tensor, opts(True)), {})
    del tensor
    gc.collect()
    assert [ref() is None for ref in gone] == [False, False, False]
    device.query = lambda event: 0
    work = pacer.record(
        TP, "all_gather", answering(device), (tensors[0], tensors[0], opts(True)), {}
    )
    del work
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, False]


def test_the_kernel_reads_no_memory_of_the_host(device):
    """Calls of gloo groups have their tensors there."""
    group = SimpleNamespace(
        desc="PP", _n=4, _p=1, local=(0,), sequence=0, _ring=lambda tensor: None,
        world=SimpleNamespace(observers=()), _count=lambda *words: None,
    )  # fmt: skip
    answer = answering(device)
    answer.__name__ = "send"
    pacer = Pacer([PacedCall("send", "PP", 0)] * 2, device, device, cuda=True)
    pacer.begin()
    pacer.record(group, "send", answer, ([SMALL], 1, 0), {})
    assert device.log[1:] == ["s1: answer", "s1: hold 0 in 0 x1"]
    with pacer.batch():
        pacer.record(group, "send", answer, ([SMALL], 1, 0), {})
    assert device.log[-3:] == ["s2: arrive 0", "s2: answer", "s2: hold 0 in 0 x1"]


def test_a_batch_of_messages_is_one_launch(device):
    calls = [PacedCall("send", "PP", 0, 8), PacedCall("recv", "PP", 0, 8)]
    pacer = pacer_of(device, *calls)
    with pacer.batch():
        send = pacer.record(PP, "send", answering(device, "send"), ([SMALL], 1, 0), {})
        recv = pacer.record(PP, "recv", answering(device, "recv"), ([LARGE], 3, 0), {})
        assert device.log == []  # NCCL starts when the batch closes
    assert device.log == [
        "s1 waits for main", "s1: arrive 0", "s1: send", "s1: recv", "s1: hold 0 in 0 x16",
    ]  # fmt: skip
    send.wait()
    recv.wait()
    assert device.log[-2:] == ["main waits for s1"] * 2
    assert recv.source_rank() == 3


def test_a_barrier_holds_the_host(device):
    pacer = pacer_of(device, PacedCall("barrier", "TP", 0))
    pacer.record(TP, "barrier", lambda group, o: CompletedWork(), (opts(True),), {})
    assert device.log == ["main: hold 0 in 0 x1", "host waits for main"]


def test_cuda_graphs_are_refused(device):
    pacer = pacer_of(device, PacedCall("all_reduce", "TP", 0))
    device.is_capturing = True
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    pacer = pacer_of(device, PacedCall("send", "PP", 0))
    with pytest.raises(UnsupportedError, match="CUDA graph"), pacer.batch():
        pacer.record(PP, "send", answering(device), ([SMALL], 1, 0), {})
    assert not device.log


def test_a_job_that_strays_is_answered_at_once_until_the_next_iteration(device):
    pacer = pacer_of(device, PacedCall("all_reduce", "TP", 0), PacedCall("all_reduce", "TP", 1))
    pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    pacer.record(PP, "send", answering(device), ([SMALL], 1, 0), {})
    assert not pacer.active
    assert "main: hold 1" not in " ".join(device.log)
    pacer.begin()
    for _ in range(2):
        pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    # ends of the iteration that strayed are not known, so terms that reach there are left out
    assert device.log[-1] == "main: hold 1 in 1 since 1 x1"
    pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    pacer.end()
    assert pacer.tally.paced == 1
    assert pacer.tally.extra == 1
    assert pacer.tally.strayed == [
        "iteration 1: send of PP where the program has all_reduce of TP (call 1)"
    ]


def test_what_is_expected_follows_the_program():
    ops = [
        Op("all_reduce", group="TP", dtype="bf16", num_in=1 << 20, num_out=1 << 20),
        Op("compute", ns=5),
        Op("send", group="PP", dtype="bf16", num_in=1 << 20, peer=1, batch=0),
        Op("recv", group="PP", dtype="bf16", num_out=1 << 20, peer=-1, batch=0),
        Op("all_reduce", group="ALONE", dtype="bf16", num_in=4, num_out=4),
    ]
    table = SimpleNamespace(
        member=np.array([0, 0, 0, 1]), op=np.array([0, 2, 3, 0]), of=np.array([5, 6, 7, 5])
    )
    sizes = {"TP": 4, "PP": 2, "ALONE": 1}
    calls, launches = expected(Program.from_ops(0, ops), table, 0, sizes)
    assert [(c.op, c.launch, c.blocks) for c in calls] == [
        ("all_reduce", 0, 24), ("send", 1, 8), ("recv", 1, 8), ("all_reduce", -1, 1),
    ]  # fmt: skip
    assert launches == [[5], [6, 7]]


# -- what is asked for -----------------------------------------------------------------------------
def options_of(*words):
    options = flags.from_command_line(
        ["--prism-emulate", "--prism-world-size", "8", "--tensor-model-parallel-size", "2", *words],
        {},
    )
    return dataclasses.replace(options, tier="cuda")


def checked(*words):
    options = options_of(*words)
    check(options, options.of(PaceOptions))


def test_slow_ranks_are_virtual_ones():
    options = options_of("--prism-pace", "d", "--prism-ranks", "3")
    assert slow_ranks(options, "2-4:1.2;7:3/2") == [([2, 4], "1.2"), ([7], "3/2")]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--prism-slow", "3:1.2"], "felt only while"),
        (["--prism-pace", "d", "--prism-slow", "3"], "names no ranks or no factor"),
        (["--prism-pace", "d", "--prism-slow", "3:-1"], "is no factor"),
        (["--prism-pace", "d", "--prism-slow", "3:nan"], "is no factor"),
        (["--prism-pace", "d", "--prism-slow", "0:2"], "a local rank is as fast as it is"),
        (["--prism-pace", "d", "--prism-slow", "9:2"], "9"),
        (["--prism-pace", "d", "--prism-capture", "e"], "makes it wait"),
    ],
)
def test_pacing_that_makes_no_sense_is_refused(words, match):
    with pytest.raises(PrismError, match=match):
        checked(*words)


def test_stages_without_a_slice_are_missing(tmp_path):
    world = World(8, pp=4)
    assert missing_ranks(tmp_path / "none", world) == [0, 2, 4, 6]
    store = SliceStore(tmp_path, world, {})
    store.put(Program.from_ops(5, [Op("compute", ns=1)]))
    assert missing_ranks(tmp_path, world) == [0, 2, 6]


def test_slices_of_another_job_do_not_pace(tmp_path):
    """Said when Megatron has parsed its arguments, which is before anything is paced."""
    paced = object.__new__(pace.Pace)
    paced.asked = PaceOptions(tmp_path)
    paced._arguments = job_settings.as_text({"--seq-length": "4096"})
    paced.is_of(job_settings.as_text({}, {"--seq-length": "4096"}))
    with pytest.raises(UsageError, match="another job: --seq-length 4096 there, 8192 here"):
        paced.is_of(job_settings.as_text({"--seq-length": "8192"}))
    paced._arguments = None
    with pytest.raises(UsageError, match="arguments unknown there"):
        paced.is_of(job_settings.as_text({}))


def test_a_calibration_of_another_gpu_is_refused(tmp_path):
    assert pace.calibration(tmp_path, "NVIDIA H200") is None
    path = tmp_path / pace.CALIBRATION
    stored = {"format": 1, "source": "2 x NVIDIA H100 80GB HBM3, today", "collectives": []}
    path.write_text(json.dumps(stored))
    assert pace.calibration(tmp_path, "NVIDIA H100 80GB HBM3").source == stored["source"]
    with pytest.raises(UsageError, match="measured on h100, and this is 'NVIDIA H200'") as raised:
        pace.calibration(tmp_path, "NVIDIA H200")
    assert str(path) in raised.value.fix
    path.write_text("{")
    with pytest.raises(UsageError, match="is not a calibration"):  # before anything is captured
        checked("--prism-pace", str(tmp_path))


@pytest.mark.ci
def test_a_capture_that_fails_names_its_log(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)\n")
    options = dataclasses.replace(
        options_of("--prism-pace", str(tmp_path / "slices")), tier="cpu", world=World(2)
    )
    with pytest.raises(PrismError, match="rank 0 failed: .* status 7") as raised:
        capture_missing(options, tmp_path / "slices", [str(script), "--lr", "1"])
    assert (tmp_path / "slices-rank-0.log").exists()
    assert "slices-rank-0.log" in str(raised.value)


# -- several local ranks ---------------------------------------------------------------------------
def test_each_rank_stamps_its_own_seats_and_waits_for_the_others():
    # interactions 0: rank a, 1: both, 2: rank b, 3: both
    table = SimpleNamespace(
        member=np.array([0, 0, 1, 1, 0, 1]), of=np.array([0, 1, 1, 2, 3, 3]), op=np.arange(6)
    )
    one = seats(table, [[0], [1, 3]], 0)
    assert one["mine"].tolist() == [0, 1, 4]
    assert one["with"].tolist() == [0, 0, 1, 2]
    assert one["whom"].tolist() == [2, 5]
    two = seats(table, [[1], [2], [3]], 1)
    assert two["mine"].tolist() == [2, 3, 5]
    assert two["whom"].tolist() == [1, 4]
    # every seat is taken once, by the rank that it belongs to
    assert sorted([*one["mine"], *two["mine"]]) == list(range(6))


class Store(dict):
    set = dict.__setitem__

    def get(self, key):
        return self[key].encode()

    def add(self, key, number):
        self[key] = dict.get(self, key, 0) + number
        return self[key]

    def wait(self, keys, _=None):
        assert set(keys) <= set(self)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux has it")
def test_local_ranks_share_memory_that_has_no_name():
    store, places = Store(), layout(4, 3, 5, 2)
    first = Shared(store, 0, 2, places, "t")
    name = store["prism/pace/file"].split()[0]
    assert Path(name).stat().st_size == places["size"][0]
    second = Shared(store, 1, 2, places, "t")
    assert not Path(name).exists()
    second.leave(6)
    first.leave(2)
    assert first.array("gone").tolist() == [7]
    assert first.array("here").shape == (4, 5)
    assert (first.array("seen") == 0).all()


def test_local_ranks_that_cannot_share_leave_no_file(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path)
    store, places = Store(), layout(4, 3, 5, 2)
    Shared(store, 0, 2, places, "t")
    with pytest.raises(PrismError, match="another table"):
        Shared(store, 1, 2, layout(4, 9, 9, 2), "other")
    assert not list(tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = Store()
    with pytest.raises(UsageError, match=r"No space left.*") as raised:
        Shared(store, 0, 2, places, "t")
    assert "--shm-size" in raised.value.fix
    assert not store
    assert not list(tmp_path.iterdir())


def test_a_rank_that_strays_is_told_to_the_others(device):
    device.shared = SimpleNamespace(gone=np.zeros(1, np.int32))
    device.shared.leave = lambda iteration: device.shared.gone.fill(iteration + 1)
    device.compare_clocks = lambda number: device.log.append(f"clocks {number}")
    pacer = pacer_of(device, PacedCall("all_reduce", "TP", 0))
    assert device.log == ["clocks 1"]
    pacer.record(PP, "send", answering(device), ([SMALL], 1, 0), {})
    assert device.shared.gone[0] == 1
    other = pacer_of(device, PacedCall("all_reduce", "TP", 0))
    other.record(TP, "all_reduce", answering(device), ([SMALL], opts(False)), {})
    other.end()
    assert other.tally.paced == 0
    assert "another local rank" in other.tally.strayed[0]


# -- the report ------------------------------------------------------------------------------------
def test_calls_that_begin_when_issued_are_told_from_those_that_queue():
    base = 1_795_281_652_691_879_424  # the device's clock has a date
    # host time t is base + 2 t on the device, and a launch takes 5 us: the clocks drift apart
    issued = np.arange(0, 1_000_000, 100_000)
    began = base + 5_000 + 2 * issued
    queued = np.arange(10) % 3 * 80_000
    lags = [(0, base + 5_000), (900_000, base + 5_000 + 900_000)]
    assert pace_report.at_once(issued, began + queued, lags).tolist() == (queued == 0).tolist()


class Stamped:
    """A launcher after an iteration; ns."""

    shared, launches = None, [[0], [1, 2]]

    @staticmethod
    def stamps():
        times = {"came": [[1_000, 9_000]], "until": [[3_000, 20_000]], "went": [[2_000, 50_000]]}
        found = {name: np.array(value * 4, np.int64) for name, value in times.items()}
        for array in found.values():
            array[1] += 40_000
        found["tag"] = np.array([[1, 1, 1], [2, 2, 2], [0, 0, 0], [0, 0, 0]])
        return {**found, "stuck": np.array([2])}


def test_the_report_says_what_was_felt_and_what_was_predicted(device):
    calls = [
        PacedCall("all_reduce", "TP", 0),
        PacedCall("send", "PP", 1),
        PacedCall("recv", "PP", 1),
    ]
    pacer = Pacer(calls, device, device, cuda=False)
    pacer.launcher = Stamped()
    pacer.iteration, pacer.lags = 2, [(0, 500), (100_000, 500)]  # which is not over
    pacer.issued[1] = [40_400, 40_000]
    found = pace_report.summary(pacer, Stamped.stamps(), {"TP": 2.5, "OTHER": 1.0})
    assert found["groups"] == {
        "TP": {"calls": 1, "held_us": 2.0, "late_us": 0.0, "predicted_us": 2.5},
        "PP": {"calls": 1, "held_us": 11.0, "late_us": 30.0},
    }
    assert (found["late_calls"], found["host_bound"], found["calls_paced"]) == (1, 2, 2)
    assert found["stuck"] == "call 1: send of PP"
    assert found["iteration_us"] == 40.0
    stamps = Stamped.stamps()
    stamps["tag"][0] = 0  # the one before strayed
    assert pace_report.summary(pacer, stamps, {})["iteration_us"] is None


def test_the_host_is_kept_as_long_as_nccl_would(device):
    slow = 2_000_000
    pacer = pacer_of(
        device, PacedCall("all_reduce", "TP", 0, host=slow), PacedCall("all_reduce", "TP", 1)
    )
    for wanted in (slow, 0):
        begin = time.perf_counter_ns()
        pacer.record(TP, "all_reduce", answering(device), ([SMALL], opts(True)), {})
        assert time.perf_counter_ns() - begin >= wanted
    calls = [Op("all_reduce", group="TP", dtype="bf16", num_in=4, num_out=4),
             Op("send", group="PP", dtype="bf16", num_in=4, peer=1, batch=0)]  # fmt: skip
    table = SimpleNamespace(member=np.zeros(2), op=np.array([0, 1]), of=np.array([0, 1]))
    known = Calibration(host={("all_reduce", False): 27_000, ("message", True): 9_000})
    program = Program.from_ops(0, calls)
    for calibration, host in ((known, [27_000, 9_000]), (None, [0, 0]), (Calibration(), [0, 0])):
        found, _ = expected(program, table, 0, {"TP": 2, "PP": 2}, calibration)
        assert [call.host for call in found] == host
