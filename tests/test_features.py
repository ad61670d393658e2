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

# One process imports what is not ours, then a fork of it looks at each tree: else each of 22 trees
# would import torch, numba and Megatron.  Core imports no feature (tests/test_layers.py), so it is
# imported in the tree without any.
LOOK_AT_TREES = """
import importlib, os, pkgutil, sys
# import torch would else import the megatron_prism that is installed
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import mcp, numba, numpy, rich, torch, yaml
del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]

def look(tree):
    sys.path.insert(0, tree)
    sys.argv = ["prism", "--help"]
    import megatron_prism
    from megatron_prism.core import feature
    assert megatron_prism.__path__ == [tree + "/megatron_prism"], megatron_prism.__path__
    megatron_prism._autoload()
    print(*sorted(feature.installed()))
    packages = ["megatron_prism"]
    if feature.installed():
        packages = ["megatron_prism.features", "megatron_prism.cli"]
    for package in packages:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, package + "."):
            if module.name.endswith("__main__") or ".recipes" in module.name:
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                # packages that are not installed here are not what was deleted
                if (error.name or "").startswith("megatron_prism"):
                    raise
    from megatron_prism.__main__ import main
    sys.exit(main())

trees_of_children = {}

def wait_for_a_child():
    child, status = os.wait()
    with open(trees_of_children.pop(child) + "/status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))

for tree in sys.argv[1:]:
    if len(trees_of_children) == 2:
        wait_for_a_child()
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "/printed"), (2, "/errors")):
            os.dup2(os.open(tree + name, os.O_CREAT | os.O_WRONLY, 0o644), stream)
        look(tree)
    trees_of_children[child] = tree
while trees_of_children:
    wait_for_a_child()
"""

NONE = "none"  # the tree without any feature


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


def copy_without(names, tree, parts):
    """A copy of some parts of the tree without some features and their tests."""
    for part in parts:
        shutil.copytree(
            ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "golden")
        )
    for name in names:
        shutil.rmtree(tree / "megatron_prism" / "features" / name)
        shutil.rmtree(tree / "tests" / "features" / name, ignore_errors=True)


def deleted_with(name):
    return set(FEATURES) if name == NONE else users_of(name)


@pytest.fixture(scope="module")
def trees_without(tmp_path_factory):
    """A tree for each feature, without it and its users, and one without any."""
    trees = {}
    for name in [*FEATURES, NONE]:
        trees[name] = tmp_path_factory.mktemp(name)
        copy_without(deleted_with(name), trees[name], ["megatron_prism"])
    run(["-c", LOOK_AT_TREES, *map(str, trees.values())], trees[NONE])
    return trees


@pytest.mark.ci
@pytest.mark.parametrize("name", [*FEATURES, NONE])
def test_a_feature_can_be_deleted(trees_without, name):
    gone = deleted_with(name)
    tree = trees_without[name]
    assert (tree / "status").read_text() == "0", (tree / "errors").read_text()
    installed, *overview = (tree / "printed").read_text().splitlines()
    assert installed.split() == sorted(set(FEATURES) - gone)
    commands = commands_of(gone)
    assert not [line for line in overview if line.split()[:1] in commands]
    assert "run a rank of the job" in "\n".join(overview)


@pytest.mark.ci
def test_core_is_tested_without_any_feature(tmp_path):
    copy_without(FEATURES, tmp_path, ["megatron_prism", "tests", "recipes"])
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
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
