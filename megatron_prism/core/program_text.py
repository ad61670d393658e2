"""How do programs look as text that a person writes and a diff shows?

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
from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from megatron_prism.core import units
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.core.selectors import format_ranks
from megatron_prism.core.world import World

__all__ = ["TIMES", "VERSION", "dump", "format_op"]

VERSION = 1
TIMES = ("ns", "host", "lead", "products")  # fields with a unit of time
_DEFAULT = {f.name: f.default for f in fields(Op)}
_NUMBERS = ("reduce", "peer", "root", "handle", "batch", "kernels", "flops", "stream", "shape")
_WORLD = ("size", "tp", "cp", "pp", "ep", "etp", "vpp", "order")


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
