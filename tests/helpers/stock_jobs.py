"""Runs many small stock jobs: torch and its friends are imported once, a job is a fork.

A script: its argument is a folder for logs.  A line of stdin is a JSON list of command lines of
``prism run``, a line of stdout a JSON list of [status, what it printed]; it ends with its stdin.
Megatron is imported by each job itself, after the patches are in place.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile

PREPARED = "torch torch.distributed.fsdp torch._inductor.compile_fx wandb transformers".split()
TINY = pathlib.Path(__file__).with_name("pretrain_tiny.py")
PATIENCE_S = 300  # then a job counts as hanging, and is ended by SIGALRM


def run(*phases):
    """[(status, output)] of command lines for ``prism run``, as many at once as there are cores;
    every phase begins when the one before has ended."""
    found = []
    for jobs in phases:
        process = _server()
        process.stdin.write(json.dumps([list(map(str, words)) for words in jobs]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"{__file__} ended: its stderr says why"
        found += [tuple(answer) for answer in json.loads(line)]
    return found


def named(script, *phases):
    """name -> (status, output) of jobs given as name -> words of ``script``; see ``run``."""
    answers = run(*([["--", script, *words] for words in some.values()] for some in phases))
    return dict(zip([name for some in phases for name in some], answers, strict=True))


@functools.cache
def _server():
    """One for all tests, with the environment of the first that asks."""
    place = tempfile.TemporaryDirectory()
    mine = {key: value for key, value in os.environ.items() if key not in _OTHERS}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, place.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # NVTE_CPU_OFFLOAD_V1: else Megatron refuses to offload activations
        env=mine | {"OMP_NUM_THREADS": "1", "NVTE_CPU_OFFLOAD_V1": "1"},
    )
    atexit.register(place.cleanup)
    atexit.register(process.communicate)  # first: closes its stdin, and waits
    return process


_OTHERS = ("RANK", "WORLD_SIZE", "PRISM_ARGS", "CUDA_DEVICE_MAX_CONNECTIONS")


def _fork(words, log):
    pid = os.fork()
    if pid:
        return pid
    with open(os.devnull) as nothing, open(log, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.alarm(PATIENCE_S)
    sys.argv = ["prism", "run", *words]
    runpy.run_module("megatron_prism", run_name="__main__", alter_sys=True)
    raise SystemExit("prism run came back without a status")


def main(place):
    for name in PREPARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else every collection of a fork copies all of it
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(phase(json.loads(line), place)), flush=True)


def phase(jobs, place):
    """[[status, output]] of all of them; a fork leaves this function by SystemExit."""
    waiting, running, answers = list(enumerate(jobs)), {}, {}
    while waiting or running:
        if waiting and len(running) < (os.cpu_count() or 1):
            number, words = waiting.pop(0)
            running[_fork(words, f"{place}/{number}")] = number
            continue
        pid, status = os.wait()
        number = running.pop(pid)
        with open(f"{place}/{number}", errors="replace") as file:
            answers[number] = os.waitstatus_to_exitcode(status), file.read()
    return [answers[number] for number in range(len(jobs))]


if __name__ == "__main__":
    main(sys.argv[1])
