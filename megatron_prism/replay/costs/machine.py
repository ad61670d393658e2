"""Machines: rates and links of GPUs and nodes, one data file each, with their sources.

``machines/*.json`` in this package, or a file of one's own.  Rates are what is reached in practice
(the file's ``source`` says by whom), not the data sheet's, unless the source says so.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import BINARY, parse_limit
from megatron_prism.core.world import World

T = TypeVar("T")


def shipped(folder: Path) -> dict[str, Path]:
    """Name -> file of what comes with the package."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read(name: str | os.PathLike[str], folder: Path, noun: str, kind: type[T]) -> T:
    """The ``kind`` in the file of that name.  UsageError; ``noun`` (a machine) is for people.

    A file has the fields of ``kind``: all that have no default, and no others.
    """
    files = shipped(folder)
    absent = f"use {', '.join(files)}, or a file like those in {folder}"
    fix = f"see those that are shipped: {folder}"
    with foreign.reading(files.get(str(name).lower(), name), noun, fix, absent=absent) as path:
        return foreign.read_json(path, kind, closed=True)


FOLDER = Path(__file__).with_name("machines")
_OF_CARD = 0.97  # of the GiB that a card is sold with, at least
Rate = foreign.Positive
RateOrNone = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]  # 0: there is none


@dataclass(frozen=True)
class Machine:
    """One kind of node and the network between nodes.

    gpus_per_node   : ranks 0 … n-1 are on the first node, and so on; a node is what NVLink joins;
                      of a job whose slices say how many ranks a host has: ``with_nodes_of``
    generation      : of the GPU, for NCCL's limits: volta, ampere, hopper, blackwell
    link            : between GPUs of a node: nvlink or pcie
    flops           : dtype -> dense matrix flops per second that large products reach; tf32 is
                      what tensor cores make of fp32 operands, fp32 what is computed without them;
                      fused attention and attention_backward may have entries of their own (bf16)
    memory_rate     : bytes per second of device memory that elementwise kernels reach
    kernel_ns       : what the shortest kernel takes, launch gap included
    link_rate       : bytes per second per GPU and direction inside a node (bus bandwidth)
    nvls_rate       : the same of all-reduces in the NVLink switch; 0 if it has none or it is off
    network_rate    : bytes per second per GPU and direction between nodes; 0 if there is no network
    call_ns         : of a call, beyond what NCCL says: the streams that wait for each other
    peak            : dense bf16 flops per second of the data sheet, which MFU is a share of; 0 if
                      nobody said
    peaks           : dtype -> the same of jobs that compute in tf32 or fp32
    host_index      : of its hosts (``prism calibrate --host``), times as long as the reference
                      host; 0 if nobody measured one
    oversubscription : of ``network=fat-tree``: bandwidth below a leaf switch over that upwards; 0:
                      nobody said
    leaf_nodes      : nodes below a leaf switch of the network; 0 if nobody said
    device_memory   : bytes that the driver says a GPU has (torch.cuda.mem_get_info's total); 0 if
                      nobody said
    gpus_per_host   : where NVLink joins several hosts: GPUs of one; 0: a node is one host
    host_rate       : bytes per second of copies between a GPU and its host; 0: of PCI Express
    ops             : its table of measured kernels (``kernels``), a name or a file; "" if none
    calls           : likewise its table of calls inside a node, as ``prism calibrate`` writes one
    """

    name: str
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    generation: Literal["volta", "ampere", "hopper", "blackwell"]
    link: Literal["nvlink", "pcie"]
    flops: dict[str, Rate]
    memory_rate: Rate
    kernel_ns: foreign.PositiveInt
    link_rate: Rate
    nvls_rate: RateOrNone
    network_rate: RateOrNone
    call_ns: foreign.PositiveInt
    source: str
    ops: str = ""
    calls: str = ""
    peak: RateOrNone = 0.0
    peaks: dict[str, Rate] = field(default_factory=dict)
    host_index: RateOrNone = 0.0
    oversubscription: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    leaf_nodes: foreign.Natural = 0
    device_memory: foreign.Natural = 0
    gpus_per_host: foreign.Natural = 0
    host_rate: RateOrNone = 0.0


def machines() -> dict[str, Path]:
    """Name -> file of every machine that comes with the package."""
    return shipped(FOLDER)


def machine(name: str | os.PathLike[str]) -> Machine:
    """The machine of that name or in that file.  UsageError says what is wrong with it."""
    node = read(name, FOLDER, "a machine", Machine)
    # rates of other dtypes default to this one
    if "bf16" not in node.flops:
        raise UsageError(f"machine {name}: flops has no bf16", fix='"flops": {"bf16": 6e14}')
    return node


def device_limit(text: str, own: Machine | None = None) -> tuple[int, str]:
    """(bytes of device memory, what they are).

    ``80GB`` is what the driver says that a card sold as 80 GB has, a percent less than 80 GiB: that
    of ``own``, else of a shipped machine.  Other sizes are exact and nobody's ("").  UnitError for
    what is no size.
    """
    num_bytes = parse_limit(text)
    sold = re.fullmatch(r"\s*(\d+)\s*GB?\s*", text)
    if not sold:
        return num_bytes, ""
    sold_bytes = int(sold[1]) * BINARY["GiB"]
    candidates: Iterable[Machine] = map(machine, machines())
    if own is not None:
        candidates = itertools.chain([own], candidates)
    for candidate in candidates:
        if _OF_CARD * sold_bytes < candidate.device_memory <= sold_bytes:
            return candidate.device_memory, f"what a card sold as {sold[1]} GB has"
    return num_bytes, ""


def usable_memory(
    limit: int | str | None, own: Machine | None = None, headroom: int = 0
) -> tuple[int, str]:
    """Return the bytes of device memory that a job may use, and whose they are.

    Args:
        limit: bytes, or as typed; None: what ``own`` has.
        own: the machine of the job, if it is known.
        headroom: bytes that stay free.

    Raises:
        UsageError: nobody says how much memory there is, or headroom leaves nothing of it.
    """
    if isinstance(limit, int):
        num_bytes, source = limit, ""
    elif limit is not None:
        num_bytes, source = device_limit(limit, own)
    elif own is not None and own.device_memory:
        num_bytes, source = own.device_memory, own.name
    else:
        name = "the job's machine"
        if own is not None:
            name = own.name
        raise UsageError(f"nobody says how much memory {name} has", fix="--limit 80GB")
    if headroom >= max(num_bytes, 1):
        raise UsageError("headroom leaves nothing of the limit", fix="--limit 80GB --headroom 4GiB")
    return num_bytes - headroom, source


def with_nodes_of(node: Machine, world: World) -> Machine:
    """The machine with nodes of as many ranks as the launcher of ``world`` starts on each; NVLink
    joins as many hosts as before, and none of these gets more ranks than it has GPUs.
    """
    ranks = world.gpus_per_node
    if ranks is None:
        return node
    # NVLink joins several hosts
    gpus_per_host = node.gpus_per_host
    if gpus_per_host:
        ranks = min(ranks, gpus_per_host)
        num_hosts = node.gpus_per_node // gpus_per_host
        return replace(node, gpus_per_node=num_hosts * ranks, gpus_per_host=ranks)
    return replace(node, gpus_per_node=ranks)


def named_in(text: str) -> str | None:
    """The shipped machine whose GPU the text names: NVIDIA H200 is h200; None if it names none."""
    words = text.lower().replace(",", " ").split()
    return next((name for name in machines() if name.partition("_")[0] in words), None)


_DEFAULT = "h200"


def default_machine(device: str, hardware: str) -> str:
    """The machine of programs that were measured on ``device`` and are meant for ``hardware``.

    UsageError where they contradict each other, and for hardware of which no rates are known.
    """
    measured, meant = named_in(device), named_in(hardware)
    if measured and meant and measured != meant:
        message = f"the segments were measured on {device}, and the job is meant for {hardware}"
        fix = f"--machine {measured} for the former, and moved={meant} with it for the latter"
        raise UsageError(message, fix=fix)
    if not measured and not meant and hardware.upper() not in ("", "CPU"):
        message = f"the job is meant for {hardware} (hardware.name), whose rates are not known"
        fix = f"--machine {_DEFAULT} as if it were that ({', '.join(machines())}), or a FILE"
        raise UsageError(message, fix=fix)
    return measured or meant or _DEFAULT
