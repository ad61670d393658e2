"""A layout of a job: a recipe's, or a stock script's command line.

A sweep asks a layout for its sizes, for the same layout with other replicas and microbatches, for
the slice of a stage, and for the command line that trains it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_prism import __version__
from megatron_prism.core.errors import MissingSlicesError, PrismError, UsageError
from megatron_prism.core.jobs.recipe import Recipe
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import SliceStore, assemble
from megatron_prism.core.world import World
from megatron_prism.emulate.capture.few_microbatches import fewest
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.command_line.job_arguments import text_of
from megatron_prism.emulate.jobs import script_job
from megatron_prism.emulate.jobs.recipe_job import source_of
from megatron_prism.features.sweep.recipe_server import CaptureServer

_MANY = 8  # times as many microbatches as stages: the schedule has shown its period twice


class _Sizes:
    """World, microbatch and batch of a layout."""

    world: World
    micro_batch_size: int
    global_batch_size: int

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.world.dp)


def _digest(content: object) -> str:
    return hashlib.sha1(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


_BY_LAYER = re.compile("_layout|_pattern|_freq|_in_bf16|cp_comm_type")  # flags of single layers


@dataclass(frozen=True)
class RecipeLayout(_Sizes):
    """A recipe's."""

    recipe: Recipe

    @property
    def world(self) -> World:  # type: ignore[override]
        return self.recipe.world

    @property
    def micro_batch_size(self) -> int:  # type: ignore[override]
        return int(self.recipe.micro_batch_size)

    @property
    def global_batch_size(self) -> int:  # type: ignore[override]
        return int(self.recipe.global_batch_size)

    @property
    def fewest(self) -> int:
        """Microbatches of which any other number follows, as Megatron's scheduler has them."""
        return fewest(self.world, _MANY * self.world.pp, self.recipe.flags)

    @property
    def key(self) -> str:
        """Of its result among stored ones: all that decides it."""
        return _digest(dataclasses.asdict(self.recipe))

    def resized(self, dp: int, microbatches: int) -> RecipeLayout:
        """The same layout with other replicas and microbatches."""
        size = self.world.size // self.world.dp * dp
        batch = self.recipe.micro_batch_size * dp * microbatches
        return RecipeLayout(self.recipe.changed(world_size=size, global_batch_size=batch))

    def family(self) -> str:
        """The same for layouts that differ in replicas and batch alone, of one release of ours."""
        sizes = {"global_batch_size", "prism.world_size"}
        shared = {k: v for k, v in self.recipe.settings(text_of).items() if k not in sizes}
        return _digest({**source_of(self.recipe), "settings": shared, "prism": __version__})

    def command(self) -> list[str]:
        """Script and arguments that train it."""
        script = "hybrid" if self.recipe.is_hybrid else "gpt"
        return [f"pretrain_{script}.py", *self.recipe.megatron_words()]

    def capture(
        self,
        folder: Path,
        stage: int,
        server: Callable[[], CaptureServer],
        fewest_folder: Path | None,
    ) -> Path:
        """The slice of a stage's first rank, which is in ``folder`` then, and others maybe.

        fewest_folder : where a recipe's slices of ``fewest`` microbatches go; they cost little
                        beside
        """
        rank = self.world.rank_at(pp=stage)
        path = SliceStore(folder, self.world, {}).path(rank)
        if not path.exists():
            fewest = None
            # the fewest microbatches that the schedule takes cost little beside
            if fewest_folder is not None:
                fewest = self.resized(self.world.dp, self.fewest).recipe, fewest_folder
            twin_stages: tuple[int, ...] = ()
            # inner stages that do the same are written down from this run
            if stage == 1:
                twin_stages = self._twin_stages()
            server().capture(self.recipe, rank, folder, twin_stages, fewest)
        return path

    def _twin_stages(self) -> tuple[int, ...]:
        """The stages between the second and the last, if all of them have the second's layers:
        whatever else splits layers unevenly is of the first and the last stage.
        """
        by_layer = [name for name in self.recipe.flags if _BY_LAYER.search(name)]
        if by_layer:
            return ()
        return tuple(range(2, self.world.pp - 1))

    def assembled(self, folder: Path) -> Programs:
        """The world, of the slices of all stages."""
        return assemble(folder)


@dataclass(frozen=True)
class ScriptLayout(_Sizes):
    """A stock script's.

    script      : its path
    words       : its arguments
    prism_words : ``--prism-…`` flags for every rank
    """

    script: str
    words: tuple[str, ...]
    prism_words: tuple[str, ...]
    world: World
    micro_batch_size: int
    global_batch_size: int

    @classmethod
    def of(cls, script: str, words: Sequence[str], prism_words: Sequence[str]) -> ScriptLayout:
        """UsageError or WorldError for sizes that make no layout."""
        before = ["--prism-emulate", "--prism-ranks", "0"]
        job_options = options.from_command_line([*before, *prism_words, *words])
        assert job_options is not None, "--prism-emulate is among them"
        micro = size_of(words, "--micro-batch-size")
        batch = size_of(words, "--global-batch-size", micro * job_options.world.dp)
        # a batch is a whole number of microbatches on each replica
        if batch % (micro * job_options.world.dp):
            raise UsageError(
                f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} x "
                f"data-parallel size {job_options.world.dp}",
                fix="another batch",
            )
        return cls(script, tuple(words), tuple(prism_words), job_options.world, micro, batch)

    @property
    def fewest(self) -> int:
        """As if chunks were interleaved, which only the job's parsed arguments say: two of them
        take the most microbatches to warm up.
        """
        world = self.world
        if world.pp > 1:
            world = dataclasses.replace(world, vpp=2)
        return fewest(world, _MANY * self.world.pp, {})

    @property
    def key(self) -> str:
        return _digest([self.script, self.words, self.prism_words, self.world.size])

    def resized(self, dp: int, microbatches: int) -> ScriptLayout:
        size = self.world.size // self.world.dp * dp
        batch = self.micro_batch_size * dp * microbatches
        words = with_option(self.words, "--global-batch-size", batch)
        prism_words = with_option(self.prism_words, "--prism-world-size", size)
        world = dataclasses.replace(self.world, size=size)
        return dataclasses.replace(
            self,
            words=tuple(words),
            prism_words=tuple(prism_words),
            world=world,
            global_batch_size=batch,
        )

    def family(self) -> str:
        words = with_option(self.words, "--global-batch-size", None)
        prism_words = with_option(self.prism_words, "--prism-world-size", None)
        return _digest([__version__, str(Path(self.script).resolve()), words, prism_words])

    def command(self) -> list[str]:
        return [self.script, *self.words]

    def capture(
        self,
        folder: Path,
        stage: int,
        server: Callable[[], CaptureServer],
        fewest_folder: Path | None,
    ) -> Path:
        rank = self.world.rank_at(pp=stage)
        path = SliceStore(folder, self.world, {}).path(rank)
        # an earlier point of the family may have captured it
        if not path.exists():
            self._record(folder, [rank])
        return path

    def _record(self, folder: Path, ranks: Sequence[int]) -> None:
        argv = [*with_option(self.prism_words, "--prism-world-size", self.world.size), *self.words]
        try:
            job = script_job.Job.of(self.script, argv, self.world, "meta")
            script_job.record(job, folder, ranks)
        except PrismError as error:  # the log's end has Megatron's words
            raise PrismError(_refusal(error.message), fix=error.fix) from error

    def assembled(self, folder: Path) -> Programs:
        while True:
            try:
                return assemble(folder)
            except MissingSlicesError as error:
                captured_ranks = set(SliceStore(folder, self.world, {}).ranks())
                missing = [rank for rank in error.ranks if rank not in captured_ranks]
                # the missing ranks are there: something else is wrong
                if not missing:
                    raise
                self._record(folder, missing)


JobLayout = RecipeLayout | ScriptLayout


def _refusal(message: str) -> str:
    """The line of a traceback that says what is wrong."""
    error = r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception): .+)$"
    lines = re.findall(error, message, re.MULTILINE)
    if not lines:
        return message
    return str(lines[-1])


def size_of(words: Sequence[str], option: str, default: int = 1) -> int:
    """What follows an option.  UsageError for less than 1, and for what is no number."""
    # the script's own default
    if not any(word.partition("=")[0] == option for word in words):
        return default
    text = options.value_of(option, words)
    if not text.isdecimal() or int(text) < 1:
        message = f"{option} {text}".rstrip()
        raise UsageError(f"{message} is no number of at least 1", fix=f"{option} {default}")
    return int(text)


def with_option(words: Sequence[str], option: str, value: object) -> list[str]:
    """The words with one option at their end; True is a flag, None and False leave it out."""
    changed: list[str] = []
    is_of_option = False  # whether this word is the option, or a value of it
    for word in words:
        if word.startswith("--"):
            is_of_option = word.partition("=")[0] == option
        if not is_of_option:
            changed.append(word)
    if value is None or value is False:
        return changed
    changed.append(option)
    # a flag has no value
    if value is not True:
        changed.append(str(value))
    return changed
