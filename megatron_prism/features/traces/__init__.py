"""Traces of real jobs: read, turned into programs with times, and held against a prediction.

events.py    what was recorded of one rank: Kineto, Nsight Systems, Flight Recorder
timing.py    one rank's iterations of it: calls, and times between calls
pairing.py   which traced call is which captured one
programs.py  programs with times, as a capture writes them: ``prism.import_traces``
variance.py  between which ranks and over what times vary, and which rank is slow
compare.py   a prediction beside the real job
report.py    what varies, and a comparison, as text, page and trace
comparers.py traces beside slices, for prism.compare
files.py     the same on a command line
command.py   prism import
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command",
    renderers="report",
    files="files",
    comparers="comparers",
    uses="hang",
    api={"import_traces": "programs:import_traces"},
)
