"""The recorder writes down what hand-made sequences do, and nothing else."""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import processes
from torch import distributed as dist

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.programs.ops import CODE
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.listeners import CallListener
from megatron_prism.runtime.recorder import owners
from megatron_prism.runtime.recorder.owners import CallSites
from megatron_prism.runtime.recorder.recorder import Recorder
from megatron_prism.runtime.values import Values

SIZE, RANK = 8, 3


@pytest.fixture
def world(monkeypatch):
    # as on the tiers without a device, which cannot be undone in this process
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    found = virtual_world.start(
        virtual_world.VirtualWorld(SIZE, RANK, (RANK,), Values(), torch.device("cpu"))
    )
    yield found
    virtual_world.stop()


@pytest.fixture
def recorder(world):
    recorder = Recorder(RANK, "cpu")
    world.listen(recorder)
    recorder.start()
    return recorder


class Seen(CallListener):
    """Calls ``see`` after each answer."""

    def __init__(self, see):
        self.see = see

    def observe(self, group, op, inputs, outputs):
        self.see(group, op, inputs, outputs)


def talk(recorder):
    """The ops but for compute segments."""
    return [op for op in recorder.stop().program() if op.name != "compute"]


def names(recorder):
    return [op.name for op in talk(recorder)]


def test_a_synchronous_call_has_no_handle(recorder):
    dist.all_reduce(torch.ones(4, 2), op=dist.ReduceOp.MAX)
    (op,) = talk(recorder)
    assert (op.name, op.group, op.dtype, op.reduce) == ("all_reduce", "default_pg", "fp32", "max")
    assert (op.num_in, op.num_out, op.shape, op.handle, op.batch) == (8, 8, "4x2", -1, -1)
    assert (op.root, op.peer, op.splits, op.stream) == (-1, 0, None, "main")


def test_an_asynchronous_call_is_waited_for_by_its_handle(recorder):
    first = dist.all_reduce(torch.ones(4), async_op=True)
    second = dist.all_gather_into_tensor(torch.ones(32), torch.ones(4), async_op=True)
    second.wait()
    first.wait()
    ops = talk(recorder)
    assert [op.name for op in ops] == ["all_reduce", "all_gather", "wait", "wait"]
    assert [op.handle for op in ops] == [ops[0].handle, ops[1].handle, ops[1].handle, ops[0].handle]
    assert ops[0].handle != ops[1].handle >= 0
    assert (ops[1].num_in, ops[1].num_out) == (4, 32)


def test_a_handle_answers_as_the_call_would(recorder):
    out = torch.ones(4)
    work = dist.all_reduce(out, async_op=True)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    work.synchronize()
    assert torch.equal(work.get_future().wait()[0], out)
    assert names(recorder) == ["all_reduce", "wait"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_coalesced_call_is_one(recorder, asynchronous):
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(6))
    if asynchronous:
        manager.wait()
    ops = talk(recorder)
    assert [op.name for op in ops] == ["all_reduce", "wait"][: 1 + asynchronous]
    assert (ops[0].num_in, ops[0].shape) == (10, "4,6")
    assert (ops[0].handle >= 0) == asynchronous


def test_what_is_batched_shares_a_batch_and_nothing_runs_in_it(recorder):
    before, after = torch.ones(4), torch.ones(4)
    for _ in range(2):
        ops = [dist.P2POp(dist.isend, before, 4), dist.P2POp(dist.irecv, after, 2)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    program = recorder.stop().program()
    pairs = [op for op in program if op.name in ("send", "recv")]
    assert [(op.name, op.peer, op.batch) for op in pairs] == [
        ("send", 1, 0), ("recv", -1, 0), ("send", 1, 1), ("recv", -1, 1)
    ]  # fmt: skip
    order = [op.name for op in program]
    at = order.index("send")
    assert order[at : at + 2] == ["send", "recv"]
    waits = [op.handle for op in program if op.name == "wait"]
    assert waits == [op.handle for op in pairs]
    assert [(op.num_in, op.num_out) for op in pairs[:2]] == [(4, -1), (-1, 4)]


@pytest.mark.parametrize(
    ("peer", "offset"), [(4, 1), (2, -1), (7, 4), (0, -3), (6, 3), (5, 2)]
)  # fmt: skip
def test_a_peer_is_the_nearest_way_round(recorder, peer, offset):
    dist.send(torch.ones(1), peer)
    dist.recv(torch.ones(1), peer)
    ops = talk(recorder)
    assert [(op.name, op.peer, op.handle) for op in ops] == [
        ("send", offset, -1), ("recv", offset, -1)
    ]  # fmt: skip


def test_a_peer_in_a_group_is_a_place_in_it(recorder):
    group = dist.new_group([1, 3, 5, 7], group_desc="ODD")
    dist.isend(torch.ones(1), 7, group=group)
    dist.irecv(torch.ones(1), 1, group=group)
    assert [(op.group, op.peer) for op in talk(recorder)] == [("ODD", 2), ("ODD", -1)]


def test_list_forms(recorder):
    one, many = torch.ones(2), [torch.ones(2) for _ in range(SIZE)]
    dist.all_gather(many, one)
    dist.reduce_scatter(one, many)
    dist.all_to_all(many, many)
    ops = talk(recorder)
    assert [(op.name, op.num_in, op.num_out) for op in ops] == [
        ("all_gather", 2, 16), ("reduce_scatter", 16, 2), ("all_to_all", 16, 16)
    ]  # fmt: skip
    assert ops[1].reduce == "sum"
    assert ops[1].shape == "2,2,2,2,+4"


def test_roots_are_group_ranks(recorder):
    group = dist.new_group([1, 3, 5], group_desc="ODD")
    one, many = torch.ones(2), [torch.ones(2) for _ in range(3)]
    dist.broadcast(one, 5, group=group)
    dist.reduce(one, 3, op=dist.ReduceOp.MIN, group=group)
    dist.gather(one, many, dst=3, group=group)
    dist.gather(one, dst=1, group=group)
    dist.scatter(one, many, src=3, group=group)
    dist.scatter(one, src=5, group=group)
    dist.barrier(group=group)
    ops = talk(recorder)
    assert [(op.name, op.root) for op in ops] == [
        ("broadcast", 2), ("reduce", 1), ("gather", 1), ("gather", 0), ("scatter", 1),
        ("scatter", 2), ("barrier", -1),
    ]  # fmt: skip
    assert ops[1].reduce == "min"
    assert [(op.num_in, op.num_out) for op in ops[2:7]] == [
        (2, 6), (2, -1), (6, 2), (-1, 2), (-1, -1)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "uint8", "bool"])
def test_types(recorder, dtype):
    dist.broadcast(torch.zeros(3, dtype=getattr(torch, dtype)), 0)
    (op,) = talk(recorder)
    assert op.dtype == {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(dtype, dtype)


def test_mirrored_splits_are_nobodys(recorder):
    rows = [1, 2, 3, 4, 1, 2, 3, 4]
    source = torch.ones(sum(rows), 2)
    dist.all_to_all_single(torch.empty_like(source), source, rows, rows)
    (op,) = talk(recorder)
    assert (op.num_in, op.num_out, op.splits) == (40, 40, None)


def test_labels_are_those_of_the_innermost_scope(recorder):
    with recorder.scope(phase="forward", microbatch=2, chunk=0):
        dist.barrier()
        with recorder.scope(phase="backward", microbatch=1):
            dist.barrier()
        dist.barrier()
    dist.barrier()
    assert [op.label for op in talk(recorder)] == ["2F0", "1B0", "2F0", "-"]


def test_a_segment_ends_where_its_label_does(recorder):
    with recorder.scope(phase="forward", microbatch=0):
        time.sleep(0.01)
    time.sleep(0.001)
    ops = list(recorder.stop().program())
    long = [op.label for op in ops if op.ns >= 1_000_000]  # on a busy host others may be, too
    assert long[long.index("0F") :][:2] == ["0F", "-"]
    took = {label: sum(op.ns for op in ops if op.label == label) for label in ("0F", "-")}
    assert took["0F"] >= 10_000_000
    assert took["-"] >= 1_000_000


def test_a_segment_excludes_the_time_of_answering(world, recorder):
    world.listen(recorder, Seen(lambda *args: time.sleep(0.05)))  # part of the answer
    recorder.stop()
    start = time.perf_counter_ns()  # around all that is recorded: a busy host may stop us anywhere
    recorder.start()
    time.sleep(0.01)
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
    recording = recorder.stop()
    whole = time.perf_counter_ns() - start
    segments = [op.ns for op in recording.program() if op.name == "compute"]
    assert sum(segments) < whole - 45_000_000
    assert min(sorted(segments)[-2:]) >= 10_000_000


def test_nothing_is_recorded_before_the_start_and_after_the_stop(world):
    recorder = Recorder(RANK, "cpu")
    world.listen(recorder)
    dist.barrier()
    recorder.start()
    dist.barrier()
    with recorder.batch():
        dist.barrier()
    first = talk(recorder)
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    recorder.start()
    assert names(recorder) == []
    assert [(op.name, op.batch) for op in first] == [("barrier", -1), ("barrier", 0)]


def test_a_graph_that_was_captured_unheard_is_refused_while_recording(recorder):
    with pytest.raises(UnsupportedError, match="captured before the first train step"):
        recorder.graph_launched(None)
    Recorder(RANK, "cpu").graph_launched(None)  # which records nothing


def test_an_error_inside_a_call_leaves_the_recorder_usable(world, recorder):
    def broken(*args):
        raise RuntimeError("inside")

    world.listen(recorder, Seen(broken))
    with pytest.raises(RuntimeError, match="inside"), recorder.scope(phase="forward"):
        dist.barrier()
    with pytest.raises(RuntimeError, match="inside"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 4)])
    world.listen(recorder)
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    last = talk(recorder)[-2:]
    assert [(op.name, op.label, op.batch) for op in last] == [
        ("all_reduce", "-", -1), ("wait", "-", -1)
    ]  # fmt: skip


def test_the_site_is_the_innermost_megatron_frame(world, recorder, imported_at):
    imported_at("megatron.core", "/x/site-packages/megatron/core")
    imported_at("megatron.training", "/x/megatron/training")
    code = compile("\n\ndef call(f):\n    f()", "/x/site-packages/megatron/core/a/b.py", "exec")
    outer = compile("\ndef call(f):\n    f()", "/x/megatron/training/c.py", "exec")
    here, there = {}, {}
    exec(code, here)
    exec(outer, there)
    there["call"](lambda: here["call"](dist.barrier))
    there["call"](dist.barrier)
    dist.barrier()
    sites = [op.site for op in talk(recorder)]
    assert sites == ["core/a/b.py:4", "training/c.py:3", ""]


@pytest.mark.parametrize("package", ["megatron/training", "transformer_engine", "torch"])
def test_a_folder_that_is_called_like_a_package_is_the_jobs_own(
    package, world, recorder, imported_at
):
    """Megatron's is found by where it was imported from, the job's own code is not lost."""
    imported_at("megatron.core", "/x/megatron/core")
    inner = compile("def call(f):\n    f()", "/x/megatron/core/b.py", "exec")
    scope = {}
    exec(inner, scope)
    sites = CallSites()
    outer = compile("def call(f):\n    f()", f"/home/me/{package}/job/train.py", "exec")
    job = {}
    exec(outer, job)
    seen = []
    job["call"](lambda: seen.append(sites.find(sys._getframe(1), foreign=True)))
    job["call"](lambda: scope["call"](lambda: seen.append(sites.find(sys._getframe(1)))))
    job["call"](lambda: seen.append(sites.find(sys._getframe(1))))
    assert seen == ["job/train.py:2", "core/b.py:2", ""]


def test_times_of_quick_recordings_replace_those_of_the_written_one(world):
    from megatron_prism.runtime.recorder.measurements import typical

    recorder = Recorder(RANK, "cpu")
    world.listen(recorder)

    def iteration(seconds, quick, more=False):
        recorder.start(quick=quick)
        time.sleep(seconds)
        dist.barrier()
        if more:
            dist.barrier()
        return recorder.stop()

    made = [iteration(0.03, False), iteration(0.002, True), iteration(0.004, True),
            iteration(0.003, True), iteration(0.02, True, more=True)]  # fmt: skip
    program, count = typical(made)
    assert count == 3  # the one with another op is left out
    assert 3_000_000 <= program.ops["ns"].max() < 20_000_000
    segments = program.ops["ns"][program.ops["name"] == CODE["compute"]]
    assert program.samples.shape == (3, len(segments))
    assert np.array_equal(np.median(program.samples, axis=0).round(), segments)
    alone, count = typical(made[:1])
    assert count == 1
    assert alone.ops["ns"].max() >= 30_000_000


# -- tiers: each in a process of its own ----------------------------------------------------------
START = """
import torch, gc
from torch import distributed as dist
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
tier = tiers.prepare({tier!r}, ProcessChanges())
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values
from megatron_prism.runtime.recorder.recorder import report_to
from megatron_prism.runtime.listeners import CallListener
from megatron_prism.runtime.recorder.recorder import Recorder
world = virtual_world.start(virtual_world.VirtualWorld(8, 3, (3,), Values(), tier.device))
recorder, watched = Recorder(3, tier.name, tier.live), ProcessChanges()
world.listen(recorder)
report_to(recorder, watched)
def talk(): return [op for op in recorder.stop().program() if op.name != "compute"]
"""

STREAMS = """
side, event = torch.cuda.Stream(), torch.cuda.Event()
recorder.start()
event.wait()                                  # never recorded: nothing to wait for
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x = torch.ones(4, 4, device="cuda"); y = x @ x
    dist.all_reduce(x, async_op=True).wait()
    event.record()
torch.cuda.current_stream().wait_event(event)
torch.cuda.synchronize(); side.synchronize(); event.synchronize(); x.sum().item()
program = recorder.stop().program()
ops = [op for op in program if op.name != "compute"]
assert [(o.name, o.stream) for o in ops[:6]] == [("record", "main"), ("wait", "s1"),
    ("all_reduce", "s1"), ("wait", "s1"), ("record", "s1"), ("wait", "main")], ops
assert ops[1].handle == ops[0].handle and ops[3].handle == ops[2].handle
assert ops[5].handle == ops[4].handle
assert [o.note for o in ops[6:]] == ["device", "stream", "event", "item"], ops
assert all(o.name == "host_wait" for o in ops[6:])
assert {o.stream for o in program if o.name == "compute" and o.ns != 0} >= {"s1"}
recorder.start()
try:
    with torch.cuda.stream(side): raise ValueError
except ValueError: pass
dist.barrier()
assert [o.stream for o in talk()] == ["main"]
watched.undo()
recorder.start(); torch.cuda.synchronize(); event.record()
assert talk() == []
"""

META = """
kept = torch.ones(1024, device="cuda")
recorder.start()
with recorder.scope(phase="forward", microbatch=0):
    a = torch.ones(64, 32, device="cuda"); b = torch.ones(32, 16, device="cuda")
    c = a @ b
    rows = [1, 2, 3, 4, 1, 2, 3, 4]
    out = torch.empty(20, 2, device="cuda")
    dist.all_to_all_single(out, torch.ones(20, 2, device="cuda"), rows, rows)
    del a, b, c, out; gc.collect()
dist.barrier()
program = recorder.stop().program()
calls = [op for op in program if op.name == "all_to_all"]
assert calls[0].splits == (tuple(rows), tuple(rows)), calls
work = [op for op in program if op.name == "compute"]
assert sum(op.flops for op in work) == 2 * 64 * 32 * 16, work
assert all(op.ns == -1 and op.kernels > 0 and op.label == "0F" for op in work), work
assert "mm(64x32,32x16)float32" in work[0].note
events = program.allocations
assert events[events["before"] == 0]["bytes"][0] == 4096      # alive at the start
sizes = {}
for row in events: sizes[row["storage"]] = sizes.get(row["storage"], 0) + int(row["bytes"])
# everything else came and went, but what cuBLAS keeps
assert sorted(set(sizes.values())) == [0, 4096, 32 << 20], sizes
assert list(sizes.values()).count(4096) == 1
assert program.live_bytes().max() >= 4096 + 4 * (64 * 32 + 32 * 16 + 64 * 16)
assert (events["before"][1:] >= events["before"][:-1]).all()
later = torch.ones(8, device="cuda")                           # outside: nobody listens
recorder.start()
assert recorder.stop().program().live_bytes()[-1] == 4096 + 32 + (32 << 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "code"),
    [("cpu", STREAMS), ("meta", STREAMS.replace("o.ns != 0", "True")), ("meta", META)],
    ids=["cpu-streams", "meta-streams", "meta"],
)
def test_a_tier_is_recorded(tier, code):
    done = processes.python(START.format(tier=tier) + code)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        (["decoder.0.weight"], "decoder.0.weight"),
        (["decoder.0.weight", "decoder.0.bias"], "buffer of 2 parameters of decoder.0"),
        (["decoder.0.weight", "embedding.weight"], "buffer of 2 parameters"),
    ],
)
def test_a_buffer_is_named_by_the_parameters_in_it(parameters, name):
    assert owners._together(parameters) == name


def test_buffers_of_megatron_fsdp_say_what_they_hold():
    def buffer(num_bytes, shared_out):
        data = torch.empty(num_bytes, dtype=torch.uint8)
        return SimpleNamespace(data=data, is_data_distributed=shared_out)

    group = SimpleNamespace(
        params=[],
        model_weight_buffer=buffer(1, False),
        main_weight_buffer=buffer(2, True),
        main_grad_buffer=buffer(3, True),
        hfsdp_helper_gbuf=buffer(4, False),
        transpose_weight_buffer=None,
    )
    model = torch.nn.Linear(1, 1)
    model.param_and_grad_buffer = SimpleNamespace(parameter_groups=[group])
    notes = owners.AllocationOwners(model).standing()

    def note_of(tensor):
        return notes[tensor.untyped_storage()._cdata]

    assert note_of(group.model_weight_buffer.data) == "param:buffer of weights"
    assert note_of(group.main_weight_buffer.data) == "master:main parameters"
    assert note_of(group.main_grad_buffer.data) == "grad:main parameters"  # of a shard's size
    assert note_of(group.hfsdp_helper_gbuf.data) == "grad:main gradients"
    assert note_of(model.weight) == "param:weight"


def test_moments_in_fp8_are_the_optimizer_s():
    """Of Transformer Engine's FusedAdam: a tensor without a storage of its own, and its parts."""
    moment = SimpleNamespace(
        _quantizer="of FP8",
        _data=torch.empty(8, dtype=torch.uint8),
        _transpose=torch.empty(8, dtype=torch.uint8),
        _scale_inv=torch.empty(1),
    )
    parameter = torch.empty(8)
    state = {parameter: {"exp_avg_sq": moment}}
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter]}], state=state)
    notes = owners.AllocationOwners(torch.nn.Linear(1, 1), optimizer).standing()
    for part in (moment._data, moment._transpose, moment._scale_inv):
        assert notes[part.untyped_storage()._cdata] == "optim:exp_avg_sq"
