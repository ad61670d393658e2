"""``prism replay``: what it prints, the files it writes or refuses to; the page in a browser."""

import dataclasses
import itertools
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.programs import TP, WORLDS, edit, healthy, with_rank
from helpers.timelines import HOSTILE, hostile, replayed, tiny

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core.programs import program
from megatron_prism.core.world import World
from megatron_prism.features.hang.fault_plan import parse
from megatron_prism.features.snapshots import snapshot
from megatron_prism.features.snapshots.report import render_snapshot
from megatron_prism.features.sweep.space import SweepPoint
from megatron_prism.features.sweep.sweep import Row, Sweep
from megatron_prism.features.verify import verdict
from megatron_prism.features.verify.compare import LayoutDifference
from megatron_prism.replay.costs.machine import machines
from megatron_prism.replay.priced_graph import price
from megatron_prism.report.page import allow_script
from megatron_prism.report.replay import render_html, render_text

SLICES = Path(__file__).parents[1] / "golden" / "slices" / "dense_pp2"
REAL = Path(__file__).parents[2] / "benchmarks" / "results" / "snapshots"
FULL = REAL / "oom_dp2-oom-rank0.pickle.xz"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def world(tmp_path):
    return str(program.save(tiny(), tmp_path / "world.prism"))


def run(*words, capsys):
    status = cli.main(["replay", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_it_prints_the_page_of_text(world, capsys):
    status, out, err = run(world, capsys=capsys)
    assert (status, err) == (0, "")
    *lines, note, following = out.splitlines(keepends=True)
    assert "".join(lines) == render_text(replayed(tiny()))
    assert note == "machine: H200 is assumed, since nobody names one: --machine h100\n"
    assert following == f"next: prism fit {world}\n"


def test_a_schedule_has_an_order_and_no_times(tmp_path, capsys):
    bare = "prism-program 1\nworld size=1\nprogram rank=0 ranks=0\n0F compute{}\n0B compute{}\n"
    for words, warned in (("", True), (" ns=1000", False), (" flops=1000", False)):
        file = tmp_path / "bare.txt"
        file.write_text(bare.format("", words))
        status, _, err = run(file, capsys=capsys)
        assert (status, "no segment says how long it takes" in err) == (0, warned)


def test_files_are_written_and_never_overwritten(world, tmp_path, capsys):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    words = (world, "--html", page, "--trace", trace)
    status, _, err = run(*words, capsys=capsys)
    assert status == 0
    assert f"wrote {page}" in err
    assert page.read_text(encoding="utf-8") == render_html(replayed(tiny()))
    assert json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    page.write_text("mine")
    status, out, err = run(*words, capsys=capsys)
    assert (status, out) == (2, "")
    assert "--force" in err
    assert page.read_text() == "mine"
    assert not trace.exists()
    assert run(*words, "--force", capsys=capsys)[0] == 0
    assert page.read_text() != "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "trace.json", "world.prism"]


def figures_of(*words, capsys):
    status, out, err = run(*words, "--json", capsys=capsys)
    assert (status, err) == (0, "")
    return json.loads(out)


def test_what_ifs_are_named_and_change_what_they_say(tmp_path, capsys):
    """Against closed forms: two stages of nothing but one segment and one call each."""
    text = """prism-program 1
    world size=8 tp=2
    source tokens_per_iteration=800
    program ranks=0-7
    - compute ns=10ms flops=1 traffic=36GB
    - all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=64M reduce=sum
    """
    world = tmp_path / "w.txt"
    world.write_text(text)
    plain = figures_of(world, capsys=capsys)
    moves = plain["iteration_ns"] - 10_000_000
    assert moves > 100_000
    assert "what-if" not in plain["source"]

    slow = figures_of(world, "slow=5:3/2", "slow=tp=0,dp=0:2", capsys=capsys)
    assert slow["iteration_ns"] == 20_000_000 + moves
    assert "rank 5 computes 3/2 times as long; rank 0 computes 2 times" in slow["source"]["what-if"]
    assert any(source["text"].startswith("assumed: x 2") for source in slow["sources"])

    for words in ("all_reduce:2", "TENSOR_MODEL_PARALLEL_GROUP:2", "all_reduce@:2"):
        fast = figures_of(world, f"faster={words}", capsys=capsys)
        assert fast["iteration_ns"] == 10_000_000 + -(-moves // 2)
        assert "2 times as fast" in fast["source"]["what-if"]
    both = "faster=all_reduce@TENSOR_MODEL_PARALLEL_GROUP:1/2"
    assert figures_of(world, both, capsys=capsys)["iteration_ns"] == 10_000_000 + 2 * moves

    more = figures_of(world, "dp=8", capsys=capsys)
    assert more["sizes"].startswith("16 ranks")
    assert more["tokens_per_s"]["value"] == pytest.approx(2 * plain["tokens_per_s"]["value"])
    assert "data-parallel size 8 instead of 4" in more["source"]["what-if"]

    half = json.loads(machines()["h200"].read_text(encoding="utf-8"))
    half |= {"memory_rate": half["memory_rate"] / 2, "name": "half an H200"}
    (tmp_path / "half.json").write_text(json.dumps(half))
    moved = figures_of(world, f"moved={tmp_path / 'half.json'}", capsys=capsys)
    start = half["kernel_ns"]  # of a kernel, which memory does not decide
    assert moved["iteration_ns"] == pytest.approx(20_000_000 - start + moves, abs=start // 50)
    assert moved["source"]["what-if"] == "on half an H200"
    _, out, _ = run(world, "dp=8", "slow=0:2", capsys=capsys)
    assert "  assumed      data-parallel size 8 instead of 4: " in out


def test_measured_segments_are_not_priced_as_another_machines(tmp_path, capsys):
    text = """prism-program 1
    world size=1
    source device="NVIDIA H200"
    program ranks=0
    - compute ns=10ms
    """
    world, other = tmp_path / "w.txt", tmp_path / "mine.json"
    world.write_text(text)
    other.write_text(machines()["h200"].read_text(encoding="utf-8"))
    name = next(name for name in machines() if name != "h200")
    status, _, err = run(world, "--machine", str(name), capsys=capsys)
    assert status == 2
    assert f"fix: --machine h200 moved={name}" in err
    assert run(world, capsys=capsys)[0] == 0
    assert run(world, "--machine", str(other), capsys=capsys)[0] == 0
    assert run(world, "--machine", "h200", f"moved={name}", capsys=capsys)[0] == 0


@pytest.mark.parametrize(("device", "name"), [("NVIDIA H100 80GB HBM3", "H100"), ("", "H200")])
def test_the_machine_is_the_one_of_the_slices(device, name):
    made = dataclasses.replace(tiny(), source={"device": device})
    assert price(made).machine.name.startswith(f"8 x {name} ")


def test_a_calibration_of_another_machine_is_named(world, tmp_path, capsys):
    file = tmp_path / "cal.json"
    rows = [{"op": "all_reduce", "ranks": 2, "bytes": 8192, "ns": 123_456}]
    for source, words, status in (
        ("4 x NVIDIA H200, NCCL 2.28.9", ["--machine", "b200"], 2),
        ("4 x NVIDIA H200, NCCL 2.28.9", ["moved=gb200_nvl72"], 2),
        ("nccl-tests: NVIDIA H100 80GB HBM3 NCCL 22809", [], 2),
        ("4 x NVIDIA GB200", ["--machine", "gb200_nvl72"], 0),
        ("4 x NVIDIA H200, NCCL 2.28.9", [], 0),
        ("2 x CPU, gloo", ["--machine", "b200"], 0),
    ):
        file.write_text(json.dumps({"format": 1, "source": source, "collectives": rows}))
        found, _, err = run(world, "--calibration", str(file), *words, capsys=capsys)
        assert found == status, (source, words)
        assert (f"another machine than {(words or ['h200'])[-1].rpartition('=')[2]}" in err) == (
            status == 2
        )


def test_what_is_modelled_widens_the_figure(tmp_path, capsys):
    """A shape that nobody measured: roofline, flagged, never zero."""
    world = tmp_path / "w.txt"
    text = "prism-program 1\nworld size=1\nprogram ranks=0\n- compute {}\n- compute ns=3ms\n"
    world.write_text(text.format("ns=1ms"))
    sure = figures_of(world, capsys=capsys)
    assert (sure["low_ns"], sure["iteration_ns"], sure["high_ns"]) == (4_000_000,) * 3
    for work in ("flops=685000000000 traffic=1", "flops=0", "traffic=8"):
        world.write_text(text.format(work))
        found = figures_of(world, capsys=capsys)
        modelled = found["iteration_ns"] - 3_000_000
        assert modelled > 0
        assert found["high_ns"] - found["iteration_ns"] == pytest.approx(0.3 * modelled, abs=1)
        assert found["iteration_ns"] - found["low_ns"] == pytest.approx(0.2 * modelled, abs=1)
    _, out, _ = run(world, capsys=capsys)
    assert "  between      3.0" in out or "  between      3 ms and" in out
    world.write_text(text.format("flops=685000000000000"))
    _, out, _ = run(world, capsys=capsys)
    assert "kernels   −" in out
    assert "never ran: the worst of eight" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["speed=9"], "does not understand speed=9"),
        (["--machine", "abacus"], "cannot read a machine, abacus"),
        (["--iterations", "0"], "--iterations 2 is settled"),
        (["slow=2"], "slow=517:1.2"),
        (["faster=all_reduce"], "faster=all_reduce@default_pg:2"),
        (["faster=all_reduce@EMBEDDING_GROUP:2"], "its groups are"),
        (["faster=allreduce:2"], "did you mean all_reduce?"),
        (["microbatches=7"], "not in the order of Megatron's scheduler"),
        (["--html", "/proc/page.html"], "cannot write to /proc"),
        (["--html", "same", "--trace", "same"], "two outputs"),
    ],
)
def test_bad_usage_says_what_to_type(world, words, says, capsys):
    status, out, err = run(world, *words, capsys=capsys)
    assert (status, out) == (2, "")
    assert says in err
    assert "fix: " in err


@pytest.mark.parametrize("place", ["world.prism", "link", "slices/slice-000000.prism"])
def test_what_is_read_is_not_written(place, tmp_path, capsys):
    folder = tmp_path / "slices"
    folder.mkdir()
    for name in ("world.prism", "slices/slice-000000.prism"):
        program.save(healthy(WORLDS[2]), tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "world.prism")
    whole = (tmp_path / place).read_bytes()
    read = tmp_path / "world.prism" if place != "slices/slice-000000.prism" else folder
    status, _, err = run(read, "--html", tmp_path / place, "--force", capsys=capsys)
    assert (status, (tmp_path / place).read_bytes()) == (2, whole)
    assert "is what is read" in err


def test_programs_that_do_not_fit_have_no_timeline(tmp_path, capsys):
    ops = list(healthy(WORLDS[2]).of(5))
    edit("all_reduce", TP, dtype="fp32")(ops)
    broken = program.save(with_rank(healthy(WORLDS[2]), 5, ops), tmp_path / "broken.prism")
    status, out, err = run(broken, "--html", tmp_path / "page.html", capsys=capsys)
    assert (status, out) == (1, "")
    assert "<-- here" in err
    assert f"fix: prism check {broken}" in err
    assert not (tmp_path / "page.html").exists()


# -- in a browser --------------------------------------------------------------------------------
DRIVER = Path(__file__).with_name("report_driver.js").read_text(encoding="utf-8")


def in_browser(tmp_path, source, driver=DRIVER):
    """What the driver, put into the page with its own hash, has to say."""
    (tmp_path / "page.html").write_text(allow_script(source, driver), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
             f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
             "--virtual-time-budget=3000", "--dump-dom",
             f"file://{tmp_path / 'page.html'}"]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *words], capture_output=True, text=True, timeout=120, check=True
    )
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return re.search(r'data-said="([^"]*)"', done.stdout), errors


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize(("make", "sought"), [(tiny, 2), (hostile, 1)])
def test_tabs_zoom_details_and_search_work_and_labels_stay_text(make, sought, tmp_path):
    said, errors = in_browser(tmp_path, render_html(replayed(make())))
    assert errors == []
    tabs = ["pipeline", "breakdown", "critical", "collectives", "memory", "provenance", "reading"]
    assert said[1].split() == [
        *(f"1:{tab}:true" for tab in tabs),
        "drawn:true", "views:5", "whole:true", "details:true", "pinned:true", "released:true",
        f"sought:{sought}", f"next:{str(sought > 0).lower()}",
        "path:true", "strange:0", "scripts:2",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_links_that_calls_share_are_drawn(tmp_path):
    driver = """document.getElementById("tab-links").click();
      document.body.dataset.said = document.querySelectorAll("#links table tr").length + " rows";"""
    timeline = prism.replay(prism.load(SLICES), what_if=prism.WhatIf(network="rails"))
    said, errors = in_browser(tmp_path, render_html(timeline), driver)
    assert errors == []
    assert said[1] == f"{1 + len(timeline.to_json()['links'])} rows"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_foreign_script_does_not_run(tmp_path):
    """Even if a label did become markup, the policy would hold it."""
    source = render_html(replayed(tiny())).replace("</main>", f"</main>{HOSTILE}", 1)
    _, errors = in_browser(tmp_path, source)
    assert any("Content Security Policy" in line for line in errors)


def a_sweep(size=4, **axes):
    """Of so many points; ``axes``: besides tp, one value for all."""

    def point(key, ns, gib):
        stage = {"count": 1, "compute": ns // 2, "exposed": {TP: ns // 4},
                 "waiting": {TP: ns // 8}, "idle": ns // 8}  # fmt: skip
        mine = {"tp": key} | {name: values[key % len(values)] for name, values in axes.items()}
        return {"key": key, "axes": mine, "iteration_ns": ns, "low_ns": ns * 9 // 10,
                "high_ns": ns * 11 // 10, "memory": {"bytes": gib << 30, "stage": "stage 0"},
                "tokens_per_gpu": 512.0, "mfu": 0.4, "bubble": 0.1, "exposed": 0.2,
                "p95_ns": None, "stages": [stage]}  # fmt: skip

    rows = tuple(Row(i + 1, False, point(i, (20 + i) * 10**8, 60 - i), None) for i in range(size))
    dropped = (SweepPoint({"tp": 3}, None, "64 heads are no multiple of 3", "no layout"),)
    commands = {i: ["--tensor-model-parallel-size", str(i)] * (1 + len(axes)) for i in range(size)}
    return Sweep("a job", "iteration", "h200", 80 << 30, {"tp": list(range(size)), **axes}, rows,
                 dropped, commands)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_every_page_looks_right_in_a_browser(tmp_path, monkeypatch):
    """1,400 and 390 pixels wide, light and dark: nothing overlaps, is cut off or an error."""
    script, verified = str(tmp_path / "pretrain_gpt.py"), tmp_path / "verify.html"
    Path(script).touch()
    first = LayoutDifference("gradient", 1, "output_layer.weight", "rank 0", 0.5, 1e-5, (), (3, 9))
    judged = verdict.Verdict((script,), World(16, tp=8), World(4, tp=2), [["bf16", "1", "0", ""]],
                             same=False, difference=first, worst={"gradient": 7e3})  # fmt: skip
    monkeypatch.setattr(verdict, "verify", lambda *args, **how: judged)
    words = ["verify", "--prism-world-size", "16", "--html", str(verified), "--", script]
    assert cli.main(words) == 1
    priced = price(healthy(World(64, tp=4, pp=4)), machine="h200")
    forecast = prism.predict(priced, samples=200)
    compared = prism.compare(priced, priced.again(slow={5: 1.5}), names=("as it is", "slow"))
    fault = parse("drop@rank=5,group=tp,nth=2")
    stopped = prism.diagnose_faults(healthy(World(64, tp=4, pp=4)), [fault]).verdict
    pages = {
        "replay": priced.timeline.to_html(),
        "predict": forecast.to_html(),
        "compare": compared.to_html(),
        "hang": stopped.to_html(),
        "verify": verified.read_text(encoding="utf-8"),
        "fit": prism.fit(prism.load(SLICES), limit=36 << 20, machine="h200").to_html(),
        "out of memory": render_snapshot(FULL.name, snapshot.read(FULL)),
        "healthy": prism.hang(programs=tiny()).to_html(),
        "sweep": a_sweep().to_html(),
        "wide sweep": a_sweep(
            40, pp=[2, 4], vpp=[1, 5], cp=[1, 2], ep=[1], micro_batch_size=[1, 2],
            recompute_granularity=["none", "selective", "full"], world_size=[512, 1024],
            overlap_moe_expert_parallel_comm=[True, False], global_batch_size=[1024, 2048],
        ).to_html(),
        "snapshot": snapshot.compare(snapshot.read(FULL), prism.load(SLICES)).to_html(),
        "snapshots": snapshot.RankedSnapshots({
            f"rank {rank}": snapshot.grown(*series) for rank, series in enumerate(
                itertools.pairwise(map(snapshot.read, [FULL, *REAL.glob("dense_*rank*"), FULL])))
        }).to_html(),
    }  # fmt: skip
    browser = runpy.run_path(str(Path(__file__).parents[2] / "docs/screenshots.py"))
    for scheme in ("light", "dark"):
        tabs, wrong = browser["inspect"](pages, scheme)
        assert wrong == []
        assert len(tabs) == 2 * len(pages)
        assert tabs["predict", 390] == ["distribution", "moves", "provenance", "reading"]
        assert tabs["compare", 1400][0] == "compare"
        assert tabs["hang", 1400][0] == "waits"
        assert tabs["snapshot", 390] == ["compared", "reading"]
        assert tabs["snapshots", 1400] == ["compared", "processes", "reading"]
        assert tabs["sweep", 390] == ["answer", "all", "pair", "dropped", "provenance", "reading"]
