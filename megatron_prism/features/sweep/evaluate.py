"""Times and memory of points, from slices captured once and used again, on processes or on Ray.

Points whose slices differ only in data-parallel size or number of microbatches are a family.  Of a
family one member is captured, with as few microbatches as repeat twice in its steady state; the
others follow by replay's what-ifs.  Slices lie in ``DIR/slices/FAMILY/dpN-mM``; a later sweep into
the same folder uses them.

A worker captures, replays and writes ``results/…/KEY.json`` whole or not at all, so a sweep that is
killed at any moment goes on where it was.  What is computed depends on the points alone: one
process, several or a cluster find the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_prism import __version__
from megatron_prism.core.errors import PrismError, ProgramError, UsageError
from megatron_prism.core.files import write_whole
from megatron_prism.core.programs.program import Program, Programs, load
from megatron_prism.core.programs.slices import assemble
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.units import format_bytes
from megatron_prism.emulate.processes.workers import die_with_parent
from megatron_prism.features.predict.predict import predict
from megatron_prism.features.sweep.layout import JobLayout
from megatron_prism.features.sweep.recipe_server import CaptureServer
from megatron_prism.features.sweep.space import SweepPoint
from megatron_prism.memory import nccl_buffers
from megatron_prism.memory.blocks import expected_reserved, reserved
from megatron_prism.memory.peaks import known_peak, peak
from megatron_prism.replay.priced_graph import price
from megatron_prism.replay.replicas import with_data_parallel
from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.uncertainty.plausibility import check_plausible

FITS_NOT, FAILED = "out of memory", "failed"
Figures = dict[str, Any]  # of a point, as JSON
_SAMPLES = 400  # iterations drawn for p95
_TRIES = 3  # of a family whose worker dies
_CLOSE = 0.85
_BESIDE = "behind iterations of fewer microbatches\n"  # in the .whole file of such slices
_MEMORY = 2 << 30  # bytes that a worker and its captures may take
Family = Sequence[SweepPoint]
Shared = tuple["SweepSettings", Path]  # to every worker
_server: CaptureServer | None = None  # of this worker process


@dataclasses.dataclass(frozen=True)
class SweepSettings:
    """How points are evaluated, the same for all of a sweep.

    folder  : of the sweep
    machine : name or file of it
    limit   : bytes of device memory; None: nothing falls by it
    device  : calibration of context, libraries and NCCL buffers
    tail    : whether p95 is wanted
    """

    folder: Path
    machine: str
    limit: int | None
    device: str
    tail: bool = False


class _OutOfMemoryError(Exception):
    """A stage allocates more than there is."""


# -- workers --------------------------------------------------------------------------------------
def run(
    families: Sequence[Family],
    settings: SweepSettings,
    results: Path,
    *,
    workers: int = 2,
    address: str = "",
    told: Callable[[int], None] = lambda done: None,
) -> None:
    """Evaluate every family; each point's result is in ``results`` then.

    Args:
        families: points that share captures.
        settings: machine, limit and objective of the sweep.
        results: folder, made if it is not there.
        workers: processes on this machine.
        address: of a Ray cluster that sees ``results`` under the same path; ``local`` starts one
            here; "": ``workers`` processes without Ray.
        told: called with the number of points that are done.
    """
    if not families:
        return
    results.mkdir(parents=True, exist_ok=True)
    left, done = dict(enumerate(families)), 0
    shared = (settings, results)
    if address:
        ended = _on_ray(left, shared, workers, address)
    else:
        ended = _on_this_machine(left, shared, workers)
    for number in ended:
        done += len(left.pop(number))
        told(done)
    # what is left has lost its worker each time
    killed = {"by": FAILED, "reason": f"its worker was killed {_TRIES} times"}
    for family in left.values():
        _store(family, results, lambda point: {**_head(point), **killed})


def _on_this_machine(left: dict[int, Family], shared: Shared, workers: int) -> Iterator[int]:
    """The numbers of families that are done, on processes of this machine.

    A killed worker (by who wants memory, say) ends its pool.  Any family that ran then may be the
    cause: it goes behind the others, and alone from its second time on.
    """
    waiting, deaths = list(left), Counter[int]()
    while waiting:
        size = min(workers, len(waiting))
        if deaths[waiting[0]]:
            size = 1
        # a family that has killed a worker runs alone, to see whether it is the cause
        pool = ProcessPoolExecutor(size, multiprocessing.get_context("fork"), die_with_parent)
        try:
            running: dict[Future[None], int] = {
                pool.submit(_work, left[number], *shared): number for number in waiting
            }
            for future in as_completed(running):
                future.result()
                yield running[future]
            return
        except BrokenProcessPool:
            waiting = [number for number in waiting if number in left]
            suspects, waiting = waiting[:size], waiting[size:]  # they are taken in order
            deaths.update(suspects)
            waiting += [number for number in suspects if deaths[number] < _TRIES]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_ray(left: dict[int, Family], shared: Shared, workers: int, address: str) -> Iterator[int]:
    """The same on a Ray cluster, whose workers have this package."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        fix = "pip install megatron_prism[sweep], or leave --address out"
        raise UsageError(f"--address {address} needs Ray", fix=fix) from None
    # a cluster that runs has its own sizes
    sizes = {}
    if address == "local":
        sizes = {"num_cpus": workers, "include_dashboard": False}
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **sizes)
    except (ConnectionError, ValueError, RuntimeError) as error:
        fix = "--address auto on a machine of the cluster, ray://HOST:10001, or --address local"
        raise UsageError(f"there is no Ray at {address}: {error}", fix=fix) from error
    task = ray.remote(num_cpus=1, memory=_MEMORY, max_retries=_TRIES - 1)(_work)
    with contextlib.ExitStack() as undo:
        undo.callback(ray.shutdown)
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray's words on dead workers
        # a task for each family, so that points of one share its slices
        running = {task.remote(family, *shared): number for number, family in left.items()}
        while running:
            ended, _ = ray.wait([*running])
            number = running.pop(ended[0])
            with contextlib.suppress(ray.exceptions.WorkerCrashedError):
                ray.get(ended[0])
                yield number


def _work(family: Family, settings: SweepSettings, results: Path) -> None:
    """In a worker: evaluate what is not there yet."""
    _store(family, results, lambda point: evaluate(point, settings))


def _store(family: Family, results: Path, figures: Callable[[SweepPoint], Figures]) -> None:
    for point in family:
        place = results / f"{point.key}.json"
        if not place.exists():
            write_whole(place, json.dumps(figures(point), indent=1) + "\n", force=True)


def _capture_server() -> CaptureServer:
    """This process's, another one where it has died."""
    global _server
    if _server is None or not _server.alive:
        _server = CaptureServer()
    return _server


def _head(point: SweepPoint) -> Figures:
    return {"key": point.key, "axes": dict(point.axes)}


def evaluate(point: SweepPoint, settings: SweepSettings) -> Figures:
    """The result of a point: its figures, or ``by`` and ``reason``."""
    assert point.layout is not None
    head = _head(point)
    try:
        programs, base = _programs(point.layout, settings)
        memory = _memory(programs, point.layout, base, settings)
        _check_fits(memory["bytes"], memory["stage"], settings.limit)
        timeline = _timeline(programs, base, point.layout, settings)
        slices = _slices(point.layout, base)
        return {**head, **_times(timeline, settings), "memory": memory, "slices": slices}
    except _OutOfMemoryError as error:
        return {**head, "by": FITS_NOT, "reason": str(error)}
    except PrismError as error:
        return {**head, "by": FAILED, "reason": error.message}


def _check_fits(num_bytes: int, stage: str, limit: int | None) -> None:
    if limit is not None and num_bytes > limit:
        message = f"{stage} needs {format_bytes(num_bytes)}, limit {format_bytes(limit)}"
        raise _OutOfMemoryError(message)


# -- slices ---------------------------------------------------------------------------------------
def timeline_of(layout: JobLayout, settings: SweepSettings) -> Timeline:
    """The timeline that its times are of, out of the slices in the folder."""
    return _timeline(*_programs(layout, settings), layout, settings)


def _timeline(
    programs: Programs, base: JobLayout, layout: JobLayout, settings: SweepSettings
) -> Timeline:
    """PrismError if it cannot be: the microbatches of ``base`` say what one takes."""
    timeline = price(programs, machine=settings.machine).timeline
    before = None
    if base.num_microbatches != layout.num_microbatches:
        family = settings.folder / "slices" / layout.family()
        # what a captured microbatch takes, with the replicas of the point
        captured = with_data_parallel(_captured(base, family, None), layout.world.dp)
        before = price(captured, machine=settings.machine).timeline
    check_plausible(timeline, before)
    return timeline


def _programs(layout: JobLayout, settings: SweepSettings) -> tuple[Programs, JobLayout]:
    """The point's programs and what was captured for them: stored already, or captured now."""
    family = settings.folder / "slices" / layout.family()
    base = _base(layout, family)
    exact = layout.resized(layout.world.dp, layout.num_microbatches)
    limit = settings.limit if base.world.dp == layout.world.dp else None  # states shrink with dp
    try:
        return _changed(_captured(base, family, limit), layout), base
    except ProgramError:  # no steady state that repeats, or calls that do not say how they scale
        if exact == base:
            raise
        return _captured(exact, family, settings.limit), exact


def _slices(layout: JobLayout, base: JobLayout) -> str:
    """Where the slices are in the sweep's folder, with the what-ifs that make them the point's, as
    prism compare reads both.
    """
    words = [f"slices/{layout.family()}/dp{base.world.dp}-m{base.num_microbatches}"]
    # slices of other replicas or microbatches than the point's: what-ifs lead from these to it
    if base.world.dp != layout.world.dp:
        words.append(f"dp={layout.world.dp}")
    if base.num_microbatches != layout.num_microbatches:
        words.append(f"microbatches={layout.num_microbatches}")
    return ",".join(words)


def _base(layout: JobLayout, family: Path) -> JobLayout:
    """The member of the family to capture: one that is complete already, else of this dp."""
    dp, wanted = layout.world.dp, layout.num_microbatches
    # as few microbatches as others follow from
    few = min(wanted, layout.fewest)
    complete = list[tuple[bool, int, int]]()  # has another dp, microbatches, dp
    for path in family.glob("dp*-m*.whole"):
        sizes = re.fullmatch(r"dp(\d+)-m(\d+)", path.stem)
        if sizes:
            complete.append((int(sizes[1]) != dp, int(sizes[2]), int(sizes[1])))
    # one of the same replicas first: nothing is extrapolated then
    for _, microbatches, replicas in sorted(complete):
        if microbatches in (wanted, few):
            return layout.resized(replicas, microbatches)
    return layout.resized(dp, few)


def _captured(base: JobLayout, family: Path, limit: int | None) -> Programs:
    """The slices of ``base``, those that are missing captured first.

    The first stage comes first: it has most microbatches in flight, so where it does not fit the
    others need no capture.  Stages between the second and the last are the second in another order
    if their layers are alike, and need less memory, as they have fewer microbatches in flight.  A
    ``.whole`` file says that no stage is missing.  Of a base that has fewer microbatches than
    others could follow from, slices of as many are captured beside it.
    """
    whole = _whole(family, base)
    folder = whole.with_suffix("")
    if whole.exists():
        return assemble(folder)
    # slices of as many microbatches as others follow from, beside those of too few
    more_folder: Path | None = None
    if base.num_microbatches < base.fewest:
        more_folder = family / f"dp{base.world.dp}-m{base.fewest}"
        if more_folder.exists():
            more_folder = None
    _make_empty_of_killed(folder)
    if more_folder is not None:
        _make_empty_of_killed(more_folder)
    for stage in base.world.stages:
        slice_path = base.capture(folder, stage, _capture_server, more_folder)
        if limit is not None:
            stage_peak = peak(load(slice_path).programs[0])
            # a slice without memory says nothing
            if stage_peak is not None:
                _check_fits(stage_peak.num_bytes, f"stage {stage}", limit)
    programs = base.assembled(folder)
    whole.touch()
    if more_folder is not None:
        # complete where each stage has its second slice, too
        names = {path.name for path in folder.glob("slice-*")}
        if names <= {path.name for path in more_folder.glob("slice-*")}:
            more_folder.with_name(f"{more_folder.name}.whole").write_text(_BESIDE)
    return programs


def _make_empty_of_killed(folder: Path) -> None:
    """Make a folder of slices; what a writer that was killed has left in it goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".*"):
        path.unlink(missing_ok=True)


def _whole(family: Path, base: JobLayout) -> Path:
    """The file that says that the folder beside it has every slice of ``base``, and how many
    microbatches the iterations before had.
    """
    return family / f"dp{base.world.dp}-m{base.num_microbatches}.whole"


def _changed(programs: Programs, layout: JobLayout) -> Programs:
    """Programs with the replicas and microbatches of ``layout``; ProgramError if they cannot."""
    if programs.num_microbatches != layout.num_microbatches:
        from megatron_prism.emulate.schedule import with_microbatches  # Megatron, seconds to import

        programs = with_microbatches(programs, layout.num_microbatches)
    return with_data_parallel(programs, layout.world.dp)


# -- figures --------------------------------------------------------------------------------------
def _memory(
    programs: Programs, layout: JobLayout, base: JobLayout, settings: SweepSettings
) -> Figures:
    """The stage that needs most device bytes, by what ``prism memory`` asks.

    A stage is not looked at if its tensors, context and NCCL take less than ``_CLOSE`` of the most:
    fragmentation differs less between stages.
    """
    device = nccl_buffers.read(settings.device)
    bytes_beyond = dict[int, int | None]()  # by program: context and NCCL; None: not known
    needed_bytes = dict[int, int]()
    for index in set(programs.program_of.tolist()):
        tensor_bytes = programs.programs[index].peak_bytes()
        # its slice recorded no memory
        if tensor_bytes:
            beyond = nccl_buffers.beyond_reserved(programs, index, device).num_bytes
            bytes_beyond[index] = beyond
            needed_bytes[index] = tensor_bytes + (beyond or 0)
    close_bytes = _CLOSE * max(needed_bytes.values(), default=0)
    family = settings.folder / "slices" / layout.family()
    before = _whole(family, base).read_text().strip() or "as captured"
    stages = list[Figures]()
    for index, needed in needed_bytes.items():
        # surely not the stage that needs most
        if needed < close_bytes:
            continue
        program, beyond = programs.programs[index], bytes_beyond[index]
        top = known_peak(program)
        reserved_bytes = _reserved(program, family, programs.world.size)
        stages.append(
            {
                "stage": f"stage {programs.world.coordinates(program.rank).pp}",
                "bytes": reserved_bytes + (beyond or 0),
                "level": "reserved" if beyond is None else "device",
                "allocated": top.num_bytes,
                "reserved": reserved_bytes,
                "history": programs.what_if or before,
                "at": top.op.label,
                "by_kind": {kind: size for kind, size in top.by_kind.items() if size},
            }
        )
    return max(stages, key=lambda stage: stage["bytes"])


def _reserved(program: Program, family: Path, num_ranks: int) -> int:
    """Bytes that PyTorch's allocator reserves; it costs more than a replay, so it is kept beside
    the slices.
    """
    # requests since the process began decide what is cached, where they are known
    asked = program.history if len(program.history) else program.allocations
    content = (
        __version__.encode(),
        asked.tobytes(),
        program.streams.tobytes(),
        str(num_ranks == 1).encode(),
    )
    place = family / f"reserved-{hashlib.sha1(b''.join(content)).hexdigest()[:16]}"
    try:
        return int(place.read_text())
    except (OSError, ValueError):
        num_bytes = expected_reserved(reserved(program), num_ranks)
        write_whole(place, f"{num_bytes}\n", force=True)
        return num_bytes


def _times(timeline: Timeline, settings: SweepSettings) -> Figures:
    """What ``prism replay --json`` says of the point, as far as a sweep compares it."""
    metrics = renderer_of(timeline).metrics(timeline)
    all_figures: Figures = dataclasses.asdict(metrics)
    programs = timeline.graph.programs
    world = programs.world
    # null where nobody knows the tokens of an iteration
    tokens_per_s = all_figures["tokens_per_s"]["value"]
    figures = _fields(all_figures, "iteration_ns low_ns high_ns computing exposed bubble")
    figures["tokens_per_gpu"] = None
    if tokens_per_s is not None:
        figures["tokens_per_gpu"] = tokens_per_s / world.size
    figures["mfu"] = all_figures["mfu"]["value"]
    figures["p95_ns"] = None
    figures["sources"] = [
        _fields(source, "what low_ns high_ns of") for source in all_figures["uncertainties"]
    ]
    figures["stages"] = [
        _fields(row, "name count compute exposed waiting idle critical")
        for row in all_figures["classes"]
    ]
    figures["path"] = [
        _fields(part, "phase what group ns") for part in all_figures["path"][:_SHOWN_PARTS]
    ]
    figures["provenance"] = programs.what_if or "as captured"
    figures["gpus"] = world.size
    figures["headline"] = all_figures["headline"]
    # drawing takes long, so it is done where the objective asks for it
    if settings.tail:
        drawn = predict(programs, machine=settings.machine, samples=_SAMPLES, seed=0)
        for quantile in drawn.quantiles:
            if quantile.level == 0.95:
                figures["p95_ns"] = quantile.ns
    return figures


_SHOWN_PARTS = 12  # of the critical path


def _fields(figures: Figures, names: str) -> Figures:
    """The figures of these names, in their order."""
    return {name: figures[name] for name in names.split()}
