"""The Megatron side: a job becomes an emulated one.

command_line/                   what a job was started with: launch line, flags, options
preflight/                      what stops a job before any rank trains
rank/                           one emulated rank in its process: launch, session, monitor, summary
patches/  patch.py              what is changed in Megatron, where and why
import_hooks.py                 when: right after a module of Megatron is imported
capture/                        a slice of a rank, recorded while it runs
jobs/                           every rank that a job's world needs: scripts, recipes, estimates
processes/                      worker processes of ranks; what they share
schedule.py  schedule_tape.py   schedules from Megatron's scheduler, without a model
checkpoint_names.py             what a checkpoint calls a model's tensors
"""
