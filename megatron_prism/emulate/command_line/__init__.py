"""What a job was started with: its launch line, Megatron's flags and prism's own.

launch_line.py  job_line.py     the launchers of a line, its script, our flags for its world
launchers.py    real_launch.py  variables of torchrun and srun; a launcher that waits for hosts
script_options.py  path_map.py  how a shell script is run dry; paths of another machine
options.py      job_flags.py    the ``--prism-*`` options; flags that features add
job_arguments.py                Megatron's parsed arguments: which job it is
"""
