"""Reports: every renderer over the same timelines, the empty and the hostile one included; the
parts of an iteration add up; traces follow the format's rules."""

import dataclasses
import itertools
import json
import random
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from helpers.programs import DP, PP, TP, WORLDS, healthy, stage_ops, with_rank
from helpers.timelines import hostile, replayed, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_prism as prism
from megatron_prism.core import groups
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.report import chrome_trace, memory, metrics, replay, words
from megatron_prism.report import page as frame

GOLDEN = Path(__file__).parents[1] / "golden" / "slices"


def empty():
    return Programs(World(1), (Program.from_ops(0, []),), np.zeros(1))


TIMELINES = {"tiny": tiny, "empty": empty, "hostile": hostile}
RENDERERS = {
    "text": replay.render_text,
    "perfetto": chrome_trace.render_timeline,
    "html": replay.render_html,
}


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("what", TIMELINES)
@pytest.mark.parametrize("name", RENDERERS)
def test_every_renderer_takes_every_timeline(name, what, iterations):
    made = replayed(TIMELINES[what](), iterations)
    shown = RENDERERS[name](made)
    assert shown.endswith("\n")
    assert shown == RENDERERS[name](made)  # no clocks, no random names


# -- numbers ---------------------------------------------------------------------------------------
def random_world(world, seed):
    """A healthy world with random durations, and with a rank or two of their own."""
    rng = random.Random(seed)

    def other(op):
        return dataclasses.replace(op, ns=rng.choice([0, 7, 900, 31_000])) if op.ns >= 0 else op

    programs = healthy(world)
    changed = tuple(Program.from_ops(p.rank, map(other, p)) for p in programs.programs)
    programs = dataclasses.replace(programs, programs=changed)
    for _ in range(rng.randrange(3)):
        rank = rng.randrange(world.size)
        programs = with_rank(programs, rank, [other(op) for op in programs.of(rank)])
    return programs


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(WORLDS[:4]), st.integers(0, 2**32), st.integers(1, 3))
def test_the_parts_of_an_iteration_add_up(world, seed, iterations):
    made = replayed(random_world(world, seed), iterations)
    found = metrics.timeline_metrics(made)
    assert sum(one.count for one in found.classes) == world.size
    for one in found.classes:
        parts = [one.compute, *one.exposed.values(), *one.waiting.values(), one.idle]
        assert min(parts) >= 0
        assert sum(parts) == one.total == made.iteration_ns
    assert sum(part.ns for part in found.path) == made.iteration_ns
    assert sum(source.path_ns for source in found.sources) == made.iteration_ns
    critical = [part.ns for part in found.path if part.what == "compute"]
    assert sum(one.critical for one in found.classes) == sum(critical)
    parts = found.computing + found.exposed + found.bubble + found.idle
    assert parts == pytest.approx(1 if made.iteration_ns else 0)
    rows = replay.path_rows(made)
    assert sum(row.end - row.start for row in rows) == made.iteration_ns
    assert all(row.start == before.end for before, row in itertools.pairwise(rows))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 3)])
def test_the_bubble_of_forwards_then_backwards(p, m):
    """(p - 1) / (m + p - 1) with free communication, whatever a step takes (GPipe, 2019)."""
    world, made = World(p, pp=p), []
    for stage in range(p):
        ops = []
        for phase, step in (("forward", 1), ("backward", -1)):
            first, last = (0, p - 1)[::step]
            for i in range(m):
                at = {"phase": phase, "microbatch": i}
                if stage != first:
                    ops.append(Op("recv", PP, "bf16", num_out=1, peer=-step, **at))
                ops.append(Op("compute", ns=1000 if step > 0 else 2000, **at))
                if stage != last:
                    ops.append(Op("send", PP, "bf16", num_in=1, peer=step, handle=i, **at))
        ops.append(Op("all_reduce", "default_pg", "fp32", 1, 1, "sum"))
        made.append(Program.from_ops(stage, ops))
    found = metrics.timeline_metrics(replayed(Programs.one_per_rank(made, world), collective_ns=0))
    assert found.iteration_ns == 3000 * (m + p - 1)
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert found.exposed == 0


def test_figures_that_the_slices_do_not_hold_are_unknown():
    found = metrics.timeline_metrics(replayed(healthy(WORLDS[1])))
    assert [found.tokens_per_s.value, found.mfu.value, found.flops_per_gpu.value] == [None] * 3
    assert "unknown: the slices do not say how many tokens" in replay.render_text(
        replayed(healthy(WORLDS[1]))
    )
    said = {"tokens_per_iteration": "4096", "model_flops_per_iteration": str(10**9)}
    made = replayed(dataclasses.replace(tiny(), source=said))
    found, seconds = metrics.timeline_metrics(made), made.iteration_ns / 1e9
    assert found.tokens_per_s.value == pytest.approx(4096 / seconds)
    assert found.flops_per_gpu.value == pytest.approx(2 * 10**9 / seconds)
    assert found.mfu.value == pytest.approx(10**9 / seconds / 8 / 989.4e12)
    assert "of 989 TFLOP/s dense bf16" in found.mfu.basis
    unknown = dataclasses.replace(made, prices=dataclasses.replace(made.prices, peak=0.0))
    assert "no peak" in metrics.timeline_metrics(unknown).mfu.basis
    made = replayed(dataclasses.replace(tiny(), source={**said, "tier": "cpu"}))
    assert metrics.timeline_metrics(made).mfu.value is None
    assert "unknown: the slices are of a CPU" in replay.render_text(made)
    assert "measured on a CPU" in replay.render_text(made)


def test_calls_are_means_over_the_ranks_that_make_them():
    found = {(c.name, c.group): c for c in metrics.timeline_metrics(replayed(tiny())).calls}
    assert found["all_reduce", TP].ranks == 8
    assert found["all_reduce", TP].calls == 2
    assert found["all_reduce", TP].bytes == 2 * 8192
    assert found["send", PP].ranks == found["recv", PP].ranks == 4
    assert found["send", PP].moving == found["recv", PP].moving > 0


# -- curves ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["dense_pp2", "moe_ep2", "interleaved", "cp2"])
def test_memory_over_time_adds_up_and_says_what_memory_check_says(name):
    programs = prism.load(GOLDEN / name)
    figures = prism.peak_memory(programs)
    found = memory.page_data(programs, figures, 80 << 30)
    assert [one["device"] for one in found["classes"]] == [
        one["peak_device"] for one in figures.classes.values()
    ]
    for one, peaked in zip(found["classes"], figures.classes.values(), strict=True):
        live = programs.of(int(re.match(r"\d+", peaked["ranks"])[0])).live_bytes()
        for rows in (one["by_kind"], one["by_module"]):
            assert np.array_equal(np.sum(rows, axis=0), live[one["events"]])
        assert live[one["event"]] == live.max() == peaked["peak_allocated"]
        assert one["event"] in one["events"]
        assert one["events"][-1] == live.size - 1
        parts = sum(size for _, size in one["parts"])
        assert parts + one["cached"] + one["nccl"] + one["context"] == one["device"]
        assert len(one["steps"]) >= 3


def test_a_replay_without_allocations_says_why_its_memory_is_unknown():
    assert memory.timeline_memory(healthy(WORLDS[2])).startswith("unknown: ")


# -- words -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("note", "says"),
    [
        ("gemm(8192x8192,7168x8192,8192x7168)bfloat16:962072674304:369098752",
         "matrix product 8,192 x 8,192 by 7,168 x 8,192"),
        ("add(4x2)float32:0:8; mm(4x2,2x3t)bfloat16:48:9*2; add_()int32:0:8*4",
         "matrix product 4 x 2 by 2 x 3, and 6 kernels more"),
        ("zero_(560005120)float32:0:4480040960", "zeroing 560,005,120"),
        ("cold_start()int32:0:0", "cold start"),
        ("anything", "anything"),
    ],
)  # fmt: skip
def test_kernels_in_words(note, says):
    assert words.kernels(note) == says


def test_modules_in_words():
    names = [
        "chunk3.decoder.layers.1.mlp.linear_fc1",
        "chunk3.decoder.layers.1.mlp",
        "",
        "embedding",
    ]
    assert words.modules(names) == ("layer 1's mlp.linear_fc1, mlp (counted in chunk 3); embedding")
    assert words.modules(["", ""]) == ""
    assert words.step("forward", 2, 0) == "forward of microbatch 2, chunk 0"
    assert words.step("", -1, -1) == "outside of steps"


def test_spans_are_described_by_what_they_compute_and_whose_it_is():
    data = replay.page_data(prism.replay(prism.load(GOLDEN / "dense_pp2")))
    said = [f"{what} of {where}" for what, phase, where, *_ in data["kinds"] if phase == "forward"]
    assert any(re.search(r"matrix product [\d, x]+ by .* of layer 0's .*mlp", one) for one in said)
    assert any(what.startswith("all-reduce of ") for what, *_ in data["kinds"])


def test_the_title_begins_with_the_model():
    source = (
        '{"given":{"--num-layers":"48","--hidden-size":"4096","--num-experts":"8"},"others":{}}'
    )
    assert (
        job_settings.title({"recipe": "llama3-70b_1024gpu_x"}, "8 ranks") == "llama3-70b, 8 ranks"
    )
    assert job_settings.title({"arguments": source}, "8 ranks") == (
        "48 layers of 4096, 8 experts, 8 ranks"
    )
    assert job_settings.title({}, "8 ranks") == "8 ranks"


@pytest.mark.parametrize(("group", "says"), [
    (TP, ("tp", "tp")), (PP, ("pp", "pp")), ("DATA_PARALLEL_GROUP_WITH_CP", ("dp", "dp")),
    ("EXPERT_DATA_PARALLEL_GROUP", ("edp", "dp")),
    ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", ("optim", "optim")),
    ("EXPERT_MODEL_PARALLEL_GROUP", ("ep", "ep")),
    ("EXPERT_TENSOR_PARALLEL_GROUP", ("etp", "tp")), ("MODEL_PARALLEL_GROUP", ("mp", "tp")),
    ("default_pg", ("world", "other")), ("my own", ("my own", "other")),
])  # fmt: skip
def test_groups_have_short_names_and_kinds(group, says):
    assert (groups.short_name(group), groups.kind(group)) == says
    style = (Path(groups.__file__).parents[1] / "report" / "page.css").read_text()
    colours = re.findall(rf"--{says[1]}: (#\w+)", style)
    assert len(colours) == 2  # light and dark, and no other kind has it
    for colour in colours:
        assert style.count(f": {colour};") == 1 or says[1] == "other"


@pytest.mark.parametrize("epsilon", [0, 1, 1000, 40_000, 10**9])
def test_merging_loses_no_span_and_no_time_between(epsilon):
    made = replayed(healthy(WORLDS[2]))
    spans = made.spans(1)
    codes = replay.step_codes(made, 1, spans)
    merged = replay.merge(spans, codes, epsilon)
    assert merged["count"].sum() == len(spans)
    assert merged["ready"].min() == spans["ready"].min()
    assert merged["end"].max() == spans["end"].max()
    assert (merged["start"] >= merged["ready"]).all()
    assert (merged["end"] >= merged["start"]).all()
    if not epsilon:
        assert (merged["start"] == spans["start"]).all()
    if epsilon == 10**9:  # one of each lane and step, before the iteration began and after
        kinds = zip(spans["lane"].tolist(), codes.tolist(), spans["ready"].tolist(), strict=True)
        assert len(merged) == len({(lane, code, at < 0) for lane, code, at in kinds})


# -- the trace -------------------------------------------------------------------------------------
def trace(made):
    return json.loads(chrome_trace.render_timeline(made))


@pytest.mark.parametrize("what", [*TIMELINES, "world"])
def test_the_trace_follows_the_format(what):
    made = replayed(TIMELINES[what]() if what in TIMELINES else healthy(WORLDS[2]))
    found = trace(made)
    assert found["displayTimeUnit"] == "ns"
    spans, flows, named = defaultdict(list), defaultdict(list), set()
    for event in found["traceEvents"]:
        assert {"ph", "pid", "tid"} <= set(event)
        assert event["ph"] in "XMsf"
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            start, ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert ns >= 0
            spans[place].append((start, start + ns, event["name"]))
        elif event["ph"] == "M":
            named.add((event["name"], *place))
        else:
            flows[event["id"]].append(event)
    for place, inside in spans.items():
        assert ("thread_name", *place) in named
        stack = []
        for start, end, _ in sorted(inside, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "spans of a thread must nest"
            stack.append(end)
    for pair in flows.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[0]["pid"] != pair[1]["pid"]
        for event in pair:
            at = round(event["ts"] * 1000)
            around = spans[event["pid"], event["tid"]]
            assert any(start <= at < end for start, end, name in around if name != "waiting")


def test_the_trace_has_every_span_to_the_nanosecond():
    made = replayed(healthy(WORLDS[2]))
    found = [e for e in trace(made)["traceEvents"] if e["ph"] == "X" and e["name"] != "waiting"]
    for index in range(len(made.graph.classes)):
        mine = [(e["args"]["op"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))
                for e in found if e["pid"] == index]  # fmt: skip
        spans = made.spans(index)
        begin = trace(made)["otherData"]["iteration_begins_ns"]
        kept = [(op, at - begin, end - begin) for op, at, end in mine]
        assert kept == [tuple(s) for s in spans[["op", "ready", "end"]].tolist()]


@pytest.mark.parametrize("what", [*TIMELINES, "world"])
def test_what_trace_processor_would_drop_is_not_there(what):
    """Perfetto's importer (src/trace_processor/importers/json/json_trace_parser_impl.cc and
    sorting/trace_sorter.h) drops events before 0, flows whose id is no number, whose end comes
    before their beginning or meets no open slice, X events without a duration, and empty names.
    Its binary is in no package, so its rules are held instead."""
    made = replayed(TIMELINES[what]() if what in TIMELINES else healthy(WORLDS[2]), iterations=3)
    events, begun = trace(made)["traceEvents"], {}
    open_at = defaultdict(list)
    for event in events:
        assert all(type(event[key]) is int and 0 <= event[key] < 1 << 32 for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["args"].get("name", "x")
            continue
        assert event["ts"] >= 0
        assert event["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            open_at[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for event in (e for e in events if e["ph"] in "sf"):  # sorted by time, stably
        key = event["cat"], event["name"], event["id"]
        assert type(event["id"]) is int
        at = open_at[event["pid"], event["tid"]]
        assert any(start <= event["ts"] < end for start, end in at)
        if event["ph"] == "s":
            assert key not in begun
            begun[key] = event["ts"]
        else:
            assert event["bp"] == "e"
            assert begun.pop(key) <= event["ts"]
    assert not begun


def test_a_rank_that_begins_early_is_in_the_trace():
    made = replayed(healthy(WORLDS[2]), iterations=3)
    indices = range(len(made.graph.classes))
    early = -min(int(made.spans(i)["ready"].min()) for i in indices)
    found = trace(made)
    assert found["otherData"]["iteration_begins_ns"] == early > 0
    assert min(e["ts"] for e in found["traceEvents"] if e["ph"] == "X") == 0


def test_arrows_lead_from_sends_to_receives_and_from_who_came_last():
    events = trace(replayed(tiny()))["traceEvents"]
    starts = [e for e in events if e["ph"] == "s"]
    assert [e["pid"] for e in starts if e["name"] == "message"] == [0, 0]
    assert [e["pid"] for e in starts if e["name"] == "came last"] == [1]
    (span,) = {
        json.dumps(e["args"], sort_keys=True)
        for e in events
        if e["ph"] == "X" and e["name"] == "all_reduce 1F0" and e["pid"] == 0
    }
    assert json.loads(span) == {
        "step": "1F0", "group": TP, "bytes": 8192, "dtype": "bf16", "site": "mappings.py:31",
        "duration is": "modelled: calls of other GPUs of this kind", "op": 4,
    }  # fmt: skip


# -- the page --------------------------------------------------------------------------------------
class Page(HTMLParser):
    """Elements with attributes, and the text of scripts."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.texts = [], defaultdict(list)
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts[self.tags[-1][0] if self.tags else ""].append(data)


@pytest.mark.parametrize("what", TIMELINES)
def test_the_page_is_self_contained_and_nothing_escapes(what):
    made = replayed(TIMELINES[what]())
    source = replay.render_html(made)
    page = Page(source)
    assert [tag for tag, _ in page.tags if tag in ("img", "link", "iframe", "object")] == []
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)
    data, script = page.texts["script"][0], source.rsplit("<script>")[-1].split("</script>")[0]
    found = json.loads(data)
    assert found == found | json.loads(json.dumps(replay.page_data(made)))
    name = "http://www.w3.org/2000/svg"  # of a namespace, which nobody asks for
    assert not re.search(r"https?://", source.replace(data, "").replace(name, ""))
    (policy,) = (a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert frame._hash(script) in policy
    assert "unsafe" not in policy


def test_scripts_write_text_and_never_markup():
    for file in frame.FOLDER.glob("*.js"):
        code = file.read_text(encoding="utf-8")
        forbidden = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|fetch\("
        )
        assert not re.search(forbidden, code), file


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_scripts_are_javascript(tmp_path):
    whole = tmp_path / "page.js"
    whole.write_text(
        replay.render_html(replayed(tiny())).rsplit("<script>")[-1].split("</script>")[0]
    )
    subprocess.run(["node", "--check", str(whole)], check=True)


@pytest.mark.slow
@pytest.mark.ci
def test_a_page_of_a_large_world_stays_small():
    world = World(8192, tp=8, pp=16, cp=2)
    programs = tuple(
        Program.from_ops(world.rank_at(pp=s), stage_ops(s, world, 720)) for s in world.stages
    )
    made = replayed(Programs(world, programs, world._along("pp", np.arange(world.size))))
    assert sum(len(made.spans(i)) for i in range(16)) > replay.SPANS
    source = replay.render_html(made)
    assert len(source) < 5_000_000
    assert json.loads(Page(source).texts["script"][0])["merged"] > 0


def test_of_many_classes_the_critical_ones_are_drawn():
    made = replay.page_data(replayed(healthy(World(80, pp=80))))
    assert len(made["rows"]) == replay.ROWS
    assert made["missing"] == 80 - replay.ROWS
    assert len(made["figures"]["classes"]) == 80
    assert DP in made["lanes"]


def test_a_gpu_that_waits_for_its_host_is_idle_and_no_bubble():
    """Kernels of 500 ns of which a host issues one in 2,000 ns, on one rank."""
    ops = [Op("compute", ns=500, host=2000, lead=2000) for _ in range(8)]
    programs = Programs.one_per_rank([Program.from_ops(0, ops)], World(1))
    timeline = replayed(programs)
    figures = metrics.timeline_metrics(timeline)
    assert figures.bubble == 0
    assert figures.computing + figures.idle == pytest.approx(1)
    assert figures.idle == pytest.approx(1 - 8 * 500 / timeline.iteration_ns)
    assert "GPUs waiting for their hosts" in replay.render_text(timeline)
