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

    Attributes:
        counts: (communicator, its rank or the number of ranks) -> operations that were launched.
        behind: Who is late, in words.
        lost: Who does not answer, in words.
        pids: The processes of both.
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
    """Read what ``ncclras -v``, or ``ncclras -f json``, printed.

    Raises:
        ValueError: It is anything else.
    """
    begin = text.find("{\n")
    if begin >= 0 and "communicators" in text[begin:]:
        return _of_json(foreign.value_of_json(text[begin:].strip(), _Status))
    if "Communicators" not in text:
        raise ValueError("it has no line Communicators")
    return _of_text(text)


def _of_json(status: _Status) -> Ras:
    counts: dict[tuple[str, int], int] = {}
    behind: list[str] = []
    lost: list[str] = []
    pids: list[int] = []
    for communicator in status.communicators:
        name = f"of communicator {communicator.hash}"
        launched: dict[int, int] = {}
        for process in communicator.ranks:
            launched[process.rank] = sum(process.collective_counts.values())
        for rank, count in launched.items():
            counts[communicator.hash, rank] = count
        most = max(launched.values(), default=0)
        late = [process for process in communicator.ranks if launched[process.rank] < most]
        # where half of them and more are late, the others are ahead
        if 2 * len(late) >= len(launched):
            late = []
        for process in late:
            text = f"rank {process.rank} {name} launched {launched[process.rank]} operations, "
            behind.append(f"{text}others {most} (process {process.pid} on {process.host})")
            pids.append(process.pid)
        for process in communicator.missing_ranks:
            is_dead = process.status.get("considered_dead")
            state = "is dead" if is_dead else "does not answer"
            text = f"rank {process.rank} {name} {state} "
            lost.append(f"{text}(process {process.pid} on {process.host})")
            pids.append(process.pid)
    return Ras(counts, tuple(behind), tuple(lost), tuple(pids))


_COMMUNICATOR = re.compile(r"#\d+-\d+ \((\w+)\) ([A-Z, ]+)$")
_RANKS_LAUNCHED = re.compile(r"(\d+) ranks? ha\w+ launched up to operation (\d+)")
_RANK_LAUNCHED = re.compile(r"Rank (\d+) has launched up to operation (\d+)")
_MANAGED = re.compile(r"Rank (\d+) -- GPU .* managed by process (\d+) on node (\S+)")
_GONE = re.compile(r"Process (\d+) on node (\S+) managing")


def _of_text(text: str) -> Ras:
    # a rank that launched nothing yet equals one of which nothing is said
    counts: Counter[tuple[str, int]] = Counter()
    behind: list[str] = []
    lost: list[str] = []
    pids: list[int] = []
    communicator = ""
    for line in map(str.strip, text.splitlines()):
        # which communicator the lines below are of
        head = _COMMUNICATOR.match(line)
        if head is not None:
            communicator = head[1]
            continue
        if line in ("DEAD", "INCOMPLETE"):
            communicator = ""
            continue
        # how many operations one rank, or several, launched
        launched = _RANKS_LAUNCHED.match(line) or _RANK_LAUNCHED.match(line)
        if launched is not None:
            counts[communicator, int(launched[1])] = int(launched[2])
            continue
        late = _MANAGED.match(line)
        if late is not None:
            sentence = f"rank {late[1]} of communicator {communicator} launched fewer operations "
            behind.append(f"{sentence}(process {late[2]} on {late[3]})")
            pids.append(int(late[2]))
            continue
        gone = _GONE.match(line)
        if gone is not None:
            sentence = f"process {gone[1]} on {gone[2]} does not answer"
            if sentence not in lost:
                lost.append(sentence)
            pids.append(int(gone[1]))
    return Ras(counts, tuple(behind), tuple(lost), tuple(dict.fromkeys(pids)))
