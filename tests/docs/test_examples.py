"""What lies in examples/ runs: the notebook; the image's files are there.

The batch script runs in tests/megatron/test_pretrain.py.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# IPython is no dependency: what the notebook takes from it
DISPLAY = """import sys, types
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
display.IFrame = lambda page, **size: print("shown:", page)
"""


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="once is enough")
def test_the_notebook_goes_from_capture_to_picture(tmp_path):
    book = json.loads((EXAMPLES / "from_capture_to_picture.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    code = "\n".join([DISPLAY, *cells])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "shown: notebook/replay.html" in done.stdout
    assert (tmp_path / "notebook/replay.html").read_text(encoding="utf-8").startswith("<!doctype")
    assert "HEALTHY" in done.stdout


def test_the_image_takes_what_is_there():
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    root = EXAMPLES.parent
    (constraints,) = re.findall(r"-c /opt/megatron_prism/(\S+)", text)
    pinned = (root / constraints).read_text(encoding="utf-8")
    (torch,) = re.findall(r"install.* (torch==\S+)", text)
    assert f"\n{torch}\n" in pinned
    ignore = (EXAMPLES / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    taken = {word[1:] for word in ignore if word.startswith("!")}
    assert all((root / name).exists() for name in taken)
    assert {"constraints", "megatron_prism", "recipes", "setup.py", "README.md"} <= taken
