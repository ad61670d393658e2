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

_SOCKET, _PIPE = "TORCH_WORKER_SERVER_SOCKET", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_RAS = "localhost:28028"
_HANDLERS = ("dump_nccl_trace_pickle", "fr_trace_json")
_WAIT_S, _MOST = 10.0, 1 << 28  # for an answer; bytes of one
_STACKS = 4  # suspects whose stacks are taken


@dataclass(frozen=True)
class Worker:
    """A process of the job on this host."""

    rank: int
    pid: int
    settings: Mapping[str, str]  # its environment

    @property
    def reachable(self) -> bool:
        """Whether its recorder can be asked."""
        return _SOCKET in self.settings or _PIPE in self.settings


@dataclass(frozen=True)
class Look:
    """One look at the job."""

    found: Mapping[int, Worker]
    dumps: DumpSet
    ras: Ras | None
    when: float  # seconds since 1970


def workers(proc: Path = Path("/proc")) -> dict[int, Worker]:
    """rank -> its process: the oldest of those that share its environment, of the job that has most
    processes here.
    """
    jobs: dict[tuple[str | None, ...], dict[int, Worker]] = defaultdict(dict)
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # of another user, or it ended meanwhile
            rows = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            settings = dict(row.partition("=")[::2] for row in rows if "=" in row)
            rank, size = settings.get("RANK", ""), settings.get("WORLD_SIZE", "")
            if re.fullmatch(r"\d{1,9}", rank) and re.fullmatch(r"\d{1,9}", size):
                worker = Worker(int(rank), int(folder.name), settings)
                found = jobs[settings.get("MASTER_ADDR"), settings.get("MASTER_PORT")]
                older = found.get(worker.rank)
                if older is None or (older.reachable, -older.pid) < (worker.reachable, -worker.pid):
                    found[worker.rank] = worker
    return dict(sorted(max(jobs.values(), key=len, default={}).items()))


def look(ras: str | None = None, proc: Path = Path("/proc")) -> Look:
    """Ask every recorder on this host, and RAS.

    Args:
        ras: a file with what ``ncclras`` printed; None asks the port.
        proc: where processes are listed.
    """
    found, when = workers(proc), time.time()
    dumps = dict[int, Dump]()
    unreadable = dict[int, str]()
    for rank, worker in found.items():
        try:
            dumps |= gather([(rank, _asked(worker))]).dumps
        except (OSError, ValueError, DumpError) as error:
            unreadable[rank] = f"its recorder does not answer: {error}"[:300]
    return Look(found, DumpSet(dumps, unreadable), _ras(found, ras), when)


def _asked(worker: Worker) -> Dump | DumpError:
    where = f"the recorder of process {worker.pid}"
    if path := worker.settings.get(_SOCKET):
        for handler in _HANDLERS:
            status, data = _get(path, f"/handler/{handler}")
            if status == 200:
                return dataclasses.replace(parse(data, worker.rank, where), written_ns=0)
        raise ValueError("its worker server has no handler for dumps; torch 2.5 and later have")
    if prefix := worker.settings.get(_PIPE):
        names = (worker.settings[name] for name in _FILES if name in worker.settings)
        file = Path(next(names, "/tmp/nccl_trace_rank_") + str(worker.rank))
        before, pipe = _written(file), os.open(f"{prefix}{worker.rank}.pipe", os.O_WRONLY | 2048)
        try:
            os.write(pipe, b"1\n")
        finally:
            os.close(pipe)
        end = time.monotonic() + _WAIT_S
        while _written(file) == before and time.monotonic() < end:
            time.sleep(0.1)
        if _written(file) == before:
            raise ValueError(f"no new {file} after {_WAIT_S:g} s")
        time.sleep(0.2)  # it writes in one go
        return load(worker.rank, file)
    raise ValueError(f"neither {_SOCKET} nor {_PIPE} is set")


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _get(path: str, target: str) -> tuple[int, bytes]:
    """(status, body) of an HTTP answer over a socket in the file system."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_WAIT_S)
        sock.connect(path)
        sock.sendall(f"POST {target} HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        data = _all(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.\d (\d{3})", head)
    return (int(status[1]) if status else 0), body


def _all(sock: socket.socket) -> bytes:
    data = bytearray()
    while (more := sock.recv(1 << 20)) and len(data) < _MOST:
        data += more
    return bytes(data)


# -- RAS ------------------------------------------------------------------------------------------
def _ras(found: Mapping[int, Worker], recorded: str | None) -> Ras | None:
    if recorded is not None:
        with foreign.reading(recorded, "an output of ncclras", "ncclras -v > FILE") as path:
            return parse_ras(foreign.read_bytes(path, _MOST).decode(errors="replace"))
    given = next((w.settings["NCCL_RAS_ADDR"] for w in found.values()
                  if "NCCL_RAS_ADDR" in w.settings), _RAS)  # fmt: skip
    host, _, port = given.rpartition(":")
    if not found or not port.isdigit() or host not in ("localhost", "127.0.0.1", "::1"):
        return None  # nothing is asked of other hosts
    with contextlib.suppress(OSError, ValueError):
        for words in ("SET FORMAT json\n", ""):  # known since NCCL 2.28
            with socket.create_connection((host, int(port)), _WAIT_S) as sock:
                sock.settimeout(_WAIT_S)
                sock.sendall(f"CLIENT PROTOCOL 2\nTIMEOUT 5\n{words}VERBOSE STATUS\n".encode())
                text = _all(sock).decode(errors="replace")
            if "ERROR" not in text:
                return parse_ras(text)
    return None


# -- verdict --------------------------------------------------------------------------------------
def judge(before: Look, after: Look) -> Diagnosis:
    """The verdict from two looks, by what moved between them.

    Ranks of other hosts left no dump here, which says nothing of them: they are never named.
    """
    said = _said_by_ras(before, after)
    if before.dumps.dumps and after.dumps.dumps:
        verdict = diagnose(before.dumps, then=after.dumps)
    else:
        verdict = _by_ras(before, after)
    elsewhere = [c for c in verdict.culprits if c.rank not in after.found]
    if elsewhere:
        others = format_ranks(sorted(c.rank for c in elsewhere))
        text = f"the waits end at ranks {others}, which are not on this host: look there"
        verdict = dataclasses.replace(
            verdict, verdict="undetermined", culprits=(), confidence="possible",
            candidates=tuple(sorted(c.rank for c in verdict.culprits)),
            evidence=(text, *verdict.evidence),
        )  # fmt: skip
    suspects = [c.rank for c in verdict.culprits] or list(verdict.candidates)
    if verdict.verdict != "healthy":
        said += list(stacks([after.found[r] for r in suspects if r in after.found]))
    return dataclasses.replace(verdict, evidence=(*verdict.evidence, *said))


def still(before: Look, after: Look) -> bool:
    """Whether no rank made a call and no operation was launched between two looks."""
    was, now = before.dumps.dumps, after.dumps.dumps
    moved = any(position(was[r]) != position(now[r]) for r in was.keys() & now.keys())
    return not moved and not _ras_moved(before, after)


def _ras_moved(before: Look, after: Look) -> bool:
    ras, was = after.ras, before.ras
    return ras is not None and was is not None and ras.counts != was.counts


def _said_by_ras(before: Look, after: Look) -> list[str]:
    if after.ras is None:
        return []
    text = "did not move" if before.ras is not None else "were read once"
    text = "moved" if _ras_moved(before, after) else text
    return [f"RAS: counts of operations {text}", *(f"RAS: {line}" for line in after.ras.lost[:8]),
            *(f"RAS: {line}" for line in after.ras.behind[:8])]  # fmt: skip


def _by_ras(before: Look, after: Look) -> Diagnosis:
    """Without dumps: RAS tells whether the job moves and who is behind, not who is to blame."""
    missing = ["dumps: no recorder on this host can be asked; next time TORCH_FR_BUFFER_SIZE=2000 "
               f"and {_PIPE}=/tmp/nccl_pipe_rank_"]  # fmt: skip
    missing += [f"rank {r}: {why}" for r, why in list(after.dumps.unreadable.items())[:4]]
    if _ras_moved(before, after):
        return Diagnosis("healthy", evidence=("operations were launched in between",),
                         missing=tuple(missing))  # fmt: skip
    ranks = {w.pid: w.rank for w in after.found.values()}
    pids = after.ras.pids if after.ras is not None else ()
    late = tuple(sorted({ranks[pid] for pid in pids if pid in ranks}))
    return Diagnosis("undetermined", confidence="possible", missing=tuple(missing),
                     candidates=late)  # fmt: skip


def stacks(suspects: list[Worker]) -> Iterator[str]:
    """The Python stacks of suspects, if py-spy is installed and may read them."""
    tool = shutil.which("py-spy")
    for worker in suspects[:_STACKS] if tool else ():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([str(tool), "dump", "--pid", str(worker.pid)],
                                  capture_output=True, text=True, timeout=_WAIT_S)  # fmt: skip
            rows = [line.strip() for line in done.stdout.splitlines() if line.startswith("    ")]
            if rows:
                yield f"rank {worker.rank} stands in {' < '.join(rows[:6])}"


def prometheus(verdict: Diagnosis, at: Look) -> str:
    """The verdict for node_exporter's textfile collector."""
    culprits = [(f'{{rank="{c.rank}",kind="{c.kind}"}}', 1) for c in verdict.culprits]
    text = ""
    for name, what, values in (
        ("still", "whether nothing moved between two looks",
         [("", int(verdict.verdict != "healthy"))]),
        ("ranks", "ranks on this host", [("", len(at.found))]),
        ("waiting", "ranks that wait", [("", len(verdict.victims))]),
        ("look_seconds", "time of the last look", [("", int(at.when))]),
        ("culprit", "who is named", culprits),
    ):  # fmt: skip
        text += f"# HELP prism_hang_{name} {what}\n# TYPE prism_hang_{name} gauge\n"
        text += "".join(f"prism_hang_{name}{labels} {value}\n" for labels, value in values)
    return text
