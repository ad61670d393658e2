"""What a line of a job's log may say, and what a row of the grammar has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Says(Enum):
    """What a line says."""

    CALL = auto()  # a call that timed out: number, kind, elements
    COUNTS = auto()  # how many calls of a group were enqueued and ended
    FAILED = auto()  # the number of the call that timed out, beside the group's name
    FIRED = auto()  # the rank's watchdog took its process down: another line names the call
    NATIVE_STACK = auto()  # the stack of that call follows
    DIFFER = auto()  # two ranks make different calls, by torch's own check
    ABSENT = auto()  # a rank did not come to a monitored barrier
    DEVICE = auto()  # the watchdog ended by an error of the device
    PEER_GONE = auto()  # the watchdog ended because another process did, or its network
    JOINED = auto()  # how many ranks came to the store, and how many the job has
    KILLED = auto()  # the kernel killed a process
    TASKS = auto()  # tasks of srun ended: numbers, cause
    ACTOR_DIED = auto()  # an actor of Ray died: its process is named there, or in a later line
    PROCESS = auto()  # the process of the actor that died
    WORKER_DIED = auto()  # a worker of Ray died, by its process
    EXITED = auto()  # the process of a rank ended: exit code, or signal
    REPORT = auto()  # a row of torchrun's report of failures
    ROOT_CAUSE = auto()  # the rows that follow are of the first failure
    LAUNCHER_ENDS = auto()  # the launcher ends what still runs
    EVIDENCE = auto()  # of the job: shown as it is
    STARTS = auto()  # the job, or an attempt of it, starts
    DEDUPLICATED = auto()  # the launcher left out like lines of other ranks


@dataclass(frozen=True)
class LogLine:
    """A row of the grammar.

    Attributes:
        says: What such a line says.
        word: A part of each such line, looked for first: most lines have none.
        pattern: What is read of it.
        source: Who prints it, and since when, or who reported it.
        example: Such a line.
    """

    says: Says
    word: str
    pattern: re.Pattern[str]
    source: str
    example: str
