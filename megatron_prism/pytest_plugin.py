"""What does pytest get from an installed megatron_prism?  For now one line that says it is there.

Loaded by every pytest run of the environment, so it imports nothing.
"""

from megatron_prism import __version__

__all__ = ["pytest_report_header"]


def pytest_report_header() -> str:
    """Which version's emulation the tests may use; see ``megatron_prism.__init__`` for the map."""
    return f"megatron_prism: {__version__}"
