"""An estimate of a stock job while its ranks are captured: from the same job with few layers.

One rank of each stage runs with one and with two periods of layers in each chunk
(``short_job``), as forks of the process that has started the job.  What a step allocates and how
long it takes is linear in layers that are equal, so both worlds say what the whole job needs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.slices import assemble
from megatron_prism.core.units import format_bytes, format_change, format_ns
from megatron_prism.emulate.processes.workers import Json, RankTask

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_prism.core.programs.program import Programs
    from megatron_prism.memory.job_peaks import MemoryReport

PERIODS = (1, 2)  # of layers in a chunk, of the two worlds that an estimate rests on
_FILE = ".estimate"


@dataclass(frozen=True)
class JobEstimate:
    """What a job needs, from the job with few layers.

    Attributes:
        layers: of a chunk, in the two worlds and in the job.
        class_name: the class of ranks that needs most.
        device_bytes: of the device, that it needs.
        allocated_bytes: of its tensors at the peak.
        iteration_ns: an iteration on ``machine``.
        machine: whose times they are, and on which host, in words.
    """

    layers: tuple[int, int, int]
    class_name: str
    device_bytes: int
    allocated_bytes: int
    iteration_ns: int
    machine: str

    def __str__(self) -> str:
        """Say it in a line."""
        few, more, whole = self.layers
        return (
            f"estimate from {few} and {more} of {whole} layers a chunk: "
            f"{self.class_name} needs {format_bytes(self.device_bytes)} of device memory, "
            f"an iteration takes {format_ns(self.iteration_ns)} {self.machine}"
        )

    def compared(self, device_bytes: int | None, iteration_ns: int | None) -> str:
        """Say how far off it was.

        Args:
            device_bytes: what the class that needs most needs; None: that is not asked.
            iteration_ns: what an iteration takes on ``machine``; None: nobody knows.
        """
        parts: list[str] = []
        if device_bytes:
            parts.append(f"{format_change(self.device_bytes / device_bytes - 1)} in memory")
        if iteration_ns:
            parts.append(f"{format_change(self.iteration_ns / iteration_ns - 1)} in time")
        return f"the estimate was off by {', '.join(parts)}"


class Estimator:
    """Runs beside a capture: its tasks go first, and when the last has ended, it estimates.

    Args:
        console: gets the estimate, or why there is none.
        machine: as of ``price``.
    """

    def __init__(self, console: Console, machine: str | None = None) -> None:
        self._console = console
        self._machine = machine
        self._place: tempfile.TemporaryDirectory[str] | None = None  # made with the tasks
        self._waiting: list[RankTask] = []
        self._layers: list[int] = []
        self._whole_layers = 0
        self._reason = ""
        self.result: JobEstimate | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the tasks of an estimate have run or run now."""
        return bool(self._layers or self._waiting or self._reason)

    def tasks(self, whole: Sequence[RankTask]) -> list[RankTask]:
        """Return the tasks that an estimate of the job of ``whole`` tasks needs."""
        self._place = tempfile.TemporaryDirectory(prefix="prism-estimate-")
        # once with few layers, once with more
        for periods in PERIODS:
            folder = str(self._folder(periods))
            for task in whole:
                words = list(task.words)
                words[words.index("--prism-capture") + 1] = folder
                title = f"{task.title}, few layers"
                short = dataclasses.replace(task, words=words, title=title, periods=periods)
                self._waiting.append(short)
        return list(self._waiting)

    def finished(self, task: RankTask, result: Json) -> None:
        """Take in a task that has ended; estimate behind the last one of ours."""
        if task not in self._waiting:
            return
        self._waiting.remove(task)
        self._reason = self._reason or result.get("no_estimate", "")
        # the job with few layers, or the one with more
        if "short_layers" in result:
            layers, self._whole_layers = result["short_layers"]
            if layers not in self._layers:
                self._layers.append(layers)
        if self._waiting:
            return
        if not self._reason:
            self._estimate()
        assert self._place is not None, "there were tasks"
        self._place.cleanup()

    def say_reason(self) -> None:
        """Say why there is no estimate, if that is so, behind a capture.

        Few layers fail for what the whole job is refused for, too: its own error is enough then.
        """
        if self._reason:
            self._say(f"none: {self._reason}")

    def _folder(self, periods: int) -> Path:
        """Return the folder of the slices with so many periods of layers in a chunk."""
        assert self._place is not None, "there are tasks"
        return Path(self._place.name) / f"periods-{periods}"

    def _say(self, text: str) -> None:
        self._console.print(f"  {'estimate':<20} {text}")

    def _estimate(self) -> None:
        """Estimate, and say it; a job that few layers say nothing of is captured as ever."""
        few, more = sorted(self._layers)
        try:
            worlds = [assemble(self._folder(periods)) for periods in PERIODS]
            layers = few, more, self._whole_layers
            self.result = estimated(worlds[0], worlds[1], layers, self._machine)
        except PrismError as error:
            self._say(f"none: {error.message}")
            return
        self._console.print(f"prism: {self.result}", markup=False)


def estimated(
    fewer: Programs, more: Programs, layers: tuple[int, int, int], machine: str | None = None
) -> JobEstimate:
    """Estimate what a job needs.

    Args:
        fewer: the job with the fewest layers.
        more: the job with more layers.
        layers: of a chunk of ``fewer``, of ``more`` and of the job.
        machine: as of ``price``.

    Raises:
        PrismError: the worlds cannot be priced, or differ in more than their layers.
    """
    from megatron_prism.memory.job_peaks import peak_memory
    from megatron_prism.replay.layers import iteration_of_layers
    from megatron_prism.replay.priced_graph import price
    from megatron_prism.replay.uncertainty.headline import headline

    few_layers, more_layers, whole_layers = layers
    # how many times the layers between the two jobs are missing from the larger one
    growth = (whole_layers - more_layers) / (more_layers - few_layers)
    priced = [price(programs, machine=machine) for programs in (fewer, more)]
    reports = [peak_memory(programs) for programs in (fewer, more)]
    name, device_bytes, allocated_bytes = _most_needed((fewer, more), reports, growth)
    return JobEstimate(
        layers=layers,
        class_name=name,
        device_bytes=device_bytes,
        allocated_bytes=allocated_bytes,
        iteration_ns=iteration_of_layers(priced[0], priced[1], growth),
        machine=headline(priced[1].timeline).assumes,
    )


def _most_needed(
    worlds: tuple[Programs, Programs], reports: Sequence[MemoryReport], growth: float
) -> tuple[str, int, int]:
    """Find the class of ranks that needs most.

    Returns:
        Its name, bytes of the device, bytes that are allocated.
    """
    from megatron_prism.memory.job_peaks import first_program, needed
    from megatron_prism.memory.layers import peak_of_layers
    from megatron_prism.replay.layers import step_numbers

    needs: list[tuple[int, str, int]] = []
    for name, figures in reports[1].classes.items():
        program = first_program(worlds[1], figures)
        program_of_fewer = worlds[0].of(program.rank)
        allocated = peak_of_layers(
            program_of_fewer,
            program,
            step_numbers(program_of_fewer),
            step_numbers(program),
            growth,
        )
        # what the allocator holds beside tensors is between that of few layers and its share of
        # their tensors: midway, by ratio
        cache_bytes = figures["peak_reserved"] - figures["peak_allocated"]
        growth_of_tensors = allocated / max(figures["peak_allocated"], 1)
        beside_bytes = round(cache_bytes * math.sqrt(growth_of_tensors))
        # what no allocator sees is of groups and libraries
        beside_bytes += needed(figures) - figures["peak_reserved"]
        needs.append((allocated + beside_bytes, name, allocated))
    device_bytes, name, allocated = max(needs)
    return name, device_bytes, allocated


def keep(folder: Path, estimate: JobEstimate) -> None:
    """Keep the estimate of a job beside its slices, to say how far off it was."""
    text = json.dumps(asdict(estimate))
    (folder / _FILE).write_text(text, encoding="utf-8")


def kept(folder: Path) -> JobEstimate | None:
    """Read what ``keep`` has written; None where there is nothing."""
    try:
        fields = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return JobEstimate(**{**fields, "layers": tuple(fields["layers"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
