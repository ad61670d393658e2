"""Programs: what a rank does in an iteration, op by op.

collectives.py  ops.py       what each collective means; the kinds of ops
program.py  program_text.py  a rank's ops as arrays and as text; the programs of a world
slices.py  gpu_state.py      folders of captured programs; the GPU that captured
shard.py                     what follows the part of the parameters that a rank updates
call_selector.py             which calls a fault, a breakpoint or a recording means
"""
