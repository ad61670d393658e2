"""What commands print of a process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_prism.cli.output import print_table
from megatron_prism.core.columns import folded

if TYPE_CHECKING:
    from megatron_prism.memory.peaks import HeldMemory


def say(text: str) -> None:
    """Print a line, folded to the terminal's width with an indent of 4."""
    print(*folded(text, 4), sep="\n")


def print_holdings(holdings: Sequence[HeldMemory]) -> None:
    """Print what is alive at a peak as a table."""
    rows = [(f"{h.num_bytes:,}", str(h.count), h.kind, h.site, h.module) for h in holdings]
    print_table(("bytes", "tensors", "kind", "site", "module"), rows)
