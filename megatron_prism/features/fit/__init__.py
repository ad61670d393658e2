"""Fit: whether a job fits into its GPUs, what the peak is made of, and what makes it fit.

Kinds of memory are those of memory/peaks.py (KINDS).

fit.py           programs and a limit -> Fit
op_times.py      what ops take the host and the device, for the host's lead
remedies.py      what recomputation frees at the peak, and the peak that decides then
candidates.py    changes that only a new capture weighs
trials.py        the job captured again with these, and what it then needs
loader_masks.py  the data loader's mask, which a flag leaves out
oom.py           which request of the slices an out-of-memory error is about
oom_answer.py    the same, printed
section.py       what other features say, too
report.py        a Fit as text and page
command.py       prism fit
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command", renderers="report", api={"Fit": "fit:Fit", "fit": "fit:fit"})
