"""Baselines of releases that knew fewer kinds of memory, and figures that do not add up."""

import json

import numpy as np
import pytest

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.program import Builder, Programs
from megatron_prism.core.world import World
from megatron_prism.features.guard import baseline
from megatron_prism.memory.job_peaks import peak_memory


def stored(folder, change):
    """A baseline of one rank, changed in its file."""
    made = Builder()
    made.memory(0, 2048, "param:all")
    made.add("compute", phase="forward", microbatch=0)
    made.memory(1, 1024, "act:layer @a.py:1")
    made.add("compute", phase="backward", microbatch=0)
    made.memory(1, -1024)
    made.add("compute", phase="optimizer")
    classes = np.zeros(1, dtype=np.int32)
    programs = Programs(World(1), (made.build(0),), classes, source={"tier": "meta"})
    path = baseline.save(peak_memory(programs), folder / "memory.json")
    value = json.loads(path.read_text())
    change(value["classes"])
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("kind", ["graph", "comm", "tmp"])
def test_a_release_that_knew_fewer_kinds_is_read(tmp_path, kind):
    def forget(classes):
        for figures in classes.values():
            num_bytes = figures["by_category"].pop(kind, 0)
            figures["by_category"]["other"] += num_bytes

    read = baseline.load(stored(tmp_path, forget))
    assert all(kind not in figures["by_category"] for figures in read.classes.values())


def test_a_kind_that_is_not_known_is_refused_by_name(tmp_path):
    def add(classes):
        for figures in classes.values():
            figures["by_category"]["dreams"] = 0

    with pytest.raises(PrismError, match="dreams"):
        baseline.load(stored(tmp_path, add))


def test_what_does_not_add_up_is_refused(tmp_path):
    def lose(classes):
        for figures in classes.values():
            largest = max(figures["by_category"], key=figures["by_category"].get)
            del figures["by_category"][largest]

    with pytest.raises(PrismError, match="do not add up"):
        baseline.load(stored(tmp_path, lose))
