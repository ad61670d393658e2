"""When everything happens: programs and prices -> a timeline.

priced_graph.py  WhatIf, and load, check, price (overlaps included) and replay: the one way
                 from programs to times
timeline.py      times of all ops, critical path, idle time by cause
costs/           how long each op takes
overlap.py       computing and calls that slow each other down
network.py       calls that share links
whatif.py        what each field of a WhatIf changes
replicas.py      more or fewer replicas: calls, the optimizer's work and its memory
microbatches/    other numbers of microbatches, in the order of Megatron's scheduler
drawn_steps.py   steps of a job whose inputs differ from iteration to iteration
layers.py        the iteration of a job with many equal layers, from the job with few
uncertainty/     how far off an iteration may be, and what an answer says of it
rates.py         tokens and flops per second, MFU
pricing.py       a job of any kind, priced under one machine and calibration
"""
