"""A slice: what one rank does in an iteration, recorded while it runs.

capture.py           record a rank and write its slice
few_microbatches.py  how many microbatches a capture runs, and the others
kept_capture.py      what a folder of slices was captured from
part_blocks.py       what torch counts in each part of a process's life
host_benchmark.py    how fast this host issues work
nvlink_keepalive.py  links of a GPU whose rank runs alone, kept awake
"""
