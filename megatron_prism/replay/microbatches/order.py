"""Megatron's scheduler, and the settings under which it gives a captured order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.programs.program import Programs
from megatron_prism.replay.microbatches.choice import has_surroundings
from megatron_prism.replay.microbatches.cut import Cut, microbatch_group_size

Scheduler = Callable[..., Programs]  # (pp, vpp, microbatches, stages=, **settings)


@dataclass(frozen=True)
class Order:
    """Megatron's scheduler with the settings under which it gives the captured order.

    Attributes:
        scheduler: Runs Megatron's schedule without a model.
        pp: Stages of the pipeline.
        vpp: Chunks of a stage; None: not interleaved.
        stages: The stages whose order is asked for.
        settings: Keywords of the scheduler.
    """

    scheduler: Scheduler
    pp: int
    vpp: int | None
    stages: tuple[int, ...]
    settings: Mapping[str, object]
    _schedules: dict[int, dict[int, Cut]] = field(default_factory=dict)

    @classmethod
    def of(cls, programs: Programs, count: int, scheduler: Scheduler) -> Order:
        """Find the settings of captured programs.

        Args:
            programs: The captured programs.
            count: Their microbatches.
            scheduler: Runs Megatron's schedule.

        Raises:
            ProgramError: Under no settings does the scheduler give the captured order.
        """
        world = programs.world
        cuts = [Cut(program, world) for program in programs.programs]
        stages = [world.coordinates(program.rank).pp for program in programs.programs]
        # chunks are labels of steps, and mean an interleaved schedule on several stages
        vpp, group_size = None, None
        chunks = _count_chunks(cuts)
        if chunks and world.pp > 1:
            vpp = chunks
            group_size = microbatch_group_size(cuts[0])

        # the first settings that give the captured order
        asked_stages = tuple(sorted({*stages}))
        for settings in _possible_settings(vpp is not None):
            settings["group_size"] = group_size
            order = cls(scheduler, world.pp, vpp, asked_stages, settings)
            try:
                schedules = order.run(count)
            # Megatron has no such schedule
            except UsageError:
                continue
            pairs = zip(cuts, stages, strict=True)
            if all(cut.same_order(schedules[stage]) for cut, stage in pairs):
                return order
        raise ProgramError(
            f"{count} microbatches: the steps and messages of the programs are not in the order of "
            "Megatron's scheduler, so other numbers of microbatches cannot be made of them",
            fix="capture the job with that many",
        )

    def run(self, count: int) -> dict[int, Cut]:
        """Give the schedule of every asked stage with ``count`` microbatches."""
        if count not in self._schedules:
            settings = self.settings
            programs = self.scheduler(self.pp, self.vpp, count, stages=self.stages, **settings)
            cuts = {program.rank: Cut(program, programs.world) for program in programs.programs}
            self._schedules[count] = cuts
        return self._schedules[count]

    def fewest(self, wanted: int, at_least: int = 1) -> int:
        """Find the smallest number of microbatches from which ``wanted`` can be made.

        Its schedule has every kind of piece in the surroundings of a steady state.

        Args:
            wanted: Microbatches that are made.
            at_least: Fewer are known to be too few.
        """
        wanted_schedules = self.run(wanted)
        for count in range(at_least, wanted):
            try:
                schedules = self.run(count)
            # Megatron has no such schedule
            except UsageError:
                continue
            if all(
                has_surroundings(cut, count, wanted_schedules[stage])
                for stage, cut in schedules.items()
            ):
                return count
        return wanted


def fewest_microbatches(
    pp: int,
    vpp: int | None,
    wanted: int,
    scheduler: Scheduler,
    stages: Iterable[int] | None = None,
    at_least: int = 1,
    **settings: object,
) -> int:
    """Find the smallest number of microbatches from which ``wanted`` can be made.

    Args:
        pp: Stages of the pipeline.
        vpp: Chunks of a stage; None or 1: not interleaved.
        wanted: Microbatches of an iteration.
        scheduler: Runs Megatron's schedule.
        stages: Those that have every piece in the surroundings of a steady state; None: all.
        at_least: Fewer are known to be too few.
        settings: Keywords of the scheduler.

    Raises:
        UsageError: Megatron refuses the settings.
    """
    # one stage or one chunk is not interleaved
    if pp == 1 or vpp == 1:
        vpp = None
    if stages is None:
        stages = range(pp)
    order = Order(scheduler, pp, vpp, tuple({*stages}), settings)
    return order.fewest(wanted, at_least)


def _count_chunks(cuts: Iterable[Cut]) -> int:
    """Count the chunks of a stage; 0 if no step names one."""
    last_chunk = -1
    for cut in cuts:
        for _, chunk in itertools.chain(*cut.members):
            last_chunk = max(last_chunk, chunk)
    return last_chunk + 1


def _possible_settings(interleaved: bool) -> Iterator[dict[str, object]]:
    """Give all that a captured order may have come from.

    Stages exchange tensors in several ways, and a forward may run beside a backward.
    """
    # overlap_p2p, warmup_flush
    overlaps = [(False, False)]
    if interleaved:
        overlaps = [(True, False), (True, True), (False, False)]
    for is_combined, overlap, has_lengths in itertools.product(
        (False, True), overlaps, (False, True)
    ):
        overlap_p2p, warmup_flush = overlap
        yield {
            "overlap_p2p": overlap_p2p,
            "warmup_flush": warmup_flush,
            "variable_lengths": has_lengths,
            "ep_overlap": is_combined,
        }
