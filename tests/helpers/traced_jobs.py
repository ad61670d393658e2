"""Real jobs over gloo that torch.profiler traces, one process per rank, forked."""

import multiprocessing
import time

ITERATIONS = 8
TP = "TENSOR_MODEL_PARALLEL_GROUP"


def _rank(rank, world, folder, slow, long):
    import torch
    from torch import distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = [dist.new_group([a, a + 1], group_desc=TP) for a in range(0, world, 2)]
    tp = groups[rank // 2]
    values, gradients = torch.ones(4096), torch.ones(60_000)
    product = torch.ones(64, 64)

    def compute(seconds):
        """Sleep, so that ranks do not take each other's cores, with operators around it.

        A sleep is long beside what a busy host adds to an iteration.
        """
        torch.mm(product, product)
        time.sleep(seconds * (slow.get(rank, 1.0)))
        torch.mm(product, product)

    def step(number):
        for _ in range(3):
            compute(0.05)
            dist.all_reduce(values, group=tp)
        compute(0.07 * (4 if number == long else 1))
        handle = dist.all_reduce(gradients, async_op=True)
        compute(0.024)
        handle.wait()
        sent = dist.isend(values, (rank + 1) % world)
        dist.recv(torch.empty(4096), (rank - 1) % world)
        sent.wait()
        gathered = torch.empty(world * 100)
        dist.all_gather_into_tensor(gathered, torch.ones(100))
        compute(0.016)

    def ready(p):
        p.export_chrome_trace(f"{folder}/rank{rank}.json.gz")

    cpu = [ProfilerActivity.CPU]
    plan = schedule(wait=1, warmup=1, active=ITERATIONS)
    with profile(activities=cpu, schedule=plan, record_shapes=True, on_trace_ready=ready) as p:
        for number in range(2 + ITERATIONS):
            step(number)
            p.step()
    dist.barrier()
    dist.destroy_process_group()


def trace(folder, world=4, slow=None, long=-1):
    """Trace a job into ``folder``: ranks of ``slow`` compute that many times as long, and all of
    them compute longer in iteration ``long``."""
    import torch  # noqa: F401 - before the forks

    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, world, str(folder), slow or {}, long))
        for rank in range(world)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    assert codes == [0] * world
    (folder / "store").unlink(missing_ok=True)
