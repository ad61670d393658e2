"""What stops a job before any rank trains, all of it in one list.

arguments_alone.py  stands for a script that is not here, while its arguments are checked
first_look.py       a job's arguments, looked at before a model is built
obstacles.py        the list
missing_modules.py  packages that a script imports and that are not installed
stand_ins.py        files that are not on this machine, and what stands for them
unknown_flags.py    flags that this Megatron does not know (removed_flags.json: when they went)
"""
