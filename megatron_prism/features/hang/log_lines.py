"""Lines of job logs: whole, with the rank that speaks, and the calls that they name.

In : the text of a log.  Out: logical lines (colours, NULs, wraps and glued lines undone), the rank
that speaks in each, and the fields of calls in what ``log_grammar`` finds there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_prism.features.hang.log_grammar import NUMBERS

# -- fields of calls ------------------------------------------------------------------------------
GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d+) )?(?:PG )?(?P<whole>GUID )?(?P<name>[^\s()\]]+)\s?"
    r"(?:\((?P<desc>[^)]*)\))?\s?Rank (?P<rank>\d+)\]"
)  # to 2.3 a number that each process counts by itself; since 2.4 the GUID, the same everywhere
_OWN_NUMBER = re.compile(r"(?:\[E[^\]]*\]|^|:)\s*\[Rank (\d{1,9})\]")
_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut|Timeout\(ms\))\s*=\s*(\w+)(…?)")
_CUT_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut|Timeout\(ms\))\s*=\s*\w+$")
_UNKNOWN = (1 << 64) - 1  # of elements: torch's -1, unsigned
_PRINTED = re.compile(
    r"SequenceNumber=(\d+)|OpType=(\w+)|TensorShape=(\[[^\]]*\])|"
    r"TensorDtypes=(\w+)"
)
TIME = re.compile(r"\[[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.\d+)? \w+\.cpp")
_CUT = "…"  # stands where something on the screen hid a part of a line

OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "BARRIER": "all_reduce",
    "_ALLREDUCE_SPARSE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "SEND": "send",
    "RECV": "recv",
    "RECVANYSOURCE": "recv",
    "COALESCED": "coalesced",
}  # torch's words for kinds of calls (Types.hpp, opTypeToString) -> ours


def operation(word: str, cut: bool = False) -> str:
    """Our name of torch's word for a kind of call, also of its beginning where the rest is cut.

    "" if it is none, or may be several.
    """
    if word in OPERATIONS and not cut:
        return OPERATIONS[word]
    names = {ours for torchs, ours in OPERATIONS.items() if torchs.startswith(word)}
    if cut and not names:
        # what follows the hidden part is glued to the beginning: the longest beginning that fits
        names = _names_of_longest_beginning(word)
    return names.pop() if len(names) == 1 and len(word) > 2 else ""


def _names_of_longest_beginning(word: str) -> set[str]:
    for length in range(len(word) - 1, 3, -1):
        names = {ours for torchs, ours in OPERATIONS.items() if torchs.startswith(word[:length])}
        if names:
            return names
    return set()


@dataclass
class LoggedCall:
    """A call that timed out.

    seq         : its number in the group; -1 if the line does not say it
    kind        : torch's word for it
    elements    : of input and output; -1: not known
    ran_ms      : how long it had waited
    group       : the name that the line, or a later one, gives; "" if none does
    group_rank  : the rank's number in that group; -1 if it is not known
    stack       : torch's of the failed collective, innermost first
    """

    seq: int
    op: str = ""
    kind: str = ""
    elements: tuple[int, int] = (-1, -1)
    timeout_ms: int = -1
    ran_ms: int = -1
    group: str = ""
    group_rank: int = -1
    stack: list[str] = field(default_factory=list)

    def is_like(self, other: LoggedCall) -> bool:
        """Whether two ranks may be in one call, by all that both lines show."""
        sizes = min(self.elements) < 0 or min(other.elements) < 0 or self.elements == other.elements
        limits = -1 in (self.timeout_ms, other.timeout_ms) or self.timeout_ms == other.timeout_ms
        kinds = not self.op or not other.op or self.op == other.op
        return self.seq == other.seq and kinds and sizes and limits


def call_of(match: re.Match[str], text: str) -> LoggedCall:
    """Read the call that a line of ``Says.CALL`` names."""
    fields: dict[str, str] = {}
    hidden: set[str] = set()
    body = match["body"]
    for name, value, mark in _FIELD.findall(body):
        fields[name] = value
        if mark:
            hidden.add(name)
    end = _CUT_FIELD.search(body)
    if end is not None and end[1] != "OpType":
        # the line is cut off in a number: it may have more digits
        fields.pop(end[1])
    kind = fields.get("OpType", "")
    own = _OWN_NUMBER.findall(text)
    return LoggedCall(
        _number(fields.get("SeqNum", "")),
        operation(kind, "OpType" in hidden),
        kind,
        (_number(fields.get("NumelIn", "")), _number(fields.get("NumelOut", ""))),
        _number(fields.get("Timeout(ms)", "")),
        _number(match.groupdict().get("ran_ms") or ""),
        group_rank=int(own[-1]) if own else -1,
    )


def _number(word: str) -> int:
    """A number; -1 where there is none, or torch did not know it."""
    value = int(word) if word.isdecimal() and len(word) < 21 else -1
    return -1 if value == _UNKNOWN else value


@dataclass(frozen=True)
class Fingerprint:
    """A call as torch's own check of collectives prints it; "" and -1: not printed."""

    seq: int = -1
    op: str = ""
    shape: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        parts = (
            self.op or "a call",
            f"#{self.seq}" if self.seq > 0 else "",
            self.shape,
            self.dtype,
        )
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Differ:
    """Two calls that differ, as torch says it; ranks as the group numbers them, and the global rank
    that says it, where its line has a mark.  ``other`` is -1 where only one side is printed (to
    1.12).
    """

    speaker: int | None
    rank: int
    call: Fingerprint
    other: int
    others: Fingerprint


def fingerprint(text: str | None) -> Fingerprint:
    """Read a call out of a line of ``Says.DIFFER``."""
    seq, kind, shape, dtype = "", "", "", ""
    for printed in _PRINTED.findall(text or ""):
        seq, kind = seq or printed[0], kind or printed[1]
        shape, dtype = shape or printed[2], dtype or printed[3]
    if text and not kind and "(" not in text:
        kind = text  # 1.13 prints the other's kind alone
    name = OPERATIONS.get(kind, kind.lower())
    return Fingerprint(int(seq) if seq else -1, name, shape, dtype)


# -- who speaks -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mark:
    """A prefix that says which rank speaks.

    Attributes:
        pattern: The prefix, with the rank.
        source: Who prints it.
        word: A part of each such line, looked for first.
    """

    pattern: re.Pattern[str]
    source: str
    word: str = "rank"


ANYWHERE = (
    Mark(
        re.compile(r"(?:\[|^)rank[=:]?\s?(\d{1,9})\]:?\s?"),
        "torch 2.2 on (c10 logging, excepthook), behind any launcher's prefix; Ray's [rank=107]",
    ),
    Mark(
        re.compile(r"\(PID:\d+, Device:\d+, RankID:(\d{1,9})\)"),
        "torch_npu, formatErrorCode: Ascend/pytorch#62",
        word="RankID:",
    ),
)
IN_FRONT = (
    Mark(re.compile(r"\[1,(\d{1,9})\](?:<std(?:out|err|diag)>)?:\s?"), "mpirun --tag-output"),
    Mark(re.compile(r"\(\w+ rank=(\d{1,9}) pid=\d+[^)]*\)\s?"), "Ray Train"),
    Mark(
        re.compile(
            r"[\[(](?i:global[ _]?)?(?:RANK|rank|Rank)[ _]?[=:]?\s?(\d{1,9})[\])]:?"
            r"(?!:?\s?(?:Watchdog|Some NCCL|To avoid|Caught|Found|NCCL|Ranks? ))"
        ),
        "loggers: [RANK 4], [rank: 4] of Lightning; not torch's [Rank 4], which is of a group",
    ),
    Mark(re.compile(r"(?:RANK|rank|Rank)[ _=]?(\d{1,9})\s?[:|]\s"), "loggers: rank 4: …"),
)
_IN_FRONT_WORD = re.compile(r"[Rr]ank|RANK|\[1,")  # what such a line has somewhere
_TASK = re.compile(r"^\s*(\d{1,6}): ")  # srun --label: a rank, where a task is one
_OF_TORCHRUN = re.compile(r"\[(?:default|trainer)\d+\]:|torch[./]distributed[./](?:elastic|run)")
_LOCAL = re.compile(r"^\s*(?:\d{1,6}: )?\[(?:default|trainer)\d+\]:")  # torchrun --tee: a local one
_HOST = re.compile(
    r"((?!\S*(?:Error|Exception|Interrupt|Exit|Timeout):)[a-z][\w.-]*\d[\w.-]*):\s"
)  # pdsh
_LAUNCHED = re.compile(r"\s*((?:\d{1,6}: ?)?\[(?:default|trainer)\d+\]:|\d{1,6}: )")
_ACTOR = re.compile(r"\((\w+ pid=\d+(?:, ip=[^)\s]+)?)\)")  # of Ray
_PEELED = re.compile(
    r"\s*(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[\s:]*"  # times
    r"|\d\d:\d\d:\d\d(?:[.,]\d+)?\s+|\[\d{3,}\]\s+"  # and numbers of lines
    r"|\[(?:default|trainer)\d+\]:|\[?(?:INFO|ERROR|WARNING|WARN|DEBUG|CRITICAL)\]?[:\s]+"
    r"|[a-z][\w.-]*\d[\w.-]*:\s+)"  # a host
)


class Speakers:
    """Whose the lines of one log are.

    What a prefix means is decided by the log as a whole: a task of srun is a rank unless lines say
    otherwise, and an actor of Ray is the rank that its lines name once.
    """

    def __init__(self, lines: Iterable[str], owner: int | None) -> None:
        self.owner = owner
        self.marked = False
        self.has_torchrun = False
        self.tasks_are_ranks = True
        self.has_label_of_rank = False
        # groups, smaller perhaps than the job, by whose numbers alone their lines name ranks
        self.numbering_groups: set[str] = set()
        torch_ranks: set[int] = set()
        actors: dict[str, set[int]] = defaultdict(set)
        for line in lines:
            # a task that starts torchrun is a node
            if _OF_TORCHRUN.search(line):
                self.has_torchrun = True
            rank, _ = _marked(line)
            if rank is None:
                continue
            self.marked = True
            if ANYWHERE[0].pattern.search(line):
                torch_ranks.add(rank)
            task = _TASK.match(line)
            if task is not None and int(task[1]) != rank:
                self.tasks_are_ranks = False
            elif task is not None:
                self.has_label_of_rank = True
            actor = _ACTOR.search(line)
            if actor is not None:
                actors[actor[1]].add(rank)
        # the number in the name of a file in which other ranks speak is a node's, or a stage's
        if torch_ranks - {owner}:
            self.owner = None
        self._actors = {actor: min(ranks) for actor, ranks in actors.items() if len(ranks) == 1}

    def rank_of_task(self, task: int) -> int | None:
        """Return the rank that a task of srun is; None if it may be a node with several.

        A label in front of a line that names its rank (``3: [rank3]: …``) says which it is.
        """
        if self.has_torchrun or not self.tasks_are_ranks or not self.has_label_of_rank:
            return None
        return task

    def rank_of_process(self, pid: int) -> int | None:
        """Return the rank of an actor of Ray by its process; None if that is not known."""
        ranks = set()
        for actor, rank in self._actors.items():
            # WorkerDict pid=123, ip=10.0.0.4
            if actor.partition(",")[0].endswith(f" pid={pid}"):
                ranks.add(rank)
        return ranks.pop() if len(ranks) == 1 else None

    def unknown_process(self, line: str) -> tuple[str, str]:
        """Return the process that speaks, of which no rank is known, and what it says.

        It is an actor of Ray, a local process of torchrun, perhaps with the task of srun, or one of
        a host.
        """
        process = _ACTOR.search(line) or _LAUNCHED.match(line) or _HOST.match(line)
        if process is None:
            return "", line
        name = process[1].rstrip(": ")
        if name.isdecimal():
            name = f"task {name}"
        return name, line[process.end() :]

    def of(self, line: str) -> tuple[int | None, str]:
        """(the global rank that speaks, what is left of the line)."""
        rank, rest = _marked(line)
        if rank is not None:
            return rank, rest
        actor = _ACTOR.search(line)
        if actor is not None and actor[1] in self._actors:
            return self._actors[actor[1]], line[actor.end() :].lstrip()
        if self.owner is not None:
            return self.owner, line
        task = _TASK.match(line)
        tasks_are_ranks = self.tasks_are_ranks and not self.has_torchrun
        if task is not None and tasks_are_ranks and not _LOCAL.match(line):
            return int(task[1]), line[task.end() :]
        return self._of_group(line), line

    def _of_group(self, line: str) -> int | None:
        """The rank by its number in a group: before torch 2.2 there is nothing else.

        It is the global one in the default group, and taken for it where no line has another mark.
        """
        if "NCCL" not in line and "Watchdog" not in line:
            return None
        group = GROUP.search(line)
        if group is not None:
            whole = group["desc"] == "default_pg" or group["name"] == "0"
            if not whole and not self.marked:
                self.numbering_groups.add(group["desc"] or f"group {group['name']}")
            return int(group["rank"]) if whole or not self.marked else None
        alone = _OWN_NUMBER.search(line)
        return int(alone[1]) if alone is not None and not self.marked else None


def _marked(line: str) -> tuple[int | None, str]:
    """(the rank of a mark that a line has, what follows it)."""
    for mark in ANYWHERE:
        marked = mark.pattern.search(line) if mark.word in line else None
        if marked is not None:
            return int(marked[1]), line[marked.end() :]
    if not _IN_FRONT_WORD.search(line):
        return None, line
    start = 0
    while (peeled := _PEELED.match(line, start)) is not None and peeled.end() > start:
        start = peeled.end()
    for mark in IN_FRONT:
        if (found := mark.pattern.match(line, start)) is not None:
            return int(found[1]), line[found.end() :].lstrip()
    return None, line


# -- logical lines --------------------------------------------------------------------------------
_COLOUR = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\[3[0-7]m(?=\()|(?<=\))\[0m"
)  # the escape may be lost
_GLUED = re.compile(r"(?=\[rank\d{1,9}\]:)")
_MARK_ALONE = re.compile(r"\[rank\d{1,9}\]:\s*")
_OF_TORCH = re.compile(r"ProcessGroup\w+\.cpp|Watchdog|WorkNCCL|CollectiveFingerPrint")
_RECORD = re.compile(
    r"\s*(?:\[[EWIF]\d|Traceback|File \"|frame #|terminate called|what\(\)|#\d+ |"
    r"Exception raised|\[default|"
    r"(?:rank|exitcode|time|host|error_file|traceback)\s+:)|"
    r".*Watchdog caught coll"
)
_POSITION = re.compile(r"\[\d+/\d+\]\s*$")  # tmux, over the end of the first line on the screen
_BEGUN = (
    (re.compile(r"WorkNCCL\("), re.compile(r"WorkNCCL\(.*timing out")),
    (re.compile(r"Watchdog caught"), re.compile(r"caught collective operation timeout:\s*\S")),
    (re.compile(r"\[PG (?:ID|\d)"), re.compile(r"\[PG [^\]]*Rank \d+\]")),
    (re.compile(r"last\s*enqueue", re.IGNORECASE), re.compile(NUMBERS, re.IGNORECASE)),
    (re.compile(r"CollectiveFingerPrint"), re.compile(r"Collectives differ|\.$")),
)  # messages that have begun, and what they have once they are whole
_WHOLE = re.compile(rf"[.!]\s*$|{NUMBERS}", re.IGNORECASE)
_WIDTH = 60  # columns: no screen is narrower
_WRAPS = 12  # lines of a screen that one message takes at most


def logical_lines(text: str) -> list[str]:
    """The lines as they were printed: without colours and NULs, one message in each."""
    if "\x1b" in text or "[0m" in text:
        text = _COLOUR.sub("", text)
    text = text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
    physical = text.split("\n")
    width = _screen_width(physical)
    logical: list[str] = []
    wraps = 0
    last_length = 0
    is_between_words = False  # whether the line before ends there
    for line in physical:
        is_rest = bool(logical) and wraps < _WRAPS
        if is_rest and _continues(logical[-1], last_length, line, width):
            begun = _POSITION.sub(_CUT, logical[-1].rstrip())
            # a screen that wraps between words leaves the blank, one that pads leaves many
            if is_between_words:
                begun += " "
            logical[-1] = begun + line.rstrip()
            wraps += 1
        else:
            logical += _messages(line)
            wraps = 0
        last_length = len(line)
        is_between_words = line.endswith(" ") and not line.endswith("  ")
    return logical


def _messages(line: str) -> list[str]:
    """Split messages of several ranks that stand in one line, each from its mark on.

    A mark in front of another one is a launcher's: torchrun marks what a local rank prints, and
    torch marks it again by the global one (pytorch/torchtitan#1492).
    """
    if "[rank" not in line:
        return [line.rstrip()]
    # text in front of the first mark is a launcher's prefix, too
    prefix, *marked = _GLUED.split(line)
    messages: list[str] = []
    for place, piece in enumerate(marked):
        is_last = place + 1 == len(marked)
        if is_last or not _MARK_ALONE.fullmatch(piece):
            messages.append(piece.rstrip())
    if not messages:
        return [prefix.rstrip()]
    first = prefix + messages[0]
    return [first.rstrip(), *messages[1:]]


def _screen_width(lines: list[str]) -> int:
    """The columns at which a copied screen cut long lines; 0 if lines are whole."""
    longest = max(map(len, lines), default=0)
    full = sum(len(line) == longest for line in lines)
    return longest if full > 1 and longest >= _WIDTH else 0


def _continues(before: str, length: int, line: str, width: int) -> bool:
    """Whether ``line`` is the rest of the message ``before``, whose last part had ``length``."""
    if not line.strip() or not _OF_TORCH.search(before):
        return False
    if _marked(line)[0] is not None or _TASK.match(line) or _RECORD.match(line):
        return False
    open_messages = [
        end for begin, end in _BEGUN if begin.search(before) and not end.search(before)
    ]
    # the longest lines of several ranks are as long as each other without any screen
    is_cut = 0 < width == length and not _WHOLE.search(before)
    return bool(open_messages) or is_cut
