"""The guard of peak memory in pytest::

    @pytest.mark.prism_memory(job="llama3-70b_1024gpu_tp8pp4vp5_h200", limit="80GiB")
    def test_memory(prism_memory):
        prism_memory.check()

The job is a shipped recipe, a recipe's file, a launch line (``torchrun … pretrain_gpt.py …``), or
programs that were captured.  Its baseline lies beside the test
(``prism_memory/<file>-<test>.json``).  ``--prism-mem-update`` writes it anew; a missing one is
written too, except under CI, where it fails.  A job that fails never becomes the baseline.
Loaded by every pytest run of the environment, so the package is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Programs


Record = Callable[[str, object], None]

_UPDATE = "pytest --prism-mem-update"
# bytes: file systems take 255, and what is written gets a longer name until it is whole
_LONGEST_NAME = 200
_KEYS = ("job", "settings", "baseline", "tol_bytes", "limit", "headroom", "device")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--prism-mem-update``."""
    parser.getgroup("megatron_prism").addoption(
        "--prism-mem-update",
        action="store_true",
        help="write the memory baselines of the tests that ran, instead of comparing",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", f"prism_memory({'=, '.join(_KEYS)}=): what the fixture prism_memory checks"
    )


@pytest.fixture
def prism_memory(request: pytest.FixtureRequest, record_property: Record) -> Iterator[MemoryGuard]:
    """Peaks of a job against the baseline of this test."""
    marked: dict[str, object] = {}
    # the marker nearest to the test comes last, and wins
    for mark in reversed(list(request.node.iter_markers("prism_memory"))):
        unknown = set(mark.kwargs) - set(_KEYS)
        if mark.args or unknown:
            pytest.fail(
                f"the marker prism_memory takes {', '.join(_KEYS)}, not {mark.args or unknown}",
                pytrace=False,
            )
        marked |= mark.kwargs
    place = request.path.parent / "prism_memory" / _baseline_name(request)
    update = request.config.getoption("--prism-mem-update")
    guard = MemoryGuard(marked, place, update, record_property, request.config.rootpath)
    yield guard
    # a marker alone looks as if it guarded
    if "job" in marked and not guard.checked:
        text = f"{request.node.nodeid} compared nothing: it has to call prism_memory.check()"
        request.node.warn(pytest.PytestWarning(text))


def _baseline_name(request: pytest.FixtureRequest) -> str:
    """Return the name of the test's own baseline; two tests of a file never share one."""
    # TestA.test_peak[a%2Fb]
    test = quote(request.node.nodeid.partition("::")[2].replace("::", "."), safe="[]")
    name = f"{request.path.stem}-{test}"
    # a test may have a whole launch line as its parameter, and a file may not
    if len(os.fsencode(name)) > _LONGEST_NAME:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        start = os.fsencode(name)[: _LONGEST_NAME - len(digest) - 1].decode(errors="ignore")
        name = f"{start}-{digest}"
    return f"{name}.json"


class MemoryGuard:
    """The fixture's value; ``check`` may be called once per baseline."""

    def __init__(
        self, marked: Mapping[str, Any], place: Path, update: bool, record: Record, root: Path
    ) -> None:
        self.marked, self.place, self.update = marked, place, update
        self.record, self.root = record, root
        self.checked = False

    def check(self, job: object = None, **more: object) -> None:
        """Fail if a class of ``job`` grew beyond ``tol_bytes`` or exceeds ``limit - headroom``.

        job      : name or file of a recipe, captured programs (a path or Programs)
        settings : key=value words of the recipe
        baseline : another file than the test's own; relative to the root of the tests
        device   : of what the limit is held against, as in prism memory check (default h200)
        """
        from megatron_prism.core.errors import PrismError

        self.checked = True
        settings = {**self.marked, **more}
        if job is not None:
            settings["job"] = job
        try:
            problem = self._problem(settings)
        except PrismError as error:
            problem = str(error)
        if problem:
            pytest.fail(problem, pytrace=False)

    def _problem(self, wanted: Mapping[str, Any]) -> str:
        """What fails, or nothing; the baseline is written where there is none yet."""
        from megatron_prism.cli import arguments
        from megatron_prism.cli.memory_arguments import limit_of
        from megatron_prism.features.guard import baseline
        from megatron_prism.features.guard.command import describe
        from megatron_prism.memory import job_peaks, peak_changes

        if not {"job"} <= set(wanted) <= set(_KEYS):
            return f"prism_memory.check takes {', '.join(_KEYS)}; job is needed"
        path = self.root / (wanted.get("baseline") or self.place)
        headroom, tol = (
            arguments.size(str(wanted.get(key) or 0)) for key in ("headroom", "tol_bytes")
        )
        limit = limit_of(wanted.get("limit"), headroom)
        device = wanted.get("device") or "h200"
        fresh = self.update or not path.exists()
        # in CI nobody would keep the file that is written
        if fresh and not self.update and os.environ.get("CI", "").lower() in ("1", "true"):
            return f"{path} is missing; write it: {_UPDATE}"
        before = None
        if not fresh:
            with _fixed_by_pytest():  # a damaged one is told before the capture
                before = baseline.load(path)
        programs = _programs(wanted["job"], wanted.get("settings", ()))
        after = job_peaks.peak_memory(programs, device=None if device == "none" else device)
        for name, figures in after.classes.items():
            self.record(f"prism_memory[{name}].peak_allocated", figures["peak_allocated"])
        # without a baseline the peaks are held against themselves: limits and leaks are still found
        with _fixed_by_pytest():
            changes = peak_changes.compare(before or after, after, tol_bytes=tol, limit=limit)
        failed = [change for change in changes if change.fails]
        # a job that exceeds its limit or leaks is no baseline
        if fresh and not failed:
            baseline.save(after, path, force=True)
        return "\n".join(map(describe, failed))


@contextlib.contextmanager
def _fixed_by_pytest() -> Iterator[None]:
    """Give what is wrong with a baseline the fix of this plugin, instead of prism memory's."""
    from megatron_prism.core.errors import UsageError

    try:
        yield
    except UsageError as error:
        raise UsageError(error.message, fix=f"{_UPDATE} writes it anew") from error


def _programs(job: object, settings: str | Sequence[str]) -> Programs:
    """Programs as they are, opened, or captured."""
    from megatron_prism.core.errors import UsageError
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.core.programs.slices import open_programs

    if isinstance(job, Programs):
        return job
    if not isinstance(job, (str, os.PathLike)):
        raise UsageError(f"job={job!r} is no path", fix="job=RECIPE, or the path of programs")
    exists = os.path.exists(job)  # a launch line may be longer than any name of a file
    # captured programs, which no setting changes
    if exists and Path(job).suffix not in (".yaml", ".yml"):
        if settings:
            message = f"settings={settings!r} changes no captured programs"
            raise UsageError(message, fix="job=RECIPE")
        return open_programs(job)
    words = (settings,) if isinstance(settings, str) else tuple(settings)
    # a recipe that was edited in between is another one
    changed_ns = 0
    if exists:
        changed_ns = Path(job).stat().st_mtime_ns
    return _captured(str(job), words, changed_ns)


@functools.lru_cache(maxsize=4)
def _captured(job: str, settings: tuple[str, ...], stamp: int) -> Programs:
    """Captured; tests of the same job share it.  ``stamp``: when the recipe's file changed."""
    from megatron_prism.cli.output import console
    from megatron_prism.core.jobs import recipe
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.emulate.command_line.job_line import job_of
    from megatron_prism.emulate.jobs import recipe_job, script_job

    with tempfile.TemporaryDirectory() as folder:
        slices = Path(folder) / "slices"
        line = shlex.split(job)
        # one word is a recipe, several are a launch line
        if len(line) == 1:
            return recipe_job.capture(recipe.load(job, settings), slices)
        job_flags, (script, *script_arguments) = job_of(line, [])
        words = [*job_flags, *script_arguments]
        script_job.capture_command_line(script, words, slices, console(stderr=True))
        return open_programs(slices)
