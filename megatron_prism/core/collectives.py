"""The collectives: what each one means, one row each, read by everything else.

The backend asks a row what its virtual members deliver, the world graph how calls of different
ranks match, the costs how many bytes cross the wire, the dump reader under which name it is
recorded. Pure data and integer arithmetic; this module knows nothing of tensors, devices or time.

Sizes, for a group of ``n`` ranks (``numel`` of one rank's tensors):

==================  ==========  ============  ====================================================
collective          input       output        result on group rank p
==================  ==========  ============  ====================================================
all_reduce          k           k             reduce over j of in[j]
all_gather          k           n*k           concatenation over j of in[j]
reduce_scatter      n*k         k             reduce over j of chunk p of in[j]
all_to_all          sum(send)   sum(recv)     concatenation over j of chunk p of in[j]
broadcast           k           k             in[root]
reduce              k           k (root)      reduce over j of in[j], on the root only
gather              k           n*k (root)    concatenation over j of in[j], on the root only
scatter             n*k (root)  k             chunk p of in[root]
barrier             0           0             every member has arrived
send / recv         k           k             the peer's tensor
==================  ==========  ============  ====================================================
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One row of the table.

    name      : our name, used in every output
    methods   : names of the ``c10d.ProcessGroup`` methods that issue it (renamed in torch 2.13:
    both)
    recorder  : suffix of its profiling name in Flight Recorder dumps (``nccl:<recorder>``)
    kind      : ``group`` (all members take part, one FIFO per group) or ``pair`` (p2p, one FIFO per
                directed pair)
    agree     : what all members must pass alike, else the job is broken; ``pairwise`` means that
                what i sends to j must be what j expects from i
    reduces   : whether a reduce op is part of the call
    rooted    : whether one member is the root
    delivers  : what a virtual member holds under the default *mirror* policy, in words
    """

    name: str
    methods: tuple[str, ...]
    recorder: str
    kind: str
    agree: tuple[str, ...]
    delivers: str
    reduces: bool = False
    rooted: bool = False

    def payload(self, bytes_in: int, bytes_out: int) -> int:
        """Message size in bytes as nccl-tests counts it: the larger side of the call."""
        return max(bytes_in, bytes_out)

    def wire_bytes(self, payload: int, n: int) -> int:
        """Fewest bytes one rank must send for a message of ``payload`` bytes among ``n`` ranks.

        The bandwidth-optimal bound (nccl-tests doc/PERFORMANCE.md, bus bandwidth factors), rounded
        up: all_reduce 2(n-1)/n, gathers and scatters (n-1)/n, broadcast and p2p 1.
        """
        if n < 1:
            raise ValueError(f"a group has at least one rank, not {n}")
        if n == 1 or self.name == "barrier":
            return 0
        numerator, denominator = {
            "all_reduce": (2 * (n - 1), n),
            "all_gather": (n - 1, n),
            "reduce_scatter": (n - 1, n),
            "all_to_all": (n - 1, n),
            "gather": (n - 1, n),
            "scatter": (n - 1, n),
        }.get(self.name, (1, 1))
        return -(-payload * numerator // denominator)


TABLE: tuple[Collective, ...] = (
    Collective(
        "all_reduce",
        ("allreduce", "allreduce_coalesced"),
        "all_reduce",
        "group",
        ("dtype", "numel", "reduce_op"),
        "the local member's tensor: a sum is n times it, an average, minimum or maximum is it",
        reduces=True,
    ),
    Collective(
        "all_gather",
        (
            "allgather",
            "allgather_coalesced",
            "_allgather_base",
            "all_gather_single",
            "allgather_into_tensor_coalesced",
            "all_gather_single_coalesced",
        ),
        "_all_gather_base",
        "group",
        ("dtype", "numel"),
        "a copy of the local shard; slots of an in-place gather keep what they hold",
    ),
    Collective(
        "reduce_scatter",
        (
            "reduce_scatter",
            "_reduce_scatter_base",
            "reduce_scatter_single",
            "reduce_scatter_tensor_coalesced",
            "reduce_scatter_single_coalesced",
        ),
        "_reduce_scatter_base",
        "group",
        ("dtype", "numel", "reduce_op"),
        "the local member's input: the result is n times the local chunk, or the chunk itself",
        reduces=True,
    ),
    Collective(
        "all_to_all",
        ("alltoall", "alltoall_base", "all_to_all_single"),
        "all_to_all",
        "group",
        ("dtype", "pairwise"),
        "the mirror image: rows of the local input, repeated to the size that is expected",
    ),
    Collective(
        "broadcast",
        ("broadcast",),
        "broadcast",
        "group",
        ("dtype", "numel", "root"),
        "what the local member already holds; values that steer control flow have an oracle",
        rooted=True,
    ),
    Collective(
        "reduce",
        ("reduce",),
        "reduce",
        "group",
        ("dtype", "numel", "reduce_op", "root"),
        "the local member's tensor, as in all_reduce; only the root changes",
        reduces=True,
        rooted=True,
    ),
    Collective(
        "gather",
        ("gather",),
        "gather",
        "group",
        ("dtype", "numel", "root"),
        "a copy of the root's own tensor",
        rooted=True,
    ),
    Collective(
        "scatter",
        ("scatter",),
        "scatter",
        "group",
        ("dtype", "numel", "root"),
        "noise of unit scale (integers: zeros), since no local tensor is like it",
        rooted=True,
    ),
    Collective("barrier", ("barrier",), "barrier", "group", (), "presence"),
    Collective("send", ("send",), "send", "pair", ("dtype", "numel"), "nothing: it receives"),
    Collective(
        "recv",
        ("recv", "recv_anysource"),
        "recv",
        "pair",
        ("dtype", "numel"),
        "noise of the expected scale: activations N(0,1), gradients the scale of a mean loss",
    ),
)

BY_NAME: dict[str, Collective] = {row.name: row for row in TABLE}
BY_METHOD: dict[str, Collective] = {method: row for row in TABLE for method in row.methods}
