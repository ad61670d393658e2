"""Dumps as real jobs left them, and what is judged of them."""

import functools
import pickle

from helpers import production
from helpers.production import ACTIVE, stands

from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import dumps, export
from megatron_prism.features.hang.dumps import DumpSet
from megatron_prism.graph import stall

FULL = {"active_only": False, "stacks": True}
GIL = stands(10, part="3", at=40)


def values(fault, how, change=None):
    """rank -> its dump."""
    return pickle.loads(_values(fault, how["active_only"], change))


@functools.cache
def _values(fault, active_only, change):
    it = production.job("moe")
    if change is not None:
        change(it)
    faults = fault(it) or {}
    how = ACTIVE if active_only else FULL
    state = stall.run_until_stalled(it.programs(), faults)
    return pickle.dumps(dict(export.dumps_of(state, **how)))


def judged(made):
    """(who is named, the verdict)."""
    found = hang.diagnose_dumps(DumpSet({r: dumps.of_value(v, r) for r, v in made.items()}))
    return {c.rank for c in found.culprits}, found


def said(found, words):
    return [line for line in found.evidence if words in line]
