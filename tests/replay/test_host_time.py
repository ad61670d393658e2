"""The host's time apart from the kernels': traces, programs, prices, replays."""

import dataclasses
import gc
import json
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.pacing.pace import expected
from megatron_prism.graph import world_graph
from megatron_prism.replay import costs, timeline
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.replay.costs.host import CALL_NS, right_after
from megatron_prism.replay.costs.machine import machine
from megatron_prism.report.metrics import path_parts
from megatron_prism.runtime.recorder.kernel_times import Launches, busy_ns, device_ns, launches
from megatron_prism.runtime.recorder.measurements import Recording

US = 1000


def traced(kernels, base=5_000_000):
    """A trace of (launched, began, took) in us; copies and unlaunched kernels are told apart."""
    events = [{"ph": "M", "name": "process_name", "args": {}}]
    for number, (launched, began, took) in enumerate(kernels):
        args = {"correlation": number, "stream": 7}
        kind = "cuda_driver" if number % 2 else "cuda_runtime"
        events.append({"cat": kind, "ts": launched, "dur": 2, "args": args, "ph": "X"})
        kind = "gpu_memcpy" if number == 1 else "kernel"
        events.append({"cat": kind, "ts": began, "dur": took, "args": args, "ph": "X"})
    return {"baseTimeNanoseconds": base, "traceEvents": events}


def bounds(*pairs, base=5_000_000):
    return [(base + a * US, base + b * US) for a, b in pairs]


def test_products_of_a_segment_are_told_from_its_other_kernels():
    ran = [
        (0, 100, 50, "nvjet_sm90_tst_128x256"), (5, 152, 20, "Memcpy DtoD"),
        (10, 174, 30, "flash_fwd_kernel"), (11, 300, 500, "Memcpy PtoP (Device -> Device)"),
        (30, 210, 9, "vectorized_add"), (31, 220, 9, "cublasLt::splitKreduce_kernel"),
        (32, 230, 9, "swizzle_row_scaling_kernel<gemm>"), (61, 240, 4, "gemm"),
    ]  # fmt: skip
    trace = traced([row[:3] for row in ran])
    for row, event in zip(ran, trace["traceEvents"][2::2], strict=True):
        event["name"] = row[3]
    # words to a neighbour GPU are not the job's, and the last kernel is of no segment
    found = launches(trace, bounds((0, 20), (25, 40), (45, 60)))
    assert found.products.tolist() == [80 * US, 0, 0]
    assert found.busy.tolist() == [100 * US, 27 * US, 0]
    assert launches({"traceEvents": []}, bounds((0, 20))).products.tolist() == [0]
    assert launches(trace, []).products.shape == (0,)


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("cutlass::Kernel<cutlass::gemm::kernel::GemmGrouped<ThreadblockSwizzle<8>>>", True),
        ("cutlass::device_kernel<GemmUniversal<cute::Swizzle<3, 4, 3>>>", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", True),
        ("flash_bwd_dot_do_o_kernel", False),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", False),
    ],
)
def test_what_counts_as_products(name, product):
    trace = traced([(0, 100, 50)])
    trace["traceEvents"][2]["name"] = name
    assert launches(trace, bounds((0, 20))).products.tolist() == [50 * US * product]


def test_kernels_behind_a_host_that_is_ahead_keep_their_gaps():
    trace = traced([(0, 100, 50), (5, 152, 20), (10, 174, 30)])
    # 2 us between kernels, and as much in front of the first
    found = busy_ns(trace, bounds((-4, 20))).tolist()
    assert found == [[(50 + 20 + 30 + 3 * 2) * US], [4 * US], [0]]


def test_a_gap_that_the_host_made_counts_as_the_usual_one():
    late = [(0, 100, 50), (5, 152, 20), (400, 404, 30), (500, 504, 10)]
    assert busy_ns(traced(late), bounds((0, 600)))[0].tolist() == [(110 + 4 * 2) * US]


def test_kernels_belong_to_the_segment_that_launched_them():
    trace = traced([(0, 100, 50), (30, 152, 20), (35, 174, 30), (90, 300, 7)])
    found = busy_ns(trace, bounds((0, 20), (25, 40), (50, 60)))
    assert found[0].tolist() == [52 * US, (50 + 2 * 2) * US, 0]  # the last is of no segment
    assert found[1].tolist() == [0, 5 * US, 10 * US]  # no launch: as long as the segment
    # who launched the 7 us is not known, so the third segment may have kernels that nobody saw
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("ts") != 90]
    assert busy_ns(trace, bounds((0, 20), (25, 40), (50, 60)))[0].tolist()[2] == -1
    assert busy_ns({"traceEvents": []}, bounds((0, 20)))[0].tolist() == [-1]


def test_a_kernel_that_starts_at_once_found_the_device_idle():
    trace = traced([(0, 4, 50), (20, 60, 20), (500, 503, 30)])
    assert busy_ns(trace, bounds((-3, 10), (15, 30), (480, 510)))[2].tolist() == [1, 0, 1]


def test_segments_that_do_not_wait_for_the_host_keep_their_own_time():
    elapsed = np.array([1030, 5000, 777, 777]) * US
    none = np.zeros(4, dtype=np.int64)
    # 3 % slower clocks in what was not traced hold for the late one as well; the third has no
    # kernels, of the fourth that is not known
    found = device_ns(elapsed[None], np.stack([np.array([1000, 1000, 0, -1e-3]) * US, none, none]))
    assert found.tolist() == [1030 * US, 1030 * US, 0, 777 * US]


def test_the_host_between_two_calls_is_counted_once():
    """An idle device, which waits for the host, does one thing after the other: 20 us of a kernel,
    and 300 us of Python that launches nothing."""
    trace = traced([(0, 5, 20)])
    busy = busy_ns(trace, bounds((0, 10), (10, 310)))
    ns, host, lead = device_ns(np.array([[25, 300]]) * US, busy), [10 * US, 300 * US], busy[1]
    text = "prism-program 1\nworld size=1\nprogram rank=0 ranks=0\n"
    for each in zip(ns.tolist(), host, lead.tolist(), strict=True):
        text += "0F compute ns={} host={} lead={}\n- host_wait note=device\n".format(*each)
    assert replayed(text).iteration_ns == pytest.approx((20 + 300) * US, abs=5 * US)


def test_a_wait_for_the_host_within_a_segment_is_no_kernels_time():
    busy = np.stack([np.array([45.6, 20.6, 51.1]) * 1000 * US, *np.zeros((2, 3))])
    each = np.array([[46.3, 22.2, 51.6], [46.2, 22.0, 51.6]]) * 1000 * US
    waits = np.array([[0.7, 1.5, 0.2], [0.6, 1.4, 0.2]]) * 1000 * US
    # the third hardly waits: its clocks are half a percent slower than those of the trace
    found = device_ns(each, busy, waits) / (1000 * US)
    assert found.tolist() == pytest.approx([45.6 * 51.4 / 51.1, 20.6 * 51.4 / 51.1, 51.4])
    # without knowing they would be the forward's kernels at the backward's pace, and its own
    assert device_ns(each, busy)[0] / (1000 * US) == pytest.approx(46.25, rel=1e-3)
    none = np.zeros_like(each)
    assert device_ns(each, busy, none).tolist() == device_ns(each, busy).tolist()


@pytest.mark.parametrize("events", [False, True])
def test_a_device_that_is_far_behind_its_host_waits_for_nobody(events):
    """A forward as long for the host as for the device, a backward, and what is issued by then."""
    hosts = [(0, 20_000), (20_100, 37_000), (37_100, 43_000)]
    takes = [21_000, 46_000, 51_000]
    if events:
        begins = [Moment(0), Moment(21_100), Moment(67_100)]
        times = [(a, Moment(a.ns + t)) for a, t in zip(begins, takes, strict=True)]
    else:
        times = takes
    behind = Recording(0, None, times, [], [(a + DATE, b + DATE) for a, b in hosts]).behind_ns()
    assert behind.tolist() == pytest.approx([0, 900 + 100 * events, 29_900 + 100 * events], abs=1)
    one = np.array([0, 1, 2])
    found = Launches(one, np.full(3, 1_700), np.zeros(3), np.array([20_000, 17_000, 6_000]),
                     np.array(takes), np.zeros(3))  # fmt: skip
    host = np.array([b - a for a, b in hosts])
    waits = found.waits(np.zeros(3), host, behind)
    assert waits.tolist() == pytest.approx([1_700, 16_900 / 10 - 900 - 100 * events, 0], abs=5)


DATE = 1_795_281_652_691_879_424  # the host's clock has one


class Moment:
    """An event that ran at ``ns`` of the device's clock."""

    def __init__(self, ns):
        self.ns = ns

    def elapsed_time(self, other):
        return float(np.float32((other.ns - self.ns) / 1e6))

    def synchronize(self):
        pass


def test_clocks_that_dip_are_in_every_iteration_and_in_no_segments_median():
    each = np.full((5, 10), 1000 * US)
    for iteration in range(5):  # two of ten are a tenth slower, other ones each time
        each[iteration, 2 * iteration : 2 * iteration + 2] = 1100 * US
    none = np.zeros(10, dtype=np.int64)
    busy = np.full(10, 1000 * US)
    assert device_ns(each, np.stack([busy, none, none])).tolist() == [1020 * US] * 10
    each[4] = 9000 * US  # an iteration in which something else happened counts as one of five
    assert device_ns(each, np.stack([busy, none, none])).tolist() == [1020 * US] * 10


def ended(kernels, host, device):
    """When the kernels (us from the host's begin to each launch, us that each takes) are through,
    one after the other, if the host begins at ``host`` and the device is free at ``device``."""
    for launched, takes in kernels:
        device = max(device, host + launched) + takes
    return device


def test_a_device_that_waits_within_a_segment_is_known_for_every_other_moment():
    """Small kernels first: what follows wherever the device is free, on a host twice as quick."""
    rng = np.random.default_rng(3)
    base, waited_within = 1_795_281_652_691_879_424, 0  # the host's clock has a date
    for _ in range(100):
        count = int(rng.integers(2, 30))
        launched = 2 * np.cumsum(rng.integers(5, 60, count))
        takes = np.where(rng.random(count) < 0.8, rng.integers(2, 20, count), 400)
        host = int(launched[-1]) + 6
        # the segment before it has one kernel, and issues it at 3
        rows = [
            (3, 3, 7),
            *((20 + at, 20 + at, ns) for at, ns in zip(launched, takes, strict=True)),
        ]
        trace = traced([tuple(map(int, row)) for row in rows], base)
        found = launches(trace, bounds((0, 10), (20, 20 + host), base=base))
        ns = np.array([7, takes.sum()]) * US
        none = np.zeros(2, dtype=np.int64)
        for quicker in (1, 2):
            lead = found.leads(none, np.array([10, host]) * US / quicker, ns)[1] / US
            kernels = list(zip((launched / quicker).tolist(), takes.tolist(), strict=True))
            assert launched[0] / quicker <= lead <= host / quicker
            waited_within += lead > launched[0] / quicker
            for free in rng.integers(0, 2000, 5).tolist():
                end = max(free + takes.sum(), lead + takes.sum())
                assert end == pytest.approx(ended(kernels, 0, free))
    assert waited_within > 50


def test_a_launch_that_waits_for_room_is_no_work_of_the_host():
    trace = traced([(10, 10, 5), (20, 20, 5), (600, 900, 300)])
    assert launches(trace, bounds((0, 700))).after.tolist() == [10 * US, 20 * US, 600 * US]
    call = next(e for e in trace["traceEvents"] if e.get("ts") == 20 and e["cat"] != "gpu_memcpy")
    call |= {"dur": 500, "name": "cudaLaunchKernel"}
    found = launches(trace, bounds((0, 700)))
    assert found.after.tolist() == [10 * US, 20 * US, 100 * US]
    assert (found.length.tolist(), found.busy.tolist()) == ([200 * US], [310 * US])
    call["name"] = "cudaStreamSynchronize"  # a wait that every such host has
    assert launches(trace, bounds((0, 700))).length.tolist() == [700 * US]


WORLD = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0-1
0F compute ns=10us host=100us lead=30us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
0F compute ns=500us host=20us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum handle=0
0F wait handle=0
-  host_wait note=device
"""


def replayed(text, calibration=None):
    made = world_graph.build(parse(text))
    prices = costs.price_ops(made, machine("h200"), calibration)
    return timeline.build_timeline(made, prices, 1)


def test_the_device_waits_for_a_host_that_is_late():
    found = replayed(WORLD)
    spans = found.spans(0)
    # segment 1 starts with its first launch; the host is through with it after 100 us only, and
    # with the call after 120
    assert (spans["start"][0], spans["end"][0]) == (30 * US, 40 * US)
    assert spans["start"][1] == 100 * US + CALL_NS
    # from here on the device is behind the host
    assert spans["start"][2] == spans["end"][1]
    assert found.iteration_ns == spans["end"][3] > 620 * US


def test_the_hosts_part_of_the_critical_path_is_said():
    parts = {part.what: part for part in path_parts(replayed(WORLD))}
    assert parts["host: compute"].ns == 100 * US
    assert "host's time for segments" in parts["host: compute"].source
    assert parts["host: all_reduce"].ns == CALL_NS
    assert "assumed" in parts["host: all_reduce"].source


def test_calibrated_calls_of_the_host():
    known = Calibration(host={("all_reduce", False): 7_000, ("message", True): 9_000}, source="x")
    assert known.host_ns("all_reduce", False, 1) == 7_000
    assert known.host_ns("send", True, 1) == known.host_ns("recv", False, 1) + 1_000 == 9_000
    assert known.host_ns("all_gather", True, 1) == 8_000  # the others' median
    assert Calibration().host_ns("all_gather", True, 1) == 1
    assert replayed(WORLD, known).spans(0)["start"][1] == 107 * US


def test_a_batch_is_issued_with_its_first_message():
    text = """prism-program 1
world size=2 pp=2
program rank=0 ranks=0-1
- compute ns=0 host=1us
- send PIPELINE_MODEL_PARALLEL_GROUP bf16 in=4 peer=1 batch=0
- recv PIPELINE_MODEL_PARALLEL_GROUP bf16 out=4 peer=1 batch=0
"""
    spans = replayed(text).spans(0)
    assert spans["start"][1] == spans["start"][2] == 1 * US + 2 * CALL_NS


BROADCASTS = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0-1
0F compute ns=10us host=100us lead=30us
0F broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=8 root=0
0F compute ns=0us host=120us lead=120us
0F broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=8 root=0
0F compute ns=10us host=12us lead=10us
0F broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=8 root=0
"""


def test_a_call_right_after_another_takes_the_host_less():
    known = Calibration(host={("broadcast", False): 140_000}, again={("broadcast", False): 40_000})
    found = world_graph.build(parse(BROADCASTS))
    prices = costs.price_ops(found, machine("h200"), known)
    assert prices.host[0][[1, 3, 5]].tolist() == [140_000, 40_000, 140_000]
    table = SimpleNamespace(member=np.zeros(3), op=np.array([1, 3, 5]), of=np.arange(3))
    calls, _ = expected(found.program_list[0], table, 0, {"TENSOR_MODEL_PARALLEL_GROUP": 2}, known)
    assert [call.host for call in calls] == [140_000, 40_000, 140_000]
    blind = BROADCASTS
    for said in (" host=100us lead=30us", " host=120us lead=120us", " host=12us lead=10us"):
        blind = blind.replace(said, "")
    assert not right_after(parse(blind).programs[0]).any()


def test_the_recorders_own_time_is_no_hosts_time(monkeypatch):
    import torch

    from megatron_prism.core.programs.program import Builder
    from megatron_prism.runtime.recorder import measurements, recorder
    from megatron_prism.runtime.recorder.measurements import Recording

    class Mark:
        def elapsed_time(self, other):
            return 0.0 if other is self else 0.4

        def synchronize(self):
            pass

    monkeypatch.setattr(recorder, "stamp", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    one = recorder.Recorder(0, "cuda")
    assert 0 < one.own_ns() < 1_000_000
    builder = Builder()
    for name in ("compute", "all_reduce", "compute"):
        builder.add(name)
    names = ["compute", "all_reduce", "compute"]
    times, hosts = [(Mark(), Mark()), (Mark(), Mark())], [(0, 50_000), (90_000, 150_000)]
    written = Recording(0, builder, times, names, hosts)
    quick = Recording(0, None, times, names, hosts)
    traced = Recording(
        0, None, times, names, hosts, busy=np.array([[100_000, 390_000], [60_000, 7_000], [0, 0]])
    )
    program, count = measurements.typical([written, quick, quick, traced], own_ns=3_000)
    assert count == 2
    assert program.ops["host"].tolist() == [50_000, -1, 57_000]
    # launched first at 7 - 3 of the 60 - 3 us that the segment took while it was traced
    assert program.ops["lead"].tolist() == [50_000, -1, 4_000]
    assert program.hosts.tolist() == [107_000] * 2
    collected = [quick, dataclasses.replace(quick, collected=40_000)]
    found, _ = measurements.typical([written, *collected, traced], own_ns=3_000)
    assert found.hosts.tolist() == [107_000, 67_000]
    # a kernel before which the device has nothing to do, 50 of the 60 us on: not sooner than that
    inner = Launches(np.array([1, 1]), np.array([7_000, 53_000]), np.array([0, 10_000]),
                     np.array([50_000, 60_000]), np.array([100_000, 400_000]),
                     np.array([0, 300_000]))  # fmt: skip
    paused, _ = measurements.typical(
        [written, quick, quick, dataclasses.replace(traced, launches=inner)], own_ns=3_000
    )
    assert paused.ops["lead"].tolist() == [50_000, -1, 50_000 - 10_000]
    # the first waits for the host; the second does not, and tells how fast the clocks are
    assert program.ops["ns"].tolist() == [round(100_000 * 400 / 390), -1, 400_000]
    assert program.ops["products"].tolist() == [-1, -1, -1]
    assert paused.ops["products"].tolist() == [0, -1, 300_000]
    nothing = dataclasses.replace(inner, busy=np.array([0, 400_000]))
    told, _ = measurements.typical(
        [written, quick, quick, dataclasses.replace(traced, launches=nothing)], own_ns=3_000
    )
    assert told.ops["products"].tolist() == [-1, -1, 300_000]
    # a delay that hits another segment in every iteration is in no median: it stays where it was
    late = [Recording(0, None, times, names, [(0, 50_000 + more), (90_000, 150_000 + other)])
            for more, other in ((0, 0), (20_000, 0), (0, 20_000))]  # fmt: skip
    program, _ = measurements.typical([written, *late, traced], own_ns=3_000)
    assert program.ops["host"].tolist() == [70_000, -1, 57_000]
    untraced, _ = measurements.typical([written, quick], own_ns=3_000)
    assert untraced.ops["host"].tolist() == [-1, -1, -1]
    # iterations that were not recorded took the host a tenth less
    clocks = [96_300, 90_000, 99_000]
    program, _ = measurements.typical([written, quick, quick, traced], own_ns=3_000, clocks=clocks)
    assert program.ops["host"].tolist() == [45_000, -1, round(57_000 * 0.9)]
    assert program.hosts.tolist() == [96_300, 96_300, *clocks]


def test_the_host_of_an_iteration_that_is_not_recorded(monkeypatch):
    from megatron_prism.runtime.recorder import measurements, recorder

    now = [0]
    monkeypatch.setattr(measurements, "perf_counter_ns", lambda: now[0])

    def takes(ns):
        def answer(group, *args, **kwargs):
            now[0] += ns
            return (group, args, kwargs)

        return answer

    one, rests = recorder.Recorder(0, "cuda"), []

    def synchronized():  # as the watch wraps it
        told = one.host_waited("device")
        now[0] += 900_000
        rests.append(told)
        if told:
            one.host_resumed()

    monkeypatch.setattr(measurements.torch.cuda, "synchronize", synchronized)
    one.clock.start()
    with one.scope(phase="forward"):
        now[0] += 60
    with one.scope(phase="backward"):
        now[0] += 40
    assert rests == [True, True]  # a launch never waits for a place in the queue
    assert one.record("tp", "all_reduce", takes(7_000), (1,), {"x": 2}) == ("tp", (1,), {"x": 2})
    now[0] += 20

    def fails(group):
        # what an answer calls and waits for is a part of it
        assert one.record("dp", "barrier", takes(500), (), {}) == ("dp", (), {})
        assert not one.host_waited("item")
        raise ValueError

    with pytest.raises(ValueError):
        one.record("tp", "barrier", fails, (), {})
    now[0] += 3
    assert one.host_waited("device")
    now[0] += 40_000
    one.host_resumed()
    assert one.clock.stop() == 123
    assert rests == [True, True, False]  # the last behind the call that answered
    with one.scope(phase="optimizer"):
        assert len(rests) == 3
    assert not one.host_waited("device")  # nothing runs any more
    assert one.record("tp", "barrier", takes(5), (), {}) == ("tp", (), {})


@pytest.mark.ci
def test_full_collections_of_garbage_are_left_out_of_the_hosts_time(monkeypatch):
    from megatron_prism.runtime.recorder import measurements

    now = [0]
    monkeypatch.setattr(measurements, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(measurements.torch.cuda, "synchronize", lambda: None)

    def takes_long(phase, info):
        now[0] += (phase == "start") * (500_000 if info["generation"] == 2 else 30)

    one, callbacks = measurements.HostClock(), list(gc.callbacks)
    for _ in range(2):
        one.start()
        gc.callbacks.append(takes_long)  # behind the clock's own
        now[0] += 7
        gc.collect()
        gc.collect(1)  # the job's own habit
        one.call(lambda group: gc.collect(), "tp", (), {})  # left out already, and once
        gc.disable()
        gc.collect()  # by the job, which does so in whichever iteration it likes (--manual-gc)
        gc.enable()
        assert one.stop() == 500_037
        gc.callbacks.remove(takes_long)
    assert gc.callbacks == callbacks


def test_the_share_of_the_critical_path_in_which_gpus_wait_for_python():
    from megatron_prism.report.metrics import timeline_metrics

    found = replayed(WORLD)
    share = (100 * US + CALL_NS) / found.iteration_ns
    assert timeline_metrics(found).host == pytest.approx(share)
    plain = replayed(WORLD.replace(" host=100us lead=30us", "").replace(" host=20us", ""))
    assert timeline_metrics(plain).host is None


def test_a_trace_shows_what_the_host_issues_when():
    from megatron_prism.report import chrome_trace

    trace = json.loads(chrome_trace.render_timeline(replayed(WORLD)))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e.get("name") == "thread_name"}
    hosts = [e for e in trace if e.get("cat") == "host"]
    assert {names[e["tid"]] for e in hosts} == {"host"}
    found = [(e["name"], float(e["ts"]), float(e["dur"])) for e in hosts]
    assert found == [("issues compute 0F", 0, 100), ("issues all_reduce 0F", 100, CALL_NS / US),
                     ("issues compute 0F", 120, 20), ("issues all_reduce 0F", 140, 20)]  # fmt: skip
    plain = WORLD.replace(" host=100us lead=30us", "").replace(" host=20us", "")
    assert '"host"' not in chrome_trace.render_timeline(replayed(plain))


def hosted(ranks):
    return f"""prism-program 1
world size={ranks} tp={ranks}
program rank=0 ranks=0-{ranks - 1}
0F compute ns=10us host=1ms
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
"""


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_hosts_spread_moves_the_iterations_that_it_decides(ranks):
    from megatron_prism.features.predict.sampler import Sampler
    from megatron_prism.features.predict.variability import Variability
    from megatron_prism.replay.priced_graph import price

    made = price(parse(hosted(ranks)), machine="h200").timeline
    sampler = Sampler(made, 1)
    assert sampler.hosted
    still = Variability("none", 0.0, 0.0, 0.0, 0.0, "test")
    varied = Variability("host", 0.0, 0.0, 0.0, 0.0, "test", host=0.05)
    alone = sampler.draw(still, 10)
    assert np.ptp(alone) == 0
    count = 20_000
    times = sampler.draw(varied, count)[:, 0]
    # a segment of 1 ms and a call, of the slowest of ``ranks`` hosts: the maximum of lognormals
    level = np.array([0.05, 0.5, 0.95])

    scores = np.array([NormalDist().inv_cdf(q ** (1 / ranks)) for q in level])
    expected = (alone[0, 0] - 1e6 - CALL_NS) + (1e6 + CALL_NS) * np.exp(0.05 * scores)
    assert np.quantile(times, level) == pytest.approx(expected, rel=0.004)
    again = Sampler(made, 1).draw(varied, count)[:, 0]
    assert (times == again).all()


def test_host_times_of_iterations_are_kept_and_fitted(tmp_path):
    from megatron_prism.core.errors import ProgramError
    from megatron_prism.core.programs import program
    from megatron_prism.features.predict.variability import fitted, read_variability

    rng = np.random.default_rng(3)
    made = parse(hosted(2))
    one = made.programs[0]
    hosts = np.rint(1e6 * np.exp(0.04 * rng.standard_normal(200))).astype(np.int64)
    samples = np.full((200, 1), 10_000) + rng.integers(0, 300, (200, 1))
    one = dataclasses.replace(one, samples=samples, hosts=hosts)
    made = dataclasses.replace(made, programs=(one,))
    program.save(made, tmp_path / "x.prism")
    back = program.load(tmp_path / "x.prism")
    assert back.programs[0].hosts.tolist() == hosts.tolist()
    found = fitted(back, read_variability("public"))
    assert found.host == pytest.approx(0.04, rel=0.15)
    assert "host:" in found.source
    bad = dataclasses.replace(
        made, programs=(dataclasses.replace(one, hosts=hosts.reshape(2, -1)),)
    )
    program.save(bad, tmp_path / "y.prism")
    with pytest.raises(ProgramError, match="hosts of program 0"):
        program.load(tmp_path / "y.prism")


def test_what_ifs_change_the_device_and_leave_the_host():
    from megatron_prism.replay import whatif

    made = world_graph.build(parse(WORLD))
    h200, h100 = machine("h200"), machine("h100")
    known = Calibration(host={("all_reduce", False): 7_000}, source="x")
    here = costs.price_ops(made, h200, known)
    edits = (whatif.moved(h200, known, h100), whatif.faster_calls("2", "all_reduce"),
             whatif.slow_ranks([0, 1], 3))  # fmt: skip
    there, faster, slowed = (edit.prices(made, here, h200) for edit in edits)
    assert slowed.compute[0][0] == 3 * here.compute[0][0]
    for prices in (there, faster, slowed):
        for mine, given in ((prices.lead, here.lead), (prices.host, here.host)):
            assert mine[0][: len(given[0])].tolist() == given[0].tolist()
        assert {prices.sources[i] for i in prices.host_source[0]} <= set(here.sources)


def test_a_program_that_knows_its_host_meets_one_that_does_not():
    """The one waits for its host, 100 us and a call, the other has delays in its 90 us."""
    text = """prism-program 1
world size=2 tp=2
program rank=0
0F compute ns=10us host=100us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
program rank=1
0F compute ns=90us
0F all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1024 reduce=sum
"""
    found = replayed(text)
    assert [found.spans(i)["start"][1] for i in range(2)] == [100 * US + CALL_NS] * 2
    assert [int(prices.sum()) for prices in found.prices.host] == [100 * US + CALL_NS, 0]
    assert found.spans(1)["ready"][1] == 90 * US
