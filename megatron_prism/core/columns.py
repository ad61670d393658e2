"""Lines and tables of text that fit a terminal of 80 columns and break between words alone."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80
GAP = "  "
_UNIT = r"(?:%|[KMGTP]?i?B|[num]?s|[TG]FLOP/s)(?!\w)"


def folded(line: str, indent: int = 2, width: int = WIDTH) -> list[str]:
    """Break a line into as many lines as it needs; words, and numbers with their units, stay whole.

    Args:
        line: its blanks in front stay.
        indent: blanks in front of the later lines.
        width: characters of a line.
    """
    text = line.lstrip()
    begin = line[: len(line) - len(text)]
    # a blank that does not break binds a number to its unit while lines are broken
    bound = re.sub(rf"(\d) (?={_UNIT})", "\\1\u00a0", text)
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=begin,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace("\u00a0", " ") for part in wrapper.wrap(bound)]


def listed(rows: Sequence[Sequence[str]]) -> list[str]:
    """Set columns to the left; the last one may be folded, below them where it is too wide."""
    texts_by_column = list(zip(*rows, strict=True))
    widths = [max(map(len, texts)) for texts in texts_by_column[:-1]]
    last_column_at = sum(widths) + len(GAP) * len(widths)
    lines: list[str] = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        longest_word = max(map(len, last.split()), default=0)
        indent = last_column_at
        # no word of it fits behind the other columns
        if last_column_at + longest_word > WIDTH:
            indent = 6
        lines += folded(GAP.join([*padded, last]).rstrip(), indent)
    return lines


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Set the first ``left`` columns to the left, numbers to the right.

    What is too wide continues below, each block with the first column.
    """
    widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]

    # blocks of columns that fit a line; each has column 0
    blocks = [[0]]
    used = widths[0]
    for column, width in enumerate(widths[1:], 1):
        used += len(GAP) + width
        # the column begins the next block; a block has one column beside the first at least
        if used > WIDTH and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0] + len(GAP) + width
        blocks[-1].append(column)

    lines: list[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        for row in rows:
            cells = []
            for column in block:
                if column < left:
                    cells.append(row[column].ljust(widths[column]))
                else:
                    cells.append(row[column].rjust(widths[column]))
            lines.append(GAP.join(cells).rstrip())
    return lines
