"""Verify: whether a layout computes what one rank alone computes, on a small copy of the job.

shrink.py   the job's parsed arguments -> those of the small copy, of its reference, of a part
record.py   what a rank keeps: losses, gradients, norms, parameters, by names of checkpoints
ranks.py    processes of every rank of a small world, over gloo
wide_floats.py  float64 in place of float32, for a whole process
kept.py     what the ranks of a run have kept, put together by name
compare.py  what two runs keep -> the first difference in the order of execution
verdict.py  a job and its reference, and the flag that makes the difference
command.py  prism verify
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command")
