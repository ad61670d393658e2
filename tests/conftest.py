"""What holds for all tests: hypothesis measures no deadlines, the cores may be busy with others."""

import os
import sys
from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("busy cores", deadline=None)
# for trees that differ in their folders alone: the same examples were tried in the whole tree
settings.register_profile("few examples", deadline=None, max_examples=5)
settings.load_profile("busy cores")


@pytest.fixture
def imported_at(monkeypatch):
    """Pretend that a package was imported from a folder: a fake module that has its path alone."""

    def pretend(package, folder):
        module = ModuleType(package)
        module.__path__ = [folder]
        monkeypatch.setitem(sys.modules, package, module)

    return pretend


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the files of tests/golden/json anew"
    )


def pytest_collection_modifyitems(config, items):
    """Tests in a folder ``gpu`` need a device; those of .ci/run wait for ``-m ci``."""
    if "ci" not in config.getoption("markexpr").split():
        of_ci = [item for item in items if item.get_closest_marker("ci")]
        items[:] = [item for item in items if not item.get_closest_marker("ci")]
        config.hook.pytest_deselected(items=of_ci)
    on_device = [item for item in items if "gpu" in item.path.parts]
    if not on_device:
        return
    # Two ranks of one process wait for each other on one device, which takes a queue for each.
    # With one hardware queue for all streams, which Megatron's jobs ask for, the second rank's
    # kernel would be behind the first's for good.  The driver reads the variable when it starts.
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    import torch

    absent = not torch.cuda.is_available()
    for item in on_device:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.skipif(absent, reason="needs a GPU"))
