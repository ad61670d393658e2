"""Obstacles: what stops a job before any rank trains, all of it in one list.

Readers of a launch line, of a script and of Megatron's arguments note what they find and go on with
a placeholder where they can: job_line.py (the line), script_options.py and script_job.py (a
script), unknown_flags.py and first_look.py (Megatron's arguments), stand_ins.py (files).  Whoever
started them raises the list at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.units import counted


@dataclass(frozen=True)
class Obstacle:
    """One thing that stops a job.

    Attributes:
        message: what it is and where.
        fix: what to type; empty where nobody knows.
    """

    message: str
    fix: str


class Obstacles:
    """Obstacles of one job, in the order in which they were met.

    Attributes:
        world_is_guessed: a number of the world is a placeholder, so nothing may be concluded from
            the number of ranks.
    """

    def __init__(self) -> None:
        self._by_message: dict[str, Obstacle] = {}
        self.world_is_guessed = False

    def __iter__(self) -> Iterator[Obstacle]:
        return iter(self._by_message.values())

    def __len__(self) -> int:
        return len(self._by_message)

    def add(self, message: str, fix: str = "") -> None:
        """Note an obstacle; one that is noted already stays as it is."""
        self._by_message.setdefault(message, Obstacle(message, fix))

    def note(self, error: PrismError) -> None:
        """Note what an error says; the error of a list is taken apart."""
        if isinstance(error, ObstaclesError):
            for obstacle in error.obstacles:
                self.add(obstacle.message, obstacle.fix)
        else:
            self.add(error.message, error.fix or "")

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note a UsageError of the block instead of raising it."""
        try:
            yield
        except UsageError as error:
            self.note(error)

    def raise_all(self) -> None:
        """Raise UsageError with all obstacles, if there is one."""
        if len(self):
            raise ObstaclesError(tuple(self))


class ObstaclesError(UsageError):
    """Several things stop a job, each with its fix; of one it is that error."""

    def __init__(self, obstacles: tuple[Obstacle, ...]) -> None:
        message, fix = _as_text(obstacles)
        super().__init__(message, fix)
        self.args = (obstacles,)  # so that the error survives pickling
        self.obstacles = obstacles


def _as_text(obstacles: tuple[Obstacle, ...]) -> tuple[str, str | None]:
    """Return message and fix of an error with these obstacles."""
    if len(obstacles) == 1:
        return obstacles[0].message, obstacles[0].fix or None
    lines = [f"{counted(len(obstacles), 'thing')} stop this job"]
    for number, obstacle in enumerate(obstacles, 1):
        lines.append(f"{number:3}. {obstacle.message}")
        if obstacle.fix:
            lines.append(f"     fix: {obstacle.fix}")
    return "\n".join(lines), None
