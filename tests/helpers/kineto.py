"""Traces of a GPU as Kineto writes them, with times that are known."""

import gzip
import json


class Trace:
    """Events of one rank; times in us."""

    def __init__(self, rank, world=2, node="node0", groups=None):
        groups = groups or {"0": ("default_pg", list(range(world)))}
        self.head = {
            "schemaVersion": 1,
            "host_name": node,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": world,
                "pg_config": [
                    {"pg_name": name, "pg_desc": desc, "ranks": ranks}
                    for name, (desc, ranks) in groups.items()
                ],
            },
        }
        self.groups = groups
        self.events, self.number = [], 0

    def _add(self, cat, name, ts, dur, tid, **args):
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )

    def step(self, number, begin, end):
        self._add("user_annotation", f"ProfilerStep#{number}", begin, end - begin, 1)

    def kernel(self, launched, start, end, name="gemm", stream=7):
        self.number += 1
        self._add("cuda_runtime", "cudaLaunchKernel", launched, 1, 1, correlation=self.number)
        self._add(
            "kernel", name, start, end - start, stream, stream=stream, correlation=self.number
        )

    def bare(self, launched, op="allreduce", group="0", sizes=(1024, 1024), **more):
        """A call as the host sees it; no kernel."""
        desc, ranks = self.groups[group]
        self._add(
            "cpu_op",
            "record_param_comms",
            launched - 1,
            4,
            1,
            **{
                "Collective name": op,
                "dtype": "BFloat16",
                "In msg nelems": sizes[0],
                "Out msg nelems": sizes[1],
                "Process Group Name": group,
                "Group size": len(ranks),
                "Process Group Description": desc,
                "Process Group Ranks": str(ranks),
                **more,
            },
        )

    def call(self, launched, start, end, op="allreduce", **more):
        self.bare(launched, op, **more)
        self.kernel(launched, start, end, "ncclDevKernel_AllReduce_Sum", 20)

    def messages(self, launched, start, end, ops, **more):
        """A batch of messages, which have one kernel."""
        for number, op in enumerate(ops):
            self.bare(launched + 5 * number, op, **more)
        launched += 5 * len(ops)
        self._add("user_annotation", "nccl:coalesced", launched - 1, 4, 1)
        self.kernel(launched, start, end, "ncclDevKernel_SendRecv", 20)

    def write(self, folder):
        rank = self.head["distributedInfo"]["rank"]
        path = folder / f"rank{rank}.json.gz"
        data = json.dumps({**self.head, "traceEvents": self.events}, indent=1)
        path.write_bytes(gzip.compress(data.encode()))
        return path


def two_ranks(folder, iterations=4, slow=1.0, off=0.0):
    """Two ranks: 1000 us, a call that takes 100 us once both have come, 400 us beside another call
    of 300 us, 200 us after it.  Rank 1 computes the first part ``slow`` times as long; it is on a
    node of its own if that one's clock is ``off``, us."""
    for rank in (0, 1):
        node = f"node{rank}" if off else "node0"
        trace, now = Trace(rank, node=node), 1000.0 + off * rank
        for number in range(iterations):
            own, last = 1000 * (slow if rank else 1), 1000 * slow
            trace.step(number, now - 900, now + last + 100 + 1000 - 900)
            host = now - 800
            trace.kernel(host, now, now + own)
            trace.call(host + 10, now + own, now + last + 100)
            now += last + 100
            trace.call(host + 20, now, now + 600, sizes=(4096, 4096))
            trace.kernel(host + 30, now + 1, now + 400)
            trace.kernel(host + 40, now + 600, now + 1000)  # waits for the call
            now += 1000
        trace.write(folder)
