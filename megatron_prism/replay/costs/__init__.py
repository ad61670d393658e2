"""How long each op takes, and who says so.

    prices.py           a price for every op of a graph, with its provenance
    provenance.py       what a duration rests on, as an enum
    collectives.py      calls: calibrations, what they and computing cost each other, a model of
                        NCCL
    kernels.py          segments that never ran on a GPU: measured kernels, rooflines
    precision.py        in which type products compute, and what MFU is a share of
    host.py             how long the host takes to issue an op
    host_work.py        what the host computes of large tensors, and copies to it and from it
    host_index.py       how fast a host is, by a benchmark or by traces
    measured_hosts.py   hosts whose index was measured, each once
    machine.py          rates and links of machines
    machines/ ops/ calls/   its data, a file for each GPU: rates and links, measured kernels,
                        measured calls; a new generation of GPUs is named in machine.py,
                        kernels.py, collectives.py and host_work.py, too
    nccl_settings.py    NCCL's environment: which ways its calls may go

An op without any basis is refused.
"""

from __future__ import annotations

from megatron_prism.replay.costs.prices import Prices, price_ops, relabelled

__all__ = ["Prices", "price_ops", "relabelled"]
