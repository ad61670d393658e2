"""Run a script dry until it starts its job: what it lacks is given to it in between.

A script that checks what it is given (``set -u``, ``${KEY:?}``, ``[ -d $DATA ] || exit``) ends at
the first thing that is not here.  It gets a placeholder and runs again, so that all that it lacks
is known at once.  What changes nothing of the job is not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line.launch_line import read_line
from megatron_prism.emulate.command_line.script_options import ScriptOptions
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.features.scripts import batch_script
from megatron_prism.features.scripts.execution import Execution

_MOST = 30  # runs of one script
_MOST_TRIED = 6  # variables that are varied one by one
_LACKS = re.compile(  # what Bash says of set -u and of ${NAME:?text}
    r"line \d+: \$?(\w+): (?P<text>.*)$", re.MULTILINE
)
_UNSET = ("unbound variable", "parameter null or not set", "parameter not set")
_LOOKS = re.compile(r"((?:\[\[?|\btest|&&|\|\|)\s+(?:!\s+)?)-[defrsx](?=\s)")  # tests of files
_TESTED = re.compile(  # variables that are tested for being empty
    r"-[zn]\s+[\"']?\$\{?([A-Z][A-Z0-9_]{2,})"
)
_OTHER_VALUE = "64"  # than the placeholder 1
_LISTS = ("LIST", "HOSTS")  # ends of names of variables that list hosts
_NUMBERS_OF_HOSTS = ("NHOSTS", "NUM_HOSTS", "N_HOSTS")  # ends of those that count them
# NNODES=$1 at the begin of a line; in functions it is indented, and ${4:-bf16} has a default
_ARGUMENT = re.compile(
    r"""^(?:export\s+)?(\w+)=["']?\$(?:(\d)|\{(\d+)\})["']?\s*(?:#.*)?$""", re.MULTILINE
)


class Attempts:
    """Runs of one script.

    Args:
        run: the first one.
        gpus: of each host.
        with_text: makes the words of a run of the script with another text.
        options: how the script is run; get the obstacles, or raise them.

    Attributes:
        run: the last one, with all placeholders.
        notes: lines about what stood in.
    """

    def __init__(
        self,
        run: Execution,
        gpus: object,
        with_text: Callable[[str], list[str]],
        options: ScriptOptions,
    ) -> None:
        self.run = run
        self.notes: list[str] = []
        self._gpus = gpus
        self._with_text = with_text
        self._variables: list[str] = []  # that have a placeholder
        self._arguments: list[str] = []  # what the script says of those that it lacks
        self._options = options
        self._looks = False  # whether what it looks for counts as there

    def job(self, text: str) -> Json:
        """Run the script until it starts its job.

        Args:
            text: of the script.

        Raises:
            UsageError: it starts none, whatever it is given.
        """
        for _ in range(_MOST):
            try:
                return self.run.job_with_gpus(self._gpus)
            except UsageError:
                if not self._gave(text):
                    raise
        return self.run.job_with_gpus(self._gpus)

    def _gave(self, text: str) -> bool:
        """Give the script what the last run has ended for; False where that is not known."""
        for lack in _LACKS.finditer(self.run.printed()):
            name, reason = lack[1], lack["text"]
            is_unset = reason in _UNSET or re.search(rf"\$\{{{name}:?\?", text)
            if is_unset and name.isdigit():
                # arguments up to this one
                missing = int(name) - len(self.run.words) + 2
                if missing > 0:
                    self._arguments.append("" if reason in _UNSET else reason)
                    words = [*self.run.words, *["1"] * missing]
                    self.run = replace(self.run, words=words)
                    return True
            elif is_unset and name not in self.run.environment:
                self._variables.append(name)
                self.run = self._with_values([name], lambda _: "1")
                return True
        # it ends itself where a variable is empty, and says which
        asked = _variables_in_words(self.run, text)
        if asked:
            self._variables += asked
            self.run = self._with_values(asked, lambda _: "1")
            return True
        # all that may lack was given: it ends for another reason
        if self._looks:
            return False
        # what it looks for counts as there, and what it asks Python is answered with yes
        self._looks = True
        words = list(self.run.words)
        if _LOOKS.search(text):
            copied_words = self._with_text(_LOOKS.sub(r"\1-n", text))
            words = [*copied_words, *words[len(copied_words) :]]
        environment = {**self.run.environment, "PRISM_DRY_YES": "1"}
        self.run = replace(self.run, words=words, environment=environment)
        self.notes.append("files and modules that the script looks for count as there")
        return True

    def _with_values(self, names: Sequence[str], value: Callable[[str], str]) -> Execution:
        """Make a run like the last one, with other values of variables."""
        environment = dict(self.run.environment)
        for name in names:
            environment[name] = value(name)
        return replace(self.run, environment=environment)

    def ask(self, job: Json, unknown: Sequence[str], text: str) -> list[str]:
        """Ask for variables and arguments that have placeholders, as far as they matter.

        Args:
            job: that the script starts with placeholders.
            unknown: further variables that have one.
            text: of the script.

        Returns:
            Variables that have a placeholder and change nothing.
        """
        title = self.run.title
        for reason in self._arguments:
            description = f" ({reason})" if reason else ""
            self._options.ask(
                UsageError(
                    f"{title} takes an argument{description}, which the line lacks",
                    fix=f"{title} VALUE",
                )
            )
        if not self._arguments:
            self._note_arguments(text)
        names = [*unknown, *self._variables]
        asked = self._that_matter(job, names)
        if asked:
            pronoun = "it" if len(asked) == 1 else "them"
            settings = map(_setting, asked)
            self._options.ask(
                UsageError(
                    f"{title} reads {', '.join(asked)}, and nothing here says {pronoun}",
                    fix=f"{' '.join(settings)} before prism",
                ),
                of_world=bool(set(asked) & set(unknown)) or self._changes_world(job, asked),
            )
        return [name for name in names if name not in asked]

    def _note_arguments(self, text: str) -> None:
        """Note arguments that the script takes and that are empty, for they may be optional.

        Args:
            text: of the script.
        """
        names: dict[int, str] = {}  # number of an argument -> the variable that gets it
        for name, digit, digits in _ARGUMENT.findall(text):
            names.setdefault(int(digit or digits), name)
        # bash, the script, its arguments
        num_given = len(self.run.words) - 2
        missing = [number for number in names if number > num_given]
        if not missing or self.run.words[1].startswith("-"):
            return
        # an empty one counts as not said where it has a default
        added = [""] * (max(missing) - num_given)
        for number in missing:
            added[number - num_given - 1] = _OTHER_VALUE
        whole = self._with_arguments(added)
        # those at the end that change nothing are not asked for
        while added and same_job(self._with_arguments(added[:-1]), whole, self._options):
            added.pop()
        if not added:
            return
        lacking = [
            names.get(number, "VALUE")
            for number in range(num_given + 1, num_given + len(added) + 1)
        ]
        text_of_names = " ".join(lacking)
        self.notes.append(
            f"{self.run.title} takes more arguments, which are empty: {text_of_names}"
        )

    def _with_arguments(self, added: Sequence[str]) -> Json | None:
        """Return the job with further arguments of the script, None where there is none."""
        try:
            return replace(self.run, words=[*self.run.words, *added]).job_with_gpus(self._gpus)
        except UsageError:
            return None

    def _that_matter(self, job: Json, names: Sequence[str]) -> list[str]:
        """Return the variables with which the script starts another job."""
        if not names or self._starts(job, names):
            return []
        # each one takes a run of the script: of many variables all are asked for
        if len(names) == 1 or len(names) > _MOST_TRIED:
            return list(names)
        return [name for name in names if not self._starts(job, [name])]

    def _starts(self, job: Json, names: Sequence[str]) -> bool:
        """Tell whether the script starts the same job with other values of variables."""
        return same_job(self._varied(names), job, self._options)

    def _changes_world(self, job: Json, names: Sequence[str]) -> bool:
        """Tell whether the number of ranks depends on variables."""
        return _world(self._varied(names)) != _world(job)

    def _varied(self, names: Sequence[str]) -> Json | None:
        """Return the job with other values of variables, None where there is none."""
        try:
            return self._with_values(names, _other_value).job_with_gpus(self._gpus)
        except UsageError:
            return None


def _variables_in_words(run: Execution, text: str) -> list[str]:
    """Return the variables that a script has asked for in its own words before it ended.

    ``[[ -z $WORKSPACE ]] && echo "Please set WORKSPACE" && exit 1``: the script reads the variable
    and does not set it, and the end of what it printed names it.

    Args:
        run: that has ended without a job.
        text: of the script.
    """
    printed = [line for line in run.printed().splitlines() if line.strip()]
    names_printed = set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", "\n".join(printed[-2:])))
    tested_names = dict.fromkeys(_TESTED.findall(text))
    asked = []
    for name in tested_names:
        is_set = bool(run.environment.get(name)) or re.search(rf"^\s*{name}=", text, re.MULTILINE)
        if name in names_printed and not is_set:
            asked.append(name)
    return asked


def _is_list(name: str) -> bool:
    """Tell whether a variable lists hosts, by its name."""
    return name.endswith(_LISTS) and not name.endswith(_NUMBERS_OF_HOSTS)


def _other_value(name: str) -> str:
    """Return a value of a variable that differs from the placeholder in all that counts."""
    if _is_list(name):
        return "host1,host2,host3"
    return _OTHER_VALUE


def _setting(name: str) -> str:
    """Return what a fix says of a variable, with a word in the place of its value."""
    value = "VALUE"
    if _is_list(name):
        value = "HOST1,HOST2"
    elif batch_script.is_size(name):
        value = "N"
    return f"{name}={value}"


def same_job(job: Json | None, other: Json | None, options: ScriptOptions) -> bool:
    """Tell whether two runs of a script start the same job; places of its data may differ."""
    if job is None or other is None:
        return job is other
    return _read(job, options) == _read(other, options)


def _read(job: Json, options: ScriptOptions) -> tuple[object, ...]:
    """Return what tells a job from another."""
    line = read_line(job["line"], job["env"])
    words = []
    option = ""
    for word in line.words:
        if word.startswith("--"):
            option = word.partition("=")[0]
        if option not in options.place_options:
            words.append(word)
    # where no number of ranks is known, each number of the line may count
    numbers = job["line"] if line.unclear else (line.ranks, line.per_host)
    return words, line.shell, numbers, job["text"]


def _world(job: Json | None) -> tuple[object, ...]:
    """Return how many ranks a job has, and how many on a host."""
    if job is None:
        return ()
    line = read_line(job["line"], job["env"])
    return line.ranks, line.per_host
