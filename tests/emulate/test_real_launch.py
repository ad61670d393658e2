"""A real torchrun with flags of ours is noticed in its own process and answered by a line."""

import os
import subprocess
import sys
import time

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line import real_launch
from megatron_prism.emulate.command_line.launch_line import read_line
from megatron_prism.emulate.rank import launch

JOB = "pretrain_gpt.py --tensor-model-parallel-size 2"
STAGES = "--prism-emulate --prism-tier meta --prism-ranks stages --prism-capture d"


@pytest.mark.parametrize(
    ("launcher", "ours", "says"),
    [
        ("torchrun --nnodes 8 --nproc-per-node 8", "--prism-emulate", "7 other hosts"),
        ("torchrun --nproc-per-node 8", STAGES, "names 1"),
        ("torchrun --nproc-per-node 2", "--prism-emulate --prism-world-size 8 --prism-ranks 3",
         "names 1"),
        ("deepspeed --num_nodes 2 --num_gpus 8", "--prism-emulate", "1 other host"),
        ("torchrun --nproc-per-node 2", "--prism-emulate --prism-world-size 8 --prism-ranks 2,3",
         ""),
        ("torchrun --nproc-per-node 2", "--prism-emulate", ""),
        ("torchrun --nnodes 2 --nproc-per-node 1", "--prism-emulate --prism-ranks 0,4 "
         "--prism-world-size 8", ""),
        ("torchrun --nnodes 2 --nproc-per-node 2", "--prism-emulate --prism-record r", ""),
        ("torchrun --nnodes 2 --nproc-per-node 2", "", ""),
    ],
)  # fmt: skip
def test_processes_that_are_not_the_ranks_are_refused(launcher, ours, says):
    for env, words in (({}, f"{JOB} {ours}"), ({"PRISM_ARGS": ours}, JOB)):
        line = read_line([*launcher.split(), *words.split()], {})
        if not says:
            real_launch.check_launch(line, env)
            continue
        with pytest.raises(UsageError, match=says):
            real_launch.check_launch(line, env)


def test_ranks_that_start_with_prism_run_need_no_flag():
    """Prism run emulates without --prism-emulate, also behind a launcher on one host."""
    started = "-m megatron_prism run --prism-tier cpu -- a.py --lr 1"
    line = read_line(f"torchrun --nproc-per-node 2 {started}".split(), {})
    real_launch.check_launch(line, {})
    line = read_line(f"torchrun --nnodes 2 --nproc-per-node 2 {started}".split(), {})
    with pytest.raises(UsageError, match="1 other host"):
        real_launch.check_launch(line, {})


def test_the_line_to_type_has_the_flags_where_they_belong():
    words = ["torchrun", "--nnodes", "8", "a.py", "--lr", "1", "--prism-tier", "meta"]
    assert real_launch.to_type(words, {"PRISM_ARGS": "--prism-emulate --prism-values noise"}) == (
        "prism run --prism-values noise --prism-tier meta torchrun --nnodes 8 a.py --lr 1"
    )
    assert real_launch.to_type(["torchrun", "a.py"], {"PRISM_ARGS": STAGES}) == (
        "prism capture -o d --prism-tier meta torchrun a.py"
    )


@pytest.mark.parametrize(
    "process",
    [
        "python /bin/prism run torchrun --nnodes 8 --nproc-per-node 8 a.py --prism-emulate",
        "python -m megatron_prism run torchrun --nnodes 8 --nproc-per-node 8 a.py --prism-emulate",
        "python -u a.py --prism-emulate",
    ],
)
def test_a_process_that_only_names_a_launcher_goes_on(process):
    real_launch.check(process.split())


def test_a_process_that_is_a_launcher_ends():
    process = "python /bin/torchrun --nnodes 2 --nproc-per-node 2 a.py --prism-emulate"
    with pytest.raises(SystemExit):
        real_launch.check(process.split())


@pytest.mark.parametrize("process", ["0", "1"])
def test_one_task_of_srun_says_what_is_wrong_with_their_line(process, monkeypatch, capsys):
    srun = {"SLURM_PROCID": process, "SLURM_STEP_NUM_TASKS": "8"}
    monkeypatch.setattr(os, "environ", {**os.environ, **srun})
    monkeypatch.setattr(sys, "argv", ["a.py", "--prism-emulate", "--prism-ranks", "0,1"])
    monkeypatch.setattr(launch, "_attached", False)
    with pytest.raises(SystemExit, match="2"):
        launch.attach_from_command_line()
    assert ("8 processes were started" in capsys.readouterr().err) == (process == "0")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run"])
def test_torchrun_ends_at_once(launcher, tmp_path):
    (tmp_path / "a.py").touch()
    words = [*"--nnodes 8 --node_rank 0 --nproc-per-node 8 a.py".split(), "--lr", "1"]
    start = time.process_time()
    run = subprocess.run(
        [sys.executable, "-m", launcher, *words], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, env={**os.environ, "PRISM_ARGS": "--prism-emulate --prism-tier meta"},
    )  # fmt: skip
    assert time.process_time() - start < 5
    assert run.returncode == 2, run
    assert run.stderr.splitlines() == [
        "prism: error: torch.distributed.run would wait for 7 other hosts, and an emulated job "
        "needs none",
        "  fix: prism run --prism-tier meta python -m torch.distributed.run --nnodes 8 --node_rank "
        "0 --nproc-per-node 8 a.py --lr 1",
    ]
