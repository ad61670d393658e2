"""The collectives: what each one means, one row each, read by everything else.

The backend asks a row by which methods it is issued, the world graph how calls of different ranks
match, the costs how many bytes cross the wire, the dump reader under which name it is recorded.
Pure data and integer arithmetic; this module knows nothing of tensors, devices or time.

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
dispatch, combine   k           m             tokens go to their experts and back (DeepEP …)
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
    reduces   : whether a reduce op is part of the call
    rooted    : whether one member is the root
    nccl      : whether NCCL makes it, with a communicator, a counter and a record
    """

    name: str
    methods: tuple[str, ...]
    recorder: str
    kind: str
    reduces: bool = False
    rooted: bool = False
    nccl: bool = True

    def wire_bytes(self, payload: int, n: int) -> int:
        """Fewest bytes one rank must send for a message of ``payload`` bytes among ``n`` ranks.

        The bandwidth-optimal bound (nccl-tests doc/PERFORMANCE.md, bus bandwidth factors), rounded
        up: all_reduce 2(n-1)/n, gathers and scatters (n-1)/n, broadcast and p2p 1.
        """
        if n < 1:
            raise ValueError(f"a group has at least one rank, not {n}")
        # nothing goes over a wire
        if n == 1 or self.name == "barrier":
            return 0
        # one side sends all of it once
        if self.name in ("broadcast", "reduce", "send", "recv"):
            return payload
        return -(-payload * (n - 1) * (1 + (self.name == "all_reduce")) // n)


TABLE: tuple[Collective, ...] = (
    Collective(
        "all_reduce", ("allreduce", "allreduce_coalesced"), "all_reduce", "group", reduces=True
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
        reduces=True,
    ),
    Collective(
        "all_to_all", ("alltoall", "alltoall_base", "all_to_all_single"), "all_to_all", "group"
    ),
    Collective("broadcast", ("broadcast",), "broadcast", "group", rooted=True),
    Collective("reduce", ("reduce",), "reduce", "group", reduces=True, rooted=True),
    Collective("gather", ("gather",), "gather", "group", rooted=True),
    Collective("scatter", ("scatter",), "scatter", "group", rooted=True),
    Collective("barrier", ("barrier",), "barrier", "group"),
    Collective("send", ("send",), "send", "pair"),
    Collective("recv", ("recv", "recv_anysource"), "recv", "pair"),
    # rows to nodes and rows to ranks: of a dispatch in and out, of a combine out and in
    Collective("dispatch", ("dispatch",), "ep_dispatch", "group", nccl=False),
    Collective("combine", ("combine",), "ep_combine", "group", nccl=False),
)

BY_NAME: dict[str, Collective] = {row.name: row for row in TABLE}
BY_METHOD: dict[str, Collective] = {}
NAME_OF: dict[str, str] = {}  # what recorders and profilers call it -> our name
for _row in TABLE:
    BY_METHOD |= dict.fromkeys(_row.methods, _row)
    NAME_OF |= dict.fromkeys((_row.recorder, _row.name, *_row.methods), _row.name)
