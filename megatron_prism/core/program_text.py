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
``program_parse.parse(dump(p)) == p``, exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import numpy as np

from megatron_prism.core import units
from megatron_prism.core.errors import PrismError, ProgramError, did_you_mean
from megatron_prism.core.ops import DTYPES, NAMES, PHASES, REDUCE, Op, limits
from megatron_prism.core.program import Builder, Program, Programs
from megatron_prism.core.world import MOST_RANKS, World, format_ranks

VERSION = 1
TIMES = ("ns", "host", "lead", "products")  # fields with a unit of time
_DEFAULT = {f.name: f.default for f in fields(Op)}
_NUMBERS = ("reduce", "peer", "root", "handle", "batch", "kernels", "flops", "stream", "shape")
_WORLD = ("size", "tp", "cp", "pp", "ep", "etp", "vpp", "order", "gpus_per_node")


def dump(programs: Programs) -> str:
    """The text form of a world's programs."""
    world = programs.world
    sizes = {name: getattr(world, name) for name in _WORLD}
    plain = World(world.size)
    shown = [f"{k}={v}" for k, v in sizes.items() if k == "size" or v != getattr(plain, k)]
    lines = [f"prism-program {VERSION}", f"world {' '.join(shown)}"]
    if programs.source:
        lines.append("source " + " ".join(f"{k}={_quoted(v)}" for k, v in programs.source.items()))
    for name, groups in programs.groups.items():
        lines.append(f"group {name} " + ";".join(",".join(map(str, g)) for g in groups))
    for index, program in enumerate(programs.programs):
        ranks = format_ranks(programs.ranks_of(index).tolist())
        lines += ["", f"program rank={program.rank} ranks={ranks}", *dump_ops(program)]
    return "\n".join(lines) + "\n"


def dump_ops(program: Program) -> Iterator[str]:
    """The lines of one program, allocations in their places."""
    at, memory = 0, program.allocations
    for index, op in enumerate(program):
        while at < len(memory) and memory["before"][at] <= index:
            yield _format_memory(memory[at], program.strings)
            at += 1
        yield format_op(op)
    for row in memory[at:]:
        yield _format_memory(row, program.strings)


def _format_memory(row: np.void, strings: tuple[str, ...]) -> str:
    name, size = ("alloc", row["bytes"]) if row["bytes"] >= 0 else ("free", -row["bytes"])
    line = f"-    {name:10}  storage={row['storage']} bytes={_exact(int(size), units.BINARY)}"
    return f"{line} note={_quoted(strings[row['note']])}" if row["note"] else line


def format_op(op: Op) -> str:
    """One line; fields at their defaults are left out."""
    words = [f"{op.label:4} {op.name:10} "]
    words += [word for word in (op.group, op.dtype) if word]
    if op.num_in == op.num_out != -1:
        words.append(f"n={op.num_in}")
    else:
        words += [f"in={op.num_in}"] * (op.num_in != -1) + [f"out={op.num_out}"] * (
            op.num_out != -1
        )
    words += [f"{k}={v}" for k in _NUMBERS if (v := getattr(op, k)) != _DEFAULT[k]]
    for key in TIMES:
        if (ns := getattr(op, key)) >= 0:
            words.append(f"{key}={_exact(ns, {k: v for k, v in units.NS.items() if len(k) < 3})}")
    if op.traffic >= 0:
        words.append(f"traffic={_exact(op.traffic, units.BINARY)}")
    if op.splits is not None:
        words += [
            f"{k}={','.join(map(str, v))}" for k, v in zip(("to", "from"), op.splits, strict=True)
        ]
    if op.note:
        words.append(f"note={_quoted(op.note)}")
    if op.site:
        words.append(f"@{op.site}")
    return " ".join(words).rstrip()


def _quoted(text: str) -> str:
    if text and not re.search(r'[\s"#\\]', text):
        return text
    return (
        '"'
        + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
        + '"'
    )


def _exact(value: int, scales: dict[str, int]) -> str:
    """In the largest unit that loses nothing: 412us, 38MiB, 1501ns."""
    unit = max(
        (u for u, s in scales.items() if value % s == 0 and value >= s),
        key=scales.__getitem__,
        default="",
    )
    return f"{value // scales[unit]}{unit}" if unit else str(value)


Fields = dict[str, Any]  # keyword arguments of what is made of them

_LABEL = re.compile(r"(?P<mb>\d+)?(?P<phase>[A-Z-])(?P<chunk>\d+)?")
_TOKEN = re.compile(r'[^\s"#]*"(?:[^"\\]|\\.)*"|[^\s#]+|#.*')
_QUOTED = re.compile(r'[^\s"#]*"(?:[^"\\]|\\.)*"')
_LETTERS = {letter: phase for phase, letter in PHASES.items()}
_NUMERIC_FIELDS = [f.name for f in fields(Op) if isinstance(f.default, int)]


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "r": "\r"}.get(m[1], m[1]), text[1:-1])


def parse(text: str, name: str = "program") -> Programs:
    """Programs out of their text; ProgramError names ``name``, the line and the column."""
    return _Reader(text, name).read()


class _Reader:
    """Walks the lines once; every complaint shows the line with an arrow under the word."""

    def __init__(self, text: str, name: str) -> None:
        # not splitlines(): a note may hold U+2028, which is no end of a line here
        self.lines, self.name = text.replace("\r\n", "\n").split("\n"), name
        self.number, self.line = 0, ""
        self.world: World | None = None
        self.source: dict[str, str] = {}
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.programs: list[tuple[int, Builder]] = []
        self.of = np.empty(0, dtype=np.int32)  # rank -> index of its program

    def fail(self, column: int, what: str, fix: str) -> NoReturn:
        place = f"{self.name}:{self.number}:{column + 1}"
        picture = f"  {self.line}\n  {' ' * column}^ here"
        raise ProgramError(f"{place}: {what}\n{picture}", fix=fix)

    def read(self) -> Programs:
        readers = {n: getattr(self, f"_{n}") for n in ("world", "source", "group", "program")}
        first = True
        for number, line in enumerate(self.lines, 1):
            self.number, self.line = number, line
            words = [m for m in _TOKEN.finditer(self.line) if not m[0].startswith("#")]
            if not words:
                continue
            for word in words:
                if '"' in word[0] and not _QUOTED.fullmatch(word[0]):
                    place = word.start() + word[0].index('"')
                    self.fail(place, "this quote has no end", 'note="two words"')
            if first:
                self._head(words)
                first = False
            elif words[0][0] in readers:
                readers[words[0][0]](words[1:], words[0])
            else:
                self._op(words)
        if first:
            self.number, self.line = 1, self.lines[0] if self.lines else ""
            self.fail(0, "this is no program: it is empty", "start with: prism-program 1")
        return self._programs()

    def _head(self, words: list[re.Match[str]]) -> None:
        if words[0][0] != "prism-program":
            self.fail(words[0].start(), "this is no program", "start with: prism-program 1")
        version = words[1][0] if len(words) > 1 else "?"
        if version != str(VERSION):
            self.fail(
                words[-1].start(),
                f"version {version} of the text form is not known",
                f"this release reads version {VERSION}",
            )

    def _pairs(self, words: list[re.Match[str]]) -> Iterator[tuple[re.Match[str], str, str]]:
        seen = set()
        for word in words:
            key, equals, value = word[0].partition("=")
            if not equals or not value:
                self.fail(word.start(), f"{word[0]!r} is not key=value", "write it like size=8")
            if key in seen:
                self.fail(word.start(), f"{key} is given twice", "leave one of them out")
            seen.add(key)
            yield word, key, _unquoted(value)

    def _number(
        self,
        word: re.Match[str],
        value: str,
        field: str,
        read: Callable[[str], int] = units.parse_count,
    ) -> int:
        """A number for column ``field``."""
        try:
            found = int(value) if re.fullmatch(r"-?\d{1,18}", value) else read(value)
        except PrismError as error:
            self.fail(word.start(), error.message, error.fix or "write a whole number")
        low, high = limits(field)
        if not low <= found <= high:
            self.fail(word.start(), f"{value[:40]} is out of range", f"write {low} to {high}")
        return int(found)

    def _world(self, words: list[re.Match[str]], head: re.Match[str]) -> None:
        values: Fields = {}
        for word, key, value in self._pairs(words):
            if key not in _WORLD:
                self.fail(word.start(), f"a world has no {key}", f"use {', '.join(_WORLD)}")
            values[key] = value if key == "order" else self._number(word, value, "rank")
            if key == "size" and values[key] > MOST_RANKS:
                self.fail(word.start(), "that is too large a world", f"at most {MOST_RANKS:,}")
        before = self.world
        try:
            self.world = World(**values)
        except (PrismError, TypeError) as error:
            self.fail(head.start(), str(getattr(error, "message", error)), "world size=8 tp=2 pp=2")
        if before is not None:
            self.fail(head.start(), "there is a world already", "a file holds one world")
        self.of = np.full(self.world.size, -1, dtype=np.int32)

    def _source(self, words: list[re.Match[str]], head: re.Match[str]) -> None:
        self.source.update({key: value for _, key, value in self._pairs(words)})

    def _group(self, words: list[re.Match[str]], head: re.Match[str]) -> None:
        if len(words) < 2:
            self.fail(head.start(), "a group has a name and members", "group NAME 0,1;2,3")
        text = "".join(word[0] for word in words[1:])
        if not re.fullmatch(r"\d{1,18}(,\d{1,18})*(;\d{1,18}(,\d{1,18})*)*", text):
            self.fail(words[1].start(), f"{text!r} are no members", "group NAME 0,1;2,3")
        if words[0][0] in self.groups:
            again = f"group {words[0][0]} is given twice"
            self.fail(words[0].start(), again, "write all of them in one line: 0,1;2,3")
        self.groups[words[0][0]] = tuple(
            tuple(int(r) for r in part.split(",")) for part in text.split(";")
        )

    def _program(self, words: list[re.Match[str]], head: re.Match[str]) -> None:
        world = self._need_world(head)
        rank, ranks = None, None
        for word, key, value in self._pairs(words):
            if key == "rank":
                rank = self._number(word, value, "rank")
            elif key == "ranks":
                try:
                    ranks = world.select(value)
                except PrismError as error:
                    self.fail(word.start(), error.message, error.fix or "ranks=0-3")
            else:
                self.fail(word.start(), f"a program has no {key}", "program rank=0 ranks=0-3")
        if rank is None:
            if ranks is None:
                self.fail(head.start(), "whose program is this?", "program rank=0 ranks=0-3")
            rank = ranks[0]
        if not 0 <= rank < world.size:
            self.fail(head.start(), f"rank {rank} is outside a world of {world.size}", "rank=0")
        mine = [rank] if ranks is None else list(ranks)
        if (taken := self.of[mine] >= 0).any():
            again = f"rank {mine[int(taken.argmax())]} has a program already"
            self.fail(head.start(), again, "name every rank in one program only")
        self.of[mine] = len(self.programs)
        self.programs.append((rank, Builder()))

    def _need_world(self, head: re.Match[str]) -> World:
        if self.world is None:
            self.fail(head.start(), "the world must come first", "write: world size=8 tp=2")
        return self.world

    def _op(self, words: list[re.Match[str]]) -> None:
        if not self.programs:
            self.fail(words[0].start(), "an op before the first program", "write: program rank=0")
        builder = self.programs[-1][1]
        if len(words) < 2:
            self.fail(words[0].start(), "a line is LABEL OP …", "0F0 compute ns=412us")
        values = self._label(words[0])
        if words[1][0] in ("alloc", "free"):
            self._memory(builder, words)
            return
        if words[1][0] not in NAMES:
            self._unknown(words[1], "op", NAMES)
        builder.add(words[1][0], **values, **self._fields(words[2:]))

    def _unknown(self, word: re.Match[str], what: str, known: Sequence[str]) -> NoReturn:
        fix = did_you_mean(word[0], known, f"use one of {', '.join(filter(None, known))}")
        self.fail(word.start(), f"there is no {what} {word[0]}", fix)

    def _label(self, word: re.Match[str]) -> Fields:
        match = _LABEL.fullmatch(word[0])
        if match is None or match["phase"] not in _LETTERS:
            self.fail(
                word.start(), f"{word[0]!r} is no label", "2F0 (microbatch, F/B/W, chunk), O, G, -"
            )
        return {
            "phase": _LETTERS[match["phase"]],
            "microbatch": self._number(word, match["mb"] or "-1", "microbatch"),
            "chunk": self._number(word, match["chunk"] or "-1", "chunk"),
        }

    def _memory(self, builder: Builder, words: list[re.Match[str]]) -> None:
        values, note = {}, ""
        for word, key, value in self._pairs(words[2:]):
            if key == "note":
                note = value
            else:
                limit = key if key == "storage" else "bytes"
                values[key] = self._number(word, value, limit, units.parse_bytes)
        if set(values) != {"storage", "bytes"}:
            fix = "alloc storage=1 bytes=2MiB"
            self.fail(words[1].start(), "storage and bytes are needed", fix)
        sign = 1 if words[1][0] == "alloc" else -1
        builder.memory(values["storage"], sign * values["bytes"], note)

    def _fields(self, words: list[re.Match[str]]) -> Fields:
        values: Fields = {}
        splits: dict[str, tuple[int, ...]] = {}
        seen: set[str] = set()
        for word in words:
            text = word[0]
            key, equals, value = text.partition("=")
            if equals and key in seen:
                self.fail(word.start(), f"{key} is given twice", "leave one of them out")
            seen |= {key} if equals else set()  # a group may be called n
            if text.startswith("@"):
                values["site"] = text[1:]
            elif not equals:
                if text in DTYPES:
                    values["dtype"] = text
                elif "group" not in values:
                    values["group"] = text
                else:
                    self._unknown(word, "dtype", list(DTYPES))
            elif key in ("to", "from"):
                if not re.fullmatch(r"\d{1,17}(,\d{1,17})*", value):
                    self.fail(word.start(), f"{value!r} are no rows", "to=4,4 from=4,4")
                splits[key] = tuple(int(n) for n in value.split(","))
            else:
                values |= self._field(word, key, _unquoted(value))
        if splits:
            if len(splits) != 2:
                self.fail(words[0].start(), "splits need to= and from=", "to=4,4 from=4,4")
            values["splits"] = (splits["to"], splits["from"])
        return values

    def _field(self, word: re.Match[str], key: str, value: str) -> Fields:
        if key == "n":
            number = self._number(word, value, "num_in")
            return {"num_in": number, "num_out": number}
        key = {"in": "num_in", "out": "num_out"}.get(key, key)
        if key in ("stream", "shape", "note"):
            return {key: value}
        if key == "reduce":
            if value not in REDUCE:
                fix = f"use {', '.join(REDUCE[1:])}"
                self.fail(word.start(), f"there is no reduction {value}", fix)
            return {key: value}
        readers = dict.fromkeys(TIMES, units.parse_ns)
        readers["traffic"] = units.parse_bytes
        if key in readers:
            return {key: self._number(word, value, key, readers[key])}
        if key not in _NUMERIC_FIELDS:
            known = [f"{name}=" for name in (*_NUMERIC_FIELDS, "n", "in", "out")]
            fix = did_you_mean(f"{key}=", known, f"use {' '.join(known)}")
            self.fail(word.start(), f"an op has no {key}", fix)
        return {key: self._number(word, value, key)}

    def _programs(self) -> Programs:
        self.line = self.lines[self.number - 1] if self.lines else ""
        if self.world is None or not self.programs:
            self.fail(0, "no world or no program", "world size=2, then program ranks=0-1")
        if (self.of < 0).any():
            missing = format_ranks(np.flatnonzero(self.of < 0).tolist())
            self.fail(0, f"ranks {missing} have no program", "name them in a program's ranks=")
        built = tuple(builder.build(rank) for rank, builder in self.programs)
        return Programs(self.world, built, self.of, self.groups, self.source)
