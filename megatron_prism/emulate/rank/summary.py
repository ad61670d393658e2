"""The banner, the summary and the JSON file of an emulated run.

Every number says where it comes from.  The artefact folder appears under its name only when the job
has trained, with one JSON file per local rank and nothing else; a failed run leaves none.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import artefact_folder, check_free
from megatron_prism.core.jobs.megatron_source import engine_version
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.core.world import World
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.command_line.options import Options, feature_flags
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.emulate.rank import exit_status
from megatron_prism.emulate.rank.monitor import PARTS
from megatron_prism.emulate.rank.session import Run, Session
from megatron_prism.memory import allocator, blocks, estimates, nccl_buffers
from megatron_prism.runtime.listeners import TrainingListener

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.live_bytes import LiveBytes

FORMAT = 1  # version of the JSON below


_UNPACED = ", but virtual ranks answer at once: communication and bubbles cost nothing here"


def parts_of(peaks: dict[str, int]) -> dict[str, int | None]:
    """Every part of a job and its peak; None where it did not run."""
    return {name: peaks.get(name) for name in PARTS}


def add_to(run: Run, session: Session) -> None:
    """Have ``--prism-out`` written.  UsageError, in the words of our flags, if it may not be."""
    out = run.options.out
    # process 0 writes for all
    if out is None or run.options.process:
        return
    try:
        check_free(out, run.options.force)
    except UsageError as error:
        # the check is that of our commands, whose option has another name
        fix = (error.fix or "").replace("-o DIR", "--prism-out DIR")
        fix = fix.replace("--force", "--prism-force")
        raise UsageError(f"--prism-out: {error.message}", fix=fix) from None
    run.places.append(out)


class Reporter(TrainingListener):
    """Collects what the run did and says it once."""

    def __init__(self, run: Run) -> None:
        self.options, self.tier, self.monitor = run.options, run.tier, run.monitor
        self.megatron, self.store = run.version, run.store
        self.sections, self.recording, self.memory = run.sections, run.recording, run.memory
        self.start = time.time()

    def banner(self) -> None:
        """One line on stderr at the start: what is real, what is not."""
        options = self.options
        num_virtual = options.world.size - len(options.ranks)
        place = coordinates(options)
        verb = "are"
        if num_virtual == 1:
            verb = "is"
        virtual = f"{counted(num_virtual, 'rank')} {verb} virtual"
        self._say(
            f"emulating rank {options.rank} of {options.world.size:,} ({place}) on tier "
            f"{self.tier.name}; {virtual}, values: {options.values}"
        )
        if options.verbose:
            for stand_in in self.tier.stand_in:
                self._say(f"  stand-in  {stand_in}")
        if self.tier.name == "meta":
            self._say("  tier meta has shapes only: what depends on data is unknown in the log")

    def _say(self, *lines: str) -> None:
        """Lines to stderr in one write, so that ranks do not interleave."""
        sys.stderr.write("".join(f"prism: {line}\n" for line in lines))
        sys.stderr.flush()

    def summary(self) -> Json:
        """The JSON of this rank: plain numbers, with their provenance beside them."""
        from megatron_prism import __version__
        from megatron_prism.runtime.virtual_world import current

        world, options, monitor = current(), self.options, self.monitor
        rows = world.tally.rows() if world is not None else []
        measured = "measured here"
        return {
            "format": FORMAT,
            "megatron_prism": __version__,
            "megatron_core": self.megatron,
            "rank": options.rank,
            "world_size": options.world.size,
            "local_ranks": list(options.ranks),
            "coordinates": options.world.coordinates(options.rank)._asdict(),
            "tier": self.tier.name,
            "stand_ins": list(self.tier.stand_in),
            "notes": list(monitor.notes),
            "values": options.values,
            "trained": {
                "steps": monitor.steps,
                "expected": monitor.expected,
                "iterations": len(monitor.iterations),
                "master_parameter_moved": monitor.moved,
                "provenance": measured + ": optimizer steps that Megatron reported as applied",
            },
            "parameters": monitor.num_parameters,
            "iterations": [asdict(entry) for entry in monitor.iterations],
            "time_provenance": measured + self._time_provenance(),
            **self._sections(),
            "communication": {
                "rows": [asdict(row) for row in rows],
                "provenance": measured + ": every call of this rank, start-up included",
            },
            "memory": self._memory(),
            "recording": self._replayed(),
            "process_wall_s": round(time.time() - self.start, 3),
        }

    def _time_provenance(self) -> str:
        """Say what times of this run mean; a listener that sets the times knows more."""
        for section in self.sections:
            if section.time_provenance:
                return section.time_provenance
        return _UNPACED

    def _sections(self) -> Json:
        """Make the JSON of the features' sections: null for a feature that was not asked for."""
        summaries: Json = {row.section: None for row in feature_flags() if row.section}
        for section in self.sections:
            summaries[section.name] = section.summary()
        return summaries

    def _replayed(self) -> dict[str, int] | None:
        """How many control values were replayed, and how many had to be mirrored instead."""
        from megatron_prism.runtime.recorded_values import ValueReplayer

        if not isinstance(self.recording, ValueReplayer):
            return None
        return {"replayed": self.recording.replayed, "mirrored": self.recording.missing}

    def _memory(self) -> Json:
        """Peaks in bytes; None where this tier does not know them."""
        if self.tier.live is not None:
            memory = self._modelled(self.tier.live, self.options.world.size)
            memory["transformer_engine"] = None
            if sys.modules.get("transformer_engine") is not None:
                memory["transformer_engine"] = engine_version()
            # graphs that run here are in the figures; those left out are not
            graphs = "cuda_graph_impl" not in job_arguments.left_out
            unknown = estimates.estimates(job_arguments.of_running_job(), graphs)
            memory["estimated"] = [asdict(estimate) for estimate in unknown]
            memory["provenance"] = estimates.described(memory["provenance"], unknown)
            return memory
        if self.tier.name == "cuda":
            import torch

            # the whole device, so that other processes on it count, too
            free, total = torch.cuda.mem_get_info()
            watch, held = self.memory, self.monitor.held()
            reserve = f", {held:,} B held in reserve for it are in" if held else ""
            nccl, source = self._nccl(torch.cuda.get_device_name())
            return {
                "allocated_peak": max(
                    torch.cuda.max_memory_allocated(), watch.allocated if watch else 0
                ),
                "reserved_peak": max(
                    torch.cuda.max_memory_reserved(), watch.reserved if watch else 0
                ),
                "device_used": total - free,
                "nccl_reserve": held,
                "nccl": nccl,
                "by_phase": watch.iterations if watch else None,
                "by_part": parts_of(watch.parts) if watch else None,
                "provenance": "measured here: the caching allocator; device_used lacks virtual "
                f"ranks' NCCL{reserve}; nccl {source}",
            }
        return {
            "allocated_peak": None,
            "by_part": None,
            "reserved_peak": None,
            "provenance": "unknown: the cpu tier does not tell host from device memory",
        }

    @staticmethod
    def _modelled(live: LiveBytes, num_ranks: int) -> Json:
        """Peaks on shapes: what the caching allocator would say of these requests.

        Where its options are not modelled: live bytes.  What live bytes grew by after the history
        was full is added.

        Args:
            live: bytes and requests of the run.
            num_ranks: of the job.
        """
        figures: Json = {
            "allocated_peak": live.high.bytes,
            "at": live.high.labels,
            "by_part": parts_of(live.parts),
            "reserved_peak": None,
            "reserved_between": None,
            "provenance": "modelled: live bytes of shapes, before the allocator's rounding",
        }
        # ``earlier``: the history was full, and live bytes went on from there
        history, before = live.earlier or (live.history, live.high.bytes)
        if history is None:
            return figures
        settings = allocator.Settings.of_environment(os.environ)
        if settings is None:
            return figures

        # the same requests with a device that keeps up, and with one that is far behind
        rows = history.rows().tolist()
        keeps_up, parts = allocator.allocated_by_span(rows, history.spans, settings)
        far_behind = allocator.replay_requests(rows, settings)
        between = [keeps_up.peak_reserved, far_behind.peak_reserved]

        beyond_history = live.high.bytes - before
        figures["allocated_peak"] = keeps_up.peak_allocated + beyond_history
        figures["by_part"] = parts_of({**live.parts, **parts})
        figures["reserved_peak"] = blocks.expected_reserved(between, num_ranks)
        figures["reserved_between"] = between
        figures["provenance"] = (
            "modelled: requests of shapes, replayed by a model of torch's allocator"
        )
        return figures

    def _nccl(self, device: str) -> tuple[int | None, str]:
        """(bytes that NCCL would take for this rank's communicators, the provenance of that)."""
        from megatron_prism.emulate.rank.device_memory import connected_by
        from megatron_prism.runtime.virtual_world import current

        world = current()
        # NCCL's real communicators are in what the device uses
        if world is None or self.options.num_processes > 1:
            return None, "unknown: local ranks have communicators of their own"
        calibration = nccl_buffers.fitting(device)
        if calibration is None:
            return None, f"unknown: nobody measured communicators on {device}"
        return calibration.nccl(connected_by(world.tally)), f"modelled: {calibration.source}"

    def world_known(self, world: World) -> None:
        """UsageError if something has needed the parallel sizes before."""
        before, self.options = self.options, replace(self.options, world=world)
        # sizes that leave every rank where it was change nothing
        if world.same_places(before.world):
            return
        # features that have read their files for the sizes known until now
        flags = [asked.options.needs_sizes for asked in before.asked_features]
        needing = [flag for flag in flags if flag]
        if needing:
            verb = "need"
            if len(needing) == 1:
                verb = "needs"
            message = f"{' and '.join(needing)} {verb} the parallel sizes before the script"
            fix = 'PRISM_ARGS="--tensor-model-parallel-size 2 …" says them'
            raise UsageError(message, fix=fix)
        self._say(f"  the script makes rank {before.rank} {coordinates(self.options)}")

    def finished(self) -> None:
        """Print the summary; write the artefact folder once all local ranks have finished."""
        if workers.EVENTS not in os.environ:  # whose output nobody reads
            summary = self.summary()
            self._print(summary)
            if self.options.out is not None:
                self._write(summary)
        exit_status.trained()

    def interrupted(self) -> None:
        """Print what was seen until then; nothing is written."""
        if self.monitor.steps:
            self._print(self.summary())

    def _print(self, summary: Json) -> None:
        trained, memory = summary["trained"], summary["memory"]
        steps, wanted = trained["steps"], trained["expected"]
        end, steps_text = "trained", f"{steps} optimizer steps applied of {wanted}"
        # nobody knows how many steps were to come
        if wanted is None:
            end, steps_text = "was interrupted", f"{steps} optimizer steps applied"
        parameters = f"{summary['parameters']:,} parameters"
        lines = [f"rank {self.options.rank} {end}: {steps_text}, {parameters}"]
        for note in summary["notes"]:
            lines += [f"  note      {line}" for line in note.splitlines()]
        if memory["allocated_peak"] is not None:
            lines += _memory_lines(memory)
        if summary["recording"] is not None:
            counts = summary["recording"]
            lines.append(
                f"  recording {counts['replayed']:,} control values replayed, "
                f"{counts['mirrored']:,} not in it and mirrored"
            )
        for section in self.sections:
            lines += section.lines(summary[section.name])
        rows = summary["communication"]["rows"]
        lines += [
            f"  {row['op']:<15} {row['calls']:>7,} calls {format_bytes(row['bytes']):>12}  "
            f"{row['group']} ({row['group_size']:,})"
            for row in rows[:8]
        ]
        if len(rows) > 8:
            left = f"  … {len(rows) - 8} more rows"
            if not self.options.out:
                left += " (write them all with --prism-out DIR)"
            lines.append(left)
        self._say(*lines)

    def _write(self, summary: Json) -> None:
        """Process 0 writes for all; the others hand their summaries over through the store."""
        out, options = self.options.out, self.options
        assert out is not None
        text = json.dumps(_finite(summary), indent=1, allow_nan=False)
        store = self.store
        # another local rank: process 0 waits for this text
        if store is not None and options.process:
            store.set(f"prism/summary/{options.process}", text)
            return
        texts = {options.rank: text}
        for process in range(1, options.num_processes):
            assert store is not None, "several local processes share a store"
            received = store.get(f"prism/summary/{process}").decode()
            texts[options.ranks[process]] = received
        with artefact_folder(out, force=options.force) as folder:
            for rank, content in texts.items():
                (folder / f"rank-{rank:06d}.json").write_text(content, encoding="utf-8")
        self._say(f"wrote {out} ({counted(len(texts), 'rank')})")


def _memory_lines(memory: Json) -> list[str]:
    """The peak of allocated bytes, what of it is estimated, and what NCCL takes beside."""
    peak = f"{format_bytes(memory['allocated_peak'])} allocated at the peak"
    place = ", ".join(f"{key} {value}" for key, value in memory.get("at", {}).items())
    if place:
        peak += f" in {place}"
    lines = [f"  memory    {peak}"]
    for estimate in memory.get("estimated", ()):
        percent = f"{estimate['low']:+g} to {estimate['high']:+g} %"
        # a stand-in decides how many bytes there are
        lines.append(f"            estimated: {percent}, {estimate['what']}")
    release = memory.get("transformer_engine")
    if release:
        lines.append(f"            as Transformer Engine {release} has it")
    # NCCL's buffers of the real world, beside those of this one
    nccl = memory.get("nccl")
    if nccl:
        used = format_bytes(memory["device_used"] - memory["nccl_reserve"])
        lines.append(
            f"            {used} of the device used here; in the job NCCL takes "
            f"{format_bytes(nccl)} more (modelled)"
        )
    parts = []
    for name, size in (memory["by_part"] or {}).items():
        if size:
            parts.append(f"{format_bytes(size)} {name}")
    if parts:
        lines.append(f"            {', '.join(parts)}")
    return lines


def _finite(value: object) -> object:
    """The same with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def coordinates(options: Options) -> str:
    """The rank's place on every axis that the world has more than one of."""
    place, world = options.world.coordinates(options.rank), options.world
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if getattr(world, axis) > 1]
    return " ".join(f"{axis}={getattr(place, axis)}" for axis in axes) or "alone"
