"""Runs many small stock jobs in one go: torch and its friends are imported once, a job is a fork.

A script: its argument is a folder for logs, stdin a JSON list of lists of command lines of ``prism
run``, one list after the other, stdout a JSON list of [status, what it printed].  Megatron is
imported by each job itself, after the seams are in place.
"""

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile

PREPARED = "torch torch.distributed.fsdp torch._inductor.compile_fx wandb transformers".split()


def run(*phases):
    """[(status, output)] of command lines for ``prism run``, as many at once as there are cores;
    every phase begins when the one before has ended."""
    mine = {key: value for key, value in os.environ.items() if key not in _OTHERS}
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, place],
            input=json.dumps([[list(map(str, words)) for words in jobs] for jobs in phases]),
            capture_output=True,
            text=True,
            env=mine | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return [tuple(answer) for answer in json.loads(done.stdout)]


_OTHERS = ("RANK", "WORLD_SIZE", "PRISM_ARGS")


def _fork(words, log):
    pid = os.fork()
    if pid:
        return pid
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["prism", "run", *words]
    runpy.run_module("megatron_prism", run_name="__main__", alter_sys=True)
    raise SystemExit("prism run came back without a status")


def main(place):
    for name in PREPARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else every collection of a fork copies all of it
    print(json.dumps([answer for jobs in json.load(sys.stdin) for answer in phase(jobs, place)]))


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
