"""The world graph: classes of ranks, how calls match, where a job stalls, how two runs differ.

classes.py      equivalent ranks
matching.py     which calls meet, and what does not fit
world_graph.py  the programs of all ranks joined over their classes
issue_graph.py  what waits for what, in a rank and between ranks
loops.py        loops over its nodes, compiled where numba is installed
stall.py        programs with faults, run until nothing moves
difference.py   two runs of one rank, op by op
"""
