"""What people feed the commands by mistake or by malice: every one ends soon, with what to type."""

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.fuzz import DUMPS
from rich.console import Console

import megatron_prism
from megatron_prism.cli import main as cli
from megatron_prism.core import foreign
from megatron_prism.core.errors import ProgramError, RecipeError, UsageError
from megatron_prism.core.files import artefact_folder
from megatron_prism.core.jobs.recipe import load
from megatron_prism.core.programs import program
from megatron_prism.core.programs.program_text import parse
from megatron_prism.emulate.jobs import recipe_job
from megatron_prism.features.hang.dumps import read_in_process
from megatron_prism.features.hang.fault_plan import load_plan

ONE = "prism-program 1\nworld size=1\nprogram rank=0 ranks=0\n- compute ns=7us\n"
LONG = "x" * 300


def refused(capsys, *words):
    """What is said of a command that cannot be: two lines, no traceback, status 2."""
    assert cli.main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("prism: error: ")
    assert "\n  fix: " in said
    return said


# -- aliases: a few bytes that mean billions -------------------------------------------------------
def laughs(value="x"):
    for _ in range(10):
        value = [value] * 10
    return value


@pytest.mark.parametrize("key", ["pg_id", "profiling_name", "input_dtypes", "frames"])
def test_aliases_in_a_dump_are_not_expanded(key, tmp_path):
    for rank, dump in list(DUMPS[0].items())[:4]:
        entries = [{**dump["entries"][0], key: laughs()}, *dump["entries"][1:]]
        made = {**dump, "entries": entries} if rank == 1 else dump
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(made))
    found = read_in_process(tmp_path)
    if key == "frames":  # of which only the innermost is read, if it is one
        assert {e.site for e in found.dumps[1].entries[:1]} == {""}
    else:
        assert f"entries[0].{key}" in found.unreadable[1]


@pytest.mark.parametrize("key", ["input_sizes", "output_dtypes", "ranks"])
def test_a_long_list_may_not_stand_in_every_call(key, tmp_path):
    dump = DUMPS[0][0]
    long = list(range(10_000)) if key == "ranks" else [["x"], [1]][key == "input_sizes"] * 10_000
    entries = [{**dump["entries"][0], key: long}] * 2000
    groups = {str(i): {"ranks": long, "desc": ""} for i in range(2000)}
    made = {**dump, "pg_config": groups} if key == "ranks" else {**dump, "entries": entries}
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(dump))
    (tmp_path / "_dump_1").write_bytes(pickle.dumps(made))
    assert "means more than" in read_in_process(tmp_path).unreadable[1]


@pytest.mark.parametrize("opcode", [b"\x80\x02r\x00\x00\x00\x10.", b"\x80\x04\x8e" + bytes(
    [0, 0, 0, 16, 0, 0, 0, 0]) + b"abc."])  # fmt: skip
def test_announced_bytes_are_not_allocated(opcode, tmp_path):
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(DUMPS[0][0]))
    (tmp_path / "_dump_1").write_bytes(opcode)
    assert list(read_in_process(tmp_path).unreadable) == [1]


def test_billion_laughs_in_yaml_are_refused(tmp_path):
    file = tmp_path / "laughs.yaml"
    rows = [f"- &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]" for i in range(10)]
    file.write_text("\n".join(["- &a [x,x,x,x,x,x,x,x,x,x]", *rows]))
    with pytest.raises(UsageError, match="is an alias"):
        load_plan(str(file))
    with pytest.raises(RecipeError, match="is an alias"):
        load(file)


# -- files of programs -----------------------------------------------------------------------------
@pytest.fixture
def members(tmp_path):
    """(path, its arrays) of a good file."""
    path = program.save(parse(ONE), tmp_path / "one.prism")
    with np.load(path) as archive:
        return path, dict(archive)


def array_head(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def test_members_are_bounded_before_they_are_read(members, monkeypatch):
    path, arrays = members
    monkeypatch.setattr(foreign, "_INFLATED", 1 << 20)
    bomb = {f"history{i}": np.zeros(1 << 19, np.uint8) for i in range(900, 903)}
    np.savez_compressed(path.with_suffix(".bomb"), **arrays, **bomb)
    with pytest.raises(ProgramError, match="would inflate to"):
        program.load(f"{path.with_suffix('.bomb')}.npz")
    for name, data in (
        ("history9.npy", array_head((1 << 40,))),
        ("head", b"{}"),
        ("head.npy", b"{}"),
        ("other.npy", array_head((0,))),
    ):
        copy = path.with_suffix(".copy")
        copy.write_bytes(path.read_bytes())
        with zipfile.ZipFile(copy, "a") as archive, warnings.catch_warnings(action="ignore"):
            archive.writestr(name, data)  # a duplicate name is the point
        with pytest.raises(ProgramError, match=r"too large to be|is unknown|there twice"):
            program.load(copy)


# -- recipes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "word",
    ["num_layers=1000000000", "num_experts=1000000000", "train_iters=1e12",
     "train_iters=9000000000", "world_size=67108864",
     "global_batch_size=2000000000", "model.=1", ".=1", "model=1", "=1", "model..x=1"],
)  # fmt: skip
def test_what_cannot_end_is_refused_at_once(word, capsys):
    said = refused(capsys, "emulate", "tiny-gpt_1cpu", word)
    assert word not in said.partition("fix: ")[2].split()


def test_a_job_larger_than_this_host_is_not_started():
    recipe = load("tiny-gpt_1cpu", ["num_layers=4096", "hidden_size=8192"])
    with pytest.raises(UsageError, match="of host memory"):
        recipe_job.emulate(recipe, console=Console(file=io.StringIO()))


def test_a_working_directory_that_was_deleted(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert "working directory" in refused(capsys, "recipes")


# -- a broken install, a signal -------------------------------------------------------------------
@pytest.mark.parametrize("left", [{}, {"_attach.py": "def auto"}, {"_attach.py": "x = 1"},
                                  {"_attach.py": "import megatron_prism.emulate"}])  # fmt: skip
def test_what_is_left_of_an_install_breaks_no_other_program(left, tmp_path):
    """``import torch`` calls this in every process of the environment."""
    package = tmp_path / "megatron_prism"
    package.mkdir()
    text = (Path(megatron_prism.__file__)).read_text()
    for name, content in {"__init__.py": text, **left}.items():
        (package / name).write_text(content)
    (tmp_path / "program.py").write_text("import megatron_prism as m; m._autoload(); print('mine')")
    words = [sys.executable, "-S", str(tmp_path / "program.py")]  # without what is installed
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")
    done = subprocess.run([*words, "--prism-emulate"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not installed whole" in done.stderr


@pytest.mark.parametrize(("raised", "status"), [(SystemExit(143), 143), (KeyboardInterrupt, 130)])
def test_a_signal_in_the_midst_of_a_library_is_no_mistake_of_ours(raised, status, monkeypatch):
    """argparse's own finally fails when it is left early, and its error hides the signal."""

    def left_early(words):
        try:
            raise raised
        finally:
            object().save_nargs

    monkeypatch.setattr(cli, "_dispatch", left_early)
    assert cli.main(["recipes"]) == status


# -- kills -----------------------------------------------------------------------------------------
def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def heeds_ctrl_c():  # a shell's background job ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("after_s", [0.4, 2.5])
def test_a_killed_command_leaves_nothing(number, after_s, tmp_path):
    """Neither processes nor half an artefact; the next one is not disturbed by what is hidden."""
    words = [sys.executable, "-m", "megatron_prism", "emulate", "tiny-gpt_1cpu", "-o", "out/e"]
    words += ["train_iters=3000"]
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "cwd": tmp_path}
    with subprocess.Popen(words, preexec_fn=heeds_ctrl_c, **how) as command:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(after_s)
        tasks = Path(f"/proc/{command.pid}/task").glob("*/children")
        below = [int(pid) for task in tasks for pid in task.read_text().split()]
        command.send_signal(number)
        said = command.communicate(timeout=90)[1].decode()
    assert command.returncode in (-number, 128 + number)
    assert "Traceback" not in said
    deadline = time.monotonic() + 10
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, below))
    left = [path for path in tmp_path.rglob("*") if path.name != "out"]
    assert all(number == signal.SIGKILL and ".e." in str(path) for path in left)
    with artefact_folder(tmp_path / "out" / "e") as folder:
        (folder / "summary.json").write_text("{}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["e"]
