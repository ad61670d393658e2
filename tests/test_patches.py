"""The patches: small, and they fit the release they are named after."""

import os
import pathlib
import subprocess

import pytest

PATCHES = sorted((pathlib.Path(__file__).parent.parent / "patches").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_patch_only_attaches(patch):
    lines = patch.read_text().splitlines()
    added = [x[1:] for x in lines if x.startswith("+") and not x.startswith("+++")]
    removed = [x for x in lines if x.startswith("-") and not x.startswith("---")]
    code = [x for x in added if x and not x.startswith("#")]
    assert removed == []
    assert code == ["import megatron_prism", "megatron_prism.attach()"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_a_patch_fits_its_release(patch):
    checkout = os.environ.get("PRISM_MEGATRON")
    if not checkout:
        pytest.skip("set PRISM_MEGATRON to a Megatron-LM checkout")
    info = pathlib.Path(checkout, "megatron/core/package_info.py").read_text()
    release = patch.stem.removeprefix("core_v").split(".")[:2]
    if f"MINOR = {release[1]}\n" not in info:
        pytest.skip(f"the checkout is not {patch.stem}")
    subprocess.run(["patch", "--dry-run", "-p1", "-i", str(patch)], cwd=checkout, check=True)
