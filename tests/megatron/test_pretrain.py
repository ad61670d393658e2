"""``megatron.training.pretrain`` driven through ``--prism-emulate``, as a user's own script would.

Each case is a process: attach, emulate, verdict, exit status.  Where the attach and the ending are
not what is tested it is a fork of one that has imported torch already.  Needs megatron.training
(0.19).
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT, forked

from megatron_prism.core.programs import slices
from megatron_prism.memory import blocks, peaks

pytestmark = [pytest.mark.megatron, TRAINING]

ATTACHES = any(
    entry.name == "megatron_prism"
    for entry in importlib.metadata.entry_points(group="torch.backends")
)
# a stock script attaches by itself; from a checkout that is not installed we start it ourselves
PYTHON = (sys.executable,) if ATTACHES else (sys.executable, "-m", "megatron_prism", "run")


def run(*flags, job=JOB, script=SCRIPT, launcher=PYTHON, env=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
    for name in ("RANK", "WORLD_SIZE", "PRISM_ARGS"):
        if name not in (env or {}):
            environment.pop(name, None)
    return subprocess.run(
        [*launcher, str(script), *job, *flags],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


WORLD = ("--prism-emulate", "--prism-world-size", "64", "--prism-tier", "cpu")
VPP = (*"--num-layers-per-virtual-pipeline-stage 1 --overlap-grad-reduce".split(),
       "--overlap-param-gather")  # fmt: skip
TE = (*"--transformer-impl transformer_engine --normalization RMSNorm".split(),
      *"--swiglu --disable-bias-linear".split())  # fmt: skip
MOE = (*"--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4".split(),
       *"--expert-tensor-parallel-size 1 --disable-bias-linear --sequence-parallel".split(),
       *"--moe-token-dispatcher-type alltoall".split())  # fmt: skip
MLA = tuple("--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 "
            "--qk-pos-emb-head-dim 8 --v-head-dim 16 --normalization RMSNorm "
            "--transformer-impl transformer_engine".split())  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "more"),
    [
        pytest.param("17", (), id="middle, tp 1, no data"),
        pytest.param("63", VPP, id="last, interleaved, overlapped"),
        pytest.param("pp=1,tp=1", (*MOE,), id="experts"),
        pytest.param("33", ("--prism-tier", "meta"), id="shapes"),
        pytest.param("0", (), id="first", marks=pytest.mark.slow),
        pytest.param(
            "63", (*VPP, "--prism-tier", "meta"), id="shapes, interleaved", marks=pytest.mark.slow
        ),
        pytest.param(
            "17",
            (*TE, "--context-parallel-size", "2", "--attention-backend", "auto"),
            id="context parallel, Transformer Engine",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "16",
            (
                *TE,
                *"--context-parallel-size 2 --cp-comm-type a2a --prism-tier meta".split(),
                *"--attention-backend fused".split(),  # Transformer Engine refuses it unfused
            ),
            id="context parallel by heads, Transformer Engine, shapes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "9",
            ("--prism-values", "noise", "--calculate-per-token-loss"),
            id="noise",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_rank_trains_and_says_so(rank, more, tmp_path):
    out = tmp_path / "out"
    status, said = forked(*WORLD, "--prism-ranks", rank, *more, "--prism-out", str(out))
    assert status == 0, said[-5000:]
    (file,) = out.iterdir()
    summary = json.loads(file.read_text())
    assert summary["trained"]["steps"] == 3
    assert summary["world_size"] == 64
    assert "iteration        3/" in said
    if "meta" in more:  # what does not depend on data is as it is
        assert re.search(r"learning rate: 6.666667E-04 .* scale: 1.0 . grad norm: unknown", said)
    else:
        assert summary["trained"]["master_parameter_moved"] is True
        assert all(0 < i["grad_norm"] < 1e6 for i in summary["iterations"])


@pytest.mark.slow
def test_a_rank_whose_vocabulary_seldom_occurs_keeps_its_gradients(tmp_path):
    """Mirrored zeros for other tokens end this run in one of its first iterations, by Megatron's
    own check for infinite gradients."""
    deep = "--num-layers 16 --hidden-size 256 --position-embedding-type rope".split()
    deep += "--pipeline-model-parallel-size 1 --global-batch-size 32".split()
    out = tmp_path / "out"
    flags = ("--prism-ranks", "1", "--train-iters", "20", "--prism-out", str(out))
    status, said = forked(*WORLD, *deep, *flags)
    assert status == 0, said[-5000:]
    summary = json.loads(next(out.iterdir()).read_text())
    norms = [i["grad_norm"] for i in summary["iterations"]]
    assert len(norms) == 20
    assert max(norms) < 1e3


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
SRUN = """#!/bin/bash
# A step of two tasks on this host, as srun starts them.
[ "$1" = --kill-on-bad-exit=1 ] && shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" && wait $first
"""


def slurm(folder):
    """Environment of a batch script on one host."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7", "MASTER_PORT": "29613"}


@pytest.mark.skipif(not ATTACHES, reason="under torchrun the attach is torch's entry point")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (16, 17),  # one tensor parallel group
        # of which the first has no data, and would speak for rank 0, which says whether to train;
        # started by the batch script of examples/
        (32, 48),
    ],
)
def test_several_processes_are_several_local_ranks(first, second, tmp_path, monkeypatch):
    out = tmp_path / "prism-7"
    if first == 16:
        done = run(*WORLD, "--prism-ranks", f"{first},{second}", "--prism-out", str(out),
                   launcher=(*TORCHRUN, "--master-port", "29611"))  # fmt: skip
    else:
        monkeypatch.chdir(tmp_path)
        batch = SCRIPT.parents[2] / "examples/slurm.sh"
        env = {**slurm(tmp_path), "WORLD": "64", "RANKS": f"{first},{second}"}
        done = run("--prism-tier", "cpu", launcher=("bash", str(batch)), env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    a, b = (json.loads(f.read_text()) for f in sorted(out.iterdir()))
    assert (a["rank"], b["rank"]) == (first, second)
    assert a["trained"]["steps"] == b["trained"]["steps"] == 3
    if second == first + 1:
        assert a["iterations"][-1]["grad_norm"] == b["iterations"][-1]["grad_norm"]


@pytest.mark.slow
def test_prism_run_and_prism_args_attach_without_the_entry_point(tmp_path):
    """Our flags before the script, on the command line and in the environment."""
    prism = (sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", "64", "--")
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PRISM_ARGS": "--prism-tier meta --prism-ranks 5"}
    done = run("--prism-out", str(tmp_path / "out"), launcher=prism, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").iterdir()
    summary = json.loads(file.read_text())
    assert (summary["rank"], summary["tier"], summary["trained"]["steps"]) == (5, "meta", 3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prism-world-size", "60"), "does not divide 60"),
        (("--yaml-cfg", "x.yaml"), "--yaml-cfg"),
        (("--prism-values", "recorded:nowhere"), "nowhere"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_bad_usage_ends_with_its_status(flags, words, tmp_path):
    out = tmp_path / "out"
    status, said = forked(*WORLD, *flags, "--prism-out", str(out))
    assert status == 2, said[-2000:]
    assert words in said
    assert "fix:" in said
    assert "Traceback" not in said
    assert not out.exists()


def test_bad_usage_of_a_stock_script_is_on_stderr(tmp_path):
    done = run(*WORLD, "--prism-world-size", "60", "--prism-out", str(tmp_path / "out"))
    assert done.returncode == 2, done.stderr[-2000:]
    assert "does not divide 60" in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_never_trains_fails(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("import torch\nimport megatron.core\nprint('nothing to do')\n")
    done = run(*WORLD, "--prism-out", str(tmp_path / "out"), script=script)
    assert done.returncode == 1
    assert "nothing trained" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_whose_updates_were_all_skipped_fails(tmp_path):
    """Three train steps and no optimizer step: every gradient overflows under this loss scale."""
    job = ["--fp16" if word == "--bf16" else word for word in JOB]
    flags = ("--prism-ranks", "63", "--initial-loss-scale", "1e30", "--min-loss-scale", "1e29")
    status, said = forked(*WORLD, *flags, "--prism-out", str(tmp_path / "out"), job=job)
    assert status == 1, said[-2000:]
    assert "3 train steps ran, but only 0 updates of 3 were applied" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("import sys; sys.exit((lambda: 7)())", 7, ""),
        ("1/0", 1, "ZeroDivisionError"),
        (
            "from megatron_prism.core import errors; raise errors.UnsupportedError('no such')",
            1,
            "prism: error: no such",
        ),
    ],
)
def test_prism_run_ends_as_the_script_does(end, status, says, tmp_path):
    """And says why once: not that nothing trained, which is no news then."""
    script = tmp_path / "ends"  # no .py: it comes after --
    script.write_text(f"import torch, megatron.core\n{end}\n")
    prism = (sys.executable, "-m", "megatron_prism", "run", "--")
    done = run(*WORLD, script=script, launcher=prism)
    assert done.returncode == status, done.stderr[-2000:]
    assert says in done.stderr
    assert "nothing trained" not in done.stderr


@pytest.mark.slow
def test_multi_latent_attention_with_its_fused_embedding_is_as_without(tmp_path):
    found = []
    for name, job in (("fused", [w for w in JOB if w != "--no-rope-fusion"]), ("plain", JOB)):
        out = tmp_path / name
        flags = ("--prism-ranks", "63", "--prism-out", str(out))
        status, said = forked(*WORLD, *MLA, *flags, job=job)
        assert status == 0, said[-5000:]
        summary = json.loads((out / "rank-000063.json").read_text())
        found.append([(i["losses"], i["grad_norm"]) for i in summary["iterations"]])
    assert found[0] == found[1]


def test_what_a_checkpoint_takes_is_known_without_one(tmp_path):
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    out = ("--prism-tier", "meta", "--prism-out", str(tmp_path / "out"))
    status, said = forked(*WORLD, "--prism-ranks", "17", *out, *save)
    assert status == 0, said[-5000:]
    assert not (tmp_path / "checkpoints").exists()
    (file,) = (tmp_path / "out").glob("rank-*.json")
    parts = json.loads(file.read_text())["memory"]["by_part"]
    assert 0 < parts["checkpoint"] < parts["steady iteration"]  # all that stands, nothing more


def test_an_output_place_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out, more in (("file", ("--prism-force",)), ("file/x", ())):
        status, said = forked(*WORLD, "--prism-out", str(tmp_path / out), *more)
        assert status == 2, said[-2000:]
        assert "--prism-out DIR" in said


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("mine")
    assert forked(*WORLD, "--prism-out", str(tmp_path))[0] == 2
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_script_of_one_iteration_is_captured_with_the_optimizers_states(tmp_path):
    """Its slice is of a second one, as that of a longer job, and the run says so."""
    held = []
    for iterations in ("1", "2"):
        number = JOB.index("--train-iters") + 1
        job = [*JOB[:number], iterations, *JOB[number + 1 :]]
        folder = tmp_path / iterations
        words = ("--prism-tier", "meta", "--prism-ranks", "17", "--prism-capture", str(folder))
        status, said = forked(*WORLD, *words, job=job)
        assert status == 0, said[-5000:]
        note = "the optimizer's states begin at the end of the first"
        assert (note in said) == (iterations == "1")
        found = slices.assemble(folder, partial=True)
        held.append(peaks.known_peak(found.programs[0]).num_bytes)
    assert held[0] == held[1]


def test_the_summary_and_prism_memory_have_one_answer(tmp_path):
    out = ("--prism-tier", "meta", "--prism-out", str(tmp_path / "out"))
    status, said = forked(
        *WORLD, "--prism-ranks", "17", *out, "--prism-capture", str(tmp_path / "s")
    )
    assert status == 0, said[-5000:]
    (file,) = (tmp_path / "out").glob("rank-*.json")
    memory = json.loads(file.read_text())["memory"]
    found = slices.assemble(tmp_path / "s", partial=True)
    between = blocks.reserved(found.programs[0])
    assert memory["reserved_peak"] == sum(between) // 2
    assert memory["reserved_between"] == list(between)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="tp 1"), pytest.param((*TE, "--sequence-parallel"), id="tp 2, a stretch")],
)
def test_a_last_stage_alone_learns_what_follows(more):
    """Of noise it learned nothing: the loss stayed at log(vocabulary)."""
    tp = "2" if more else "1"
    job = [*JOB[:-4], "--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", "2"]
    small = ["--global-batch-size", "8", "--micro-batch-size", "4", "--num-layers", "2"]
    long = ["--train-iters", "20", "--lr", "1e-2", "--lr-decay-style", "constant"]
    ranks = ["--prism-world-size", str(2 * int(tp)), "--prism-ranks", f"pp=1,tp={int(tp) - 1}"]
    emulated = ["--prism-emulate", "--prism-tier", "cpu"]
    status, said = forked(*small, *long, *ranks, *emulated, *more, job=job)
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", said)]
    assert status == 0, said[-2000:]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]


def test_a_release_whose_writers_have_other_names_is_not_started(tmp_path):
    """What keeps a job from the real one's files is gone there: it ends before it writes."""
    from megatron_prism.core.jobs.megatron_source import locate

    here = locate("megatron.training").parent
    there = tmp_path / "other" / "megatron" / "training"
    shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
    for path in there.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\bsave_checkpoint\b", "store_checkpoint", text), encoding="utf-8")
    places = [tmp_path / name for name in ("checkpoints", "curves")]
    words = ["--save", str(places[0]), "--save-interval", "1", "--tensorboard-dir", str(places[1])]
    path = os.pathsep.join([str(tmp_path / "other"), os.environ.get("PYTHONPATH", "")])
    done = run(*WORLD, "--prism-ranks", "0", *words, env={"PYTHONPATH": path})
    assert done.returncode == 1, done.stderr
    assert "no-checkpoints" in done.stderr
    assert "prism patches" in done.stderr
    assert not any(place.exists() for place in places)
    assert "iteration" not in done.stdout
