"""Read a calibration from the output of nccl-tests: text of any release since 2.0, or JSON.

In : files as people have them.  Out: rows of a calibration, and where they are from.  The text is
read by its own header line, so columns may differ; the collective is what the program says it is,
else what the file is called, and must agree with the ratio of its two bandwidths.  Times are those
out of place.  A file that is something else, measured the host's time, found wrong results or says
what another one denies is refused by name.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.collectives import BY_NAME

_PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "exchange",
}
_PROGRAM = re.compile(rf"(?<![a-z])({'|'.join(sorted(_PROGRAMS, key=len, reverse=True))})_perf")
_RANK = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
_AGREE = 1.25  # times of the same call may differ by that: runs on one machine do
_MOST_BYTES = 1 << 24
_EXAMPLE = "all_reduce_perf -b 16K -e 1G -f 2 -g 8 > all_reduce_perf.txt"


@dataclass(frozen=True)
class NcclTestsRun:
    """One program's figures.

    op       : our name; sendrecv is ``exchange``, a pair that sends both ways
    ranks    : of one group; per_node : of them on one host
    rows     : (bytes as nccl-tests counts them, us)
    device, version : of the GPUs and of NCCL, "" if the file does not say
    """

    path: str
    op: str
    ranks: int
    per_node: int
    rows: tuple[tuple[int, float], ...]
    device: str = ""
    version: str = ""


def read(path: str | Path) -> NcclTestsRun:
    """UsageError says what the file is instead."""
    with foreign.reading(path, "output of nccl-tests", _EXAMPLE):
        text = foreign.read_bytes(path, _MOST_BYTES).decode("utf-8", errors="replace")
        is_json = text.lstrip().startswith("{")
        run = _json(str(path), text) if is_json else _text(str(path), text)
        # a run that was cut prints a head and no results
        if not run.rows:
            raise ValueError("it has no line of results: did the run end early?")
        return run


def _text(path: str, text: str) -> NcclTestsRun:
    """Read what nccl-tests prints; ValueError where it is not that."""
    lines = text.splitlines()
    ranks = [match for match in map(_RANK.match, lines) if match]
    if not ranks:
        raise ValueError("no line '#  Rank  0 … on HOST device …'")
    columns: list[str] = []
    rows: list[tuple[int, float, float, float]] = []
    for line in lines:
        words = line.split()
        # the head of the table, which says what its columns are
        if words[:2] == ["#", "size"]:
            columns = words[1:]
            if "cputime" in columns:
                raise ValueError("it has the host's time (-C), not the device's")
            continue
        # a row: as many words as columns, of which the first is a size
        is_whole = bool(columns) and len(words) >= len(columns)
        if is_whole and re.fullmatch(r"[0-9]{1,18}", words[0]):
            rows.append(_row(columns, words, line))
    # of several groups of ranks the first is read
    hosts = [match[2] for match in ranks if match[1] in (None, "0")]
    device = ranks[0][3].strip()
    named_version = re.search(r"nccl-library=(\d+)|NCCL version (\S+)", text)
    version = ""
    if named_version:
        version = named_version[1] or named_version[2]
    return _checked(path, f"{path}\n{text}", hosts, rows, device, version)


def _row(columns: list[str], words: list[str], line: str) -> tuple[int, float, float, float]:
    """(bytes, us, algbw, busbw) out of place."""
    if "time" not in columns[:-3]:
        raise ValueError(f"its columns are {' '.join(columns)[:200]}")
    # four columns out of place, then the same four in place
    place = columns.index("time")
    us, algorithm, bus, *rest = words[place:]
    num_wrong = rest[0] if rest else "N/A"
    # up to 2.12 that column is the largest difference from the right result, not a count
    if columns[place + 3] == "#wrong" and num_wrong not in ("N/A", "0"):
        raise ValueError(f"its results are wrong ({num_wrong} elements): {line.strip()}")
    return int(words[0]), float(us), float(algorithm), float(bus)


class _Device(msgspec.Struct):
    hostname: str
    group: int = 0
    device_info: str = ""


class _Config(msgspec.Struct):
    devices: Annotated[list[_Device], msgspec.Meta(min_length=1)]


class _Figures(msgspec.Struct):
    time: float
    alg_bw: float
    bus_bw: float
    nwrong: float | None = None
    cpu_time: object = None


class _Result(msgspec.Struct):
    size: foreign.Natural
    out_of_place: _Figures | None = None
    in_place: _Figures | None = None


class _Stored(msgspec.Struct):
    config: _Config
    results: list[_Result]
    args: list[str] = []
    nccl_version: str | int = ""


def _json(path: str, text: str) -> NcclTestsRun:
    """Read what nccl-tests writes as JSON; ValueError where it is not that."""
    stored = foreign.value_of_json(text, _Stored, strict=False)
    rows = []
    for result in stored.results:
        # out of place, where that was run
        timing = result.out_of_place or result.in_place
        if timing is None:
            raise ValueError(f"{result.size} bytes have no time")
        # with -C it is the time of the host, which does not wait for the call
        if timing.cpu_time is not None:
            raise ValueError("it has the host's time (-C), not the device's")
        if timing.nwrong:
            raise ValueError(f"its results are wrong ({timing.nwrong:g} elements)")
        rows.append((result.size, timing.time, timing.alg_bw, timing.bus_bw))
    hosts = [device.hostname for device in stored.config.devices if device.group == 0]
    return _checked(
        path,
        f"{' '.join(stored.args[:1])}\n{path}",
        hosts,
        rows,
        stored.config.devices[0].device_info,
        str(stored.nccl_version),
    )


def _checked(
    path: str,
    command: str,
    hosts: list[str],
    rows: Iterable[tuple[int, float, float, float]],
    device: str,
    version: str,
) -> NcclTestsRun:
    """The run, if it can be what it says; ``command`` and the file's name say the collective."""
    # the program's name is in the command, or in the file's name
    names = {_PROGRAMS[name] for name in _PROGRAM.findall(command)}
    fix = "one file per program, called all_reduce_perf.txt or alike"
    if not names:
        raise ValueError(f"it does not say which collective it is; {fix}")
    if len(names) > 1:
        raise ValueError(f"it names several collectives; {fix}")
    (op,) = names
    ranks = len(hosts)
    if ranks < 2:
        raise ValueError("it ran on one GPU, which has nobody to talk to")
    times_of_size = dict[int, list[float]]()
    for num_bytes, us, algorithm, bus in rows:
        # less than an element for each rank: nccl-tests rounds the size down to 0
        if num_bytes <= 0:
            continue
        if not 0 < us < 1e12:
            raise ValueError(f"{num_bytes} bytes take {us} us")
        _check_ratio(op, ranks, algorithm, bus)
        times_of_size.setdefault(num_bytes, []).append(us)
    # out of place and in place, or several runs, must agree
    for num_bytes, times in times_of_size.items():
        if max(times) > _AGREE * min(times):
            raise ValueError(f"{num_bytes} bytes take {min(times)} us and {max(times)} us")
    medians: list[tuple[int, float]] = []
    for num_bytes, times in sorted(times_of_size.items()):
        medians.append((num_bytes, statistics.median(times)))
    ranks_of_host = Counter(hosts)
    per_node = max(ranks_of_host.values())
    return NcclTestsRun(path, op, ranks, per_node, tuple(medians), device, version)


def _check_ratio(op: str, ranks: int, algorithm: float, bus: float) -> None:
    """ValueError if the bandwidths are another collective's; small ones are rounded too much."""
    if op == "exchange" or algorithm < 1 or bus < 1:
        return
    expected = BY_NAME[op].wire_bytes(1_000_000, ranks) / 1_000_000
    if abs(bus / algorithm - expected) > 0.03 * expected:
        ratio = f"{bus / algorithm:.3f}, that of {op} among {ranks} is {expected:.3f}"
        raise ValueError(f"busbw / algbw is {ratio}")


def calibration(runs: Iterable[NcclTestsRun], node_gpus: int | None = None) -> dict[str, object]:
    """What ``read_calibration`` reads.  ``node_gpus``: of one NVLink domain, if hosts are smaller.

    UsageError for runs that contradict each other.
    """
    # (collective, ranks, of them on a node, bytes) -> (us, file)
    times: dict[tuple[str, int, int, int], tuple[float, str]] = {}
    sources: dict[str, None] = {}
    for run in runs:
        sources[_device_and_version(run)] = None
        ranks = run.ranks
        per_node = min(run.ranks, node_gpus or run.per_node)
        # sendrecv runs in a ring, in which each message is between two
        if run.op == "exchange":
            ranks = 2
            per_node = min(per_node, 2)
        for num_bytes, us in run.rows:
            key = (run.op, ranks, per_node, num_bytes)
            first_us, path = times.setdefault(key, (us, run.path))
            if max(us, first_us) > _AGREE * min(us, first_us):
                raise UsageError(
                    f"{path} and {run.path} contradict each other: {run.op} of {num_bytes:,} bytes "
                    f"among {ranks}: {first_us:g} us and {us:g} us",
                    fix=f"run both again on idle GPUs ({_EXAMPLE}), or give one of them",
                )
    rows = []
    for (op, ranks, per_node, num_bytes), (us, _) in sorted(times.items()):
        size: dict[str, object] = {"op": op, "ranks": ranks, "per_node": per_node}
        rows.append({**size, "bytes": num_bytes, "ns": round(us * 1e3)})
    named_sources = ", ".join(filter(None, sources))
    source = f"nccl-tests: {named_sources or 'of unknown GPUs'}"
    return {"format": 1, "source": source, "collectives": rows}


def _device_and_version(run: NcclTestsRun) -> str:
    """Return ``NVIDIA H200 NCCL 2.28.9``, without what the run does not say."""
    words = []
    if run.device:
        words.append(run.device)
    if run.version:
        words.append(f"NCCL {run.version}")
    return " ".join(words)
