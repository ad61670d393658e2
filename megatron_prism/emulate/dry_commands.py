"""Answer commands of a script that runs dry: launchers, Python, and what would do harm.

Started as a program, ``dry_commands.py NAME WORDS``, by a file NAME first in PATH, in the
environment that ``dry_run`` makes.  It notes what is left out, and the first command that would
train as the job.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_prism.emulate.launch_line import BY_NAME, SUBMIT, read_line

PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)))
SHELLS = ("sh", "dash", "zsh", "ksh")
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
_CREATES = ("cat", "echo", "printf", "envsubst", "sed", "jq", "scontrol")  # the files of a job
_WORD_END = frozenset(" \t\n;|&<>()")

DRY = Path(os.environ.get("PRISM_DRY", "."))


def note(kind: str, text: str) -> None:
    """Tell the process that runs the script, which reads it while it waits."""
    with (DRY / "notes").open("a") as file:
        file.write(json.dumps([kind, text]) + "\n")


def answer(name: str, words: list[str]) -> int:
    """Exit status of the command."""
    if name in _QUIET:
        return 0
    if name in SHELLS:
        os.execvp("bash", ["bash", *words])
    if name == "tee":
        shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)
        return 0
    if name in ("nvidia-smi", "rocm-smi"):
        return _gpus()
    if name == "getent":
        print(f"127.0.0.1 {' '.join(words[1:])}")
        return 0
    if name == "scontrol":
        if "hostname" in (words[1:2] or [""])[0]:
            print(os.environ.get("PRISM_DRY_HOSTS", "").replace(",", "\n"))
        return 0
    if name == "hostname":
        print("127.0.0.1" if {"-I", "-i", "--ip-address"} & set(words) else "localhost")
        return 0
    if name == "mkdir":
        return _folders(words)
    if name == "git" and _GIT_READS & set(words):
        return subprocess.run([_real("git"), *words]).returncode
    if name in PYTHONS or name in BY_NAME or name in SUBMIT:
        return _started([name, *words])
    note("left out", shlex.join([name, *words]))
    return 0


def _started(words: list[str]) -> int:
    """The command of a launcher: the job, a shell, or something small."""
    row = BY_NAME.get(words[0])
    if row is not None and row.verbs and not set(words) & set(row.verbs.split()):
        note("left out", shlex.join(words))
        return 0
    before = json.loads(os.environ.get("PRISM_DRY_LINE", "[]"))
    line = read_line(words, os.environ)
    os.environ.update(line.variables or {})
    if line.shell:
        os.environ["PRISM_DRY_LINE"] = json.dumps([*before, *line.before])
        shell = ["bash", *script_words(line.shell)]
        os.execvp("bash", shell)
    command = line.words
    if command[:1] and (command[0] == "-m" or command[0].endswith(".py")):
        launched = any(BY_NAME[n].counts for n in line.launchers if n in BY_NAME) or before
        if trains(command, bool(launched)):
            job = {"line": [*before, *words], "cwd": os.getcwd(), "env": dict(os.environ)}
            (DRY / "job.part").write_text(json.dumps(job))
            (DRY / "job.part").rename(DRY / "job")
            time.sleep(30)  # until the script is stopped
        note("left out", shlex.join(words))
        return 0
    if words[0] in PYTHONS:
        if "-c" in words and "device_count()" in words[-1]:
            print(_gpu_count())
            return 0
        if os.environ.get("PRISM_DRY_CONFINED"):
            os.execv(sys.executable, [sys.executable, *words[1:]])
    elif command and shutil.which(command[0]):
        os.execvp(command[0], list(command))
    note("left out", shlex.join(words))
    return 0


def script_words(shell: Sequence[str]) -> list[str]:
    """The script of ``sbatch OPTIONS SCRIPT WORDS`` or of a shell, with its words."""
    name, *rest = shell
    if Path(name).name not in SUBMIT:
        return rest
    for place, word in enumerate(rest):
        if word.startswith("--wrap="):
            return ["-c", word.partition("=")[2]]
        if Path(word).is_file():
            return rest[place:]
    return ["-c", shlex.join(rest[-1:])]


def trains(command: Sequence[str], launched: bool) -> bool:
    """Whether a script, or ``-m`` and a module, trains: by its flags, its text, or since it cannot
    be read and was started as several processes."""
    words = [word.partition("=")[0].replace("_", "-") for word in command]
    if any(_TRAINING.match(word) for word in words):
        return True
    try:
        return bool(_CALLS.search(Path(command[0]).read_text(errors="replace")))
    except OSError:
        return launched


def _gpus() -> int:
    """As many lines as a node has GPUs, for scripts that count them."""
    for index in range(_gpu_count()):
        print(f"GPU {index}: NVIDIA GPU (UUID: GPU-{index})")
    return 0


def _gpu_count() -> int:
    """GPUs of a host, which are asked for where nobody said how many."""
    gpus = os.environ.get("PRISM_DRY_GPUS")
    if not gpus:
        note("asked", "GPUs of a host")
    return int(gpus or 1)


def _folders(words: Sequence[str]) -> int:
    """Folders in the working folder are made, no others."""
    home = Path(os.environ["PRISM_DRY_HOME"])
    for word in words:
        if word.startswith("-"):
            continue
        path = Path(os.path.abspath(word))
        if home in path.parents:
            path.mkdir(parents=True, exist_ok=True)
        else:
            note("left out", f"mkdir {word}")
    return 0


def _real(name: str) -> str:
    return shutil.which(name, path=os.environ["PRISM_DRY_PATH"]) or "true"


def rewritten(command: str) -> str:
    """A simple command of Bash that writes no file which is there or outside the working folder,
    and whose program is looked for by its name where it is named by a path.

    ``__prism_place`` and ``__prism_run`` are functions of ``dry_run``'s prelude.
    """
    out, place, first = list[str](), 0, ""
    while place < len(command):
        char = command[place]
        if char == "\n":
            return "".join([*out, command[place:]])  # a document that the command reads
        if char == ">" and command[place + 1 : place + 2] != "(":
            target_at = _after(command, place)
            end = _word_end(command, target_at)
            target = command[target_at:end]
            out.append(command[place:target_at])
            if target.startswith(("&", "/dev/")) or not target or command[target_at - 1] == "&":
                out.append(target)
            elif first in _CREATES:
                out.append(f'"$(__prism_place {target})"')
            else:
                out.append("/dev/null")
            place = end
        elif char not in _WORD_END and (not out or out[-1][-1:] in " \t|"):
            end = _word_end(command, place)
            word = command[place:end]
            if not first and not re.match(r"[A-Za-z_]\w*\+?=|\d+$", word):
                first = word
                if "/" in word or word.startswith(("$", '"$')):
                    out.append("__prism_run ")
            out.append(word)
            place = end
        else:
            out.append(char)
            place += 1
    return "".join(out)


def _after(command: str, place: int) -> int:
    """The place of the target of a redirection at ``place``."""
    while place < len(command) and command[place] in ">|& \t":
        if command[place] == "&" and command[place + 1 : place + 2].isdigit():
            break
        place += 1
    return place


def _word_end(command: str, place: int) -> int:
    """Where the word of Bash that begins at ``place`` ends."""
    quote, depth = "", 0
    while place < len(command):
        char = command[place]
        if char == "\\" and quote != "'":
            place += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif command.startswith(("$(", "${"), place) or (depth and char in "({"):
            depth += 1
            place += char == "$"
        elif depth and char in ")}":
            depth -= 1
        elif not depth and char in _WORD_END and not (char == "(" and command[place - 1] == "="):
            break
        elif char == "(":  # of an array
            depth += 1
        place += 1
    return place


if __name__ == "__main__":
    if sys.argv[1] == "rewrite":
        print(rewritten(sys.argv[2]))
    else:
        sys.exit(answer(sys.argv[1], sys.argv[2:]))
