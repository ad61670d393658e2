"""Priced worlds whose calls take what a test says."""

import dataclasses

import numpy as np

from megatron_prism.replay.priced_graph import price
from megatron_prism.replay.timeline import build_timeline


def priced(programs, collective_ns=None):
    """``programs`` on h200; ``collective_ns``: ns of every call, or of all; None: as modelled."""
    found = price(programs, machine="h200")
    if collective_ns is None:
        return found
    ns = np.zeros_like(found.prices.collective_ns) + np.asarray(collective_ns)
    prices = dataclasses.replace(found.prices, collective_ns=ns)
    return dataclasses.replace(found, timeline=build_timeline(found.graph, prices))
