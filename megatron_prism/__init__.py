"""megatron_prism: run any rank of a large Megatron-LM job on one machine, and see what it does.

The map, in reading order.  Capture runs Megatron's own code (torch) and writes programs; analysis
reads them with numpy alone.  Nothing below imports anything above it; ``tests/test_layers.py``
holds that.

    errors.py units.py       what can go wrong; integer ns and bytes as text
    world.py                 ranks, coordinates, Megatron's named groups
      selectors.py             how a person names ranks
      rank_groups.py           which groups Megatron makes
    collectives.py           the one table of collectives: names, shapes, bytes, what peers deliver

    virtual/                 a torch.distributed world whose other ranks are not there
    tiers/                   where local ranks run: cuda, cpu (real values), meta (shapes only)
    plugin/                  the flags, Megatron's seams, starting a job

    recipe.py artefact.py    a job as one YAML file; a folder written all or not at all
    cli.py                   the commands of ``prism``

This module stays light: it is imported by everything, also by jobs that did not ask for emulation.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "PrismError": "errors",
    "Recipe": "recipe",
    "World": "world",
    "load": "recipe",
}
__all__ = ["PrismError", "Recipe", "World", "__version__", "load"]


def __getattr__(name: str) -> object:
    """Public names, imported from their homes on first use."""
    if name in _HOMES:
        return getattr(import_module(f"megatron_prism.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'megatron_prism' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
