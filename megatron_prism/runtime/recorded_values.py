"""Record values of a real run that steer sizes, and replay them to a rank that runs alone.

``ValueRecorder`` watches a run in which all ranks are local and keeps, for one rank, what steers
sizes: the integer results of its all-gathers (MoE token counts) and its own routing decisions.
``ValueReplayer`` gives them back to that rank alone, in the same order in each iteration, so that a
run may begin with any of them.  Payloads are not kept: they steer no size.

File ``rank-NNNNNN.npz`` in the recording's folder: a JSON header (format, world, rank, the job's
arguments) and one array per value.  Replay refuses another format, world, rank or arguments.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import whole_file
from megatron_prism.core.jobs import job_settings
from megatron_prism.runtime.listeners import CountsIterations

if TYPE_CHECKING:
    from megatron_prism.runtime.process_group import PrismGroup

FORMAT = 3
_MEMBERS = re.compile(r"(?:\d{1,12} )?(gather|route) .*#\d{1,9}", re.DOTALL)
_LARGEST = 1 << 16  # elements: token counts are far smaller, activations far larger


def _steers(op: str, outs: Sequence[torch.Tensor]) -> bool:
    """Whether a collective's result is a control value."""
    return op == "all_gather" and all(
        not t.is_floating_point() and t.dtype != torch.uint8 and t.numel() <= _LARGEST for t in outs
    )


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:06d}.npz"


class ValueRecorder(CountsIterations):
    """Collects control values of this process; ``save`` writes them when the run has trained.

    header : what must match at replay, besides the format (world, rank); the job's arguments
             follow with ``is_of``
    """

    def __init__(self, folder: Path, rank: int, header: Mapping[str, object]) -> None:
        self.folder, self.rank, self.header = folder, rank, {**header}
        self._values: dict[str, list[np.ndarray]] = defaultdict(list)

    def is_of(self, arguments: str) -> None:
        """The job's arguments are known now."""
        self.header["arguments"] = arguments

    def observe(
        self, group: PrismGroup, op: str, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """Called by the backend after each answer (which has arrived: the backend waits)."""
        if group.size() > 1 and _steers(op, outs):
            flat = torch.cat([t.detach().reshape(-1).to(torch.int64) for t in outs])
            self._values[f"{self.iteration} gather {group.desc}"].append(flat.cpu().numpy())

    def route(self, layer: int, routing: torch.Tensor) -> torch.Tensor:
        """Keep a routing map ``[tokens, experts]`` (bool), packed; returns it unchanged."""
        packed = np.packbits(routing.detach().cpu().numpy().astype(bool), axis=-1)
        self._values[f"{self.iteration} route {layer}"].append(packed)
        return routing

    def finished(self) -> None:
        self.save()

    def save(self) -> None:
        """Write the file, all or nothing."""
        arrays = {}
        for key, values in self._values.items():
            for turn, value in enumerate(values):
                arrays[f"{key}#{turn}"] = value
        text = json.dumps({"format": FORMAT, "rank": self.rank, **self.header})
        head = np.frombuffer(text.encode(), dtype=np.uint8)
        with whole_file(_file(self.folder, self.rank), force=True) as file:
            np.savez_compressed(file, head=head, **arrays)  # type: ignore[arg-type]


_ANOTHER = "record this very job, or use --prism-values mirror"


def check_header(file: Path, header: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """UsageError if a recording's head ``header`` is not that of this run."""
    for key, value in wanted.items():
        if header.get(key) != value:
            message = f"{file} was recorded with {key} {header.get(key)}, this run has {value}"
            raise UsageError(message, fix=_ANOTHER)


def check_arguments(file: Path, recorded: str | None, arguments: str) -> None:
    """UsageError, which names what differs, if a recording is of a job with other arguments."""
    if differ := job_settings.differences("arguments", recorded, arguments):
        raise UsageError(f"{file} was recorded of another job: {'; '.join(differ)}", fix=_ANOTHER)


class ValueReplayer(CountsIterations):
    """Gives a recording back, value by value; what it does not hold stays mirrored, and is counted.

    Raises UsageError for a missing, truncated or foreign file, and for another run's recording.
    """

    def __init__(self, folder: Path, rank: int, header: Mapping[str, object]) -> None:
        self.missing = self.replayed = 0
        self._values: dict[str, deque[np.ndarray]] = {}
        file = _file(folder, rank)
        fix = "record again with --prism-record"
        absent = f"record it first: all ranks local, --prism-record {folder}"
        with foreign.reading(file, "a recording of ours", fix, absent=absent):
            file_header, values = foreign.read_arrays(file, dict[str, object], _MEMBERS)
            for name in sorted(values, key=_order):
                # routes are bytes, all other values are whole numbers of 8 bytes
                member, value = _MEMBERS.fullmatch(name), values[name]
                steers = np.uint8 if member and member[1] == "route" else np.int64
                if value.dtype != steers:
                    raise ValueError(f"{name[:80]!r} is {value.dtype}")
                queue = self._values.setdefault(name.rpartition("#")[0], deque())
                queue.append(value)
        self._file, self._arguments = file, cast("str | None", file_header.get("arguments"))
        check_header(file, file_header, {"format": FORMAT, "rank": rank, **header})

    def is_of(self, arguments: str) -> None:
        """The job's arguments are known now: UsageError if the recording is of others."""
        check_arguments(self._file, self._arguments, arguments)

    def observe(
        self, group: PrismGroup, op: str, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        """Overwrite a mirrored control value by the recorded one."""
        # a group of one rank, or a call that steers nothing
        if group.size() < 2 or not _steers(op, outs):
            return
        value = self._next(f"{self.iteration} gather {group.desc}", sum(t.numel() for t in outs))
        if value is None:
            return
        # one recorded value holds all outputs, one behind the other
        start = 0
        for out in outs:
            part = torch.from_numpy(value[start : start + out.numel()])
            out.detach().copy_(part.view(out.shape))
            start += out.numel()

    def route(self, layer: int, routing: torch.Tensor) -> torch.Tensor:
        """The recorded routing map in place of ``routing`` ``[tokens, experts]``."""
        tokens, experts = routing.shape
        value = self._next(f"{self.iteration} route {layer}", tokens * -(-experts // 8))
        if value is None:
            return routing
        bits = np.unpackbits(value, axis=-1, count=experts).astype(bool)
        return routing.detach().copy_(torch.from_numpy(bits).view(routing.shape))

    def _next(self, key: str, size: int) -> np.ndarray | None:
        queue = self._values.get(key)
        if not queue or queue[0].size != size:
            self.missing += 1
            return None
        self.replayed += 1
        return queue.popleft()


def _order(name: str) -> tuple[str, int]:
    key, _, number = name.rpartition("#")
    return key, int(number)
