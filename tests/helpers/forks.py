"""Captures many small jobs in one go: torch and Megatron are imported once, every rank is a fork.

A script: the tier is its argument, stdin is a pickled list of (recipe, rank, folder), stdout a
JSON line per rank.  What a fork runs is ``recipe_script.run``, as in a worker of ``prism capture``.
"""

import contextlib
import gc
import json
import os
import pickle
import subprocess
import sys
import traceback
import warnings

MODULES = """
    megatron.core.parallel_state megatron.core.distributed megatron.core.optimizer
    megatron.core.pipeline_parallel megatron.core.models.gpt megatron.core.tensor_parallel
    megatron.core.models.gpt.gpt_layer_specs megatron.core.num_microbatches_calculator
    megatron.core.transformer.moe.moe_layer megatron.core.transformer.dot_product_attention
    megatron_prism.emulate.jobs.recipe_script megatron_prism.emulate.rank.launch
    megatron_prism.runtime.recorder.recorder
    megatron_prism.runtime.virtual_world
""".split()


def capture(jobs, tier="meta"):
    """Run every (recipe, rank, folder); returns {index: answer} with ``error`` or ``summary``."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, tier],
        input=pickle.dumps(jobs),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["job"]: line for line in lines}


def prepare(tier):
    """Import everything with the patches in place; return what a fork calls with a PatchContext."""
    import importlib

    from megatron_prism.core.process_changes import ProcessChanges
    from megatron_prism.emulate import patch
    from megatron_prism.emulate.patches import patches_for
    from megatron_prism.emulate.rank import monitor
    from megatron_prism.runtime import devices as tiers

    installed = tiers.prepare(tier, ProcessChanges())
    shape = tier == "meta"
    one = monitor.TrainingMonitor(installed.live, shapes_only=shape)
    shared = patch.PatchContext(None, one, shape, (0,), rank=0)
    # fast-groups remembers which ranks are local; these worlds are small enough without
    chosen = [one for one in patches_for(tier) if one.name != "fast-groups"]
    patch.apply(chosen, shared)
    for name in MODULES:
        importlib.import_module(name)
    # the modules are changed already; a fork only has to say which rank it is
    patch.apply = lambda chosen, context: vars(shared).update(vars(context))
    monitor.TrainingMonitor = lambda *args, **kwargs: one
    gc.collect()
    gc.freeze()
    return installed


def fork(work):
    """(pid, pipe): a child that writes what ``work()`` answers, or its traceback, as JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 1
    try:
        os.close(read)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        try:
            answer = {"summary": work()}
        except BaseException as error:
            answer = {"error": f"{error!r}\n{traceback.format_exc()}"}
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(answer, default=str))
        status = 0
    finally:
        os._exit(status)


def wait(pid, pipe):
    """The answer of a child."""
    with os.fdopen(pipe) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "the child died"}


def main(tier):
    warnings.simplefilter("ignore")
    jobs = pickle.load(sys.stdin.buffer)
    prepare(tier)
    from megatron_prism.emulate.jobs import recipe_script
    from megatron_prism.emulate.rank.session import Session

    running = {}

    def next_done():
        index, (pid, pipe) = next(iter(running.items()))
        del running[index]
        print(json.dumps({"job": index, **wait(pid, pipe)}), flush=True)

    for index, (recipe, rank, folder) in enumerate(jobs):
        if len(running) >= min(os.cpu_count() or 1, 8):
            next_done()

        def work(recipe=recipe, rank=rank, folder=folder):
            return recipe_script.run(Session(), recipe, rank, folder)

        running[index] = fork(work)
    while running:
        next_done()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1])
