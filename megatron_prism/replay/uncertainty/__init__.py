"""How far off an iteration may be, and what an answer says of it.

interval.py      its range on the machine of the job, and why
data_loader.py   masks that a data loader makes, and how long that may take
variations.py    the iteration if some durations were others
differences.py   which of several jobs is faster, where what is unknown is the same for all
headline.py      what an answer says first: one number, or a range over hosts
plausibility.py  answers that cannot be, refused as faults of ours
"""
