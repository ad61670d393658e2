"""What everything is made of: world, groups, collectives, programs, recipes, errors; no torch.

world.py  groups.py         ranks by coordinates and selectors; the members of every group
collectives.py  ops.py      what each collective means; the kinds of ops
call_selector.py            which calls a fault, a breakpoint or a recording means
fault_plan.py               faults, by name and parameters
feature.py                  what a feature is, and the features that are installed
rendering.py                which class writes a result
comparing.py                what is compared beside two jobs
program.py  program_text.py  what a rank does in an iteration, as arrays and as text
slices.py                   folders of captured programs
gpu_state.py                clock, power and heat of the GPU that captured
shard.py                    what follows the part of the parameters that a rank updates
recipe.py  model_flops.py   jobs in YAML, of Megatron's own flags; what their models compute
job_settings.py             what tells one job from another
code_files.py               whose code a file is, by folders of imported packages
megatron_source.py          releases of megatron-core: tested, installed, what its source defines
foreign.py                  every file that somebody else may have written is read here
files.py                    files and folders of results that appear whole or not at all
columns.py                  lines and tables of 80 columns
bare_engine.py              Transformer Engine without its library, out of sight
process_changes.py          changes of a process that can be undone
errors.py  messages.py  units.py  errors with a fix; lines of progress; durations, sizes, rates
"""
