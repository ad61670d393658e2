"""Every ``fix:`` that names a flag or a tier: the flag exists, the tier does not refuse in turn.

The texts are read from the source, so that a new one is tried, too: a fix that names tier cpu or
meta has a job here that is refused as it says and then trains there, or a reason why not.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import pretrain
from helpers.needs import TRAINING

import megatron_prism
from megatron_prism.emulate.command_line import options

ROOT = Path(megatron_prism.__file__).parent
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
WHOLE_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")  # and no first part


def text(node):
    """The text of an expression, with {} for what is put into it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(one) or "{}" for one in node.values)
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text(node.body)} | {text(node.orelse)}"
    return ""


def fixes():
    """(file, text) of everything that is given as a fix, also through ``refuse`` and tables."""
    found = set()
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            given = []
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                given = [one.value for one in node.keywords if one.arg == "fix"]
                given += node.args[1:2] if name in ("refuse", "refused") else []
            elif isinstance(node, ast.Assign | ast.Tuple):  # what a fix is put together from
                held = node.elts if isinstance(node, ast.Tuple) else [node.value]
                named = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "fix"
                given = [one for one in held if named or "--prism-tier " in text(one)]
            for one in given:
                if FLAG.search(text(one)):
                    found.add((str(file.relative_to(ROOT)), text(one)))
    return sorted(found)


FIXES = fixes()
TINY = """
--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 2
--lr 1e-3 --mock-data --vocab-size 1000 --bf16 --no-gradient-accumulation-fusion
--eval-iters 0 --eval-interval 1000 --num-workers 0
--position-embedding-type rope
""".split()
# (file, the beginning of its fix) -> a tier that refuses a tiny GPT, one that trains it, its flags
JOBS = {
    ("emulate/patches/training.py", "leave it out, or --prism-tier meta"):
        ("cpu", "meta", "--use-torch-fsdp2 --untie-embeddings-and-output-weights "
                        "--ckpt-format torch_dist"),
    ("emulate/patches/without_cuda.py", "leave it out, --prism-tier meta"):
        ("cpu", "meta", "--optimizer-cpu-offload --use-precision-aware-optimizer "
                        "--use-distributed-optimizer"),
    ("emulate/patches/without_cuda.py", "use --prism-tier meta; or leave out --fp8-format"):
        ("cpu", "meta", "--fp8-format hybrid"),
    ("features/debugger/debugger.py", "--prism-tier cpu, with a smaller model"):
        ("meta", "cpu", "--prism-watch nan"),
    ("features/faults/fault_injector.py", "--prism-tier cpu"):
        ("meta", "cpu", "--prism-fault bitflip@rank=0,iter=2,op=all_reduce,nth=1:bit=0"),
    ("emulate/rank/recording.py", "use --prism-tier cuda or cpu"):
        ("meta", "cpu", "--prism-record recorded --prism-payload all"),
    ("runtime/devices/__init__.py", "use --prism-tier cpu"): ("cuda", "cpu", ""),
}  # fmt: skip
# the same for what is no job of a tiny GPT -> why it is not run here
NOT_RUN = {
    ("features/faults/fault_injector.py", "--prism-tier meta"):
        "hang/test_fault_plan.py: out of memory",
    ("emulate/rank/launch.py", "torchrun --nproc-per-node {}"): "every job of tier cpu",
    ("emulate/patches/pipeline.py", "use --prism-tier cpu"): "LLaVA's script",
    ("emulate/patches/without_cuda.py", "--prism-tier meta"): "Megatron's main: --sft with cp",
    ("emulate/command_line/job_flags.py", "--prism-tier meta"): (
        "features/life/test_life_capture.py, features/streams/test_planted.py"
    ),
    ("features/reshard/flags.py", "--prism-tier meta"): "every job that prism reshard plans",
    ("memory/job_peaks.py", "prism capture --prism-tier meta"): "every job of tier meta",
    ("memory/peaks.py", "capture on tier meta"): "every job of tier meta",
    ("runtime/answers.py", "--no-gradient-reduce-div-fusion"): "runtime/test_virtual_world.py",
    ("runtime/devices/cuda.py", "leave --cuda-graph-impl out"): "a script's own graph on tier cpu",
    ("runtime/devices/triton.py", "leave out the flag"): "runtime/test_te_kernels.py",
    ("runtime/te_kernels/table.py", "--prism-tier meta"): "pretrain_gpt.py: --sft with cp",
}  # fmt: skip


def place(file, fix, table):
    """The entry of ``table`` that begins as ``fix`` does: the longest."""
    fits = [key for key in table if key[0] == file and fix.startswith(key[1])]
    return max(fits, key=lambda key: len(key[1]), default=None)


def test_every_fix_that_names_a_tier_without_a_gpu_is_tried_or_says_why_not():
    named = [(file, fix) for file, fix in FIXES if re.search(r"--prism-tier .*(cpu|meta)", fix)]
    tables = JOBS | NOT_RUN
    assert [one for one in named if place(*one, tables) is None] == []
    assert {place(*one, tables) for one in named} == set(tables)


def flags_named():
    """Flag -> the places that name it in a text: fixes, advice and messages, however put together.

    Tables of other programs' flags and docstrings are left out.
    """
    named = {}
    for file in sorted(ROOT.rglob("*.py")):
        place = str(file.relative_to(ROOT))
        if place in TABLES:
            continue
        tree = ast.parse(file.read_text())
        documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if not is_text or node in documentation:
                continue
            for flag in WHOLE_FLAG.findall(node.value):
                named.setdefault(flag, []).append(f"{place}:{node.lineno}")
    return named


def flags_of_megatron(folder):
    """Every flag that the parser of a Megatron takes, asked in a process of its own.

    Args:
        folder: a checkout; None: what is installed.
    """
    script = (
        "import argparse, json\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False))\n"
        "print(json.dumps(list(parser._option_string_actions)))"
    )
    path = {} if folder is None else {"PYTHONPATH": folder}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ | path,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkout",
    [
        pytest.param(None, marks=TRAINING, id="installed"),
        pytest.param(
            os.environ.get("PRISM_MEGATRON"),
            marks=pytest.mark.skipif("PRISM_MEGATRON" not in os.environ, reason="no checkout"),
            id="checkout",
        ),
    ],
)
def test_no_text_names_a_flag_that_megatron_lacks(checkout):
    """Its own parser is asked: it may have the opposite flag alone, or none in this release."""
    ours = options.add_flags(argparse.ArgumentParser(add_help=False))
    known = flags_of_megatron(checkout) | set(ours._option_string_actions)
    known |= set(FLAG.findall(commands())) | OTHERS | OF_THE_JOB
    lacking = {flag: places for flag, places in flags_named().items() if flag not in known}
    assert lacking == {}


def commands():
    """The reference of our own commands."""
    return (ROOT.parent / "docs/reference/commands.md").read_text()


TABLES = {  # what launchers, shells and schedulers take
    "emulate/command_line/launch_line.py", "emulate/dry_commands.py",
}  # fmt: skip
OTHERS = {  # of torchrun, mpirun, pip, docker, pytest, py-spy, sbatch and every command
    "--nproc-per-node", "--master-port", "--standalone", "--no-deps", "--force-reinstall",
    "--shm-size", "--prism-mem-update", "--pid", "--array", "--cpus-per-task", "--job-name",
    "--mem", "--output", "--tag-output", "--help", "--version",
    "--prism", "--explain",  # how all of ours begin, and one of an earlier release
}  # fmt: skip
# named only where the job's own line has it, so its Megatron knows it
OF_THE_JOB = {
    "--ckpt-pg-tensors-cache-path", "--gpu-sniff-test-interval", "--logits-save-dir",
    "--moe-paged-stash", "--moe-routing-trace-path",
}  # fmt: skip


@TRAINING
@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("entry", JOBS, ids=" ".join)
def test_a_tier_that_a_fix_names_does_not_refuse_in_turn(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *tiers, flags = JOBS[entry]
    (refused, why), (status, said) = (started(tier, flags.split()) for tier in tiers)
    assert refused != 0, why
    assert f"fix: {entry[1]}" in why
    assert status == 0, said


def started(tier, flags):
    """(status, what it printed) of a job, with as many connections as FSDP wants."""
    given = {key: text for key, text in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    job = ["--prism-tier", tier, "--prism-world-size", "8", "--", pretrain.SCRIPT, *TINY, *flags]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_prism", "run", *map(str, job)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env=given | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout[-3000:]
