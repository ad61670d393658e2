"""Lines and tables of text that fit a terminal of 80 columns and break between words alone."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
GAP = "  "
_UNIT = r"(?:%|[KMGTP]?i?B|[num]?s|[TG]FLOP/s)(?!\w)"


def folded(line: str, indent: int = 2, width: int = WIDTH) -> list[str]:
    """``line`` on as many lines as it needs, the later ones moved in; words, and numbers with their
    units, stay whole.
    """
    begin = line[: len(line) - len(line.lstrip())]
    text = re.sub(rf"(\d) (?={_UNIT})", "\\1\u00a0", line.lstrip())
    lines = textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [one.replace("\u00a0", " ") for one in lines]


def listed(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns to the left, of which the last may be folded; where it is too wide, below them."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    indent = sum(widths) + len(GAP) * len(widths)
    lines: list[str] = []
    for *cells, last in rows:
        begin = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        room = indent + max(map(len, last.split()), default=0) <= WIDTH
        lines += folded(GAP.join([*begin, last]).rstrip(), indent if room else 6)
    return lines


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The first ``left`` columns to the left, numbers to the right.  What is too wide continues
    below, each block with the first column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    blocks, used = [[0]], widths[0]
    for place, width in enumerate(widths[1:], 1):
        used += len(GAP) + width
        if used > WIDTH and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0] + len(GAP) + width
        blocks[-1].append(place)
    lines: list[str] = []
    for block in blocks:
        lines += [""] * bool(lines)
        for row in rows:
            cells = (row[at].ljust(widths[at]) if at < left else row[at].rjust(widths[at])
                     for at in block)  # fmt: skip
            lines.append(GAP.join(cells).rstrip())
    return lines
