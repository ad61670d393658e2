"""In which ways the input of ranks differs."""

from __future__ import annotations

import enum


class InputKind(enum.Enum):
    """In which way the input of ranks differs."""

    MICROBATCHES = "microbatches"  # their loop has another number of turns
    LOADER = "loader"  # their data iterator ends before the iteration does
    PROGRAMS = "programs"  # they run what another capture did
    LENGTHS = "lengths"  # their samples have other lengths
