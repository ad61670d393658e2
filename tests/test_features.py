"""A feature is a folder that can be deleted: what is left imports, answers and passes its tests.

A feature goes with the features that use it, its tests and its pages.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

import megatron_prism
from megatron_prism.core import feature

ROOT = pathlib.Path(megatron_prism.__file__).parents[1]
FEATURES = sorted(feature.installed())

IMPORT_ALL = """
import importlib, pkgutil, sys
import megatron_prism
from megatron_prism.core import feature

print(*sorted(feature.installed()))
for module in pkgutil.walk_packages(megatron_prism.__path__, "megatron_prism."):
    if module.name.endswith("__main__") or ".recipes" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        # packages that are not installed here are not what was deleted
        if (error.name or "").startswith("megatron_prism"):
            raise
"""


def run(words, tree):
    """What a command prints in a copy of the tree; its failure is the test's."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree), "HOME": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def users_of(name):
    """The features that use a feature, and those that use these."""
    users = {name}
    for _ in FEATURES:
        users |= {other for other in FEATURES if feature.installed()[other].uses in users}
    return users


def copy_without(names, tree):
    """A copy of the tree without some features, their tests and their pages."""
    for part in ("megatron_prism", "tests", "recipes"):
        shutil.copytree(
            ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "golden")
        )
    shutil.copy(ROOT / "pyproject.toml", tree)
    for name in names:
        shutil.rmtree(tree / "megatron_prism" / "features" / name)
        shutil.rmtree(tree / "tests" / "features" / name, ignore_errors=True)


@pytest.mark.ci
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_can_be_deleted(name, tmp_path):
    gone = users_of(name)
    copy_without(gone, tmp_path)
    there = run(["-c", IMPORT_ALL], tmp_path).split()
    assert there == sorted(set(FEATURES) - gone)
    overview = run(["-m", "megatron_prism", "--help"], tmp_path)
    commands = commands_of(gone)
    assert not [line for line in overview.splitlines() if line.split()[:1] in commands]
    assert "run a rank of the job" in overview
    quick = ["-x", "-m", "not slow and not megatron", "--hypothesis-profile", "few examples"]
    run(["-m", "pytest", "-q", *quick, "tests/core"], tmp_path)


def commands_of(names):
    """First words of the overview's lines for the commands of some features."""
    words = []
    for name in names:
        if feature.installed()[name].command:
            module = f"megatron_prism.features.{name}.{feature.installed()[name].command}"
            __import__(module)
            words += [[command] for command in sys.modules[module].COMMANDS]
    return words


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_names_its_modules(name):
    """A command or flags that FEATURE does not name would be in no prism."""
    folder = ROOT / "megatron_prism" / "features" / name
    row = feature.installed()[name]
    for part in ("command", "flags", "launcher", "pytest_plugin"):
        module = getattr(row, part)
        assert not module or (folder / f"{module}.py").exists()
        assert module or not (folder / f"{part}.py").exists(), f"{part}.py is not named"


def test_a_feature_without_the_one_it_uses_is_left_out():
    rows = {
        "base": feature.Feature(),
        "user": feature.Feature(uses="base"),
        "orphan": feature.Feature(uses="absent"),
        "user of the orphan": feature.Feature(uses="orphan"),
    }
    assert sorted(feature.usable(rows)) == ["base", "user"]
