"""NVLinks of a rank alone: words to a neighbour, which never harm the rank."""

import threading
import time

import pytest

from megatron_prism.emulate.capture import nvlink_keepalive


@pytest.fixture
def devices(monkeypatch):
    """Three devices, of which 0 and 2 reach each other, and what was sent between them."""
    torch = pytest.importorskip("torch")
    sent = []
    monkeypatch.setattr(nvlink_keepalive, "PERIOD_S", 0.001)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} == {0, 2})
    monkeypatch.setattr(nvlink_keepalive, "_sender", lambda a, b: lambda: sent.append((a, b)))
    return sent


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


class Calls:
    """A rank that goes on making calls, or stands still."""

    def __init__(self):
        self.made, self.still = 0, False

    def __call__(self):
        self.made += not self.still
        return self.made


def test_words_go_to_a_neighbour_until_the_end(devices):
    kept = nvlink_keepalive.keep_awake(0, Calls())
    assert until(lambda: len(devices) > 3)
    kept.stop()
    count = len(devices)
    time.sleep(0.01)
    assert len(devices) == count == kept.words
    assert set(devices) == {(0, 2)}
    assert kept.summary()["awake"]
    assert "words to GPU 2 behind its calls" in str(kept)
    kept.stop()  # once more harms nobody


def test_a_rank_that_makes_no_calls_sends_nothing(devices):
    calls = Calls()
    calls.still = True
    kept = nvlink_keepalive.keep_awake(0, calls)
    time.sleep(0.05)
    assert devices == []  # it has not begun
    calls.still = False
    assert until(lambda: len(devices) > 3)
    calls.still = True
    time.sleep(0.05)  # a word on its way
    count = len(devices)
    time.sleep(0.05)
    assert len(devices) == count
    calls.still = False  # and on it goes
    assert until(lambda: len(devices) > count)
    kept.stop()


def test_calls_of_a_group_of_one_keep_no_link_awake():
    """A rank without tensor parallelism broadcasts its batches in one, and adds up its loss."""
    from megatron_prism.runtime.virtual_world import TrafficCounter

    tally = TrafficCounter()
    for _ in range(5):
        tally.add("TENSOR_MODEL_PARALLEL_GROUP", 1, "broadcast", 1 << 20)
    assert tally.calls_to_others() == 0
    tally.add("DATA_PARALLEL_GROUP", 2, "reduce_scatter", 1 << 20)
    tally.add("DATA_PARALLEL_GROUP", 2, "reduce_scatter", 1 << 20)
    tally.add("PIPELINE_MODEL_PARALLEL_GROUP", 4, "send", 1 << 20, 1)
    assert tally.calls_to_others() == 3


def test_a_neighbour_that_fails_is_said_and_the_rank_goes_on(devices, monkeypatch):
    def send():
        if len(devices) == 2:
            raise RuntimeError("peer access was lost")
        devices.append(1)

    monkeypatch.setattr(nvlink_keepalive, "_sender", lambda a, b: send)
    kept = nvlink_keepalive.keep_awake(2, Calls())
    assert until(lambda: kept.why)
    assert (kept.words, kept.summary()["awake"]) == (2, False)
    assert "peer access was lost" in str(kept)
    kept.stop()


def test_without_a_neighbour_links_sleep(devices, monkeypatch):
    alone = nvlink_keepalive.keep_awake(1, Calls())
    assert "no other GPU of this host is visible" in str(alone)
    assert not alone.summary()["awake"]
    assert devices == []

    def refused(index, peer):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(nvlink_keepalive, "_sender", refused)
    assert "libcuda.so.1" in nvlink_keepalive.keep_awake(0, Calls()).why
    assert not [t for t in threading.enumerate() if t.name == "prism-links" and t.is_alive()]
