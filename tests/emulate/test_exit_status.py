"""A process that was told to emulate and would end well without Megatron fails; no other does."""

import subprocess
import sys
import types

import pytest

from megatron_prism.core.errors import NotTrainedError
from megatron_prism.emulate.rank import exit_status, launch
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.emulate.rank.session import Session

ATTACH = "import os, sys, types, megatron_prism\nmegatron_prism.attach()\n"
SAYS = "nothing trained: neither this program nor one that it started"


def run(tmp_path, code, *words, script=True):
    """A process of ``code`` that attaches as ``import torch`` would, but imports no torch."""
    (tmp_path / "job.py").write_text(ATTACH + code)
    start = [str(tmp_path / "job.py")] if script else ["-c", ATTACH + code]
    return subprocess.run(
        [sys.executable, *start, *words], capture_output=True, text=True, timeout=60, check=False
    )


TRAINS = """
from megatron_prism.emulate.rank import exit_status, session
exit_status.at_good_end(lambda: None, session.Session().changes)
exit_status.trained()
"""
STARTS = "import subprocess\nsubprocess.run([sys.executable, '-c', {!r}], check=True)\n"


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "os._exit(0)"])
def test_a_script_that_never_imports_megatron_fails(tmp_path, ending):
    done = run(tmp_path, "print('bye', flush=True)\n" + ending, "--prism-emulate")
    assert (done.returncode, done.stdout) == (1, "bye\n")
    assert SAYS in done.stderr
    assert "fix: " in done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(3)", 3),
        ("os._exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise ValueError('no data')", 1),
        ("sys.modules['megatron_prism.emulate.rank.launch'] = sys", 0),  # attached, so judged there
        ("if os.fork() == 0: sys.exit(0)\nassert os.wait()[1] == 0; sys.exit(4)", 4),
    ],
)
def test_only_a_job_that_would_end_well_is_judged(tmp_path, code, status):
    done = run(tmp_path, code, "--prism-emulate")
    assert done.returncode == status
    assert SAYS not in done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (STARTS.format("sum(range(10 ** 8))"), 1),  # worked for long, and trained nothing
        (STARTS.format(TRAINS), 0),
        (STARTS.format(ATTACH + STARTS.format(TRAINS)), 0),
        ("if os.fork() == 0:\n from megatron_prism.emulate.rank import exit_status\n"
         " exit_status.trained(); os._exit(0)\nos.wait()", 0),
    ],
)  # fmt: skip
def test_a_launcher_ends_well_if_something_below_it_trained(tmp_path, monkeypatch, code, status):
    # a folder of its own: tests beside this one leave marks in the machine's
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run(tmp_path, code, "--prism-emulate")
    assert (done.returncode, SAYS in done.stderr) == (status, status == 1), done.stderr
    assert not [*tmp_path.glob("prism-trained-*")]


def test_workers_of_multiprocessing_are_not_the_job(tmp_path):
    code = """
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    sys.exit(7 + child.exitcode)  # its own status is no question here
"""
    done = run(tmp_path, code, "--prism-emulate")
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("words", [[], ["--prism-mem-update"]])
def test_without_the_flag_nothing_is_watched(tmp_path, words):
    code = "assert not [m for m in sys.modules if m.startswith('megatron_prism.emulate')]"
    done = run(tmp_path, code, *words)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_line_that_is_no_script_is_no_job(tmp_path):
    done = run(tmp_path, "", "--prism-emulate", script=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def verdict(monkeypatch):
    """(monitor, what is asked at a good end)."""
    checks, monitor = [], TrainingMonitor()
    monkeypatch.setattr(exit_status, "at_good_end", lambda check, *_: checks.append(check))
    launch._arrange_verdict(monitor, Session())
    return monitor, checks[0]


def settings():
    return types.SimpleNamespace(train_iters=1, iteration=0)


def test_a_script_that_never_calls_pretrain_is_told_so(verdict, monkeypatch, capsys):
    monitor, asked = verdict
    monkeypatch.setattr(sys, "argv", ["tools/preprocess_data.py"])  # PRISM_ARGS alone
    assert asked() is None
    assert "trains nothing" in capsys.readouterr().err
    sys.argv.append("--prism-emulate")
    assert "without calling Megatron's pretrain()" in str(asked())


def test_a_script_that_swallows_our_verdict_does_not_end_well(verdict):
    monitor, asked = verdict
    with pytest.raises(NotTrainedError) as raised, monitor.training(settings):
        pass
    assert asked() is raised.value


def test_a_script_that_swallows_a_failure_of_pretrain_does_not_end_well(verdict):
    monitor, asked = verdict
    with pytest.raises(MemoryError), monitor.training(settings):
        raise MemoryError
    assert "pretrain() failed" in str(asked())


def test_a_trained_script_ends_well(verdict):
    monitor, asked = verdict
    with monitor.training(settings), monitor.iteration(None, []):
        pass
    assert asked() is None


ATTACHED = """
from megatron_prism.emulate.rank import exit_status, monitor, launch, session
launch._arrange_verdict(m := monitor.TrainingMonitor(), session.Session())
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("try: sys.exit(3)\nexcept SystemExit: pass", 3),
        ("try: sys.exit('no data')\nexcept SystemExit: pass", 1),
        ("m.iterations.append(monitor.Iteration(1))\ntry: sys.exit(3)\nexcept SystemExit: pass", 0),
    ],
)
def test_a_caught_exit_does_not_hide_that_nothing_trained(tmp_path, code, status):
    assert run(tmp_path, ATTACHED + code).returncode == status


def test_a_script_that_hides_our_flags_is_told_how_to_pass_them(tmp_path):
    code = "sys.argv = sys.argv[:1]\nimport megatron"
    done = run(tmp_path, code, "--prism-emulate")
    assert done.returncode == 2
    assert "PRISM_ARGS" in done.stderr
