"""Relations between answers: what-ifs as people type them, and the same job captured anew.

``@about("dp", …)`` says of which what-ifs a test is; ``test_every_what_if`` wants one for each that
the documentation names.
"""

import functools
import tempfile
from pathlib import Path

from megatron_prism.cli import what_ifs
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.features.sweep.layout import RecipeLayout
from megatron_prism.features.sweep.recipe_server import CaptureServer
from megatron_prism.memory import blocks, peaks

STORED = Path(__file__).parents[1] / "golden" / "slices"
JOBS = ("cp2", "dense_pp2", "fp8_tp2", "interleaved", "moe_ep2")
MACHINE = "machine=h100"
TINY = ("num_layers=4", "hidden_size=256", "num_attention_heads=4",
        "seq_length=128", "vocab_size=1024", "tp=1", "bf16=true",
        "use_distributed_optimizer=true", "data_path=null", "micro_batch_size=1",
        "global_batch_size=64", "world_size=64", "prism.tier=meta")  # fmt: skip
ABOUT: dict[str, list[str]] = {}  # what-if -> tests


def about(*names):
    """Mark a test as one of what-ifs."""

    def registered(test):
        for name in names:
            ABOUT.setdefault(name, []).append(test.__name__)
        return test

    return registered


@functools.cache
def stored(job):
    """Programs of a stored job."""
    return open_programs(STORED / job)


def answer(programs, *words):
    """The timeline of ``prism replay`` with these words."""
    how = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in ("machine", "calibration", "iterations"):
            how[key] = int(value) if value.isdigit() else value
    rest = [word for word in words if word and word.partition("=")[0] not in how]
    return what_ifs.priced(programs, rest, "replay", **how).timeline


def ns(programs, *words):
    return answer(programs, *words).iteration_ns


def memory(programs):
    """(allocated, reserved) bytes at the peak of every stage, by its lowest rank."""
    found = {}
    for rank in [int(programs.world.matching(pp=stage)[0]) for stage in programs.world.stages]:
        program = programs.of(rank)
        found[rank] = peaks.known_peak(program).num_bytes, sum(blocks.reserved(program)) // 2
    return list(found.values())


@functools.cache
def _server():
    return CaptureServer()


@functools.cache
def fresh(*settings, dp=2, microbatches=4, rank=None):
    """Programs of a tiny job, captured now: ``settings`` of its recipe, on ``dp`` replicas.

    rank : which rank of each stage is captured, counted from its first
    """
    of_size = f"dp={dp}", f"global_batch_size={dp * microbatches}"
    layout = RecipeLayout(recipes.load("tiny-gpt_1cpu", [*TINY, *settings, *of_size]))
    return captured(layout, rank)


def captured(layout, rank=None):
    """Programs of a layout, captured now."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if rank is None:
            for stage in layout.world.stages:
                layout.capture(folder, stage, _server, None)
        else:
            for stage in layout.world.stages:
                chosen = int(layout.world.matching(pp=stage)[rank])
                _server().capture(layout.recipe, chosen, folder)
        return layout.assembled(folder)
