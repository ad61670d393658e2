"""Questions that several analyses answer together: does it fit, what differs.

fit.py      whether a job fits, what its peak is made of, what frees enough: ``prism.fit``
compare.py  two jobs, or a job and what was recorded of it: ``prism.compare``
scale.py    what changes between two sizes of a job
"""
