"""Run any rank of a large Megatron-LM job on one machine, and see what the job does.

Eight packages are core.  Each imports only packages above it in this list (``tests/test_layers.py``
has the exact table):

    core/      world, groups, errors, files; programs/ (ops, slices), jobs/ (recipes, settings)
    graph/     equivalent ranks, matching calls, the world graph, stalled jobs
    replay/    the timeline, what-ifs, the network; costs/ (what an op takes), microbatches/,
               uncertainty/ (how far off an iteration may be)
    memory/    peaks, the allocator, NCCL's buffers, drawn routing, reports of a job's peaks
    runtime/   torch without Megatron: process group, answers and values of virtual ranks,
               recorder/, devices/ (tiers), te_kernels/ (Transformer Engine)
    emulate/   Megatron: command_line/, preflight/ (what stops a job), rank/ (launch, monitor),
               patches/, capture/, jobs/ (scripts, recipes), processes/
    report/    timelines and memory as text, page and trace; the shell of pages; no analysis
    cli/       the command ``prism``: parse, dispatch, print

A feature is a folder of features/ with its command or flags, its analysis and its report.  It uses
what core has, and core works without it:

    programs/               capture, show and check programs
    fit/ guard/ snapshots/  memory: whether a job fits, a baseline in CI, real processes
    replay/ predict/        time: one iteration, its distribution
    compare/ sweep/         two jobs, many layouts
    hang/ faults/ uneven/   which rank hangs, planted faults, inputs that differ between ranks
    verify/ streams/        does a layout compute the same, is the order of streams right
    life/ phases/           memory of the parts of a process's life, of training and generating
    reshard/ traces/        a checkpoint in another layout, traces of a real job
    debugger/ pacing/       stop in a rank, let it run as slowly as in the large job
    scripts/ patches/       launch scripts run dry, what an emulated job changes in Megatron
    calibrate/ agents/      measure this host, serve the questions to agents

Only runtime, emulate and the features that run ranks import torch.  Beside the packages:
``_attach.py`` is how ``import torch`` finds us, ``pytest_plugin.py`` how pytest does.

The functions below and those that features add (``FEATURE`` in their folders) are the API, one for
each answer; commands and benchmarks call them too.  This module stays light: everything imports it,
also jobs that did not ask for emulation.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_HOMES = {  # public name of core -> module:attribute; features add theirs
    "MemoryReport": "memory.job_peaks:MemoryReport",
    "PricedGraph": "replay.priced_graph:PricedGraph",
    "PrismError": "core.errors:PrismError",
    "Programs": "core.programs.program:Programs",
    "Recipe": "core.jobs.recipe:Recipe",
    "Timeline": "replay.timeline:Timeline",
    "WhatIf": "replay.priced_graph:WhatIf",
    "World": "core.world:World",
    "attach": "_attach:attach",
    "capture": "emulate.jobs.recipe_job:capture",
    "emulate": "emulate.jobs.recipe_job:emulate",
    "load": "core.programs.slices:open_programs",
    "load_recipe": "core.jobs.recipe:load",
    "peak_memory": "memory.job_peaks:peak_memory",
    "price": "replay.priced_graph:price",
    "replay": "replay.priced_graph:replay",
    "with_microbatches": "emulate.schedule:with_microbatches",
}


def __getattr__(name: str) -> object:
    """Import public names from their homes on first use."""
    if name == "__all__":
        return [*_public_names(), "__version__"]
    # a dunder is none of ours, and asking for features costs imports
    place = None if name.startswith("__") else _HOMES.get(name) or _public_names().get(name)
    if place is None:
        raise AttributeError(f"module 'megatron_prism' has no attribute {name!r}")
    module, _, attribute = place.partition(":")
    return getattr(import_module(f"megatron_prism.{module}"), attribute)


def _public_names() -> dict[str, str]:
    """Collect the public names of core and of features, each with its ``module:attribute``."""
    names = {**_HOMES, **import_module("megatron_prism.core.feature").api()}
    return dict(sorted(names.items()))


def _autoload() -> None:
    """What ``import torch`` calls in every process of the environment.

    It stands here because whatever is left of a damaged install must not break other programs.
    """
    asked = os.environ.get("PRISM_ARGS") or any(w.startswith("--prism-") for w in sys.argv[1:])
    try:
        import_module("megatron_prism._attach").autoload()
    except (ImportError, SyntaxError, AttributeError) as error:  # missing, cut, of another release
        if asked:
            print(
                f"prism: error: megatron_prism is not installed whole: {error}\n"
                "  fix: pip install --force-reinstall --no-deps megatron_prism",
                file=sys.stderr,
            )
            sys.exit(2)


def __dir__() -> list[str]:
    return sorted([*_public_names(), "__version__"])


class _Package(ModuleType):
    """Keep public names when a package of the same name (``replay``) is imported.

    The import system sets every submodule as an attribute of its parent.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
