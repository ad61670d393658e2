"""An artefact folder is there whole or not at all, however the process ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import (
    artefact_folder,
    check_free,
    claimed,
    whole_file,
    write_json,
    write_whole,
)


def write(path, text="x", force=False):
    with artefact_folder(path, force=force) as folder:
        (folder / "report.txt").write_text(text)


def test_appears_at_the_end_with_everything_in_it(tmp_path):
    final = tmp_path / "runs" / "one"
    with artefact_folder(final) as folder:
        write_json(folder / "summary.json", {"b": 1, "a": [2]})
        (folder / "zero.txt").write_text("zero")
        assert not final.exists()
    assert json.loads((final / "summary.json").read_text()) == {"b": 1, "a": [2]}
    assert (final / "zero.txt").read_text() == "zero"
    assert [p.name for p in final.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_when_the_block_fails(tmp_path, error):
    with pytest.raises(error), artefact_folder(tmp_path / "one") as folder:  # noqa: PT012
        (folder / "report.txt").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_taken_place_is_refused_before_any_work(tmp_path):
    write(tmp_path / "one", "first")
    with (
        pytest.raises(UsageError, match="exists already") as error,
        artefact_folder(tmp_path / "one"),
    ):
        pytest.fail("the block must not run")
    assert error.value.exit_code == 2
    assert "--force" in error.value.fix
    assert "-o" in error.value.fix
    assert (tmp_path / "one" / "report.txt").read_text() == "first"


def test_force_replaces_and_keeps_the_old_one_on_failure(tmp_path):
    write(tmp_path / "one", "first")
    with pytest.raises(ValueError, match="boom"), artefact_folder(tmp_path / "one", force=True):
        raise ValueError("boom")
    assert (tmp_path / "one" / "report.txt").read_text() == "first"
    write(tmp_path / "one", "second", force=True)
    assert (tmp_path / "one" / "report.txt").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def killed_while_writing(path, number):
    code = f"""
        import sys, time
        from megatron_prism.core.files import artefact_folder
        with artefact_folder({str(path)!r}) as folder:
            (folder / "report.txt").write_text("half")
            print("ready", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, number)
    process.communicate(timeout=55)
    return process.returncode


def test_sigterm_unwinds_and_leaves_nothing(tmp_path):
    assert killed_while_writing(tmp_path / "one", signal.SIGTERM) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_kill_9_leaves_no_artefact_and_the_next_run_clears_up(tmp_path):
    assert killed_while_writing(tmp_path / "one", signal.SIGKILL) == -signal.SIGKILL
    assert not (tmp_path / "one").exists()
    assert all(path.name[0] == "." for path in tmp_path.iterdir())
    write(tmp_path / "one")
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("place", ["file/one", "file/deep/one", "locked/one", "locked/deep/one"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path, place, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "locked").mkdir()
    real = os.access  # root may write anywhere
    locked = tmp_path / "locked"
    monkeypatch.setattr(os, "access", lambda p, mode: p != locked and real(p, mode))
    with pytest.raises(UsageError, match="cannot write to"):
        check_free(tmp_path / place)
    check_free(tmp_path / "new" / "deep" / "one")
    assert not (tmp_path / "new").exists()


# -- single files ---------------------------------------------------------------------------------
def test_a_file_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "sub" / "page.html"
    with whole_file(place) as file:
        file.write(b"half")
        assert not place.exists()
    assert place.read_bytes() == b"half"
    with pytest.raises(ValueError, match="boom"), whole_file(place, force=True) as file:  # noqa: PT012
        file.write(b"other")
        raise ValueError("boom")
    assert place.read_bytes() == b"half"
    assert write_whole(place, "ü", force=True).read_bytes() == "ü".encode()
    assert [p.name for p in place.parent.iterdir()] == ["page.html"]


def test_a_file_that_is_there_is_kept_also_if_it_came_meanwhile(tmp_path):
    place = tmp_path / "page.html"
    with pytest.raises(UsageError, match="exists and is not"), whole_file(place) as file:  # noqa: PT012
        place.write_text("theirs")
        file.write(b"ours")
    assert place.read_text() == "theirs"
    with pytest.raises(UsageError, match="exists and is not") as error, whole_file(place):
        pytest.fail("the block must not run")
    assert "--force" in error.value.fix
    with pytest.raises(UsageError, match="is a folder"):
        write_whole(tmp_path, "x", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_device_is_never_replaced_and_a_link_keeps_its_place(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no file"):
        write_whole(tmp_path / "pipe", "x", force=True)
    assert not (tmp_path / "pipe").is_file()
    write_whole(tmp_path / "file", "old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


CLAIM = """
import sys
from megatron_prism.core.files import claimed
with claimed(sys.argv[1], inside=len(sys.argv) > 2):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("inside", [(), ("inside",)])
def test_one_place_has_one_writer(tmp_path, inside):
    """Until it ends, however: a killed one leaves a file that claims nothing."""
    place = tmp_path / "new" / "out"
    words = [sys.executable, "-c", CLAIM, str(place), *inside]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"mine\n"
        with (
            pytest.raises(UsageError, match=rf"process {other.pid} on .* writes {place}"),
            claimed(place, inside=bool(inside)),
        ):
            pytest.fail("the block must not run")
        other.kill()
        other.wait()
    with claimed(place, inside=bool(inside)), claimed(place, inside=bool(inside)):
        pass
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
