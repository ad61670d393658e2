"""megatron_prism: run any rank of a large Megatron-LM job on one machine, and see what it does.

The map, in reading order.  Capture runs Megatron's own code (torch); analysis does without both.  A
module imports only what stands above it here; ``tests/test_layers.py`` is the exact table.

    errors.py units.py       what can go wrong; integer ns and bytes as text
    guards.py                bounds while foreign files are read
    process_changes.py       what was changed for the whole process, and how it is undone
    world.py                 ranks, coordinates, Megatron's named groups
      rank_groups.py           which groups Megatron makes, and the arithmetic of their members
      selectors.py             how a person names ranks
    collectives.py           the one table of collectives: names, shapes, bytes, what peers deliver
    ops.py program.py        what one rank does in an iteration, op by op
      programs.py              the programs of a world, in one file
      program_text.py          the same as text (program_parse.py reads it)
    fault_plan.py            which fault shall happen, to whom and when
      fault_kinds.py           the kinds; fault_files.py: plans, other people's words, the truth
    slices.py                a folder of captured slices, and the world they make
    membership.py            who is in which group, for all ranks at once
    subgroups.py             groups that are parts of others: optimizer instances, hierarchical cp
    classes.py               which ranks cannot be told apart
    matching.py              do programs fit together (fifo.py, splits.py)
    graph.py                 the world graph: all programs joined
    unit_time.py             the longest path through a schedule: forward 1, backward 2
    costs/                   how long ops take, and who says so
    replay/                  the timeline of the whole world; when virtual ranks answer local ones
    allocator.py             what the caching allocator would reserve, a model
      allocator_settings.py    its options; allocator_trace.py: it against recorded histories
    memory.py                where memory peaks and what is alive there
      memory_baseline.py       has it grown?  a baseline in a reviewable file
    quiescence.py            where every rank stands when nothing moves any more
    flight_export.py         the same as Flight Recorder dumps
    faults.py                healthy programs with faults planted in them (fault_edits.py)
    flight_recorder.py       dumps of a job that hangs (flight_dump.py)
      flight_entries.py        their entries; flight_workers.py: many of them, by several processes
    stages.py                which ranks stand at one place of their pipeline
    hang.py                  who made it hang (outstanding.py, votes.py, orders.py, hang_graph.py)
      joint_calls.py           calls that need a closer look
      moments.py               are the dumps of one moment, and of one job
      sources.py               where waits end (wait_graph.py)
      outside.py               hosts that may wait outside NCCL
      diagnosis.py             the verdict as values, text and JSON
      watchdog.py              which watchdog fires first, and what it prints
      explain.py               whose single fault leaves exactly these dumps (overlay.py)
      hang_world.py            who is to blame for a standstill of programs
      placement.py             where in its program every rank stood, and is that it
    report/                  the timeline as text, one HTML page, a trace
    stochastic/              the distribution of the iteration time
    diagnose.py              a hang, from dumps, programs or planted faults
    results.py               how results reach their renderers
    megatron_source.py       which Megatron is imported, and what its modules define
    artefact.py              results that appear whole or not at all: a folder, a file
    recipe.py                a job as one YAML file
      recipe_schema.py         what it may say, and what follows from it
      recipe_checks.py         which fields must fit each other
      recipe_layers.py         how layers split over stages and chunks

    virtual/                 a torch.distributed world whose other ranks are not there; pacing
    tiers/                   where local ranks run: cuda, cpu (real values), meta (shapes only)
    slicer/                  the recorder: what a running rank does becomes its program
    plugin/                  the flags, Megatron's seams, starting a job, faults of running ranks,
                             what calls cost here (calibrate)

    cli.py                   the commands of ``prism`` (cli_*.py)
    _attach.py               how ``import torch`` finds us; pytest_plugin.py: how pytest does

This module stays light: it is imported by everything, also by jobs that did not ask for emulation.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_HOMES = {  # public name -> module:attribute
    "PricedGraph": "replay.priced_graph:PricedGraph",
    "PrismError": "errors:PrismError",
    "Recipe": "recipe:Recipe",
    "WhatIf": "replay.priced_graph:WhatIf",
    "World": "world:World",
    "attach": "_attach:attach",
    "capture": "plugin.capture:capture",
    "compare": "stochastic.compare:compare",
    "diagnose": "diagnose:diagnose",
    "diagnose_faults": "diagnose:diagnose_faults",
    "emulate": "plugin.job:emulate",
    "load": "slices:open_programs",
    "load_recipe": "recipe:load",
    "peak_memory": "memory_baseline:peak_memory",
    "predict": "stochastic.predict:predict",
    "price": "replay.priced_graph:price",
    "replay": "replay.priced_graph:replay",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Public names, imported from their homes on first use."""
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(import_module(f"megatron_prism.{module}"), attribute)
    raise AttributeError(f"module 'megatron_prism' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keep public names when a package of the same name (``replay``) is imported.

    The import system sets every submodule as an attribute of its parent.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
