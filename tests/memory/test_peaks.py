"""Where memory peaks and what is alive there: programs written by hand, and a real small job."""

import dataclasses
import io
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs import program
from megatron_prism.core.programs.program import Builder, Programs
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.world import World
from megatron_prism.memory import blocks, job_peaks, peak_changes, peaks

TEXT = """
prism-program 1
world size=4 pp=2
program ranks=0-1
-    alloc       storage=0 bytes=1000 note="param:decoder[2]"
-    alloc       storage=1 bytes=2000 note="grad:decoder[2]"
-    alloc       storage=2 bytes=300  note="optim:exp_avg"
-    alloc       storage=3 bytes=7
0F0  compute     kernels=1
-    alloc       storage=4 bytes=64 note="decoder.layers.0.mlp @core/mlp.py:5"
-    alloc       storage=5 bytes=32 note="decoder.layers.1.mlp @core/mlp.py:5"
-    alloc       storage=6 bytes=16 note="decoder.layers.1.mlp @core/mlp.py:9"
0F0  compute     kernels=1
-    free        storage=6 bytes=16
-    alloc       storage=7 bytes=8 note="@core/pipeline_parallel/p2p_communication.py:3"
0B0  compute     kernels=1
-    alloc       storage=8 bytes=128 note="@core/schedules.py:1"
0B0  compute     kernels=1
-    free        storage=8 bytes=128
-    free        storage=7 bytes=8
-    free        storage=4 bytes=64
-    free        storage=5 bytes=32
O    compute     kernels=1
-    alloc       storage=9 bytes=1 note="@core/optimizer.py:1"
O    mark
program ranks=2-3
-    alloc       storage=0 bytes=50
O    compute     kernels=1
"""


def test_what_is_alive_at_the_peak():
    made = parse(TEXT)
    top = peaks.peak(made.programs[0])
    assert top.num_bytes == 1000 + 2000 + 300 + 7 + 64 + 32 + 8 + 128
    assert (top.op.label, top.index, top.site) == ("0B0", 3, "core/schedules.py:1")
    assert top.by_kind == {
        "param": 1000, "grad": 2000, "optim": 300, "master": 0, "act": 96, "comm": 8, "tmp": 128,
        "graph": 0, "work": 0, "mask": 0, "other": 7,
    }  # fmt: skip
    assert sum(top.by_kind.values()) == top.num_bytes
    act = next(h for h in top.holdings if h.kind == "act")
    assert act == peaks.HeldMemory("act", "decoder.layers.*.mlp", "core/mlp.py:5", 96, 2)
    assert [h.num_bytes for h in top.holdings] == sorted(
        (h.num_bytes for h in top.holdings), reverse=True
    )


def test_what_python_drops_on_the_way_out_of_a_step_was_temporary():
    """Storage 6 goes before the first op of the next step; the peak of the forward has it."""
    lines = TEXT.replace("storage=8 bytes=128", "storage=8 bytes=1")
    kinds = peaks.peak(parse(lines).programs[0]).by_kind
    assert kinds["tmp"] == 16
    assert kinds["comm"] == 0


def test_what_is_never_freed():
    """A leak of a forward is an activation, of the optimizer a state, of a backward a gradient."""
    build = Builder()
    for storage, phase in enumerate(("forward", "backward", "optimizer")):
        build.add("compute", phase=phase, kernels=1)
        build.memory(storage, 10**storage, "@core/x.py:1")
        build.add("compute", phase=phase, kernels=1)
    kinds = peaks.peak(build.build(0)).by_kind
    assert {k: v for k, v in kinds.items() if v} == {"act": 1, "grad": 10, "optim": 100}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-50, 50), st.integers(0, 5)), max_size=40))
def test_the_peak_is_that_of_a_loop(changes):
    """Storages that come, grow, shrink and go; summed up one event at a time."""
    build, live, most = Builder(), {}, 0
    build.add("compute", phase="forward", kernels=1)
    for storage, change, note in changes:
        change = max(change, -live.get(storage, 0))
        live[storage] = live.get(storage, 0) + change
        build.memory(storage, change, f"m.{note} @f:{note}" if note else "")
        most = max(most, sum(live.values()))
        build.add("compute", phase="backward" if note > 2 else "forward", kernels=1)
    top = peaks.peak(build.build(0))
    if not changes:
        assert top is None
    else:
        assert top.num_bytes == most == sum(top.by_kind.values())
        assert sum(h.num_bytes for h in top.holdings) == most


def _with_graphs():
    """The first program of TEXT, behind an iteration without CUDA graphs and their capture."""
    build = Builder()
    build.memory(0, 1000, "param:decoder[2]")
    build.memory(1, 300, "optim:exp_avg")
    build.add("compute", phase="forward", microbatch=1, kernels=1)
    build.memory(2, 5000, "decoder.layers.1.mlp @core/mlp.py:5")
    build.add("compute", phase="backward", microbatch=1, kernels=1)
    build.memory(2, -5000)
    build.memory(3, 64, "graph:decoder.layers.0 @core/cuda_graphs.py:7")
    build.memory(4, 64, "graph:decoder.layers.1 @core/cuda_graphs.py:7")
    build.memory(5, 6000, "graph:decoder.layers.1 @core/mlp.py:5")
    build.add("mark")
    return peaks.with_earlier(parse(TEXT).programs[0], build.build(0))


def test_the_peak_may_be_before_the_iteration_that_is_recorded(tmp_path):
    """A file keeps it; of a what-if whose iteration has more, it is the iteration's."""
    made = parse(TEXT)
    small = made.programs[0]
    graphed = _with_graphs()
    top = peaks.peak(graphed)
    assert top.num_bytes == graphed.peak_bytes() == 1000 + 300 + 64 + 64 + 6000
    assert (top.earlier, top.site) == (True, "core/mlp.py:5")
    kinds = {kind: size for kind, size in top.by_kind.items() if size}
    assert kinds == {"param": 1000, "optim": 300, "graph": 6128}
    in_graphs = [held.key[1:] for held in top.holdings if held.kind == "graph"]
    assert in_graphs == [("decoder.layers.*", "core/mlp.py:5"),
                         ("decoder.layers.*", "core/cuda_graphs.py:7")]  # fmt: skip
    assert peaks.sizes_at_peak(graphed) == {1000: 1, 300: 1, 64: 2, 6000: 1}
    assert peaks.iteration_peak(graphed) == peaks.peak(small)

    programs = dataclasses.replace(made, programs=(graphed, *made.programs[1:]))
    loaded = program.load(program.save(programs, tmp_path / "graphs.prism")).programs[0]
    assert peaks.peak(loaded) == top

    assert peaks.with_earlier(graphed, small) is graphed
    grown = graphed.allocations.copy()
    grown["bytes"][0] += 10_000
    larger = dataclasses.replace(graphed, allocations=grown)
    assert not peaks.peak(larger).earlier
    assert peaks.peak(larger).num_bytes == peaks.peak(small).num_bytes + 10_000


def test_pools_of_graphs_are_no_cache():
    """What they keep beyond tensors at the peak is theirs; the rest of what is reserved is cache;
    figures of releases that knew no graphs have none."""
    history = [
        (0, 1 << 30, 0, 0),
        (1, 100 << 20, -1, 0),
        (1, -(100 << 20), 0, 0),
        (-1, 0, 0, 0),
        (2, 30 << 20, 0, 0),
        (2, -(30 << 20), 0, 0),
    ]
    graphed = dataclasses.replace(
        parse(TEXT).programs[0], history=np.array(history, dtype=np.int64)
    )
    pools = blocks.graph_pools(graphed)
    assert pools == 100 << 20
    figures = {"peak_allocated": 1 << 30, "peak_reserved": (1 << 30) + (130 << 20),
               "graph_pools": pools, "by_category": {"graph": 8 << 20}}  # fmt: skip
    beside = job_peaks.beside_tensors(figures)
    assert (beside["pools"], beside["cache"]) == (92 << 20, 38 << 20)
    old = {**figures, "by_category": {}}
    del old["graph_pools"]
    beside = job_peaks.beside_tensors(old)
    assert (beside["pools"], beside["cache"]) == (0, 130 << 20)


def test_classes_of_equal_programs_are_one():
    made = parse(TEXT)
    twice = Programs(
        made.world, (*made.programs, dataclasses.replace(made.programs[0], rank=1)), [0, 2, 1, 1]
    )
    for programs in (made, twice):
        classes = job_peaks.peak_memory(programs).classes
        assert [(name, c["ranks"], c["count"]) for name, c in classes.items()] == [
            ("pp=0", "0,1", 2), ("pp=1", "2,3", 2)
        ]  # fmt: skip
        assert all(c["peak_reserved"] >= c["peak_allocated"] for c in classes.values())


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (range(16), "all"),
        (range(4), "pp=0"),
        ((0, 2, 4, 6, 8, 10, 12, 14), "tp=0"),
        ((4, 6), "tp=0;pp=1"),
        ((0, 5), "ranks=0,5"),
    ],
)
def test_names_of_classes(ranks, name):
    assert peaks.class_name(World(16, tp=2, pp=4), list(ranks)) == name


# -- a real job, with no GPU ----------------------------------------------------------------------
UNEVEN = [  # 1,024 GPUs; the last of four stages has 8 of 14 layers
    "world_size=1024",
    "pp=4",
    "vpp=null",
    "decoder_first_pipeline_num_layers=2",
    "decoder_last_pipeline_num_layers=8",
    "num_layers=14",
    "hidden_size=1024",
    "ffn_hidden_size=2048",
    "seq_length=512",
    "global_batch_size=1024",
]
HOARDER = """
import importlib.machinery, os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "megatron.core.transformer.mlp":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        plain = spec.loader.exec_module
        def exec_module(module):
            plain(module)
            forward, kept = module.MLP.forward, []
            def hoarding(self, hidden_states, *args, **kwargs):
                if os.environ["RANK"] == "0":
                    kept.append(hidden_states * 2)
                return forward(self, hidden_states, *args, **kwargs)
            module.MLP.forward = hoarding
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.megatron
def test_an_activation_that_is_kept_is_found_at_its_class_and_site(tmp_path, monkeypatch):
    """Every MLP of stage 0 keeps a copy of its input, 4 layers x 8 microbatches: found to the
    byte, at the module; stage 1 is as before."""
    pytest.importorskip("megatron.core")
    from rich.console import Console

    from megatron_prism.core.jobs import recipe as recipes
    from megatron_prism.emulate.jobs import recipe_job

    recipe = recipes.load("guard-gpt_16gpu_tp2pp2vp2_h200")
    quiet = Console(file=io.StringIO())
    plain = recipe_job.capture(recipe, tmp_path / "plain", console=quiet)
    before = job_peaks.peak_memory(plain, device=None)
    for one in before.classes.values():
        kinds = one["by_category"]
        assert all(kinds[k] > 0 for k in ("param", "grad", "optim", "act"))
        listed = sum(h["num_bytes"] for h in one["top"] if "cuBLAS" in h["module"])
        assert kinds["other"] - listed < one["peak_allocated"] // 100

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOARDER)
    path = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    planted = recipe_job.capture(recipe, tmp_path / "planted", console=quiet)
    changes = peak_changes.compare(before, job_peaks.peak_memory(planted, device=None))
    assert [(c.name, c.what) for c in changes] == [("pp=0", "grown"), ("pp=1", "same")]
    grown = changes[0]
    copy = 64 // 2 * 256 * 2  # seq / tp, hidden, bf16
    hoarded = [g for g in grown.origins if g.site.startswith("core/transformer/transformer_layer")]
    hoarded = [g for g in hoarded if g.module.endswith("decoder.layers.*.mlp") and g.num_bytes > 0]
    assert {g.kind for g in hoarded} == {"act", "other"}  # of this iteration, and of earlier ones
    assert all(g.num_bytes % copy == 0 for g in hoarded), grown
    assert sum(g.num_bytes for g in hoarded) >= 4 * 2 * 2 * copy  # layers, microbatches in flight
    every = peak_changes.compare(
        before, job_peaks.peak_memory(planted, device=None), leak_bytes=4096
    )
    leak = next(c for c in every if c.what == "leaks")
    assert (leak.name, len(every)) == ("pp=0", 3)  # and what the copies' graphs hold on to
    ours = [g for g in leak.origins if g.module.endswith("decoder.layers.*.mlp")]
    assert sum(g.num_bytes for g in ours) == 4 * 4 * copy  # layers, microbatches of an iteration
    assert leak.origins[0].site.startswith("core/transformer/transformer_layer")
    assert all(peaks.growth(program).num_bytes < 64 for program in plain.programs)


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param(
            "num_experts=4 moe_token_dispatcher_type=alltoall", id="experts", marks=pytest.mark.ci
        ),
    ],
)
def test_a_job_of_one_iteration_holds_what_a_longer_one_does(more, tmp_path):
    """The optimizer makes its states at the end of the first iteration: one more runs, said."""
    pytest.importorskip("megatron.core")
    from rich.console import Console

    from megatron_prism.core.jobs import recipe as recipes
    from megatron_prism.emulate.jobs import recipe_job

    figures, notes = [], []
    for iterations in (1, 2):
        words = ["prism.tier=meta", f"train_iters={iterations}", *more.split()]
        shown = io.StringIO()
        made = recipe_job.capture(
            recipes.load("tiny-gpt_1cpu", words),
            tmp_path / str(iterations),
            console=Console(file=shown, width=200),
        )
        figures.append(job_peaks.peak_memory(made, device=None).classes)
        notes.append("the optimizer's states begin at the end of the first" in shown.getvalue())
    assert figures[0] == figures[1]
    (figure,) = figures[0].values()
    assert figure["by_category"]["optim"] > figure["by_category"]["param"]
    assert notes == [True, False]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.megatron
def test_an_uneven_layout_runs_out_at_its_class_and_op(tmp_path):
    """1,024 ranks under a limit between the peaks of the fullest class and the others: that class,
    at an op of Megatron's; with the bytes that were missing it fits."""
    pytest.importorskip("megatron.core")
    from rich.console import Console

    from megatron_prism.core.jobs import recipe as recipes
    from megatron_prism.emulate.jobs import recipe_job

    recipe = recipes.load("guard-gpt_16gpu_tp2pp2vp2_h200", UNEVEN)
    made = recipe_job.capture(recipe, tmp_path / "s", console=Console(file=io.StringIO()))
    now = job_peaks.peak_memory(made, device=None)
    reserved = {name: one["peak_reserved"] for name, one in now.classes.items()}
    *others, most = sorted(reserved.values())
    assert reserved["pp=3"] == most
    assert now.classes["pp=3"]["count"] == 256
    limit = now.classes["pp=3"]["peak_allocated"] - (20 << 20)  # beneath what stands, and acts
    assert limit > others[-1]
    changes = peak_changes.compare(now, now, limit=limit)
    over = [c for c in changes if c.fails]
    assert [(c.name, c.what, c.level, c.ranks) for c in over] == [
        ("pp=3", "over", "reserved", "768-1023")
    ]
    program = made.of(768)
    place = blocks.overflow(program, limit)
    assert place.op.phase == "forward"
    assert place.op.microbatch == 0
    assert re.match(r"(core|transformer_engine)/\S+\.py:\d+$", place.site)
    missing = over[0].after - limit
    assert blocks.overflow(program, limit + missing) is None
    assert not any(c.fails for c in peak_changes.compare(now, now, limit=limit + missing))
    assert blocks.overflow(made.of(0), limit) is None


def test_what_came_before_the_iteration_may_not_fit():
    builder = Builder()
    builder.memory(0, 150 << 20, "a @core/a.py:1")
    builder.add("compute", ns=1)
    builder.memory(0, -(150 << 20), "")
    size = 600 << 20
    rows = [[0, size, 0, 0], [0, -size, 0, 1], [1, 150 << 20, 0, 2], [1, -(150 << 20), 0, 3]]
    program = dataclasses.replace(builder.build(0), history=np.array(rows))
    assert blocks.overflow(program, 700 << 20) is None
    place = blocks.overflow(program, 500 << 20)
    assert (place.where, place.size, place.reserved) == ("before the iteration", size, 0)
    assert blocks.overflow(program, 100 << 20).size == 150 << 20


def test_every_stream_has_a_pool_of_its_own(tmp_path):
    """What the main stream gave back serves no other; the file keeps who asked."""
    builder = Builder()
    builder.memory(0, 40 << 20, "a @core/a.py:1")
    builder.add("compute", ns=1)
    builder.memory(0, -(40 << 20))
    builder.memory(1, 40 << 20, "b @core/b.py:1", stream=1)
    builder.add("compute", ns=1)
    made = builder.build(0)
    assert made.streams.tolist() == [0, 0, 1]
    world = Programs.one_per_rank([made], World(1))
    assert (peaks.peak(made).num_bytes, blocks.reserved(made)[0]) == (40 << 20, 80 << 20)
    path = program.save(world, tmp_path / "w.prism")
    assert blocks.reserved(program.load(path).programs[0])[0] == 80 << 20
    alone = dataclasses.replace(made, streams=made.streams[:0])
    assert blocks.reserved(alone)[0] == 40 << 20
    odd = dataclasses.replace(made, streams=made.streams[:2])
    path = program.save(Programs.one_per_rank([odd], World(1)), tmp_path / "x.prism")
    with pytest.raises(ProgramError, match="streams of program 0 are "):
        program.load(path)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_rank_alone_has_a_device_that_keeps_up(settings):
    """Its blocks on other streams are back before they are asked for again; what waits for other
    ranks has them later, by how much is not known.
    """
    mib = 1 << 20
    history = []
    for storage in range(2):
        history += [[storage, 40 * mib, 0, storage], [storage, 0, 0, storage]]
        history += [[storage, -40 * mib, 0, storage + 1]]
    builder = Builder()
    builder.memory(0, 40 * mib, "")
    builder.add("compute", phase="forward", microbatch=0)
    builder.memory(0, -40 * mib)
    builder.add("compute", phase="optimizer")
    program = dataclasses.replace(builder.build(0), history=np.array(history))
    figures = {}
    for size in (1, 2):
        ranks = [dataclasses.replace(program, rank=rank) for rank in range(size)]
        job = Programs.one_per_rank(ranks, World(size=size))
        memory = job_peaks.peak_memory(job, alloc_conf=settings, device=None)
        figures[size] = memory.classes["all"]["peak_reserved"]
        assert memory.classes["all"]["reserved_between"] == [40 * mib, 80 * mib]
    assert figures == {1: 40 * mib, 2: 60 * mib}


def test_blocks_have_what_the_allocator_does_not_split_off():
    builder = Builder()
    builder.memory(0, 11 << 20, "optim:exp_avg")  # of a segment of 12 MiB: 1 MiB is left
    builder.memory(1, 22 << 20, "optim:exp_avg")  # of one of its own
    builder.add("compute", phase="forward", microbatch=0)
    builder.memory(2, 100, "")
    builder.add("compute", phase="optimizer")
    builder.memory(2, -100)
    program = builder.build(0)
    in_blocks = blocks.as_blocks(program)
    assert peaks.known_peak(program).num_bytes == (33 << 20) + 100
    assert peaks.known_peak(in_blocks).by_kind["optim"] == 34 << 20
    assert peaks.known_peak(in_blocks).num_bytes == (34 << 20) + 512
    assert in_blocks.live_bytes()[-1] == 34 << 20


def test_blocks_of_an_earlier_peak_are_those_of_the_process():
    """They are in the history; without one nobody knows them."""
    mib = 1 << 20
    before = Builder()
    before.memory(0, 11 * mib, "graph: @core/cuda_graphs.py:7")  # of a segment of 12 MiB
    before.memory(1, 100, "")
    before.add("compute", phase="forward", microbatch=0)
    builder = Builder()
    builder.memory(2, 1000, "param:decoder")
    builder.add("compute", phase="optimizer")
    program = peaks.with_earlier(builder.build(0), before.build(0))
    assert peaks.known_peak(blocks.as_blocks(program)).num_bytes == 11 * mib + 100
    history = [[0, 11 * mib, 0, 0], [1, 100, 0, 0], [0, -11 * mib, 0, 0], [2, 1000, 0, 0]]
    heard = dataclasses.replace(program, history=np.array(history))
    top = peaks.known_peak(blocks.as_blocks(heard))
    assert (top.num_bytes, top.earlier) == (12 * mib + 512, True)
    assert top.by_kind["graph"] == 11 * mib
