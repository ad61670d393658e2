"""Virtual ranks that answer on time, on GPUs.

pacer.py          holds each call until the virtual peer would have answered
device.py         on the device: one kernel a call (kernels.cu)
moves.py          what that kernel moves
shared_memory.py  how local ranks of one host know of each other's calls
driver.py         libcuda
"""
