"""Planted faults of streams in hand-written traces, and an oracle by reachability in a graph."""

import json
import random

import numpy as np
import pytest
from helpers.needs import MEGATRON

from megatron_prism.cli.main import main
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.core.world import World
from megatron_prism.features.streams import trace as traces
from megatron_prism.features.streams.order import FaultKind, check_trace
from megatron_prism.features.streams.trace import ROW, Kind, RowPlace, StreamTrace, path_of

MAIN, SIDE, NCCL = 0, 1, 2
BIG = 4 << 20  # bytes
PLACES = tuple(RowPlace(f"op{n}", f"core/x.py:{n}", "0F") for n in range(20))


def trace_of(*rows):
    """A trace of (kind, stream, object, low, high, place) rows, which may be cut short."""
    whole = [tuple(row) + (0,) * (6 - len(row)) for row in rows]
    return StreamTrace(
        3, np.array(whole, dtype=ROW), ("main", "s1", "nccl dp"), PLACES, graph_launches=0
    )


def faults_of(*rows):
    return [fault for fault, _ in check_trace(trace_of(*rows))]


def allocate(number, stream=MAIN, place=1):
    return (Kind.ALLOCATE, stream, number, 0, BIG, place)


def write(number, stream=MAIN, place=2):
    return (Kind.WRITE, stream, number, 0, BIG, place)


def read(number, stream, place=3):
    return (Kind.READ, stream, number, 0, BIG, place)


MADE = (allocate(1), write(1), (Kind.RECORD, MAIN, 1), (Kind.WAIT, SIDE, 1), read(1, SIDE))
REUSE = ((Kind.FREE, MAIN, 1), allocate(2, place=4), write(2, place=5))


def test_memory_is_reused_while_a_side_stream_reads_it():
    (fault,) = faults_of(*MADE, *REUSE)
    assert fault.kind is FaultKind.REUSED
    assert (fault.first.site, fault.second.site) == ("core/x.py:3", "core/x.py:5")
    assert (fault.tensor.site, fault.num_bytes, fault.rank) == ("core/x.py:1", BIG, 3)
    assert "record_stream(s1)" in fault.fix


@pytest.mark.parametrize(
    "ordered",
    [
        [(Kind.USE, SIDE, 1)],
        [(Kind.RECORD, SIDE, 2), (Kind.WAIT, MAIN, 2)],
        [(Kind.RECORD, SIDE, 2), (Kind.HOST_EVENT, MAIN, 2)],
        [(Kind.HOST_STREAM, SIDE, 0)],
        [(Kind.HOST_DEVICE, MAIN, 0)],
    ],
)
def test_what_orders_the_reuse(ordered):
    assert faults_of(*MADE, *ordered, *REUSE) == []


def test_a_wait_behind_the_free_and_before_the_first_access_orders_it_too():
    free, allocated, written = REUSE
    join = [(Kind.RECORD, SIDE, 2), (Kind.WAIT, MAIN, 2)]
    assert faults_of(*MADE, free, allocated, *join, written) == []
    assert len(faults_of(*MADE, free, allocated, written, *join)) == 1


def test_record_stream_of_the_stream_that_waits_for_a_call_covers_the_call():
    call = [(Kind.RECORD, SIDE, 5), (Kind.WAIT, NCCL, 5), read(1, NCCL, 6), (Kind.RECORD, NCCL, 6)]
    held = [*call, (Kind.HOLD, NCCL, 1, 6), (Kind.WAIT, SIDE, 6)]
    (fault,) = faults_of(*MADE[:-1], *held, *REUSE)
    assert fault.first_stream == "nccl dp"
    assert "record_stream(s1)" in fault.fix  # the code knows no stream of the communicator
    assert faults_of(*MADE[:-1], *held, (Kind.USE, SIDE, 1), *REUSE) == []


def test_a_call_holds_its_tensors_until_somebody_waits():
    call = [(Kind.RECORD, MAIN, 5), (Kind.WAIT, NCCL, 5), read(1, NCCL, 6), (Kind.RECORD, NCCL, 6)]
    held = [allocate(1), write(1), *call, (Kind.HOLD, NCCL, 1, 6)]
    assert faults_of(*held, *REUSE) == []
    # another stream than that of the memory waits, and lets it go
    (fault,) = faults_of(*held, REUSE[0], (Kind.WAIT, SIDE, 6), *REUSE[1:])
    assert fault.kind is FaultKind.REUSED


def test_a_tensor_is_read_before_it_is_written():
    (fault,) = faults_of(allocate(1), write(1), read(1, SIDE))
    assert fault.kind is FaultKind.UNFINISHED
    assert "s1.wait_stream(main)" in fault.fix


def test_a_call_s_result_is_read_without_waiting_for_it():
    call = [(Kind.RECORD, MAIN, 5), (Kind.WAIT, NCCL, 5), write(1, NCCL, 6), (Kind.RECORD, NCCL, 6)]
    (fault,) = faults_of(allocate(1), *call, read(1, MAIN))
    assert fault.kind is FaultKind.UNFINISHED
    assert "handle" in fault.fix
    assert faults_of(allocate(1), *call, (Kind.WAIT, MAIN, 6), read(1, MAIN)) == []


def test_a_buffer_that_is_sent_is_overwritten():
    call = [(Kind.RECORD, MAIN, 5), (Kind.WAIT, NCCL, 5), read(1, NCCL, 6), (Kind.RECORD, NCCL, 6)]
    (fault,) = faults_of(allocate(1), write(1), *call, write(1, MAIN, 7))
    assert fault.kind is FaultKind.OVERWRITTEN


def test_new_memory_of_one_stream_is_used_on_another_that_does_not_wait():
    rows = [allocate(1), write(1), (Kind.FREE, MAIN, 1), allocate(2, place=4), write(2, SIDE, 5)]
    (fault,) = faults_of(*rows)
    assert fault.kind is FaultKind.FOREIGN
    joined = [(Kind.RECORD, MAIN, 1), (Kind.WAIT, SIDE, 1)]
    assert faults_of(*rows[:-1], *joined, rows[-1]) == []


def test_ranges_that_do_not_overlap_and_reads_do_not_conflict():
    half = BIG // 2
    rows = [
        allocate(1),
        (Kind.WRITE, MAIN, 1, 0, half, 2),
        (Kind.WRITE, SIDE, 1, half, BIG, 3),
        (Kind.RECORD, MAIN, 1),
        (Kind.RECORD, SIDE, 2),
        (Kind.WAIT, SIDE, 1),
        (Kind.WAIT, MAIN, 2),
        read(1, MAIN),
        read(1, SIDE),
    ]
    assert faults_of(*rows) == []


def test_an_event_that_is_recorded_again_carries_its_last_record_only():
    """One event for all, as Megatron-LM issue 1810 describes it: waits see the last record."""
    rows = [allocate(1), (Kind.RECORD, MAIN, 1), write(1), (Kind.WAIT, SIDE, 1), read(1, SIDE)]
    assert [fault.kind for fault in faults_of(*rows)] == [FaultKind.UNFINISHED]
    again = [*rows[:3], (Kind.RECORD, MAIN, 1), *rows[3:]]
    assert faults_of(*again) == []


def test_small_and_large_requests_have_pools_of_their_own():
    small = (Kind.ALLOCATE, MAIN, 2, 0, 512, 4)
    assert faults_of(*MADE, REUSE[0], small, (Kind.WRITE, MAIN, 2, 0, 512, 5)) == []


# -- an oracle: reachability in the graph of what is before what -----------------------------------


def drawn_rows(draw):
    """Accesses of three storages on three streams, with events between them."""
    rows, num_events = [allocate(number) for number in (1, 2, 3)], 0
    for _ in range(draw.randrange(5, 40)):
        stream = draw.randrange(3)
        kind = draw.choice((Kind.READ, Kind.WRITE, Kind.RECORD, Kind.WAIT, Kind.HOST_STREAM))
        if kind in (Kind.READ, Kind.WRITE):
            low = draw.randrange(4)
            high = draw.randrange(low + 1, 6)
            place = draw.randrange(len(PLACES))
            rows.append((kind, stream, draw.randrange(1, 4), low, high, place))
        elif kind is Kind.RECORD:
            num_events += 1
            rows.append((kind, stream, num_events))
        elif kind is Kind.WAIT and num_events:
            rows.append((kind, stream, draw.randrange(1, num_events + 1)))
        elif draw.random() < 0.2:
            rows.append((Kind.HOST_STREAM, stream, 0))
    return rows


def pairs_without_order(rows):
    """Places of conflicting accesses of which neither reaches the other, by brute force."""
    before = [set() for _ in rows]  # row -> rows that are certainly before it
    last = [None] * 3
    recorded, host = {}, set()
    for index, row in enumerate(rows):
        kind, stream = row[0], row[1]
        if kind is Kind.ALLOCATE:
            continue
        direct = set(host)
        if last[stream] is not None:
            direct |= before[last[stream]] | {last[stream]}
        if kind is Kind.RECORD:
            recorded[row[2]] = index
        if kind is Kind.WAIT:
            event = recorded[row[2]]
            direct |= before[event] | {event}
        before[index] = direct
        last[stream] = index
        if kind is Kind.HOST_STREAM:
            host |= direct
    pairs = set()
    accesses = [i for i, row in enumerate(rows) if row[0] in (Kind.READ, Kind.WRITE)]
    for second in accesses:
        for first in accesses:
            one, two = rows[first], rows[second]
            if first >= second or one[1] == two[1] or one[2] != two[2]:
                continue
            touches = one[3] < two[4] and two[3] < one[4]
            if touches and Kind.WRITE in (one[0], two[0]) and first not in before[second]:
                pairs.add((one[5], two[5], one[1], two[1]))
    return pairs


@pytest.mark.parametrize("seed", range(300))
def test_drawn_traces_against_reachability(seed):
    """Whether there is a fault at all is the same; each one that is named is one.

    A pair may be missing: a later access of the same stream stands for an earlier one.
    """
    rows = drawn_rows(random.Random(seed))
    expected = pairs_without_order(rows)
    numbers = {place: index for index, place in enumerate(PLACES)}
    streams = {"main": MAIN, "s1": SIDE, "nccl dp": NCCL}
    named = {
        (numbers[f.first], numbers[f.second], streams[f.first_stream], streams[f.second_stream])
        for f in faults_of(*rows)
    }
    assert named <= expected
    assert bool(named) == bool(expected)


def test_a_file_is_read_as_it_was_written(tmp_path):
    written = trace_of(*MADE)
    path = traces.path_of(tmp_path, 3)
    traces.save(written, path)
    loaded = traces.load(path)
    assert (loaded.rows == written.rows).all()
    assert (loaded.streams, loaded.places) == (written.streams, written.places)
    assert traces.traces_of(tmp_path) == [path]


@pytest.mark.parametrize("cut", [10, 100, 400])
def test_a_cut_file_is_refused(tmp_path, cut):
    path = traces.path_of(tmp_path, 0)
    traces.save(trace_of(*MADE), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ProgramError) as raised:
        traces.load(path)
    assert raised.value.fix


@MEGATRON
@pytest.mark.slow
def test_a_recipe_is_captured_with_its_streams_and_proved(tmp_path, capsys):
    words = ["guard-gpt_16gpu_tp2pp2vp2_h200", "-o", str(tmp_path / "slices")]
    assert main(["capture", *words, "prism.flags=--prism-streams"]) == 0
    capsys.readouterr()
    assert main(["check", str(tmp_path / "slices"), "--streams", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 8]
    assert all(rank["proved"] and rank["accesses"] > 1000 for rank in ranks)


def test_a_forced_capture_drops_the_record_of_the_old_slices(tmp_path):
    """Else the old record would be proved in place of the new slices."""
    path_of(tmp_path, 0).write_bytes(b"of an old slice")
    SliceStore(tmp_path, World(2), {}).prepare(force=False)
    assert path_of(tmp_path, 0).exists()
    SliceStore(tmp_path, World(2), {}).prepare(force=True)
    assert not list(tmp_path.iterdir())


def test_slices_without_a_record_are_refused(tmp_path, capsys):
    assert main(["check", str(tmp_path), "--streams"]) == 2
    assert "prism.flags=--prism-streams" in capsys.readouterr().err
