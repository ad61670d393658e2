"""Run families of points on local processes; every result is a file at once.

A worker captures, replays and writes ``results/…/KEY.json`` whole or not at all, so a sweep that is
killed at any moment goes on where it was.  What is computed depends on the points alone: one
process or several find the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from megatron_prism.core.files import write_whole
from megatron_prism.emulate.recipe_server import CaptureServer
from megatron_prism.emulate.workers import die_with_parent
from megatron_prism.sweep.evaluate import FAILED, SweepSettings, evaluate
from megatron_prism.sweep.space import SweepPoint

__all__ = ["run"]

_TRIES = 3  # of a family whose worker dies
Family = Sequence[SweepPoint]
_server: CaptureServer | None = None  # of this worker process


def run(
    families: Sequence[Family],
    settings: SweepSettings,
    results: Path,
    *,
    workers: int = 2,
    told: Callable[[int], None] = lambda done: None,
) -> None:
    """Evaluate every family on ``workers`` processes; each point's result is in ``results`` then.

    told : called with the number of points that are done
    """
    if not families:
        return
    results.mkdir(parents=True, exist_ok=True)
    left, done = dict(enumerate(families)), 0
    for _ in range(_TRIES):
        pool = ProcessPoolExecutor(
            min(workers, len(left)), multiprocessing.get_context("fork"), die_with_parent
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
