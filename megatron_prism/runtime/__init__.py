"""The virtual world on the torch side: ``torch.distributed`` with absent ranks; no Megatron.

virtual_world.py      starts and stops a virtual world, counts its traffic
process_group.py      the backend that answers every collective
torch_distributed.py  object collectives, group creation, positions in batched calls
answers.py            what a collective gives one local rank, or several
values.py             what tensors of virtual peers hold, also where mirrors are wrong
recorded_values.py    values that steer the program, of a real run, given to a rank alone
known_values.py       what is known of values on tier meta
uniform_values.py     what holds of all elements of a tensor there: that numbers are finite
cuda_driver.py        libcuda: launches, events, and memory that torch does not allocate
listeners.py          interfaces of what follows the training and the calls
recorder/             a running rank -> a program
devices/              tiers: CUDA, CPU, and shapes without data (meta)
te_kernels/           Transformer Engine's own Python, on kernels that only have shapes
"""
