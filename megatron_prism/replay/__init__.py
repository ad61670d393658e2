"""When everything happens: programs and prices -> a timeline.

priced_graph.py  WhatIf, and load, check, price (overlaps included) and replay: the one way
                 from programs to times
overlap.py       computing and calls that slow each other down
timeline.py      times of all ops, critical path, idle time by cause
interval.py      how far off an iteration may be, and why
headline.py      what an answer says first: one number, or a range over hosts
variations.py    the iteration if some durations were others
differences.py   which of several jobs is faster, where what is unknown is the same for all
network.py       calls that share links
whatif.py        what each field of a WhatIf changes
layers.py        the iteration of a job with many equal layers, from the job with few
replicas.py      more or fewer replicas: calls, the optimizer's work and its memory
pricing.py       a job of any kind, priced under one machine and calibration
rates.py         tokens and flops per second, MFU
microbatches/    other numbers of microbatches, in the order of Megatron's scheduler
message_buffers.py  when Python drops the tensors of messages
plausibility.py  answers that cannot be, refused as faults of ours
answer_times.py  when virtual ranks answer local ones
"""
