"""Faults of a running job: make them happen, and check every call against programs or peers.

flags.py           --prism-fault…, --prism-world, --prism-mismatch, --prism-check-order

options.py         what the flags say
fault_injector.py  makes the faults of one rank happen
call_guard.py      makes the rank's calls, and holds them against programs and peers
call_check.py      would the peers make this call at all?
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags", uses="hang")
