"""How a shell script that starts a job is run dry; the feature that runs scripts takes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.command_line.path_map import PathMap
from megatron_prism.emulate.preflight import stand_ins
from megatron_prism.emulate.preflight.obstacles import Obstacles

LIMIT_S = 20.0  # a script that has not started its job until then waits for something


@dataclass(frozen=True)
class ScriptOptions:
    """How a script is run dry.

    Attributes:
        gpus: of each host, where the user said it, else empty.
        python: the script of Python that starts the launcher, if one does.
        writes: whether new files and folders may be made outside of the working folder.
        limit_s: seconds after which a script without a job is stopped.
        paths: paths of the script that others stand for.
        obstacles: gets what the user has to say, where the run goes on with a placeholder; without
            it that is an error.
        place_options: options of a job with places that change neither memory nor time.
    """

    gpus: str = ""
    python: str = ""
    writes: bool = False
    limit_s: float = LIMIT_S
    paths: PathMap = field(default_factory=PathMap)
    obstacles: Obstacles | None = None
    place_options: Collection[str] = stand_ins.PLACE_OPTIONS

    @classmethod
    def parse(cls, given: Sequence[str], python: str, obstacles: Obstacles | None) -> ScriptOptions:
        """Read the options from our flags.

        Args:
            given: flags of ours.
            python: the script of Python that starts the launcher, if one does.
            obstacles: gets what only the user can say; None raises that.

        Raises:
            UsageError: a limit that is no number of seconds above 0.
        """
        limit_text = options.value_of("--prism-dry-run-limit", given) or str(LIMIT_S)
        try:
            limit_s = float(limit_text)
        except ValueError:
            limit_s = 0.0
        if not limit_s > 0:
            raise UsageError(
                f"--prism-dry-run-limit {limit_text} is no number of seconds",
                fix="--prism-dry-run-limit 120",
            )
        return cls(
            gpus=options.value_of("--prism-gpus-per-node", given),
            python=python,
            writes="--prism-allow-writes" in given,
            limit_s=limit_s,
            paths=PathMap.parse(options.values_of("--prism-map", given)),
            obstacles=obstacles,
        )

    def ask(self, error: UsageError, *, of_world: bool = True) -> None:
        """Note what is only known to the user, mostly a number of the job's world.

        Args:
            error: what is asked for.
            of_world: whether the number of ranks depends on it.

        Raises:
            UsageError: nobody collects obstacles; ``error``.
        """
        if self.obstacles is None:
            raise error
        self.obstacles.note(error)
        self.obstacles.world_is_guessed |= of_world
