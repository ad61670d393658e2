"""Commands that capture slices, show and check them."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.small_slices import TP, store_in

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.slices import assemble, open_programs

HAS_MEGATRON = bool(importlib.util.find_spec("megatron"))


@pytest.fixture
def folder(tmp_path):
    store_in(tmp_path / "slices")
    return str(tmp_path / "slices")


def prism(*words, capsys):
    status = cli.main(words)
    return status, *capsys.readouterr()


def test_show_ops_of_ranks(folder, capsys):
    status, out, _ = prism("show", folder, "--rank", "5", "--group", TP, capsys=capsys)
    assert status == 0
    assert "captured as rank 4" in out.partition("\n")[0]
    assert len(out.splitlines()) == 2
    assert (
        prism("show", folder, "--rank", "5", "--group", "tp", capsys=capsys)[1] == out
    )  # as in faults
    status, out, _ = prism("show", folder, "--rank", "0", "--around", "0F", capsys=capsys)
    assert out.startswith("rank 0")
    assert len(out.splitlines()) == 4


def test_show_as_text_is_what_all_commands_read(folder, tmp_path, capsys):
    _, out, _ = prism("show", folder, "--text", capsys=capsys)
    (tmp_path / "w.txt").write_text(out)
    assert open_programs(tmp_path / "w.txt") == open_programs(folder)
    assert prism("check", str(tmp_path / "w.txt"), capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "nowhere"], "cannot read nowhere"),
        (["show", "FOLDER", "--rank", "9"], "0 to 7"),
        (["show", "FOLDER", "--rank", "0", "--text"], "--text is all of them"),
        (["show", "FOLDER", "--rank", "0", "--group", "NO_SUCH"], TP),
        (["show", "FOLDER", "--group", "NO_SUCH"], "--rank 0 --group"),
        (["show", "FOLDER", "--rank", "0", "--around", "7F"], "rank 0 has no step 7F"),
        (["capture", "tiny-gpt_1cpu"], "fix: -o DIR"),
        (["capture", "tiny-gpt_1cpu", "-o", "FOLDER"], "is a slice of another job"),
    ],
)
def test_bad_usage_is_status_2_with_a_fix(folder, words, says, capsys):
    if words[0] == "capture" and not HAS_MEGATRON:
        pytest.skip("needs megatron-core")
    words = [folder if word == "FOLDER" else word for word in words]
    status, out, err = prism(*words, capsys=capsys)
    assert status == 2
    assert not out or words[0] == "capture"  # its workers look into the folder
    assert says in err
    assert "fix: " in err


# the last stage has almost all layers, so that the first is finished long before it
UNEVEN = """
    prism.tier=meta transformer_impl=local data_path=null train_iters=1
    global_batch_size=4 micro_batch_size=1 world_size=2 pp=2
    hidden_size=32 ffn_hidden_size=64 seq_length=16 num_layers=41
    decoder_first_pipeline_num_layers=1 decoder_last_pipeline_num_layers=40
""".split()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.megatron
@pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core")
def test_a_killed_capture_goes_on_where_it_was(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["capture", "tiny-gpt_1cpu", *UNEVEN, "-o", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_prism", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first, second = out / "slice-000000.prism", out / "slice-000001.prism"
    deadline = time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert first.exists()
    assert not second.exists()
    assert not (out / "world.prism").exists()
    before = first.stat()
    with pytest.raises(ProgramError, match="stages 1 have no slice"):
        assemble(out)
    status, shown, talked = prism(*words, capsys=capsys)
    assert status == 0, talked
    assert "1 slice there already" in shown + talked
    assert "rank 1:" in shown + talked
    assert "rank 0:" not in shown + talked
    after = first.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert second.exists()
    assert prism("check", str(out), capsys=capsys)[0] == 0
    status, shown, talked = prism(*words, capsys=capsys)  # nothing is left to do
    assert (status, "2 slices there already" in shown + talked) == (0, True)
    other = [*words, "lr=0.001"]
    status, _, talked = prism(*other, capsys=capsys)
    assert (status, "of another job: lr 0.003 there, 0.001 here" in talked) == (2, True)
    assert first.stat().st_ino == before.st_ino
