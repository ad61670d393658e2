"""What holds for all tests: hypothesis measures no deadlines, the cores may be busy with others."""

import sys
from types import ModuleType

import pytest
from hypothesis import settings

settings.register_profile("busy cores", deadline=None)
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
