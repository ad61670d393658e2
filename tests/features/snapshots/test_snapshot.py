"""Snapshots of real processes (2 x H100, torch 2.11), and files that are none."""

import gzip
import json
import pickle
from pathlib import Path

import pytest

from megatron_prism.cli.main import main
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program import Builder, Programs
from megatron_prism.features.fit import oom
from megatron_prism.features.snapshots import snapshot
from megatron_prism.memory import peaks

REAL = Path(__file__).parents[3] / "benchmarks" / "results" / "snapshots"
DENSE, FULL = (REAL / f"{name}-rank0.pickle.xz" for name in ("dense_tp2sp-it3", "oom_dp2-oom"))
COUNTED = json.loads((REAL / "index.json").read_text())["snapshots"]
MIB = 1 << 20


@pytest.mark.parametrize("name", COUNTED)
def test_peak_and_segments_are_those_that_torch_counted(name):
    found, counted = snapshot.read(REAL / name), COUNTED[name]
    top = peaks.known_peak(found.program)
    assert top.num_bytes == sum(top.by_kind.values())
    assert found.peak_reserved == found.modelled
    if counted["allocated"] is not None:  # it ran out of memory before it could count
        assert (top.num_bytes, found.modelled) == (counted["allocated"], counted["reserved"])
    assert found.whole
    assert found.segments == ((), ())  # those of the end are the same, one by one


def test_phases_follow_from_the_frames():
    found = snapshot.read(DENSE)
    steps = [op.label for op, it in zip(found.program, found.iterations, strict=True) if it == 2]
    assert list(dict.fromkeys(steps)) == ["0F", "0B", "1F", "1B", "G", "-", "O"]
    kinds = peaks.known_peak(found.program).by_kind
    assert kinds["param"] == 1_420_376_576  # bf16; main parameters and two states in fp32 beside it
    assert kinds["optim"] - 6 * kinds["param"] < 2 * MIB


def test_the_request_that_failed():
    found = snapshot.read(FULL)
    assert found.failed is not None
    assert (found.failed.size, found.failed.label, found.failed.iteration) == (
        18_874_368_000,
        "1F",
        1,
    )
    assert found.failed.site == "core/tensor_parallel/cross_entropy.py:25"
    assert found.fits_expandable() is True


def event(action, addr, size, *frames, stream=0):
    rows = [{"filename": file, "name": name, "line": 1} for file, name in frames]
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": rows}


def stored(tmp_path, events, segments=(), name="one.pickle"):
    path = tmp_path / name
    data = pickle.dumps({"segments": list(segments), "device_traces": [[], events]})
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def segment(*blocks, size=2 * MIB, address=0):
    rows = [{"size": size, "requested_size": size, "state": state, "frames": []}
            for size, state in blocks]  # fmt: skip
    return {"address": address, "total_size": size, "device": 1, "stream": 0, "blocks": rows}


def test_what_stood_before_the_history_counts(tmp_path):
    events = [event("alloc", 4096, 1024), event("free_requested", 512, 512),
              event("free_completed", 512, 512)]  # fmt: skip
    blocks = (
        (512, "inactive"),
        (512, "inactive"),
        (3072, "active_allocated"),
        (1024, "active_allocated"),
    )
    found = snapshot.read(stored(tmp_path, events, [segment(*blocks)], "one.pickle.gz"))
    assert peaks.known_peak(found.program).num_bytes == 512 + 3072 + 1024
    assert not found.whole
    assert found.free == (1024, 512)


def test_a_snapshot_without_history_is_what_is_alive(tmp_path):
    blocks = (1 * MIB, "active_allocated"), (1 * MIB, "inactive")
    found = snapshot.read(stored(tmp_path, [], [segment(*blocks)]))
    assert peaks.known_peak(found.program).num_bytes == 1 * MIB
    assert found.peak_reserved is None


def test_recomputation_and_autograds_thread_are_backward(tmp_path):
    forward = ("x/megatron/core/pipeline_parallel/schedules.py", "forward_step")
    again = ("x/megatron/core/tensor_parallel/random.py", "backward")
    events = [event("alloc", 1, 512, forward), event("alloc", 2, 512, again, forward),
              event("alloc", 3, 512, forward), event("alloc", 4, 512)]  # fmt: skip
    program = snapshot.read(stored(tmp_path, events)).program
    assert [op.label for op in program][1::2] == ["0F", "0B", "1F", "1B"]


@pytest.mark.parametrize("size", [32 * MIB, 8_519_680])
def test_what_products_keep_over_iterations_is_cublas_workspace(tmp_path, size):
    forward = ("x/megatron/core/tensor_parallel/layers.py", "forward"), ("x/a.py", "forward_step")
    step = ("x/megatron/core/optimizer/optimizer.py", "step")
    workspace = event("alloc", 0, size, *forward)
    activation = event("alloc", 64 * MIB, size, *forward)
    of_first_iteration = [workspace, event("alloc", 128 * MIB, 512, step)]
    whole = stored(tmp_path, [*of_first_iteration, activation])
    by_kind = peaks.known_peak(snapshot.read(whole).program).by_kind
    # an activation of the last iteration may be as large
    assert by_kind["work"] == size
    assert sum(by_kind.values()) == 2 * size + 512
    first = stored(tmp_path, of_first_iteration)
    assert peaks.known_peak(snapshot.read(first).program).by_kind["work"] == 0


def test_the_workspace_of_transformer_engine_is_one(tmp_path):
    made = ("x/transformer_engine/pytorch/cpp_extensions/gemm.py", "get_cublas_workspace")
    events = [event("alloc", 0, MIB, made, ("x/a.py", "get_model"))]
    program = snapshot.read(stored(tmp_path, events)).program
    assert peaks.known_peak(program).by_kind["work"] == MIB


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        # torchtitan, and with it whatever calls torch.nn.Module and Tensor.backward
        (("_wrapped_call_impl", "forward_backward_step", "train_step", "<module>"), "forward"),
        (("_engine_run_backward", "backward", "forward_backward_step", "train_step"), "backward"),
        # hooks and recomputation, which autograd calls on a thread of its own
        (("foreach_reduce", "post_backward"), "backward"),
        (("_wrapped_call_impl", "recompute_fn", "unpack_hook"), "backward"),
        (("_wrapped_call_impl", "forward_step", "evaluate"), ""),
        (("_apply", "to_empty", "<module>"), ""),
    ],
)
def test_phases_of_other_frameworks(names, phase):
    place = snapshot._place([{"filename": "/x/train.py", "name": n, "line": 3} for n in names])
    assert place.phase == phase
    assert place.kind == ("param" if "to_empty" in names else "")


def test_frames_of_cpp_name_no_line(tmp_path):
    """As in torch's stacks="all": "" and ??, or the file that a library was built from."""
    cpp = [("", "c10::Allocator"), ("??", "PyObject_Call"), ("/w/src/c++11/thread.cc", "run")]
    forward = ("/home/x/model.py", "forward"), ("/x/torch/nn/modules/module.py",
                                                "_wrapped_call_impl")  # fmt: skip
    engine = ("engine.cpp", "torch::autograd::Engine::thread_main(x)")
    events = [event("alloc", 1, 512, *cpp, *forward), event("alloc", 2, 512, *cpp, engine)]
    found = snapshot.read(stored(tmp_path, events))
    assert [one.site for one in peaks.known_peak(found.program).holdings] == [
        "/home/x/model.py:1", "autograd's thread"]  # fmt: skip
    assert [op.label for op in found.program][1::2] == ["0F", "0B"]


def test_frames_of_torch_2_0_are_in_the_blocks_history(tmp_path):
    block = segment((2 * MIB, "active_allocated"))
    block["blocks"][0]["history"] = [event("", 0, 1, ("/home/x/opt.py", "init"))]
    del block["blocks"][0]["frames"]
    found = snapshot.read(stored(tmp_path, [], [block]))
    assert [one.site for one in peaks.known_peak(found.program).holdings] == ["/home/x/opt.py:1"]


def test_a_private_pool_takes_nothing_of_others(tmp_path):
    """As of a CUDA graph: its segment has room, and the next request has another one."""
    pool = segment((512, "active_allocated"), (2 * MIB - 512, "inactive"), address=1 << 30)
    other = segment((512, "active_allocated"), (2 * MIB - 512, "inactive"), address=2 << 30)
    events = [event("segment_alloc", 1 << 30, 2 * MIB), event("alloc", 1 << 30, 512),
              event("segment_alloc", 2 << 30, 2 * MIB), event("alloc", 2 << 30, 512)]  # fmt: skip
    shared = snapshot.read(stored(tmp_path, events, [pool, other]))
    assert (shared.modelled, shared.segments) == (2 * MIB, ((2 * MIB,), ()))
    apart = {**pool, "segment_pool_id": (0, 1)}
    found = snapshot.read(stored(tmp_path, events, [apart, other]))
    assert (found.peak_reserved, found.modelled, found.segments) == (4 * MIB, 4 * MIB, ((), ()))


def test_an_option_of_the_allocator_that_is_not_modelled_stops_nothing(tmp_path, capsys):
    path = stored(tmp_path, [event("alloc", 1, 2 * MIB)])
    value = pickle.loads(path.read_bytes())
    value["allocator_settings"] = {"PYTORCH_ALLOC_CONF": "large_segment_size_mb:64"}
    path.write_bytes(pickle.dumps(value))
    assert main(["fit", str(path)]) == 0
    assert "large_segment_size_mb of PYTORCH_CUDA_ALLOC_CONF is not" in capsys.readouterr().out


def test_pages_of_an_expandable_segment_are_given_back(tmp_path):
    at, page = 1 << 40, 20 * MIB
    whole = {**segment((page, "active_allocated"), size=page, address=at), "is_expandable": True}
    events = [event("segment_map", at, page), event("alloc", at, page),
              event("segment_map", at + page, page), event("alloc", at + page, page),
              event("free_requested", at + page, page), event("free_completed", at + page, page),
              event("segment_unmap", at + page, page)]  # fmt: skip
    found = snapshot.read(stored(tmp_path, events, [whole]))
    assert (found.peak_reserved, found.modelled) == (2 * page, 2 * page)
    assert (-1, 0, 0) in found.requests  # the cache is emptied here


def test_code_and_damage_are_refused(tmp_path):
    path = tmp_path / "one.pickle"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(UsageError, match="nothing was executed"):
        snapshot.read(path)
    for name, whole in (("a.pickle.xz", DENSE.read_bytes()),
                        ("a.pickle.gz", stored(tmp_path, [], name="b.pickle.gz").read_bytes()),
                        ("a.pickle", stored(tmp_path, []).read_bytes())):  # fmt: skip
        path = tmp_path / name
        for parts in range(16):
            path.write_bytes(whole[: len(whole) * parts // 16])
            with pytest.raises(UsageError, match="memory snapshot") as caught:
                snapshot.read(path)
            assert "\n" not in caught.value.message


def slices(sizes, states=0):
    builder = Builder()
    if states:
        builder.memory(99, states, "optim:exp_avg @")
    builder.add("mark")
    for number, size in enumerate(sizes):
        builder.memory(number, size, f"@core/layer.py:{number}")
        builder.add("compute", phase="forward", microbatch=0)
    builder.add("compute", phase="optimizer")
    return builder.build(0)


def test_the_first_request_that_differs_is_named(tmp_path):
    forward = ("x/megatron/core/pipeline_parallel/schedules.py", "forward_step")
    events = [event("alloc", i, size * MIB, forward) for i, size in enumerate((2, 3, 5))]
    found = snapshot.compare(
        snapshot.read(stored(tmp_path, events)),
        Programs.one_per_rank([slices([2 * MIB, 4 * MIB, 5 * MIB])]),
    )
    assert [one.num_bytes for one in found.only_real] == [3 * MIB]
    assert [(one.num_bytes, one.site) for one in found.only_emulated] == [
        (4 * MIB, "core/layer.py:1")
    ]
    assert (found.asked, found.aligned, found.common) == (10 * MIB, 7 * MIB, 7 * MIB)


def test_an_error_is_a_request_in_the_first_iteration_or_later():
    program = slices([1 << 30, 3 << 30, 3 << 30], states=4 << 30)
    text = "Tried to allocate 3.00 GiB. GPU 0 has … 4.00 GiB is allocated by PyTorch"
    (best, *rest) = oom.candidates([program], oom.parse(text))
    assert (best.site, best.first, best.allocated) == ("core/layer.py:2", True, 4 << 30)
    assert len(rest) == 3
    # torch says the segment that it asked the device for: 20 MiB from 1 MiB on, then whole 2 MiB
    small = slices([3 * MIB, 11 * MIB]), slices([13 * MIB])
    for said, sizes in (("20.00", [3 * MIB]), ("12.00", [11 * MIB]), ("14.00", [13 * MIB])):
        found = oom.candidates(small, oom.parse(f"Tried to allocate {said} MiB"))
        assert [one.num_bytes for one in found] == sizes
    with pytest.raises(UsageError, match="Tried to allocate"):
        oom.parse("CUDA error: out of memory")


def test_the_command_says_where_and_why(capsys):
    assert main(["fit", str(FULL), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["failed"]["fits_expandable"] is True
    assert value["peak_allocated"] == 74_406_678_016
    room = value["reserved"] + value["failed"]["device_free"]
    assert main(["fit", str(FULL)]) == 1
    assert f"next: prism fit SLICES --device none --limit {room}B" in capsys.readouterr().out


def test_what_a_process_holds_more_is_named_by_its_line(tmp_path, capsys):
    kept = ("x/megatron/core/cache.py", "keep")
    first = [event("alloc", 1, 2 * MIB, kept)]
    freed = [event(what, 3, 512) for what in ("alloc", "free_requested", "free_completed")]
    more = [*first, event("alloc", 2, 3 * MIB, kept), *freed]
    names = [str(stored(tmp_path, events, name=name))
             for events, name in ((first, "a.pickle"), (more, "b.pickle"))]  # fmt: skip
    assert main(["compare", *names, "--json", "--exit-code"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["grown"] == 3 * MIB
    assert [(one["site"], one["count"]) for one in value["by"]] == [("core/cache.py:1", 1)]
    assert main(["compare", names[0], names[0], "--exit-code"]) == 0


def test_a_series_parts_what_grows_each_time_from_what_has_grown_once(tmp_path, capsys):
    def event_of(line, size):
        return event("alloc", line, size, (f"x/megatron/core/{line}.py", "keep"))

    cache = event_of(2, 5 * MIB)
    for iteration, events in ((10, []), (110, [cache, event_of(3, 1 * MIB)]),
                              (1010, [cache, event_of(3, 9 * MIB)])):  # fmt: skip
        stored(tmp_path, [event_of(1, MIB), *events], name=f"it{iteration}.pickle")
    names = [str(tmp_path / f"it{iteration}.pickle") for iteration in (1010, 10, 110)]
    assert main(["compare", *names, "--json", "--exit-code"]) == 1  # in the order of iterations
    value = json.loads(capsys.readouterr().out)
    assert (value["iterations"], value["leaking"]) == ([10, 110, 1010], 9 * MIB)
    assert [(one["site"], one["steps"], one["per_iteration"]) for one in value["by"]] == [
        ("core/3.py:1", [MIB, 8 * MIB], 9 * MIB / 1000),
        ("core/2.py:1", [5 * MIB, 0], None),
    ]
    assert main(["compare", *names]) == 0
    assert "9,437,184 B are of lines that grow each time" in capsys.readouterr().out


def ranks(folder, sizes):
    folder.mkdir()
    forward = ("x/megatron/core/pipeline_parallel/schedules.py", "forward_step")
    for rank, size in enumerate(sizes):
        stored(folder, [event("alloc", 1, size * MIB, forward)], name=f"snapshot_{rank}.pickle")
    return str(folder)


def test_each_rank_beside_its_slices_or_an_earlier_snapshot(tmp_path, capsys):
    text = "prism-program 1\nworld size=2 pp=2\n"
    for rank, size in enumerate((4, 9)):
        text += f"program rank={rank}\n0F compute ns=1us\n- alloc storage=0 bytes={size}MiB\n"
        text += "O compute ns=1us\n"
    (tmp_path / "slices").write_text(text)
    now, slices = ranks(tmp_path / "now", (4, 8)), str(tmp_path / "slices")
    assert main(["compare", now, slices, "--json", "--exit-code"]) == 1
    each = json.loads(capsys.readouterr().out)["ranks"]
    assert [(one["rank"], one["real"], one["emulated"]) for one in each.values()] == [
        (0, 4 * MIB, 4 * MIB), (1, 8 * MIB, 9 * MIB)]  # fmt: skip
    assert main(["compare", now, slices]) == 0
    assert "snapshot_1.pickle:" in capsys.readouterr().out  # which differs most
    # a name that says no rank: the slices that have most of its blocks
    (tmp_path / "now" / "snapshot_1.pickle").rename(tmp_path / "other.pickle")
    assert main(["compare", str(tmp_path / "other.pickle"), slices, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] in (0, 1)
    then = ranks(tmp_path / "then", (1, 8, 4))
    ranks(tmp_path / "later", (1, 8, 7))
    assert main(["compare", then, str(tmp_path / "later"), "--json"]) == 0
    each = json.loads(capsys.readouterr().out)["ranks"]
    assert {name: one["grown"] for name, one in each.items()} == {
        "rank 0": 0, "rank 1": 0, "rank 2": 3 * MIB}  # fmt: skip
    assert main(["compare", slices, then]) == 2
    assert "snapshots come first" in capsys.readouterr().err


def test_of_several_ranks_the_largest_is_explained(tmp_path, capsys):
    kept = ("x/megatron/core/cache.py", "keep")
    first = [event("alloc", 1, 2 * MIB, kept)]
    stored(tmp_path, [*first, event("alloc", 2, 3 * MIB, kept)], name="rank10.pickle")
    stored(tmp_path, first, name="rank2.pickle.gz")
    assert main(["fit", str(tmp_path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["peak_allocated"] == 5 * MIB
    assert list(value["ranks"]) == ["rank2.pickle.gz", "rank10.pickle"]
    (differ,) = value["differ"]
    assert (differ["site"], differ["num_bytes"], differ["count"]) == ("core/cache.py:1", 3 * MIB, 1)
    assert main(["fit", str(tmp_path)]) == 0
    assert "rank10.pickle: no iteration" in capsys.readouterr().out


def test_an_error_ends_in_what_frees_memory_tried_on_the_slices(tmp_path, capsys):
    lines = ["prism-program 1", "world size=1", "program rank=0", "0F compute ns=1us"]
    lines += [f"- alloc storage={n} bytes=12MiB note=@core/a.py:{n}" for n in range(6)]
    lines += ["- alloc storage=20 bytes=60MiB note=@core/b.py:1", "O compute ns=1us"]
    path = tmp_path / "slices.txt"
    path.write_text("\n".join(lines))
    text = ("Tried to allocate 60.00 MiB. GPU 0 has … 2.00 MiB is free. 72.00 MiB is allocated by "
            "PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated")  # fmt: skip
    assert main(["fit", str(path), "--oom", text, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["limit"], value["changes"]) == (84 * MIB, [])
    assert value["candidates"][0]["site"] == "core/b.py:1"
    assert main(["fit", str(path), "--oom", text]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit into the 84 MiB of segments" in said
    assert "nothing that can be tried on the slices frees memory" in said


def test_a_baseline_with_a_real_run_parts_the_commit_from_the_emulation(tmp_path, capsys):
    text = "prism-program 1\nworld size=2\nprogram ranks=0-1\n- alloc storage=0 bytes={}MiB\n"
    for name, size in (("then", 4), ("now", 9)):
        (tmp_path / name).write_text(f"{text.format(size)}0F compute ns=1us\nO compute ns=1us\n")
    real = str(stored(tmp_path, [event("alloc", 1, 6 * MIB)], name="rank1.pickle"))
    then, now, kept = (str(tmp_path / name) for name in ("then", "now", "m.json"))
    assert main(["memory", "record", real, "-o", kept]) == 2
    assert f"prism memory record SLICES --real {real}" in capsys.readouterr().err
    assert main(["memory", "record", then, "-o", kept, "--real", real]) == 0
    capsys.readouterr()
    assert main(["memory", "check", now, "--baseline", kept]) == 1
    said = capsys.readouterr().out
    assert "the emulation was -2,097,152 B off, the commit's are +5,242,880 B" in " ".join(
        said.split()
    )
