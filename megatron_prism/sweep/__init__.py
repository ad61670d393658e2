"""The best layout of a job for a cluster: which layouts there are, which run, how fast they are.

space.py     axes -> points
layout.py    a point's job: a recipe's, or a stock script's
evaluate.py  slices of a point, captured once and reused on local processes; its times and memory
sweep.py     all of it, resumable: what cannot run and why, the order, ties: ``prism.sweep``
"""
