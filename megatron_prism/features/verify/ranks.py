"""Processes of every rank of a small world, over gloo: one server that has torch, and its forks.

In : ``SmallRun``s, one after the other.  Out: a folder of each, with what its ranks kept.  The
side of the command imports no torch; a rank is ``prism run`` of the script on tier cpu, all ranks
local.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from megatron_prism.core.errors import NotTrainedError, PrismError
from megatron_prism.emulate.processes.workers import Json, die_with_parent
from megatron_prism.features.verify import shrink
from megatron_prism.features.verify.shrink import SmallRun

_PATIENCE = 300  # seconds after which ranks count as hanging
_LONGEST = 200  # letters of a message
_VALUE = re.compile(r"\w*[\[({<'\"]")  # begins as Python writes a value
_PREPARED = ("torch", "torch.distributed.fsdp", "transformers", "wandb")


class RankError(PrismError):
    """A rank failed; ``kind`` is the name of its exception."""

    def __init__(self, message: str, fix: str, kind: str, exit_code: int) -> None:
        super().__init__(message, fix)
        self.args = (message, fix, kind, exit_code)
        self.kind, self.exit_code = kind, exit_code


class Server:
    """Runs worlds; a context manager that ends its processes."""

    def __init__(self, python: str = sys.executable) -> None:
        # flags that a user keeps in the environment are not meant for the copies
        env = {key: text for key, text in os.environ.items() if key != "PRISM_ARGS"}
        env.setdefault("OMP_NUM_THREADS", "1")
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # ranks, and what these have started
        self._process.wait()

    def run(self, run: SmallRun) -> Path:
        """Train; the folder.  RankError where a rank failed."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        pickle.dump(run, asked)
        asked.flush()
        line = answers.readline()
        # the server itself may die
        answer = json.loads(line or '{"message": "the server of ranks ended", "kind": ""}')
        if "message" in answer:
            fix = answer.get("fix") or "--keep DIR keeps what every rank printed"
            raise RankError(answer["message"], fix, answer["kind"], answer.get("exit_code", 1))
        return run.folder


def _serve() -> None:
    die_with_parent()
    # imports that every rank needs: forks share them
    for name in _PREPARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(EOFError):
        while True:
            print(json.dumps(_train(pickle.load(sys.stdin.buffer))), flush=True)


def _train(run: SmallRun) -> Json:
    run.folder.mkdir(parents=True, exist_ok=True)
    # a port that is free now
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = {_fork(run, rank, port): rank for rank in range(run.world.size)}
    failed: Json = {}
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid, None)
        # another process, a rank that ended well, or one that was killed below
        if rank is None or not status or failed:
            continue
        # the rank has written why
        file = run.folder / f"rank-{rank}.error"
        if file.exists():
            failed = json.loads(file.read_text())
        else:
            code = os.waitstatus_to_exitcode(status)
            end = f"ended: {code}"
            # the rank's own alarm: it waits for another rank
            if code == -signal.SIGALRM:
                end = f"did not end in {_PATIENCE} s"
            kind = ""
            if code < 0:
                kind = "hang"
            failed = {"message": f"rank {rank} {end}", "kind": kind}
        # ranks that go on would wait for the one that failed
        for pid_left in pids:
            os.kill(pid_left, signal.SIGKILL)
    return failed or {"done": True}


def _fork(run: SmallRun, rank: int, port: int) -> int:
    """Start a rank; return its process."""
    pid = os.fork()
    # the parent does not become a rank
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        log = os.open(run.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # both streams of the rank go to its log
        for stream in (1, 2):
            os.dup2(log, stream)
        signal.alarm(_PATIENCE)
        _rank(run, rank, port)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        answer = _answer(error, run.folder / f"rank-{rank}.log")
        (run.folder / f"rank-{rank}.error").write_text(json.dumps(answer))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer(error: BaseException, log: Path) -> Json:
    """Describe the end of a rank: a sentence, a fix if there is one, and its kind."""
    answer: Json = {"message": sentence(error), "fix": None, "kind": type(error).__name__}
    if isinstance(error, PrismError):
        return {**answer, "message": error.message, "fix": error.fix, "exit_code": error.exit_code}
    if isinstance(error, SystemExit):
        # what ends a process has printed why
        text = log.read_text(errors="replace")
        reported = re.findall(r"^prism: error: (.+)\n(?:  fix: (.+)\n)?", text, re.MULTILINE)
        message, fix = (reported or [(f"exit status {sentence(error)}", None)])[-1]
        return {**answer, "message": message, "fix": fix or None, "exit_code": error.code}
    return answer


def sentence(error: BaseException) -> str:
    """Return what an exception says in a line, and where it was raised if that is no sentence.

    An assertion may say nothing, or a value alone (the keys of a dictionary).
    """
    text = str(error).strip().partition("\n")[0]
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rsplit(" ", 1)[0] + " …"
    # a sentence speaks for itself; a value alone does not
    if re.search(r"[^\W\d_]+ [^\W\d_]+", text) and not _VALUE.match(text):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SystemExit) or not frames:
        return text or type(error).__name__
    last = frames[-1]
    file = "/".join(Path(last.filename).parts[-3:])
    message = f"{type(error).__name__} {text}".strip()
    return f"{message} at {file}:{last.lineno}, in {last.name}: {last.line}"


def _rank(run: SmallRun, rank: int, port: int) -> None:
    """Train as one rank, and keep what it does."""
    from megatron_prism.features.verify import wide_floats

    if run.precise:  # before whatever else keeps a dtype
        wide_floats.widen()
    from megatron_prism.emulate import patch
    from megatron_prism.emulate.rank import launch
    from megatron_prism.emulate.rank.monitor import TrainingMonitor
    from megatron_prism.features.verify.record import StepRecorder, patches_of

    size = run.world.size
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    recorder = StepRecorder(run.folder, rank)
    context = patch.PatchContext(
        start=_never, monitor=TrainingMonitor(), meta=False, local_ranks=(rank,), rank=rank
    )
    patch.apply(patches_of(recorder, run), context)
    prism_flags = ["--prism-tier", "cpu", "--prism-world-size", str(size)]
    try:
        launch.run_script([*prism_flags, "--", *run.words, *shrink.sizes_as_words(run.world)])
    # the end of a script is no failure
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except Exception as error:
        if not recorder.iteration:  # Megatron refuses the job, or it ends for want of something
            raise
        kind = type(error).__name__
        text = sentence(error).removeprefix(kind).lstrip()
        raise NotTrainedError(f"in iteration {recorder.iteration}: {kind}: {text}") from error
    recorder.write()


def _never() -> NoReturn:
    raise AssertionError("launch starts the world")


if __name__ == "__main__":
    _serve()
