"""Exceptions in the log of a rank: which of them ended it, and which it handled.

In : the lines of one rank, one after another.  Out: ``Raised``, each with why it was handled.  An
exception that is printed while the rank trains on ends nothing: a retried upload, a record of
``logger.exception``, "Exception ignored in", one of another thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megatron_prism.core import code_files

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TYPE = re.compile(r"(?:\w+\.)*\w*(?:[Ee]rror|Exception|Interrupt|Exit|Iteration|Timeout)\b")
_OOM = re.compile(r"out of memory", re.IGNORECASE)
_OUTSIDE = re.compile(
    r"gloo.*Timed out waiting|Timed out waiting \d+ms|Wait timeout|Socket Timeout|"
    r"DistStoreError|wait timeout after|client socket has timed out|"
    r"timed out.*(?:store|TCPStore|barrier)", re.IGNORECASE
)  # fmt: skip
_OF_OTHERS = re.compile(
    r"Connection (?:closed|reset)|Broken pipe|Socket|[NHR]CCL|Hccl\w+, error code|"
    # Ascend: a device ran out of time while it waited
    r"aclrtSynchronize\w+, error code is (?:107020|507046|507048)|"
    r"DistBackend|ChildFailed|SignalException|"
    r"SystemExit|KeyboardInterrupt|collective operation timeout|recvValue failed|monitoredBarrier|"
    r"Detected mismatch between collectives", re.IGNORECASE
)  # fmt: skip
# Python raises these for the rank's own code, whatever names stand in the text
_OF_OWN_CODE = re.compile(
    r"(?:Import|ModuleNotFound|Key|Index|Attribute|Name|UnboundLocal|Type|Syntax|Indentation)Error\b"
)
_GONE = re.compile(
    r"Connection (?:closed|reset)|Broken pipe|remote process exited", re.IGNORECASE
)  # of those: another process ended, or its network
_OF_ACTOR = "ray.exceptions.RayTaskError"  # what a driver prints in front of an actor's error
_CHAIN = re.compile(r"(?:During handling of the above|The above) exception")
WENT_ON = "it went on"  # the rank ended an iteration afterwards
LOGGED = "it was logged"  # the one reason that does not prove that the rank went on
_BEFORE = (
    (re.compile(r"Exception ignored in"), "it was ignored"),
    (re.compile(r"Exception in thread (?!MainThread)"), "it ended another thread"),
    (re.compile(r"\b(?:ERROR|CRITICAL|EXCEPTION)\b"), LOGGED),
    (
        re.compile(
            r"\bWARN(?:ING)?\b.*(?:fail|error|exception|could not|cannot|unable|retr)",
            re.IGNORECASE,
        ),
        LOGGED,
    ),
)  # what stands before a traceback that ends nothing
_AGAIN = re.compile(r"\bretr(?:y|ies|ying)\b|try(?:ing)? again", re.IGNORECASE)


@dataclass
class Raised:
    """An exception.

    kind    : exception, out of memory, outside (it waited for others outside NCCL); "" if it only
              says that others are gone
    handled : why it did not end the rank; "" if it may have
    """

    kind: str
    text: str
    handled: str = ""

    @property
    def says_others_are_gone(self) -> bool:
        """Whether it says that another process, or the network to it, is gone."""
        return not self.kind and _GONE.search(self.text) is not None


@dataclass
class Tracebacks:
    """The tracebacks of one rank."""

    raised: list[Raised] = field(default_factory=list)
    _frames: list[str] | None = None  # of a traceback that has not ended
    _handled: str = ""  # why that one ends nothing
    _last: str = ""  # the line before
    _fresh: bool = False  # whether the line before ended a traceback

    def read(self, line: str) -> Raised | None:
        """Read the next line of the rank; the exception, if a traceback ends with it."""
        ended = None
        if "Traceback (most recent call last)" in line:
            self._begin(line)
        elif self._frames is not None and (frame := _FRAME.search(line)) is not None:
            path = code_files.without_environment(frame[1])
            self._frames.append(f"{frame[3]} ({path}:{frame[2]})")
        elif self._frames is not None and line.strip().startswith(_OF_ACTOR):
            # the actor's own traceback follows
            self._frames = []
        elif self._frames is not None and _TYPE.match(line.strip()):
            ended = self._end(line.strip()[:200])
        elif self.raised and _CHAIN.search(line):
            # one error: the traceback that follows says how it ended
            self._handled = self.raised.pop().handled
            self._last = ""
            return None
        elif self._fresh and self.raised and _AGAIN.search(line):
            self.raised[-1].handled = "it tried again"
        self._fresh = ended is not None
        if line.strip():
            self._last = line
        return ended

    def goes_on(self) -> None:
        """Take all exceptions so far as handled: the rank ended an iteration after them."""
        for raised in self.raised:
            if raised.handled in ("", LOGGED):
                raised.handled = WENT_ON

    def _begin(self, line: str) -> None:
        before = line.partition("Traceback")[0].strip() or self._last
        self._frames = []
        reasons = [reason for pattern, reason in _BEFORE if pattern.search(before)]
        self._handled = self._handled or (reasons[0] if reasons else "")

    def _end(self, text: str) -> Raised:
        frames = self._frames or []
        own = [frame for frame in frames if "torch/distributed" not in frame]
        site = own[-1] if own else "its script"
        if _OUTSIDE.search(text):
            raised = Raised("outside", f"{_distributed_call(frames)} of {site}: {text}")
        elif _OOM.search(text):
            raised = Raised("out of memory", f"{text} in {site}")
        elif _OF_OTHERS.search(text) and not _OF_OWN_CODE.match(text):
            raised = Raised("", f"{text} in {site}")
        else:
            raised = Raised("exception", f"{text} in {site}")
        raised.handled = self._handled or ("it tried again" if _AGAIN.search(text) else "")
        self._frames, self._handled = None, ""
        self.raised.append(raised)
        return raised


def _distributed_call(frames: list[str]) -> str:
    """The innermost function of torch.distributed, but its wrappers."""
    for frame in reversed(frames):
        name = frame.partition(" ")[0]
        if "torch/distributed" in frame and name != "wrapper":
            return name
    return "a call"
