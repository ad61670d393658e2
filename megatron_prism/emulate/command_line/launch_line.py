"""Launch lines: the script of a job, and how many ranks what stands before it would start.

In : the words of a line as people type it, ``srun --ntasks 64 singularity exec i.sif python -u
pretrain_gpt.py …``.  Out: a LaunchLine.  Nothing is started.  ``LAUNCHERS`` is the table of all
programs that start others; one that is missing needs a row and no code.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted


@dataclass(frozen=True)
class LauncherRow:
    """How a program is told what to start.  Options are compared with ``_`` as ``-``.

    ranks : options that say how many processes there are in all
    nodes : on how many hosts
    per_host : on each host
    parts : how many sets of processes each host has, where ``nodes`` and ``per_host`` count sets
    hosts : a file that names hosts and their slots
    gpus, all_gpus : how many GPUs a host has, and all of them
    alone : options without a value
    pairs : options with two
    sets  : options that set a variable, NAME=VALUE
    verbs : words that may follow the name
    skips : words besides options before the command: an image, a host
    text  : whether the command may be one word, a line for a shell
    unsaid: (hosts, processes on each) where no option says them
    reads : variables that say ranks, nodes and per_host where no option does
    """

    names: str
    ranks: str = ""
    nodes: str = ""
    per_host: str = ""
    parts: str = ""
    hosts: str = ""
    gpus: str = ""
    all_gpus: str = ""
    alone: str = ""
    pairs: str = ""
    sets: str = ""
    verbs: str = ""
    skips: int = 0
    text: bool = False
    unsaid: tuple[int, int] | None = None
    reads: tuple[str, str, str] = ("", "", "")

    @property
    def counts(self) -> bool:
        """Whether it starts several processes."""
        return bool(self.ranks or self.per_host)


_IMAGE = "-i -t -it -d --rm --init --privileged --tty --interactive --nv --rocm --cleanenv -e -c "
_IMAGE += "--contain --containall --no-home --writable-tmpfs --fakeroot -C --writable --compat"
LAUNCHERS = (
    LauncherRow(
        "torchrun torch.distributed.run torch.distributed.launch",
        nodes="--nnodes",
        per_host="--nproc-per-node",
        alone="--standalone --no-python --run-path --use-env -m --module",
        unsaid=(1, 1),
        reads=("", "PET_NNODES", "PET_NPROC_PER_NODE"),
    ),
    LauncherRow(
        "srun",
        ranks="-n --ntasks",
        nodes="-N --nodes",
        per_host="--ntasks-per-node",
        alone="-l --label -u --unbuffered -K --kill-on-bad-exit -E -v -vv -Q --exclusive "
        "--overlap --no-kill -k --pty --exact -O -s --contiguous",
        reads=("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"),
    ),
    LauncherRow(
        "mpirun mpiexec mpiexec.hydra orterun prterun prun",
        ranks="-np --np -n --n -c",
        per_host="--npernode -npernode -ppn --ppn -perhost -N --map-by --ntasks-per-node",
        hosts="--hostfile -hostfile --machinefile -machinefile -f",
        alone="--allow-run-as-root -allow-run-as-root --oversubscribe --nooversubscribe "
        "--tag-output --report-bindings -v --verbose -q --bynode --display-map -l "
        "--use-hwthread-cpus",
        pairs="--mca -mca --gmca -gmca --prtemca --pmixmca -genv -env",
        sets="-x",
    ),
    LauncherRow(
        "jsrun",
        ranks="-p --np",
        nodes="-n --nrs",
        per_host="-a --tasks-per-rs",
        parts="-r --rs-per-host",
        unsaid=(1, 1),
    ),
    LauncherRow(
        "deepspeed ds",
        nodes="--num-nodes",
        per_host="--num-gpus",
        hosts="--hostfile -H",
        alone="--no-python --no-local-rank --force-multi --no-ssh --no-ssh-check --save-pid "
        "--module --elastic-training",
    ),
    LauncherRow("aprun ibrun", ranks="-n", per_host="-N", alone="-q -v"),
    LauncherRow(
        "flux",
        ranks="-n --ntasks",
        nodes="-N --nodes",
        per_host="--tasks-per-node",
        verbs="mini run submit",
        alone="-l -u -v -x --label-io --unbuffered --exclusive",
    ),
    LauncherRow("horovodrun", ranks="-np --num-proc", alone="--verbose --mpi --gloo"),
    LauncherRow(
        "accelerate accelerate-launch accelerate.commands.launch",
        ranks="--num-processes",
        nodes="--num-machines",
        verbs="launch",
        alone="--multi-gpu --use-deepspeed --use-megatron-lm --use-fsdp --cpu -m --module",
    ),
    LauncherRow(
        "docker podman nerdctl",
        verbs="exec run",
        skips=1,
        alone=_IMAGE.replace(" -e", ""),
        sets="-e --env",
    ),
    LauncherRow("singularity apptainer", verbs="exec run", skips=1, alone=_IMAGE, sets="--env"),
    LauncherRow("enroot", verbs="start", skips=1, alone="--root --rw -r -w"),
    LauncherRow("ch-run", skips=1, alone="-w --write"),
    LauncherRow("shifter", alone="--clearenv -V"),
    LauncherRow("kubectl", verbs="exec", skips=1, alone="-i -t -it"),
    LauncherRow("pdsh", alone="-S -N -v", text=True),
    LauncherRow("ssh", skips=1, alone="-A -n -q -t -T -x -X -tt -f", text=True),
    LauncherRow("env", alone="-i -"),
    LauncherRow("nsys ncu rocprof rocprofv3 perf", verbs="profile record launch", alone="-v"),
    LauncherRow("numactl hwloc-bind", alone="-a -b -l --localalloc --all --balancing"),
    LauncherRow("taskset", skips=1, alone="-a -c --cpu-list"),
    LauncherRow("timeout", skips=1, alone="-v --foreground --preserve-status"),
    LauncherRow("gdb", alone="--args -q -batch --batch"),
    LauncherRow(
        "nohup time nice ionice chrt stdbuf setsid unbuffer exec command sudo catchsegv "
        "strace ltrace sem",
        alone="-E -p -v -t -a",
    ),
    LauncherRow(
        "uv poetry pixi pdm hatch conda mamba micromamba",
        verbs="run",
        alone="--no-capture-output --live-stream --no-sync --active --frozen",
    ),
    LauncherRow("ray", verbs="job submit", alone="--no-wait"),
)
SUBMIT = ("sbatch", "qsub", "bsub", "pjsub", "salloc")  # commands that queue a script
BATCH = LauncherRow(  # their options, which the directives of a script are too
    "",
    ranks="-n --ntasks",
    nodes="-N --nodes -nnodes",
    per_host="--ntasks-per-node --tasks-per-node",
    gpus="--gpus-per-node --gres -g -gpu",
    all_gpus="-G --gpus",
    sets="--export -v -env",
)
BY_NAME = dict[str, LauncherRow]()
for _row in LAUNCHERS:
    BY_NAME.update(dict.fromkeys(_row.names.split(), _row))
SCRIPTS = (".sh", ".sbatch", ".slurm", ".pbs")
_PYTHON = re.compile(r"python[\d.]*$")
_PYTHON_ALONE = "-u -O -OO -B -I -s -S -v -q -E -P -d -i"
_SHELL = re.compile(r"(ba|da|z|k)?sh$")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])(?<!^-)\d+(?![\w.])")
_PER_NODE = re.compile(r"ppr:(\d+):node")  # of --map-by
_SLOTS = re.compile(r"(?:\bslots=|:)(\d+)")  # of a host: node1 slots=8, node1:8


@dataclass(frozen=True)
class LaunchLine:
    """What a launch line says.

    words     : the script and its arguments; ``-m`` and a module before them for a module
    shell     : the words of a shell and its script, which has to be run to know; else none
    before    : the words before ``shell``
    launchers : names of what stands before the script, outermost first
    variables : that the line sets
    ranks     : processes of the job; None where the line does not say
    per_host  : processes on a host, where that is said
    source    : which options said so
    unclear   : the option that says no number, ``--nproc-per-node gpu``
    """

    words: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None
    per_host: int | None = None
    source: str = ""
    unclear: str = ""

    def flags(self, flags_given: Sequence[str]) -> list[str]:
        """Our flags for the world of this line, less those in ``flags_given``.

        Raises:
            UsageError: a launcher leaves its number to the hosts, and no flag says it.
        """
        names_given = {word.partition("=")[0] for word in flags_given}
        flags = list[str]()
        # the user's own flags win
        if "--prism-world-size" not in names_given:
            if self.unclear:
                raise UsageError(
                    f"{self.unclear} does not say how many ranks the job has",
                    fix="a number in its place, or --prism-world-size N",
                )
            if self.ranks:
                flags += ["--prism-world-size", str(self.ranks)]
        # one host needs no word on how many GPUs a host has
        has_several_hosts = self.per_host is not None and 0 < self.per_host < (self.ranks or 0)
        if has_several_hosts and "--prism-gpus-per-node" not in names_given:
            flags += ["--prism-gpus-per-node", str(self.per_host)]
        return flags


def is_launcher(word: str) -> bool:
    """Whether ``word`` starts programs: one of the table, Python or a shell."""
    name = Path(word).name
    return name in BY_NAME or bool(_PYTHON.match(name) or _SHELL.match(name))


def begins_line(word: str) -> bool:
    """Whether a launch line may begin with ``word``: a launcher, or a script; no ``key=value``."""
    # key=value is ours; a path may have a = behind its first folder
    if "=" in word.partition("/")[0]:
        return False
    if word == "--" or word.endswith((".py", *SCRIPTS)):
        return True
    return (is_launcher(word) or word in SUBMIT) and not os.path.isdir(word)


def split_line(words: Sequence[str], alone: Collection[str]) -> tuple[list[str], list[str]]:
    """(options of ours, the launch line) of a command line.

    Args:
        words: our options, then a line; ``--`` may stand before it.
        alone: those of our options that take no value.
    """
    place = 0
    line = list(words)
    while line and line[0] != "--" and not begins_line(_unquoted(line)[0]):
        word = line[0]
        # an option with its value in a word of its own
        takes_value = word.startswith("-") and word not in alone and "=" not in word
        place += 2 if takes_value else 1
        line = list(words[place:])
    if line[:1] == ["--"]:
        line = line[1:]
    return list(words[:place]), _unquoted(line)


def _unquoted(line: Sequence[str]) -> list[str]:
    """The words of a launch line, which may be quoted as one."""
    # a line that the user's shell has divided already
    if len(line) != 1:
        return list(line)
    try:
        parts = shlex.split(line[0])
    except ValueError:  # an open quote
        return list(line)
    if len(parts) > 1 and is_launcher(parts[0]) and not is_file(line[0]):
        return parts
    return list(line)


def read_line(words: Sequence[str], env: Mapping[str, str]) -> LaunchLine:
    """What the words of a launch line say.

    Args:
        words: from the first launcher, or from the script.
        env: variables that say what a launcher's options do not.

    Raises:
        UsageError: a launcher starts several programs, as srun and mpirun do behind ``:``.
    """
    reading = _Reading(words, env)
    while reading.remaining:
        line = reading.read_program()
        if line is not None:
            return line
    return reading.ending()


class _Reading:
    """How far a launch line is read.

    remaining : words that are not read yet
    launchers, variables : as in a LaunchLine
    counted   : ranks by the innermost launcher that says some
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.words = words
        self.env = env
        self.remaining = list(words)
        self.launchers = list[str]()
        self.variables = dict[str, str]()
        self.counted = LaunchLine()

    def ending(self, *job: str) -> LaunchLine:
        """The line, whose script and arguments are ``job``."""
        launchers = tuple(self.launchers)
        return replace(self.counted, words=job, launchers=launchers, variables=self.variables)

    def ending_in_shell(self, *shell: str, words_before: int) -> LaunchLine:
        """The line, which ends with a script for a shell."""
        before = tuple(self.words[:words_before])
        return replace(self.ending(), shell=shell, before=before)

    def read_program(self) -> LaunchLine | None:
        """Read one launcher with its options, or a variable; the whole line where it ends there."""
        name = Path(self.remaining[0]).name
        words_before = len(self.words) - len(self.remaining)
        # NAME=value in front of a launcher
        if setting := _ASSIGNMENT.fullmatch(self.remaining[0]):
            self.variables[setting[1]] = setting[2]
            self.remaining = self.remaining[1:]
            return None
        # a script of a shell or of a scheduler: another reader runs it dry
        if name in SUBMIT or _SHELL.match(name) or self._is_manifest(name):
            return self.ending_in_shell(*self.remaining, words_before=words_before)
        if _PYTHON.match(name):
            self.remaining, is_module = _after_python(self.remaining[1:])
            if not is_module:
                return None  # a script, or one more launcher, is next
            # python -m pretrain: the module is the job
            if not self.remaining or self.remaining[0] not in BY_NAME:
                return self.ending("-m", *self.remaining)
            name = self.remaining[0]  # python -m torch.distributed.run
        row = BY_NAME.get(name)
        if row is not None:
            options, self.remaining = split_options(row, self.remaining[1:])
            return self._read_launcher(name, row, options)
        # a program in front of a launcher, such as a wrapper of a site
        ahead = _command_ahead(self.remaining)
        if ahead:
            # a program that we do not know: it counts if its options are those of torchrun
            row = BY_NAME["torchrun"]
            options, _ = split_options(row, self.remaining[1:ahead])
            self.remaining = self.remaining[ahead:]
            # its options say nothing of ranks, so neither does this row
            if not options.keys() & {"--nproc-per-node", "--nnodes"}:
                row = LauncherRow("")
            return self._read_launcher(name, row, options)
        if self.remaining[0].endswith(SCRIPTS):
            return self.ending_in_shell("bash", *self.remaining, words_before=words_before)
        return self.ending(*self.remaining)

    def _is_manifest(self, name: str) -> bool:
        """Whether kubectl creates what a file describes, not a process of its own."""
        return name == "kubectl" and self.remaining[1:2] in (["apply"], ["create"])

    def _read_launcher(
        self, name: str, row: LauncherRow, options: Mapping[str, Sequence[str]]
    ) -> LaunchLine | None:
        """Note what a launcher's options say; the whole line where its command ends it."""
        self.launchers.append(name)
        # variables that an option sets: mpirun -x, docker -e
        for option in row.sets.split():
            for text in options.get(option, ()):
                if setting := _ASSIGNMENT.fullmatch(text):
                    self.variables[setting[1]] = setting[2]
        if row.counts:
            if ":" in self.remaining:
                raise UsageError(
                    f"{name} starts several programs, with : between them",
                    fix="the part that trains, with --prism-world-size N",
                )
            self.counted = _counted(name, row, options, {**self.env, **self.variables})
        # ssh host 'a whole command'
        if row.text and len(self.remaining) == 1 and " " in self.remaining[0]:
            words_before = len(self.words) - 1
            return self.ending_in_shell("bash", "-c", self.remaining[0], words_before=words_before)
        # torchrun -m: what follows is a module
        if options.keys() & {"-m", "--module"} & set(row.alone.split()):
            return self.ending("-m", *self.remaining)
        return None


def _command_ahead(words: Sequence[str]) -> int:
    """The place of the first launcher before any script, else of the command that a script starts
    behind ``--``; 0 if there is none.
    """
    for place, word in enumerate(words):
        # what stands behind a script are its own arguments
        if word.endswith((".py", ".sh")):
            break
        if place and "/" not in word and is_launcher(word):
            return place
    if "--" not in words:
        return 0
    place = list(words).index("--") + 1
    if place < len(words) and begins_line(words[place]):
        return place
    return 0


def _after_python(words: Sequence[str]) -> tuple[list[str], bool]:
    """(what follows the options of Python, whether it is a module)."""
    remaining = list(words)
    alone = _PYTHON_ALONE.split()
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-m", "-c", "-"):
        has_value = remaining[0] not in alone and len(remaining[0]) == 2  # -W ignore; -Wignore
        remaining = remaining[2:] if has_value else remaining[1:]
    if remaining[:1] == ["-m"]:
        return remaining[1:], True
    return remaining, False


def split_options(row: LauncherRow, words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """({option: its values}, the command and what follows it)."""
    options = dict[str, list[str]]()
    remaining = list(words)
    words_to_skip = row.skips
    alone = row.alone.split()
    while remaining:
        word = remaining[0]
        words_read = 1
        if word == "--":
            if not words_to_skip:
                return options, remaining[1:]
        elif word.startswith("-") and len(word) > 1:
            following = remaining[1] if len(remaining) > 1 else ""
            name, value, words_read = _read_option(row, word, following)
            options.setdefault(name, []).append(value)
        # docker run, kubectl exec: a verb is no command
        elif word in row.verbs.split() or (word == "-" and word in alone):
            pass
        # a host, an image or a pod stands before the command
        elif words_to_skip and not _ASSIGNMENT.fullmatch(word):
            words_to_skip -= 1
        else:
            break
        remaining = remaining[words_read:]
    return options, remaining


def _read_option(row: LauncherRow, word: str, following: str) -> tuple[str, str, int]:
    """(option, its value, how many words it takes)."""
    if short := re.fullmatch(r"(-[a-zA-Z])(\d+)", word):  # -N4
        return short[1], short[2], 1
    name, equals, value = word.partition("=")
    name = _full_name(row, name)
    # an option that takes two words
    if name in row.pairs.split():
        return name, value, 3
    if equals or name in row.alone.split() or following.startswith("-"):
        return name, value, 1
    # a long option that the table does not have: the command behind it is no value of it
    if len(name) > 2 and "/" not in following and begins_line(following):
        return name, value, 1
    return name, following, 2


def _full_name(row: LauncherRow, name: str) -> str:
    """An option with ``-`` for ``_``, and in full: getopt and argparse take what is begun."""
    name = name[:2] + name[2:].replace("_", "-")
    options = f"{row.ranks} {row.nodes} {row.per_host} {row.alone}".split()
    long_options = [option for option in options if option.startswith("--")]
    # too short to be the begin of one alone
    if len(name) <= 4 or name in long_options:
        return name
    begun = [option for option in long_options if option.startswith(name)]
    return begun[0] if len(begun) == 1 else name


_QUANTITIES = ("ranks", "nodes", "per_host", "parts", "gpus", "all_gpus")


def numbers(
    row: LauncherRow, options: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, str], str]:
    """({quantity: how many}, {quantity: who says so}, the option that says no number) of ranks,
    nodes, per_host, parts, gpus and all_gpus.
    """
    counts, sources = dict[str, int](), dict[str, str]()
    unclear = ""
    variables = dict(zip(("ranks", "nodes", "per_host"), row.reads, strict=True))
    if options.keys() & set(row.per_host.split()):
        del variables["ranks"]  # it says the ranks of the whole allocation then
    for quantity in _QUANTITIES:
        options_given = [option for option in getattr(row, quantity).split() if option in options]
        # the first option of the row that has a value counts
        with_value = [option for option in options_given if any(options[option])]
        if with_value:
            option = with_value[0]
            text = options[option][-1]
            source = f"{option} {text}"
        else:
            if options_given:  # of a variable that is empty
                unclear = unclear or f"the empty {options_given[0]}"
            option = ""
            variable = variables.get(quantity, "")
            text = env.get(variable, "")
            source = f"{variable}={text}"
        is_map = option == "--map-by"
        pattern = _PER_NODE if is_map else _NUMBER
        written = pattern.findall(text)
        if written and int(written[-1]):  # the larger one of 1:8 and 4-8
            counts[quantity] = int(written[-1])
            sources[quantity] = source
        elif text and not is_map:  # --map-by may say other things than a number
            unclear = unclear or source
    return counts, sources, unclear


def _counted(
    name: str, row: LauncherRow, options: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> LaunchLine:
    """Ranks, ranks on a host, and who says so, by one launcher."""
    counts, sources, unclear = numbers(row, options, env)
    if unclear:
        return LaunchLine(unclear=f"{unclear} of {name}")
    # what the launcher starts where nothing is said
    default_nodes, default_per_host = row.unsaid or (None, None)
    ranks = counts.get("ranks")
    nodes = counts.get("nodes", default_nodes)
    per_host = counts.get("per_host", default_per_host)
    # a number of all ranks stands alone; nodes and ranks of a node are multiplied
    sources_are_factors = not ranks
    if ranks is None:
        slots = _slots(row, options)
        if slots:  # a file of hosts
            nodes = len(slots)
            if not per_host:
                ranks = sum(slots)
            sources.setdefault("nodes", f"{counted(nodes, 'host')} of its file")
    # deepspeed without a file of hosts starts on this host alone
    on_this_host = name in ("deepspeed", "ds") and "--hostfile" not in options
    if ranks is None and per_host and (nodes or on_this_host):
        ranks = (nodes or 1) * per_host
    elif ranks and nodes and not per_host:
        # rounded up: the last host may have fewer
        per_host = -(-ranks // nodes)
    if per_host and row.parts:
        per_host *= counts.get("parts", 1)
    joined = " x " if sources_are_factors else ", "
    source = joined.join(sources.values()) or "no option"
    if not ranks:
        per_host = None
    return LaunchLine(ranks=ranks, per_host=per_host, source=f"{source} of {name}")


def _slots(row: LauncherRow, options: Mapping[str, Sequence[str]]) -> list[int]:
    """The slots of each host in a file of hosts; none where a host has no number."""
    slots = list[int]()
    for option in row.hosts.split():
        if option not in options or not is_file(options[option][-1]):
            continue
        for line in Path(options[option][-1]).read_text().splitlines():
            host = line.partition("#")[0].strip()
            if not host:
                continue
            number = _SLOTS.search(host)
            # nobody says how many ranks this host has
            if number is None:
                return []
            slots.append(int(number[1]))
    return slots


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; a whole command is a name that is too long."""
    return os.path.isfile(path)
