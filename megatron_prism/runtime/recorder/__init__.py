"""Turn a running rank into a program; Megatron runs unchanged, nothing here knows a schedule.

recorder.py      collects the ops: calls, streams, events, host waits, also where virtual peers take
                 their time
repeats.py       microbatches and stages that are written down again instead of run
held_tensors.py  tensors that a model keeps from one microbatch until the next
python_calls.py  what a host takes for a segment, by its calls of Python
shapes_meter.py  flops and bytes of what runs between calls
owners.py        whose memory comes and goes
kernel_times.py  device times without the host's delays; where the device runs through
gpu_clock.py     the SM clock meanwhile
measurements.py  one program of several iterations; iterations that are only timed
"""
