"""The best layout of a job for a cluster: which layouts there are, which run, how fast they are.

space.py     axes -> points
layout.py    a point's job: a recipe's, or a stock script's
prune.py     why a point cannot run: Megatron's checks, a lower bound of its memory
evaluate.py  slices of a point, captured once and reused; its times and its memory
engine.py    families of points on local processes
rank.py      the order of points, ties, fronts, and why one beats another
sweep.py     all of it, resumable: ``prism.sweep``
"""
