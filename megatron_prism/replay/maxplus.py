"""When does everything happen if nothing is in anybody's way?  The longest path, exactly.

In : a Dag and a duration for every node.  Out: start and end of every node.  A node starts when the
last of its predecessors has ended; that is all (max-plus algebra: Baccelli et al. 1992, ch. 2).
Integer nanoseconds, so equal inputs give equal outputs to the last digit.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.replay import kernels
from megatron_prism.replay.dag import Dag

__all__ = ["critical_path", "evaluate"]


def evaluate(dag: Dag, durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of every node in ns, int64 [n] each; ``durations`` int64 [n], none negative.

    PrismError if some nodes wait for each other.
    """
    known = "order" in vars(dag)
    if not known:  # one pass finds the order and the times
        first, begin, end = kernels.timed(np.diff(dag.start), *dag.followers, durations)
        vars(dag)["order"] = first
    if len(dag.order) < len(dag):
        raise PrismError(
            f"the job hangs: {len(dag) - len(dag.order)} steps wait for each other",
            fix="prism check names calls that do not match; prism hang draws who waits for whom",
        )
    if known:
        return kernels.longest(dag.order, dag.start, dag.before, durations)
    return begin, end


def critical_path(dag: Dag, end: np.ndarray) -> list[int]:
    """Nodes from the beginning to the last end, each the reason for the start of the next."""
    if not len(dag):
        return []
    node = int(np.argmax(end))
    path = [node]
    while (previous := dag.predecessors(node)).size:
        node = int(previous[np.argmax(end[previous])])
        path.append(node)
    return path[::-1]
