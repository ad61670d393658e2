"""Launch lines: the script of a job, and how many ranks what stands before it would start.

In : the words of a line as people type it, ``srun --ntasks 64 singularity exec i.sif python -u
pretrain_gpt.py …``.  Out: a LaunchLine.  Nothing is started.  ``LAUNCHERS`` is the table of all
programs that start others; one that is missing needs a row and no code.
"""

from __future__ import annotations

import contextlib
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
    each  : on each host
    parts : how many sets of processes each host has, where ``nodes`` and ``each`` count sets
    hosts : a file that names hosts and their slots
    gpus, all_gpus : how many GPUs a host has, and all of them
    alone : options without a value
    pairs : options with two
    sets  : options that set a variable, NAME=VALUE
    verbs : words that may follow the name
    skips : words besides options before the command: an image, a host
    text  : whether the command may be one word, a line for a shell
    unsaid: (hosts, processes on each) where no option says them
    reads : variables that say ranks, nodes and each where no option does
    """

    names: str
    ranks: str = ""
    nodes: str = ""
    each: str = ""
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
        return bool(self.ranks or self.each)


_IMAGE = "-i -t -it -d --rm --init --privileged --tty --interactive --nv --rocm --cleanenv -e -c "
_IMAGE += "--contain --containall --no-home --writable-tmpfs --fakeroot -C --writable --compat"
LAUNCHERS = (
    LauncherRow(
        "torchrun torch.distributed.run torch.distributed.launch",
        nodes="--nnodes",
        each="--nproc-per-node",
        alone="--standalone --no-python --run-path --use-env -m --module",
        unsaid=(1, 1),
        reads=("", "PET_NNODES", "PET_NPROC_PER_NODE"),
    ),
    LauncherRow(
        "srun",
        ranks="-n --ntasks",
        nodes="-N --nodes",
        each="--ntasks-per-node",
        alone="-l --label -u --unbuffered -K --kill-on-bad-exit -E -v -vv -Q --exclusive "
        "--overlap --no-kill -k --pty --exact -O -s --contiguous",
        reads=("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"),
    ),
    LauncherRow(
        "mpirun mpiexec mpiexec.hydra orterun prterun prun",
        ranks="-np --np -n --n -c",
        each="--npernode -npernode -ppn --ppn -perhost -N --map-by --ntasks-per-node",
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
        each="-a --tasks-per-rs",
        parts="-r --rs-per-host",
        unsaid=(1, 1),
    ),
    LauncherRow(
        "deepspeed ds",
        nodes="--num-nodes",
        each="--num-gpus",
        hosts="--hostfile -H",
        alone="--no-python --no-local-rank --force-multi --no-ssh --no-ssh-check --save-pid "
        "--module --elastic-training",
    ),
    LauncherRow("aprun ibrun", ranks="-n", each="-N", alone="-q -v"),
    LauncherRow(
        "flux",
        ranks="-n --ntasks",
        nodes="-N --nodes",
        each="--tasks-per-node",
        verbs="run submit",
        alone="-l -u -v -x --label-io --unbuffered --exclusive",
    ),
    LauncherRow("horovodrun", ranks="-np --num-proc", alone="--verbose --mpi --gloo"),
    LauncherRow(
        "accelerate",
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
    each="--ntasks-per-node --tasks-per-node",
    gpus="--gpus-per-node --gres -g -gpu",
    all_gpus="-G --gpus",
    sets="--export -v -env",
)
BY_NAME = {name: row for row in LAUNCHERS for name in row.names.split()}
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
    each      : on a host, where that is said
    source    : which options said so
    unclear   : the option that says no number, ``--nproc-per-node gpu``
    """

    words: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None
    each: int | None = None
    source: str = ""
    unclear: str = ""

    def flags(self, given: Sequence[str]) -> list[str]:
        """Our flags for the world of this line, less those in ``given``.

        Raises:
            UsageError: a launcher leaves its number to the hosts, and ``given`` does not say it.
        """
        names = {word.partition("=")[0] for word in given}
        flags = list[str]()
        if "--prism-world-size" not in names:
            if self.unclear:
                raise UsageError(
                    f"{self.unclear} does not say how many ranks the job has",
                    fix="a number in its place, or --prism-world-size N",
                )
            flags += ["--prism-world-size", str(self.ranks)] if self.ranks else []
        if self.each and (self.ranks or 0) > self.each and "--prism-gpus-per-node" not in names:
            flags += ["--prism-gpus-per-node", str(self.each)]
        return flags


def is_launcher(word: str) -> bool:
    """Whether ``word`` starts programs: one of the table, Python or a shell."""
    name = Path(word).name
    return name in BY_NAME or bool(_PYTHON.match(name) or _SHELL.match(name))


def begins_line(word: str) -> bool:
    """Whether a launch line may begin with ``word``: a launcher, or a script; no ``key=value``."""
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
    place, line = 0, list(words)
    while line and line[0] != "--" and not begins_line(_unquoted(line)[0]):
        word = line[0]
        place += 2 if word.startswith("-") and word not in alone and "=" not in word else 1
        line = list(words[place:])
    return list(words[:place]), _unquoted(line[1:] if line[:1] == ["--"] else line)


def _unquoted(line: Sequence[str]) -> list[str]:
    """The words of a launch line, which may be quoted as one."""
    with contextlib.suppress(ValueError):  # an open quote
        parts = shlex.split(line[0]) if len(line) == 1 else []
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
    rest, names = list(words), list[str]()
    variables, counted = dict[str, str](), LaunchLine()

    def ending(*job: str, shell: Sequence[str] = (), before: Sequence[str] = ()) -> LaunchLine:
        return replace(
            counted,
            words=job,
            shell=tuple(shell),
            before=tuple(before),
            launchers=tuple(names),
            variables=variables,
        )

    while rest:
        name = Path(rest[0]).name
        if setting := _ASSIGNMENT.fullmatch(rest[0]):
            variables[setting[1]] = setting[2]
            rest = rest[1:]
            continue
        manifest = name == "kubectl" and {"apply", "create"} & set(rest[1:2])
        if name in SUBMIT or _SHELL.match(name) or manifest:
            return ending(shell=rest, before=words[: len(words) - len(rest)])
        if _PYTHON.match(name):
            rest, module = _after_python(rest[1:])
            if not module:
                continue
            if not rest or rest[0] not in BY_NAME:
                return ending("-m", *rest)
            name = rest[0]
        if (row := BY_NAME.get(name)) is not None:
            options, rest = split_options(row, rest[1:])
        elif ahead := _command_ahead(rest):  # of a program that we do not know
            row = BY_NAME["torchrun"]
            options, rest = split_options(row, rest[1:ahead])[0], rest[ahead:]
            row = row if options.keys() & {"--nproc-per-node", "--nnodes"} else LauncherRow("")
        else:
            break
        names.append(name)
        values = [text for option in row.sets.split() for text in options.get(option, [])]
        settings = [one for text in values if (one := _ASSIGNMENT.fullmatch(text))]
        variables |= {one[1]: one[2] for one in settings}
        if row.counts and ":" in rest:
            fix = "the part that trains, with --prism-world-size N"
            raise UsageError(f"{name} starts several programs, with : between them", fix=fix)
        if row.counts:
            counted = _counted(name, row, options, {**env, **variables})
        if row.text and len(rest) == 1 and " " in rest[0]:
            return ending(shell=("bash", "-c", rest[0]), before=words[:-1])
        if options.keys() & {"-m", "--module"} & set(row.alone.split()):
            return ending("-m", *rest)
    if rest and rest[0].endswith(SCRIPTS):
        return ending(shell=("bash", *rest), before=words[: len(words) - len(rest)])
    return ending(*rest)


def _command_ahead(words: Sequence[str]) -> int:
    """The place of the first launcher before any script, else of the command that a script starts
    behind ``--``; 0 if there is none.
    """
    for place, word in enumerate(words):
        if word.endswith((".py", ".sh")):
            break
        if place and "/" not in word and is_launcher(word):
            return place
    place = [*words, "--"].index("--") + 1
    return place if place < len(words) and begins_line(words[place]) else 0


def _after_python(words: Sequence[str]) -> tuple[list[str], bool]:
    """(what follows the options of Python, whether it is a module)."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        rest = rest[1:] if rest[0] in _PYTHON_ALONE.split() or len(rest[0]) > 2 else rest[2:]
    return (rest[1:], True) if rest[:1] == ["-m"] else (rest, False)


def split_options(row: LauncherRow, words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """({option: its values}, the command and what follows it)."""
    options, rest, skips = dict[str, list[str]](), list(words), row.skips
    alone, pairs = row.alone.split(), row.pairs.split()
    names = f"{row.ranks} {row.nodes} {row.each} {row.alone}".split()
    known = [one for one in names if one.startswith("--")]
    while rest:
        word, following = rest[0], rest[1] if len(rest) > 1 else ""
        name, equals, value = word.partition("=")
        name = name[:2] + name[2:].replace("_", "-")
        if len(name) > 4 and name not in known:  # getopt and argparse take what is begun
            begun = [one for one in known if one.startswith(name)]
            name = begun[0] if len(begun) == 1 else name
        taken = 1
        if word == "--":
            if not skips:
                return options, rest[1:]
        elif word.startswith("-") and len(word) > 1:
            if short := re.fullmatch(r"(-[a-zA-Z])(\d+)", word):  # -N4
                name, value = short[1], short[2]
            elif name in pairs:
                taken = 3
            elif not (
                equals
                or name in alone
                or following.startswith("-")
                or (len(name) > 2 and "/" not in following and begins_line(following))
            ):
                taken, value = 2, following
            options.setdefault(name, []).append(value)
        elif word in row.verbs.split() or (word == "-" and word in alone):
            pass
        elif skips and not _ASSIGNMENT.fullmatch(word):
            skips -= 1
        else:
            break
        rest = rest[taken:]
    return options, rest


def numbers(
    row: LauncherRow, options: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, str], str]:
    """({what: how many}, {what: who says so}, the option that says no number) of ranks, nodes,
    each, parts, gpus and all_gpus.
    """
    found, sources, unclear = dict[str, int](), dict[str, str](), ""
    variables = dict(zip(("ranks", "nodes", "each"), row.reads, strict=True))
    if options.keys() & set(row.each.split()):  # the variable's ranks are the allocation's then
        del variables["ranks"]
    for what in ("ranks", "nodes", "each", "parts", "gpus", "all_gpus"):
        given = [one for one in getattr(row, what).split() if one in options]
        option = next((one for one in given if any(options[one])), "")
        if given and not option:  # of a variable that is empty
            unclear = unclear or f"{given[0]} without a value"
        variable = variables.get(what, "")
        text = options[option][-1] if option else env.get(variable, "")
        said = f"{option} {text}" if option else f"{variable}={text}"
        counts = _PER_NODE.findall(text) if option == "--map-by" else _NUMBER.findall(text)
        if counts and int(counts[-1]):  # the larger one of 1:8 and 4-8
            found[what], sources[what] = int(counts[-1]), said
        elif text and option != "--map-by":
            unclear = unclear or said
    return found, sources, unclear


def _counted(
    name: str, row: LauncherRow, options: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> LaunchLine:
    """Ranks, ranks on a host, and who says so, by one launcher."""
    found, sources, unclear = numbers(row, options, env)
    if unclear:
        return LaunchLine(unclear=f"{unclear} of {name}")
    unsaid = dict(zip(("nodes", "each"), row.unsaid or (), strict=False))
    said = {**unsaid, **found}
    ranks, nodes, each = (said.get(what) for what in ("ranks", "nodes", "each"))
    here = name in ("deepspeed", "ds") and "--hostfile" not in options
    joined = ", " if ranks else " x "
    if ranks is None and (slots := _slots(row, options)):
        nodes, ranks = len(slots), None if each else sum(slots)
        sources.setdefault("nodes", f"{counted(nodes, 'host')} of its file")
    if ranks is None and each and (nodes or here):
        ranks = (nodes or 1) * each
    elif ranks and nodes and not each:
        each = -(-ranks // nodes)
    if each and row.parts:
        each *= found.get("parts", 1)
    text = f"{joined.join(sources.values()) or 'no option'} of {name}"
    return LaunchLine(ranks=ranks, each=each if ranks else None, source=text)


def _slots(row: LauncherRow, options: Mapping[str, Sequence[str]]) -> list[int]:
    """The slots of each host in a file of hosts; none where a host has no number."""
    files = [Path(options[one][-1]) for one in row.hosts.split() if one in options]
    lines = [line for file in files if is_file(file) for line in file.read_text().splitlines()]
    hosts = [host for line in lines if (host := line.partition("#")[0].strip())]
    found = [_SLOTS.search(host) for host in hosts]
    return [int(one[1]) for one in found if one is not None] if all(found) else []


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; a whole command is a name that is too long."""
    return os.path.isfile(path)
