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

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np

from megatron_prism.core import units
from megatron_prism.core.errors import PrismError, ProgramError, WorldError, did_you_mean
from megatron_prism.core.ops import DTYPES, NAMES, PHASES, REDUCE, UNKNOWN, Op, limits
from megatron_prism.core.program import Builder, Program, Programs
from megatron_prism.core.world import MOST_RANKS, World, format_ranks

VERSION = 1
TIMES = ("ns", "host", "lead", "products")  # fields with a unit of time
_DEFAULT = {f.name: f.default for f in fields(Op)}
_SHORT_NS = {name: scale for name, scale in units.NS.items() if len(name) < 3}
# column -> the units that it is written in and how it is read, where a number alone would not do
_UNITS: dict[str, tuple[dict[str, int], Callable[[str], int]]] = {
    **dict.fromkeys(TIMES, (_SHORT_NS, units.parse_ns)),
    **dict.fromkeys(("traffic", "bytes"), (units.BINARY, units.parse_bytes)),
}
# key=value words of a line in their order: key -> column
_COLUMNS = {
    "in": "num_in",
    "out": "num_out",
    **{key: key for key in ("reduce", "peer", "root", "handle", "batch", "kernels", "flops")},
    **{key: key for key in ("stream", "shape", *TIMES, "traffic")},
}
_WORLD = tuple(f.name for f in fields(World))
Fields = dict[str, Any]  # keyword arguments of what is made of them
Word = re.Match[str]


def dump(programs: Programs) -> str:
    """The text form of a world's programs."""
    world, plain = programs.world, World(programs.world.size)
    sizes = {name: getattr(world, name) for name in _WORLD}
    usual = {**vars(plain), "size": None, "etp": world.tp}
    shown = {key: value for key, value in sizes.items() if value != usual[key]}
    lines = [f"prism-program {VERSION}", f"world {_pairs(shown)}"]
    if programs.source:
        lines.append(f"source {_pairs(programs.source)}")
    for name, groups in programs.groups.items():
        lines.append(f"group {name} " + ";".join(",".join(map(str, g)) for g in groups))
    for index, program in enumerate(programs.programs):
        ranks = format_ranks(programs.ranks_of(index).tolist())
        lines += ["", f"program rank={program.rank} ranks={ranks}", *_lines(program)]
    return "\n".join(lines) + "\n"


def _lines(program: Program) -> Iterator[str]:
    """The lines of one program, allocations before the op that they precede."""
    ops = ((at, 1, format_op(op)) for at, op in enumerate(program))
    memory = ((before, 0, _format_memory(event, program.strings))
              for before, *event in program.allocations.tolist())  # fmt: skip
    return (line for *_, line in heapq.merge(memory, ops, key=lambda entry: entry[:2]))


def _format_memory(event: Sequence[int], strings: Sequence[str]) -> str:
    storage, size, note = event
    values = {"storage": storage, "bytes": abs(size)} | ({"note": strings[note]} if note else {})
    return f"-    {'alloc' if size >= 0 else 'free':10}  {_pairs(values)}"


def format_op(op: Op) -> str:
    """One line; fields at their defaults are left out."""
    values: Fields = {key: getattr(op, column) for key, column in _COLUMNS.items()}
    values = {key: v for key, v in values.items() if v != _DEFAULT[_COLUMNS[key]]}
    if op.num_in == op.num_out != -1:
        del values["in"], values["out"]
        values = {"n": op.num_in, **values}
    if op.splits is not None:
        values |= zip(("to", "from"), (",".join(map(str, part)) for part in op.splits), strict=True)
    if op.note:
        values["note"] = op.note
    words = (op.group, op.dtype, _pairs(values), op.site and f"@{op.site}")
    return " ".join([f"{op.label:4} {op.name:10} ", *filter(None, words)]).rstrip()


def _pairs(values: Mapping[str, object]) -> str:
    """``key=value`` words."""
    return " ".join(f"{key}={_written(key, value)}" for key, value in values.items())


def _written(key: str, value: object) -> str:
    """Numbers in the largest unit that loses nothing (412us, 38MiB, 1501ns), texts in quotes where
    they need any.
    """
    if isinstance(value, int):
        scales = _UNITS[key][0] if key in _UNITS else {}
        exact = (unit for unit, s in scales.items() if value % s == 0 and value >= s)
        unit = max(exact, key=scales.__getitem__, default="")
        return f"{value // scales.get(unit, 1)}{unit}"
    text = str(value)
    if text and not re.search(r'[\s"#\\]', text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\n", "\\n").replace("\r", "\\r") + '"'


_LABEL = re.compile(r"(?P<mb>\d+)?(?P<phase>[A-Z-])(?P<chunk>\d+)?")
_TOKEN = re.compile(r'[^\s"#]*"(?:[^"\\]|\\.)*"|[^\s#]+|#.*')
_QUOTED = re.compile(r'[^\s"#]*"(?:[^"\\]|\\.)*"')
_MEMBERS = re.compile(r"\d{1,18}(,\d{1,18})*(;\d{1,18}(,\d{1,18})*)*")
_LETTERS = {letter: phase for phase, letter in PHASES.items()}


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m[1], m[1]), text[1:-1])


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
    """What reads a number for ``column``."""
    read = _UNITS[column][1] if column in _UNITS else units.parse_count
    low, high = limits(column)

    def number(text: str) -> int:
        value = int(text) if re.fullmatch(r"-?\d{1,18}", text) else read(text)
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
    **dict.fromkeys(("stream", "shape", "note"), str),
    **dict.fromkeys(("to", "from"), _rows),
    "n": _number("num_in"),
    "reduce": _reduction,
}
_MEMORY: Readers = {"storage": _number("storage"), "bytes": _number("bytes"), "note": str}
_SIZES: Readers = {name: _number("rank", MOST_RANKS if name == "size" else None)
                   for name in _WORLD if name != "order"} | {"order": str}  # fmt: skip


def parse(text: str, name: str = "program") -> Programs:
    """Programs out of their text; ProgramError names ``name``, the line and the column."""
    return _Reader(text, name).read()


class _Reader:
    """Walks the lines once; every complaint shows the line with an arrow under the word."""

    def __init__(self, text: str, name: str) -> None:
        # not splitlines(): a note may hold U+2028, which is no end of a line here
        self.lines, self.name = text.replace("\r\n", "\n").split("\n"), name
        self.number, self.line = 1, self.lines[0]
        self.world: World | None = None
        self.source: dict[str, str] = {}
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.programs: list[tuple[int, Builder]] = []
        self.of = np.empty(0, dtype=np.int32)  # rank -> index of its program

    def fail(self, word: Word | int, what: str, fix: str) -> NoReturn:
        """Raise ProgramError at ``word``, or at a column."""
        column = word if isinstance(word, int) else word.start()
        place = f"{self.name}:{self.number}:{column + 1}"
        picture = f"  {self.line}\n  {' ' * column}^ here"
        raise ProgramError(f"{place}: {what}\n{picture}", fix=fix)

    def read(self) -> Programs:
        heads = {n: getattr(self, f"_{n}") for n in ("world", "source", "group", "program")}
        lines = self._words()
        self._version(next(lines, []))
        for words in lines:
            if words[0][0] in heads:
                heads[words[0][0]](words[0], words[1:])
            else:
                self._op(words)
        self.line = self.lines[self.number - 1]
        if self.world is None or not self.programs:
            self.fail(0, "no world or no program", "world size=2, then program ranks=0-1")
        if (self.of < 0).any():
            missing = format_ranks(np.flatnonzero(self.of < 0).tolist())
            self.fail(0, f"ranks {missing} have no program", "name them in a program's ranks=")
        built = tuple(builder.build(rank) for rank, builder in self.programs)
        return Programs(self.world, built, self.of, self.groups, self.source)

    def _words(self) -> Iterator[list[Word]]:
        """The words of every line that has any, without comments."""
        for number, line in enumerate(self.lines, 1):
            self.number, self.line = number, line
            words = [m for m in _TOKEN.finditer(self.line) if not m[0].startswith("#")]
            for word in words:
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
        if version != str(VERSION):
            what = f"version {version} of the text form is not known"
            self.fail(words[-1], what, f"this release reads version {VERSION}")

    def _values(self, words: list[Word], what: str, readers: Readers | None = None) -> Fields:
        """The key=value words of ``what``; without ``readers`` any text of any key."""
        values: Fields = {}
        for word in words:
            key, equals, text = word[0].partition("=")
            if not equals or not text:
                self.fail(word, f"{word[0]!r} is not key=value", "write it like size=8")
            if key in values:
                self.fail(word, f"{key} is given twice", "leave one of them out")
            if readers is not None and key not in readers:
                known = [f"{name}=" for name in readers]
                fix = did_you_mean(f"{key}=", known, f"use {' '.join(known)}")
                self.fail(word, f"{what} has no {key}", fix)
            values[key] = self._read(
                word, _unquoted(text), str if readers is None else readers[key]
            )
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
        if before is not None:
            self.fail(head, "there is a world already", "a file holds one world")
        self.of = np.full(self.world.size, -1, dtype=np.int32)

    def _source(self, head: Word, words: list[Word]) -> None:
        self.source |= self._values(words, "a source")

    def _group(self, head: Word, words: list[Word]) -> None:
        if len(words) < 2:
            self.fail(head, "a group has a name and members", "group NAME 0,1;2,3")
        name, text = words[0][0], "".join(word[0] for word in words[1:])
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
        ranks = values.get("ranks", ())
        rank = values["rank"] if "rank" in values else ranks[0]
        if rank >= self.world.size:
            self.fail(head, f"rank {rank} is outside a world of {self.world.size}", "rank=0")
        mine = list(ranks or (rank,))
        if (taken := self.of[mine] >= 0).any():
            again = f"rank {mine[int(taken.argmax())]} has a program already"
            self.fail(head, again, "name every rank in one program only")
        self.of[mine] = len(self.programs)
        self.programs.append((rank, Builder()))

    def _op(self, words: list[Word]) -> None:
        if not self.programs:
            self.fail(words[0], "an op before the first program", "write: program rank=0")
        builder = self.programs[-1][1]
        if len(words) < 2:
            self.fail(words[0], "a line is LABEL OP …", "0F0 compute ns=412us")
        label, name, *rest = words
        match = _LABEL.fullmatch(label[0])
        if match is None or match["phase"] not in _LETTERS:
            fix = "2F0 (microbatch, F/B/W, chunk), O, G, -"
            self.fail(label, f"{label[0]!r} is no label", fix)
        if name[0] in ("alloc", "free"):
            values = {"note": "", **self._values(rest, "an allocation", _MEMORY)}
            if len(values) < len(_MEMORY):
                self.fail(name, "storage and bytes are needed", "alloc storage=1 bytes=2MiB")
            sign = 1 if name[0] == "alloc" else -1
            builder.memory(values["storage"], sign * values["bytes"], values["note"])
            return
        if name[0] not in NAMES:
            self._unknown(name, "op", NAMES)
        place: Fields = {"phase": _LETTERS[match["phase"]]}
        for key, text in (("microbatch", match["mb"]), ("chunk", match["chunk"])):
            if text:
                place[key] = self._read(label, text, _number(key))
        builder.add(name[0], **place, **self._fields(name, rest))

    def _unknown(self, word: Word, what: str, known: Sequence[str]) -> NoReturn:
        fix = did_you_mean(word[0], known, f"use one of {', '.join(filter(None, known))}")
        self.fail(word, f"there is no {what} {word[0]}", fix)

    def _fields(self, name: Word, words: list[Word]) -> Fields:
        pairs = [word for word in words if "=" in word[0] and not word[0].startswith("@")]
        values = self._values(pairs, "an op", _READERS)
        if "n" in values:
            values["in"] = values["out"] = values.pop("n")
        if splits := [values.pop(key) for key in ("to", "from") if key in values]:
            if len(splits) != 2:
                self.fail(name, "splits need to= and from=", "to=4,4 from=4,4")
            values["splits"] = tuple(splits)
        columns = {_COLUMNS.get(key, key): value for key, value in values.items()}
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
