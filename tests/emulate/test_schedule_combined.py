"""Combined 1F1B (EP overlap): layers of two microbatches interleave as Megatron's plans say.

The order inside a pair of layers is what the docstring of ``TransformerLayerSchedulePlan.run``
promises; messages are passed by the same hand as in ``test_schedule``.
"""

import warnings
from collections import defaultdict

import pytest

pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from helpers import schedules as passing
    from megatron.core import __version__ as release
    from megatron.core.models.common import model_chunk_schedule_plan
    from megatron.core.models.gpt import gpt_model
    from megatron.core.pipeline_parallel import combined_1f1b
    from megatron.core.pipeline_parallel import schedules as megatron_schedules
    from megatron.core.pipeline_parallel import utils as pipeline_utils
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    from megatron_prism.emulate.schedule import schedules
    from megatron_prism.emulate.schedule_tape import Tape

from megatron_prism.graph import world_graph

pytestmark = pytest.mark.megatron
OLD = release.startswith("0.16")
FIRST = "attn" if OLD else "pre_dispatch_computation"

CASES = [
    {"pp": 2, "vpp": 2, "microbatches": 4},
    {"pp": 4, "vpp": 2, "microbatches": 8},
    {"pp": 4, "vpp": 3, "microbatches": 12},
    {"pp": 4, "vpp": 2, "microbatches": 8, "overlap_p2p": False},
    {"pp": 4, "vpp": 2, "microbatches": 8, "warmup_flush": True},
    {"pp": 4, "vpp": 2, "microbatches": 14, "group_size": 5},
    {"pp": 3, "vpp": 2, "microbatches": 6},
]
CASES_IDS = [passing.name(case) for case in CASES]


def record(case):
    return schedules(**case, ep_overlap=True)


class Pipeline(passing.Pipeline):
    """A step is many ops: it needs its tensor at the first, and what it sends is made at the last.

    ``last`` : (rank, chunk, phase) -> note of the op after which the tensor to send exists
    """

    def __init__(self, programs):
        super().__init__(programs)
        self.begun, self.finished = set(), set()
        self.last = {}
        for rank, ops in enumerate(self.ops):
            for op in ops:
                if op.name == "compute" and op.phase == "forward":
                    if op.note.startswith(("moe_combine", "mtp_post")):
                        self.last[rank, op.chunk, "forward"] = op.note
                    self.last[rank, op.chunk, "backward"] = FIRST

    def step(self, rank, op):
        key = (rank, op.phase, op.microbatch, op.chunk)
        if op.name == "compute":
            if (
                op.note
                == self.last[rank, op.chunk, "forward" if op.phase == "forward" else "backward"]
            ):
                self.finished.add(key)
            if op.phase == "weight" or key in self.begun:
                return True
            self.begun.add(key)
        elif op.name == "send":
            assert key in self.finished
        elif op.name == "wait" and op.handle not in self.handles[rank]:
            return True  # for an event: test_events_are_recorded_before_they_are_waited_for
        return super().step(rank, op)


@pytest.mark.parametrize("case", CASES, ids=CASES_IDS)
def test_every_step_gets_its_tensor(case):
    programs = record(case)
    done = Pipeline(programs).run()
    for rank in range(case["pp"]):
        assert len(done.steps[rank]) == 2 * case["vpp"] * case["microbatches"]
        assert not done.made[rank]
    assert all(done.posted[channel] == len(sent) for channel, sent in done.sent.items())
    assert world_graph.build(programs).check() == []


@pytest.mark.parametrize("case", CASES, ids=CASES_IDS)
def test_the_order_is_megatrons(case):
    programs = record(case)
    pp, vpp, m = case["pp"], case["vpp"], case["microbatches"]
    group = case.get("group_size", pp)
    table = megatron_schedules.get_schedule_table(m, vpp, group)
    for rank, program in enumerate(programs.programs):
        parts = [op for op in program if op.name == "compute" and op.phase != "weight"]
        steps = list(dict.fromkeys((op.phase, op.microbatch, op.chunk) for op in parts))
        # one more warm-up step than without, so that pairs are independent (schedules.py:789)
        warm_up = min((pp - rank - 1) * 2 + (vpp - 1) * group + 1, m * vpp)
        order = convert_schedule_table_to_order(warm_up, vpp, table)
        assert [(n, c) for phase, n, c in steps if phase == "forward"] == table
        backwards = [-chunk - 1 for phase, _, chunk in steps if phase == "backward"]
        assert backwards == [number for number in order if number < 0]
        first = next(i for i, (phase, *_) in enumerate(steps) if phase == "backward")
        assert first in (warm_up, min(warm_up + 1, m * vpp))  # the pair's loss goes backward first


def test_the_parts_of_two_layers_interleave_as_documented():
    """comm: combine_bwd | dispatch_fwd, dispatch_bwd | combine_fwd
    comp: attn_fwd | mlp_bwd, mlp_fwd | attn_bwd"""
    parts = [
        (op.stream, f"{op.phase[0]} {op.note}")
        for op in schedules(1, microbatches=2, ep_overlap=True).of(0)
        if op.name == "compute" and op.note not in ("pre_process", "post_process", "loss")
    ]
    pair = [
        ("s1", "b moe_combine"),
        ("main", f"f {FIRST}"),
        ("main", "b mlp"),
        ("s1", "f moe_dispatch"),
        ("s1", "b moe_dispatch"),
        ("main", "f mlp"),
        ("s1", "f moe_combine"),
        ("main", f"b {FIRST}"),
    ]
    assert parts[4 : 4 + len(pair)] == pair
    comm = [what for stream, what in pair if stream == "s1"]
    assert comm == [
        "b moe_combine", "f moe_dispatch", "b moe_dispatch", "f moe_combine"
    ]  # fmt: skip


def test_messages_of_forwards_leave_on_the_second_stream():
    """They overlap with the attention's backward (model_chunk_schedule_plan.py:491)."""
    ops = list(schedules(4, 2, 16, ep_overlap=True).of(1))
    streams = defaultdict(set)
    begun = False
    for op in ops:
        begun = begun or op.phase == "backward" and op.name == "compute"
        if begun and op.name == "send":
            streams[op.phase].add(op.stream)
    assert streams == {"forward": {"s1"}, "backward": {"main"}}


def test_events_are_recorded_before_they_are_waited_for():
    for program in record(CASES[1]).programs:
        known = set()
        for op in program:
            if op.name in ("record", "send", "recv"):
                known.add(op.handle)
            elif op.name == "wait":
                assert op.handle in known


def test_what_the_releases_do_differently():
    """0.16 leaves out what follows the backward of chunk 0 (combined_1f1b.py:229), so its
    reductions start at the very end, in another order."""
    found = [
        [op.chunk for op in program if op.name == "grad_sync"]
        for program in schedules(2, 2, 4, ep_overlap=True).programs
    ]
    assert found == ([[1, 0], [0, 1]] if OLD else [[1, 0], [1, 0]])


PATCHED = (model_chunk_schedule_plan, gpt_model, combined_1f1b, megatron_schedules, pipeline_utils)


def test_everything_is_put_back(monkeypatch):
    before = [dict(vars(module)) for module in PATCHED]
    record(CASES[0])
    assert [dict(vars(module)) for module in PATCHED] == before
    monkeypatch.setattr(Tape, "own_grad_sync", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(CASES[0])
    assert [dict(vars(module)) for module in PATCHED] == before
