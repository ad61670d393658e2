"""When do virtual ranks answer a local one?  The rest of the world as a few sums and one maximum.

In : a WorldGraph in which every local rank is a class of its own (``whatif.apart``), and Prices.
Out: Releases.  A *local interaction* is a meeting of a local rank with at least one virtual one.
Between local interactions virtual ranks meet only each other and compute for fixed times, so the
end E of interaction j is

    E_j = max(T_j + c_j, max over terms (i, w): E_i + w)

where T_j is when the last of its local members comes to it, c_j what the meeting costs, and w the
longest way from the end of i to the end of j over virtual ranks alone that passes no other local
interaction (the transfer of a max-plus system with the local ranks cut out: Baccelli et al. 1992,
ch. 2).  Cutting at the *ends* of interactions keeps the terms few: whoever met the local rank since
is behind that meeting.

Pruning (``transfer``).  A term (i, w) is dropped if another term (k, v) of the same maximum always
reaches it: E_k >= E_i + b and b + v >= w.  Bounds b are longest ways from i to k over interactions:
through the terms of each, and through what the local rank itself waits for before it comes to one
(its computing taken as 0).  Dropping such a term changes no maximum whatever the local ranks do,
since computing never takes less than 0.

Two or three iterations are followed, and the last one's terms are the table; terms that reach into
earlier iterations say how many back.  A virtual rank that nothing holds back for so long (it never
waits for whatever waits for the local ranks) has a clock of its own, which no such table holds:
``loose`` counts the interactions that such a rank could delay.  Megatron's iterations have none:
the gradient norm joins all ranks of a model, the gradients all replicas.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_prism.core.artefact import whole_file
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import transfer
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.dag import MEET, Dag, build
from megatron_prism.replay.timeline import durations_of
from megatron_prism.replay.transfer import START

__all__ = ["Releases", "cuts", "kept", "releases"]

_UNROLLED = (2, 3)  # iterations; the second where two do not settle


@dataclass(frozen=True)
class Releases:
    """The interactions of the local ranks in one iteration, in an order in which they can happen.

    local  : the local ranks
    member : int32 [members], index into ``local``: who takes part in which interaction
    op     : int32 [members], its op there
    of     : int32 [members], the interaction
    own    : int64 [interactions], ns from the last local arrival to the end: c_j above
    loose  : how many interactions also depend on the beginning of time (see the module)
    start  : int64 [interactions + 1], slices of the next three
    cause  : int32 [terms], an interaction
    back   : int32 [terms], in which iteration: 0 this one, 1 the one before, …
    weight : int64 [terms], ns from the end of ``cause`` to the end of this interaction
    """

    local: tuple[int, ...]
    member: np.ndarray
    op: np.ndarray
    of: np.ndarray
    own: np.ndarray
    loose: int
    start: np.ndarray
    cause: np.ndarray
    back: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.own)

    def ends(self, arrivals: np.ndarray, before: Sequence[np.ndarray] = ()) -> np.ndarray:
        """int64 [interactions]: when each ends, given when its last local member came to it.

        ``before``: the ends in earlier iterations, the latest first; without them their terms are
        left out, as in a first iteration.
        """
        found = np.zeros(len(self), dtype=np.int64)
        earlier = (found, *before)
        for j in range(len(self)):
            end = int(arrivals[j] + self.own[j])
            for t in range(self.start[j], self.start[j + 1]):
                if self.back[t] < len(earlier):
                    cause = earlier[self.back[t]][self.cause[t]]
                    end = max(end, int(cause + self.weight[t]))
            found[j] = end
        return found


def releases(graph: WorldGraph, prices: Prices, local: Sequence[int]) -> Releases:
    """What the virtual ranks of ``graph`` answer to the ``local`` ranks.

    PrismError if the job hangs, or a local rank is not a class of its own.
    """
    classes = [int(graph.classes.of[rank]) for rank in local]
    crowded = [r for r, c in zip(local, classes, strict=True) if graph.classes.counts[c] != 1]
    if crowded:
        raise PrismError(f"rank {crowded[0]} is one of several in its class", fix="whatif.apart")
    for unrolled in _UNROLLED:
        table = _table(graph, prices, local, classes, unrolled)
        if not table.loose:
            break
    return table


def _table(
    graph: WorldGraph, prices: Prices, local: Sequence[int], classes: list[int], unrolled: int
) -> Releases:
    """The last of ``unrolled`` iterations."""
    dag = build(graph, unrolled)
    if len(dag.order) < len(dag):
        raise PrismError(
            f"the job hangs: {len(dag) - len(dag.order)} steps wait for each other",
            fix="prism hang draws who waits for whom",
        )
    durations = durations_of(dag, prices)
    cut, mine = cuts(dag, classes)
    start, cause, weight = transfer.terms(dag, durations, cut, mine)
    last = unrolled - 1
    nodes = dag.order[cut[dag.order]]
    nodes = nodes[dag.iteration[nodes] == last]
    number = np.full(len(prices.meetings), -1, dtype=np.int64)
    number[dag.op[nodes]] = np.arange(len(nodes))
    chosen = [np.arange(start[n], start[n + 1]) for n in nodes]
    known = [c[cause[c] != START] for c in chosen]
    every = np.concatenate([*known, np.empty(0, dtype=np.int64)])
    causes = cause[every]
    member, op, of = _members(dag, classes, cut, number)
    return Releases(
        tuple(local),
        member,
        op,
        of,
        durations[nodes],
        sum(len(a) != len(b) for a, b in zip(chosen, known, strict=True)),
        np.concatenate(([0], np.cumsum([len(c) for c in known]))).astype(np.int64),
        number[dag.op[causes]].astype(np.int32),
        (last - dag.iteration[causes]).astype(np.int32),
        weight[every],
    )


def kept(graph: WorldGraph, prices: Prices, local: Sequence[int], folder: Path) -> Releases:
    """As ``releases``, from a file in ``folder`` if the same was asked before.

    The file's name is a digest of all that decides the table.  One that cannot be read is made
    anew; a folder that cannot be written is left without.
    """
    path = folder / f".releases-{_digest(graph, prices, local)}.npz"
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in _COLUMNS}
            return Releases(tuple(local), loose=int(stored["loose"]), **found)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        made = releases(graph, prices, local)
    columns = {name: getattr(made, name) for name in _COLUMNS}
    with suppress(UsageError), whole_file(path, force=True) as written:
        np.savez(written, allow_pickle=False, loose=made.loose, **columns)
    return made


_COLUMNS = ("member", "op", "of", "own", "start", "cause", "back", "weight")
_FORMAT = b"releases 1"


def _digest(graph: WorldGraph, prices: Prices, local: Sequence[int]) -> str:
    meet = graph.rendezvous
    found = hashlib.sha1(_FORMAT + repr(list(local)).encode())
    for program in graph.program_list:
        found.update(program.ops.tobytes() + repr(program.strings).encode())
    arrays = [meet.start, meet.classes, meet.ops, prices.meetings, graph.classes.of]
    for array in (*arrays, *meet.of, *prices.compute, *prices.lead, *prices.host):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:20]


def cuts(dag: Dag, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """bool [n] each: the local interactions; what takes no time of its own because it is local.

    Meetings of local ranks alone are real: virtual ones notice them through the local ranks only.
    """
    mine = np.isin(dag.owner, list(classes))
    counts = np.diff(dag.start)
    of = np.repeat(np.arange(len(dag)), counts)
    local = np.bincount(of, weights=mine[dag.before], minlength=len(dag)).astype(np.int64)
    meets = (dag.kind == MEET) & (local > 0)
    return meets & (local < counts), mine | (meets & (local == counts))


def _members(
    dag: Dag, classes: Sequence[int], cut: np.ndarray, number: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(member, op, of) of Releases: which op of which local rank is which interaction."""
    member, op, of = [], [], []
    for index, cls in enumerate(classes):
        where = dag.node_of[cls][-1]
        for i in np.flatnonzero(dag.ready_of[cls][-1] >= 0).tolist():
            if cut[where[i]]:
                member.append(index)
                op.append(i)
                of.append(int(number[dag.op[where[i]]]))
    return tuple(np.array(c, dtype=np.int32) for c in (member, op, of))  # type: ignore[return-value]
