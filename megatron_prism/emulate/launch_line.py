"""Launch lines: the script of a job, and how many ranks what stands before it would start.

In : the words of a line as people type it, ``srun --ntasks 64 singularity exec i.sif python -u
pretrain_gpt.py …``.  Out: a LaunchLine.  Nothing is started.  ``LAUNCHERS`` is the table of all
programs that start others; one that is missing needs a row and no code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_prism.core.errors import UsageError


@dataclass(frozen=True)
class LauncherRow:
    """How a program is told what to start.  Options are compared with ``_`` as ``-``.

    ranks : options that say how many processes there are in all
    nodes : on how many hosts
    each  : on each host
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
    LauncherRow("torchrun torch.distributed.run torch.distributed.launch",
             nodes="--nnodes", each="--nproc-per-node",
             alone="--standalone --no-python --run-path --use-env -m --module", unsaid=(1, 1),
             reads=("", "PET_NNODES", "PET_NPROC_PER_NODE")),
    LauncherRow("srun", ranks="-n --ntasks", nodes="-N --nodes", each="--ntasks-per-node",
             alone="-l --label -u --unbuffered -K --kill-on-bad-exit -E -v -vv -Q --exclusive "
             "--overlap --no-kill -k --pty --exact -O -s --contiguous",
             reads=("SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE")),
    LauncherRow("mpirun mpiexec mpiexec.hydra orterun prterun prun", ranks="-np --np -n --n -c",
             each="--npernode -npernode -ppn --ppn -perhost -N --map-by --ntasks-per-node",
             alone="--allow-run-as-root -allow-run-as-root --oversubscribe --nooversubscribe "
             "--tag-output --report-bindings -v --verbose -q --bynode --display-map -l "
             "--use-hwthread-cpus", pairs="--mca -mca --gmca -gmca --prtemca --pmixmca -genv -env",
             sets="-x"),
    LauncherRow("deepspeed ds", nodes="--num-nodes", each="--num-gpus",
             alone="--no-python --no-local-rank --force-multi --no-ssh --no-ssh-check --save-pid "
             "--module --elastic-training"),
    LauncherRow("aprun ibrun", ranks="-n", each="-N", alone="-q -v"),
    LauncherRow("flux", ranks="-n --ntasks", nodes="-N --nodes", each="--tasks-per-node",
             verbs="run submit", alone="-l -u -v -x --label-io --unbuffered --exclusive"),
    LauncherRow("horovodrun", ranks="-np --num-proc", alone="--verbose --mpi --gloo"),
    LauncherRow("accelerate", ranks="--num-processes", nodes="--num-machines", verbs="launch",
             alone="--multi-gpu --use-deepspeed --use-megatron-lm --use-fsdp --cpu -m --module"),
    LauncherRow("docker podman nerdctl", verbs="exec run", skips=1, alone=_IMAGE.replace(" -e", ""),
             sets="-e --env"),
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
    LauncherRow("nohup time nice ionice chrt stdbuf setsid unbuffer exec command sudo catchsegv "
             "strace ltrace sem", alone="-E -p -v -t -a"),
    LauncherRow("uv poetry pixi pdm hatch conda mamba micromamba", verbs="run",
             alone="--no-capture-output --live-stream --no-sync --active --frozen"),
    LauncherRow("ray", verbs="job submit", alone="--no-wait"),
)  # fmt: skip
SUBMIT = ("sbatch", "qsub", "bsub", "salloc")  # commands that queue a script
BY_NAME = {name: row for row in LAUNCHERS for name in row.names.split()}
_PYTHON = re.compile(r"python[\d.]*$")
_PYTHON_ALONE = "-u -O -OO -B -I -s -S -v -q -E -P -d -i"
_SHELL = re.compile(r"(ba|da|z|k)?sh$")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PER_NODE = re.compile(r"ppr:(\d+):node")  # of --map-by


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
    variables: Mapping[str, str] | None = None
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
        if "--prism-world-size" in names:
            ranks = None
        elif self.unclear:
            raise UsageError(
                f"{self.unclear} does not say how many ranks the job has",
                fix="a number in its place, or --prism-world-size N",
            )
        else:
            ranks = self.ranks
        made = [] if ranks is None else ["--prism-world-size", str(ranks)]
        if self.each and (self.ranks or 0) > self.each and "--prism-gpus-per-node" not in names:
            made += ["--prism-gpus-per-node", str(self.each)]
        return made


def is_launcher(word: str) -> bool:
    """Whether ``word`` starts programs: one of the table, Python or a shell."""
    name = Path(word).name
    return name in BY_NAME or bool(_PYTHON.match(name) or _SHELL.match(name))


def begins_line(word: str) -> bool:
    """Whether a launch line may begin with ``word``: a launcher, or a script; no ``key=value``."""
    if "=" in word.partition("/")[0]:
        return False
    if word == "--" or word.endswith((".py", ".sh", ".sbatch", ".slurm", ".pbs")):
        return True
    return (is_launcher(word) or word in SUBMIT) and not Path(word).is_dir()


def split_line(words: Sequence[str], alone: Collection[str]) -> tuple[list[str], list[str]]:
    """(options of ours, the launch line) of a command line.

    Args:
        words: our options, then a line; ``--`` may stand before it.
        alone: those of our options that take no value.
    """
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return list(words[:place]), list(words[place + 1 :])
        if word.startswith("-"):
            place += 1 if word in alone or "=" in word else 2
        elif begins_line(word):
            break
        else:
            place += 1
    return list(words[:place]), list(words[place:])


def read_line(words: Sequence[str], env: Mapping[str, str]) -> LaunchLine:
    """What the words of a launch line say.

    Args:
        words: from the first launcher, or from the script.
        env: variables that say what a launcher's options do not.
    """
    rest, names = list(words), list[str]()
    variables, counted = dict[str, str](), LaunchLine()
    while rest:
        word, name = rest[0], Path(rest[0]).name
        if found := _ASSIGNMENT.fullmatch(word):
            variables[found[1]] = found[2]
            rest = rest[1:]
            continue
        if name in SUBMIT or _SHELL.match(name):
            return replace(_ending(counted, names, variables), shell=tuple(rest),
                           before=tuple(words[: len(words) - len(rest)]))  # fmt: skip
        if _PYTHON.match(name):
            rest, module = _after_python(rest[1:])
            if module and rest and (row := BY_NAME.get(rest[0])):
                name = rest[0]
            elif module:
                return _ending(counted, names, variables, ("-m", *rest))
            else:
                continue
        elif (row := BY_NAME.get(name)) is None:
            ahead = _launcher_ahead(rest) or _after_dashes(rest)
            if not ahead:
                break
            options, _ = _split_options(BY_NAME["torchrun"], rest[1:ahead])
            if options.keys() & {"--nproc-per-node", "--nnodes"}:  # a wrapper of torchrun
                counted = _counted(name, BY_NAME["torchrun"], options, {**env, **variables})
            names.append(name)  # a program that we do not know, which starts a launcher
            rest = rest[ahead:]
            continue
        names.append(name)
        options, rest = _split_options(row, rest[1:])
        variables |= _set_by(row, options)
        if row.counts:
            counted = _counted(name, row, options, {**env, **variables})
        if row.text and len(rest) == 1 and " " in rest[0]:
            return replace(_ending(counted, names, variables), shell=("bash", "-c", rest[0]),
                           before=tuple(words[:-1]))  # fmt: skip
        if options.keys() & {"-m", "--module"} & set(row.alone.split()):
            return _ending(counted, names, variables, ("-m", *rest))
    if rest and rest[0].endswith((".sh", ".sbatch", ".slurm", ".pbs")):
        return replace(_ending(counted, names, variables), shell=("bash", *rest),
                       before=tuple(words[: len(words) - len(rest)]))  # fmt: skip
    return _ending(counted, names, variables, tuple(rest))


def _launcher_ahead(words: Sequence[str]) -> int:
    """The place of the first launcher before any script, 0 if there is none."""
    for place, word in enumerate(words):
        if word.endswith((".py", ".sh")):
            break
        if place and "/" not in word and is_launcher(word):
            return place
    return 0


def _after_dashes(words: Sequence[str]) -> int:
    """The place of the command that a script starts behind ``--``, 0 if there is none."""
    place = words.index("--") + 1 if "--" in words else 0
    return place if place < len(words) and begins_line(words[place]) else 0


def _ending(
    counted: LaunchLine,
    names: Sequence[str],
    variables: Mapping[str, str],
    words: tuple[str, ...] = (),
) -> LaunchLine:
    return replace(counted, words=words, launchers=tuple(names), variables=variables)


def _after_python(words: Sequence[str]) -> tuple[list[str], bool]:
    """(what follows the options of Python, whether it is a module)."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        rest = rest[1:] if rest[0] in _PYTHON_ALONE.split() or len(rest[0]) > 2 else rest[2:]
    return (rest[1:], True) if rest[:1] == ["-m"] else (rest, False)


def _split_options(row: LauncherRow, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """({option: its value}, the command and what follows it)."""
    options, rest, skips = dict[str, str](), list(words), row.skips
    alone, pairs = row.alone.split(), row.pairs.split()
    while rest:
        word, following = rest[0], rest[1] if len(rest) > 1 else ""
        name, equals, value = word.partition("=")
        name = name if len(name) < 3 else name[:2] + name[2:].replace("_", "-")
        if word == "--":
            rest = rest[1:]
            if not skips:
                break
        elif word.startswith("-") and len(word) > 1:
            short = re.fullmatch(r"(-[a-zA-Z])(\d+)", word)  # -N4
            if short or equals or name in alone:
                options[short[1] if short else name] = short[2] if short else value
                rest = rest[1:]
            elif name in pairs:
                rest = rest[3:]
            elif following.startswith("-") or (
                len(name) > 2 and "/" not in following and begins_line(following)
            ):
                options[name] = ""  # an option that we do not know, without a value
                rest = rest[1:]
            else:
                options[name] = _joined(options.get(name), following, name in row.sets.split())
                rest = rest[2:]
        elif word in row.verbs.split() or (word == "-" and word in alone):
            rest = rest[1:]
        elif skips and not _ASSIGNMENT.fullmatch(word):
            rest, skips = rest[1:], skips - 1
        else:
            break
    return options, rest


def _joined(before: str | None, value: str, several: bool) -> str:
    return f"{before}\n{value}" if several and before is not None else value


def _set_by(row: LauncherRow, options: Mapping[str, str]) -> dict[str, str]:
    """Variables that its options set."""
    texts = [text for name in row.sets.split() for text in options.get(name, "").split("\n")]
    found = (_ASSIGNMENT.fullmatch(text) for text in texts)
    return {one[1]: one[2] for one in found if one}


def _counted(
    name: str, row: LauncherRow, options: Mapping[str, str], env: Mapping[str, str]
) -> LaunchLine:
    """Ranks, ranks on a host, and who says so, by one launcher."""
    asked = (row.ranks, row.nodes, row.each)
    said, sources = list[int | None](), list[str]()
    for names, variable, implied in zip(asked, row.reads, (None, *(row.unsaid or (None, None))),
                                        strict=True):  # fmt: skip
        option = next((one for one in names.split() if options.get(one)), None)
        text = options[option] if option else env.get(variable, "")
        at = f"{option} {text}" if option else f"{variable}={text}"
        if text:
            number = _number(text)
            if number is None:
                if option != "--map-by":
                    return LaunchLine(unclear=f"{at} of {name}")
            else:
                sources.append(at)
                implied = number
        said.append(implied)
    ranks, nodes, each = said
    if ranks is None and each and (nodes or (name in ("deepspeed", "ds") and "--hostfile" not in
                                             options)):  # fmt: skip
        ranks = (nodes or 1) * each
    elif ranks and nodes and not each:
        each = -(-ranks // nodes)
    text = f"{(' x ' if said[0] is None else ', ').join(sources) or 'no option'} of {name}"
    return LaunchLine(ranks=ranks, each=each if ranks else None, source=text)


def _number(text: str) -> int | None:
    """The number in ``8``, the larger one of ``1:8`` and ``4-8``, that of ``ppr:8:node``."""
    if per_node := _PER_NODE.match(text):
        return int(per_node[1])
    number = re.split(r"[:-]", text)[-1]
    return int(number) if number.isdigit() else None
