"""Who made a job hang: dumps or programs in, a verdict out; faults to plant.

diagnose.py      all ways to a verdict: ``prism.hang``
dumps.py         Flight Recorder dumps as entries, groups and status
log_lines.py     the lines of logs that say something, as a table, and whose they are
log_errors.py    exceptions in a rank's log: those that ended it, those that it handled
attempts.py      what earlier attempts of a job printed, left out
logs.py          what the job printed, as dumps and events
fingerprints.py  whose call differs, by torch's own check
ras.py           what NCCL's RAS reports
consistency.py   dumps of another job or of another moment
state.py         outstanding calls of every rank
mismatch.py      ranks whose call differs from that of the members of its group
siblings.py      ranks that left the order in which their siblings call
waits.py         who waits for whom, and where that ends
analyze.py       from all of these to culprits and victims
verdict.py       the verdict
alignment.py     where every rank stood in its program
hypotheses.py    single faults that leave exactly these dumps, and the verdict on the programs
export.py        dumps that a stalled job would leave
live.py          a job that still runs on this host
fault_plan.py    faults, by name and parameters
fault_planting.py  faults put into programs
"""
