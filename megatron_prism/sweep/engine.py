"""Run families of points on local processes or on Ray; every result is a file at once.

A worker captures, replays and writes ``results/…/KEY.json`` whole or not at all, so a sweep that is
killed at any moment goes on where it was.  What is computed depends on the points alone: one
process, two or a cluster find the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import write_whole
from megatron_prism.emulate.recipe_job import die_with_parent
from megatron_prism.emulate.recipe_server import CaptureServer
from megatron_prism.sweep.evaluate import FAILED, SweepSettings, evaluate
from megatron_prism.sweep.space import SweepPoint

__all__ = ["run"]

_TRIES = 3  # of a family whose worker dies
_MEMORY = 2 << 30  # bytes that a worker and its captures may take
Family = Sequence[SweepPoint]
_server: CaptureServer | None = None  # of this worker process


def run(
    families: Sequence[Family],
    settings: SweepSettings,
    results: Path,
    *,
    workers: int = 2,
    address: str | None = None,
    told: Callable[[int], None] = lambda done: None,
) -> None:
    """Evaluate every family; each point's result is in ``results`` afterwards.

    address : of a Ray cluster, "local" for one on this machine; None: ``workers`` processes
    told    : called with the number of points that are done
    """
    if not families:
        return
    results.mkdir(parents=True, exist_ok=True)
    if address is not None:
        _on_ray(families, settings, results, address, told)
    else:
        _on_processes(families, settings, results, workers, told)


def _work(family: Family, settings: SweepSettings, results: Path) -> int:
    """In a worker: evaluate what is not there yet; the number of points."""
    global _server
    for point in family:
        place = results / f"{point.key}.json"
        if place.exists():
            continue
        if _server is None:
            _server = CaptureServer()
        (found,) = evaluate([point], settings, _server)
        if found.get("by") == FAILED and not _server.alive:
            _server = None  # the next point gets another one
        write_whole(place, json.dumps(found, indent=1) + "\n", force=True)
    return len(family)


def _failed(family: Family, results: Path, why: str) -> None:
    for point in family:
        place = results / f"{point.key}.json"
        if not place.exists():
            found = {"key": point.key, "axes": dict(point.axes), "by": FAILED, "reason": why}
            write_whole(place, json.dumps(found, indent=1) + "\n")


def _on_processes(
    families: Sequence[Family],
    settings: SweepSettings,
    results: Path,
    workers: int,
    told: Callable[[int], None],
) -> None:
    left, done = dict(enumerate(families)), 0
    for _ in range(_TRIES):
        pool = ProcessPoolExecutor(
            min(workers, len(left)), multiprocessing.get_context("spawn"), die_with_parent
        )
        try:
            running: dict[Future[int], int] = {
                pool.submit(_work, family, settings, results): number
                for number, family in left.items()
            }
            for future in as_completed(running):
                done += future.result()
                del left[running[future]]
                told(done)
        except BrokenProcessPool:  # killed, by who wants memory say: the others go on in a new one
            continue
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return
    for family in left.values():
        _failed(family, results, f"its worker was killed {_TRIES} times")


def _on_ray(
    families: Sequence[Family],
    settings: SweepSettings,
    results: Path,
    address: str,
    told: Callable[[int], None],
) -> None:
    try:
        import ray
    except ImportError:
        raise UsageError(
            "a sweep on a cluster needs Ray, absent here", fix="pip install megatron_prism[sweep]"
        ) from None
    here = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(
        address=None if address == "local" else address,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=here,
    )
    try:
        work: Any = ray.remote(num_cpus=1, memory=_MEMORY, max_retries=_TRIES)(_work)
        running = {work.remote(family, settings, results): family for family in families}
        done, waiting = 0, list(running)
        while waiting:
            ready, waiting = ray.wait(waiting)
            for reference in ready:
                try:
                    done += ray.get(reference)
                except ray.exceptions.WorkerCrashedError:
                    _failed(running[reference], results, f"its worker was killed {_TRIES} times")
                told(done)
    finally:
        ray.shutdown()
