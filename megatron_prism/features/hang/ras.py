"""Read what NCCL's RAS reports: how many operations each rank launched, who is late or gone.

Source: src/ras/client_support.cc @NCCL 2.28, text and JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from megatron_prism.core import foreign


@dataclass(frozen=True)
class Ras:
    """What NCCL's RAS says.

    counts: (communicator, its rank or the number of ranks) -> operations that were launched;
    behind, lost: what is late or does not answer, in words; pids: the processes of both
    """

    counts: Mapping[tuple[str, int], int]
    behind: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()


class _Process(msgspec.Struct):
    rank: int
    host: str = ""
    pid: int = -1
    collective_counts: dict[str, int] = {}
    status: dict[str, int | bool] = {}


class _Communicator(msgspec.Struct):
    hash: str = ""
    ranks: list[_Process] = []
    missing_ranks: list[_Process] = []


class _Status(msgspec.Struct):
    communicators: list[_Communicator]


def parse_ras(text: str) -> Ras:
    """What ``ncclras -v``, or ``ncclras -f json``, printed.  ValueError for anything else."""
    begin = text.find("{\n")
    if begin >= 0 and "communicators" in text[begin:]:
        return _of_json(foreign.value_of_json(text[begin:].strip(), _Status))
    if "Communicators" not in text:
        raise ValueError("it has no line Communicators")
    return _of_text(text)


def _of_json(status: _Status) -> Ras:
    counts: dict[tuple[str, int], int] = {}
    behind, lost, pids = list[str](), list[str](), list[int]()
    for comm in status.communicators:
        here = {p.rank: sum(p.collective_counts.values()) for p in comm.ranks}
        counts |= {(comm.hash, rank): count for rank, count in here.items()}
        last = max(here.values(), default=0)
        late = [p for p in comm.ranks if here[p.rank] < last]
        for p in late if 2 * len(late) < len(here) else ():
            behind.append(f"rank {p.rank} of communicator {comm.hash} launched {here[p.rank]} "
                          f"operations, others {last} (process {p.pid} on {p.host})")  # fmt: skip
            pids.append(p.pid)
        for p in comm.missing_ranks:
            word = "is dead" if p.status.get("considered_dead") else "does not answer"
            lost.append(f"rank {p.rank} of communicator {comm.hash} {word} "
                        f"(process {p.pid} on {p.host})")  # fmt: skip
            pids.append(p.pid)
    return Ras(counts, tuple(behind), tuple(lost), tuple(pids))


_COMM = re.compile(r"#\d+-\d+ \((\w+)\) ([A-Z, ]+)$")
_LAUNCHED = re.compile(r"(\d+) ranks? ha\w+ launched up to operation (\d+)|"
                       r"Rank (\d+) has launched up to operation (\d+)")  # fmt: skip
_MANAGED = re.compile(r"Rank (\d+) -- GPU .* managed by process (\d+) on node (\S+)")
_GONE = re.compile(r"Process (\d+) on node (\S+) managing")


def _of_text(text: str) -> Ras:
    counts: Counter[tuple[str, int]] = Counter()
    behind, lost, pids, comm = list[str](), list[str](), list[int](), ""
    for line in map(str.strip, text.splitlines()):
        if (head := _COMM.match(line)) is not None:
            comm = head[1]
        elif line in ("DEAD", "INCOMPLETE"):
            comm = ""
        elif (found := _LAUNCHED.match(line)) is not None:
            one = found[3] is not None
            counts[comm, int(found[3] if one else found[1])] = int(found[4] if one else found[2])
        elif (found := _MANAGED.match(line)) is not None:
            behind.append(f"rank {found[1]} of communicator {comm} launched fewer operations "
                          f"(process {found[2]} on {found[3]})")  # fmt: skip
            pids.append(int(found[2]))
        elif (found := _GONE.match(line)) is not None:
            said = f"process {found[1]} on {found[2]} does not answer"
            lost += [said] * (said not in lost)
            pids.append(int(found[1]))
    return Ras(counts, tuple(behind), tuple(lost), tuple(dict.fromkeys(pids)))
