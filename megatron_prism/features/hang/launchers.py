"""Which processes ended by themselves, and which their launcher ended, by its report.

In : the rows of a launcher's report, one after another.  Out: ``Exit``, and what it says of a rank.

torchrun (elastic/multiprocessing/api.py) and Composer (cli/launcher.py) end all processes when one
has failed: by SIGTERM, and by SIGKILL what still runs after 30 seconds.  So a SIGKILL is a
process's own end only where no other process had ended that long before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

SIGNALS = {
    -9: "killed (SIGKILL)",
    -11: "crashed (SIGSEGV)",
    -7: "crashed (SIGBUS)",
    -4: "crashed (SIGILL)",
    -8: "crashed (SIGFPE)",
}
_SIGKILL, _SIGTERM = -9, -15
_SHELL = 128  # a shell, and a container, exits with this and the number of the signal
_GRACE_S = 25.0  # between SIGTERM and SIGKILL: 30 s, and clocks of whole seconds


@dataclass(frozen=True)
class Exit:
    """How the process of a rank ended, by a launcher's report.

    Attributes:
        rank: The rank.
        code: Its exit code; of a signal its number, negative.
        launcher: Who reports it, in words.
        report: The number of the file, and of the report in it.
        time_s: When it ended; -1 is unknown.
        is_first: Whether it ended before all others of the report.
    """

    rank: int
    code: int
    launcher: str
    report: tuple[int, int]
    time_s: float = -1.0
    is_first: bool = False

    @property
    def signal(self) -> int:
        """The signal that ended it, negative; 0 if it chose its exit code."""
        if self.code > _SHELL:
            return _SHELL - self.code
        return min(self.code, 0)

    @property
    def text(self) -> str:
        """How it ended, in words; "" if nothing that happened to it ended it."""
        if self.signal not in SIGNALS:
            return ""
        return f"{SIGNALS[self.signal]} ({self.launcher})"


class FailureTable:
    """Reads the rows of torchrun's report of failures, as ``ChildFailedError`` prints it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._report_count = 0
        self._rows: dict[str, str] = {}
        self._is_first = False

    def begin_first(self) -> None:
        """Take the failure that follows as the first one; it ends the report."""
        self._is_first = True
        self._rows.clear()

    def read(self, name: str, value: str) -> Exit | None:
        """Read a row; a failure is whole with its rank and its exit code, which comes last."""
        self._rows[name] = value
        if "rank" not in self._rows or "exitcode" not in self._rows:
            return None
        failure = Exit(
            rank=int(self._rows["rank"]),
            code=int(self._rows["exitcode"]),
            launcher="torchrun's table",
            report=(self._file, self._report_count),
            time_s=_seconds(self._rows.get("time", "")),
            is_first=self._is_first,
        )
        self._rows.clear()
        if self._is_first:
            self._report_count += 1
            self._is_first = False
        return failure


def _seconds(time: str) -> float:
    """Return the seconds of a row's time; -1 if it is none."""
    try:
        return datetime.strptime(time, "%Y-%m-%d_%H:%M:%S").timestamp()
    except ValueError:
        return -1.0


def is_of_launcher(end: Exit, exits: Sequence[Exit]) -> bool:
    """Tell whether the launcher may have ended a process because another one had failed.

    Args:
        end: How the process ended.
        exits: How the processes of all reports ended.
    """
    if end.signal != _SIGKILL or end.is_first:
        return False
    for earlier in exits:
        # what the launcher ended, or what ended well, is no reason to end others
        is_reason = earlier.code != 0 and earlier.signal != _SIGTERM and earlier is not end
        if earlier.report != end.report or not is_reason:
            continue
        gap_s = end.time_s - earlier.time_s
        are_timed = end.time_s >= 0 and earlier.time_s >= 0
        if gap_s >= _GRACE_S or not are_timed:
            return True
    return False
