"""``prism replay``: what it prints, the files it writes or refuses to; the page in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_graph import TP, WORLDS, edit, healthy, with_rank
from test_report import HOSTILE, hostile, replayed, tiny

from megatron_prism import cli, programs
from megatron_prism.report import html, text

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def world(tmp_path):
    return str(programs.save(tiny(), tmp_path / "world.prism"))


def run(*words, capsys):
    status = cli.main(["replay", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_it_prints_the_page_of_text(world, capsys):
    status, out, err = run(world, capsys=capsys)
    assert (status, err) == (0, "")
    assert out == text.render(replayed(tiny()))


def test_json_has_the_same_numbers(world, capsys):
    status, out, _ = run(world, "iterations=3", "--json", capsys=capsys)
    found = json.loads(out)
    assert status == 0
    assert found["iterations"] == 3
    assert found["iteration_ns"] == replayed(tiny(), 3).iteration_ns
    assert found["tokens_per_s"]["value"] is None
    assert found["classes"][0]["name"] == "stage 0"


def test_files_are_written_and_never_overwritten(world, tmp_path, capsys):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    words = (world, "--html", page, "--trace", trace)
    status, _, err = run(*words, capsys=capsys)
    assert status == 0
    assert f"wrote {page}" in err
    assert page.read_text(encoding="utf-8") == html.render(replayed(tiny()))
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


def test_a_calibration_is_used_and_named(world, tmp_path, capsys):
    file = tmp_path / "cal.json"
    rows = [{"op": "all_reduce", "ranks": 2, "bytes": 8192, "ns": 123_456}]
    file.write_text(json.dumps({"format": 1, "source": "two of mine", "collectives": rows}))
    _, out, _ = run(world, f"calibration={file}", capsys=capsys)
    assert "measured: calls (two of mine)" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["machin=h200"], "did you mean machine=h200?"),
        (["speed=9"], "use machine, calibration, iterations=…"),
        (["machine=abacus"], "there is no machine abacus"),
        (["calibration=/nowhere.json"], "cannot read /nowhere.json"),
        (["iterations=0"], "iterations=2 is settled"),
        (["iterations=1.5"], "iterations=1.5"),
        (["--html", "/nowhere/page.html"], "is no folder you may write to"),
        (["--html", "."], "is a folder"),
        (["--html", "same", "--trace", "same"], "two outputs"),
        (["--htm", "x"], "did you mean --html?"),
    ],
)
def test_bad_usage_says_what_to_type(world, words, says, capsys):
    status, out, err = run(world, *words, capsys=capsys)
    assert (status, out) == (2, "")
    assert says in err
    assert "fix: " in err


def test_programs_that_do_not_fit_have_no_timeline(tmp_path, capsys):
    ops = list(healthy(WORLDS[2]).of(5))
    edit("all_reduce", TP, dtype="fp32")(ops)
    broken = programs.save(with_rank(healthy(WORLDS[2]), 5, ops), tmp_path / "broken.prism")
    status, out, err = run(broken, "--html", tmp_path / "page.html", capsys=capsys)
    assert (status, out) == (1, "")
    assert "<-- here" in err
    assert f"fix: prism check {broken}" in err
    assert not (tmp_path / "page.html").exists()


# -- in a browser --------------------------------------------------------------------------------
DRIVER = Path(__file__).with_name("report_driver.js").read_text(encoding="utf-8")


def in_browser(tmp_path, source, driver=DRIVER):
    """What the driver, put into the page with its own hash, has to say."""
    own = f"'{html._hash(driver)}'".replace("'", "&#x27;")
    page = source.replace("script-src ", f"script-src {own} ", 1)
    page = page.replace("</body>", f"<script data-driver>{driver}</script></body>")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
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
@pytest.mark.parametrize("make", [tiny, hostile])
def test_tabs_zoom_and_tips_work_and_labels_stay_text(make, tmp_path):
    said, errors = in_browser(tmp_path, html.render(replayed(make())))
    assert errors == []
    tabs = ["pipeline", "breakdown", "critical", "collectives", "memory", "provenance", "reading"]
    assert said[1].split() == [
        *(f"1:{tab}:true" for tab in tabs),
        "drawn:true", "views:5", "whole:true", "tips:true", "path:true", "strange:0", "scripts:2",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_foreign_script_does_not_run(tmp_path):
    """Even if a label did become markup, the policy would hold it."""
    source = html.render(replayed(tiny())).replace("</main>", f"</main>{HOSTILE}", 1)
    _, errors = in_browser(tmp_path, source)
    assert any("Content Security Policy" in line for line in errors)
