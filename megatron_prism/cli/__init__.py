"""The command ``prism``: parse, dispatch, print; no command of a feature is named here.

main.py              reads the words, calls a command, delivers its answer
command.py           what a command is, and the arguments that several share
jobs.py              the commands of core: run, emulate, recipes
arguments.py         ``key=value`` words
output.py            tables, JSON, CSV, progress
job_slices.py        the slices of a launch line, captured
what_ifs.py          what-ifs of a job's own settings, for replay, predict and compare
file_answers.py      files of other kinds, about which a feature answers
memory_arguments.py  arguments of the commands that measure memory
memory_output.py     what those print of a process
"""
