"""Dumps are read whatever their format, what is foreign is refused, and nothing in them runs."""

import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.fuzz import STATE
from helpers.random_hangs import named

from megatron_prism.core.errors import DumpError, UsageError
from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import dumps as dump_workers
from megatron_prism.features.hang import export
from megatron_prism.features.hang.dumps import (
    DumpSet,
    dump_files,
    parse,
    read_in_process,
)

VALUE = export.dump_of(STATE, 4)
VERSIONS = [f"2.{minor}" for minor in range(11)]


class Evil:
    def __init__(self, function, *words):
        self.call = (function, words)

    def __reduce__(self):
        return self.call


def written(folder, version="2.10", as_json=False, **how):
    """Dumps as other releases and settings leave them."""
    folder = export.write(STATE, folder / "d", **how)
    for path in folder.iterdir():
        value = pickle.loads(path.read_bytes()) | {"version": version}
        if as_json:
            path.unlink()
            (folder / f"{path.name}.json").write_text(json.dumps(value))
        else:
            path.write_bytes(pickle.dumps(value, protocol=2))
    return folder


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_version_says_the_same(version, as_json, tmp_path):
    found = read_in_process(written(tmp_path, version=version, as_json=as_json))
    assert {dump.version for dump in found.dumps.values()} == {version}
    assert named(hang.diagnose_dumps(found)) == {5}


@pytest.mark.parametrize(
    "name",
    [
        "comm_lib_trace_rank_{}",
        "h1-{}",
        "nccl_trace_rank_{}_20260817",
        "rank{}_host7.pkl",
        "rank_{}.host-1",
        "local_rank_1_rank-{}",
        "node_rank_2_dump_{}",
        "pp_rank0_dump_{}",
        "rank_{}_tp_rank_0",
        "rank{}_hostA.pkl",
        "nccl_trace_rank_{}_worker-a",
        "myjob_rank_{}_20260817",
    ],
)
def test_the_rank_ends_a_file_s_name_or_stands_behind_its_word(name, tmp_path):
    folder = written(tmp_path)
    for path in [*folder.iterdir()]:
        path.rename(folder / name.format(path.name.removeprefix("_dump_")))
    (folder / "fault_injection.log").write_text("no dump")
    (folder / ".nfs0001").write_bytes(b"")  # NFS leaves it where an open file was removed
    assert sorted(read_in_process(folder).dumps) == list(range(16))


def test_what_was_written_is_what_is_read():
    dump = parse(pickle.dumps(VALUE, protocol=2), 4)
    assert len(dump.entries) == len(VALUE["entries"])
    assert {g.desc for g in dump.groups.values()} == set(STATE.groups) - {"EMBEDDING_GROUP"}
    assert [(e.op, e.to >= 0) for e in dump.entries[:3]] == [
        ("recv", True), ("all_reduce", False), ("all_gather", False)
    ]  # fmt: skip
    assert dump.entries[1].numbers == ((64,), (64,))
    assert dump.entries[1].site == "mappings.py:31"


def test_pg_status_is_mapped_without_entries():
    """Ids are a rank's own count; in ascending order they belong to the names."""
    bare = parse(pickle.dumps({**VALUE, "entries": []}), 4)
    full = parse(pickle.dumps(VALUE), 4)
    assert bare.status == full.status
    fewer = {**VALUE, "entries": [], "pg_config": dict(list(VALUE["pg_config"].items())[1:])}
    assert parse(pickle.dumps(fewer), 4).notes


def test_a_truncated_dump_is_a_missing_one(tmp_path):
    folder = written(tmp_path, active_only=True)
    (folder / "_dump_5").write_bytes((folder / "_dump_5").read_bytes()[:100])
    found = read_in_process(folder)
    assert list(found.unreadable) == [5]
    verdict = hang.diagnose_dumps(found)
    assert (named(verdict), verdict.verdict) == ({5}, "missing dump")
    assert any("_dump_5" in line for line in verdict.missing)


def test_groups_absent_from_pg_config_are_known_from_calls():
    values = {r: export.dump_of(STATE, r) for r in range(16)}
    for value in values.values():
        value["pg_config"] = {}
    dumps = {r: parse(pickle.dumps(v), r) for r, v in values.items()}
    found = hang.diagnose_dumps(DumpSet(dumps))
    assert named(found) <= {5}
    assert any("known from its calls" in line for line in found.missing)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no dump, or damaged"),
        (b"{", "no dump, or damaged"),
        (b"[" * 100_000, "no dump, or damaged"),
        (b"\x80\x02r\xff\xff\xff\xff.", "no dump, or damaged"),
        (pickle.dumps([1]), "expected `object`, got `array`"),
        (pickle.dumps({"version": "1.5"}), "version '1.5'"),
        (pickle.dumps({"version": "2.10", "entries": {"x": 1}}), "entries: expected `array"),
        (pickle.dumps({"version": "2.10", "entries": [{}]}), "entry|process_group"),
        (b'{"version": "2.9", "pg_config": {"0": {"ranks": "[0, 0]"}}}', "cannot be"),
        (
            b'{"version": "2.9", "pg_status": {"0": {"last_enqueued_collective": "x"}}}',
            "expected `int",
        ),
    ],
)
def test_foreign_files_are_explained(data, says, tmp_path):
    (tmp_path / "_dump_0").write_bytes(data)
    with pytest.raises(DumpError, match=says) as caught:
        read_in_process(tmp_path)
    assert caught.value.exit_code == 2
    assert caught.value.fix


def test_dumps_are_written_all_or_none(tmp_path, monkeypatch):
    """A part of them would be judged, as those of ranks that left none."""
    made = export.dump_of

    def interrupted(state, rank, *rest, **how):
        if rank == 9:
            raise KeyboardInterrupt
        return made(state, rank, *rest, **how)

    monkeypatch.setattr(export, "dump_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_force_replaces_dumps_and_nothing_else(tmp_path, monkeypatch):
    folder = written(tmp_path)
    (folder / "notes.txt").write_text("mine")
    (folder / "_dump_99").write_bytes(b"of a larger job")
    with pytest.raises(UsageError, match="not empty"):
        export.write(STATE, folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    export.write(STATE, link, force=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(list(folder.iterdir())) == 17
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def dies(state, **how):
        yield 0, {}
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "dumps_of", dies)
    with pytest.raises(KeyboardInterrupt):
        export.write(STATE, folder, force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_folders_that_cannot_be(tmp_path):
    with pytest.raises(DumpError, match="no folder"):
        read_in_process(tmp_path / "x")
    with pytest.raises(DumpError, match="ends in a rank"):
        read_in_process(tmp_path)
    (tmp_path / "empty").mkdir()
    folder = written(tmp_path)
    with pytest.raises(DumpError, match="ends in a rank") as caught:
        read_in_process(tmp_path)
    assert caught.value.fix == f"name its folder {folder}"
    with pytest.raises(UsageError, match="not empty"):
        written(tmp_path)
    (folder / "other_3").write_bytes(b"")
    with pytest.raises(DumpError, match="both of rank 3"):
        read_in_process(folder)


# -- several processes ----------------------------------------------------------------------------
def several(folder):
    return dump_workers.read(folder, processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"active_only": True, "version": "2.0"}, {"as_json": True}])
def test_several_processes_read_the_same(how, tmp_path):
    folder = written(tmp_path, **how)
    cut = next(folder.glob("_dump_7*"))
    cut.write_bytes(cut.read_bytes()[:200])
    one, more = read_in_process(folder), several(folder)
    assert one == more
    assert list(one.unreadable) == [7]
    assert hang.diagnose_dumps(one) == hang.diagnose_dumps(more)
    types = {tuple(map(type, e)) for found in (one, more) for d in found.dumps.values()
             for e in d.entries}  # fmt: skip
    assert len(types) == 1, "True is not 1"


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [0, 5])
def test_a_hostile_pickle_is_refused_by_a_worker(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = written(tmp_path)
    for rank in (3, 11):
        evil = {"entries": [Evil(os.system, f"touch HIT{rank}")]}
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(evil, protocol=protocol))
    said = []
    for read in (read_in_process, several):
        with pytest.raises(DumpError, match=r"_dump_3: .*nothing was executed") as caught:
            read(folder)
        said.append(str(caught.value))
        assert not multiprocessing.active_children()  # while the error is still at hand
    assert said[0] == said[1]
    assert not list(tmp_path.glob("HIT*"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_said(tmp_path):
    files = dump_files(written(tmp_path))
    many = dict(zip(range(2_000), itertools.cycle(files.values()), strict=False))
    loaded = dump_workers._loaded(many, 2)
    assert next(loaded)[0] == 0
    mine = multiprocessing.active_children()
    assert len(mine) == 2
    mine[0].kill()
    with pytest.raises(DumpError, match="was killed") as caught:
        list(loaded)
    assert "free memory" in caught.value.fix
    assert not any(process.is_alive() for process in mine)


FOREVER = """
import itertools, os, signal, sys
from megatron_prism.features.hang import dumps
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
if __name__ == "__main__":
    files = dumps.dump_files(__import__("pathlib").Path(sys.argv[1]))
    many = dict(zip(range(100_000), itertools.cycle(files.values())))
    dumps.dump_files = lambda folder: many
    dumps._is_of = lambda dump: None  # they are of other ranks
    print("go", flush=True)
    dumps.read(sys.argv[1], processes=2)
"""


def children(pid):
    """Processes below ``pid``."""
    found = [pid]
    for parent in found:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, tasks.read_text().split())
    return found[1:]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_caller(number, tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(FOREVER)
    with subprocess.Popen([sys.executable, str(script), str(written(tmp_path))],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as caller:  # fmt: skip
        assert caller.stdout.readline() == b"go\n"
        deadline = time.monotonic() + 30
        while len(below := children(caller.pid)) < 3:  # two workers and the resource tracker
            assert caller.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(caller.pid, number)
        assert caller.wait(30) != 0
    while not all(map(gone, below)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
