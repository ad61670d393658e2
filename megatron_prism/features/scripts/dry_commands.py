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
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_prism.emulate.launch_line import (
    BATCH,
    BY_NAME,
    SUBMIT,
    LauncherRow,
    is_file,
    read_line,
    split_options,
)

PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)))
SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_QUIET = ("sleep", "wait", "clear", "module", "ml")  # take time, or set what is not here
_LEFT_OUT = frozenset(  # what changes files, reaches other hosts, or stops processes
    " ".join((
        "rm rmdir mv cp ln dd truncate touch chmod chown install shred tar unzip gzip rclone",
        "aws gsutil gcloud azcopy wandb mlflow curl wget scp rsync sftp hf huggingface-cli pip",
        "pip3 apt apt-get yum dnf make cmake ninja kill pkill killall scancel sacct squeue sinfo",
        "sbcast qdel bkill nc ncat telnet ping umount mount systemctl reboot shutdown ldconfig",
        "nvidia-persistenced fusermount ibstat ibv_devinfo mail sendmail jupyter tensorboard dvc",
    )).split()
)  # fmt: skip
_ANSWERED = ("git", "mkdir", "nvidia-smi", "rocm-smi", "scontrol", "tee", "hostname", "getent")
_STARTERS = {name for name in BY_NAME if "." not in name} - {"exec", "command"}
NAMES = {*PYTHONS, *SHELLS, *_QUIET, *_LEFT_OUT, *_ANSWERED, *SUBMIT, *_STARTERS}
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

DRY = Path(os.environ.get("PRISM_DRY", "."))


def note(kind: str, text: str) -> None:
    """Tell the process that runs the script, which reads it while it waits."""
    with (DRY / "notes").open("a") as file:
        file.write(json.dumps([kind, text]) + "\n")


def answer(name: str, words: list[str]) -> int:
    """Exit status of the command."""
    if name in SHELLS:
        bash = shutil.which("bash", path=os.environ["PRISM_DRY_PATH"]) or "/bin/bash"
        os.execv(bash, ["bash", *_without_login(words)])
    if name in PYTHONS or name in BY_NAME or name in SUBMIT:
        return _started([name, *words])
    if name in _PRINTED:
        print("\n".join(_PRINTED[name](words)))
    elif name == "tee":
        shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)
    elif name == "mkdir":
        _make_folders(words)
    elif name == "git" and _GIT_READS & set(words):
        real = shutil.which("git", path=os.environ["PRISM_DRY_PATH"]) or "true"
        return subprocess.run([real, *words]).returncode
    elif name not in _QUIET:
        note("left out", shlex.join([name, *words]))
    return 0


def _started(words: list[str]) -> int:
    """The command of a launcher: the job, a shell, or something small."""
    row = BY_NAME.get(words[0], LauncherRow(""))
    before = json.loads(os.environ.get("PRISM_DRY_LINE", "[]"))
    line = read_line(words, os.environ)
    command = line.words
    if submits(line.shell):
        text = submitted(line.shell, sys.stdin.read)
        if text and not _again(line.shell):
            _is_the_job([*before, *words], text)
    elif row.verbs and not set(words) & set(row.verbs.split()):
        pass
    elif line.shell:
        os.environ.update(line.variables)
        os.environ["PRISM_DRY_LINE"] = json.dumps([*before, *line.before])
        os.execvp("bash", ["bash", *script_words(line.shell)])
    elif command and (command[0] == "-m" or command[0].endswith(".py")):
        os.environ.update(line.variables)
        several = before or any(BY_NAME[n].counts for n in line.launchers if n in BY_NAME)
        if trains(command, bool(several)):
            _is_the_job([*before, *words])
        if os.environ.get("PRISM_DRY_CONFINED") and command[0] == os.environ["PRISM_DRY_SCRIPT"]:
            python, folder = str(DRY / "bin" / "python"), str(Path(command[0]).parent)
            start = f"import sys, runpy; sys.executable, sys.argv = {python!r}, {list(command)!r}; "
            start += f"sys.path.insert(0, {folder!r}); "
            start += "runpy.run_path(sys.argv[0], run_name='__main__')"
            os.execv(sys.executable, [sys.executable, "-c", start])
    elif words[0] in PYTHONS:
        if "-c" in words and "device_count()" in words[-1]:
            print(_gpu_count())
            return 0
        if os.environ.get("PRISM_DRY_CONFINED"):
            os.execv(sys.executable, [sys.executable, *words[1:]])
    elif command and shutil.which(command[0]):
        os.environ.update(line.variables)
        os.execvp(command[0], list(command))
    note("left out", shlex.join(words))
    return 0


def _is_the_job(line: Sequence[str], text: str = "") -> None:
    """Tell the line that the script starts; ``text``: of what it submits."""
    job = {"line": line, "cwd": os.getcwd(), "env": dict(os.environ), "text": text}
    (DRY / "job.part").write_text(json.dumps(job))
    (DRY / "job.part").rename(DRY / "job")
    time.sleep(30)  # until the script is stopped


def _without_login(words: Sequence[str]) -> list[str]:
    """Words of a shell that reads no profile, which would put other folders first in PATH."""
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    short = [word if word.startswith("--") else re.sub("[il]", "", word) for word in options]
    kept = [word for word in short if word not in ("-", "--login", "--interactive")]
    return [*kept, *words[len(options) :]]


def script_words(shell: Sequence[str]) -> list[str]:
    """The script of ``sbatch OPTIONS SCRIPT WORDS`` or of a shell, with its words; none where it is
    read from stdin.
    """
    name, *rest = shell
    if Path(name).name not in SUBMIT:
        return rest
    if Path(name).name == "salloc":
        return ["-c", shlex.join(split_options(BATCH, rest)[1])]
    for place, word in enumerate(rest):
        if word.startswith("--wrap="):
            return ["-c", word.partition("=")[2]]
        if is_file(word):
            return rest[place:]
    return ["-c", rest[-1]] if rest and " " in rest[-1] else []


def submits(shell: Sequence[str]) -> bool:
    """Whether the words queue a job, of a script or of a manifest."""
    return bool(shell) and Path(shell[0]).name in (*SUBMIT, "kubectl")


def submitted(shell: Sequence[str], read: Callable[[], str]) -> str:
    """The text of what ``shell`` queues; ``read``: from stdin, where no file is named."""
    if Path(shell[0]).name == "kubectl":
        files = [word for word in shell if word.endswith((".yaml", ".yml")) and is_file(word)]
        text = "\n---\n".join(Path(file).read_text() for file in files) or read()
        return text if _MANIFEST.search(text) else ""
    script, *rest = script_words(shell) or [""]
    if script == "-c":
        return rest[0]
    return Path(script).read_text(errors="replace") if script else read()


def _again(shell: Sequence[str]) -> bool:
    """Whether a batch script queues itself, for the time after it."""
    script = (script_words(shell) or [""])[0]
    return is_file(script) and os.path.samefile(script, os.environ.get("PRISM_DRY_FILE") or "/")


def trains(command: Sequence[str], launched: bool) -> bool:
    """Whether a script, or ``-m`` and a module, trains: by its flags, its text, or since it cannot
    be read and was started as several processes.
    """
    words = [word.partition("=")[0].replace("_", "-") for word in command]
    if any(_TRAINING.match(word) for word in words):
        return True
    try:
        return bool(_CALLS.search(Path(command[0]).read_text(errors="replace")))
    except OSError:
        return launched


def starts_launcher(script: str) -> bool:
    """Whether a file of Python trains nothing itself and names a launcher, which it starts."""
    try:
        text = Path(script).read_text(errors="replace")
    except OSError:
        return False
    return "subprocess" in text and bool(_STARTS.search(text)) and not _CALLS.search(text)


def _gpu_count() -> int:
    """GPUs of a host."""
    note("asked", "GPUs of a host")
    return int(os.environ["PRISM_DRY_GPUS"])


def _gpus(words: Sequence[str]) -> list[str]:
    """As many lines as a node has GPUs, for scripts that count them."""
    return [f"GPU {index}: NVIDIA GPU (UUID: GPU-{index})" for index in range(_gpu_count())]


_PRINTED: dict[str, Callable[[list[str]], list[str]]] = {
    "nvidia-smi": _gpus,
    "rocm-smi": _gpus,
    "scontrol": lambda words: (  # show hostnames; other questions have no answer
        os.environ.get("PRISM_DRY_HOSTS", "").split(",") * ("hostname" in "".join(words[1:2]))
    ),
    "getent": lambda words: [f"127.0.0.1 {' '.join(words[1:])}"],
    "hostname": lambda words: [
        "127.0.0.1" if {"-I", "-i", "--ip-address"} & set(words) else "localhost"
    ],
}


def _make_folders(words: Sequence[str]) -> None:
    """Folders in the working folder are made, others only where writes are allowed."""
    for word in words:
        path = Path(os.path.abspath(word))
        if Path(os.environ["PRISM_DRY_HOME"] or "/") in path.parents:
            path.mkdir(parents=True, exist_ok=True)
        elif not word.startswith("-"):
            note("left out", f"mkdir {word}")


def rewritten(command: str) -> str:
    """A simple command of Bash that writes no file which is there or outside the working folder,
    and whose program is looked for by its name where it is named by a path.

    ``__prism_place`` and ``__prism_run`` are functions of dry_run.sh.
    """
    parts, first = list[str](), ""
    for token in _TOKEN.finditer(command):
        text, redirect, target, word = token.group(0, "redirect", "target", "word")
        if text == "\n":  # a document that the command reads
            return "".join([*parts, command[token.start() :]])
        if target and not target.startswith("/dev/") and not redirect.endswith("&"):
            place = f'"$(__prism_place {target})"' if first in _CREATES else "/dev/null"
            text = redirect + place
        elif word and not first and not _SETTING.match(word):
            first = word
            if "/" in word or word.startswith(("$", '"$')):
                text = f"__prism_run {word}"
        parts.append(text)
    return "".join(parts)


def unless_new(line: str) -> str:
    """The test in Bash under which a command that was ``rewritten`` to ``line`` runs as it is: it
    only makes new files.  Empty if there is none; what runs in its stead has no pipe.
    """
    places = re.findall(r'"\$\(__prism_place ([^()`]+)\)"', line)
    if "__prism_run" in line or not places or line.count("__prism_place") > len(places):
        return ""
    return " && ".join(f"__prism_new {place}" for place in places)


if __name__ == "__main__":
    if sys.argv[1] == "rewrite":
        line = rewritten(sys.argv[2])
        print(line, unless_new(line), sep="\n#")
    else:
        sys.exit(answer(sys.argv[1], sys.argv[2:]))
