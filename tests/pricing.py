"""Priced worlds whose calls take what a test says."""

import dataclasses

import numpy as np

from megatron_prism.replay.priced_graph import price


def priced(programs, meetings=None):
    """``programs`` on h200; ``meetings``: ns of every call, or of all; None: as modelled."""
    found = price(programs, machine="h200")
    if meetings is None:
        return found
    ns = np.zeros_like(found.prices.meetings) + np.asarray(meetings)
    return dataclasses.replace(found, prices=dataclasses.replace(found.prices, meetings=ns))
