"""Progress where no terminal draws a bar: one line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["EVERY_S", "Lines"]

EVERY_S = 10.0


class Lines:
    """Writes what it is told, at most one line every ``EVERY_S`` seconds, none before the first.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._last = write, time.monotonic()

    def tell(self, text: Callable[[], str] | str) -> None:
        """Write ``text``, or what it returns, if it is time."""
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            self._write(text if isinstance(text, str) else text())
