"""Machines: rates and links of GPUs and nodes, one data file each, with their sources.

``machines/*.json`` in this package, or a file of one's own.  Rates are what is reached in practice
(the file's ``source`` says by whom), not the data sheet's, unless the source says so.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_prism.core import files
from megatron_prism.core.errors import UsageError

__all__ = ["Machine", "machine", "machines", "named_in", "read"]


Row = dict[str, Any]  # an object of JSON: whoever reads it checks what there is


def shipped(folder: Path) -> dict[str, Path]:
    """Name -> file of what comes with the package."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read(
    name: str | os.PathLike[str],
    folder: Path,
    what: str,
    fields: Collection[str],
    optional: Collection[str] = (),
) -> tuple[Path, Row]:
    """The file of that name, and its ``fields``: all of them but ``optional`` ones, and no others.

    UsageError says what is wrong; ``what`` it is (a machine) is for people.
    """
    known = shipped(folder)
    path = known.get(str(name), Path(name))
    try:
        found = files.read_json(path)
    except OSError as error:
        raise UsageError(
            f"there is no {what} {name}: {error.strerror}",
            fix=f"use {', '.join(known)}, or a JSON file",
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}", fix=f"see costs/{folder.name}/") from error
    given = set(found) if isinstance(found, dict) else set()
    wrong = sorted((given ^ set(fields)) - (set(fields) & set(optional)))
    if wrong:
        raise UsageError(
            f"{path}: {', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or unknown",
            fix=f"a {what} has {', '.join(sorted(fields))}",
        )
    return path, found


FOLDER = Path(__file__).with_name("machines")
_WORDS = {"generation": ("volta", "ampere", "hopper", "blackwell"), "link": ("nvlink", "pcie")}
_MAY_LACK = ("nvls_rate", "network_rate", "peak", "host_index", "leaf_nodes")


@dataclass(frozen=True)
class Machine:
    """One kind of node and the network between nodes.

    gpus_per_node   : ranks 0 … n-1 are on the first node, and so on; a node is what NVLink joins
    generation      : of the GPU, for NCCL's limits: volta, ampere, hopper, blackwell
    link            : between GPUs of a node: nvlink or pcie
    flops           : dtype -> dense matrix flops per second that large products reach; fused
                      attention and attention_backward may have entries of their own (bf16)
    memory_rate     : bytes per second of device memory that elementwise kernels reach
    kernel_ns       : what the shortest kernel takes, launch gap included
    link_rate       : bytes per second per GPU and direction inside a node (bus bandwidth)
    nvls_rate       : the same of all-reduces in the NVLink switch; 0 if it has none or it is off
    network_rate    : bytes per second per GPU and direction between nodes; 0 if there is no network
    call_ns         : of a call, beyond what NCCL says: the streams that wait for each other
    peak            : dense bf16 flops per second of the data sheet, which MFU is a share of; 0 if
                      nobody said
    host_index      : of its hosts (``prism calibrate --host``), times as long as the reference
                      host; 0 if nobody measured one
    leaf_nodes      : nodes below a leaf switch of the network; 0 if nobody said
    ops             : its table of measured kernels (``kernels``), a name or a file; "" if none
    """

    name: str
    gpus_per_node: int
    generation: str
    link: str
    flops: dict[str, float]
    memory_rate: float
    kernel_ns: int
    link_rate: float
    nvls_rate: float
    network_rate: float
    call_ns: int
    source: str
    ops: str = ""
    peak: float = 0.0
    host_index: float = 0.0
    leaf_nodes: int = 0


def machines() -> dict[str, Path]:
    """Name -> file of every machine that comes with the package."""
    return shipped(FOLDER)


def machine(name: str | os.PathLike[str]) -> Machine:
    """The machine of that name or in that file.  UsageError says what is wrong with it."""
    known = [field.name for field in dataclasses.fields(Machine)]
    path, fields = read(name, FOLDER, "machine", known, ("ops", "peak", "host_index", "leaf_nodes"))
    for key, value in fields.items():
        if (wrong := _wrong(key, value)) is not None:
            raise UsageError(f"{path}: {key} is {json.dumps(value)[:60]}", fix=wrong)
    return Machine(**fields)


def named_in(text: str) -> str | None:
    """The shipped machine whose GPU the text names: NVIDIA H200 is h200; None if it names none."""
    words = text.lower().replace(",", " ").split()
    return next((name for name in machines() if name.partition("_")[0] in words), None)


def _wrong(key: str, value: object) -> str | None:
    """What ``key`` should be like, if ``value`` is not."""
    if key in ("name", "source", "ops"):
        return None if isinstance(value, str) else "a name, a source and a table's name are text"
    if key == "flops":
        good = isinstance(value, dict) and "bf16" in value and all(map(_positive, value.values()))
        return None if good else 'write positive rates, at least that of bf16: {"bf16": 6e14}'
    if key in _WORDS:
        return None if value in _WORDS[key] else f"one of {', '.join(_WORDS[key])}"
    if not _positive(value) and not (key in _MAY_LACK and value == 0):
        return "rates and times are positive numbers"
    whole = key in ("gpus_per_node", "leaf_nodes") or key.endswith("_ns")
    return "a whole number" if whole and not isinstance(value, int) else None


def _positive(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 < value < 1e30  # no NaN, no Infinity either
