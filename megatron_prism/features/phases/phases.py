"""The peak of each phase, and what stays on the device and on the host behind it.

In : steps and the footprint of each class of ranks.  Out: ``Phases``.  The training process and the
inference engine are two processes, or one with two pools: their bytes add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.core.programs.program import Programs
from megatron_prism.core.rendering import renderer_of
from megatron_prism.features.phases.footprint import Footprint, footprint
from megatron_prism.features.phases.steps import (
    COPIES,
    GRADIENTS,
    PARTS,
    Generate,
    Offload,
    Reload,
    Step,
    Train,
)
from megatron_prism.memory import allocator
from megatron_prism.memory.job_peaks import first_program, peak_memory
from megatron_prism.memory.nccl_buffers import DEFAULT

PROVENANCE = (
    "bytes of the engine are those of the file; parts that come back are assumed to need their "
    "blocks alone; not held against a real job"
)


@dataclass(frozen=True)
class PhaseFigures:
    """The memory of one phase of a class of ranks; bytes.

    Args:
        name: of the phase.
        peak: the most on the device.
        stays: on the device when the phase is over.
        host: in copies on the rank's host when the phase is over.
    """

    name: str
    peak: int
    stays: int
    host: int


@dataclass(frozen=True)
class Phases:
    """The phases of a job.

    Args:
        limit: bytes of device memory.
        classes: class of ranks -> its phases in their order.
    """

    limit: int
    classes: Mapping[str, Sequence[PhaseFigures]]

    @property
    def worst(self) -> str:
        """Return the class that needs most in a phase."""
        return max(self.classes, key=lambda name: max(phase.peak for phase in self.classes[name]))

    @property
    def decides(self) -> PhaseFigures:
        """Return the phase of that class that needs most."""
        return max(self.classes[self.worst], key=lambda phase: phase.peak)

    @property
    def fits(self) -> bool:
        """Whether each phase of every class is within the limit."""
        return self.decides.peak <= self.limit

    def to_json(self) -> dict[str, object]:
        """Make what ``prism phases --json`` prints."""
        return {
            "schema": "prism.phases/1",
            "limit": self.limit,
            "fits": self.fits,
            "worst": self.worst,
            "classes": {
                name: list(map(dataclasses.asdict, figures))
                for name, figures in self.classes.items()
            },
            "provenance": PROVENANCE,
        }

    def to_rows(self) -> list[dict[str, object]]:
        """Make a row for each phase of each class."""
        rows: list[dict[str, object]] = []
        for name, figures in self.classes.items():
            for phase in figures:
                rows.append({"class": name, **dataclasses.asdict(phase)})
        return rows

    def to_text(self) -> str:
        """Make the page that ``prism phases`` prints."""
        text: str = renderer_of(self).text(self)
        return text


def phases(
    programs: Programs,
    steps: Sequence[Step],
    limit: int,
    *,
    alloc_conf: str = "",
    device: str | None = DEFAULT,
) -> Phases:
    """Follow the phases of every class of ranks.

    Args:
        programs: of the job that trains.
        steps: the phases.
        limit: bytes of device memory.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the job.
        device: what context, libraries and NCCL take, as of ``peak_memory``.

    Raises:
        UsageError: the programs recorded no memory.
    """
    memory = peak_memory(programs, alloc_conf=alloc_conf, device=device)
    settings = allocator.Settings.parse(alloc_conf)
    classes = {}
    for name, figures in memory.classes.items():
        held = footprint(first_program(programs, figures), figures, settings)
        classes[name] = follow(steps, held)
    return Phases(limit, classes)


class _Residence:
    """What is on the device and on the host now; bytes.

    Args:
        held: what the training process has.
    """

    def __init__(self, held: Footprint) -> None:
        self._held = held
        self._out: tuple[str, ...] = ()  # parts that are on the host
        self._is_saved = False  # whether these are the segments as they were
        self.segments = held.segments
        self.outside = held.outside
        self.engine = 0  # of the inference engine that stays on the device
        self.training_host = 0
        self.engine_host = 0

    @property
    def device(self) -> int:
        """Return all that is on the device."""
        return self.segments + self.outside + self.engine

    @property
    def host(self) -> int:
        """Return all that is on the host."""
        return self.training_host + self.engine_host

    def take(self, step: Step) -> int:
        """Run a phase; return its peak."""
        if isinstance(step, Train):
            # an iteration takes its cache again, whatever an earlier phase gave back
            self.segments, self.outside = self._held.segments, self._held.outside
            return self.device
        if isinstance(step, Offload):
            peak = self.device
            # in this model offloading takes no device memory of its own: the peak was there before
            self._offload(step)
            return peak
        if isinstance(step, Reload):
            return self._reload(step)
        return self._generate(step)

    def _offload(self, step: Offload) -> None:
        held = self._held
        # NCCL's buffers lie outside of the allocator, so neither way of offloading frees them
        if step.ends_groups:
            self.outside -= held.communicators
        if step.how == COPIES:
            self._out = step.parts
            self.segments = held.segments_without(step.parts)
            # gradients are zeros when they come back: nothing is copied of them
            copied = [held.part_bytes[part] for part in step.parts if part != GRADIENTS]
            self.training_host = sum(copied)
            return
        # it copies segments, without knowing what is in them
        self._out = PARTS
        self._is_saved = True
        self.training_host = self.segments
        self.segments = 0

    def _reload(self, step: Reload) -> int:
        held = self._held
        # all at once, as one pool: the segments are those that were copied
        if self._is_saved:
            self._is_saved = False
            self.segments, self.training_host = self.training_host, 0
        else:
            for part in step.parts:
                if part in self._out:
                    self.segments += held.part_bytes[part]
                    # nothing was copied of gradients
                    if part != GRADIENTS:
                        self.training_host -= held.part_bytes[part]
        self._out = tuple(part for part in self._out if part not in step.parts)
        # the file does not say when destroyed groups are made again: the earliest is taken, so that
        # no later peak lacks them
        self.outside = held.outside
        return self.device

    def _generate(self, step: Generate) -> int:
        # weights that slept on the host are on the device while the engine generates
        self.engine = step.num_bytes
        self.engine_host = 0
        peak = self.device
        # both levels discard the cache; level 1 alone keeps weights, and keeps them on the host
        if step.sleep:
            self.engine = step.stays
        if step.sleep == 1:
            self.engine_host = step.weights
        return peak


def follow(steps: Sequence[Step], held: Footprint) -> list[PhaseFigures]:
    """Follow the phases of one class of ranks.

    Args:
        steps: the phases.
        held: what its training process has.
    """
    residence = _Residence(held)
    figures = []
    for step in steps:
        peak = residence.take(step)
        figures.append(PhaseFigures(step.name, peak, residence.device, residence.host))
    return figures
