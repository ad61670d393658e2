"""Peak memory of every class of ranks, from programs alone.

peaks.py         peaks, and what is alive there
blocks.py        its segments and blocks, and where they are too much
estimates.py     what nobody has measured of it
recipe_bound.py  the least that a rank of a recipe needs
allocator.py     what PyTorch's caching allocator reserves for it
compiled_replay.py  the same rules compiled, for thousands of replays
host_lead.py     how far the host is ahead of the device
steady.py        whether a later iteration runs out where the first ones fit
nccl_buffers.py  what NCCL's communicators take beside it (device_memory/: a file for each GPU)
part_peaks.py    peaks of the parts of a process's life
saved_bytes.py   what a rank writes into a checkpoint
host_need.py     what the job keeps in its hosts' memory
layers.py        the peak of a rank with many equal layers, from the rank with few
routing.py       peaks of an MoE job whose routing is drawn from a law
job_peaks.py     peaks of all classes of a job's ranks: ``prism.peak_memory``
peak_changes.py  what changes between two such reports
"""
