"""What `pip install` makes of a clone in the folder that `git clone` gives it: megatron_prism.

From the folder above, and from a checkout of Megatron-LM that holds the clone, Python takes the
clone's own folder for a namespace package of our name.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import megatron_prism

ROOT = Path(megatron_prism.__file__).parents[1]
PARTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "recipes", "megatron_prism")
SCRIPT = "import torch, megatron_prism; print(megatron_prism.World.__module__)"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a checkout"),
]


def run(*words, cwd, **env):
    """The lines that a process prints, which has to end well."""
    kept = {
        key: text for key, text in os.environ.items() if not key.startswith(("PRISM_", "PYTHON"))
    }
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout.splitlines()


def built(clone, hook, settings=None):
    """The wheel that setuptools' ``hook`` makes of ``clone``."""
    pytest.importorskip("setuptools.build_meta")
    folder = clone.parent / f"{hook}-{settings}"
    folder.mkdir()
    code = f"from setuptools import build_meta; build_meta.{hook}({str(folder)!r}, {settings})"
    run(sys.executable, "-c", code, cwd=clone)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def copy_to(folder):
    """A clone in ``folder``, of what an install needs."""
    clone = folder / "megatron_prism"
    clone.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, clone)
    return clone


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """(folder that holds a clone, Python of an environment with its editable install)."""
    folder = tmp_path_factory.mktemp("above")
    clone = copy_to(folder)
    # an environment of its own; of this one's it has the packages, not what their .pth files do
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    (packages,) = (folder / "venv").glob("[lL]ib/**/site-packages")
    (packages / "_others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    built(clone, "build_editable").extractall(packages)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "test_it.py").write_text("def test_it():\n    import megatron_prism.core.world\n")
    (folder / "elsewhere").mkdir()
    return folder, folder / "venv" / "bin" / "python"


@pytest.mark.parametrize(
    "words",
    [
        ("-c", SCRIPT),
        ("-c", "import megatron_prism; print(megatron_prism.World.__module__)"),
        ("script.py",),
        ("-m", "torch.distributed.run", "--nproc-per-node", "1", "script.py"),
    ],
    ids=["-c", "before torch", "script", "torchrun"],
)
def test_a_clone_is_imported_from_the_folder_above_it(words, environment):
    above, python = environment
    assert run(python, *words, cwd=above)[-1] == "megatron_prism.core.world"


def test_commands_and_pytest_work_from_the_folder_above(environment):
    above, python = environment
    (version,) = run(python, "-m", "megatron_prism", "--version", cwd=above)
    assert version.startswith(f"prism {megatron_prism.__version__}")
    assert any("1 passed" in line for line in run(python, "-m", "pytest", "test_it.py", cwd=above))


def test_the_folder_above_may_be_anywhere_on_the_path(environment):
    above, python = environment
    lines = run(python, "-c", SCRIPT, cwd=above / "elsewhere", PYTHONPATH=str(above))
    assert lines[-1] == "megatron_prism.core.world"


def test_what_is_imported_is_the_clone_and_its_recipes(environment):
    above, python = environment
    code = "import megatron_prism; from megatron_prism.core.jobs import recipe; "
    code += "print(megatron_prism.__file__, *sorted(recipe.shipped()))"
    file, *names = run(python, "-c", code, cwd=above)[-1].split()
    assert Path(file) == above / "megatron_prism" / "megatron_prism" / "__init__.py"
    assert names == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("hook", "settings"),
    [("build_wheel", None), ("build_editable", {"editable_mode": "strict"})],
)
def test_recipes_come_with_the_code(hook, settings, tmp_path):
    """Also in an editable install of links, which has no folder beside the code."""
    clone = copy_to(tmp_path)
    wheel = built(clone, hook, settings)
    files = {name for name in wheel.namelist() if name.startswith("megatron_prism/recipes/")}
    if settings is not None:
        (links,) = (clone / "build").glob("__editable__*")
        files = {str(path.relative_to(links)) for path in links.glob("megatron_prism/recipes/**/*")}
    expected = {f"megatron_prism/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert expected
    assert expected <= files


@pytest.mark.ci
@pytest.mark.skipif(sys.version_info < (3, 12), reason="of the set of packages for Python 3.12")
def test_a_wheel_works_from_a_folder_without_a_checkout(tmp_path):
    """Installed by pip, as a user without a clone has it: its command, recipes and flags."""
    clone = copy_to(tmp_path / "source")
    pytest.importorskip("setuptools.build_meta")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=clone)
    shutil.rmtree(tmp_path / "source")
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("[lL]ib/**/site-packages")
    (packages / "_others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run(*pip, "--no-index", "--force-reinstall", wheel, cwd=tmp_path)

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    prism = tmp_path / "venv" / "bin" / "prism"
    recipe = "guard-gpt_16gpu_tp2pp2vp2_h200"
    assert any(recipe in line for line in run(prism, "recipes", cwd=folder))
    small = ["vocab_size=1000", "hidden_size=64", "ffn_hidden_size=128", "seq_length=64"]
    run(prism, "capture", recipe, "-o", "slices", *small, cwd=folder)
    lines = run(prism, "fit", "slices", "--limit", "80GB", cwd=folder)
    assert any(line.startswith("fits:") for line in lines)
    code = "import megatron_prism; print(megatron_prism.__file__)"
    (place,) = run(python, "-c", code, cwd=folder)
    assert Path(place).is_relative_to(packages)
