"""The commands of ``prism``, and what they share.

compare.py  fit.py  hang.py  memory.py  patches.py  predict.py  replay.py  sweep.py
verify.py                 a command each
programs.py   capture, show, check; calibrate
traces.py     import
what_ifs.py   what-ifs of a job's own settings, for replay, predict and compare
mcp_server.py  the commands as tools for agents
snapshot.py   memory of a real process, from its snapshot or its error
main.py       the table of all commands and flags; run, emulate, recipes, completion
arguments.py  ``key=value`` words
output.py     tables, JSON, CSV, progress
"""
