"""Run ranks in worker processes, a few at a time, with a bar for each; capture what a world needs.

Recipes and stock scripts share it.  A worker is a command that runs one rank.  It finds a file
descriptor in its environment (``EVENTS``), on which it writes JSON lines: progress, then one result
or one error.  This side imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors as io_selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from megatron_prism.core.errors import MissingSlicesError, NotTrainedError, PrismError
from megatron_prism.core.jobs.job_settings import THREADS_UNKNOWN
from megatron_prism.core.messages import progress
from megatron_prism.core.programs import program
from megatron_prism.core.programs.slices import WORLD, assemble
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.emulate.processes.rank_template import (
    ForkedRank,
    RankTemplate,
    can_fork,
    die_with_parent,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from megatron_prism.core.programs.program import Programs
    from megatron_prism.core.programs.slices import SliceStore

EVENTS = "PRISM_WORKER_EVENTS"  # environment variable: the file descriptor
Emit = Callable[..., None]  # emit(kind, **fields)
Json = dict[str, Any]
Said = TypeVar("Said")  # what a rank that was recorded says of itself
_LAUNCHER = frozenset(  # of whoever started this process: a worker is started anew
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_RUN_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PRISM_ARGS",
    )
)


@dataclass(frozen=True)
class RankTask:
    """What runs one rank.

    words : of Python's command line
    log   : file that keeps what it printed if it fails; None: the error quotes the end
    forks : whether it may be a fork of a process that has imported torch: ``-m MODULE …`` without a
            GPU
    periods : of layers that a chunk of the job has (``short_job``); 0: all
    shares_start : whether it may be a fork of a process that has started the job: all tasks differ
            in a rank's own flags alone
    """

    rank: int
    title: str
    words: Sequence[str]
    log: Path | None = None
    forks: bool = False
    shares_start: bool = False
    periods: int = 0


@dataclass
class _Worker:
    """One running rank: its process, the pipe it reports through, and where it prints to.

    place : among all tasks
    """

    task: RankTask
    place: int
    process: subprocess.Popen[bytes] | ForkedRank
    events: int
    printed: IO[bytes]
    bar: TaskID
    noted: set[str]  # what one of all has noted is printed once
    buffer: bytes = b""
    result: Json | None = None
    failure: Json = field(default_factory=dict)


def emitter() -> Emit | None:
    """How this process tells the one that started it as a worker; None: nobody did."""
    # the pipe's number, which the parent has put there
    fd = os.environ.get(EVENTS)
    if fd is None:
        return None
    out = int(fd)
    with contextlib.suppress(OSError):
        # children of the worker would keep the pipe open
        os.set_inheritable(out, False)

    def emit(kind: str, **fields: object) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(out, (json.dumps({"kind": kind, **fields}) + "\n").encode())

    return emit


def run(
    tasks: Sequence[RankTask],
    console: Console,
    num_workers: int | None = None,
    *,
    finished: Callable[[RankTask, Json], None] | None = None,
    doing: str = "",
) -> list[Json]:
    """Run tasks, a few at a time, in their order.

    A terminal sees a bar for each; elsewhere a line says now and then how far they are.

    Args:
        tasks: to run.
        console: gets bars and lines.
        num_workers: tasks that run at once; default: one per core, at most 8.
        finished: is told each task that has ended, and its result, while others run.
        doing: what the tasks do, where that is not to run ranks.

    Returns:
        The results, in the order of the tasks.

    Raises:
        PrismError, NotTrainedError: a task of a whole job failed; all others are stopped.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # more at once take more memory than they save time
    num_workers = num_workers or min(len(os.sched_getaffinity(0)), 8)
    waiting, running = list(enumerate(tasks)), list[_Worker]()
    done: dict[int, Json] = {}  # place of a task -> its result
    noted = set[str]()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
    )
    selector = io_selectors.DefaultSelector()
    bars = Progress(*columns, console=console, disable=not console.is_terminal)
    say = partial(console.print, end="")
    far = progress(lambda: doing or _far(tasks, running, done, bars), say)
    talk: contextlib.AbstractContextManager[None] = far
    # a terminal shows the bars
    if console.is_terminal:
        talk = contextlib.nullcontext()
    with bars, talk, selector:
        bar_of_task = [bars.add_task(task.title, total=1, what="waiting") for task in tasks]
        # several ranks share the imports of one process; a single one would wait for it
        template = None
        if can_fork() and len(tasks) > 1 and all(task.forks for task in tasks):
            template = RankTemplate(_environment())
        try:
            ended: list[_Worker] = []
            while waiting or running or ended:
                # fill the places that have become free
                while waiting and len(running) < num_workers:
                    place, task = waiting.pop(0)
                    worker = _start(task, place, bar_of_task[place], noted, template)
                    bars.update(worker.bar, what="starting")
                    running.append(worker)
                    selector.register(worker.events, io_selectors.EVENT_READ, worker)
                # an estimate takes its time, in which other ranks run
                if finished is not None:
                    _tell_all(finished, ended, done)
                # wakes up also to see processes that ended without a word
                for key, _ in selector.select(timeout=0.5 if running else 0):
                    _take(key.data, os.read(key.data.events, 1 << 16), bars)
                ended = [worker for worker in running if worker.process.poll() is not None]
                for worker in ended:
                    selector.unregister(worker.events)
                    running.remove(worker)
                    done[worker.place] = _finish(worker, bars)
        finally:
            for worker in running:
                worker.process.kill()
                worker.process.wait()
                worker.printed.close()
                os.close(worker.events)
            if template is not None:
                template.close()
    return [done[place] for place in range(len(tasks))]


def _tell_all(
    finished: Callable[[RankTask, Json], None], ended: Sequence[_Worker], done: Mapping[int, Json]
) -> None:
    """Tell of workers that have ended, and of their results."""
    for worker in ended:
        finished(worker.task, done[worker.place])


def _far(
    tasks: Sequence[RankTask], running: Sequence[_Worker], done: Container[int], bars: Progress
) -> str:
    """``1 of 4 ranks done; rank 0: 57 %, 4/7 steps of a microbatch``.

    Args:
        tasks: of all ranks; those with few layers are of an estimate, and no ranks more.
        running: the workers of some of them.
        done: places of the tasks that have ended.
        bars: say how far the others are.

    Returns:
        The text; empty before the first rank runs.
    """
    if not running:
        return ""
    # a job with few layers is no rank of the job
    whole = [place for place, task in enumerate(tasks) if not task.periods]
    num_done = sum(place in done for place in whole)
    now = []
    for worker in running:
        bar = next(bar for bar in bars.tasks if bar.id == worker.bar)
        name = f"rank {worker.task.rank:,}"
        if worker.task.periods:
            name += " with few layers"
        now.append(f"{name}: {bar.fields['what']}")
    return f"{num_done} of {counted(len(whole), 'rank')} done; {', '.join(now)}"


def _environment() -> dict[str, str]:
    """Return the variables of a worker, less those of a launcher of this process."""
    environment = {key: text for key, text in os.environ.items() if key not in _LAUNCHER}
    # ranks run side by side, so each has a core; the job may have others
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = "1"
        environment[THREADS_UNKNOWN] = "1"
    return environment


def _start(
    task: RankTask, place: int, bar: TaskID, noted: set[str], template: RankTemplate | None
) -> _Worker:
    """Start a rank: as a fork of ``template`` if there is one, else as a process of its own."""
    read, write = os.pipe()
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
    process: subprocess.Popen[bytes] | ForkedRank
    # the template has imported what all ranks import
    if template is not None:
        process = template.start(
            task.words,
            (EVENTS, write),
            printed.fileno(),
            shares_start=task.shares_start,
            periods=task.periods,
        )
    else:
        process = subprocess.Popen(
            [sys.executable, *task.words],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(write,),
            env={**_environment(), EVENTS: str(write)},
            preexec_fn=die_with_parent,
        )
    os.close(write)
    return _Worker(task, place, process, read, printed, bar, noted)


def _take(worker: _Worker, chunk: bytes, bars: Progress) -> None:
    """Act on the complete JSON lines that have arrived."""
    # the last line may be cut: it waits for its rest
    *lines, worker.buffer = (worker.buffer + chunk).split(b"\n")
    for line in lines:
        event = json.loads(line)
        if event["kind"] == "step":
            done, total = event["done"], event["total"]
            text = f"{done}/{total} steps of a microbatch"
            bars.update(worker.bar, completed=done, total=total, what=text)
        elif event["kind"] == "note":
            # ranks note the same: each text is printed once
            if event["text"] not in worker.noted:
                worker.noted.add(event["text"])
                bars.console.print(f"  {'note':<20} {event['text']}", markup=False)
        elif event["kind"] == "phase":
            bars.update(worker.bar, what=event["text"])
        elif event["kind"] == "result":
            worker.result = event["result"]
        # of several errors the first is the reason
        else:
            worker.failure = worker.failure or event


def _finish(worker: _Worker, bars: Progress) -> Json:
    """The result of a worker that has ended; its failure as an error of ours."""
    os.set_blocking(worker.events, False)  # children of its own may still hold the other end
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(worker.events, 1 << 16):
            _take(worker, chunk, bars)
    os.close(worker.events)
    task, status, failure = worker.task, worker.process.returncode, worker.failure
    with worker.printed as file:
        file.seek(0)
        log = file.read()
    # a result counts from a process that ended well alone
    if worker.result is not None and status == 0:
        bars.update(worker.bar, completed=1, total=1, what="done")
        return worker.result
    # the whole job may run where a part of its layers does not
    if task.periods:
        reason = failure.get("message") or f"its process ended with status {status}"
        return {"no_estimate": f"the job with few layers failed: {reason}"}
    where = ""
    if task.log is not None:
        task.log.write_bytes(log)
        where = f"; all that it printed is in {task.log}"
    if failure.get("kind") == "error":
        # bad usage: nothing of the output helps
        if task.log is not None and failure["exit_code"] == 2:
            task.log.unlink()  # the message says it all
        error = PrismError(f"rank {task.rank}: {failure['message']}", fix=failure["fix"])
        error.exit_code = failure["exit_code"]
        raise error
    # the traceback, else the end of the output
    end = failure.get("trace") or log.decode(errors="replace")[-2000:]
    message = failure.get("message") or f"its process ended with status {status}"
    fix = "report this as a bug"
    if task.log:
        fix = f"look at {task.log}"
    # as the kernel does where memory runs out
    if status == -signal.SIGKILL:
        fix = "if memory ran out, run fewer ranks at once or one alone; " + fix
    raise NotTrainedError(f"rank {task.rank} failed: {message}{where}\n{end}", fix=fix)


def capture_world(
    store: SliceStore,
    ranks: Sequence[int],
    record: Callable[[tuple[int, ...]], list[Said]],
    console: Console,
) -> tuple[Programs, list[Said]]:
    """Record ``ranks`` and whoever else the world turns out to need; join the slices.

    Slices that are there are kept.

    Args:
        store: whose folder was prepared.
        ranks: to record first.
        record: runs the ranks that it is given, each of which puts its slice into the store.
        console: gets the talk.

    Returns:
        The world, and what the recorded ranks said of themselves.
    """
    results: list[Said] = []
    recorded_ranks = set(store.ranks())
    # an interrupted capture goes on here
    missing = tuple(rank for rank in ranks if rank not in recorded_ranks)
    if len(missing) < len(ranks):
        console.print(f"  {'kept':<20} {counted(len(ranks) - len(missing), 'slice')} there already")
    while True:
        if missing:
            results += record(missing)
        try:
            programs = assemble(store.folder)
            break
        # a peer of a rank may have other layers than all that were recorded
        except MissingSlicesError as error:
            recorded_ranks = set(store.ranks())
            missing = tuple(rank for rank in error.ranks if rank not in recorded_ranks)
            if not missing:
                raise
            console.print(
                f"  {counted(len(missing), 'rank')} more ({format_ranks(missing)}): {error.why}"
            )
    program.save(programs, store.folder / WORLD, force=True)
    return programs, results
