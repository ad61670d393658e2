"""One emulated rank in its process, from its launch to its exit status.

launch.py         turn a job's process into an emulated rank, or answer for its launcher
session.py        the run of a rank (``Run``), and what it changes in its process
monitor.py        did the rank train; the parts of a process's life (``PARTS``)
device_memory.py  memory by phase, NCCL's memory held in reserve
recording.py      values that steer the program, recorded or given back
summary.py        the banner, the summary and the JSON file of a run
exit_status.py    a process that did not train does not end with 0
"""
