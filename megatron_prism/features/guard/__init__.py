"""Guard: the peaks of every class of ranks, held against a baseline (``prism memory``, pytest).

baseline.py       a report of peaks as a file
comparers.py      a baseline's file as a side of prism compare
pytest_plugin.py  the marker and the fixture prism_memory
command.py        prism memory
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command",
    comparers="comparers",
    pytest_plugin="pytest_plugin",
    uses="snapshots",
)
