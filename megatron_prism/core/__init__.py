"""What everything is made of: worlds, programs, jobs, files, errors; no torch.

world.py  groups.py         ranks by coordinates and selectors; the members of every group
programs/                   what ranks do: ops, programs, folders of slices
jobs/                       what ranks are started with: recipes, settings, releases of Megatron
feature.py                  what a feature is, and the features that are installed
rendering.py                which class writes a result
comparing.py                what is compared beside two jobs
code_files.py               whose code a file is, by folders of imported packages
foreign.py                  every file that somebody else may have written is read here
files.py                    files and folders of results that appear whole or not at all
columns.py                  lines and tables of 80 columns
bare_engine.py              Transformer Engine without its library, out of sight
process_changes.py          changes of a process that can be undone
errors.py  messages.py  units.py  errors with a fix; lines of progress; durations, sizes, rates
"""
