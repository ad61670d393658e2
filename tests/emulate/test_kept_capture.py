"""A folder of slices knows what it was captured from: the same capture again only reads it."""

import errno
import io
import os

import pytest
from rich.console import Console

from megatron_prism.cli import job_slices
from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.core.world import World
from megatron_prism.emulate.capture import kept_capture
from megatron_prism.emulate.jobs import script_job
from megatron_prism.emulate.jobs.script_job import Job
from megatron_prism.emulate.processes import workers


class FakeCapture:
    """Captures of a job of one rank; its worker is a fake that writes a slice and imports a file.

    files    : what a rank imports
    started  : ranks that ran, of all captures
    refuses  : whether a rank finds that a slice that is there is of another job
    """

    def __init__(self, place, monkeypatch):
        self.folder, self.started = place / "slices", []
        self.imported = place / "model.py"
        self.imported.write_text("layers = 2")
        self.data = place / "text.bin"
        self.data.write_text("tokens")
        self.words = ["train.py", "--data-path", str(place / "text")]
        self.force = self.refuses = False
        monkeypatch.setattr(workers, "run", self._run)

    def _run(self, tasks, console, at_once):
        store = SliceStore(self.folder, World(1), {"arguments": "same"})
        results = []
        for task in tasks:
            self.started.append(task.rank)
            if self.refuses and store.path(task.rank).exists():
                error = PrismError("rank 0: a slice of another job")
                error.exit_code = 2
                raise error
            if not store.path(task.rank).exists():
                store.put(Program.from_ops(task.rank, [Op("compute", ns=1)]))
            files = [str(self.imported)]
            results.append({"rank": task.rank, "said": "", "peak": None, "files": files})
        return results

    def ask(self):
        """Return how many ranks start for the capture, and what it prints."""
        before, talk = len(self.started), io.StringIO()
        job = Job(tuple(self.words), (), World(1), "meta")
        console = Console(file=talk, width=200)
        script_job.capture(job, self.folder, [0], console, force=self.force)
        return len(self.started) - before, talk.getvalue()


@pytest.fixture
def capture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return FakeCapture(tmp_path, monkeypatch)


def test_the_same_question_starts_no_rank(capture):
    assert capture.ask()[0] == 1
    started, printed = capture.ask()
    assert started == 0
    assert "1 slice of this very job, read as they are" in printed


def _other_word(capture, monkeypatch):
    capture.words += ["--lr", "1"]


def _variable(capture, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")


def _source(capture, monkeypatch):
    capture.imported.write_text("layers = 3  # longer")


def _data(capture, monkeypatch):
    capture.data.write_text("more tokens")


def _appears(capture, monkeypatch):
    (capture.folder.parent / "text.idx").write_text("an index")


def _slice_touched(capture, monkeypatch):
    os.utime(capture.folder / "slice-000000.prism", ns=(1, 1))


def _elsewhere(capture, monkeypatch):
    folder = capture.folder.parent / "other"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other_word, "--lr of the command"),
        (_variable, "NVTE_FLASH_ATTN in the environment"),
        (_source, "model.py changed"),
        (_data, "text.bin changed"),
        (_appears, "text.idx changed"),
        (_slice_touched, "slice-000000.prism changed"),
        (_elsewhere, "it was typed in"),
    ],
)
def test_whatever_may_change_a_slice_starts_a_rank_and_is_named(capture, change, says, monkeypatch):
    capture.ask()
    change(capture, monkeypatch)
    started, printed = capture.ask()
    assert started == 1
    assert says in printed


def test_a_terminal_is_no_part_of_the_question(capture, monkeypatch):
    capture.ask()
    for name in ("COLUMNS", "SSH_TTY", "OLDPWD", "TERM"):
        monkeypatch.setenv(name, "other")
    assert capture.ask()[0] == 0


def test_a_changed_source_is_named_until_the_slices_are_captured_anew(capture, monkeypatch):
    capture.ask()
    _source(capture, monkeypatch)
    assert capture.ask()[0] == 1  # the arguments are the same, so the old slice is kept
    started, printed = capture.ask()
    assert started == 1
    assert "model.py changed" in printed
    capture.force = True
    assert capture.ask()[0] == 1
    capture.force = False
    assert capture.ask()[0] == 0


def test_a_folder_that_does_not_say_or_is_damaged_is_compared_by_a_rank(capture):
    capture.ask()
    record = capture.folder / ".captured"
    record.write_text(record.read_text()[:40])
    assert capture.ask()[0] == 1
    record.unlink()
    (capture.folder / "world.prism").unlink()
    assert capture.ask()[0] == 1


def test_values_of_variables_are_not_kept(capture, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    capture.ask()
    text = (capture.folder / ".captured").read_text()
    assert "WANDB_API_KEY" in text
    assert "0123456789abcdef" not in text


def test_files_that_a_process_imported_are_its_own_and_megatron_s():
    files = kept_capture.imported_files()
    assert kept_capture.__file__ in files
    assert io.__file__ not in files
    assert os.__file__ not in files


def test_slices_of_a_job_with_the_same_iterations_are_copied_and_compared(capture, tmp_path):
    capture.ask()
    first = (capture.folder / "slice-000000.prism").read_bytes()
    capture.folder = tmp_path / "longer"
    capture.words += ["--train-iters", "9", "--save", str(tmp_path / "checkpoints")]
    started, printed = capture.ask()
    assert started == 1  # which compares the job's arguments
    assert "slices: no iteration depends on --save, --train-iters" in printed
    assert "1 slice there already" in printed
    assert (capture.folder / "slice-000000.prism").read_bytes() == first
    assert capture.ask()[0] == 0


def test_a_copy_that_breaks_off_leaves_no_folder(capture, tmp_path, monkeypatch):
    capture.ask()
    capture.folder = tmp_path / "longer"
    capture.words += ["--train-iters", "9"]

    def breaks(source, target):
        with open(target, "w") as file:
            file.write("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_capture.shutil, "copyfile", breaks)
    with pytest.raises(OSError, match="No space left"):
        kept_capture.copy_slices(tmp_path / "slices", capture.folder)
    assert not capture.folder.exists()
    started, printed = capture.ask()
    assert started == 1
    assert "slices cannot be copied: [Errno 28] No space left on device" in printed
    assert "there already" not in printed


def test_an_answer_does_not_need_what_cannot_be_kept(capture, monkeypatch):
    def refused(folder, record):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(kept_capture, "_write", refused)
    started, printed = capture.ask()
    assert started == 1
    assert printed.count("not kept") == 1
    assert "was captured from: Permission denied" in printed


def test_a_line_that_cannot_be_kept_is_said(tmp_path, capsys):
    (tmp_path / ".line").mkdir()
    job_slices.keep_line(tmp_path, ["torchrun", "train.py"])
    said = capsys.readouterr()
    assert "the line is not kept" in " ".join((said.out + said.err).split())


def test_an_option_that_changes_iterations_is_named_where_all_ranks_run(capture, tmp_path):
    capture.ask()
    capture.folder = tmp_path / "other"
    capture.words += ["--train-iters", "9", "--seq-length", "16"]
    started, printed = capture.ask()
    assert started == 1
    assert "captured anew        --seq-length: not as in slices" in printed
    assert "there already" not in printed


def test_a_job_of_many_other_options_is_no_neighbour(capture, tmp_path):
    capture.ask()
    capture.folder = tmp_path / "other"
    for name in ("seq-length", "num-layers", "hidden-size", "vocab-size", "ffn-hidden-size"):
        capture.words += [f"--{name}", "16"]
    started, printed = capture.ask()
    assert started == 1
    assert "captured anew" not in printed


def test_copied_slices_go_where_the_arguments_turn_out_to_differ(capture, tmp_path):
    capture.ask()
    capture.folder, capture.refuses = tmp_path / "longer", True
    capture.words += ["--train-iters", "9"]
    started, printed = capture.ask()
    assert started == 2  # one that compares, and one that is captured
    assert "no iteration depends on" in printed
    assert "there already" not in printed


def test_a_neighbour_of_changed_files_is_not_looked_at(capture, tmp_path, monkeypatch):
    capture.ask()
    _source(capture, monkeypatch)
    capture.folder = tmp_path / "longer"
    capture.words += ["--train-iters", "9"]
    assert "copied" not in capture.ask()[1]


def test_a_comparison_does_not_make_slices_those_of_another_environment(capture, monkeypatch):
    """The rank that compares looks at arguments alone, so each question compares."""
    capture.ask()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    for _ in range(2):
        started, printed = capture.ask()
        assert started == 1
        assert "NVTE_FLASH_ATTN in the environment" in printed


def test_slices_that_an_interrupted_capture_left_are_of_nobody_knows_what(capture):
    capture.ask()
    (capture.folder / ".captured").unlink()
    capture.imported.write_text("layers = 3")
    for _ in range(2):
        assert capture.ask()[0] == 1
