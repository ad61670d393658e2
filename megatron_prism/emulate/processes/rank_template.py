"""A process that has imported what every rank imports, and forks one for each rank.

``RankTemplate`` starts ``python -m megatron_prism.emulate.processes.rank_server``, which imports
torch and what Megatron imports of others, and then waits.  A request is the command line of a rank
with the files that the rank writes to; the answer is the rank's process number, and later its
status.  Without a GPU only: CUDA does not survive a fork.

Requests and answers are JSON, one in a packet.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

# What a rank imports before Megatron and with it: a third of the processor time of a small job.
SHARED_MODULES = (
    "torch._dynamo",
    "torch.distributed._tensor",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    "megatron_prism.emulate.rank.launch",
    "megatron_prism.emulate.capture.capture",
    "megatron_prism.emulate.patches",
    "megatron_prism.runtime.recorder.recorder",
)
MOST_BYTES = 1 << 20  # of a packet
_END_S = 0.5  # that a template has for its end
_SERVER = "megatron_prism.emulate.processes.rank_server"


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
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(theirs.fileno()), *SHARED_MODULES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                preexec_fn=die_with_parent,
            )

    def start(
        self,
        words: Sequence[str],
        events: tuple[str, int],
        printed: int,
        *,
        shares_start: bool = False,
        periods: int = 0,
    ) -> ForkedRank:
        """Have a rank run.

        Args:
            words: of Python, ``-m megatron_prism run …``.
            events: the environment variable that names the file of a rank's events, and the file.
            printed: the file that it prints to.
            shares_start: whether all ranks are of one job, so that they may be forks of a process
                that has started it.
            periods: of layers that a chunk of the job has; 0: all.
        """
        number, self._requests = self._requests, self._requests + 1
        name, file = events
        request = {
            "number": number,
            "words": list(words),
            "events": name,
            "shares_start": shares_start,
            "periods": periods,
        }
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
                packet = self._socket.recv(MOST_BYTES)
            # it has died
            if not packet:
                self.ended = True
                return
            answer = json.loads(packet)
            # a rank was started, or has ended
            if "process" in answer:
                self.processes[answer["number"]] = answer["process"]
            else:
                self.statuses[answer["number"]] = answer["status"]
            # one answer is enough: more are read if they are there
            wait = False

    def close(self) -> None:
        """End the template, and ranks that still run."""
        self._socket.close()
        # it ends when nobody asks any more, unless it still imports
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.ended = True


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
