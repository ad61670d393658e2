"""The Megatron side: a job becomes an emulated one.

options.py  job_flags.py           what was asked for; flags that features add
launchers.py                       variables of torchrun and srun
launch_line.py  job_line.py        a job's launch line: its launchers, its script
script_options.py  path_map.py     how a script is run dry; paths of another machine
obstacles.py  first_look.py        what stops a job, all of it in one list
real_launch.py                     a launcher that would wait for other hosts
stand_ins.py  unknown_flags.py      files that are not here; flags that Megatron does not know
launch.py  session.py              how a job starts; what it changes in its process
import_hooks.py  patch.py  patches/  what is changed in Megatron, where and why
checkpoint_names.py                what a checkpoint calls a model's tensors
monitor.py  summary.py  exit_status.py  did it train, what does it say, may it exit with 0
missing_modules.py                 packages that a script imports and that are not installed
capture.py  job_arguments.py       a slice of a job, and which job it is of
nvlink_keepalive.py                links of a GPU whose rank runs alone, kept awake
recording.py                       values that steer the program, recorded or given back
device_memory.py                   memory by phase, NCCL's memory held in reserve
part_blocks.py                     what torch counts in each part of a process's life
recipe_job.py  recipe_script.py    a recipe as a job; the script that it starts
script_job.py                      a job, every rank that its world needs
few_microbatches.py                how many microbatches a capture runs, and the others
kept_capture.py                    what a folder of slices was captured from
workers.py  rank_template.py  rank_server.py  processes of ranks; what they share
estimate.py  short_job.py          what a job needs, from the job with few layers
schedule.py  schedule_tape.py      schedules from Megatron's scheduler, without a model
host_benchmark.py                  how fast this host is
"""
