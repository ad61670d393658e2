"""The process behind a ``RankTemplate``: it forks a rank for every request.

``python -m megatron_prism.emulate.processes.rank_server`` imports what every rank imports.
A fork runs what ``python -m megatron_prism …`` runs, as a rank of its own; Megatron is imported by
the rank, behind the patches.

Ranks of one stock job share more: the fork of the first request (the *job's start*) imports
Megatron and has it read and validate the job's arguments.  There, in front of anything that
depends on its rank, it takes over the requests, and forks every rank, its own too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_prism.emulate.processes.rank_template import MOST_BYTES, die_with_parent

_REAP_S = 0.05  # between two looks for ranks that have ended
_TAKES_OVER = b"t"  # what the job's start tells the process that forked it
OF_A_RANK = ("--prism-ranks", "--prism-capture")  # flags whose values differ between ranks


@dataclass
class _Request:
    """A rank that is asked for.

    Attributes:
        number: of the request.
        words: of Python's command line.
        events_variable: environment variable that names the file of the rank's events.
        shares_start: whether it may be a fork of the job's start.
        periods: of layers that a chunk of the job has; 0: all.
        events: descriptor of the file of its events.
        printed: descriptor of the file that it prints to.
    """

    number: int
    words: list[str]
    events_variable: str
    shares_start: bool
    periods: int
    events: int
    printed: int

    def close(self) -> None:
        """Close the files, which the rank has."""
        os.close(self.events)
        os.close(self.printed)


@dataclass
class _JobStart:
    """What a process knows that starts a job.

    Attributes:
        requests: socket of the requests.
        said: end of a pipe, for the process that forked this one.
        first: the request whose rank it is until it takes over.
    """

    requests: socket.socket
    said: int
    first: _Request

    def say(self, what: bytes) -> None:
        """Tell the process that forked this one how it goes on."""
        os.write(self.said, what)
        os.close(self.said)


_start: _JobStart | None = None  # of this process, until the job's arguments are known


def starts_job() -> bool:
    """Say whether this process starts a job whose ranks are then forked."""
    return _start is not None


def fork_ranks(become: Callable[[list[str], int], None] | None) -> None:
    """Fork the ranks of the job that this process has started; return in each of them.

    In other processes nothing happens.

    Args:
        become: makes this process the rank of a command line, given as ``sys.argv`` is, with so
            many periods of layers in a chunk; None: what has been done is of one rank, so this
            process goes on as its rank.
    """
    global _start
    start, _start = _start, None
    if start is None:
        return
    if become is None:
        # whoever forked this process reads the end of the pipe
        os.close(start.said)
        start.requests.close()
        _refuse_periods(start.first)
        return
    start.say(_TAKES_OVER)
    gc.freeze()  # what is there stays: no rank looks through it
    numbers: dict[int, int] = {}
    request: _Request | None = start.first
    while True:
        if request is not None and not _fork(start.requests, request, numbers):
            start.requests.close()
            _redirect(request)
            # what wrote to the first rank's events writes to those of this rank
            if request.events != start.first.events:
                os.dup2(request.events, start.first.events)
            sys.argv = _with_values(sys.argv, request.words)
            become(sys.argv, request.periods)
            return
        request = None
        if _is_readable(start.requests):
            request = _received(start.requests)
            if request is None:
                os._exit(0)
        _reap(start.requests, numbers)


def _with_values(words: Sequence[str], of_rank: Sequence[str]) -> list[str]:
    """Return ``words`` with the values of a rank's flags as they are in ``of_rank``."""
    changed = list(words)
    for flag in OF_A_RANK:
        if flag in of_rank and flag in changed:
            value = of_rank[of_rank.index(flag) + 1]
            changed[changed.index(flag) + 1] = value
    return changed


def _serve(requests: socket.socket, shared_modules: Sequence[str]) -> None:
    """Fork a rank for every request and tell of its end, until nobody asks any more.

    A fork leaves this function by SystemExit.
    """
    for name in shared_modules:
        # a rank that needs it says why it cannot be imported; others do without
        with contextlib.suppress(Exception):
            import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays: no rank looks through it
    numbers: dict[int, int] = {}  # process number of a rank -> number of its request
    is_first = True
    while True:
        if _is_readable(requests):
            request = _received(requests)
            if request is None:
                return
            if request.shares_start and is_first:
                _start_job(requests, request, numbers)
            elif not _fork(requests, request, numbers):
                requests.close()
                _redirect(request)
                _run_rank(request)
            is_first = False
        _reap(requests, numbers)


def _start_job(requests: socket.socket, request: _Request, numbers: dict[int, int]) -> None:
    """Fork the job's start, and wait until it takes over, goes on alone or ends.

    A process whose requests were taken over ends with the job's start.
    """
    global _start
    heard, said = os.pipe()
    # the job's start may fork ranks: the files of the first stay open
    if not _fork(requests, request, numbers, closes=False):
        os.close(heard)
        _start = _JobStart(requests, said, request)
        _redirect(request, closes=False)
        _run_rank(request, starts_job=True)
    os.close(said)
    request.close()
    what = os.read(heard, 1)
    os.close(heard)
    if what == _TAKES_OVER:
        (process,) = numbers
        os.waitpid(process, 0)
        os._exit(0)


def _is_readable(requests: socket.socket) -> bool:
    """Wait a moment for a request."""
    readable, _, _ = select.select([requests], [], [], _REAP_S)
    return bool(readable)


def _received(requests: socket.socket) -> _Request | None:
    """Receive a request; None where nobody asks any more."""
    packet, (*files,), _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
    # the process that asked has ended
    if not packet:
        return None
    words_file, events, printed = files
    with open(words_file, encoding="utf-8") as asked:
        request: dict[str, Any] = json.load(asked)
    return _Request(
        number=request["number"],
        words=request["words"],
        events_variable=request["events"],
        shares_start=request["shares_start"],
        periods=request["periods"],
        events=events,
        printed=printed,
    )


def _fork(
    requests: socket.socket, request: _Request, numbers: dict[int, int], *, closes: bool = True
) -> int:
    """Fork the process of a request and answer with its number.

    Args:
        requests: gets the answer.
        request: that is answered.
        numbers: gets the process.
        closes: whether this process closes the files of the request.

    Returns:
        The process number; 0 in the fork.
    """
    child = os.fork()
    # the rank itself
    if not child:
        die_with_parent()
        return 0
    if closes:
        request.close()
    numbers[child] = request.number
    _answer(requests, number=request.number, process=child)
    return child


def _reap(requests: socket.socket, numbers: dict[int, int]) -> None:
    """Answer with the status of every rank that has ended."""
    for process in list(numbers):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            _answer(requests, number=numbers.pop(process), status=code)


def _answer(requests: socket.socket, **fields: int) -> None:
    requests.send(json.dumps(fields).encode())


def _redirect(request: _Request, *, closes: bool = True) -> None:
    """Print to the file of a request, and start over with its words.

    Args:
        request: of this process.
        closes: whether the file is not needed any more.
    """
    os.dup2(request.printed, 1)
    os.dup2(request.printed, 2)
    if closes:
        os.close(request.printed)
    # ``-m megatron_prism run …``: a rank that starts over executes these words again
    sys.orig_argv = [sys.executable, *request.words]


def _refuse_periods(request: _Request) -> None:
    """End a rank with few layers that is no fork of a job's start, where layers are chosen."""
    from megatron_prism.emulate.rank import exit_status

    if request.periods:
        exit_status.end_without_estimate("every rank of this job starts by itself")


def _run_rank(request: _Request, *, starts_job: bool = False) -> None:
    """Be the process of a rank: run its command line, and end with its status."""
    os.environ[request.events_variable] = str(request.events)
    if not starts_job:
        _refuse_periods(request)
    module, *arguments = request.words[1:]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    # a rank that imports this module by its name gets this one
    sys.modules["megatron_prism.emulate.processes.rank_server"] = sys.modules["__main__"]
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
