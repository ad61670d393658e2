"""Calibrate: how long calls take among this host's devices, and how fast the host is.

calibrate.py   processes that make calls, and what they took
nccl_tests.py  a calibration from the output of nccl-tests
command.py     prism calibrate, also of a host alone and of what nccl-tests measured
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command")
