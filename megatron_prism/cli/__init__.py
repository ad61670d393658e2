"""The commands of ``prism``, in a file of their name, and what they share.

programs.py   capture, show, diff, classes, check; calibrate
traces.py     import, compare
main.py       the table of all commands and flags; run, emulate, recipes, completion
arguments.py  ``key=value`` words
output.py     tables, JSON, CSV, progress
"""
