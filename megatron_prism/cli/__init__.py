"""The commands of ``prism``, and what they share.

hang.py  memory.py  patches.py  predict.py  replay.py  sweep.py  verify.py  world.py
              a command each
programs.py   capture, show, diff, classes, check; calibrate
traces.py     import, compare
snapshot.py   memory of a real process, from its snapshot or its error
main.py       the table of all commands and flags; run, emulate, recipes, completion
arguments.py  ``key=value`` words
output.py     tables, JSON, CSV, progress
"""
