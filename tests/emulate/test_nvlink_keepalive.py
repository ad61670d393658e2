"""NVLinks of a rank alone: words to a neighbour, which never harm the rank."""

import threading
import time
from types import SimpleNamespace

import pytest

from megatron_prism.emulate import nvlink_keepalive


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


def test_words_go_on_behind_calls_that_never_pause(devices, monkeypatch):
    """The device is still at it when its host is through; and then they end."""
    looks = iter([*range(60), *[60] * 40])
    kept = nvlink_keepalive.keep_awake(0, lambda: next(looks))  # which raises after a hundred looks
    assert until(lambda: kept.why)
    assert kept.words == 60 + 15  # 35 of the last 50 looks are left after 15


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


def test_several_local_ranks_keep_their_links_awake_themselves(devices):
    kept = nvlink_keepalive.keep_awake(0, Calls(), num_processes=2)
    assert kept.summary() == {
        "awake": True,
        "words": 0,
        "said": "NVLinks kept awake by calls between the local ranks, as in the job "
        "(assumed, not looked at)",
    }
    assert devices == []


def test_ranks_of_one_host_write_to_different_neighbours(devices, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert [nvlink_keepalive._neighbour(index) for index in range(3)] == [1, 2, 0]


def test_words_are_copies_there_and_back_by_the_ranks_own_device(monkeypatch):
    torch = pytest.importorskip("torch")
    from megatron_prism.runtime.pacing.driver import Driver

    done, made = [], {}

    def tensor(place):
        made[place] = torch.empty(nvlink_keepalive._BYTES, dtype=torch.uint8)
        return made[place]

    device = SimpleNamespace(
        set_device=lambda index: done.append(("device", index)),
        Stream=lambda index: SimpleNamespace(cuda_stream=f"of {index}"),
    )
    monkeypatch.setattr(torch, "cuda", device)
    monkeypatch.setattr(Driver, "__init__", lambda self: None)
    monkeypatch.setattr(Driver, "allocate", lambda self, size: 4096)
    monkeypatch.setattr(Driver, "_call", lambda self, *words: done.append(words))
    monkeypatch.setattr(torch, "as_tensor", lambda outside, device: tensor(device))
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: tensor(device))
    send = nvlink_keepalive._sender(2, 3)
    assert done == []
    assert sorted(made) == ["cuda:2", "cuda:3"]
    here, there = made["cuda:2"].data_ptr(), made["cuda:3"].data_ptr()
    send()
    assert done == [
        ("device", 2),
        ("cuMemcpyAsync", there, here, nvlink_keepalive._BYTES, "of 2"),
        ("cuMemcpyAsync", here, there, nvlink_keepalive._BYTES, "of 2"),
    ]
