"""Process-wide changes (attributes, mapping entries), recorded so that they can be undone.

Whatever an emulation changes outside its own objects goes through one ``ProcessChanges``: functions
of torch and Megatron, ``sys.modules``, environment variables.  ``undo`` takes everything back, the
last change first.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
_ABSENT = object()


class ProcessChanges:
    """A log of changes, each with what takes it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def __enter__(self) -> ProcessChanges:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name``; a class gets back its own entry, or none if it had inherited it."""
        before = vars(owner).get(name, _ABSENT)  # raw: a staticmethod stays one
        setattr(owner, name, value)
        self.on_undo(
            lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
        )

    def set_item(self, mapping: MutableMapping[K, V], key: K, value: V) -> None:
        """Set ``mapping[key]``, such as an environment variable or an entry of ``sys.modules``."""
        if key in mapping:
            before = mapping[key]
            self.on_undo(lambda: mapping.__setitem__(key, before))
        else:
            # a key that was absent goes again
            self.on_undo(lambda: mapping.pop(key, None))
        mapping[key] = value

    def on_undo(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when everything is undone, before what was changed earlier."""
        self._undo.append(callback)

    def undo(self) -> None:
        """Take everything back, the last change first.

        Every change is tried.  Raises the first error, if there was one.
        """
        failed: list[BaseException] = []
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # the others are still to be undone
                failed.append(error)
        if failed:
            raise failed[0]
