"""Paths of another machine, and the paths that stand for them here (``--prism-map OLD=NEW``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_prism.core.errors import UsageError


@dataclass(frozen=True)
class PathMap:
    """Paths, and those that stand for them.

    Attributes:
        new_paths: path of the other machine -> path here.
    """

    new_paths: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> PathMap:
        """Read words ``OLD=NEW``; UsageError for a word that is none."""
        new_paths = {}
        for text in texts:
            old, equals, new = text.partition("=")
            if not (old and equals and new):
                raise UsageError(
                    f"--prism-map {text} does not say which path stands for which",
                    fix="--prism-map /their/Megatron-LM=CHECKOUT",
                )
            new_paths[old.rstrip("/") or "/"] = new.rstrip("/") or "/"
        return cls(new_paths)

    def in_text(self, text: str) -> str:
        """Replace the paths, and paths below them, wherever they stand in ``text``.

        A path is replaced as a whole: ``/data`` is none of ``/data2`` and of ``/my/data``.
        """
        if not self.new_paths:
            return text
        # the longest first: /data/text before /data
        old_paths = "|".join(map(re.escape, sorted(self.new_paths, key=len, reverse=True)))
        pattern = rf"(?:{old_paths})(?![\w.-])"
        # what has been replaced stays: a script's words, its text and its line are read in turn
        new_paths = [new for new in self.new_paths.values() if new != "/"]
        if new_paths:
            pattern = rf"(?!(?:{'|'.join(map(re.escape, new_paths))})(?![\w.-])){pattern}"
        return re.sub(rf"(?<![\w./-]){pattern}", lambda match: self.new_paths[match[0]], text)
