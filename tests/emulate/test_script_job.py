"""A stock script's job, captured rank by rank in worker processes."""

import io
import time
import types

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT
from rich.console import Console

from megatron_prism.cli.main import main
from megatron_prism.core import messages
from megatron_prism.core.errors import NotTrainedError, PrismError, UsageError
from megatron_prism.core.jobs.recipe import load
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.core.programs.slices import SliceStore, open_programs
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.jobs import recipe_job
from megatron_prism.emulate.jobs.script_job import Job, capture_command_line
from megatron_prism.emulate.patches import startup
from megatron_prism.emulate.processes import workers


def given(*words):
    return options.from_command_line(["--prism-emulate", *words], {})


PP4 = ("--pipeline-model-parallel-size", "4", "--prism-world-size", "16")


def test_stages_and_lists_are_captured_one_by_one():
    found = given(*PP4, "--prism-capture", "d", "--prism-ranks", "stages")
    assert (found.ranks, found.one_by_one, found.stages) == ((0, 4, 8, 12), True, True)
    found = given(*PP4, "--prism-capture", "d", "--prism-ranks", "0,9")
    assert (found.ranks, found.one_by_one, found.stages) == ((0, 9), True, False)
    assert not given(*PP4, "--prism-capture", "d", "--prism-ranks", "9").one_by_one
    with pytest.raises(UsageError, match="names 4 ranks"):
        given(*PP4, "--prism-ranks", "stages")


@pytest.mark.parametrize(
    ("iters", "decay", "samples", "expected"),
    [
        (5000, None, None, (3, 5000, 3)),
        (2, None, None, (3, 3, 3)),
        (9, 8, None, (3, 8, 3)),
    ],
)
def test_a_job_is_shortened_and_keeps_its_learning_rate(iters, decay, samples, expected):
    args = types.SimpleNamespace(train_iters=iters, lr_decay_iters=decay, train_samples=samples)
    startup._shorten(args, 3)
    assert (args.train_iters, args.lr_decay_iters, args.exit_interval) == expected


@pytest.mark.parametrize(
    ("samples", "decay", "batch", "expected"),
    [
        # of examples/llama/train_llama3_8b_h100_fp8.sh: an index of these has 30 GB
        (1953125000, 1949218748, 128, (384, 1949218748)),
        (1953125000, None, None, (3 * 2 * 16, 1953125000)),
        (9, None, 128, (9, 9)),
    ],
)
def test_a_job_of_samples_is_shortened(samples, decay, batch, expected):
    args = types.SimpleNamespace(
        train_iters=None,
        lr_decay_iters=None,
        train_samples=samples,
        lr_decay_samples=decay,
        global_batch_size=batch,
        micro_batch_size=2,
        world_size=16,
    )
    startup._shorten(args, 3)
    assert (args.train_samples, args.lr_decay_samples) == expected
    assert (args.train_iters, args.lr_decay_iters, args.exit_interval) == (None, None, 3)


def test_every_rank_gets_the_job_s_words_and_not_ours_twice(monkeypatch):
    monkeypatch.setenv("PRISM_ARGS", "--prism-values noise")
    words = ("--lr", "1", "--prism-ranks", "stages", "--prism-emulate", "--train-samples", "9")
    job = Job.of("x.py", words, given(*PP4).world, "meta")
    assert job.command(8, "d") == (
        "-m megatron_prism run --prism-values noise --prism-world-size 16 --prism-ranks 8 "
        "--prism-capture d --prism-steps 4 --prism-tier meta -- x.py --lr 1 --train-samples 9"
    ).split()  # fmt: skip
    with pytest.raises(UsageError, match="--prism-out"):
        Job.of("x.py", ["--prism-out", "d"], given(*PP4).world, "meta")


def task(code, rank=0, **more):
    return workers.RankTask(rank, f"rank {rank}", ["-c", code], **more)


EMIT = "from megatron_prism.emulate.processes.workers import emitter; emit = emitter(); "


@pytest.mark.parametrize(
    ("flag", "shares"),
    [
        ("", True),
        ("--prism-streams", False),
        ("--prism-force", True),
        ("--prism-reserve-nccl=h200", False),
    ],
)
def test_a_job_whose_ranks_start_by_themselves_waits_for_no_start_of_one(
    flag, shares, tmp_path, monkeypatch
):
    """The process that forks the ranks would start Megatron to find out."""
    tasks = []

    def run(started, *args, **kwargs):
        tasks.extend(started)
        raise PrismError("seen")

    monkeypatch.setattr(workers, "run", run)
    argv = [*PP4, "--prism-tier", "meta", *flag.split()]
    with pytest.raises(PrismError, match="seen"):
        capture_command_line("x.py", argv, tmp_path / "slices", Console(file=io.StringIO()))
    assert {task.shares_start for task in tasks} == {shares}


def test_workers_answer_in_order_and_errors_keep_their_fix(tmp_path):
    console = Console(file=io.StringIO())
    told = [task(f"{EMIT}emit('result', result={{'n': {n}}})", n) for n in (3, 1, 2)]
    assert [one["n"] for one in workers.run(told, console)] == [3, 1, 2]
    error = f"{EMIT}emit('error', message='no', fix='type this', exit_code=2); raise SystemExit(2)"
    with pytest.raises(PrismError, match="rank 5: no") as raised:
        workers.run([task(error, 5)], console)
    assert (raised.value.fix, raised.value.exit_code) == ("type this", 2)
    log = tmp_path / "log"
    with pytest.raises(NotTrainedError, match="status 7") as raised:
        workers.run([task("print('why'); raise SystemExit(7)", log=log)], console)
    assert "why" in str(raised.value)
    assert log.read_text() == "why\n"


def test_a_capture_goes_on_where_few_layers_do_not_run(tmp_path):
    log = tmp_path / "log"
    tasks = [
        task("raise SystemExit(7)", log=log, periods=1),
        task(f"{EMIT}emit('result', result={{'n': 1}})"),
    ]
    estimate, whole = workers.run(tasks, Console(file=io.StringIO()))
    assert whole == {"n": 1}
    assert estimate == {
        "no_estimate": "the job with few layers failed: its process ended with status 7"
    }
    assert not log.exists()


def test_the_next_rank_starts_before_an_answer_is_looked_at(tmp_path):
    """An estimate is made of ranks that have ended, and takes as long as a rank does."""
    begun = tmp_path / "begun"
    first = task(f"{EMIT}emit('result', result={{}})", 0)
    second = task(f"{EMIT}open({str(begun)!r}, 'w'); emit('result', result={{}})", 8)
    waited = []

    def finished(ended, result):
        for _ in range(6000):
            if begun.exists():
                break
            time.sleep(0.01)
        waited.append((ended.rank, begun.exists()))

    workers.run([first, second], Console(file=io.StringIO()), 1, finished=finished)
    assert waited == [(0, True), (8, True)]


def test_ranks_with_few_layers_are_no_ranks_more(monkeypatch):
    monkeypatch.setattr(messages, "EVERY_S", 0.05)
    out = io.StringIO()
    waits = f"{EMIT}import time; time.sleep(0.5); emit('result', result={{}})"
    tasks = [task(waits, 0, periods=1), task(waits, 0), task(waits, 8)]
    workers.run(tasks, Console(file=out), 1)
    assert "0 of 2 ranks done; rank 0 with few layers: starting" in out.getvalue()


def test_slices_of_a_recipe_that_are_there_need_no_worker(tmp_path, monkeypatch):
    console, recipe = Console(file=io.StringIO()), load("tiny-gpt_1cpu", ["prism.tier=meta"])
    store = SliceStore(tmp_path, recipe.world, recipe_job.job_of(recipe).source)
    store.put(Program.from_ops(0, [Op("compute", ns=1)]))
    monkeypatch.setattr(workers, "run", None)
    assert recipe_job.capture(recipe, tmp_path, console=console).programs[0].rank == 0
    with pytest.raises(UsageError, match="seq_length 128 there, 64 here"):
        recipe_job.capture(recipe.changed(seq_length=64), tmp_path, console=console)


@TRAINING
@pytest.mark.slow
def test_a_stock_job_is_captured_in_one_command_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers = ["--num-layers", "2", "--pipeline-model-parallel-size", "2"]
    ours = ["--prism-tier", "meta", "--prism-world-size", "4"]
    words = ["capture", "-o", "d", *ours, "--", str(SCRIPT), *JOB, *layers]
    assert main(words) == 0, capsys.readouterr()
    assert not list((tmp_path / "d").glob(".*.claim"))  # the next run may write at once
    whole = open_programs("d")
    assert [program.rank for program in whole.programs] == [0, 2]
    assert whole.world.size == 4
    before = (tmp_path / "d" / "slice-000000.prism").stat().st_mtime_ns
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(workers, "run", None)  # the same question starts no rank
        assert main(words) == 0
    assert "2 slices of this very job, read as they are" in capsys.readouterr().out
    assert main([*words, "--seq-length", "16"]) == 2  # all is there, and of another job
    assert "--seq-length" in capsys.readouterr().err
    assert (tmp_path / "d" / "slice-000000.prism").stat().st_mtime_ns == before
