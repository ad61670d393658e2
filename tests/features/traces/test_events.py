"""Foreign traces: pieces, Nsight's tables, and what is no trace, cut off or hostile."""

import gzip
import json
import pickle
import sqlite3

import numpy as np
import pytest
from helpers.kineto import Trace

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.features.traces import events
from megatron_prism.features.traces.events import read_trace
from megatron_prism.features.traces.programs import import_traces


def test_a_list_of_events_and_braces_in_texts_are_read(tmp_path):
    path = tmp_path / "t.json"
    event = {"ph": "X", "cat": "kernel", "name": "a}, {b ]}", "ts": 1, "dur": 2, "tid": 7,
             "args": {"stream": 7, "x": [{"y": 1}, {"z": "]"}]}}  # fmt: skip
    path.write_text(json.dumps([event, event]))
    (found,) = read_trace(path)
    assert found.device[:, :2].tolist() == [[1000, 3000]] * 2
    assert found.names == ("a}, {b ]}",)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"{}", "traceEvents"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph"', "truncated"),
        (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', r"traceEvents.*ts"),
        (b'{"traceEvents": [{"args": ' + b'{"a":' * 10**5, "nested too deeply|truncated"),
        (b'{"traceEvents": [{"args": ' + b'{"a":' * 10**5 + b"1" + b"}" * 10**5 + b"}]}", "deeply"),
        (b"\x1f\x8b" + b"\0" * 50, "cut off or damaged"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "cut off or damaged"),
        (b"SQLite format 3\0" + b"\0" * 500, "Nsight"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, data, says):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says):
        read_trace(path)


def test_a_trace_that_inflates_without_end_costs_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_MOST", 1 << 20)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (1 << 24) + b"]", 1))
    with pytest.raises(UsageError, match="unpacks to more than 1,048,576 bytes"):
        read_trace(path)


def test_times_that_run_backwards_are_left_out_and_said(tmp_path):
    trace = Trace(0, 1)
    trace.kernel(1, 10, 40)
    trace.kernel(2, 90, 60)
    trace.kernel(3, 1e300, 1e300)
    trace.call(4, 100, 110, sizes=(1 << 80, 1 << 80))
    found = import_traces([trace.write(tmp_path)])
    assert any("2 events that end before they begin" in note for note in found.notes)
    assert found.programs.programs[0].ops["num_in"].max() < 1 << 59


def test_groups_of_ranks_that_do_not_exist_are_refused(tmp_path):
    trace = Trace(0, 2, groups={"0": ("default_pg", [0, 1, 10**9])})
    trace.kernel(1, 10, 40)
    with pytest.raises(PrismError, match="rank 1000000000"):
        import_traces([trace.write(tmp_path)])


def test_steps_without_work_and_groups_of_others_are_no_harm(tmp_path):
    trace = Trace(0, 2, groups={"0": ("default_pg", [0, 1]), "1": ("x", []), "2": ("y", [1])})
    trace.step(0, 0, 5)
    trace.step(1, 5, 50)
    trace.call(6, 10, 40)
    found = import_traces([trace.write(tmp_path)])
    assert found.numbers == [1]
    empty = Trace(0, 1)
    empty.step(0, 0, 5)
    with pytest.raises(PrismError, match="no work"):
        import_traces([empty.write(tmp_path)])


def nsight(path):
    """Two iterations of one rank, as Nsight Systems exports them."""
    with sqlite3.connect(path) as base:
        base.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,
                streamId INT, correlationId INT, globalPid INT, demangledName INT, shortName INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,
                correlationId INT, nameId INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT,
                globalTid INT);
            CREATE TABLE TARGET_INFO_GPU (name TEXT);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllReduce_Sum_bf16');
            INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H200');
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT);
            INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1000000000000000000);
            CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
            INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'node7');
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('x', 'y', 0, 7, NULL, 5 << 24, 1, 1);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ('x', 1, 'y', 1, 1);
            INSERT INTO NVTX_EVENTS VALUES (1.5, 'z', 59, 'iteration 9', NULL, 5 << 24);
            """
        )
        thread, number = 5 << 24 | 7, 0
        for step in (0, 1):
            now = 10_000_000 * step
            base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)",
                         (now, now + 9_000_000, f"iteration {step}", thread))  # fmt: skip
            text = "c10d::allreduce_, seq = 3, op_id = 4, sizes = [[[8, 4]], [], []]"
            base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, NULL, ?)",
                         (now + 2000, now + 3000, text, thread))  # fmt: skip
            for launched, start, end, name in ((1000, 10_000, 2_010_000, 1),
                                               (2500, 2_010_000, 3_010_000, 2),
                                               (4000, 3_010_000, 9_010_000, 1)):  # fmt: skip
                number += 1
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 1)",
                             (now + launched, now + launched + 5, thread, number))  # fmt: skip
                base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,7,?,?,?,?)",
                             (now + start, now + end, number, 5 << 24, name, name))  # fmt: skip


def test_nsights_export_is_read_the_same_way(tmp_path):
    path = tmp_path / "report_rank0.sqlite"
    nsight(path)
    found = import_traces([path])
    (program,) = found.programs.programs
    assert [op.name for op in program][:3] == ["compute", "all_reduce", "compute"]
    assert program[1].num_in == 32
    assert program.samples[1].tolist() == [2_000_000, 6_000_000]
    assert found.wire[1].tolist() == [1_000_000]
    assert found.programs.source["device"] == "NVIDIA H200"
    recorded = found.measured[0].recorded
    assert (recorded.node, recorded.steps[0][1]) == ("node7", 10**18)
    assert found.numbers == [0, 1]


def flight_dump(folder, rank, iterations=4, timed=True, lost=0):
    """A rank that computes 40 ms (rank 1: 60), reduces 10 ms once both have come, and so on twice
    an iteration; each call is asked for when the one before has ended."""
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "7": {"name": "7", "desc": "MODEL_PARALLEL_GROUP", "ranks": "[0, 1]"},
    }
    entries, now = [], 10**18
    for number in range(2 * iterations):
        asked = now + (60_000_000 if rank else 40_000_000)
        now += 70_000_000
        name = "7" if number % 2 else "0"
        entries.append({
            "record_id": number, "pg_id": int(name), "process_group": (name, groups[name]["desc"]),
            "collective_seq_id": number // 2 + 1, "p2p_seq_id": 0, "op_id": number,
            "profiling_name": "nccl:all_reduce", "time_created_ns": asked,
            "input_sizes": [[1024]], "output_sizes": [[1024]], "input_dtypes": ["BFloat16"],
            "output_dtypes": ["BFloat16"], "state": "completed", "retired": True,
            "timeout_ms": 600_000, "is_p2p": False, "time_discovered_started_ns": None,
            "time_discovered_completed_ns": now + 5_000_000,
            **({"duration_ms": (now - asked) / 1e6} if timed else {}),
        })  # fmt: skip
    value = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries[lost:]}
    (folder / f"_dump_{rank}").write_bytes(pickle.dumps(value))


def test_dumps_of_the_flight_recorder_with_times_are_traces(tmp_path):
    for rank in (0, 1):
        flight_dump(tmp_path, rank, lost=rank)  # rank 1's ring has lost its first call
    found = import_traces([tmp_path])
    assert found.numbers == [1, 2]
    assert [round(ns / 1e6) for ns in found.iteration_ns] == [140, 140]
    assert found.programs.programs[1].samples[0].tolist()[0] == pytest.approx(60e6, abs=10)
    assert np.nanmax(np.abs(found.wire - 10e6)) < 100
    assert np.abs(found.skew[0] - 20e6).max() < 100
    assert any("as the Flight Recorder does not say" in note for note in found.notes)


def test_dumps_without_times_or_without_two_iterations_say_what_to_set(tmp_path):
    flight_dump(tmp_path, 0, timed=False)
    with pytest.raises(UsageError) as error:
        import_traces([tmp_path])
    assert "TORCH_NCCL_ENABLE_TIMING=1" in (error.value.fix or "")
    flight_dump(tmp_path, 0, iterations=1)
    with pytest.raises(PrismError, match="do not repeat"):
        import_traces([tmp_path])
