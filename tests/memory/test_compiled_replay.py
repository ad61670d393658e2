"""Compiled replays against the allocator in Python, on drawn requests."""

import random

import pytest

from megatron_prism.core.programs.ops import EMPTIED, WAITED
from megatron_prism.memory import allocator
from megatron_prism.memory.compiled_replay import CompiledReplay, is_covered

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 512, 700, 40 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 64 * MIB)


def drawn(seed, number=400):
    """Requests of a process with several streams, a graph's pool, waits and emptied caches."""
    chance = random.Random(seed)
    rows = []
    sizes = {}  # storage -> bytes
    next_storage = 0
    for launch in range(number):
        what = chance.random()
        if what < 0.5 or not sizes:
            storage = next_storage
            next_storage += 1
            # a storage may come back, and grow
            if sizes and chance.random() < 0.1:
                storage = chance.choice(list(sizes))
            size = chance.choice(SIZES) * chance.randint(1, 3)
            sizes[storage] = sizes.get(storage, 0) + size
            rows.append((storage, size, chance.choice((0, 0, 0, 1, -2)), launch))
        elif what < 0.6:
            rows.append((chance.choice(list(sizes)), 0, 3, launch))
        elif what < 0.95:
            storage = chance.choice(list(sizes))
            freed = sizes[storage]
            if chance.random() < 0.1:
                freed = max(1, freed // 2)
            sizes[storage] -= freed
            if not sizes[storage]:
                del sizes[storage]
            rows.append((storage, -freed, 0, launch))
        else:
            rows.append((chance.choice((EMPTIED, WAITED)), 0, 0, launch))
    return rows, [chance.choice((0, 1, 5, 60)) for _ in rows]


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_allocator(seed):
    rows, leads = drawn(seed)
    replay = CompiledReplay(rows)
    whole = allocator.replay_requests(rows, ahead=leads)
    assert replay.run(leads).reserved == whole.peak_reserved
    assert replay.run(leads).full is None
    for share in (0.5, 0.9, 0.99, 1.0):
        limit = int(whole.peak_reserved * share)
        bounded = allocator.replay_requests(rows, limit=limit, ahead=leads)
        compiled = replay.run(leads, limit)
        assert compiled.full == bounded.full
        assert compiled.reserved == bounded.peak_reserved


def test_drawn_requests_meet_what_is_compared():
    """Some run out, some fit in a limit only after a wait or with an emptied cache."""
    outcomes = set()
    for seed in range(20):
        rows, leads = drawn(seed)
        whole = allocator.replay_requests(rows, ahead=leads).peak_reserved
        bounded = allocator.replay_requests(rows, limit=int(0.9 * whole), ahead=leads)
        outcomes.add(bounded.full is None)
    assert outcomes == {True, False}


def test_more_free_blocks_than_there_was_room_for():
    small = [(storage, 512, 0, 0) for storage in range(3)]
    rows = [row for _ in range(2000) for row in [(0, 64 * MIB, 0, 0), (0, -64 * MIB, 0, 0)]]
    grown = [(1, 2 * MIB, 0, 0) for _ in range(3000)]
    rows = [*small, *rows, *grown]
    replay = CompiledReplay(rows)
    replay._room = 16
    leads = [0] * len(rows)
    assert replay.run(leads).reserved == allocator.replay_requests(rows, ahead=0).peak_reserved
    assert replay._room > 16


def test_other_options_are_pythons():
    assert is_covered(None)
    assert is_covered(allocator.Settings())
    assert not is_covered(allocator.Settings(expandable=True))
    assert not is_covered(allocator.Settings(max_split=64 * MIB))
