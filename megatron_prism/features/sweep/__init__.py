"""Sweep: which layouts of a job there are, which of them run, and how fast they are.

space.py          axes -> points
layout.py         a point's job: a recipe's, or a stock script's
recipe_server.py  captures of many ranks from one process
evaluate.py       slices of a point, captured once and reused; its times and memory
sweep.py          all of it, resumable: what cannot run and why, the order, ties
report.py         a sweep as text, CSV and page
command.py        prism sweep
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command", renderers="report", uses="predict", api={"sweep": "sweep:sweep"}
)
