"""Ranks that are forks of one process behave as processes of their own."""

import dataclasses
import io
import os
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT
from rich.console import Console

from megatron_prism.cli.main import main
from megatron_prism.core.errors import NotTrainedError
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.processes import rank_server, rank_template, workers
from megatron_prism.emulate.rank import launch
from megatron_prism.emulate.rank.session import Run

pytestmark = pytest.mark.skipif(not rank_template.can_fork(), reason="needs Linux")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that makes tasks of a module, of which each says how it is started."""
    monkeypatch.setattr(rank_template, "SHARED_MODULES", ())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def tasks(code, count=2):
        (tmp_path / "rank_code.py").write_text(
            "import os, sys, time\n"
            "from megatron_prism.emulate.processes.workers import emitter\n"
            f"emit, rank = emitter(), int(sys.argv[1])\n{code}\n"
        )
        words = [("-m", "rank_code", str(rank)) for rank in range(count)]
        return [workers.RankTask(n, f"rank {n}", line, forks=True) for n, line in enumerate(words)]

    return tasks


def run(tasks):
    return workers.run(tasks, Console(file=io.StringIO()), 2)


TELL = "emit('result', result={'rank': rank, 'parent': os.getppid(), 'orig': sys.orig_argv})"


def test_ranks_are_forks_of_one_process_that_is_gone_afterwards(program):
    results = run(program(TELL, count=3))
    assert [result["rank"] for result in results] == [0, 1, 2]
    parents = {result["parent"] for result in results}
    assert len(parents) == 1
    assert os.getpid() not in parents
    assert results[1]["orig"] == [sys.executable, "-m", "rank_code", "1"]
    with pytest.raises(ProcessLookupError):
        os.kill(parents.pop(), 0)


def test_a_rank_alone_is_a_process_of_its_own(program):
    assert run(program(TELL, count=1))[0]["parent"] == os.getpid()


def test_a_rank_that_fails_is_named_with_what_it_printed_and_ends_the_others(program, tmp_path):
    code = f"""
if rank == 1:
    print('why it failed')
    raise SystemExit(7)
open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid()))
time.sleep(60)
"""
    start = time.monotonic()
    with pytest.raises(NotTrainedError, match="rank 1 failed.*status 7") as raised:
        run(program(code))
    assert "why it failed" in str(raised.value)
    assert time.monotonic() - start < 50
    other = tmp_path / "pid"
    if other.exists() and other.read_text():
        with pytest.raises(ProcessLookupError):
            os.kill(int(other.read_text()), 0)


def test_a_rank_that_is_killed_is_told_from_one_that_ends(program):
    with pytest.raises(NotTrainedError, match="status -9"):
        run(program("os.kill(os.getpid(), 9)"))


def test_a_rank_may_start_over_as_a_new_program(program):
    code = """
if 'AGAIN' not in os.environ:
    os.environ['AGAIN'] = '1'
    os.set_inheritable(int(os.environ['PRISM_WORKER_EVENTS']), True)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
emit('result', result={'rank': rank, 'again': os.environ['AGAIN']})
"""
    assert run(program(code)) == [{"rank": 0, "again": "1"}, {"rank": 1, "again": "1"}]


STARTED = """
import socket
from megatron_prism.emulate.processes import rank_server
before = os.getpid()
rank_server.fork_ranks({become})
emit('result', result={{'rank': rank, 'words': sys.argv, 'began': before, 'process': os.getpid()}})
"""


def started(program, become, count=3):
    tasks = []
    for task in program(STARTED.format(become=become), count):
        words = [*task.words, "--prism-ranks", str(task.rank)]
        tasks.append(dataclasses.replace(task, words=words, shares_start=True))
    return run(tasks)


def test_ranks_of_a_job_are_forks_of_the_process_that_started_it(program):
    results = started(program, "lambda argv, periods: None")
    # the start ran once, as the first rank; each rank is a process of its own behind it
    assert len({result["began"] for result in results}) == 1
    assert len({result["process"] for result in results}) == 3
    assert [result["words"][-1] for result in results] == ["0", "1", "2"]


def test_a_job_whose_start_is_of_one_rank_is_started_for_each(program):
    results = started(program, None)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["began"] == result["process"] for result in results)


@pytest.mark.parametrize("become", [None, "lambda *_: exit_status.end_without_estimate('why')"])
def test_a_rank_that_ends_without_an_estimate_is_not_judged_as_a_job(program, become):
    """A job that has started and not trained would else be an error."""
    watched = f"""
from megatron_prism.core.errors import NotTrainedError
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.rank import exit_status
from megatron_prism.emulate.rank.session import Session
exit_status.at_good_end(lambda: NotTrainedError("it did not train"), Session().changes)
{STARTED.format(become=become)}"""
    (task,) = program(watched, 1)
    words = [*task.words, "--prism-ranks", "0"]
    short = dataclasses.replace(task, words=words, shares_start=True, periods=1)
    results = run([short, dataclasses.replace(short, periods=2)])
    reason = "why" if become else "every rank of this job starts by itself"
    assert results == [{"no_estimate": reason}] * 2


def test_a_start_that_fails_is_the_failure_of_the_first_rank(program):
    with pytest.raises(NotTrainedError, match="(?s)rank 0 failed.*no arguments"):
        started(program, "exec(\"raise SystemExit('no arguments')\")")


@TRAINING
@pytest.mark.slow
def test_slices_of_forks_are_those_of_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = ["--num-layers", "2", "--pipeline-model-parallel-size", "2"]
    ours = ["--prism-tier", "meta", "--prism-world-size", "4"]
    words = ["capture", *ours, "-o", "forks", "--", str(SCRIPT), *JOB, *layers]
    assert main(words) == 0
    monkeypatch.setattr(workers, "can_fork", lambda: False)
    words[words.index("forks")] = "processes"
    assert main(words) == 0
    for rank in (0, 2):
        name = f"slice-{rank:06d}.prism"
        assert (tmp_path / "forks" / name).read_bytes() == (
            tmp_path / "processes" / name
        ).read_bytes()


def test_a_process_that_starts_no_job_for_others_keeps_what_it_claims(monkeypatch):
    """Another run into the same slice would else not be refused."""
    options = SimpleNamespace(ranks_share_start=True)
    run = SimpleNamespace(options=options, claims=Mock())
    monkeypatch.setattr(job_arguments, "parsed", lambda: SimpleNamespace())
    assert launch._becoming(run, Mock()) is None
    assert not run.claims.close.called

    # a fork claims its own slice with what is closed at the end of the process
    monkeypatch.setattr(rank_server, "starts_job", lambda: True)
    monkeypatch.setattr(launch, "_share_answers", lambda configs: None)
    assert launch._becoming(run, Mock()) is not None
    run.claims.close.assert_called_once_with()
    claiming = Run(Mock(), Mock(), Mock())
    claims = claiming.claims
    claiming.forget_listeners()
    assert claiming.claims is claims
