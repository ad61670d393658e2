"""What comes of the samples of a run: calls that match or not, step times, peak memory.

In : captures of one job at several lengths, and where its samples come from.  Out: ``DrawnRun``,
and its text and JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.units import (
    counted,
    format_bytes,
    format_change,
    format_ns,
    format_percent,
)
from megatron_prism.features.uneven.inputs import UnevenInput
from megatron_prism.features.uneven.iterations import IterationOutcome, examine_batches
from megatron_prism.features.uneven.length_curves import make_curves
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures, sequence_length
from megatron_prism.features.uneven.packed_data import DataJob, read_index
from megatron_prism.features.uneven.rank_programs import Sources
from megatron_prism.features.uneven.run_memory import RunMemory, run_memory
from megatron_prism.features.uneven.samples import Batches, draw, listed, read_law
from megatron_prism.features.uneven.step_times import StepTimes, deal_fairly, step_times
from megatron_prism.replay.drawn_steps import DrawnSteps

DEFAULT_ITERATIONS = 200
# settings of a job whose data loader masks documents from each other
_MASKS = ("dataloader_inter_document_masking", "sft")


class RunPart(enum.Enum):
    """What is written of a run."""

    ALL = "all"
    TIMES = "times"
    MEMORY = "memory"


@dataclass(frozen=True)
class DrawnRun:
    """What comes of the samples of a run.

    Attributes:
        batches: The samples.
        calls: Whether calls match.
        times: Step times; None: the job stops, or one capture alone says nothing of other lengths.
        memory: Peaks; None: as for times, or captures recorded no memory that can be compared.
        attends_across: Whether samples are packed documents that the job does not mask from each
            other; times and memory are then those of samples of one document.
    """

    batches: Batches
    calls: IterationOutcome
    times: StepTimes | None
    memory: RunMemory | None = None
    attends_across: bool = False


def batches_of_file(
    path: str | os.PathLike[str], captures: LengthCaptures, iterations: int, seed: int
) -> Batches:
    """Make the samples that a file says.

    Args:
        path: An ``.idx`` file, or JSON lines that say how often lengths occur.
        captures: The job that reads them.
        iterations: Of the run.
        seed: Of the draws; an ``.idx`` file is shuffled by the job's own ``--seed``.

    Raises:
        UsageError: The file is none of these.
        UnsupportedError: An ``.idx`` file, and there is no megatron-core here.
    """
    programs = captures.captured
    settings = job_settings.of_source(programs.source)
    samples_per_microbatch = int(settings.get("micro_batch_size", "1"))
    dp = programs.world.dp
    # the index of a data set, which Megatron itself shuffles and packs
    if os.fspath(path).endswith(".idx"):
        seed_of_job = settings.get("seed", DataJob.seed)
        split = settings.get("split", DataJob.split)
        job = DataJob(
            sequence_length=sequence_length(programs),
            dp=dp,
            microbatches=captures.microbatches,
            samples_per_microbatch=samples_per_microbatch,
            seed=int(seed_of_job),
            split=split,
        )
        return read_index(path, job, iterations)
    law = read_law(path, programs.world)
    shape = iterations, dp, captures.microbatches
    return draw(law, shape, samples_per_microbatch, seed)


def batches_of_lists(inputs: Sequence[UnevenInput], captures: LengthCaptures) -> Batches:
    """Make the samples that lists of lengths say; UsageError as ``listed``."""
    usual = sequence_length(captures.captured)
    world = captures.captured.world
    return listed(inputs, world, captures.microbatches, usual, "as listed")


def examine_run(
    sources: Sources,
    batches: Batches,
    machine: str | None = None,
    calibration: str | None = None,
    limit: int = 0,
) -> DrawnRun:
    """Find whether calls match, how long steps take and what memory they need.

    Args:
        sources: Where programs come from, with captures at several lengths.
        batches: The samples.
        machine: As of ``price``.
        calibration: As of ``price``.
        limit: Bytes of a GPU's memory; 0: nobody says.

    Raises:
        UsageError: Samples are packed, and there are fewer than three captures.
        PrismError: As ``examine_iterations`` and ``make_curves``.
    """
    captures = sources.lengths
    assert captures is not None  # the command makes them
    calls = examine_batches(sources, batches)
    attends_across = batches.is_packed and not _masks_documents(captures)
    # without times: the job stops, or one capture alone says nothing of other lengths
    if calls.outcome.stops or not _is_enough(captures, batches):
        return DrawnRun(batches, calls, None, attends_across=attends_across)
    attended = _attended(captures, batches)
    curves = make_curves(captures, machine, calibration)
    times = step_times(curves, attended)
    memory = run_memory(captures, attended, limit)
    return DrawnRun(batches, calls, times, memory, attends_across)


def _is_enough(captures: LengthCaptures, batches: Batches) -> bool:
    """Whether captures say what other lengths take.

    Raises:
        UsageError: Samples are packed, and there are two captures.
        ProgramError: Megatron cannot cut samples of a length into equal parts.
    """
    # every length, also those of iterations whose calls are not examined
    captures.check_lengths(np.unique(batches.tokens).tolist())
    count = len(captures.by_length)
    if batches.is_packed and count == 2:
        raise UsageError(
            "two captures do not say what attention takes, which packed documents have less of",
            fix="a third length: capture=DIR",
        )
    return count > 1


def _attended(captures: LengthCaptures, batches: Batches) -> Batches:
    """Return the samples as the kernels of the job take them.

    Kernels of a job that does not mask documents from each other take whole samples, whatever
    documents are in these.
    """
    if batches.is_packed and not _masks_documents(captures):
        return batches.of_one_document()
    return batches


def steps_of_run(
    sources: Sources,
    batches: Batches,
    machine: str | None = None,
    calibration: str | None = None,
) -> DrawnSteps:
    """Make the steps of a run, from which a prediction draws.

    Args:
        sources: Where programs come from, with captures at several lengths.
        batches: The samples.
        machine: As of ``price``.
        calibration: As of ``price``.

    Raises:
        UsageError: There is one capture alone, or samples are packed and there are two.
        ProgramError: The job stops with these samples.
        PrismError: As ``examine_iterations`` and ``make_curves``.
    """
    captures = sources.lengths
    assert captures is not None  # batches are of lengths
    if not _is_enough(captures, batches):
        raise UsageError(
            "one capture does not say how long other samples take",
            fix="capture=DIR of the job at another --seq-length",
        )
    calls = examine_batches(sources, batches)
    if calls.outcome.stops:
        smallest = " ".join(map(str, calls.outcome.smallest))
        raise ProgramError(
            f"the job stops in iteration {calls.iteration}, with {smallest}",
            fix="prism uneven with the same words says where",
        )
    attended = _attended(captures, batches)
    samples = DrawnRun(batches, calls, None, attends_across=attended is not batches)
    curves = make_curves(captures, machine, calibration)
    mean_tokens, mean_squares = attended.mean_samples(attended.tokens.shape[1:])
    alike_ns = curves.nodes_at(mean_tokens, mean_squares)

    def durations_of(step: int) -> np.ndarray:
        return curves.nodes_at(attended.tokens[step], attended.squares[step])

    def dealt_durations_of(step: int) -> np.ndarray:
        dealt = deal_fairly(curves, attended.tokens[step], attended.squares[step])
        return curves.nodes_at(*dealt)

    return DrawnSteps(
        priced=curves.priced,
        count=len(batches),
        durations=durations_of,
        changed={
            "all samples of the mean length": lambda _: alike_ns,
            "the same microbatches, dealt by their work": dealt_durations_of,
        },
        text="\n".join(_lines_of_samples(samples)),
    )


def _masks_documents(captures: LengthCaptures) -> bool:
    """Whether the job's data loader masks packed documents from each other."""
    settings = job_settings.of_source(captures.captured.source)
    return any(settings.get(name, "").lower() == "true" for name in _MASKS)


# -- forms -----------------------------------------------------------------------------------------
def to_text(run: DrawnRun, part: RunPart = RunPart.ALL) -> str:
    """Write it for a terminal, behind what is said of calls.

    Args:
        run: What comes of the samples.
        part: What is written of it.
    """
    iterations = len(run.batches)
    first_line, *more = _lines_of_samples(run)
    lines = [f"samples       {first_line}"]
    lines += [f"              {line}" for line in more]
    lines.append(f"calls         {run.calls.distinct} different iterations examined, all match")
    if run.times is None:
        unknown = "memory" if part is RunPart.MEMORY else "step time"
        lines.append(f"{unknown:<14}not known: capture=DIR of the job at other lengths")
        return "\n".join(lines)
    if part is not RunPart.MEMORY:
        lines += _lines_of_times(run.times)
    if part is RunPart.TIMES:
        return "\n".join(lines)
    if run.memory is None:
        lines.append("memory        not known: captures on tier meta record it")
    else:
        lines += _lines_of_memory(run.memory, iterations)
    return "\n".join(lines)


def _lines_of_samples(run: DrawnRun) -> list[str]:
    """Write which samples there are."""
    batches = run.batches
    iterations, dp, microbatches = batches.tokens.shape
    lines = [
        f"{counted(iterations, 'iteration')} of {counted(dp, 'dp rank')} x "
        f"{counted(microbatches, 'microbatch')}, {batches.source}"
    ]
    if not batches.is_packed:
        shortest = int(batches.tokens.min())
        longest = int(batches.tokens.max())
        lines.append(f"{shortest:,} to {longest:,} tokens")
        return lines
    squares_of_one = batches.tokens.astype(float) ** 2
    attended = float(batches.squares.mean() / squares_of_one.mean())
    share = f"they attend to {format_percent(attended)} of what samples of one document would"
    if run.attends_across:
        lines += [
            "packed documents: the job attends across them, so figures are those of samples of one "
            "document",
            f"masked (--dataloader-inter-document-masking, --sft) {share}",
        ]
    else:
        lines.append(f"packed documents: {share}")
    return lines


def _lines_of_memory(memory: RunMemory, iterations: int) -> list[str]:
    """Write peaks, and how often the limit is exceeded."""
    peak_bytes = int(memory.peak_bytes.max())
    peak = format_bytes(peak_bytes)
    usual = format_bytes(memory.usual_bytes)
    lines = [
        f"memory        {peak} of tensors on rank {memory.rank} in iteration "
        f"{memory.iteration + 1}, whose longest sample has {memory.longest:,} tokens; {usual} if "
        "all samples had the mean length"
    ]
    # 0: the iteration has too many requests to be replayed
    if memory.reserved_bytes:
        reserved = format_bytes(memory.reserved_bytes)
        lines.append(f"              the allocator takes {reserved} for that iteration alone")
    captured = ", ".join(f"{length:,}" for length in memory.lengths)
    lines.append(f"              based on captures of {captured} tokens, which ask alike")
    if memory.outside:
        outside = format_percent(memory.outside)
        lines.append(
            f"              {outside} of the microbatches are outside of these: extrapolated"
        )
    for left_out in memory.left_out:
        difference = left_out.expected_bytes / left_out.captured_bytes - 1
        lines.append(
            f"              that of {left_out.length:,} tokens asks otherwise and peaks at "
            f"{format_bytes(left_out.captured_bytes)}; from the others "
            f"{format_bytes(left_out.expected_bytes)} would be expected "
            f"({format_change(difference)})"
        )
    examined = len(memory.iterations)
    if examined < iterations:
        lines.append(
            f"              {examined:,} iterations with the longest samples were added up"
        )
    if not memory.limit_bytes:
        return lines
    limit = format_bytes(memory.limit_bytes)
    failures = len(memory.failing)
    if failures:
        first = int(memory.failing.min()) + 1
        at_least = ""
        # those that were not added up may exceed it, too
        if failures == examined < iterations:
            at_least = "at least "
        once_in = round(iterations / failures)
        lines.append(
            f"              tensors alone exceed {limit} in {at_least}{failures:,} of "
            f"{iterations:,} iterations (once in {once_in:,}), first in iteration {first}, from "
            f"samples of {memory.shortest_failing:,} tokens on"
        )
    else:
        lines.append(f"              tensors alone exceed {limit} in none of them")
    return lines


def _lines_of_times(times: StepTimes) -> list[str]:
    """Write step times."""
    low = format_ns(times.at_share(0.05))
    middle = format_ns(times.at_share(0.5))
    high = format_ns(times.at_share(0.95))
    slowest = int(times.step_ns.argmax())
    longest_ns = int(times.step_ns[slowest])
    longest = format_ns(longest_ns)
    mean_ns = float(times.step_ns.mean())
    last_rank = int(times.last_share.argmax())
    last_share = float(times.last_share[last_rank])
    last = "no dp rank is later than others"
    if last_share:
        share_of_steps = format_percent(last_share)
        last = f"dp rank {last_rank} is the last in {share_of_steps} of the steps"
    wait_ns = round(times.mean_wait_ns)
    wait = format_ns(wait_ns)
    wait_share = format_percent(times.mean_wait_ns / mean_ns)
    # for whom dp ranks wait most
    awaited_ns = times.wait_ns.sum(axis=0)
    whole_wait_ns = float(awaited_ns.sum())
    most_awaited = int(awaited_ns.argmax())
    for_whom = "others"
    if whole_wait_ns:
        most_share = format_percent(float(awaited_ns[most_awaited]) / whole_wait_ns)
        for_whom = f"others, {most_share} of that for dp rank {most_awaited}"
    captured = ", ".join(f"{length:,}" for length in times.lengths)
    lines = [
        f"step time     median {middle}, 5 % to 95 %: {low} to {high}, longest {longest} "
        f"(iteration {slowest + 1})",
        f"              {format_ns(times.equal_ns)} if all samples had the mean length",
        f"waiting       a dp rank waits {wait} ({wait_share} of a mean step) for {for_whom}; "
        f"{last}",
        f"fair deal     the same microbatches, dealt by their work, save "
        f"{format_percent(times.balanced_gain)} of a mean step",
        f"based on      captures of {captured} tokens, interpolated",
    ]
    if times.outside:
        outside = format_percent(times.outside)
        lines.append(
            f"              {outside} of the microbatches are outside of these: extrapolated; "
            "capture=DIR of the longest and the shortest length says what they take"
        )
    lines += [f"              {source}" for source in times.sources]
    return lines


def to_json(run: DrawnRun) -> dict[str, object]:
    """Make its JSON form; times in ns."""
    batches = run.batches
    iterations, dp, microbatches = batches.tokens.shape
    value: dict[str, object] = {
        "iterations": iterations,
        "dp": dp,
        "microbatches": microbatches,
        "source": batches.source,
        "packed": batches.is_packed,
        "attends_across": run.attends_across,
        "shortest": int(batches.tokens.min()),
        "longest": int(batches.tokens.max()),
        "examined": run.calls.distinct,
        "times": None,
        "memory": None,
    }
    memory = run.memory
    if memory is not None:
        failing = memory.failing + 1
        value["memory"] = {
            "peak_bytes": int(memory.peak_bytes.max()),
            "rank": memory.rank,
            "iteration": memory.iteration + 1,
            "longest": memory.longest,
            "usual_bytes": memory.usual_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "limit_bytes": memory.limit_bytes,
            "failing": failing.tolist(),
            "shortest_failing": memory.shortest_failing,
            "examined": len(memory.iterations),
            "captured_lengths": list(memory.lengths),
            "extrapolated": memory.outside,
            "left_out": [dataclasses.asdict(left_out) for left_out in memory.left_out],
        }
    times = run.times
    if times is not None:
        whole_waits = np.rint(times.wait_ns).astype(int)
        value["times"] = {
            "step_ns": times.step_ns.tolist(),
            "equal_ns": times.equal_ns,
            "spread": times.spread,
            "wait_ns": whole_waits.tolist(),
            "last_share": times.last_share.tolist(),
            "balanced_ns": times.balanced_ns.tolist(),
            "captured_lengths": list(times.lengths),
            "extrapolated": times.outside,
            "sources": list(times.sources),
        }
    return value
