"""Snapshots: memory of real processes, explained and held against the slices of their job.

snapshot.py   torch's snapshot as a program; beside slices, beside an earlier one
owners.py     whose blocks are, where a single stack does not say it
comparers.py  snapshots for prism.compare
files.py      prism fit SNAPSHOT, prism compare SNAPSHOT SLICES
report.py     the same as text and page
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(renderers="report", files="files", comparers="comparers")
