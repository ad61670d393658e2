"""Capture many ranks of many recipes from one process that has imported torch once.

``CaptureServer`` starts ``python -m megatron_prism.features.sweep.recipe_server``.  That process
prepares tier meta, then forks for every request; the child runs ``recipe_script`` as a worker of
``prism capture`` does, so slices are the same, without two seconds of imports for each; what
repeats itself runs once.  Megatron itself is imported in the child: its patches are of one rank.
This module imports torch only in the server.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core.errors import NotTrainedError, PrismError
from megatron_prism.core.jobs.recipe import Recipe
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.emulate.processes.workers import die_with_parent
from megatron_prism.emulate.rank import exit_status

if TYPE_CHECKING:
    from megatron_prism.emulate.jobs.recipe_script import RankJob
    from megatron_prism.runtime.recorder.repeats import Sections

# what Megatron imports besides its own modules: most of the time that its import takes
_SHARED = (
    "torch._inductor.compile_fx",
    "torch.distributed._tensor",
    "torch.utils.cpp_extension",
    "wandb",
)


class CaptureServer:
    """A process that captures ranks on request, one after the other."""

    def __init__(self) -> None:
        # PRISM_ARGS are of a job, and this process is none
        environment = {**os.environ, "PRISM_ARGS": ""}
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._pipe, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_prism.features.sweep.recipe_server",
                    str(child_end.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                env=environment,
                preexec_fn=die_with_parent,
            )

    def close(self) -> None:
        """End the process, and what it runs."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def capture(
        self,
        recipe: Recipe,
        rank: int,
        folder: Path,
        twin_stages: Sequence[int] = (),
        resized: tuple[Recipe, Path] | None = None,
    ) -> None:
        """Put the slice of ``rank`` into ``folder``.

        twin_stages : other stages in the middle of the pipeline with the same layers: their slices,
                      which say nothing of memory, come along, unless one of them does anything of
                      its own
        resized     : the same with another number of microbatches, and where its slices go

        Raises the PrismError that the rank ended with, NotTrainedError for a crash.
        """
        # nothing repeats itself: each job runs by itself
        if not self._ask(_repeat, recipe, rank, folder, twin_stages, resized):
            for sized_recipe, place in _jobs(recipe, folder, resized):
                self._ask(_capture, sized_recipe, rank, place)

    def check(
        self,
        recipes: Sequence[Recipe],
        command_lines: Sequence[Sequence[str]],
        world_sizes: Sequence[int],
    ) -> list[str]:
        """What Megatron says against each job, "" where it accepts it.

        Its TransformerConfig is built of every recipe; where ``megatron.training`` is installed or
        beside the script, the command line (script and arguments) is parsed and validated, too
        (training/arguments.py validate_args).  ``recipes``: empty for command lines of a script.
        """
        refusals: list[str] = self._ask(_check, recipes, command_lines, world_sizes)
        return refusals

    def _ask(self, function: Callable[..., object], *content: object) -> Any:
        """What ``function`` returns in the server; raises what it raises there."""
        try:
            self._pipe.send((function.__name__, content))
            answer = self._pipe.recv()
        # it was killed, for want of memory, say
        except (EOFError, OSError):
            answer = NotTrainedError("the process that captures was killed")
        if isinstance(answer, Exception):
            raise answer
        return answer


# -- in the server --------------------------------------------------------------------------------
def _serve(requests: Connection) -> None:
    """Answer every request, until there are no more."""
    from megatron_prism.emulate.jobs import recipe_script  # noqa: F401 - what children share
    from megatron_prism.emulate.rank.session import Session
    from megatron_prism.runtime import devices
    from megatron_prism.runtime.recorder import recorder  # noqa: F401

    devices.prepare("meta", Session().changes, history=True)
    for name in _SHARED:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays: no child looks through it
    with contextlib.suppress(EOFError):
        while True:
            requests.send(_in_child(*requests.recv()))


def _in_child(function: str, content: tuple[Any, ...]) -> object:
    """The answer of a fork of this process, which Megatron may change as it likes."""
    results, child_end = Pipe(duplex=False)
    child = os.fork()
    if not child:
        status = 1
        try:
            die_with_parent()
            child_end.send(_answer(function, content))
            status = 0
        finally:
            exit_status.leave(status)
    child_end.close()
    # the fork may end without an answer
    with results:
        try:
            answer = results.recv()
        except EOFError:
            answer = None
    _, status = os.waitpid(child, 0)
    # a crash of the fork, after whatever it has answered
    if status:
        return NotTrainedError(f"its process ended with status {status}")
    return answer


def _answer(function: str, content: tuple[Any, ...]) -> object:
    try:
        return globals()[function](*content)
    except PrismError as error:
        return error
    except Exception as error:  # a bug, ours or Megatron's
        return NotTrainedError(f"{type(error).__name__}: {error}")


def _jobs(
    recipe: Recipe, folder: Path, resized: tuple[Recipe, Path] | None
) -> list[tuple[Recipe, Path]]:
    """The recipe and its folder, and the resized one behind it, if there is one."""
    jobs = [(recipe, folder)]
    if resized is not None:
        jobs.append(resized)
    return jobs


def _capture(recipe: Recipe, rank: int, folder: Path) -> None:
    from megatron_prism.emulate.jobs import recipe_script
    from megatron_prism.emulate.rank.session import Session

    recipe_script.run(Session(), recipe, rank, folder)


def _repeat(
    recipe: Recipe,
    rank: int,
    folder: Path,
    twin_stages: Sequence[int],
    resized: tuple[Recipe, Path] | None,
) -> bool:
    """Record iterations of which what repeats itself is written down again; False where nothing
    does.
    """
    from megatron_prism.emulate.capture import capture
    from megatron_prism.emulate.jobs import recipe_script
    from megatron_prism.emulate.rank.session import Session
    from megatron_prism.runtime.recorder.recorder import Recorder, report_to
    from megatron_prism.runtime.recorder.repeats import NotRepeatedError, Repeats
    from megatron_prism.runtime.virtual_world import current

    session = Session()
    run = recipe_script.attached(session, recipe, rank)
    monitor, live = run.monitor, run.tier.live
    monitor.started = True  # it has no loop that would have to be followed
    job = recipe_script.RankJob.build(recipe, run)
    recorder = Recorder(rank, "meta", live)
    recorder.owned_by(job.model, job.optimizer)
    report_to(recorder, session.changes)
    world = current()
    assert world is not None
    assert live is not None
    from megatron.core import parallel_state  # with its patches

    world.listen(*world.listeners, recorder)
    monitor.listen(recorder, *monitor.listeners)
    monitor.repeats = repeats = Repeats(live, recorder)
    _note_sections(job, repeats.sections)
    first, builder = capture.first_recorded(recipe.train_iters), None
    try:
        while len(monitor.iterations) < first - 1:
            job.iterate(len(monitor.iterations))
        if monitor.repeats is None:
            return False
        for sized_recipe, place in _jobs(recipe, folder, resized):
            job.num_microbatches = sized_recipe.num_microbatches
            recorder.start(like=builder)  # whose steps may be written again
            job.iterate(len(monitor.iterations))
            recording = recorder.stop()
            builder = recording.builder
            assert builder is not None
            source = capture.source_of(run.version, "meta", "meta")
            source = capture.source_of_recipe(source, sized_recipe)
            store = SliceStore(place, sized_recipe.world, source)
            store.put(recording.program())
            for stage in twin_stages:
                with parallel_state.get_pipeline_model_parallel_group().in_place_of(stage):
                    twin_rank = sized_recipe.world.rank_at(pp=stage)
                    store.put(repeats.sections.record_as(builder, twin_rank, job.schedule))
    except NotRepeatedError:
        return False
    return True


def _note_sections(job: RankJob, sections: Sections) -> None:
    """The schedule's hooks are sections of the iterations that follow."""
    config = job.config

    def hook(name: str, chunk: int, run: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: sections.call(name, chunk, partial(run, *args))

    for name in ("param_sync_func", "grad_sync_func"):
        functions = getattr(config, name)
        # one for each chunk of an interleaved schedule
        if isinstance(functions, list):
            hooks = [hook(name, chunk, function) for chunk, function in enumerate(functions)]
            setattr(config, name, hooks)
        elif functions is not None:
            setattr(config, name, hook(name, 0, functions))
    job.param_sync = config.param_sync_func
    finalize = config.finalize_model_grads_func

    def rest(*args: object, **kwargs: object) -> None:
        if not sections.rest():
            finalize(*args, **kwargs)

    config.finalize_model_grads_func = rest


def _check(
    recipes: Sequence[Recipe], command_lines: Sequence[Sequence[str]], sizes: Sequence[int]
) -> list[str]:
    from importlib.util import find_spec

    from megatron_prism.emulate.jobs import recipe_script
    from megatron_prism.emulate.rank.session import Session

    # a script's own folder is where it finds its modules
    if not recipes:
        sys.path.insert(0, os.path.dirname(os.path.abspath(command_lines[0][0])))
    else:
        recipe_script.attached(Session(), recipes[0], 0)
        import_module("torch.distributed").init_process_group()
    training = find_spec("megatron") is not None and find_spec("megatron.training") is not None
    refusals = [""] * len(sizes)  # command lines of a script have no recipe to check
    if recipes:
        refusals = [_refusal(partial(recipe_script.check_layers, recipe)) for recipe in recipes]
    # megatron-core alone validates no arguments
    if not training:
        return refusals
    for number, (words, size) in enumerate(zip(command_lines, sizes, strict=True)):
        if not refusals[number]:
            refusals[number] = _refusal(partial(_validate, words, size))
    return refusals


def _validate(words: Sequence[str], world_size: int) -> None:
    """Megatron's own parser and checks, as its start-up runs them."""
    from megatron.training.arguments import parse_args, validate_args

    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world_size), "0"
    sys.argv = [*words]
    validate_args(parse_args(ignore_unknown_args=True))  # a script has arguments of its own


def _refusal(run: Callable[[], object]) -> str:
    """What ``run()`` refuses, "" if nothing."""
    from megatron_prism.emulate.jobs.recipe_script import refusals

    stderr = io.StringIO()
    try:
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, contextlib.redirect_stderr(stderr), refusals():
            run()
    except PrismError as error:
        return error.message
    except SystemExit:  # argparse
        return stderr.getvalue().strip().rpartition("error: ")[2] or "its parser refuses it"
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
