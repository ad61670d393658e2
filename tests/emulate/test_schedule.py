"""Schedules recorded from Megatron's scheduler: every tensor reaches the step that needs it.

The oracles share no code with us: messages are passed between the recorded stages by hand, and the
order of steps is Megatron's ``convert_schedule_table_to_order``.
"""

import functools
import itertools
import subprocess
import sys
import warnings
from collections import Counter

import pytest

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import __version__ as release
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel import schedules as megatron_schedules
    from megatron.core.pipeline_parallel import utils as pipeline_utils
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    from megatron_prism.emulate import schedule
    from megatron_prism.emulate.schedule import schedules

from helpers.schedules import Pipeline, name

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.program_text import dump, parse
from megatron_prism.core.slices import open_programs
from megatron_prism.graph import world_graph

pytestmark = pytest.mark.megatron
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"

PLAIN = [{"pp": pp, "microbatches": m} for pp, m in itertools.product((2, 3, 4, 8), (1, 2, 7, 16))]
OVERLAP = ({"overlap_p2p": False}, {}, {"warmup_flush": True})
INTERLEAVED = [
    {"pp": pp, "vpp": vpp, "microbatches": rounds * pp, **overlap}
    for pp, vpp, rounds, overlap in itertools.product((2, 3, 4, 8), (2, 3), (1, 3), OVERLAP)
    if pp > 2 or overlap != OVERLAP[0]
]
OTHERS = [
    {"pp": 4, "vpp": 2, "microbatches": m, "group_size": group, **overlap}
    for m, group, overlap in itertools.product((14, 15, 20), (5, 7, 10), OVERLAP)
    if m % group == 0 or m % group >= 4
]
OTHERS += [
    {"pp": 4, "microbatches": 6, "variable_lengths": True},
    {"pp": 4, "vpp": 2, "microbatches": 8, "variable_lengths": True},
]
CASES = PLAIN + INTERLEAVED + OTHERS


@functools.cache
def recorded(settings):
    return schedules(**dict(settings))


def record(case):
    return recorded(tuple(case.items()))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_step_gets_its_tensor(case):
    programs = record(case)
    done = Pipeline(programs).run()
    chunks = range(programs.world.chunks) if programs.world.vpp else (-1,)
    everything = set(
        itertools.product(("forward", "backward"), range(case["microbatches"]), chunks)
    )
    for rank in range(programs.world.size):
        assert len(done.steps[rank]) == len(everything)
        assert set(done.steps[rank]) == everything
        assert not +Counter(done.held[rank])
        assert not done.made[rank]
    assert all(done.posted[channel] == len(sent) for channel, sent in done.sent.items())
    assert set(done.posted) == set(done.sent)


def test_there_are_enough_cases():
    assert len(CASES) >= 55


@pytest.mark.parametrize("case", INTERLEAVED + OTHERS[:12], ids=name)
def test_the_order_is_megatrons(case):
    programs = record(case)
    pp, vpp, m = case["pp"], case["vpp"], case["microbatches"]
    table = megatron_schedules.get_schedule_table(m, vpp, case.get("group_size", pp))
    for rank in range(pp):
        warm_up = min((pp - rank - 1) * 2 + (vpp - 1) * case.get("group_size", pp), m * vpp)
        order = convert_schedule_table_to_order(warm_up, vpp, table)
        steps = [op for op in programs.of(rank) if op.name == "compute"]
        signs = [op.chunk + 1 if op.phase == "forward" else -op.chunk - 1 for op in steps]
        assert signs == order
        forwards = [(op.microbatch, op.chunk) for op in steps if op.phase == "forward"]
        assert forwards == table


def test_a_healthy_schedule_checks_clean():
    for case in CASES[::9]:
        made = world_graph.build(record(case))
        assert made.check() == []


def test_texts_round_trip():
    programs = schedules(4, 2, 8, variable_lengths=True)
    assert parse(dump(programs)) == programs


def test_unbatched_two_stage_pipelines_use_the_default_group_as_well():
    """Megatron puts one direction on it, so that the two can overlap (p2p_communication.py:65)."""
    programs = schedules(2, 2, 4)
    for rank, group in ((0, {"send": PIPELINE, "recv": "default_pg"}),
                        (1, {"recv": PIPELINE, "send": "default_pg"})):  # fmt: skip
        ops = [op for op in programs.of(rank) if op.name in group]
        assert {op.group for op in ops} == set(group.values())
        assert all(op.group == group[op.name] for op in ops)
    assert {op.group for op in schedules(4, 2, 4).of(1) if op.name == "send"} == {PIPELINE}


def test_batches_and_single_messages():
    batched = [op for op in schedules(4, microbatches=4).of(1) if op.name in ("send", "recv")]
    assert all(op.batch >= 0 for op in batched)
    assert max(Counter(op.batch for op in batched).values()) == 2
    for rank in range(4):  # odd ranks receive first: else both sides of a pair would send
        ops = list(schedules(4, 2, 8).of(rank))
        pairs = [(a.name, b.name) for a, b in itertools.pairwise(ops)
                 if {a.name, b.name} == {"send", "recv"} and a.phase == b.phase]  # fmt: skip
        assert pairs
        assert set(pairs) == {("recv", "send") if rank % 2 else ("send", "recv")}
        assert all(op.batch == -1 for op in ops)


def test_gradients_and_parameters():
    for rank in range(4):
        ops = list(schedules(4, 2, 8).of(rank))
        assert [op.chunk for op in ops[:2]] == [0, 1]
        assert {op.name for op in ops[:2]} == {"param_sync"}
        assert [op.chunk for op in ops if op.name == "grad_sync"] == [1, 0]
        assert ops[-1].note == "finalize_model_grads"
    syncs = [
        [(o.label, o.note) for o in program if o.name == "grad_sync"]
        for program in schedules(4, microbatches=4).programs
    ]
    assert syncs == [[("G", "in backward")], [("G", "")], [("G", "")], [("G", "")]]


def test_without_a_pipeline():
    ops = list(schedules(1, microbatches=3).of(0))
    assert [o.label for o in ops if o.name == "compute"] == ["0F", "0B", "1F", "1B", "2F", "2B"]
    assert {o.name for o in ops} == {"compute", "grad_sync", "mark"}
    assert ops[-2].name == "grad_sync"


def waits_of_forward_sends(program):
    """For every forward send that is waited for, how many steps run before that."""
    ops, found = list(program), []
    for at, op in enumerate(ops):
        if op.name == "send" and op.phase == "forward":
            waits = [i for i, o in enumerate(ops) if (o.name, o.handle) == ("wait", op.handle)]
            found += [sum(o.name == "compute" for o in ops[at:until]) for until in waits]
    return found


def test_what_the_releases_do_differently():
    """0.19 waits for each forward send at once (schedules.py:1659 @core_v0.19.0), 0.16 before the
    next one, and for the last one never."""
    waits = waits_of_forward_sends(schedules(4, 2, 8, warmup_flush=True).of(1))
    if release.startswith("0.16"):
        assert max(waits) >= 1
    else:
        assert set(waits) == {0}


PATCHED = (p2p_communication, megatron_schedules, pipeline_utils)


def state():
    return [dict(vars(module)) for module in PATCHED]


def test_everything_is_put_back(monkeypatch):
    before = state()
    schedules(4, 2, 8)
    assert state() == before
    tape = schedule.Tape
    monkeypatch.setattr(tape, "isend", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        schedules(4, 2, 8)
    assert state() == before


def test_a_process_with_torch_distributed_is_left_as_it_is():
    import torch

    alone = schedules(4, 2, 8)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        assert schedules(4, 2, 8) == alone
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        assert value.item() == 1
    finally:
        torch.distributed.destroy_process_group()


def test_not_inside_an_emulated_job(monkeypatch):
    monkeypatch.setattr(schedule.virtual_world, "current", lambda: object())
    with pytest.raises(UnsupportedError, match="process of its own"):
        schedules(4, 2, 8)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pp": 4, "vpp": 2, "microbatches": 9}, "Megatron refuses"),
        ({"pp": 4, "vpp": 2, "group_size": 2, "microbatches": 8}, "Megatron refuses"),
        ({"pp": 2, "vpp": 2, "overlap_p2p": False}, "fix: overlap_p2p=True"),
        ({"pp": 4, "ep_overlap": True}, "needs chunks"),
    ],
)
def test_bad_settings_are_refused_with_a_fix(settings, says):
    with pytest.raises(UsageError) as error:
        schedules(**{"microbatches": 4, **settings})
    assert says in str(error.value)
    assert error.value.fix


def test_one_chunk_a_stage_is_not_interleaved():
    assert schedules(4, 1, 8).world.vpp is None
    assert schedules(4, 1, 8).programs == schedules(4, microbatches=8).programs


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
