"""What numba keeps on disk is of the constants of today, also of those of other modules."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")
pytestmark = pytest.mark.slow

LOOP = """
from constants import STEP, helper

def count(values):
    for place in range(len(values)):
        values[place] += STEP + helper()
"""
PROGRAM = """
import numpy as np
from loop import count
from megatron_prism.graph.loops import compiled_function

values = np.zeros(2, dtype=np.int64)
compiled = compiled_function(count)
compiled(values)
print(values.tolist(), sum(compiled.stats.cache_hits.values()))
"""


def run(folder):
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, str(folder / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_constant_of_another_module_is_never_an_old_one(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "program.py").write_text(PROGRAM)
    constants = tmp_path / "constants.py"
    constants.write_text("STEP = 3\ndef helper():\n    return 0\n")
    assert run(tmp_path) == "[3, 3] 0"
    assert run(tmp_path) == "[3, 3] 1"
    # the file of the loop stays as it is
    constants.write_text("STEP = 5\ndef helper():\n    return 0\n")
    assert run(tmp_path) == "[5, 5] 0"
    constants.write_text("STEP = 5\ndef helper():\n    return 10\n")
    assert run(tmp_path) == "[15, 15] 0"
