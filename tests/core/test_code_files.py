"""Whose code a file is: by folders of packages, whatever the folders above them are called."""

from pathlib import Path

import pytest

import megatron_prism
from megatron_prism.core import code_files

ROOT = Path(megatron_prism.__file__).parent


def test_ours_is_what_is_in_our_own_folder():
    assert code_files.is_ours(str(ROOT / "core" / "world.py"))
    assert code_files.below_prism(str(ROOT / "core" / "world.py")) == "core/world.py"
    assert not code_files.is_ours(str(ROOT.parent / "tests" / "core" / "test_code_files.py"))
    # a sibling whose name begins like ours, a clone's parent, a user's folder
    assert not code_files.is_ours(f"{ROOT}_extras/train.py")
    assert not code_files.is_ours("/home/me/megatron_prism/train.py")


@pytest.mark.parametrize(
    ("file", "inside"),
    [
        ("/a/megatron/core/x/y.py", "core/x/y.py"),
        ("/b/site-packages/megatron/training/z.py", "training/z.py"),
        ("/a/megatron_energy/train.py", None),
        ("/home/me/megatron/core/train.py", None),
    ],
)
def test_a_package_may_lie_in_several_folders(file, inside, imported_at, monkeypatch):
    imported_at("megatron", "/a/megatron")
    code_files.sys.modules["megatron"].__path__.append("/b/site-packages/megatron")
    assert code_files.below_package("megatron", file) == inside


def test_a_package_that_nothing_imported_has_no_files():
    assert code_files.below_package("no_such_package_here", "/a/no_such_package_here/x.py") is None


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("/usr/local/lib/python3.12/dist-packages/torch/nn/x.py", "torch/nn/x.py"),
        ("/w/site-packages/a/.venv/lib/python3.11/site-packages/b/x.py", "b/x.py"),
        ("C:\\env\\Lib\\site-packages\\b\\x.py", "b/x.py"),
        ("site-packages/b/x.py", "b/x.py"),
        ("/home/me/train.py", "/home/me/train.py"),
        ("/home/me/my_site-packages/train.py", "/home/me/my_site-packages/train.py"),
    ],
)
def test_a_path_of_another_machine_is_shown_from_its_package_on(file, short):
    assert code_files.without_environment(file) == short
    assert code_files.is_installed(file) == (file.replace("\\", "/") != short)
