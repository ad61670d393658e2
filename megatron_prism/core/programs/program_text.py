"""The text form of programs, written and parsed.

::

    prism-program 1
    world size=4 tp=2 pp=2
    source megatron_core=0.16.1 tier=meta
    program rank=0 ranks=0-1
    0F0  compute     ns=412us kernels=9
    0F0  all_reduce  TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum @mappings.py:31
    0F0  send        PIPELINE_MODEL_PARALLEL_GROUP bf16 in=4096 peer=1 handle=3
    0F0  wait        handle=3

A line is ``LABEL OP [GROUP] [DTYPE] [key=value …] [@file:line]``, in any spacing; ``#`` starts a
comment.  The label is ``<microbatch><phase><chunk>`` (``2F0``, ``2F``), ``O`` for the optimizer,
``G`` for gradient synchronisation or ``-``.  ``n=`` is ``in=`` and ``out=`` at once.  ``alloc`` and
``free`` lines stand where memory comes and goes; their ``note=`` says whose it is.
``group NAME 0,1;2,3`` before the programs makes groups that do not follow from the world's sizes.
``parse(dump(p)) == p``, exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np

from megatron_prism.core import units
from megatron_prism.core.errors import PrismError, ProgramError, WorldError, did_you_mean
from megatron_prism.core.programs.ops import DTYPES, NAMES, PHASES, REDUCE, UNKNOWN, Op, limits
from megatron_prism.core.programs.program import Builder, Program, Programs
from megatron_prism.core.world import MOST_RANKS, World, format_ranks

VERSION = 1
TIMES = ("ns", "host", "lead", "products")  # fields with a unit of time
_DEFAULT = {op_field.name: op_field.default for op_field in fields(Op)}
_SHORT_NS = {name: scale for name, scale in units.NS.items() if len(name) < 3}


@dataclass(frozen=True)
class _Unit:
    """How a column with units is written and read.

    Attributes:
        scales: Unit -> its size.
        read: Reads a number with a unit.
    """

    scales: Mapping[str, int]
    read: Callable[[str], int]


_NANOSECONDS = _Unit(_SHORT_NS, units.parse_ns)
_BYTES = _Unit(units.BINARY, units.parse_bytes)
# column -> its unit, where a number alone would not do
_UNITS = {
    **dict.fromkeys(TIMES, _NANOSECONDS),
    "traffic": _BYTES,
    "bytes": _BYTES,
}
_NO_UNIT = _Unit({}, units.parse_count)
# key=value words of a line in their order: key -> column
_COLUMNS = {
    "in": "num_in",
    "out": "num_out",
    "reduce": "reduce",
    "peer": "peer",
    "root": "root",
    "handle": "handle",
    "batch": "batch",
    "kernels": "kernels",
    "flops": "flops",
    "stream": "stream",
    "shape": "shape",
    **{name: name for name in TIMES},
    "traffic": "traffic",
}
_SIZES_OF_WORLD = tuple(world_field.name for world_field in fields(World))
Fields = dict[str, Any]  # keyword arguments of what is made of them
Word = re.Match[str]


def dump(programs: Programs) -> str:
    """Write the text form of a world's programs."""
    lines = [f"prism-program {VERSION}", f"world {_pairs(_sizes(programs.world))}"]
    if programs.source:
        lines.append(f"source {_pairs(programs.source)}")
    # groups that do not follow from the sizes of the world
    for name, groups in programs.groups.items():
        members = ";".join(_joined(group) for group in groups)
        lines.append(f"group {name} {members}")
    for index, program in enumerate(programs.programs):
        ranks = format_ranks(programs.ranks_of(index).tolist())
        lines += ["", f"program rank={program.rank} ranks={ranks}", *_lines(program)]
    return "\n".join(lines) + "\n"


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _sizes(world: World) -> dict[str, object]:
    """Return the sizes of a world that are not as usual; always the first."""
    # None: a size is never usual, so it is always written
    usual = {**vars(World(world.size)), "size": None, "etp": world.tp}
    sizes: dict[str, object] = {}
    for name in _SIZES_OF_WORLD:
        value = getattr(world, name)
        if value != usual[name]:
            sizes[name] = value
    return sizes


def _lines(program: Program) -> Iterator[str]:
    """Yield the lines of one program, allocations before the op that they precede."""
    events = iter(program.allocations.tolist())
    event = next(events, None)
    for index, op in enumerate(program):
        # changes of memory before this op
        while event is not None and event[0] <= index:
            yield _format_memory(event, program.strings)
            event = next(events, None)
        yield format_op(op)
    # what goes behind the last op
    while event is not None:
        yield _format_memory(event, program.strings)
        event = next(events, None)


def _format_memory(event: Sequence[int], strings: Sequence[str]) -> str:
    """Write a change of memory."""
    _, storage, size, note = event
    values: dict[str, object] = {"storage": storage, "bytes": abs(size)}
    if note:
        values["note"] = strings[note]
    name = "alloc" if size >= 0 else "free"
    return f"-    {name:10}  {_pairs(values)}"


def format_op(op: Op) -> str:
    """Write one line; fields at their defaults are left out."""
    values: Fields = {}
    # both sides at once
    is_one_size = op.num_in == op.num_out != -1
    if is_one_size:
        values["n"] = op.num_in
    for key, column in _COLUMNS.items():
        value = getattr(op, column)
        is_written_as_n = is_one_size and key in ("in", "out")
        if value != _DEFAULT[column] and not is_written_as_n:
            values[key] = value
    if op.splits is not None:
        send_rows, receive_rows = op.splits
        values["to"] = _joined(send_rows)
        values["from"] = _joined(receive_rows)
    if op.note:
        values["note"] = op.note
    words = [f"{op.label:4} {op.name:10} "]
    site = f"@{op.site}" if op.site else ""
    for word in (op.group, op.dtype, _pairs(values), site):
        if word:
            words.append(word)
    return " ".join(words).rstrip()


def _pairs(values: Mapping[str, object]) -> str:
    """Write ``key=value`` words."""
    return " ".join(f"{key}={_written(key, value)}" for key, value in values.items())


def _written(key: str, value: object) -> str:
    """Write a value: a number in a unit, a text in quotes where it needs any."""
    if isinstance(value, int):
        return _with_unit(value, _UNITS.get(key, _NO_UNIT))
    # a plain word needs no quotes
    text = str(value)
    if text and not re.search(r'[\s"#\\]', text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    text = text.replace("\n", "\\n").replace("\r", "\\r")
    return f'"{text}"'


def _with_unit(value: int, unit: _Unit) -> str:
    """Write a number in the largest unit that loses nothing: 412us, 38MiB, 1501ns."""
    largest_name = ""
    largest_scale = 1
    for name, scale in unit.scales.items():
        # 1,501 ns is no number of us
        is_exact = value % scale == 0 and value >= scale
        if is_exact and (not largest_name or scale > largest_scale):
            largest_name = name
            largest_scale = scale
    return f"{value // largest_scale}{largest_name}"


_LABEL = re.compile(r"(?P<mb>\d+)?(?P<phase>[A-Z-])(?P<chunk>\d+)?")
_TOKEN = re.compile(r'[^\s"#]*"(?:[^"\\]|\\.)*"|[^\s#]+|#.*')
_QUOTED = re.compile(r'[^\s"#]*"(?:[^"\\]|\\.)*"')
_MEMBERS = re.compile(r"\d{1,18}(,\d{1,18})*(;\d{1,18}(,\d{1,18})*)*")
_LETTERS = {letter: phase for phase, letter in PHASES.items()}


_ESCAPES = {"n": "\n", "r": "\r"}


def _unquoted(text: str) -> str:
    """Return a text without its quotes."""
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), text[1:-1])


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _rows(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,17}(,\d{1,17})*", text):
        raise ProgramError(f"{text!r} are no rows", fix="to=4,4 from=4,4")
    return _ranks(text)


def _reduction(text: str) -> str:
    if text not in REDUCE:
        raise ProgramError(f"there is no reduction {text}", fix=f"use {', '.join(REDUCE[1:])}")
    return text


def _number(column: str, most: int | None = None) -> Callable[[str], int]:
    """Return what reads a number for a column.

    Args:
        column: Which bounds it, and has its unit.
        most: Of a world.
    """
    read_unit = _UNITS.get(column, _NO_UNIT).read
    low, high = limits(column)

    def number(text: str) -> int:
        is_plain = re.fullmatch(r"-?\d{1,18}", text)
        # with a unit: 412us, 38MiB
        value = int(text) if is_plain else read_unit(text)
        if not low <= value <= high:
            fix = f"write {low} to {high}"
            raise ProgramError(f"{text[:40]} is out of range", fix=fix)
        if most is not None and value > most:
            raise ProgramError("that is too large a world", fix=f"at most {most:,}")
        return int(value)

    return number


Readers = Mapping[str, Callable[[str], object]]
_READERS: Readers = {
    **{key: _number(column) for key, column in _COLUMNS.items() if column in UNKNOWN},
    "peer": _number("peer"),
    "stream": str,
    "shape": str,
    "note": str,
    "to": _rows,
    "from": _rows,
    "n": _number("num_in"),
    "reduce": _reduction,
}
_MEMORY: Readers = {"storage": _number("storage"), "bytes": _number("bytes"), "note": str}


def _readers_of_world() -> Readers:
    """Return what reads each size of a world."""
    readers: dict[str, Callable[[str], object]] = {}
    for name in _SIZES_OF_WORLD:
        if name != "order":
            readers[name] = _number("rank")
    readers["size"] = _number("rank", MOST_RANKS)
    readers["order"] = str
    return readers


_SIZES = _readers_of_world()


def parse(text: str, name: str = "program") -> Programs:
    """Read programs out of their text.

    Args:
        text: The text.
        name: Of it, for messages.

    Raises:
        ProgramError: Names ``name``, the line and the column.
    """
    return _Reader(text, name).read()


class _Reader:
    """Walks the lines once; every complaint shows the line with an arrow under the word."""

    def __init__(self, text: str, name: str) -> None:
        # not splitlines(): a note may hold U+2028, which is no end of a line here
        self.lines = text.replace("\r\n", "\n").split("\n")
        self.name = name
        self.number = 1
        self.line = self.lines[0]
        self.world: World | None = None
        self.source: dict[str, str] = {}
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.programs: list[tuple[int, Builder]] = []
        self.program_of = np.empty(0, dtype=np.int32)  # rank -> index of its program

    def fail(self, word: Word | int, what: str, fix: str) -> NoReturn:
        """Raise ProgramError at ``word``, or at a column."""
        column = word if isinstance(word, int) else word.start()
        place = f"{self.name}:{self.number}:{column + 1}"
        picture = f"  {self.line}\n  {' ' * column}^ here"
        raise ProgramError(f"{place}: {what}\n{picture}", fix=fix)

    def read(self) -> Programs:
        """Read all lines."""
        heads = {
            "world": self._world,
            "source": self._source,
            "group": self._group,
            "program": self._program,
        }
        lines = self._words()
        self._version(next(lines, []))
        for words in lines:
            first, *others = words
            if first[0] in heads:
                heads[first[0]](first, others)
            else:
                self._op(words)
        # behind the last line: complaints point there
        self.line = self.lines[self.number - 1]
        if self.world is None or not self.programs:
            self.fail(0, "no world or no program", "world size=2, then program ranks=0-1")
        if (self.program_of < 0).any():
            missing = format_ranks(np.flatnonzero(self.program_of < 0).tolist())
            self.fail(0, f"ranks {missing} have no program", "name them in a program's ranks=")
        programs = tuple(builder.build(rank) for rank, builder in self.programs)
        return Programs(self.world, programs, self.program_of, self.groups, self.source)

    def _words(self) -> Iterator[list[Word]]:
        """Yield the words of every line that has any, without comments."""
        for number, line in enumerate(self.lines, 1):
            self.number, self.line = number, line
            tokens = _TOKEN.finditer(self.line)
            words = [token for token in tokens if not token[0].startswith("#")]
            for word in words:
                # a quote that is opened and not closed, or the other way round
                if '"' in word[0] and not _QUOTED.fullmatch(word[0]):
                    place = word.start() + word[0].index('"')
                    self.fail(place, "this quote has no end", 'note="two words"')
            if words:
                yield words

    def _version(self, words: list[Word]) -> None:
        if not words:
            self.number, self.line = 1, self.lines[0]
            self.fail(0, "this is no program: it is empty", "start with: prism-program 1")
        if words[0][0] != "prism-program":
            self.fail(words[0], "this is no program", "start with: prism-program 1")
        version = words[1][0] if len(words) > 1 else "?"
        # another version may mean other things by the same words
        if version != str(VERSION):
            what = f"version {version} of the text form is not known"
            self.fail(words[-1], what, f"this release reads version {VERSION}")

    def _values(self, words: list[Word], what: str, readers: Readers | None = None) -> Fields:
        """Read key=value words.

        Args:
            words: The words.
            what: They are of, for messages.
            readers: Key -> what reads its value; without it any text of any key is taken.
        """
        values: Fields = {}
        for word in words:
            key, equals, text = word[0].partition("=")
            if not equals or not text:
                self.fail(word, f"{word[0]!r} is not key=value", "write it like size=8")
            if key in values:
                self.fail(word, f"{key} is given twice", "leave one of them out")
            if readers is not None and key not in readers:
                keys = [f"{name}=" for name in readers]
                fix = did_you_mean(f"{key}=", keys, f"use {' '.join(keys)}")
                self.fail(word, f"{what} has no {key}", fix)
            reader = str if readers is None else readers[key]
            values[key] = self._read(word, _unquoted(text), reader)
        return values

    def _read(self, word: Word, text: str, reader: Callable[[str], object]) -> object:
        try:
            return reader(text)
        except PrismError as error:
            self.fail(word, error.message, error.fix or "write a whole number")

    def _world(self, head: Word, words: list[Word]) -> None:
        before = self.world
        try:
            self.world = World(**self._values(words, "a world", _SIZES))
        except (WorldError, TypeError) as error:
            self.fail(head, str(getattr(error, "message", error)), "world size=8 tp=2 pp=2")
        # after the check of its sizes, so that the first mistake is named first
        if before is not None:
            self.fail(head, "there is a world already", "a file holds one world")
        self.program_of = np.full(self.world.size, -1, dtype=np.int32)

    def _source(self, head: Word, words: list[Word]) -> None:
        self.source |= self._values(words, "a source")

    def _group(self, head: Word, words: list[Word]) -> None:
        if len(words) < 2:
            self.fail(head, "a group has a name and members", "group NAME 0,1;2,3")
        name = words[0][0]
        text = "".join(word[0] for word in words[1:])
        if not _MEMBERS.fullmatch(text):
            self.fail(words[1], f"{text!r} are no members", "group NAME 0,1;2,3")
        if name in self.groups:
            again = f"group {name} is given twice"
            self.fail(words[0], again, "write all of them in one line: 0,1;2,3")
        self.groups[name] = tuple(map(_ranks, text.split(";")))

    def _program(self, head: Word, words: list[Word]) -> None:
        if self.world is None:
            self.fail(head, "the world must come first", "write: world size=8 tp=2")
        readers = {"rank": _number("rank"), "ranks": self.world.select}
        values = self._values(words, "a program", readers)
        if not values:
            self.fail(head, "whose program is this?", "program rank=0 ranks=0-3")
        ranks = list(values.get("ranks", ()))
        # the rank that was captured, or the first that runs the program
        rank = values["rank"] if "rank" in values else ranks[0]
        if rank >= self.world.size:
            self.fail(head, f"rank {rank} is outside a world of {self.world.size}", "rank=0")
        # without ranks= a program is of one rank alone
        if not ranks:
            ranks = [rank]
        has_program = self.program_of[ranks] >= 0
        if has_program.any():
            again = f"rank {ranks[int(has_program.argmax())]} has a program already"
            self.fail(head, again, "name every rank in one program only")
        self.program_of[ranks] = len(self.programs)
        self.programs.append((rank, Builder()))

    def _op(self, words: list[Word]) -> None:
        """Read an op, or a change of memory."""
        if not self.programs:
            self.fail(words[0], "an op before the first program", "write: program rank=0")
        _, builder = self.programs[-1]
        if len(words) < 2:
            self.fail(words[0], "a line is LABEL OP …", "0F0 compute ns=412us")
        label, name, *arguments = words
        match = _LABEL.fullmatch(label[0])
        if match is None or match["phase"] not in _LETTERS:
            fix = "2F0 (microbatch, F/B/W, chunk), O, G, -"
            self.fail(label, f"{label[0]!r} is no label", fix)
        if name[0] in ("alloc", "free"):
            self._change_of_memory(builder, name, arguments)
            return
        if name[0] not in NAMES:
            self._unknown(name, "op", NAMES)
        step: Fields = {"phase": _LETTERS[match["phase"]]}
        if match["mb"]:
            step["microbatch"] = self._read(label, match["mb"], _number("microbatch"))
        if match["chunk"]:
            step["chunk"] = self._read(label, match["chunk"], _number("chunk"))
        builder.add(name[0], **step, **self._fields(name, arguments))

    def _change_of_memory(self, builder: Builder, name: Word, words: list[Word]) -> None:
        """Read the rest of a line of alloc or free."""
        values = {"note": "", **self._values(words, "an allocation", _MEMORY)}
        if len(values) < len(_MEMORY):
            self.fail(name, "storage and bytes are needed", "alloc storage=1 bytes=2MiB")
        num_bytes = values["bytes"]
        if name[0] == "free":
            num_bytes = -num_bytes
        builder.memory(values["storage"], num_bytes, values["note"])

    def _unknown(self, word: Word, what: str, names: Sequence[str]) -> NoReturn:
        """Raise ProgramError for a word that is none of ``names``."""
        fix = did_you_mean(word[0], names, f"use one of {', '.join(filter(None, names))}")
        self.fail(word, f"there is no {what} {word[0]}", fix)

    def _fields(self, name: Word, words: list[Word]) -> Fields:
        """Read the fields of an op."""
        # words KEY=VALUE; the name of a file may have the sign, too
        pairs = [word for word in words if "=" in word[0] and not word[0].startswith("@")]
        values = self._values(pairs, "an op", _READERS)
        # of most calls both sides have as many elements
        if "n" in values:
            values["in"] = values["out"] = values.pop("n")
        splits = [values.pop(key) for key in ("to", "from") if key in values]
        if splits:
            # rows to every member and from every member
            if len(splits) != 2:
                self.fail(name, "splits need to= and from=", "to=4,4 from=4,4")
            values["splits"] = tuple(splits)
        columns = {_COLUMNS.get(key, key): value for key, value in values.items()}
        # words without a key: a site, a dtype, and what is neither is the group
        for word in words:
            if word[0].startswith("@"):
                columns["site"] = word[0][1:]
            elif "=" in word[0]:
                continue
            elif word[0] in DTYPES:
                columns["dtype"] = word[0]
            elif "group" not in columns:
                columns["group"] = word[0]
            else:
                self._unknown(word, "dtype", list(DTYPES))
        return columns
