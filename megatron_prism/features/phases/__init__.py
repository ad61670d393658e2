"""Phases: what training and generating on the same GPUs take, one after the other.

steps.py      a YAML file of phases -> steps
footprint.py  slices -> what a rank's process holds, and what stays of it when parts are moved out
phases.py     steps and footprints -> peak and rest of each phase
report.py     the same as text
command.py    prism phases
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command", renderers="report")
