"""Answer commands of a script that runs dry: launchers, Python, and what would do harm.

Started as a program, ``dry_commands.py NAME WORDS``, by a file NAME first in PATH, in the
environment that ``dry_run`` makes.  It notes what is left out, and the first command that would
train as the job.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_prism.emulate.command_line.launch_line import (
    BATCH,
    BY_NAME,
    SUBMIT,
    read_line,
    split_options,
)

PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)))
SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_QUIET = ("sleep", "wait", "clear", "module", "ml")  # take time, or set what is not here
# what changes files, reaches other hosts, or stops processes
_HARMFUL = """
    rm rmdir mv cp ln dd truncate touch chmod chown install shred tar unzip gzip rclone
    aws gsutil gcloud azcopy wandb mlflow curl wget scp rsync sftp hf huggingface-cli pip
    pip3 apt apt-get yum dnf make cmake ninja kill pkill killall scancel sacct squeue sinfo
    sbcast qdel bkill nc ncat telnet ping umount mount systemctl reboot shutdown ldconfig
    nvidia-persistenced fusermount ibstat ibv_devinfo mail sendmail jupyter tensorboard dvc
    """
_LEFT_OUT = frozenset(_HARMFUL.split())
_ANSWERED = ("git", "mkdir", "nvidia-smi", "rocm-smi", "scontrol", "tee", "hostname", "getent")
_LISTS = ("find", "ls")  # files, of data for example
_STARTERS = {name for name in BY_NAME if "." not in name} - {"exec", "command"}
NAMES = {*PYTHONS, *SHELLS, *_QUIET, *_LEFT_OUT, *_ANSWERED, *_LISTS, *SUBMIT, *_STARTERS}
_GIT_READS = {"rev-parse", "log", "status", "diff", "describe", "show", "branch", "ls-files"}
_TRAINING = re.compile(  # flags that only a training run of Megatron has
    r"--(num-layers|tensor-model-parallel-size|pipeline-model-parallel-size|micro-batch-size|"
    r"global-batch-size|train-iters|train-samples|hidden-size|yaml-cfg|use-checkpoint-args)(=|$)"
)
_CALLS = re.compile(r"\b(pretrain|init_process_group|initialize_megatron)\(")
_STARTS = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch)|srun|mpirun|deepspeed)\b")
_MANIFEST = re.compile(r"\b(command|args|entrypoint):")  # of Kubernetes, with a job
_CREATES = ("cat", "echo", "printf", "envsubst", "sed", "jq", "scontrol")  # the files of a job
_INSIDE = r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^()'"\\])*"""  # of parentheses
for _ in range(3):
    _INSIDE = rf"(?:{_INSIDE}|\({_INSIDE}\))*"
_WORD = (
    r"(?:\\.|'[^']*'|`[^`]*`|[$=]\(" + _INSIDE + r'\)|"(?:\\.|\$\(' + _INSIDE + r'\)|[^"\\])*"|'
    r"\$\{[^}]*\}|[^\s;|&<>()'\"`\\])+"
)
_TOKEN = re.compile(
    rf"[<>]\({_INSIDE}\)|(?P<redirect>&?>[>|&]?[ \t]*)(?P<target>{_WORD})?|(?P<word>{_WORD})|.",
    re.DOTALL,
)
_SETTING = re.compile(r"[A-Za-z_]\w*\+?=|\d+$")

DRY = Path(os.environ.get("PRISM_DRY", "."))  # folder of the dry run, which all commands share


def note(kind: str, text: str) -> None:
    """Tell the process that runs the script; it reads the notes while it waits."""
    with (DRY / "notes").open("a") as file:
        file.write(json.dumps([kind, text]) + "\n")


def answer(name: str, words: list[str]) -> int:
    """Answer one command of the script.

    Args:
        name: of the command, without its folder.
        words: behind the name.

    Returns:
        The exit status of the command.
    """
    # a shell runs as it is: its commands are answered one by one
    if name in SHELLS:
        bash = shutil.which("bash", path=os.environ["PRISM_DRY_PATH"]) or "/bin/bash"
        os.execv(bash, ["bash", *_without_login(words)])

    if name in PYTHONS or name in BY_NAME or name in SUBMIT:
        return _answer_launcher([name, *words])

    if name in _PRINTED:
        print("\n".join(_PRINTED[name](words)))
    # no log is written, but what stands behind in the pipe gets its lines
    elif name == "tee":
        shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)
    elif name == "mkdir":
        _make_folders(words)
    elif name in _LISTS:
        return _list_files(name, words)
    # what only reads does no harm, and its answer may be part of the line
    elif name == "git" and _GIT_READS & set(words):
        real_git = shutil.which("git", path=os.environ["PRISM_DRY_PATH"]) or "true"
        return subprocess.run([real_git, *words]).returncode
    elif name not in _QUIET:
        note("left out", shlex.join([name, *words]))
    return 0


def _answer_launcher(words: list[str]) -> int:
    """Answer a command that starts another: a job, a shell, or something small.

    Returns:
        The exit status.  Does not return where the command is the job, or is run itself.
    """
    row = BY_NAME.get(words[0])
    verbs = set[str]()
    if row is not None:
        verbs = set(row.verbs.split())
    outer_launchers = json.loads(os.environ.get("PRISM_DRY_LINE", "[]"))
    line = read_line(words, os.environ)
    command = line.words

    # a script is queued: it is the job, unless it queues itself for the time after
    if submits(line.shell):
        text = submitted(line.shell, sys.stdin.read)
        if text and not _queues_itself(line.shell):
            _report_job([*outer_launchers, *words], text)
        note("left out", shlex.join(words))
        return 0

    # another verb of a program that also starts jobs: docker ps
    if verbs and not set(words) & verbs:
        note("left out", shlex.join(words))
        return 0

    # a shell behind launchers: its script runs on, and knows what stands before it
    if line.shell:
        os.environ.update(line.variables)
        os.environ["PRISM_DRY_LINE"] = json.dumps([*outer_launchers, *line.before])
        os.execvp("bash", ["bash", *script_words(line.shell)])

    is_python_program = bool(command) and (command[0] == "-m" or command[0].endswith(".py"))
    if is_python_program:
        os.environ.update(line.variables)
        _answer_python_program(command, line.launchers, outer_launchers, words)
    elif words[0] in PYTHONS:
        # Python with its own text, which often asks for the number of GPUs
        if "-c" in words and "device_count()" in words[-1]:
            print(_gpu_count())
            return 0
        if _is_confined() and os.environ.get("PRISM_DRY_YES"):
            return _answer_check(words[1:])
        if _is_confined():
            os.execv(sys.executable, [sys.executable, *words[1:]])
    elif command and shutil.which(command[0]):
        # a launcher before a small program: srun hostname
        os.environ.update(line.variables)
        os.execvp(command[0], list(command))

    note("left out", shlex.join(words))
    return 0


def _answer_python_program(
    command: Sequence[str],
    launchers: Sequence[str],
    outer_launchers: Sequence[str],
    words: Sequence[str],
) -> None:
    """Report a program of Python that is the job, or run it where it starts the launcher."""
    # the script of Python that starts the launcher is run, with our Python for its children; its
    # words may be those of the job
    if _is_confined() and command[0] == os.environ["PRISM_DRY_SCRIPT"]:
        _run_python_script(command)
    counting = [name for name in launchers if name in BY_NAME and BY_NAME[name].counts]
    if trains(command, bool(outer_launchers or counting)):
        _report_job([*outer_launchers, *words])


def _answer_check(words: Sequence[str]) -> int:
    """Run a text of Python; one that fails and prints nothing asked for what is not here.

    Returns:
        The exit status.
    """
    run = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE)
    sys.stdout.buffer.write(run.stdout)
    sys.stdout.flush()
    if run.returncode and not run.stdout.strip():
        note("left out", shlex.join(["python", *words]))
        return 0
    return run.returncode


def _is_confined() -> bool:
    """Whether the kernel confines what the script starts, so that it may run."""
    return bool(os.environ.get("PRISM_DRY_CONFINED"))


def _run_python_script(command: Sequence[str]) -> NoReturn:
    """Run a script of Python in place of this process; it finds our Python as its own."""
    python = str(DRY / "bin" / "python")
    folder = str(Path(command[0]).parent)
    program = f"import sys, runpy; sys.executable, sys.argv = {python!r}, {list(command)!r}; "
    program += f"sys.path.insert(0, {folder!r}); "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    os.execv(sys.executable, [sys.executable, "-c", program])


def _report_job(line: Sequence[str], text: str = "") -> None:
    """Tell the line of the job, and wait until the script is stopped.

    Args:
        line: words of the job's launch line.
        text: of the script or manifest that the line queues, else empty.
    """
    job = {"line": line, "cwd": os.getcwd(), "env": dict(os.environ), "text": text}
    # renamed when it is complete: the reader waits for the file
    (DRY / "job.part").write_text(json.dumps(job))
    (DRY / "job.part").rename(DRY / "job")
    # behind its job the script must not run on: the reader stops all of it within this time
    time.sleep(30)


def _without_login(words: Sequence[str]) -> list[str]:
    """Change the words of a shell so that it reads no profile, which would change PATH."""
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    kept_options = []
    for option in options:
        if not option.startswith("--"):  # short options may be joined: -lc
            option = re.sub("[il]", "", option)
        if option not in ("-", "--login", "--interactive"):
            kept_options.append(option)
    return [*kept_options, *words[len(options) :]]


def script_words(shell: Sequence[str]) -> list[str]:
    """Find the script of a shell or of a command that queues, with the script's own words.

    Args:
        shell: words of ``bash SCRIPT WORDS`` or ``sbatch OPTIONS SCRIPT WORDS``.

    Returns:
        The script and its words, or ``-c`` and a text; empty where it is read from stdin.
    """
    name, *words = shell
    if Path(name).name not in SUBMIT:
        return words
    # its command stands on its own line: there is no script
    if Path(name).name == "salloc":
        return ["-c", shlex.join(split_options(BATCH, words)[1])]
    for index, word in enumerate(words):
        # sbatch makes a script of this text
        if word.startswith("--wrap="):
            return ["-c", word.partition("=")[2]]
        if os.path.isfile(word):
            return words[index:]
    # a command in one word, as of bsub
    if words and " " in words[-1]:
        return ["-c", words[-1]]
    return []


def submits(shell: Sequence[str]) -> bool:
    """Tell whether the words queue a job, of a script or of a manifest."""
    return bool(shell) and Path(shell[0]).name in (*SUBMIT, "kubectl")


def submitted(shell: Sequence[str], read_stdin: Callable[[], str]) -> str:
    """Return the text of what ``shell`` queues.

    Args:
        shell: words of the command that queues.
        read_stdin: reads the text where no file is named.

    Returns:
        The text; empty for a manifest without a job.
    """
    if Path(shell[0]).name == "kubectl":
        manifests = [
            word for word in shell if word.endswith((".yaml", ".yml")) and os.path.isfile(word)
        ]
        text = "\n---\n".join(Path(file).read_text() for file in manifests)
        if not text:
            text = read_stdin()
        if not _MANIFEST.search(text):
            return ""
        return text
    words = script_words(shell)
    if not words or not words[0]:
        return read_stdin()
    if words[0] == "-c":
        return words[1]
    return Path(words[0]).read_text(errors="replace")


def _queues_itself(shell: Sequence[str]) -> bool:
    """Tell whether a batch script queues itself, for the time after it."""
    words = script_words(shell)
    if not words or not os.path.isfile(words[0]):
        return False
    return os.path.samefile(words[0], os.environ.get("PRISM_DRY_FILE") or "/")


def trains(command: Sequence[str], launched: bool) -> bool:
    """Tell whether a program of Python trains, by its flags or by its text.

    Args:
        command: a script, or ``-m`` and a module, with its words.
        launched: whether it was started as several processes, which counts where the script
            cannot be read.
    """
    flags = [word.partition("=")[0].replace("_", "-") for word in command]
    if any(_TRAINING.match(flag) for flag in flags):
        return True
    try:
        text = Path(command[0]).read_text(errors="replace")
    except OSError:
        return launched
    return bool(_CALLS.search(text))


def starts_launcher(script: str) -> bool:
    """Tell whether a file of Python trains nothing itself and names a launcher, which it starts."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return False
    return "subprocess" in text and bool(_STARTS.search(text)) and not _CALLS.search(text)


def _gpu_count() -> int:
    """Return how many GPUs a host has, and note that the script has asked."""
    note("asked", "GPUs of a host")
    return int(os.environ["PRISM_DRY_GPUS"])


def _list_gpus(words: Sequence[str]) -> list[str]:
    """Make as many lines as a node has GPUs, for scripts that count the lines."""
    return [f"GPU {index}: NVIDIA GPU (UUID: GPU-{index})" for index in range(_gpu_count())]


def _list_hosts(words: Sequence[str]) -> list[str]:
    """Answer ``scontrol show hostnames``; other questions have no answer."""
    if "hostname" in "".join(words[1:2]):
        return os.environ.get("PRISM_DRY_HOSTS", "").split(",")
    return []


def _host_entry(words: Sequence[str]) -> list[str]:
    """Answer ``getent hosts NAME``: every host is this one."""
    return [f"127.0.0.1 {' '.join(words[1:])}"]


def _host_name(words: Sequence[str]) -> list[str]:
    """Answer ``hostname``, which may be asked for an address."""
    if {"-I", "-i", "--ip-address"} & set(words):
        return ["127.0.0.1"]
    return ["localhost"]


_PRINTED: dict[str, Callable[[list[str]], list[str]]] = {
    "nvidia-smi": _list_gpus,
    "rocm-smi": _list_gpus,
    "scontrol": _list_hosts,
    "getent": _host_entry,
    "hostname": _host_name,
}


def _make_folders(words: Sequence[str]) -> None:
    """Make folders in the working folder; elsewhere only where writes are allowed."""
    home = Path(os.environ["PRISM_DRY_HOME"] or "/")
    for word in _without_options(words, with_value=("-m", "--mode")):
        path = Path(os.path.abspath(word))
        if home in path.parents:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            note("left out", f"mkdir {word}")


def _without_options(words: Sequence[str], with_value: Collection[str]) -> list[str]:
    """Return the words of a command that are no options; ``with_value``: options with a value."""
    names = list[str]()
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*names, *words]
        if word in with_value:
            words = words[1:]
        elif not word.startswith("-"):
            names.append(word)
    return names


def _list_files(name: str, words: Sequence[str]) -> int:
    """Answer ``find`` and ``ls``; of places that are all missing, the places themselves are listed.

    So what a script does with its data goes on with the name of a place, for which a stand-in is
    put later.

    Returns:
        The exit status.
    """
    places = list[str]()
    for word in words:
        # the places of find stand before its tests
        if name == "find" and places and word.startswith(("-", "(", "!")):
            break
        if not word.startswith("-"):
            places.append(word)
    missing = [place for place in places if not os.path.lexists(place)]
    if places and missing == places:
        note("left out", shlex.join([name, *words]))
        print("\n".join(missing))
        return 0
    real = shutil.which(name, path=os.environ["PRISM_DRY_PATH"]) or "true"
    return subprocess.run([real, *words]).returncode


def rewritten(command: str) -> str:
    """Rewrite a simple command of Bash so that it does no harm.

    It writes no file that is there or is outside the working folder.  A program that is named by a
    path is looked for by its name.  ``__prism_place`` and ``__prism_run`` are functions of
    dry_run.sh.

    Args:
        command: text of one command, without pipes.

    Returns:
        The text to run in its stead.
    """
    parts = list[str]()
    program = ""
    for token in _TOKEN.finditer(command):
        text, redirect, target, word = token.group(0, "redirect", "target", "word")
        # a document that the command reads follows the end of its line
        if text == "\n":
            return "".join([*parts, command[token.start() :]])
        if target and not target.startswith("/dev/") and not redirect.endswith("&"):
            # only what writes files of a job writes
            place = "/dev/null"
            if program in _CREATES:
                place = f'"$(__prism_place {target})"'
            text = redirect + place
        elif word and not program and not _SETTING.match(word):
            program = word
            if "/" in word or word.startswith(("$", '"$')):
                text = f"__prism_run {word}"
        parts.append(text)
    return "".join(parts)


def unless_new(line: str) -> str:
    """Make the test in Bash under which a rewritten command may run as it was: it makes new files.

    What runs in its stead has no pipe.

    Args:
        line: what ``rewritten`` returned.

    Returns:
        The test; empty if there is none.
    """
    places = re.findall(r'"\$\(__prism_place ([^()`]+)\)"', line)
    if "__prism_run" in line or not places or line.count("__prism_place") > len(places):
        return ""
    return " && ".join(f"__prism_new {place}" for place in places)


if __name__ == "__main__":
    if sys.argv[1] == "rewrite":
        safe_line = rewritten(sys.argv[2])
        print(safe_line, unless_new(safe_line), sep="\n#")
    else:
        sys.exit(answer(sys.argv[1], sys.argv[2:]))
