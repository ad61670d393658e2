"""How long does each op take, and who says so?

``Prices`` are what replay needs; ``price`` makes them from a graph, a collective model and the
segments' own measurements; ``host`` says how long the host takes to issue it, ``op_table`` and
``compute`` price segments that never ran.  ``communicators`` and ``connected`` are about NCCL's
device memory.  Every price has a provenance; an op without any basis is refused.
"""

from __future__ import annotations

from megatron_prism.replay.costs.prices import ERRORS, Prices, price

__all__ = ["ERRORS", "Prices", "price"]
