"""A process that has imported what every rank imports, and forks one for each rank.

``RankTemplate`` starts ``python -m megatron_prism.emulate.rank_template``, which imports torch and
what Megatron imports of others, and then waits.  A request is the command line of a rank with the
files that the rank writes to; the answer is the rank's process number, and later its status.  A
fork runs what ``python -m megatron_prism …`` runs.  Megatron itself is imported by the rank, behind
the patches, which are of one rank.  Without a GPU only: CUDA does not survive a fork.

Requests and answers are JSON, one in a packet.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# What a rank imports before Megatron and with it: a third of the processor time of a small job.
SHARED_MODULES = (
    "torch._dynamo",
    "torch.distributed._tensor",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    "megatron_prism.emulate.launch",
    "megatron_prism.emulate.capture",
    "megatron_prism.emulate.patches",
    "megatron_prism.runtime.recorder.recorder",
)
_MOST_BYTES = 1 << 20  # of a packet
_REAP_S = 0.05  # between two looks for ranks that have ended


class ForkedRank:
    """A rank that a template runs, with what is used of a process of its own."""

    def __init__(self, template: RankTemplate, number: int) -> None:
        self._template, self._number = template, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the status of the rank, negative for a signal; None while it runs."""
        self._template.read_answers(wait=False)
        return self._settle()

    def wait(self) -> int:
        """Wait for the end of the rank; return its status."""
        status = self._settle()
        while status is None:
            self._template.read_answers(wait=True)
            status = self._settle()
        return status

    def kill(self) -> None:
        """End the rank at once; one that has not begun yet ends with the whole template."""
        if self.poll() is not None:
            return
        process = self._template.processes.get(self._number)
        if process is None:
            self._template.close()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def _settle(self) -> int | None:
        """Take over the status that the template has answered, or that of a killed template."""
        self.returncode = self._template.statuses.get(self._number)
        if self.returncode is None and self._template.ended:
            self.returncode = -signal.SIGKILL
        return self.returncode


class RankTemplate:
    """The process, as the one that captures sees it.

    processes : number of a request -> process number of its rank
    statuses  : number of a request -> status of a rank that has ended
    ended     : whether the template is gone, and its ranks with it
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.processes: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self.ended = False
        self._requests = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = "megatron_prism.emulate.rank_template"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *SHARED_MODULES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                preexec_fn=die_with_parent,
            )

    def start(self, words: Sequence[str], events: tuple[str, int], printed: int) -> ForkedRank:
        """Have a rank run.

        Args:
            words: of Python, ``-m megatron_prism run …``.
            events: the environment variable that names the file of a rank's events, and the file.
            printed: the file that it prints to.
        """
        number, self._requests = self._requests, self._requests + 1
        name, file = events
        request = {"number": number, "words": list(words), "events": name}
        try:
            # a command may be longer than a packet: the packet only brings its file
            asked = _as_file(json.dumps(request).encode())
            try:
                socket.send_fds(self._socket, [b"request"], [asked, file, printed])
            finally:
                os.close(asked)
        except OSError:  # it has died
            self.ended = True
        return ForkedRank(self, number)

    def read_answers(self, *, wait: bool) -> None:
        """Take in what the template has answered; ``wait``: for one answer at least."""
        while not self.ended:
            timeout = None if wait else 0
            readable, _, _ = select.select([self._socket], [], [], timeout)
            if not readable:
                return
            packet = b""
            with contextlib.suppress(ConnectionError):
                packet = self._socket.recv(_MOST_BYTES)
            if not packet:
                self.ended = True
                return
            answer = json.loads(packet)
            if "process" in answer:
                self.processes[answer["number"]] = answer["process"]
            else:
                self.statuses[answer["number"]] = answer["status"]
            wait = False

    def close(self) -> None:
        """End the template, and ranks that still run."""
        self._process.kill()
        self._process.wait()
        self.ended = True
        self._socket.close()


def _as_file(content: bytes) -> int:
    """Return a file descriptor of a file in memory that holds ``content``, to be read from its
    beginning.
    """
    descriptor = os.memfd_create("request")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def can_fork() -> bool:
    """Whether this system has what a template needs."""
    return sys.platform == "linux"


def die_with_parent() -> None:
    """Linux: a worker never outlives a killed parent (prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# -- in the template -------------------------------------------------------------------------------
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
    while True:
        readable, _, _ = select.select([requests], [], [], _REAP_S)
        if readable:
            packet, (*files,), _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
            if not packet:
                return
            with open(files.pop(0), encoding="utf-8") as asked:
                request = json.load(asked)
            child = os.fork()
            if not child:
                requests.close()
                _run_rank(request, *files)
            for file in files:
                os.close(file)
            numbers[child] = request["number"]
            _answer(requests, number=request["number"], process=child)
        _reap(requests, numbers)


def _reap(requests: socket.socket, numbers: dict[int, int]) -> None:
    """Answer with the status of every rank that has ended."""
    for process in list(numbers):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            _answer(requests, number=numbers.pop(process), status=code)


def _answer(requests: socket.socket, **fields: int) -> None:
    requests.send(json.dumps(fields).encode())


def _run_rank(request: dict[str, Any], events: int, printed: int) -> None:
    """Be the process of a rank: run its command line, and end with its status."""
    die_with_parent()
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    os.environ[request["events"]] = str(events)
    # ``-m megatron_prism run …``: a rank that starts over executes these words again
    module, *arguments = request["words"][1:]
    sys.orig_argv = [sys.executable, *request["words"]]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
