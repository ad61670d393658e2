"""How long does NCCL take for a call?  Its own estimate of each of its ways; the fastest counts.

In : a collective, how many ranks, how many of them share a node, the message, a machine.  Out: ns.
The formulas and constants are those by which NCCL chooses (``ncclTopoTuneModel`` and
``ncclTopoGetAlgoTime`` in src/graph/tuning.cc @v2.30, Apache-2.0 since 2026, BSD before): per
algorithm (ring, tree, NVLS, NVLS tree, PAT) and protocol (LL, LL128, Simple) a base latency, one of
every hop inside a node and between nodes, and a share of the bus bandwidth.  Where it is ours:

* bandwidths are the machine's measured ones instead of NCCL's search of the topology, and caps per
  channel, which such machines do not reach, are left out
* a call that crosses nodes is bound by the network from two nodes on (NCCL's tuner from three)
* messages and all-to-alls (NCCL does not tune them) take a base latency and one hop; what goes to
  other nodes goes through each GPU's own rail
"""

from __future__ import annotations

from megatron_prism.replay.costs.machine import Machine

__all__ = ["best", "times"]

LL, LL128, SIMPLE = "LL", "LL128", "Simple"
_PROTOCOLS = (LL, LL128, SIMPLE)
US = 1000.0  # tables are in us, as in NCCL

_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
_HOP = {  # of a hop: (LL, LL128, Simple)
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
_NVLS_INSIDE, _NVLS_TREE_BETWEEN, _PAT_BETWEEN = 25.0, 20.9, 14.0
_LL_RATE = {  # most bytes/s of LL inside a node, by generation; between 2 and more nodes (Intel)
    "volta": 39.0e9, "ampere": 87.7e9, "hopper": 141.0e9, "blackwell": 282.0e9,
}  # fmt: skip
_LL_RATE_NODES = (39.0e9, 20.4e9)
_POST = 1.0  # us to post a message to the network, three of them for Simple
_CHANNELS = 16
_TREE_MIDDLE = (  # trees are slower than that for medium sizes: powers of two from 64 B on
    (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
)  # fmt: skip


def best(name: str, size: int, per_node: int, num_bytes: int, machine: Machine) -> float:
    """ns of the fastest way, without what the caller adds (``Machine.call_ns``)."""
    return min(times(name, size, per_node, num_bytes, machine).values())


def times(
    name: str, size: int, per_node: int, num_bytes: int, machine: Machine
) -> dict[tuple[str, str], float]:
    """(algorithm, protocol) -> ns, of all ways that NCCL has for this call."""
    nodes = -(-size // per_node)
    call = _Call(name, size, nodes, min(per_node, size), num_bytes, machine)
    if name in ("send", "recv", "all_to_all", "gather", "scatter"):
        return call.messages()
    found = call.ring()
    if name == "all_reduce" or name == "barrier":
        found |= call.tree() | call.nvls()
    if name in ("all_gather", "reduce_scatter") and nodes == size:
        found |= call.pat()
    return found


class _Call:
    """One call, and what all its ways share."""

    def __init__(
        self, name: str, size: int, nodes: int, per_node: int, num_bytes: int, machine: Machine
    ) -> None:
        self.name, self.size, self.nodes, self.per_node = name, size, nodes, per_node
        self.bytes, self.machine = num_bytes, machine
        across = per_node * machine.network_rate
        self.bus = machine.link_rate if nodes == 1 else min(machine.link_rate, across)
        inside = _LL_RATE[machine.generation]
        self.most_ll = inside if nodes == 1 else _LL_RATE_NODES[min(nodes, 3) - 2]
        self.inside = _HOP[machine.link]

    def ring(self) -> dict[tuple[str, str], float]:
        """Rings: every rank passes on (n - 1) / n of the message, an all-reduce twice."""
        rates = (min(self.most_ll, self.bus / 2), self.bus * 0.92, self.bus)
        twice = 2 if self.name in ("all_reduce", "barrier") else 1
        rooted = self.name in ("broadcast", "reduce")
        wire = self.bytes * (1.0 if rooted else twice * (self.size - 1) / self.size)
        found = {}
        for p, protocol in enumerate(_PROTOCOLS):
            inside, between = self.inside["ring"][p], _HOP["network"]["ring"][p]
            if self.nodes > 1:
                inside = max(inside, _POST * (3 if protocol == SIMPLE else 1))
                if self.per_node == 1:  # nothing hides them
                    between = _HOP["network"]["tree"][p]
            if rooted:  # one hop; the others follow in a pipeline
                latency = inside if self.nodes == 1 else between
            else:
                crossings = twice * (self.nodes - 1)
                latency = (twice * (self.size - 1) - crossings) * inside + crossings * between
            latency += _BASE["ring"][p]
            large = self.bytes >= 64 * _CHANNELS * self.size
            if protocol == SIMPLE and self.nodes > 1 and twice == 2 and large:
                latency *= 1.4  # NCCL: the plateau of rings
            found["ring", protocol] = latency * US + wire / rates[p] * 1e9
        return found

    def tree(self) -> dict[tuple[str, str], float]:
        """Trees between nodes, chains inside: an all-reduce goes up and down."""
        bus = 0.92 * self.bus
        rates = (min(bus / 3.8, self.most_ll), bus * (7 / 9 if self.nodes == 1 else 120 / 128), bus)
        middle = (self.bytes >> 6).bit_length() - 1
        found = {}
        for p, protocol in enumerate(_PROTOCOLS):
            rate = rates[p] * 0.5
            if 0 <= middle < len(_TREE_MIDDLE[p]):
                rate *= _TREE_MIDDLE[p][middle]
            hops = (self.size // self.nodes - 1) * self.inside["tree"][p]
            hops += _log2(self.nodes) * _HOP["network"]["tree"][p]
            latency = _BASE["tree"][p] + 2 * hops
            found["tree", protocol] = latency * US + self.bytes / rate * 1e9
        return found

    def nvls(self) -> dict[tuple[str, str], float]:
        """Sums in the NVLink switch, and trees between nodes; none if the machine has none."""
        rate, name, latency = self.machine.nvls_rate, "NVLS", _NVLS_INSIDE
        if not rate or self.size < 2 or self.per_node < 2:
            return {}
        if self.nodes > 1:
            name, latency = "NVLS tree", latency + 2 * _log2(self.nodes) * _NVLS_TREE_BETWEEN
            across = self.per_node * self.machine.network_rate * (2 if self.nodes == 2 else 1)
            rate = min(rate, across)
        wire = self.bytes * 2 * (self.size - 1) / self.size
        return {(name, SIMPLE): latency * US + wire / rate * 1e9}

    def pat(self) -> dict[tuple[str, str], float]:
        """Parallel aggregated trees, for one rank per node."""
        latency = _BASE["pat"][2] + _log2(self.nodes) * _PAT_BETWEEN / 3.5 + 2.8 * self.size
        wire = self.bytes * (self.size - 1) / self.size
        return {("PAT", SIMPLE): latency * US + wire / (0.75 * self.bus) * 1e9}

    def messages(self) -> dict[tuple[str, str], float]:
        """Sends and receives, all at once."""
        machine, pair = self.machine, self.name in ("send", "recv")
        share = self.bytes if pair else self.bytes / self.size
        away = (1 if self.nodes > 1 else 0) if pair else self.size - self.per_node
        near = (1 - away) if pair else self.per_node - 1
        found = {}
        for p, protocol in ((0, LL), (2, SIMPLE)):
            slower = 2 if protocol == LL else 1
            network = _HOP["network"]["ring"][p]
            latency = _BASE["ring"][p] + (network if away else self.inside["ring"][p])
            near_rate = machine.link_rate / slower
            if protocol == LL:
                near_rate = min(near_rate, _LL_RATE[machine.generation])
            longest = near * share / near_rate
            if away:
                longest = max(longest, away * share * slower / machine.network_rate)
            found["messages", protocol] = latency * US + longest * 1e9
        return found


def _log2(number: int) -> int:
    return number.bit_length() - 1
