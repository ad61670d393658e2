"""Turn a running rank into a program; Megatron runs unchanged, nothing here knows a schedule.

recorder.py      collects the ops, also of a rank whose virtual peers take their time
fields.py        what an op says of a call
events.py        streams, events and host waits that the job uses
shapes_meter.py  flops and bytes of what runs between calls
owners.py        whose memory comes and goes
kernel_times.py  device times without the host's delays; where the device runs through
measurements.py  one program of several iterations; iterations that are only timed
"""
