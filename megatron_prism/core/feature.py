"""What a feature is, and how core finds the features that are installed.

A feature is a folder ``megatron_prism/features/<name>/`` whose ``__init__.py`` has a row
``FEATURE``.  Core names no feature: it asks here for the modules of one part of all features, such
as their commands.  Whoever deletes a folder has a prism without that feature.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

_PACKAGE = "megatron_prism.features"
_FOLDER = Path(__file__).parents[1] / "features"


@dataclass(frozen=True)
class Feature:
    """The parts of one feature, each a module of its folder that core imports when it is needed.

    Args:
        command: has ``COMMANDS``, name of a command -> ``cli.command.Command``.
        flags: has ``JOB_FLAGS``, a ``JobFlags`` (emulate/command_line/job_flags.py): flags of a job
            and their effect.
        renderers: registers the renderers of the feature's results (``core.rendering``).
        launcher: has ``read_line``, which finds the job that a script would start.
        files: has ``FILE_ANSWERS``: files and words about which this feature answers for other
            commands.
        comparers: has ``COMPARERS`` and ``JOB_READERS``: values that ``compare`` takes, too.
        drawn_steps: has ``read_steps``: of programs, words, a machine, a calibration and a seed it
            makes the steps of a job with other inputs in each iteration (``replay.drawn_steps``),
            or None where the words say nothing of inputs.
        checks: has ``CHECKS``, what ``prism check`` proves, too (``cli.command.ProgramCheck``).
        fit_sections: has ``FIT_SECTIONS``, what ``prism fit`` says, too (``FitSection`` of the
            feature ``fit``, which a feature with sections uses).
        rank_files: regular expression of the names of files that a capture writes for one rank,
            beside the slice of the rank.
        pytest_plugin: is a plug-in of pytest.
        uses: name of the one other feature whose modules this feature imports.
        api: public name of the package -> ``module:attribute`` in the feature's folder.
    """

    command: str = ""
    flags: str = ""
    renderers: str = ""
    launcher: str = ""
    files: str = ""
    comparers: str = ""
    drawn_steps: str = ""
    checks: str = ""
    fit_sections: str = ""
    rank_files: str = ""
    pytest_plugin: str = ""
    uses: str = ""
    api: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def installed() -> Mapping[str, Feature]:
    """Return the features whose folders are there, by name, in alphabetical order.

    A feature whose used feature is absent is left out.
    """
    features = {}
    for init_file in sorted(_FOLDER.glob("*/__init__.py")):
        name = init_file.parent.name
        features[name] = import_module(f"{_PACKAGE}.{name}").FEATURE
    return usable(features)


def usable(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Keep the features that use none, or one that is kept, too."""
    kept = dict(features)
    while True:
        lacking = [name for name, row in kept.items() if row.uses and row.uses not in kept]
        if not lacking:
            return kept
        for name in lacking:
            del kept[name]


def modules(part: str) -> list[ModuleType]:
    """Import one part of every feature that has it.

    Args:
        part: a field of Feature that names a module, such as ``command``.

    Returns:
        The modules, in the order of the features' names.
    """
    imported = []
    for name, feature in installed().items():
        module_name = getattr(feature, part)
        if module_name:
            imported.append(import_module(f"{_PACKAGE}.{name}.{module_name}"))
    return imported


def api() -> dict[str, str]:
    """Return the public names of all features, each with its ``module:attribute``."""
    homes = {}
    for name, feature in installed().items():
        for public_name, place in feature.api.items():
            homes[public_name] = f"features.{name}.{place}"
    return homes
