"""What does a local rank's real device memory do?  ``--prism-memory-snapshot DIR``, tier ``cuda``.

Peaks of allocated bytes per iteration and phase (forward, backward, optimizer, and what is between
them), and torch's own snapshot of the iterations from the second on, which memory_viz
(https://pytorch.org/memory_viz) reads.  For the peaks torch's peak counters are reset at every
phase, so the maxima in Megatron's own log are those since the last phase.  After an out-of-memory
the snapshot is written, too.  ``explain`` turns that into an error that names rank, phase and line.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import torch

from megatron_prism.core.artefact import whole_file
from megatron_prism.core.errors import NotTrainedError, UsageError
from megatron_prism.runtime.listeners import TrainingListener
from megatron_prism.runtime.recorder.owners import Sites

if TYPE_CHECKING:
    from megatron_prism.emulate.options import Options

__all__ = ["MemoryWatch", "explain", "from_options"]

_ENTRIES = 1_000_000  # of torch's history; older ones go first


class MemoryWatch(TrainingListener):
    """Follows one rank's memory.

    path       : where the snapshot goes
    iterations : phase -> peak of allocated bytes, of every train step
    parts      : part of the job (``part``) -> the same over all of it
    allocated, reserved : peaks of the whole run, which resetting would lose
    cuda       : torch.cuda, or what tests put in its place
    """

    def __init__(self, path: Path, force: bool = False, cuda: ModuleType = torch.cuda) -> None:
        self.path, self.force, self.cuda = path, force, cuda
        self.iterations: list[dict[str, int]] = []
        self.parts: dict[str, int] = {}
        self._inside: list[str] = []  # parts that run now, the innermost last
        self.allocated = self.reserved = 0

    def iteration_started(
        self, number: int, wanted: int, model: object = None, optimizer: object = None
    ) -> None:
        """Train step ``number`` (from 1) of ``wanted`` starts."""
        self._note("between")
        self.iterations.append({})
        if number == min(2, wanted or 1):  # the first one allocates what the others keep
            self.cuda.memory._record_memory_history(max_entries=_ENTRIES, stacks="python")

    @contextlib.contextmanager
    def scope(self, phase: str = "", **labels: object) -> Iterator[None]:
        """What runs inside belongs to ``phase``."""
        self._note("between")
        try:
            yield
        finally:
            self._note(phase)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is this part of the job (an iteration, the optimizer step in it)."""
        self._note("between")
        self._inside.append(name)
        try:
            yield
        finally:
            self._note("between")
            self._inside.pop()

    def _note(self, phase: str) -> None:
        allocated = self.cuda.max_memory_allocated()
        self.allocated = max(self.allocated, allocated)
        self.reserved = max(self.reserved, self.cuda.max_memory_reserved())
        self.cuda.reset_peak_memory_stats()
        for name in self._inside:
            self.parts[name] = max(self.parts.get(name, 0), allocated)
        if self.iterations and (self._steps() or not self._inside):
            last = self.iterations[-1]
            last[phase] = max(last.get(phase, 0), allocated)

    def _steps(self) -> bool:
        """Whether a train step runs."""
        return any("iteration" in name for name in self._inside)

    def out_of_memory(self) -> None:
        """What is alive now is what the snapshot is for."""
        self.finished()

    def finished(self) -> None:
        """Write the snapshot."""
        self._note("between")
        with whole_file(self.path, force=self.force) as file:
            pickle.dump(self.cuda.memory._snapshot(), file)


def from_options(options: Options) -> MemoryWatch | None:
    """The watch that ``options`` ask for.  UsageError off the device, or if the place is taken."""
    if options.memory is None:
        return None
    if options.tier != "cuda":
        raise UsageError(
            f"--prism-memory-snapshot is of a real allocator, and tier {options.tier} has none",
            fix="--prism-capture DIR and prism memory explain DIR, or --prism-tier cuda",
        )
    path = options.memory / f"rank-{options.rank:06d}.pickle"
    if path.exists() and not options.force:
        raise UsageError(
            f"--prism-memory-snapshot: {path} exists and is not overwritten",
            fix="--prism-force, or another folder",
        )
    return MemoryWatch(path, options.force)


def explain(
    error: BaseException, who: str, labels: Mapping[str, object], held: int = 0
) -> Exception:
    """An out-of-memory as the rank's own: who, in which step, at which line of Megatron.

    held : bytes of ballast that the process holds for communicators
    """
    step = ", ".join(f"{key} {value}" for key, value in labels.items() if value is not None)
    site = _site(error.__traceback__)
    where = f" in {step or 'no phase'}{f', at {site}' if site else ''}"
    lines = [f"{who} ran out of device memory{where}", f"  {str(error).splitlines()[0]}"]
    if held:
        lines.append(f"  {held:,} B of it are held for the large job's communicators (ballast)")
    return NotTrainedError(
        "\n".join(lines),
        fix="prism memory explain DIR of a capture shows what is alive there; recompute, a smaller "
        "micro batch or another layout of layers make room",
    )


def _site(trace: TracebackType | None) -> str:
    """The innermost line of Megatron or TE that the error came through."""
    sites, found = Sites(), ""
    while trace is not None:
        found = sites.place(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or found
        trace = trace.tb_next
    return found
