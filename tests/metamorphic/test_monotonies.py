"""What is faster never takes longer; what is slower, smaller or shared never less."""

import dataclasses
import json

import pytest
from helpers.metamorphic import JOBS, MACHINE, about, memory, ns, stored
from helpers.needs import MEGATRON

from megatron_prism.replay.costs.machine import machines
from megatron_prism.replay.replicas import with_data_parallel

FASTER = ["faster=all_reduce:2", "faster=send:4", "host=0.5", "host=0.01"]
SLOWER = ["slow=0:1.5", "slow=pp=0:3/2", "host=2", "faster=all_reduce:1/3", "network=rails",
          "network=fat-tree:4", "nccl=NCCL_MAX_NCHANNELS=1"]  # fmt: skip


def has(job, word):
    """Whether the job has such calls at all."""
    names = {name for program in stored(job).programs for name in program.counts()}
    return not word.startswith("faster=") or word[7:].partition(":")[0] in names


@about("faster", "host", "slow", "network", "nccl")
@pytest.mark.parametrize(("words", "sign"), [(FASTER, -1), (SLOWER, 1)], ids=["faster", "slower"])
@pytest.mark.parametrize("job", JOBS)
def test_faster_is_never_slower(job, words, sign):
    plain = ns(stored(job), MACHINE)
    for word in words:
        if has(job, word):
            assert sign * (ns(stored(job), MACHINE, word) - plain) >= 0, word


@about("network")
def test_what_is_shared_by_more_takes_longer():
    """On nodes of two, which calls leave."""
    programs = stored("dense_pp2")
    world = dataclasses.replace(programs.world, gpus_per_node=2)
    apart = dataclasses.replace(programs, world=world)
    more = [ns(apart, MACHINE, f"network={one}") for one in ("rails", "fat-tree:2", "fat-tree:8")]
    assert more == sorted(more)
    assert ns(programs, MACHINE) <= ns(apart, MACHINE)


@about("moved")
@pytest.mark.parametrize("key", ["flops", "memory_rate", "link_rate", "network_rate"])
def test_a_faster_machine_is_never_slower(key, tmp_path):
    given = json.loads(machines()["h100"].read_text()) | {"ops": ""}
    twice = {k: 2 * v for k, v in given[key].items()} if key == "flops" else 2 * given[key]
    for name, one in (("a", given), ("b", {**given, key: twice})):
        (tmp_path / name).write_text(json.dumps(one))
    for job in JOBS:
        slow, fast = (ns(stored(job), f"machine={tmp_path / name}") for name in "ab")
        assert fast <= slow


@about("dp")
@pytest.mark.parametrize("job", ["dense_pp2", "moe_ep2"])
def test_more_replicas_never_take_more_memory(job):
    """Of a distributed optimizer, whose shards become smaller; of another one as much."""
    sizes = [memory(with_data_parallel(stored(job), dp * stored(job).world.dp)) for dp in (1, 2, 8)]
    for stage in zip(*sizes, strict=True):
        allocated = [one for one, _ in stage]
        assert allocated == sorted(allocated, reverse=True)


@MEGATRON
@about("microbatches")
def test_more_microbatches_never_take_less():
    """They cost what a step of the steady state costs, each."""
    programs = stored("dense_pp2")
    times = [ns(programs, MACHINE, f"microbatches={n}") for n in (6, 8, 10, 12)]
    steps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert min(steps) > 0
    assert max(steps) <= 1.05 * min(steps)
