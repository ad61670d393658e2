"""Commands about files of other kinds, or with words of another feature: that feature answers.

``prism fit``, ``prism compare`` and ``prism replay`` ask here before they read their words as
slices and what-ifs.  A feature's module ``files`` (``core.feature``) has ``FILE_ANSWERS``, rows of
``FileAnswer``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_prism.cli.output import Answer
from megatron_prism.core import feature


@dataclass(frozen=True)
class FileAnswer:
    """How a command answers about files of one kind, or where a word has a key of the feature.

    Args:
        command: name of the command.
        recognizes: whether the paths of a command line are such files, perhaps beside slices.
        answer: called with the command's arguments, the paths, and the what-ifs of each path.
        asked_last: whether ``recognizes`` takes whatever no other row knows.
        key: of a what-if that the feature knows, whatever the paths are; "": of none.
    """

    command: str
    recognizes: Callable[[Sequence[str]], bool]
    answer: Callable[[argparse.Namespace, Sequence[str], Sequence[Sequence[str]]], Answer]
    asked_last: bool = False
    key: str = ""

    def is_asked(self, paths: Sequence[str], what_ifs: Sequence[Sequence[str]]) -> bool:
        """Say whether this row answers about paths with these what-ifs."""
        if not self.key:
            return self.recognizes(paths)
        for words in what_ifs:
            if any(word.startswith(f"{self.key}=") for word in words):
                return True
        return False


def answer_about_files(
    command: str,
    args: argparse.Namespace,
    paths: Sequence[str],
    what_ifs: Sequence[Sequence[str]],
) -> Answer | None:
    """Let the feature answer that reads these files, or whose words these are.

    Args:
        command: name of the command.
        args: of the command.
        paths: of its words.
        what_ifs: ``key=value`` words of each path.

    Returns:
        None where the paths are slices or programs, and all words what-ifs.
    """
    rows: list[FileAnswer] = []
    for module in feature.modules("files"):
        rows += module.FILE_ANSWERS
    # a feature that takes any other file is asked last
    for row in sorted(rows, key=lambda row: row.asked_last):
        if row.command == command and row.is_asked(paths, what_ifs):
            return row.answer(args, paths, what_ifs)
    return None
