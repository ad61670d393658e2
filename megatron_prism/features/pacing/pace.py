"""``--prism-pace DIR``: virtual ranks answer when they would, so iterations last as they would.

In : the options, and a folder of slices of the same job (``--prism-capture``), perhaps with
``calibration.json`` (``prism calibrate``) in it.  Out: a Pacer for the virtual world.  Slices that
are missing are captured first (``capture_missing``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs import slices
from megatron_prism.core.programs.ops import IS_COLLECTIVE, IS_PAIR, NAMES
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import format_ranks
from megatron_prism.emulate.capture import nvlink_keepalive
from megatron_prism.emulate.capture.capture import source_of
from megatron_prism.emulate.jobs import script_job
from megatron_prism.emulate.jobs.script_job import Job
from megatron_prism.features.pacing.answer_times import AnswerTimes, build_answer_times
from megatron_prism.replay import whatif
from megatron_prism.replay.costs.collectives import Calibration, read_calibration
from megatron_prism.replay.costs.host import call_ns
from megatron_prism.replay.costs.machine import machines, named_in
from megatron_prism.replay.priced_graph import WhatIf, price
from megatron_prism.runtime.listeners import TrainingListener

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.core.world import World
    from megatron_prism.emulate.command_line.options import Options
    from megatron_prism.emulate.rank.session import Run, Session
    from megatron_prism.features.pacing.options import PaceOptions
    from megatron_prism.features.pacing.pacer import PacedCall
    from megatron_prism.runtime.virtual_world import VirtualWorld

_LARGE = 1 << 18  # bytes: answering takes a few us from here on


def expected(
    program: Program,
    table: AnswerTimes,
    process: int,
    group_sizes: Mapping[str, int],
    calibration: Calibration | None = None,
) -> tuple[list[PacedCall], list[list[int]]]:
    """(every call of the program in order, per launch the interactions that it ends).

    ``calibration`` knows how long NCCL keeps the host for a call.
    """
    from megatron_prism.features.pacing.pacer import PacedCall

    ops = program.ops
    of_process = table.member == process
    ops_that_meet = table.op[of_process].tolist()
    interaction_of_op = dict(zip(ops_that_meet, table.of[of_process].tolist(), strict=True))
    sizes = program.num_bytes
    launches = list[list[int]]()
    launch_of_batch = dict[int, int]()
    calls = list[PacedCall]()
    host_ns = call_ns(program, calibration or Calibration(), 0)
    for index in calls_of(program):
        launch = -1  # a call that meets no virtual rank
        if index in interaction_of_op:
            # calls of a batch are launched together
            batch = int(ops["batch"][index])
            launch = launch_of_batch.get(batch, -1)
            if launch < 0:
                launch = len(launches)
                launches.append([])
                if batch >= 0:
                    launch_of_batch[batch] = launch
            launches[launch].append(interaction_of_op[index])
        group = program.strings[ops["group"][index]]
        name = NAMES[ops["name"][index]]
        blocks = nccl_blocks(name, max(0, int(sizes[index])), group_sizes[group])
        is_large = sizes[index] >= _LARGE and name != "send"
        # a call that is not paced takes the host its own time
        host = 0
        if launch >= 0:
            host = int(host_ns[index])
        calls.append(PacedCall(name, group, launch, blocks, is_large, host))
    return calls, launches


def calls_of(program: Program) -> list[int]:
    """Its communications, as indices of its ops."""
    names = program.ops["name"]
    indices: list[int] = np.flatnonzero(IS_COLLECTIVE[names] | IS_PAIR[names]).tolist()
    return indices


def nccl_blocks(op: str, num_bytes: int, size: int) -> int:
    """How many thread blocks NCCL runs for a call, and so how many SMs it takes from computing.

    Fits what the profiler saw on 4 x H200 over NVLink (NCCL 2.28.9, NVLS off, 2026-11-21): 24 for
    collectives from 1 MiB on, one per 4 KiB of each rank's share below; 8 for a message of 64 KiB
    and more, 16 from 256 MiB; 4 to 32 for an all-to-all of 4.
    """
    if op in ("send", "recv"):
        if num_bytes >= 1 << 28:
            return 16
        return max(1, min(8, num_bytes >> 13))
    if op == "all_to_all":
        return max(size, min(32, num_bytes >> 13))
    return max(1, min(24, num_bytes // (size << 12)))


def missing_ranks(folder: Path, world: World) -> list[int]:
    """The first rank of every stage of which ``folder`` has no slice."""
    captured_ranks = list[int]()
    if folder.is_dir():
        captured_ranks = slices.SliceStore(folder, world, {}).ranks()
    captured_stages = {world.coordinates(rank).pp for rank in captured_ranks}
    return [world.rank_at(pp=stage) for stage in world.stages if stage not in captured_stages]


def capture_missing(
    options: Options, folder: Path, job: Sequence[str], store: dist.Store | None = None
) -> None:
    """Run ``job``, the script and its own arguments, once for every rank that ``folder`` lacks.

    PrismError if one fails; what was captured until then is kept.  Of several local processes the
    first captures, the others wait at ``store``.
    """
    # local processes share a host: one captures
    if options.process:
        assert store is not None, "several local processes share a store"
        store.wait(["prism/pace/captured"], timedelta(days=1))
        return
    _capture_all(options, folder, job)
    if store is not None:
        store.set("prism/pace/captured", "1")


def _capture_all(options: Options, folder: Path, job: Sequence[str]) -> None:
    # one rank stands for a stage
    missing = missing_ranks(folder, options.world)
    if missing:
        script = Job.of(job[0], job[1:], options.world, options.tier)
        # the slices are of the healthy job: without slow ranks and other faults
        healthy = ("--prism-values", options.values)
        script = dataclasses.replace(script, ours=healthy)
        script_job.capture(script, folder, missing, Console(stderr=True, highlight=False))


CALIBRATION = "calibration.json"


class Pace(TrainingListener):
    """What pacing was made from, and what it says afterwards.

    version : megatron-core's; the job's arguments follow with ``is_of``

    UsageError for slices of another job, PrismError for slices that do not fit together.
    """

    name = "pacing"
    time_provenance = ", virtual ranks answering when a replay of their slices says (see pacing)"

    def __init__(self, options: Options, asked: PaceOptions, version: str) -> None:
        import torch

        self.asked = asked
        folder, device = asked.folder, torch.cuda.get_device_name()
        source = source_of(version, options.tier, device)
        begin = time.perf_counter()
        programs = _programs(folder, options, source)
        self._arguments = programs.source.get("arguments")
        program = programs.programs[int(programs.program_of[options.rank])]
        self._calibration = calibration(folder, device)
        slow = tuple(
            (format_ranks(ranks), factor) for ranks, factor in slow_ranks(options, asked.slow)
        )
        self._priced = price(
            programs,
            machine=_machine_of(device),
            calibration=self._calibration,
            what_if=WhatIf(slow=slow, alone=tuple(options.ranks)),
        )
        # what virtual ranks answer, as sums over the local rank's own stamps
        world, prices = self._priced.graph, self._priced.prices
        self.table = build_answer_times(world, prices, list(options.ranks))
        used = np.unique(prices.collective_source)
        self.sources = [prices.sources[i] for i in used.tolist()]
        self.program, self.options = program, options
        self.sizes = {
            name: len(world.groups[name].group(options.rank)) for name in program.groups()
        }
        self.pacer: Any = None
        self.links: Any = None
        self.took_s = time.perf_counter() - begin

    def is_of(self, arguments: str) -> None:
        """The job's arguments are known now: UsageError if the slices are of others."""
        _refuse(
            self.asked.folder, job_settings.differences("arguments", self._arguments, arguments)
        )

    def start(self, world: Any, store: Any = None) -> Any:
        """The Pacer on the current device, of the virtual ``world``; ``store``: of the local
        processes, if several.
        """
        import torch

        from megatron_prism.features.pacing.device import RING, Launcher, Streams
        from megatron_prism.features.pacing.pacer import Pacer
        from megatron_prism.features.pacing.shared_memory import Shared, layout, meet

        calls, launches = expected(
            self.program, self.table, self.options.process, self.sizes, self._calibration
        )
        index = torch.cuda.current_device()
        device = torch.device("cuda", index)
        process, processes, table = self.options.process, self.options.num_processes, self.table
        shared = None
        # several processes share the ends of interactions in memory of the host
        if processes > 1:
            places = layout(RING, len(table), len(table.of), processes)
            meet(store, processes, "memory")  # whoever fails before leaves no file behind
            shared = Shared(store, process, processes, places, _digest(table))
        launcher = Launcher(table, launches, device, shared)
        launcher.meet()
        self.pacer = Pacer(calls, launcher, Streams(launcher.driver, device))
        self.pacer.lags.append(launcher.lag())
        self.links = nvlink_keepalive.keep_awake(index, world.tally.calls_to_others, processes)
        return self.pacer

    def iteration_started(self, number: int, wanted: int, model: Any, optimizer: Any) -> None:
        self.pacer.begin()

    def finished(self) -> None:
        """No further train step will come."""
        if self.pacer is not None:
            self.pacer.end()

    def summary(self) -> dict[str, Any]:
        """What the run's JSON says about pacing; times in us, of the last whole iteration."""
        from megatron_prism.features.pacing import pacer

        self.links.stop()
        stamps = self.pacer.launcher.stamps()
        self.pacer.lags.append(self.pacer.launcher.lag())
        predicted, iteration = self._predicted()
        figures = pacer.summary(self.pacer, stamps, predicted)
        return {
            "folder": str(self.asked.folder),
            "peers": "modelled: slices measured alone, after the local rank's stamps",
            "calls": self.sources,
            "slow": self.asked.slow,
            "interactions": len(self.table),
            "terms": len(self.table.cause),
            "loose": self.table.loose,
            "prepared_s": round(self.took_s, 3),
            "predicted_iteration_us": iteration,
            "links": self.links.summary(),
            "host_of_calls": "as NCCL's" if any(c.host for c in self.pacer.calls) else "our own",
            **figures,
        }

    def lines(self, pacing: Mapping[str, Any]) -> list[str]:
        """Say in a line or two what became of pacing."""
        lines = [
            f"  pacing    {pacing['iterations_paced']} iterations answered as the replay of "
            f"{pacing['folder']} says, {pacing['iterations_strayed']} not; "
            f"{pacing.get('late_calls', 0)} calls late, "
            f"{pacing.get('late_us', 0) / 1e3:.1f} ms in all"
        ]
        iteration_us = pacing.get("iteration_us")
        if iteration_us:
            lines.append(
                f"  pacing    an iteration took {iteration_us / 1e3:,.1f} ms, where the replay has "
                f"{pacing['predicted_iteration_us'] / 1e3:,.1f}"
            )
        calls = pacing.get("calls_paced")
        # most calls wait for Python: what is felt is this host, not the job
        if calls and pacing["host_bound"] > calls // 2:
            lines.append(
                f"  pacing    host-bound: {pacing['host_bound']:,} of {calls:,} calls of an "
                "iteration began as soon as they were issued; the GPU waits for Python, and a "
                "faster host would be felt"
            )
        lines.append(f"  pacing    {pacing['links']['said']}")
        lines += [f"  pacing    {why}" for why in pacing["strayed"][:2]]
        if "stuck" in pacing:
            lines.append(
                f"  pacing    waited for a minute in {pacing['stuck']}: not the job's time"
            )
        return lines

    def _predicted(self) -> tuple[dict[str, float], float]:
        """(us from coming to a call to its end, by group; us of an iteration), in the replay.

        There this rank is as fast as its slice says.
        """
        line = self._priced.timeline
        spans = line.spans(int(line.graph.classes.of[self.options.rank]))
        where = {op: i for i, op in enumerate(spans["op"].tolist())}
        ops = calls_of(self.program)
        begin: dict[int, int] = {}
        end: dict[int, int] = {}
        group: dict[int, str] = {}
        for op, call in zip(ops, self.pacer.calls, strict=True):
            # only calls that were paced have a launch
            if call.launch >= 0 and op in where:
                span = spans[where[op]]
                ready, ended = int(span["ready"]), int(span["end"])
                # a batch of messages is one launch: from its first to its last
                begin[call.launch] = min(ready, begin.get(call.launch, ready))
                end[call.launch] = max(ended, end.get(call.launch, ended))
                group.setdefault(call.launch, call.group)
        us_of_group = dict[str, float]()
        for launch, name in group.items():
            launch_us = (end[launch] - begin[launch]) / 1e3
            us_of_group[name] = us_of_group.get(name, 0.0) + launch_us
        return {name: round(us, 1) for name, us in us_of_group.items()}, line.iteration_ns / 1e3


def add_to(run: Run, session: Session, asked: PaceOptions) -> None:
    """Pace virtual ranks; captures the slices that are missing."""
    options = run.options
    asked = dataclasses.replace(asked, slow=_all_slow_ranks(options, asked))
    check(options, asked)
    capture_missing(options, asked.folder, sys.argv, run.store)
    pace = Pace(options, asked, run.version)
    run.follow_training(pace)
    run.sections.append(pace)
    run.on_arguments.append(pace.is_of)

    def begin(world: VirtualWorld) -> None:
        world.listen(*run.calls, pace.start(world, run.store))
        session.changes.on_undo(pace.links.stop)

    run.on_world.append(begin)


def _all_slow_ranks(options: Options, asked: PaceOptions) -> str:
    """Join the ranks of ``--prism-slow`` with those that other features make slow."""
    parts = [asked.slow]
    for feature in options.asked_features:
        parts.append(feature.options.slow_ranks(options.world, options.ranks))
    return ";".join(part for part in parts if part)


def check(options: Options, asked: PaceOptions) -> None:
    """UsageError where pacing makes no sense."""
    slow_ranks(options, asked.slow)
    if options.tier != "cuda":
        message = f"--prism-pace holds a GPU's streams, and tier {options.tier} has none"
        raise UsageError(message, fix="prism replay predicts iteration times without a GPU")
    processes_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", options.num_processes))
    # local ranks share memory of one host
    if processes_of_host < options.num_processes:
        raise UsageError(
            f"--prism-pace: {options.num_processes} local ranks on several hosts, "
            f"{processes_of_host} here",
            fix="name ranks of one host with --prism-ranks, or run each rank alone",
        )
    calibration(asked.folder)  # one that is damaged is said before captures


def _digest(table: AnswerTimes) -> str:
    """A word for what all local ranks must have alike."""
    digest = hashlib.sha1(repr(table.local).encode())
    for name in ("member", "op", "of", "own", "start", "cause", "back", "weight"):
        digest.update(np.ascontiguousarray(getattr(table, name)).tobytes())
    return digest.hexdigest()[:20]


def slow_ranks(options: Options, slow: str) -> list[tuple[list[int], str]]:
    """(virtual ranks, factor) of each part of ``slow``; UsageError if it makes no sense."""
    parts = list[tuple[list[int], str]]()
    for part in filter(None, slow.split(";")):
        text, _, factor = part.rpartition(":")
        fix = "write --prism-slow RANKS:FACTOR, such as 517:1.2 or pp=3,tp=0:3/2"
        if not text or not factor:
            raise UsageError(f"--prism-slow {part!r} names no ranks or no factor", fix=fix)
        chosen = options.world.select(text)
        ranks = [rank for rank in chosen if rank not in options.ranks]
        # a local rank cannot be slowed down by waiting for others
        if not ranks:
            message = f"--prism-slow {part}: a local rank is as fast as it is"
            raise UsageError(message, fix="name virtual ranks")
        whatif.parse_factor(factor)  # bad usage now, not after captures
        parts.append((ranks, factor))
    return parts


def _programs(folder: Path, options: Any, source: dict[str, str]) -> Programs:
    if not folder.is_dir():
        message = f"--prism-pace: there is no folder {folder}"
        raise UsageError(message, fix=f"capture one rank per stage first: --prism-capture {folder}")
    programs = slices.assemble(folder)
    device = programs.source.get("device")
    # slices of another GPU have other times
    if device not in (None, source["device"]):  # slices made by hand name none
        message = f"--prism-pace: the slices in {folder} were measured on {device!r}, and this is "
        fix = "name a folder that does not exist, and what is missing is captured here"
        raise UsageError(f"{message}{source['device']!r}", fix=fix)
    wanted = {key: value for key, value in source.items() if key != "device"}
    store = slices.SliceStore(folder, options.world, wanted, parsed=False)
    _refuse(folder, store.differences(programs))
    return programs


def _refuse(folder: Path, differ: list[str]) -> None:
    if differ:
        message = f"--prism-pace: {folder} holds slices of another job: {'; '.join(differ)}"
        raise UsageError(message, fix="capture this job into another folder, or delete this one")


def calibration(folder: Path, device: str = "") -> Calibration | None:
    """The calibration in ``folder``, if there is one; UsageError if it is of another GPU than
    ``device``.
    """
    file = folder / CALIBRATION
    if not file.exists():
        # without a calibration calls are modelled
        return None
    measured = read_calibration(file)
    measured_machine, machine = named_in(measured.source), named_in(device)
    # a GPU that no shipped machine describes: nothing to compare
    if measured_machine is None or machine is None:
        return measured
    # the name of a shipped machine begins with that of its GPU
    if measured_machine.partition("_")[0] != machine.partition("_")[0]:
        message = f"--prism-pace: {file} was measured on {measured_machine}, and this is {device!r}"
        fix = f"prism calibrate -o {file}, here; without the file calls are modelled"
        raise UsageError(message, fix=fix)
    return measured


def _machine_of(device: str) -> str:
    """The shipped machine of a device's name."""
    machine = named_in(device)
    if machine is None:
        message = f"--prism-pace: no machine is known for the device {device!r}"
        raise UsageError(message, fix=f"the known ones are {', '.join(machines())}")
    return machine
