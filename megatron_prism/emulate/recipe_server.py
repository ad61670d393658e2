"""Capture many ranks of many recipes from one process that has imported torch once.

``CaptureServer`` starts ``python -m megatron_prism.emulate.recipe_server``.  That process prepares
tier meta, then forks for every request; the child runs ``recipe_script`` as a worker of
``prism capture`` does, so slices are the same, without two seconds of imports for each; what
repeats itself runs once.  Megatron itself is imported in the child: its patches are of one rank.
This module imports torch only in the server.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_prism.core.errors import NotTrainedError, PrismError
from megatron_prism.core.recipe import Recipe
from megatron_prism.core.slices import SliceStore
from megatron_prism.emulate import exit_status
from megatron_prism.emulate.workers import Json as Answer
from megatron_prism.emulate.workers import die_with_parent

if TYPE_CHECKING:
    from megatron_prism.emulate.recipe_script import RankJob
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
        environment = {**os.environ, "PRISM_ARGS": ""}
        environment.setdefault("OMP_NUM_THREADS", "1")
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_prism.emulate.recipe_server", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            env=environment,
            preexec_fn=die_with_parent,
        )
        os.close(write)
        self._answers = os.fdopen(read, encoding="utf-8")

    def close(self) -> None:
        """End the process, and what it runs."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def capture(
        self,
        recipe: Recipe,
        rank: int,
        folder: Path,
        alike: Sequence[int] = (),
        more: tuple[Recipe, Path] | None = None,
    ) -> None:
        """Put the slice of ``rank`` into ``folder``.

        alike : other stages in the middle of the pipeline with the same layers: their slices, which
                say nothing of memory, come along, unless one of them does anything of its own
        more  : the same with another number of microbatches, and where its slices go

        Raises the PrismError that the rank ended with, NotTrainedError for a crash.
        """
        answer = self._ask("capture", (recipe, rank, folder, alike, more, True))
        if answer["kind"] == "unlike":
            answer = self._ask("capture", (recipe, rank, folder, (), None, False))
            if more is not None and answer["kind"] == "captured":
                answer = self._ask("capture", (*more[:1], rank, more[1], (), None, False))
        if answer["kind"] == "error":
            error = PrismError(answer["message"], fix=answer["fix"])
            error.exit_code = answer["exit_code"]
            raise error
        if answer["kind"] == "crash":
            raise NotTrainedError(f"rank {rank}: {answer['message']}")

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
        lines = [list(words) for words in command_lines]
        answer = self._ask("check", (list(recipes), lines, list(world_sizes)))
        if answer["kind"] != "checked":
            raise NotTrainedError(f"Megatron's argument checks: {answer['message']}")
        found: list[str] = answer["refusals"]
        return found

    def _ask(self, what: str, content: object) -> Answer:
        lost = {"kind": "crash", "message": "its process was killed"}
        try:
            assert self._process.stdin is not None
            pickle.dump((what, content), self._process.stdin)
            self._process.stdin.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            return lost
        answer: Answer = json.loads(line) if line.endswith("\n") else lost
        return answer


# -- in the server --------------------------------------------------------------------------------
def _serve(requests: IO[bytes], answers: int) -> None:
    """Answer every request with one line of JSON, until there are no more."""
    from megatron_prism.emulate import recipe_script  # noqa: F401 - what children share
    from megatron_prism.emulate.session import Session
    from megatron_prism.runtime import devices
    from megatron_prism.runtime.recorder import recorder  # noqa: F401

    devices.prepare("meta", Session().changes, history=True)
    for name in _SHARED:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays: no child looks through it
    while True:
        try:
            what, content = pickle.load(requests)
        except EOFError:
            return
        os.write(answers, (json.dumps(_in_child(what, content)) + "\n").encode())


def _in_child(what: str, content: Any) -> Answer:
    """The answer of a fork of this process, which Megatron may change as it likes."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(read)
            die_with_parent()
            with os.fdopen(write, "w", encoding="utf-8") as out:
                out.write(json.dumps(_ANSWERS[what](*content)))
            status = 0
        finally:
            exit_status.leave(status)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        return {"kind": "crash", "message": f"its process ended with status {status}"}
    found: Answer = json.loads(text)
    return found


def _capture(
    recipe: Recipe,
    rank: int,
    folder: Path,
    alike: Sequence[int],
    more: tuple[Recipe, Path] | None,
    repeat: bool,
) -> Answer:
    from megatron_prism.emulate import recipe_script
    from megatron_prism.emulate.session import Session
    from megatron_prism.runtime.recorder.repeats import NotRepeatedError

    try:
        if repeat:
            _repeat(recipe, rank, folder, alike, more)
        else:
            recipe_script.run(Session(), recipe, rank, folder)
    except NotRepeatedError:
        return {"kind": "unlike"}
    except PrismError as error:
        return {"kind": "error", "message": error.message, "fix": error.fix,
                "exit_code": error.exit_code}  # fmt: skip
    except Exception as error:  # a bug, ours or Megatron's
        return {"kind": "crash", "message": f"{type(error).__name__}: {error}"}
    return {"kind": "captured"}


def _repeat(
    recipe: Recipe,
    rank: int,
    folder: Path,
    alike: Sequence[int],
    more: tuple[Recipe, Path] | None,
) -> None:
    """Record iterations of which what repeats itself is written down again.  NotRepeatedError."""
    from megatron_prism.emulate import capture, recipe_script
    from megatron_prism.emulate.session import Session
    from megatron_prism.runtime.recorder.recorder import Recorder, report_to
    from megatron_prism.runtime.recorder.repeats import Repeats
    from megatron_prism.runtime.virtual_world import current

    session = Session()
    run = recipe_script.attached(session, recipe, rank)
    monitor, live = run.monitor, run.tier.live
    monitor.started = True  # it has no loop that would have to be followed
    job = recipe_script.build(recipe, run)
    recorder = Recorder(rank, "meta", live)
    recorder.owned_by(job.model, job.optimizer)
    report_to(recorder, session.changes)
    world = current()
    assert world is not None
    assert live is not None
    from megatron.core import parallel_state  # with its patches

    world.listen(*world.listeners, recorder)
    monitor.listen(recorder, *monitor.listeners)
    monitor.repeats = Repeats(live, recorder)
    _note_sections(job, monitor.repeats.sections)
    first = capture.first_recorded(recipe.train_iters)
    while len(monitor.iterations) < first - 1:
        job.iterate(len(monitor.iterations))
    for one, place in [(recipe, folder), *([more] if more else [])]:
        job.num_microbatches = one.num_microbatches
        recorder.start()
        job.iterate(len(monitor.iterations))
        recording = recorder.stop()
        assert recording.builder is not None
        source = capture.source_of(run.version, "meta", "meta")
        store = SliceStore(place, one.world, capture.source_of_recipe(source, one))
        store.put(recording.program())
        for stage in alike:
            with parallel_state.get_pipeline_model_parallel_group().in_place_of(stage):
                other, sections = one.world.rank_at(pp=stage), monitor.repeats.sections
                store.put(sections.record_as(recording.builder, other, job.schedule))


def _note_sections(job: RankJob, sections: Sections) -> None:
    """The schedule's hooks are sections of the iterations that follow."""
    config = job.config

    def hook(name: str, chunk: int, run: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: sections.call(name, chunk, partial(run, *args))

    for name in ("param_sync_func", "grad_sync_func"):
        given = getattr(config, name)
        if isinstance(given, list):
            setattr(config, name, [hook(name, chunk, run) for chunk, run in enumerate(given)])
        elif given is not None:
            setattr(config, name, hook(name, 0, given))
    job.param_sync = config.param_sync_func
    finalize = config.finalize_model_grads_func

    def rest(*args: object, **kwargs: object) -> None:
        if not sections.rest():
            finalize(*args, **kwargs)

    config.finalize_model_grads_func = rest


def _check(recipes: list[Recipe], command_lines: list[list[str]], sizes: list[int]) -> Answer:
    from importlib.util import find_spec

    from megatron_prism.emulate import recipe_script
    from megatron_prism.emulate.session import Session

    if not recipes:
        sys.path.insert(0, os.path.dirname(os.path.abspath(command_lines[0][0])))
    else:
        recipe_script.attached(Session(), recipes[0], 0)
        import_module("torch.distributed").init_process_group()
    training = find_spec("megatron") is not None and find_spec("megatron.training") is not None
    refusals = []
    every: list[Recipe | None] = [*recipes] or [None] * len(sizes)
    for recipe, words, size in zip(every, command_lines, sizes, strict=True):
        said = ""
        if recipe is not None:
            said = _refusal(partial(recipe_script.check_layers, recipe))
        if not said and training:
            said = _refusal(partial(_validate, words, size))
        refusals.append(said)
    return {"kind": "checked", "refusals": refusals}


def _validate(words: list[str], world_size: int) -> None:
    """Megatron's own parser and checks, as its start-up runs them."""
    from megatron.training.arguments import parse_args, validate_args

    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world_size), "0"
    sys.argv = words
    validate_args(parse_args(ignore_unknown_args=True))  # a script has arguments of its own


def _refusal(run: Callable[[], object]) -> str:
    """What ``run()`` refuses, "" if nothing."""
    from megatron_prism.emulate.recipe_script import refusals

    said = io.StringIO()
    try:
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, contextlib.redirect_stderr(said), refusals():
            run()
    except PrismError as error:
        return error.message
    except SystemExit:  # argparse
        return said.getvalue().strip().rpartition("error: ")[2] or "its parser refuses it"
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


_ANSWERS: dict[str, Callable[..., Answer]] = {"capture": _capture, "check": _check}


if __name__ == "__main__":
    _serve(sys.stdin.buffer, int(sys.argv[1]))
