"""The pacing kernels on a real GPU: ends equal the table's, streams are held until then."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.answer_tables import one_interaction, random_table

from megatron_prism.features.pacing.device import Streams
from megatron_prism.features.pacing.moves import ADDED, COPY, KINDS, Move
from megatron_prism.features.pacing.pacer import PacedCall, Pacer
from megatron_prism.runtime.process_group import CompletedWork

ITERATIONS = 4


@pytest.mark.parametrize("seed", range(3))
def test_ends_are_those_of_the_table(seed):
    from megatron_prism.features.pacing.device import LAUNCH, RING, Launcher

    table = random_table([0] * 40, range(40), seed=seed, weights=200_000)
    launches = [[2 * i, 2 * i + 1] for i in range(len(table) // 2)]
    device = torch.device("cuda", torch.cuda.current_device())
    launcher = Launcher(table, launches, device)
    size = [torch.zeros(1 << 18, device=device), torch.zeros(1 << 10, device=device)]
    calls = [
        PacedCall("all_reduce", "TP", i, 1 + 4 * (i % 3), large=i % 2 == 0)
        for i in range(len(launches))
    ]
    pacer = Pacer(calls, launcher, Streams(launcher.driver, device))
    group = SimpleNamespace(desc="TP", local=(0,))
    answer = lambda group, tensors, opts: CompletedWork(tensors)  # noqa: E731
    for _ in range(ITERATIONS):
        pacer.begin()
        for i in range(len(calls)):
            opts = SimpleNamespace(asyncOp=i % 4 == 3)
            work = pacer.record(group, "all_reduce", answer, ([size[i % 2]], opts), {})
            work.wait()
    pacer.end()
    torch.cuda.synchronize()
    stamps = launcher.stamps()
    assert stamps["stuck"][0] == 0
    assert pacer.tally.paced == ITERATIONS
    before = []
    for iteration in range(ITERATIONS):
        slot = iteration % RING
        assert (stamps["tag"][slot] == iteration + 1).all()
        arrivals = np.repeat(stamps["came"][slot], 2)
        ends = table.ends(arrivals, before)
        assert np.array_equal(stamps["end"][slot], ends)
        # the next call on the stream comes after the end (but for its launch), and soon
        gaps = stamps["came"][slot][1:] - np.maximum.reduceat(ends, range(0, len(ends), 2))[:-1]
        assert gaps.min() >= -LAUNCH
        before.insert(0, ends)
    assert np.median(gaps) < 100_000


def alone(own):
    """A launcher of one interaction that takes ``own`` ns."""
    from megatron_prism.features.pacing.device import Launcher

    return Launcher(one_interaction(own), [[0]], torch.device("cuda", torch.cuda.current_device()))


def tensors(kind_of, size, odd):
    """(target, source) of ``size`` elements, ``odd`` elements off any alignment."""
    source = (torch.randn(size + odd, device="cuda") * 9).to(kind_of)
    return torch.zeros(4 * size + odd, dtype=kind_of, device="cuda")[odd:], source[odd:]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("dtype", [*KINDS, torch.uint8])
def test_the_kernel_moves_what_torch_would(dtype, odd):
    launcher = alone(30_000)
    stream = torch.cuda.current_stream().cuda_stream
    iteration = 0
    for size in (1, 1000, 100_000):
        to, source = tensors(dtype, size, odd)
        word = source.element_size()
        kind = KINDS.get(dtype, COPY)
        expected = source.clone().mul_(4) if kind else source.clone()
        for repeats, blocks in ((1, 1), (4, 24)):
            move = Move(
                to.data_ptr(), source.data_ptr(), repeats * size * word, size * word, kind, 4,
                source.data_ptr(), size * word, 0, (),
            )  # fmt: skip
            to.zero_()
            launcher.release(stream, 0, iteration, 0, True, blocks, move)
            iteration += 1
            found = to[: repeats * size].view(repeats, size)
            assert torch.equal(found, expected.expand(repeats, size)), (size, repeats)
            assert not to[repeats * size :].any()
    assert launcher.stamps()["stuck"][0] == 0


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_kernel_adds_up_what_torch_would(dtype, odd):
    launcher = alone(30_000)
    stream = torch.cuda.current_stream().cuda_stream
    for iteration, (size, chunks, blocks) in enumerate(((8, 2, 1), (1000, 8, 4), (100_000, 4, 24))):
        to, source = tensors(dtype, chunks * size, odd)
        part = size * source.element_size()
        move = Move(
            to.data_ptr(), source.data_ptr(), part, part, ADDED + KINDS[dtype], chunks, 0, 0, 0, ()
        )
        launcher.release(stream, 0, iteration, 0, True, blocks, move)
        total = torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32), device="cuda")
        for chunk in source.view(chunks, size):
            total += chunk
        assert torch.equal(to[:size], total.to(dtype)), (size, chunks)
        assert not to[size:].any()
    assert launcher.stamps()["stuck"][0] == 0


MOVED = {"nothing": (0, COPY, 1), "copied": (1 << 22, COPY, 1), "added": (1 << 21, ADDED + 1, 2)}


@pytest.mark.parametrize("blocks", [1, 24])
@pytest.mark.parametrize("what", MOVED)
def test_a_call_between_others_takes_its_own_time(what, blocks):
    """And not its launch besides, nor what moving takes at its end."""
    size, kind, chunks = MOVED[what]
    if size and blocks == 1:
        pytest.skip("one block moves 4 MiB in longer than that")
    own = 60_000
    launcher, stream = alone(own), torch.cuda.current_stream().cuda_stream
    source, to = (torch.zeros(1 << 22, dtype=torch.uint8, device="cuda") for _ in range(2))
    move = Move(to.data_ptr(), source.data_ptr(), size, size, kind, chunks, 0, 0, 0, ())
    iterations = iter(range(1000))

    def span(within):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(30_000)
        if within:
            launcher.release(stream, 0, next(iterations), 0, True, blocks, move)
        torch.cuda._sleep(30_000)
        end.record()
        return begin, end

    torch.cuda._sleep(3_000_000)  # the host gets ahead
    marks = [(span(False), span(True)) for _ in range(40)]
    torch.cuda.synchronize()
    without, within = (
        [begin.elapsed_time(end) * 1e6 for begin, end in column[4:]]
        for column in zip(*marks, strict=True)
    )
    took = statistics.median(b - a for a, b in zip(without, within, strict=True))
    assert abs(took - own) < 1_500


def test_what_is_moved_is_spread_over_the_call():
    launcher = alone(2_000_000)
    whole = torch.ones(1 << 24, device="cuda")  # 64 MiB in 2 ms
    at, size = whole.data_ptr(), whole.nbytes
    stream = torch.cuda.current_stream().cuda_stream
    for iteration in range(3):
        move = Move(at, at, size, size, KINDS[torch.float32], 2, 0, 0, 0, ())
        launcher.release(stream, 0, iteration, 0, True, 24, move)
    stamps = launcher.stamps()
    assert whole.unique().tolist() == [8.0]
    came, until, went = (stamps[name][2, 0] for name in ("came", "until", "went"))
    assert until - came == 2_000_000
    assert 0.9 < (went - came) / 2_000_000 < 1.1  # the last tile goes near the end


def test_tables_are_not_in_torchs_memory():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launcher = alone(1_000)
    launcher.release(torch.cuda.current_stream().cuda_stream, 0, 0, 0, True, 1)
    launcher.stamps()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before


def test_a_device_that_waits_for_its_host_is_told_from_one_that_is_busy():
    from megatron_prism.features.pacing.device import RING
    from megatron_prism.features.pacing.pacer import at_once

    device = torch.device("cuda", torch.cuda.current_device())
    launcher = alone(1_000)
    call = PacedCall("all_reduce", "TP", 0)
    pacer = Pacer([call], launcher, Streams(launcher.driver, device))
    group = SimpleNamespace(desc="TP", local=(0,))
    pacer.lags.append(launcher.lag())
    issued, came = [], []
    tries = [False, *[False, True] * 6]  # the first one is slow in Python
    for busy in tries:
        torch.cuda.synchronize()
        pacer.begin()
        if busy:
            torch.cuda._sleep(2_000_000)  # about a millisecond
        opts = SimpleNamespace(asyncOp=False)
        pacer.record(group, "all_reduce", lambda group, *args: CompletedWork(), ([], opts), {})
        came.append(launcher.stamps()["came"][pacer.iteration % RING, 0])
        issued.append(pacer.now_issued[0])
    pacer.lags.append(launcher.lag())
    found = at_once(np.array(issued), np.array(came), pacer.lags, 200_000).tolist()[1:]
    quiet, late = found[::2], found[1::2]
    assert not any(late)
    assert sum(quiet) > len(quiet) // 2  # a shared host is interrupted now and then
    times, least = zip(*pacer.lags, strict=True)
    print(f"clocks drift by {(least[1] - least[0]) / (times[1] - times[0]):.1e}")
