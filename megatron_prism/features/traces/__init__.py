"""Traces of real jobs: read, aligned, timed; what varies in them, and how a prediction compares.

events.py    files of torch.profiler, Nsight Systems and the Flight Recorder -> events
pairing.py   calls of a trace beside those of a program
programs.py  events -> programs with times
timing.py    how long ops took
variance.py  spreads between GPUs, iterations and calls
compare.py   traces beside their prediction
report.py    what varies, and a comparison, as text, page and trace
command.py   prism import
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command",
    renderers="report",
    uses="hang",
    api={"import_traces": "programs:import_traces"},
)
