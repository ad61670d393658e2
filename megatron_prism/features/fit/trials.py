"""A job captured again with changes that its slices cannot weigh, and what it then needs.

In : a ``Fit`` and the line of its job.  Out: the same with changes that were captured: each figure
is what ``prism fit`` says of the changed line.  Of a ladder of changes the first step that fits is
looked for; where no change alone is enough, pairs are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.job_slices import keep_line
from megatron_prism.core.errors import PrismError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.command_line.job_line import job_of
from megatron_prism.emulate.command_line.launch_line import split_line
from megatron_prism.emulate.jobs import recipe_job, script_job
from megatron_prism.features.fit.candidates import JOB_FLAGS, Ladder, LineChange, ladders
from megatron_prism.features.fit.fit import EXPANDABLE, Fit, TriedChange

if TYPE_CHECKING:
    from rich.console import Console

# each is a whole capture of the job
_MOST_CAPTURES = 32
_MOST_PAIRS = 3
_MOST_ESTIMATES = 2  # changes estimated from the slices that are captured, too
_LONGEST_REASON = 200
# torch's excepthook puts the rank in front of each line (distributed_c10d.py @2.13)
_ERROR = re.compile(r"(?:\[rank\d+\]: )?(?:\w+\.)*\w*(?:Error|Exception): ")


@dataclass(frozen=True)
class CapturedLine:
    """The line of a job, which is captured with more options.

    Args:
        words: a launch line behind flags of ours, or a recipe and its settings.
        is_recipe: which of both.
        folder: gets a folder for each change.
        console: gets the talk of captures.
    """

    words: tuple[str, ...]
    is_recipe: bool
    folder: Path
    console: Console

    def capture(self, change: LineChange) -> Programs:
        """Capture the job with a change, unless that was done before.

        Raises:
            PrismError: the job refuses the change, or it cannot be captured.
        """
        # slices of another line may be in the folder
        text = "\0".join((*self.words, change.text(self.is_recipe)))
        digest = hashlib.sha1(text.encode()).hexdigest()[:8]
        folder = self.folder / digest
        # a variable that stayed would change the captures of the next steps, too
        with ProcessChanges() as changes:
            for name, value in change.variables.items():
                changes.set_item(os.environ, name, value)
            if self.is_recipe:
                self._capture_recipe(change, folder)
            else:
                self._capture_script(change, folder)
        return open_programs(folder)

    def _capture_recipe(self, change: LineChange, folder: Path) -> None:
        name, *settings = self.words
        words = [*settings, *change.words(self.is_recipe)]
        recipe = recipes.load(name, words)
        recipe_job.capture(recipe, folder, console=self.console, keep=False)
        keep_line(folder, [name, *words])

    def _capture_script(self, change: LineChange, folder: Path) -> None:
        ours, line = split_line(self.words, options.alone())
        launched, job = job_of(line, ours)
        script, *arguments = job
        # behind the job's own arguments these win
        argv = [*ours, *launched, *arguments, *change.words(self.is_recipe)]
        script_job.capture_command_line(script, argv, folder, self.console)
        more = [JOB_FLAGS, shlex.join(change.words(self.is_recipe))]
        keep_line(folder, [*more, *self.words])


class Trials:
    """Captures changes of a job, and weighs them.

    Args:
        before: the job without them.
        line: its line.
        weigh: makes a ``Fit`` of slices, within the limit of ``before``.
    """

    def __init__(self, before: Fit, line: CapturedLine, weigh: Callable[[Programs], Fit]) -> None:
        self.refused: dict[str, str] = {}
        self._before = before
        self._line = line
        self._weigh = weigh
        self._tried: dict[str, TriedChange | None] = {}

    @property
    def are_used_up(self) -> bool:
        """Return whether no more changes are captured."""
        return len(self._tried) >= _MOST_CAPTURES

    def of(self, change: LineChange) -> TriedChange | None:
        """Capture and weigh a change; None where the job refuses it."""
        words = change.text(self._line.is_recipe)
        # ladders and pairs come to the same change again, and a capture is what costs
        if words not in self._tried:
            self._line.console.print(f"prism: the job with {words}")
            self._tried[words] = self._weighed(change, words)
        return self._tried[words]

    def _weighed(self, change: LineChange, words: str) -> TriedChange | None:
        try:
            programs = self._line.capture(change)
        # refused by Megatron or by the emulation: the user reads why, the other changes go on
        except PrismError as error:
            self.refused[words] = _reason(error.message)
            return None
        changed = self._weigh(programs)
        slower_ns = None
        ns, ns_before = changed.iteration_ns, self._before.iteration_ns
        # without a price on both sides the change has no cost in time, and none is invented
        if ns is not None and ns_before is not None:
            slower_ns = ns - ns_before
        host_bytes = 0 if changed.host is None else changed.host.rank_bytes
        return TriedChange(
            words,
            num_bytes=changed.limit + changed.over,
            fits=changed.steps_fit,
            slower_ns=slower_ns,
            captured=True,
            host_bytes=host_bytes,
        )

    def first_that_fits(
        self, ladder: Ladder, beside: LineChange | None = None
    ) -> TriedChange | None:
        """Look for the first step of a ladder that fits.

        Args:
            ladder: of which each step frees more than the one before.
            beside: a change that the job has, too.

        Returns:
            That step; the last one if none fits; None where the job refuses it.
        """
        steps = list(ladder.steps)
        if beside is not None:
            steps = list(map(beside.with_change, steps))
        first = self.of(steps[-1])
        # the last step frees most: where it is not enough, no other has to be captured
        if first is None or not first.fits:
            return first
        # between a step that is not enough (-1: no change) and one that is
        short, enough = -1, len(steps) - 1
        while enough - short > 1 and not self.are_used_up:
            middle = (short + enough) // 2
            change = self.of(steps[middle])
            if change is not None and change.fits:
                first, enough = change, middle
            else:
                short = middle
        return first


def with_trials(before: Fit, line: CapturedLine, weigh: Callable[[Programs], Fit]) -> Fit:
    """Return the answer with changes that were captured.

    Args:
        before: the answer of the job's slices.
        line: of the job.
        weigh: makes a ``Fit`` of slices, within the limit of ``before``.
    """
    # nothing has to be freed, so no minutes are spent on captures
    if before.steps_fit:
        return before
    trials = Trials(before, line, weigh)
    needed_before = before.limit + before.over
    # those of the slices come first; a figure of a capture takes the place of an estimate
    changes = {change.words: change for change in before.changes}
    for change in before.changes[:_MOST_ESTIMATES]:
        # this one is the allocator's, and the same slices tell it
        if change.words != EXPANDABLE:
            captured = trials.of(_change_of(change.words))
            del changes[change.words]
            _add(changes, captured, needed_before)

    settings = job_settings.of_source(before.programs.source)
    of_ladders: list[tuple[int, Ladder]] = []  # bytes that the last step frees
    for ladder in ladders(settings, before.programs.world):
        if trials.are_used_up:
            break
        _add(changes, trials.first_that_fits(ladder), needed_before)
        last = trials.of(ladder.steps[-1])
        # half of a pair has to free something itself
        if last is not None and last.num_bytes < needed_before:
            of_ladders.append((needed_before - last.num_bytes, ladder))
    # two changes cost the user more than one: pairs are for jobs that no single one helps
    if not any(change.fits for change in changes.values()):
        of_ladders.sort(key=lambda entry: -entry[0])
        for pair in _pairs(trials, [ladder for _, ladder in of_ladders]):
            _add(changes, pair, needed_before)
    tried = sorted(changes.values(), key=lambda change: change.order)
    return dataclasses.replace(before, changes=tuple(tried), refused=trials.refused)


def _add(changes: dict[str, TriedChange], change: TriedChange | None, needed_before: int) -> None:
    """Add a change that frees memory."""
    # a change that needs as much as before would only lengthen the user's list
    if change is not None and change.num_bytes < needed_before:
        changes[change.words] = change


def _pairs(trials: Trials, by_freed: Sequence[Ladder]) -> Iterator[TriedChange | None]:
    """Try two changes at once, the one that frees more as a whole; first what frees most."""
    num_pairs = 0
    for larger, smaller in itertools.combinations(by_freed, 2):
        whole = larger.steps[-1]
        # two values of one option are no pair
        if whole.contradicts(smaller.steps[-1]):
            continue
        # the pairs that should free most come first, and each costs several captures
        if num_pairs == _MOST_PAIRS or trials.are_used_up:
            return
        num_pairs += 1
        yield trials.first_that_fits(smaller, beside=whole)


def _change_of(text: str) -> LineChange:
    """Read the words of a change: Megatron's options, or keys of a recipe."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in shlex.split(text):
        # Megatron's options take several words; a recipe's keys are one word each
        if word.startswith("--"):
            name = word[2:]
            values[name] = []
        elif name:
            values[name].append(word)
        else:
            key, _, value = word.partition("=")
            values[key.replace("_", "-")] = [value]
    return LineChange({name: " ".join(words) for name, words in values.items()})


def _reason(message: str) -> str:
    """Return the line of an error that says why, as Megatron's traceback has it last."""
    last_line = error = ""
    for line in message.splitlines():
        last_line = line.strip() or last_line
        if _ERROR.match(last_line):
            error = last_line
    return (error or last_line or "without a word")[:_LONGEST_REASON]
