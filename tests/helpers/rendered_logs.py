"""Job logs as torch 2.11 and torchrun print them, of the dumps that a stalled job would leave."""

from megatron_prism.features.hang.dumps import of_value

TYPES = {"all_reduce": "ALLREDUCE", "all_gather": "_ALLGATHER_BASE", "broadcast": "BROADCAST",
         "reduce_scatter": "_REDUCE_SCATTER_BASE", "all_to_all": "ALLTOALL_BASE",
         "send": "SEND", "recv": "RECV", "barrier": "ALLREDUCE"}  # fmt: skip
HEAD = ("using world size: {0.size}, data-parallel size: {0.dp}, context-parallel size: {0.cp}, "
        "hierarchical context-parallel sizes: None, tensor-model-parallel size: {0.tp}, "
        "pipeline-model-parallel size: {0.pp}\n  expert_model_parallel_size ...... {0.ep}\n"
        "  expert_tensor_parallel_size ..... {0.etp}\n")  # fmt: skip
SIGNAL = (
    "Received a dump signal due to a collective timeout from rank {} and we will try our "
    "best to dump the debug info. Last enqueued NCCL work: {}, last completed NCCL work: {}."
)
STEPS = {("recv", -1): "recv_forward", ("send", 1): "send_forward",
         ("recv", 1): "recv_backward", ("send", -1): "send_backward"}  # fmt: skip


def text(values, world, killed=(), silent=()):
    """The log of the job; ``killed`` are ended by the kernel, ``silent`` print nothing."""
    dumps = {rank: of_value(value, rank) for rank, value in values.items()}
    lines = [HEAD.format(world)]
    first = next((r for r, d in dumps.items() if any(not e.done for e in d.entries)), 0)
    for rank, dump in dumps.items():
        if rank in silent:
            continue
        mark = f"[rank{rank}]:[E1125 06:25:13.2 ProcessGroupNCCL.cpp:689] "
        waits = [e for e in dump.entries if not e.done and len(dump.groups[e.group].ranks) > 1]
        if not waits:
            status = next((s for n, s in dump.status.items() if n == "0"), None)
            counts = (status.enqueued, status.completed) if status else (0, 0)
            group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
            lines.append(mark + group + SIGNAL.format(first, *counts))
            continue
        head = waits[0]
        group = dump.groups[head.group]
        place, batch = group.ranks.index(rank), [e for e in waits if e.launch == head.launch]
        inside = any(e.op == "coalesced" for e in batch)
        kind = "COALESCED" if inside else TYPES.get(head.op, head.op.upper())
        ins, outs = (0, 0) if inside and head.pair else (sum(side) for side in head.numbers)
        lines.append(
            f"{mark}[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
            f"{head.seq}, OpType={kind}, NumelIn={ins}, NumelOut={outs}, Timeout(ms)=600000) ran "
            "for 600034 milliseconds before timing out."
        )
        status = dump.status[head.group]
        lines.append(
            f"{mark}[PG ID 7 PG GUID {head.group}({head.desc}) Rank {place}]  failure detected by "
            f"watchdog at work sequence id: {head.seq} PG status: last enqueued work: "
            f"{status.enqueued}, last completed work: {status.completed}"
        )
        if head.pair:
            size = len(group.ranks)
            steps = {(e.op, (e.to - place + 1) % size - 1) for e in batch if e.pair}
            names = "_".join(
                STEPS.get(step, "_communicate") for step in sorted(steps, reverse=True)
            )
            lines += [
                mark + "Stack trace of the failed collective: ",
                f"#5 {names} from megatron/core/pipeline_parallel/p2p_communication.py:578",
            ]
    for rank in killed:
        lines.append(f"  rank      : {rank} (local_rank: {rank % 8})\n  exitcode  : -9 (pid: 827)")
    return "\n".join(lines) + "\n"
