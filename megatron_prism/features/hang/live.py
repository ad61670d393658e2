"""Look at a running job on this host: torch's recorders, NCCL's RAS and the stacks of suspects.

In : the processes here that have RANK and WORLD_SIZE in their environment.  Out: a DumpSet of their
Flight Recorders, and what NCCL's RAS says.  Nothing is asked of other hosts, and nothing is written
but the byte with which a recorder is asked for its dump.

A recorder is reached by the worker server of torch (``TORCH_WORKER_SERVER_SOCKET``, a socket in the
file system), else by its pipe (``TORCH_NCCL_DEBUG_INFO_PIPE_FILE``, ProcessGroupNCCL.cpp @2.13): it
then writes the file that it would write after a time-out.

Source: src/ras/client_support.cc @NCCL 2.28 for RAS's protocol, text and JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core import foreign
from megatron_prism.core.errors import DumpError
from megatron_prism.core.world import format_ranks
from megatron_prism.features.hang.consistency import position
from megatron_prism.features.hang.diagnose import diagnose
from megatron_prism.features.hang.dumps import Dump, DumpSet, gather, load, parse
from megatron_prism.features.hang.ras import Ras, parse_ras
from megatron_prism.features.hang.verdict import Diagnosis

_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT_FILE = "/tmp/nccl_trace_rank_"
_RAS = "localhost:28028"
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_HANDLERS = ("dump_nccl_trace_pickle", "fr_trace_json")
_WAIT_S = 10.0  # for an answer
# a peer that never closes must not fill the memory of the user's host
_MAX_BYTES = 1 << 28  # of an answer
# more digits would be no rank, and Python refuses to convert thousands of them
_NUMBER = re.compile(r"\d{1,9}")
_MAX_STACKS = 4  # suspects whose stacks are taken
_MAX_FRAMES = 6  # of a stack that is shown
_MAX_LINES = 8  # of RAS about ranks that are lost, and about ranks that are behind
_MAX_UNREADABLE = 4  # recorders of which the reason is said


@dataclass(frozen=True)
class Worker:
    """A process of the job on this host.

    Attributes:
        rank: Its rank.
        pid: Its process.
        settings: Its environment.
    """

    rank: int
    pid: int
    settings: Mapping[str, str]

    @property
    def reachable(self) -> bool:
        """Whether its recorder can be asked."""
        return _SOCKET in self.settings or _PIPE in self.settings


@dataclass(frozen=True)
class Look:
    """One look at the job.

    Attributes:
        found: Rank -> its process on this host.
        dumps: What the recorders answered.
        ras: What RAS answered, if it did.
        when: Seconds since 1970.
    """

    found: Mapping[int, Worker]
    dumps: DumpSet
    ras: Ras | None
    when: float


def workers(proc: Path = Path("/proc")) -> dict[int, Worker]:
    """Return the processes of the job that has most of them here: rank -> its process.

    Of processes that share an environment it is the oldest, or one whose recorder can be asked.

    Args:
        proc: Where processes are listed.
    """
    jobs: dict[tuple[str | None, ...], dict[int, Worker]] = defaultdict(dict)
    for folder in proc.iterdir():
        worker = _worker(folder)
        if worker is None:
            continue
        # two jobs on one host both have a rank 0: their address tells them apart
        address = worker.settings.get("MASTER_ADDR")
        port = worker.settings.get("MASTER_PORT")
        workers_of_job = jobs[address, port]
        # children of a rank (data loaders) inherit its RANK: the rank itself is older
        previous = workers_of_job.get(worker.rank)
        if previous is None or _preference(worker) > _preference(previous):
            workers_of_job[worker.rank] = worker
    largest_job = max(jobs.values(), key=len, default={})
    return dict(sorted(largest_job.items()))


def _worker(folder: Path) -> Worker | None:
    """Return the process of a folder of /proc; None if it is no rank of a job."""
    if not folder.name.isdigit():
        return None
    try:
        text = (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:  # of another user, or it ended meanwhile
        return None
    settings: dict[str, str] = {}
    for row in text.split("\0"):
        name, separator, value = row.partition("=")
        if separator:
            settings[name] = value
    rank = settings.get("RANK", "")
    size = settings.get("WORLD_SIZE", "")
    if not _NUMBER.fullmatch(rank) or not _NUMBER.fullmatch(size):
        return None
    return Worker(int(rank), int(folder.name), settings)


def _preference(worker: Worker) -> tuple[bool, int]:
    """Order processes of one rank: the one to ask is the largest."""
    return worker.reachable, -worker.pid


def look(ras: str | None = None, proc: Path = Path("/proc")) -> Look:
    """Ask every recorder on this host, and RAS.

    Args:
        ras: A file with what ``ncclras`` printed; None asks the port.
        proc: Where processes are listed.
    """
    worker_of_rank = workers(proc)
    # before the recorders are asked: each may take seconds to answer
    when = time.time()
    dumps: dict[int, Dump] = {}
    unreadable: dict[int, str] = {}
    for rank, worker in worker_of_rank.items():
        try:
            dumps |= gather([(rank, _asked(worker))]).dumps
        # a rank that cannot be asked must not hide the answers of its neighbours
        except (OSError, ValueError, DumpError) as error:
            unreadable[rank] = f"its recorder does not answer: {error}"[:300]
    answer = _ras(worker_of_rank) if ras is None else _recorded_ras(ras)
    return Look(worker_of_rank, DumpSet(dumps, unreadable), answer, when)


def _asked(worker: Worker) -> Dump | DumpError:
    """Return what the recorder of a process answers, by its worker server or by its pipe."""
    if worker.settings.get(_SOCKET):
        return _dump_of_server(worker, worker.settings[_SOCKET])
    if worker.settings.get(_PIPE):
        return _dump_of_pipe(worker, worker.settings[_PIPE])
    raise ValueError(f"neither {_SOCKET} nor {_PIPE} is set")


def _dump_of_server(worker: Worker, path: str) -> Dump:
    """Ask torch's worker server, which has one handler or the other by its release."""
    for handler in _HANDLERS:
        status, data = _post(path, f"/handler/{handler}")
        # a release that lacks this handler answers with another status: the next is asked
        if status == 200:
            dump = parse(data, worker.rank, f"the recorder of process {worker.pid}")
            return dataclasses.replace(dump, written_ns=0)
    raise ValueError("its worker server has no handler for dumps; torch 2.5 and later have")


def _dump_of_pipe(worker: Worker, prefix: str) -> Dump | DumpError:
    """Write a byte into the pipe of a recorder, and read the file that it then writes."""
    file_prefix = _DEFAULT_FILE
    for name in _FILES:
        if name in worker.settings:
            file_prefix = worker.settings[name]
            break
    file = Path(f"{file_prefix}{worker.rank}")
    earlier_ns = _written_ns(file)
    # without O_NONBLOCK this would wait for ever where the recorder's thread has ended
    pipe = os.open(f"{prefix}{worker.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(pipe, b"1\n")
    finally:
        os.close(pipe)

    end = time.monotonic() + _WAIT_S
    # a file of an earlier time-out has the same name and says nothing of now
    while _written_ns(file) == earlier_ns and time.monotonic() < end:
        time.sleep(0.1)
    if _written_ns(file) == earlier_ns:
        raise ValueError(f"no new {file} after {_WAIT_S:g} s")
    time.sleep(0.2)  # it writes in one go
    return load(worker.rank, file)


def _written_ns(file: Path) -> int:
    """Return when a file was written; 0 if it is not there."""
    return file.stat().st_mtime_ns if file.exists() else 0


def _post(path: str, target: str) -> tuple[int, bytes]:
    """Return status and body of an HTTP answer over a socket in the file system."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_WAIT_S)
        sock.connect(path)
        sock.sendall(f"POST {target} HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        data = _received(sock)
    # HTTP/1.0: the server closes behind its answer, so no length has to be read
    head, _, body = data.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.\d (\d{3})", head)
    return (0 if status is None else int(status[1])), body


def _received(sock: socket.socket) -> bytes:
    """Return what the other side sends until it closes the connection."""
    data = bytearray()
    while len(data) < _MAX_BYTES:
        chunk = sock.recv(1 << 20)
        if not chunk:
            break
        data += chunk
    return bytes(data)


# -- RAS ------------------------------------------------------------------------------------------
def _recorded_ras(file: str) -> Ras:
    """Read a file with what ``ncclras`` printed."""
    with foreign.reading(file, "an output of ncclras", "ncclras -v > FILE") as path:
        return parse_ras(foreign.read_bytes(path, _MAX_BYTES).decode(errors="replace"))


def _ras(worker_of_rank: Mapping[int, Worker]) -> Ras | None:
    """Ask NCCL's RAS on this host; None if it does not answer."""
    address = _RAS
    for worker in worker_of_rank.values():
        if "NCCL_RAS_ADDR" in worker.settings:
            address = worker.settings["NCCL_RAS_ADDR"]
            break
    host, _, port = address.rpartition(":")
    # nothing is asked of other hosts
    if not worker_of_rank or not port.isdigit() or host not in _LOCAL_HOSTS:
        return None
    with contextlib.suppress(OSError, ValueError):
        # JSON is known since NCCL 2.28
        for words in ("SET FORMAT json\n", ""):
            with socket.create_connection((host, int(port)), _WAIT_S) as sock:
                sock.settimeout(_WAIT_S)
                sock.sendall(f"CLIENT PROTOCOL 2\nTIMEOUT 5\n{words}VERBOSE STATUS\n".encode())
                text = _received(sock).decode(errors="replace")
            if "ERROR" not in text:
                return parse_ras(text)
    return None


# -- verdict --------------------------------------------------------------------------------------
def judge(before: Look, after: Look) -> Diagnosis:
    """Return the verdict from two looks, by what moved between them.

    Ranks of other hosts left no dump here, which says nothing of them: they are never named.
    """
    evidence = _evidence_of_ras(before, after)
    if before.dumps.dumps and after.dumps.dumps:
        verdict = diagnose(before.dumps, then=after.dumps)
    else:
        verdict = _by_ras(before, after)
    culprits = [culprit.rank for culprit in verdict.culprits]
    # a rank of another host has no dump here because nobody asked it, not because it hangs
    elsewhere = sorted(rank for rank in culprits if rank not in after.found)
    if elsewhere:
        ranks = format_ranks(elsewhere)
        text = f"the waits end at ranks {ranks}, which are not on this host: look there"
        verdict = dataclasses.replace(
            verdict,
            verdict="undetermined",
            culprits=(),
            confidence="possible",
            candidates=tuple(sorted(culprits)),
            evidence=(text, *verdict.evidence),
        )
    if verdict.verdict != "healthy":
        # without a culprit the stacks of the candidates are the best lead
        suspects = [culprit.rank for culprit in verdict.culprits] or verdict.candidates
        suspects_here = [after.found[rank] for rank in suspects if rank in after.found]
        evidence += stacks(suspects_here)
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, *evidence))


def still(before: Look, after: Look) -> bool:
    """Tell whether no rank made a call and no operation was launched between two looks."""
    earlier, later = before.dumps.dumps, after.dumps.dumps
    # a rank that answered once only has nothing to be compared with
    for rank in earlier.keys() & later.keys():
        if position(earlier[rank]) != position(later[rank]):
            return False
    return not _ras_moved(before, after)


def _ras_moved(before: Look, after: Look) -> bool:
    """Tell whether operations were launched between two looks, by RAS."""
    # one reading alone tells no movement
    if before.ras is None or after.ras is None:
        return False
    return before.ras.counts != after.ras.counts


def _evidence_of_ras(before: Look, after: Look) -> list[str]:
    """Say what RAS says of two looks."""
    if after.ras is None:
        return []
    counts = "did not move"
    if before.ras is None:
        counts = "were read once"
    elif _ras_moved(before, after):
        counts = "moved"
    texts = (*after.ras.lost[:_MAX_LINES], *after.ras.behind[:_MAX_LINES])
    return [f"RAS: counts of operations {counts}", *(f"RAS: {text}" for text in texts)]


def _by_ras(before: Look, after: Look) -> Diagnosis:
    """Judge without dumps: RAS tells whether the job moves and who is behind, not who errs."""
    setting = f"TORCH_FR_BUFFER_SIZE=2000 and {_PIPE}=/tmp/nccl_pipe_rank_"
    missing = [f"dumps: no recorder on this host can be asked; next time {setting}"]
    for rank, reason in list(after.dumps.unreadable.items())[:_MAX_UNREADABLE]:
        missing.append(f"rank {rank}: {reason}")
    # RAS alone cannot tell a rank that errs from one that is late, but movement is certain
    if _ras_moved(before, after):
        evidence = ("operations were launched in between",)
        return Diagnosis("healthy", evidence=evidence, missing=tuple(missing))
    rank_of_pid = {worker.pid: worker.rank for worker in after.found.values()}
    late_pids = () if after.ras is None else after.ras.pids
    late_ranks = {rank_of_pid[pid] for pid in late_pids if pid in rank_of_pid}
    return Diagnosis(
        "undetermined",
        confidence="possible",
        missing=tuple(missing),
        candidates=tuple(sorted(late_ranks)),
    )


def stacks(suspects: list[Worker]) -> Iterator[str]:
    """Yield the Python stacks of suspects, if py-spy is installed and may read them."""
    tool = shutil.which("py-spy")
    if not tool:
        return
    for worker in suspects[:_MAX_STACKS]:
        command = [tool, "dump", "--pid", str(worker.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S)
        # a stack is an extra: the verdict stands without it
        except (OSError, subprocess.SubprocessError):
            continue
        # py-spy indents frames by four spaces; lines before them name the process and its thread
        frames = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
        if frames:
            yield f"rank {worker.rank} stands in {' < '.join(frames[:_MAX_FRAMES])}"


def prometheus(verdict: Diagnosis, at: Look) -> str:
    """Write the verdict for node_exporter's textfile collector."""
    is_still = int(verdict.verdict != "healthy")
    text = _gauge("still", "whether nothing moved between two looks", {"": is_still})
    text += _gauge("ranks", "ranks on this host", {"": len(at.found)})
    text += _gauge("waiting", "ranks that wait", {"": len(verdict.victims)})
    text += _gauge("look_seconds", "time of the last look", {"": int(at.when)})
    culprits: dict[str, int] = {}
    for culprit in verdict.culprits:
        culprits[f'{{rank="{culprit.rank}",kind="{culprit.kind}"}}'] = 1
    return text + _gauge("culprit", "who is named", culprits)


def _gauge(name: str, description: str, values: Mapping[str, int]) -> str:
    """Write a gauge of Prometheus; ``values``: labels -> value."""
    lines = [f"# HELP prism_hang_{name} {description}", f"# TYPE prism_hang_{name} gauge"]
    for labels, value in values.items():
        lines.append(f"prism_hang_{name}{labels} {value}")
    return "\n".join(lines) + "\n"
