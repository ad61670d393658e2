"""The pytest plugin: a header line, and the plug-ins of features, such as the guard of memory.

Loaded by every pytest run of the environment, so a plug-in imports what it needs when it is used.
"""

from __future__ import annotations

import pytest

from megatron_prism import __version__
from megatron_prism.core import feature


def pytest_report_header() -> str:
    """Which version's emulation the tests may use; see ``megatron_prism.__init__`` for the map."""
    return f"megatron_prism: {__version__}"


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plug-ins of features, which add their own options."""
    for module in feature.modules("pytest_plugin"):
        pluginmanager.register(module, module.__name__)
