"""Reshard: whether a checkpoint fits another layout of the job, before a GPU is asked for.

Loading itself is planned by Megatron's own code under emulate/patches (planned_reads,
checkpoints), for the format torch_dist.

plan.py      what ranks ask of the checkpoint -> what fits, what is read, how long it takes
metadata.py  names, shapes and files of a checkpoint, without torch
flags.py     --prism-plan-load: a rank ends when it has planned its part
planned_rank.py  what such a rank tells
ranks.py     the ranks that are planned, each in a worker process
report.py    the plan as text and rows
command.py   prism reshard
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command", flags="flags", renderers="report")
