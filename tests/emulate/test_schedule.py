"""Schedules recorded from Megatron's scheduler, in the order that Megatron itself says.

Whether captured steps in this order are what other numbers of microbatches do is asked of real
jobs: ``tests/metamorphic/test_captured_microbatches.py``.
"""

import functools
import itertools
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.pipeline_parallel import schedules as megatron_schedules
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    from megatron_prism.emulate.schedule import schedules

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.graph import world_graph

pytestmark = pytest.mark.megatron

PLAIN = [{"pp": pp, "microbatches": m} for pp, m in itertools.product((1, 2, 3, 8), (1, 2, 7))]
PLAIN += [{"pp": 4, "microbatches": 6, "variable_lengths": True}]
OVERLAP = ({"overlap_p2p": False}, {}, {"warmup_flush": True}, {"ep_overlap": True})
INTERLEAVED = [
    {"pp": pp, "vpp": vpp, "microbatches": rounds * pp, **overlap}
    for pp, vpp, rounds, overlap in itertools.product((2, 3, 4), (2, 3), (1, 3), OVERLAP)
    if pp > 2 or overlap != OVERLAP[0]
]
INTERLEAVED += [
    {"pp": 4, "vpp": 2, "microbatches": m, "group_size": group, **overlap}
    for m, group, overlap in itertools.product((14, 20), (5, 10), OVERLAP)
    if m % group == 0 or m % group >= 4
]
INTERLEAVED += [{"pp": 4, "vpp": 2, "microbatches": 8, "variable_lengths": True}]


def name(case):
    return " ".join(f"{key}={value}" for key, value in case.items())


@functools.cache
def recorded(settings):
    return schedules(**dict(settings))


def record(case):
    return recorded(tuple(case.items()))


@pytest.mark.parametrize("case", PLAIN + INTERLEAVED, ids=name)
def test_messages_meet_and_every_step_is_there_once(case):
    programs = record(case)
    assert world_graph.build(programs).check() == []
    chunks = range(programs.world.chunks) if programs.world.vpp else (-1,)
    wanted = itertools.product(("backward", "forward"), range(case["microbatches"]), chunks)
    wanted = sorted(wanted)
    for program in programs.programs:
        steps = [(op.phase, op.microbatch, op.chunk) for op in program
                 if op.name == "compute" and op.phase != "weight"]  # fmt: skip
        assert sorted(set(steps) if "ep_overlap" in case else steps) == wanted


@pytest.mark.parametrize("case", INTERLEAVED, ids=name)
def test_the_order_is_megatrons(case):
    pp, vpp, m = case["pp"], case["vpp"], case["microbatches"]
    group, pairs = case.get("group_size", pp), "ep_overlap" in case
    table = megatron_schedules.get_schedule_table(m, vpp, group)
    for rank, program in enumerate(record(case).programs):
        # pairs are independent behind one more step of warm-up (schedules.py:789 @0.16.1)
        warm_up = min((pp - rank - 1) * 2 + (vpp - 1) * group + pairs, m * vpp)
        order = convert_schedule_table_to_order(warm_up, vpp, table)
        steps = list(dict.fromkeys((op.phase, op.microbatch, op.chunk) for op in program
                                   if op.name == "compute" and op.phase != "weight"))  # fmt: skip
        assert [(n, c) for phase, n, c in steps if phase == "forward"] == table
        signs = [c + 1 if phase == "forward" else -c - 1 for phase, _, c in steps]
        if pairs:  # inside a pair layers interleave
            assert [s for s in signs if s < 0] == [s for s in order if s < 0]
        else:
            assert signs == order


@pytest.mark.parametrize(
    "settings",
    [
        {"pp": 4, "vpp": 2, "microbatches": 9},
        {"pp": 4, "vpp": 2, "group_size": 2, "microbatches": 8},
        {"pp": 2, "vpp": 2, "overlap_p2p": False},
        {"pp": 4, "ep_overlap": True},
    ],
)
def test_bad_settings_are_refused_with_a_fix(settings):
    with pytest.raises(UsageError) as error:
        schedules(**{"microbatches": 4, **settings})
    assert error.value.fix


def heard(program):
    """Steps, messages and waits for messages; a step is heard once, however many ops it has."""
    found, handles = [], set()
    for op in program:
        if op.name in ("send", "recv"):
            found.append((op.name, op.group, op.peer, op.batch, op.site))
            handles.add(op.handle)
        elif op.name == "wait" and op.handle in handles:
            found.append("wait")
        elif op.name == "compute" and op.phase in ("forward", "backward"):
            step = (op.phase, op.microbatch, op.chunk)
            if not found or found[-1] != step:
                found.append(step)
    return found


@pytest.mark.slow
def test_a_model_that_runs_does_the_same(tmp_path):
    """The other recorder, below torch.distributed, while a real model trains on the meta tier."""
    words = "world_size=4 pp=4 vpp=2 num_layers=8 prism.tier=meta".split()
    words += ["global_batch_size=32", "train_iters=1", "-o", str(tmp_path / "a")]
    command = [sys.executable, "-m", "megatron_prism", "capture", "tiny-gpt_1cpu", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    real = open_programs(str(tmp_path / "a"))
    ours = schedules(4, 2, 8)
    for rank in range(4):
        assert len(heard(ours.of(rank))) > 60
        assert heard(ours.of(rank)) == heard(real.of(rank))
