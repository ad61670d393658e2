"""Pacing: virtual ranks answer when they would, so that iterations last as long as in the job.

flags.py          --prism-pace, --prism-slow

options.py        what the flags say
pace.py           slices of the job -> when virtual ranks answer; what became of it
answer_times.py   when virtual ranks answer local ones: a few sums and one maximum
pacer.py          holds each call until the virtual peer would have answered
device.py         on the device: one kernel a call (kernels.cu)
moves.py          what that kernel moves
shared_memory.py  how local ranks of one host know of each other's calls
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags")
