"""The caching allocator's rules: closed forms, and a slow simulation that shares no code."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.programs.ops import EMPTIED, WAITED
from megatron_prism.memory.allocator import (
    Settings,
    allocated_by_span,
    replay_requests,
)

MIB = 1 << 20
SIZES = (
    1,
    511,
    512,
    513,
    MIB,
    MIB + 1,
    10 * MIB - 512,
    10 * MIB - 511,
    10 * MIB,
    19 * MIB,
    33 * MIB,
)


def naive(events, expandable=False):
    """(peak of reserved, of rounded allocated) with lists of [storage or None, size] per segment,
    searched from the start every time."""
    segments = []  # [small, blocks]
    peak = most = 0
    for storage, change in events:
        if change < 0:
            for _, blocks in segments:
                for block in blocks:
                    if block[0] == storage:
                        block[0] = None
                at = 0
                while at + 1 < len(blocks):
                    if blocks[at][0] is None and blocks[at + 1][0] is None:
                        blocks[at][1] += blocks.pop(at + 1)[1]
                    else:
                        at += 1
            continue
        size = (change + 511) // 512 * 512
        small = size <= MIB
        fitting = [
            (expandable and place == len(blocks) - 1, block[1], number, place)
            for number, (kind, blocks) in enumerate(segments)
            for place, block in enumerate(blocks)
            if kind == small and block[0] is None and block[1] >= size
        ]
        if fitting:
            *_, number, place = min(fitting)
        elif expandable:
            page = 2 * MIB if small else 20 * MIB
            number = next((n for n, (kind, _) in enumerate(segments) if kind == small), None)
            if number is None:
                number = len(segments)
                segments.append([small, []])
            blocks = segments[number][1]
            if not blocks or blocks[-1][0] is not None:
                blocks.append([None, 0])
            while blocks[-1][1] < size:
                blocks[-1][1] += page
            place = len(blocks) - 1
        else:
            whole = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            segments.append([small, [[None, whole]]])
            number, place = len(segments) - 1, 0
        blocks = segments[number][1]
        rest = blocks[place][1] - size
        if rest > 0 and (small or expandable or rest > MIB):
            blocks[place][1] = size
            blocks.insert(place + 1, [None, rest])
        blocks[place][0] = storage
        peak = max(peak, sum(b[1] for _, bs in segments for b in bs))
        most = max(most, sum(b[1] for _, bs in segments for b in bs if b[0] is not None))
    return peak, most


@st.composite
def histories(draw):
    """Storages that come, and go in any order; never one twice."""
    events, live, number = [], {}, 0
    for _ in range(draw(st.integers(0, 40))):
        if live and draw(st.booleans()):
            gone = draw(st.sampled_from(sorted(live)))
            events.append((gone, -live.pop(gone)))
        else:
            size = draw(st.sampled_from(SIZES) | st.integers(1, 64 * MIB) | st.integers(1, 2 * MIB))
            events.append((number, size))
            live[number] = size
            number += 1
    return events, live


def places(made):
    return {s: [(b.address, b.size) for b in blocks] for s, blocks in made.live.items()}


@settings(max_examples=300, deadline=None)
@given(histories(), st.booleans())
def test_the_slow_simulation_agrees(history, expandable):
    events, live = history
    made = replay_requests(events, Settings(expandable))
    assert (made.peak_reserved, made.peak_allocated) == naive(events, expandable)
    again = replay_requests(events, Settings(expandable))  # the same every time
    assert places(again) == places(made)
    asked = sum(live.values())
    assert made.reserved >= made.allocated >= asked


@settings(max_examples=200, deadline=None)
@given(histories(), st.booleans())
def test_blocks_tile_their_segments_and_merge_when_all_is_free(history, expandable):
    events, live = history
    made = replay_requests(events, Settings(expandable))
    total = 0
    for block in made.first:
        assert block.before is None
        while block is not None:
            total += block.size
            if block.after is not None:
                assert block.after.before is block
                assert block.address + block.size == block.after.address
                assert not (block.free and block.after.free)
            block = block.after
    assert total == made.reserved
    held = [b for blocks in made.live.values() for b in blocks]
    assert len({b.address for b in held}) == len(held)
    assert not any(b.free for b in held)
    empty = replay_requests([*events, *((s, -n) for s, n in live.items())], Settings(expandable))
    assert empty.allocated == 0
    assert all(b.free and b.after is None for b in empty.first)
    assert empty.reserved == made.reserved  # nothing is given back


def test_a_storage_that_grows_and_shrinks():
    made = replay_requests([(0, 512), (0, 512), (0, -100), (0, -924)])
    assert (made.allocated, made.peak_allocated) == (0, 1024)
    with pytest.raises(UsageError, match="storage 7 gives back 5 bytes and has 0"):
        replay_requests([(7, -5)])


@pytest.mark.parametrize(
    ("text", "settings_"),
    [("", Settings()), ("expandable_segments:True", Settings(True)), ("backend:native", Settings()),
     ("expandable_segments:False,garbage_collection_threshold:0.8", Settings())],
)  # fmt: skip
def test_options(text, settings_):
    assert Settings.parse(text) == settings_


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("per_process_memory_fraction:0.5", UnsupportedError, "fraction .*not modelled"),
        ("max_split_size_mb:20", UsageError, "max_split_size_mb cannot be 20"),  # torch's own bound
        ("roundup_power2_divisions:3", UsageError, "3 is no power of two"),
        ("roundup_power2_divisions:[256:5]", UsageError, "5 is no power of two"),
        ("backend:cudaMallocAsync", UnsupportedError, "backend"),
        ("expandable_segment:True", UsageError, "has no expandable_segment"),
    ],
)
def test_options_that_are_refused(text, error, says):
    with pytest.raises(error, match=says) as caught:
        Settings.parse(text)
    assert caught.value.fix


# -- options, streams and limits ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("conf", "size", "rounded"),
    [
        ("", 1200 * MIB + 1, 1200 * MIB + 512),
        ("roundup_power2_divisions:4", 1200 * MIB, 1280 * MIB),  # the example in torch's source
        ("roundup_power2_divisions:4", 1024 * MIB, 1024 * MIB),
        ("roundup_power2_divisions:4", 2048, 2048),  # too small to divide
        ("roundup_power2_divisions:8", 9 * MIB + 1, 10 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 9 * MIB + 1, 10 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 200 * MIB, 224 * MIB),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", 600 * MIB + 1, 600 * MIB + 512),
        ("roundup_power2_divisions:[64:8]", 600 * MIB, 640 * MIB),  # the last one named goes on
    ],
)
def test_rounding(conf, size, rounded):
    assert Settings.parse(conf).rounded(size) == rounded


def test_large_blocks_are_kept_for_large_requests():
    """A free block of 100 MiB serves 40 MiB by default, not with max_split_size_mb:64, and then a
    request of 90 MiB gets it whole, one of 70 MiB does not (more than 20 MiB would be wasted)."""
    free = [(0, 100 * MIB), (0, -100 * MIB)]
    keep = Settings.parse("max_split_size_mb:64")
    assert replay_requests([*free, (1, 40 * MIB)]).peak_reserved == 100 * MIB
    assert replay_requests([*free, (1, 40 * MIB)], keep).peak_reserved == 140 * MIB
    whole = replay_requests([*free, (1, 90 * MIB)], keep)
    assert (whole.peak_reserved, whole.allocated) == (100 * MIB, 100 * MIB)
    assert replay_requests([*free, (1, 70 * MIB)], keep).peak_reserved == 170 * MIB
    wide = Settings.parse("max_split_size_mb:64,max_non_split_rounding_mb:64")
    assert replay_requests([*free, (1, 70 * MIB)], wide).peak_reserved == 100 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_a_limit_gives_free_segments_back_before_memory_has_run_out(expandable):
    settings_ = Settings(expandable)
    events = [(0, 40 * MIB), (1, 1), (0, -40 * MIB), (2, 60 * MIB)]
    assert replay_requests(events, settings_, limit=62 * MIB).full is None
    made = replay_requests([*events, (3, 30 * MIB)], settings_, limit=91 * MIB)
    assert (made.full.event, made.full.size) == (4, 30 * MIB)
    assert made.full.allocated == 60 * MIB + 512
    enough = replay_requests(
        [*events, (3, 30 * MIB)], settings_, limit=made.full.reserved + 40 * MIB
    )
    assert enough.full is None


@settings(max_examples=100, deadline=None)
@given(histories(), st.booleans(), st.integers(0, 200))
def test_reserved_never_exceeds_the_limit(history, expandable, limit):
    made = replay_requests(history[0], Settings(expandable), limit=limit * MIB)
    assert made.peak_reserved <= limit * MIB
    free = replay_requests(history[0], Settings(expandable))
    if made.full is None:
        assert made.peak_allocated == free.peak_allocated
    else:
        assert free.peak_reserved > limit * MIB


def test_what_another_stream_uses_comes_back_when_the_device_is_past_it():
    """40 MiB freed while stream 1 uses them: asked for again at once, they are not there; behind a
    wait of the host, or ``ahead`` launches later, they are."""
    size = 40 * MIB

    def peak(*between, last=10, **more):
        first = [(0, size, 0, 0), (0, 0, 1, 1), (0, -size, 0, 5), *between]
        return replay_requests([*first, (1, size, 0, last)], **more).peak_reserved

    assert peak() == 2 * size
    assert peak((WAITED, 0, 0, 6)) == size
    assert peak(ahead=5) == size
    assert peak(ahead=6) == 2 * size
    assert peak(ahead=0) == size
    assert (
        replay_requests([(0, size, 0, 0), (0, -size, 0, 5), (1, size, 0, 5)]).peak_reserved == size
    )
    used_later = [(0, size, 0, 0), (0, 0, 1, 1), (1, size, 0, 2), (1, -size, 0, 3), (2, size, 0, 4)]
    assert replay_requests(used_later).peak_reserved == 2 * size  # storage 1 was on one stream only
    # before torch says that there is no room it waits for the other stream
    short = [(0, size, 0, 0), (0, 0, 1, 1), (0, -size, 0, 1), (1, size, 0, 2)]
    assert replay_requests(short).peak_reserved == 2 * size
    assert replay_requests(short, limit=size + 1).full is None
    assert replay_requests(short, limit=size + 1).peak_reserved == size


def test_an_emptied_cache_gives_back_what_is_whole():
    size = 40 * MIB
    events = [(0, size, 0, 0), (0, -size, 0, 0), (EMPTIED, 0, 0, 0), (1, 2 * size, 0, 0)]
    assert replay_requests(events).peak_reserved == 2 * size
    del events[2]
    assert replay_requests(events).peak_reserved == 3 * size


def test_an_emptied_cache_keeps_the_pools_of_graphs():
    size = 40 * MIB
    events = [(0, size, -1, 0), (0, -size, 0, 0), (EMPTIED, 0, 0, 0), (1, 2 * size, 0, 0)]
    assert replay_requests(events).peak_reserved == 3 * size


def test_peaks_of_spans_count_what_a_block_has_beyond_its_request():
    small, large = 3 * MIB, 4 * MIB
    events = [(0, large), (1, large), (0, -large), (2, small), (2, -small), (1, -large)]
    state, parts = allocated_by_span(events, [("a", 0, 2), ("b", 2, 5), ("b", 5, 6)])
    assert state.peak_allocated == 2 * large
    # the block of 4 MiB is not split for 3 MiB: at most 1 MiB would be left
    assert parts == {"a": 2 * large, "b": 2 * large}


def test_peaks_of_spans_are_of_a_device_that_keeps_up():
    size, part = 12 * MIB, 11 * MIB
    # a block that another stream used is back before the host asks again, and is taken
    events = [(0, size, 0, 1), (0, 0, 2, 1), (0, -size, 0, 2), (1, part, 0, 3)]
    state, parts = allocated_by_span(events, [("a", 0, 3), ("b", 3, 4)])
    # 1 MiB of it is not worth splitting off
    assert (state.reserved, parts) == (size, {"a": size, "b": size})
    assert replay_requests(events).reserved == 2 * size
