"""``prism memory``: what fails, by how much, at which line; and files that are no baselines."""

import dataclasses
import json
import pickle
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_prism.cli import job_slices
from megatron_prism.cli import main as cli
from megatron_prism.core.programs.ops import BEGUN
from megatron_prism.core.programs.program import save
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.emulate.jobs import recipe_job
from megatron_prism.features.fit import command as fit_command
from megatron_prism.features.fit.fit import TriedChange

HEAD = """
prism-program 1
world size=4 pp=2
source recipe=tiny megatron_core=0.16.1 torch=2.13.0 tier=meta
"""
STAGE = """
program ranks={ranks}
-    alloc       storage=0 bytes=1048576 note="param:decoder[2]"
0F0  compute     kernels=1
-    alloc       storage=1 bytes={act} note="decoder.layers.0.mlp @core/transformer/mlp.py:{line}"
0F0  compute     kernels=1
1F0  compute     kernels=1
-    alloc       storage=2 bytes=512 note="@core/schedules.py:7"
0B0  compute     kernels=1
-    free        storage=2 bytes=512
-    free        storage=1 bytes={act}
O    compute     kernels=1
"""


def world(first=1000, second=2000, line=5, head=HEAD):
    stages = (("0-1", first, line), ("2-3", second, 5))
    return head + "".join(STAGE.format(ranks=r, act=a, line=n) for r, a, n in stages)


@pytest.fixture
def job(tmp_path):
    """Writes a world's text; returns its path."""

    def write(name="now.txt", **more):
        path = tmp_path / name
        path.write_text(world(**more))
        return str(path)

    return write


@pytest.fixture
def baseline(job, tmp_path, capsys):
    path = str(tmp_path / "memory.json")
    assert cli.main(["memory", "record", job("was.txt"), "-o", path]) == 0
    assert "communicators as measured for 1 to 4 ranks" in " ".join(capsys.readouterr().out.split())
    return path


def run(capsys, *words):
    code = cli.main(["memory", *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_the_file_is_reviewable(baseline):
    text = Path(baseline).read_text()
    value = json.loads(text)
    assert value["schema"] == "prism.mem-baseline/1"
    assert text == json.dumps(value, indent=1, sort_keys=True) + "\n"
    one = value["classes"]["pp=0"]
    assert one["peak_allocated"] == (1 << 20) + 1000 + 512
    assert one["by_category"]["act"] == 1000
    assert one["at"] | {"op": 0} == {
        "step": "0B0", "phase": "backward", "microbatch": 0, "chunk": 0, "op": 0,
        "site": "core/schedules.py:7",
    }  # fmt: skip
    numbers = [x for x in re.findall(r": ([\d.]+)", text) if "." in x]
    assert numbers == []


def test_nothing_changed(baseline, job, capsys):
    code, out = run(capsys, "check", job(), "--baseline", baseline)
    assert (code, out) == (0, "no class grew\n")


@pytest.mark.parametrize(("grown", "tol", "code"), [
    (0, "0", 0), (1, "0", 1), (1, "1", 0), (1024, "1KiB", 0), (1025, "1 KiB", 1), (1024, "1023", 1),
])  # fmt: skip
def test_the_tolerance_is_exact(baseline, job, capsys, grown, tol, code):
    words = ("check", job(first=1000 + grown), "--baseline", baseline, "--tol", f"{tol}")
    assert run(capsys, *words)[0] == code


def test_the_limit_is_exact_and_takes_the_units_it_prints(job, tmp_path, capsys):
    path, baseline = job(), str(tmp_path / "memory.json")
    assert run(capsys, "record", path, "-o", baseline, "--device", "none")[0] == 0
    check = ("check", path, "--baseline", baseline, "--device", "none")
    reserved = json.loads(Path(baseline).read_text())["classes"]["pp=0"]["peak_reserved"]
    assert reserved == 2 << 20
    for limit, code in ((str(reserved), 0), (str(reserved - 1), 1), ("2 MiB", 0), ("1.999MiB", 1)):
        assert run(capsys, *check, "--limit", f"{limit}")[0] == code
    for headroom, code in (("1 MiB", 0), ("1048577", 1)):
        assert run(capsys, *check, "--limit", "3MiB", "--headroom", f"{headroom}")[0] == code
    said = "every class fits into 2 MiB (2,097,152 B) (reserved bytes only, device is unknown"
    assert said in run(capsys, *check, "--limit", "3MiB", "--headroom", "1MiB")[1]
    code, out = run(capsys, *check, "--limit", "1MiB")
    assert "fits into" not in out
    size = re.search(r"reserved ([\d.]+ \w+) \(", out)[1]
    assert run(capsys, *check, "--limit", f"{size}")[0] == 0


def test_growth_is_attributed(baseline, job, capsys):
    code, out = run(capsys, "check", job(first=5096), "--baseline", baseline)
    assert code == 1
    assert "pp=0 (ranks 0,1): grown +4,096 B" in out
    assert "act +4,096 B" in out
    assert "+4,096 B act core/transformer/mlp.py:5 decoder.layers.*.mlp" in " ".join(out.split())
    assert "pp=1" not in out
    assert out.endswith("1 failure\n")


def test_a_line_that_moved_is_no_growth_of_its_own(baseline, job, capsys):
    code, out = run(capsys, "check", job(first=1001, line=17), "--baseline", baseline)
    assert code == 1
    assert re.search(r"\+1 B  act +core/transformer/mlp.py:17\b", out)
    assert "mlp.py:5 " not in out


def test_classes_that_appear_and_vanish_fail(baseline, job, capsys):
    code, out = run(capsys, "check", job(first=7, second=7), "--baseline", baseline)
    assert code == 1
    assert "all (ranks 0-3): appeared" in out
    assert "pp=0 (ranks 0,1): vanished" in out
    assert "pp=1 (ranks 2,3): vanished" in out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("torch=2.13.0", "torch=2.14.0", "torch 2.13.0, now 2.14.0"),
        (" torch=2.13.0", "", "torch 2.13.0, now unknown"),
        ("meta", "meta transformer_engine=2.9", "transformer_engine unknown, now 2.9"),
    ],
)
def test_another_job_is_not_compared(baseline, job, capsys, old, new, says):
    path = job(head=HEAD.replace(old, new))
    code, out = run(capsys, "check", path, "--baseline", baseline)
    assert code == 2
    assert says in out
    assert "fix: prism memory update" in out
    assert cli.main(["compare", baseline, path]) == 0
    assert says.split()[0] + ": " in capsys.readouterr().out


def test_a_change_that_is_meant_is_taken_over(baseline, job, capsys):
    path = job(first=3000)
    assert cli.main(["compare", baseline, path, "--exit-code"]) == 1
    out = capsys.readouterr().out
    assert "+2,000 B" in out
    assert "times are not compared: a report of memory has no times" in out
    assert run(capsys, "update", path, "--baseline", baseline)[0] == 0
    assert run(capsys, "check", path, "--baseline", baseline)[0] == 0
    assert cli.main(["compare", baseline, path, "--exit-code"]) == 0


def fit(capsys, *words):
    code = cli.main(["fit", *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_fit_says_what_the_peak_is_made_of(job, capsys):
    code, out = fit(capsys, job(), "--class", "pp=1", "--top", "2", "--limit", "80GB")
    assert code == 0
    assert "the peak of pp=1: backward of microbatch 0, chunk 0 (0B0), compute" in out
    for what, size in (
        ("weights", "1 MiB"),
        ("activations", "1.953 KiB"),
        ("temporaries", "512 B"),
    ):
        assert re.search(rf"  {what} +{size}\n", out)
    assert re.search(r"\n    512 B  temporaries, 1 tensor:", out) is None  # the third
    assert cli.main(["fit", job(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["classes"]) == ["pp=0", "pp=1"]
    assert found["provenance"]["peak_allocated"].startswith("modelled")
    assert found["limit"] == 150109880320  # of the machine that is assumed


def test_a_card_of_80_gb_has_what_its_driver_says(job, capsys):
    """Exact sizes stay exact, and a number without a unit is asked about."""
    for text, limit in (("80GB", 85017493504), ("80 GB", 85017493504), ("40G", 42298834944),
                        ("80GiB", 80 << 30), ("79GB", 79 * 10**9)):  # fmt: skip
        assert cli.main(["fit", job(), "--limit", text, "--machine", "h100", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["limit"] == limit
    code, out = fit(capsys, job(), "--limit", "80")
    assert (code, "fix: --limit 80GB" in out) == (2, True)


@pytest.mark.parametrize(
    ("words", "now"),
    [
        ("memory explain DIR limit=80GiB top=3", "prism fit DIR --limit 80GiB --top 3"),
        ("memory diff a b", "prism compare a b"),
        ("fit DIR limit=80", "--limit 80"),
        ("replay DIR machine=h200", "--machine h200"),
        ("replay DIR --against B", "prism compare A B"),
        ("replay DIR --dp 64", "of the job itself: dp=64"),
    ],
)
def test_old_spellings_are_refused_with_the_new_one(words, now, capsys):
    assert cli.main(words.split()) == 2
    assert f"fix: {now}" in capsys.readouterr().err


def test_one_captured_rank_is_enough(job, tmp_path, capsys):
    programs = parse(Path(job()).read_text())
    SliceStore(tmp_path / "slices", programs.world, programs.source).put(programs.programs[1])
    code, text = fit(capsys, str(tmp_path / "slices"), "--limit", "80GB")
    assert code == 0
    assert "the peak of pp=1: " in text
    assert "pp=0" not in text
    assert "ranks 0,1 are left out" in text


def test_a_snapshot_is_what_memory_viz_reads(job, tmp_path, capsys):
    path = tmp_path / "one.pickle"
    assert fit(capsys, job(), "--class", "pp=1", "-o", str(path))[0] == 0
    (events,) = pickle.loads(path.read_bytes())["device_traces"]
    assert [(e["action"], e["size"]) for e in events[:3]] == [
        ("alloc", 1048576), ("alloc", 2000), ("alloc", 512)
    ]  # fmt: skip
    assert events[1]["frames"][0] == {
        "filename": "core/transformer/mlp.py", "line": 5, "name": "decoder.layers.0.mlp"
    }  # fmt: skip
    gone = [e for e in events if e["action"] == "free_completed"]
    assert [e["addr"] for e in gone] == [events[2]["addr"], events[1]["addr"]]
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert "512.0B" in viz.trace({"device_traces": [events], "segments": []})


def test_a_run_that_did_not_train_is_no_baseline(job, tmp_path, baseline, capsys):
    path = tmp_path / "half.txt"
    path.write_text(world().replace("O    compute     kernels=1\n", ""))
    kept = Path(baseline).read_text()
    for words in (
        ("record", str(path), "-o", str(tmp_path / "no.json")),
        ("update", str(path), "--baseline", baseline),
    ):
        code, out = run(capsys, *words)
        assert code == 2
        assert "made no optimizer step" in out
    assert not (tmp_path / "no.json").exists()
    assert Path(baseline).read_text() == kept


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("check", "{job}"), "needs a baseline"),
        (("check", "{job}", "--baseline", "{base}", "--tol", "-1"), "below 0"),
        (("check", "{job}", "--baseline", "{base}", "--headroom", "1"), "taken from a limit"),
        (("record", "{job}", "-o", "x.json", "--alloc", "backend:x"), "not modelled"),
    ],
)
def test_bad_words(baseline, job, capsys, words, says):
    words = [w.format(job=job(), base=baseline) for w in words]
    code, out = run(capsys, *words)
    assert code in (1, 2)
    assert says in out
    assert "fix: " in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--class", "pp=7"), "there is no class pp=7"),
        (("--draws", "5"), "which allocations depend on routing"),
        (("--routing", "uniform"), "--routing belongs to --draws"),
        (("--draws", "5", "--capacity", "0"), "leaves no token"),
        (("--limit", "1GiB", "--headroom", "4GiB"), "leaves nothing"),
    ],
)
def test_bad_words_of_fit(job, capsys, words, says):
    code, out = fit(capsys, job(), *words)
    assert code == 2
    assert says in out
    assert "fix: " in out


# -- leaks, and where memory runs out --------------------------------------------------------------
LEAK = """
program ranks=0-3
-    alloc       storage=0 bytes=1048576 note="param:decoder[2]"
-    alloc       storage=1 bytes=2097152 note="optim:exp_avg"
-    alloc       storage=2 bytes=8 note="@core/pipeline_parallel/schedules.py:256"
0F0  compute     kernels=1
-    alloc       storage=3 bytes=3145728 note="decoder.layers.0.mlp @core/transformer/mlp.py:5"
-    alloc       storage=4 bytes=8 note="@core/pipeline_parallel/schedules.py:256"
-    free        storage=2 bytes=8
0B0  compute     kernels=1
{free}
O    compute     kernels=1
"""
FREED = "-    free        storage=3 bytes=3145728"


def leaking(path, free="", iterations=2):
    """The program, which has a history of so many iterations; its first three storages stand."""
    (program,) = (made := parse(HEAD.replace(" pp=2", "") + LEAK.format(free=free))).programs
    rows = [[one, size, 0, 0] for _, one, size, _ in program.allocations.tolist()]
    rows[3:3] = [[BEGUN, 0, 0, 0]]
    rows[:0] = [[BEGUN, 0, 0, 0]] * (iterations - 1)
    program = dataclasses.replace(program, history=np.array(rows))
    return str(save(dataclasses.replace(made, programs=(program,)), path))


def test_what_an_iteration_leaves_behind_is_a_leak(tmp_path, capsys):
    """Also when the baseline leaks as much: its peak has not grown, and the job will still fail."""
    path, base = leaking(tmp_path / "a.prism"), str(tmp_path / "m.json")
    assert run(capsys, "record", path, "-o", base)[0] == 0
    code, out = run(capsys, "check", path, "--baseline", base)
    assert code == 1
    assert "all (ranks 0-3): leaks 3,145,728 B an iteration" in out
    assert "core/transformer/mlp.py:5  decoder.layers.*.mlp" in out
    assert "schedules.py:256" not in out  # replaced what it left the last time
    assert run(capsys, "check", path, "--baseline", base, "--leak", "3145728")[0] == 0
    assert run(capsys, "check", path, "--baseline", base, "--leak", "3145727")[0] == 1
    clean = leaking(tmp_path / "b.prism", FREED)
    assert run(capsys, "check", clean, "--baseline", base)[0] == 0
    assert json.loads(Path(base).read_text())["classes"]["all"]["growth"] == 3145728


def test_the_first_iteration_of_a_job_is_no_leak(tmp_path, capsys):
    path, base = leaking(tmp_path / "a.prism", iterations=1), tmp_path / "m.json"
    assert run(capsys, "record", path, "-o", str(base))[0] == 0
    assert json.loads(base.read_text())["classes"]["all"]["growth"] is None
    assert run(capsys, "check", path, "--baseline", str(base))[0] == 0


def test_over_the_limit_names_the_op_that_does_not_fit(tmp_path, capsys):
    """2 + 20 MiB of segments stand; the third MiB needs no other one, 25 MiB do."""
    big = LEAK.replace("storage=3 bytes=3145728", "storage=3 bytes=26214400")
    path, base = tmp_path / "a.txt", str(tmp_path / "m.json")
    path.write_text(HEAD.replace(" pp=2", "") + big.format(free=""))
    assert run(capsys, "record", str(path), "-o", base)[0] == 0
    words = ("check", str(path), "--baseline", base, "--leak", "1GiB", "--device", "none")
    code, out = run(capsys, *words, "--limit", "40MiB")
    assert code == 1
    assert "all (ranks 0-3): over the limit: reserved 48 MiB" in out
    assert f"next: prism fit {path} --limit 40MiB" in out
    missing = int(re.search(r"([\d,]+) B\) above", out)[1].replace(",", ""))
    limits = [("40MiB", 1), (str(40 * 1024 * 1024 + missing), 0)]
    limits.append((str(40 * 1024 * 1024 + missing - 1), 1))
    for limit, status in limits:
        assert run(capsys, *words, "--limit", limit)[0] == status
        code, out = fit(capsys, str(path), "--device", "none", "--limit", limit)
        assert code == status
    assert "runs out in 0B0 compute core/transformer/mlp.py:5: 26,214,400 B do not fit" in (
        " ".join(out.split())
    )


LINE = "torchrun --nproc-per-node 8 a.py"
MLP = "--recompute-modules mlp"


@pytest.mark.parametrize(
    ("kept", "source", "words", "expected"),
    [
        (LINE, {}, MLP, f"prism fit --limit 8GB --prism-job-flags '{MLP}' {LINE}"),
        (f"--prism-job-flags '--lr 1' {LINE}", {}, MLP,
         f"prism fit --limit 8GB --prism-job-flags '--lr 1 {MLP}' {LINE}"),
        (f"--prism-tier meta --prism-job-flags='--lr 1' {LINE}", {}, MLP,
         f"prism fit --limit 8GB --prism-tier meta --prism-job-flags '--lr 1 {MLP}' {LINE}"),
        ("a/r.yaml world_size=8 tp=4", {"recipe": "r"}, "b=1",
         "prism capture a/r.yaml world_size=8 tp=4 b=1 -o P-changed && "
         "prism fit --limit 8GB P-changed"),
        ("a/r.yaml world_size=8 tp=4 prism.tier=cpu seq_length=9", {"recipe": "r"}, "",
         "prism sweep a/r.yaml world_size=8 seq_length=9 tp=auto pp=auto --limit 8GB -o P-layouts"),
        ("", {"recipe": "r"}, "a='b c'", "prism capture r 'a=b c' -o P-changed && "
         "prism fit --limit 8GB P-changed"),
        ("", {}, "PYTORCH_CUDA_ALLOC_CONF=x:True", "prism fit --limit 8GB P/ --alloc x:True"),
        (LINE, {}, "", f"prism sweep tp=auto pp=auto --limit 8GB -o P-layouts {LINE}"),
        ("", {"recipe": "r"}, "", "prism sweep r tp=auto pp=auto --limit 8GB -o P-layouts"),
        ("", {}, "", "prism replay P/"),
    ],
)  # fmt: skip
def test_what_to_type_next_can_be_pasted(kept, source, words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("P").mkdir()
    if kept:
        job_slices.keep_line(Path("P"), shlex.split(kept))
    args = SimpleNamespace(machine=None, limit="8GB", given=[], line=[], programs="P/", settings=[])
    changes = (TriedChange(words, 1, True, 0),) if words else ()
    found = SimpleNamespace(fits=False, changes=changes)
    assert fit_command._next(args, found, SimpleNamespace(source=source)) == expected


def test_what_a_recipe_was_captured_with_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_job, "capture", lambda recipe, out, **_: out.mkdir())
    out, words = tmp_path / "P", ["tiny-gpt_1cpu", "seq_length=64"]
    cli.main(["capture", *words, "-o", str(out)])
    assert (out / ".line").read_text().split() == words
