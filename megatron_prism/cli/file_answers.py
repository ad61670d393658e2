"""Commands about files of other kinds: a feature that reads such files answers in their stead.

``prism fit`` and ``prism compare`` ask here before they read their words as slices.  A feature's
``files.py`` has ``FILE_ANSWERS``, rows of ``FileAnswer``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_prism.cli.output import Answer
from megatron_prism.core import feature


@dataclass(frozen=True)
class FileAnswer:
    """How a command answers about files of one kind.

    Args:
        command: name of the command.
        recognizes: whether the paths of a command line are such files, perhaps beside slices.
        answer: called with the command's arguments, the paths, and the what-ifs of each path.
        asked_last: whether ``recognizes`` takes whatever no other row knows.
    """

    command: str
    recognizes: Callable[[Sequence[str]], bool]
    answer: Callable[[argparse.Namespace, Sequence[str], Sequence[Sequence[str]]], Answer]
    asked_last: bool = False


def answer_about_files(
    command: str,
    args: argparse.Namespace,
    paths: Sequence[str],
    what_ifs: Sequence[Sequence[str]],
) -> Answer | None:
    """Let the feature answer that reads these files.

    Args:
        command: name of the command.
        args: of the command.
        paths: of its words.
        what_ifs: ``key=value`` words of each path.

    Returns:
        None where the paths are slices or programs.
    """
    rows: list[FileAnswer] = []
    for module in feature.modules("files"):
        rows += module.FILE_ANSWERS
    # a feature that takes any other file is asked last
    for row in sorted(rows, key=lambda row: row.asked_last):
        if row.command == command and row.recognizes(paths):
            return row.answer(args, paths, what_ifs)
    return None
