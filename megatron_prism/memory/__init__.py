"""Peak memory of every class of ranks, from programs alone, and baselines that guard it.

peaks.py         peaks, and what is alive there
allocator.py     what PyTorch's caching allocator reserves for it
nccl_buffers.py  what NCCL's communicators take beside it
baseline.py      peaks kept in a file, and compared: ``prism.peak_memory``
"""
