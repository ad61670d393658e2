"""Breakpoints: how they are written, which call they hit, and what is in scope there."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import replayed_ranks
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT
from helpers.terminal import typed

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.programs.call_selector import CallSelector
from megatron_prism.core.world import World
from megatron_prism.features.debugger import debugger as module
from megatron_prism.features.debugger import payloads
from megatron_prism.features.debugger.debugger import Breakpoint, Debugger, ValueWatch, debugger_at

TP = "TENSOR_MODEL_PARALLEL_GROUP"


@pytest.mark.parametrize(
    ("text", "select", "after"),
    [
        ("1B2 all_reduce group=tp nth=4",
         {"microbatch": 1, "phase": "backward", "chunk": 2, "op": "all_reduce", "group": "tp",
          "nth": 3}, False),
        ("2F", {"microbatch": 2, "phase": "forward"}, False),
        ("O after", {"phase": "optimizer"}, True),
        (f"0F0 send {TP} @p2p_communication.py:49", {"microbatch": 0, "phase": "forward",
         "chunk": 0, "op": "send", "group": TP, "site": r"p2p_communication\.py:49(?!\d)"}, False),
        (f"all_reduce of {TP} at core/tensor_parallel/mappings.py:31",
         {"op": "all_reduce", "group": TP,
          "site": r"core/tensor_parallel/mappings\.py:31(?!\d)"}, False),
        ("all_reduce,iteration=2,rank=5", {"op": "all_reduce", "iteration": 2, "rank": "5"},
         False),
    ],
)  # fmt: skip
def test_a_call_is_written_as_it_is_printed(text, select, after):
    assert Breakpoint.parse(text) == Breakpoint(text, CallSelector(**select), after)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("all_reduse", "all_reduce"), ("grop=tp", "group="), ("group=tpp", "tp"),
     ("nth=two", "nth=1"), ("@[", None), ("site=[", "mappings"), ("3Q", "1B2"),
     ("op=compute", "1B2"), ("all_reduce #0", "1B2")],
)  # fmt: skip
def test_a_wrong_word_is_answered_with_the_right_one(text, meant):
    if meant is None:
        assert Breakpoint.parse(text)
        return
    with pytest.raises(UsageError) as error:
        Breakpoint.parse(text)
    assert meant in error.value.fix


@TRAINING
@pytest.mark.slow
def test_a_rank_alone_goes_on_from_the_checkpoint_as_it_did_in_the_job(tmp_path):
    """Two gloo processes are the oracle: losses, gradient norms, and what every module gives, and
    its gradient, are equal to the bit.  Sixteen are tried by hand (docs/measurements.md)."""
    at = JOB.index("--global-batch-size") + 1
    small = [*JOB[:at], "2", *JOB[at + 1 :], "--num-layers", "2", "--tensor-model-parallel-size",
             "1", "--pipeline-model-parallel-size", "2"]  # fmt: skip
    keeps = ["--save", "ck", "--save-interval", "1", "--prism-record", "rec",
             "--prism-payload", "iter=2;iter=3"]  # fmt: skip
    alone = ["--prism-world-size", "2", "--prism-ranks", "1", "--load", "ck",
             "--prism-iteration", "2..3", "--prism-values", "recorded:rec"]  # fmt: skip
    real = replayed_ranks.train(tmp_path, "job", [*small, *keeps], processes=2)[1]
    replayed = replayed_ranks.train(tmp_path, "alone", [*small, *alone])[1]
    assert list(replayed) == [2, 3]
    assert all(real[number] == replayed[number] for number in (2, 3))
    assert all(one["gradients"] > 0 for one in replayed.values())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("3B0..3B2", ["3B0", "3B1", "3B2"]), ("1F..2F group=tp", ["1F group=tp", "2F group=tp"]),
     ("iter=51..52 0B0..1B0", ["iter=51 0B0", "iter=51 1B0", "iter=52 0B0", "iter=52 1B0"]),
     ("O", ["O"])],
)  # fmt: skip
def test_a_range_stands_for_its_steps(text, wanted):
    found = payloads._selected(text)
    assert [one.select for one in found] == [Breakpoint.parse(one).select for one in wanted]


@pytest.mark.parametrize("text", [None, "pdb"])
def test_pdb_without_a_terminal_is_refused_with_the_other_form(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    with pytest.raises(UsageError) as error:
        debugger_at(text)
    assert "debugpy:5678" in error.value.fix


class Group:
    """A tp group of two whose other member is virtual; ``world`` has no further listener."""

    desc, ranks, local = TP, (4, 5), (0,)
    world = SimpleNamespace(after=lambda caller: None)


@pytest.fixture
def stops(monkeypatch):
    """Prompts of the stops so far; nothing is asked."""
    found = []
    monkeypatch.setattr(module._Pdb, "stop", lambda self, frame: found.append(self._mine))
    return found


def follow(text, tier="cpu"):
    found = Debugger(Breakpoint.parse(text), None, 4, World(8, tp=2, pp=2), "mirror", tier)
    found.iteration_started(1, 1, (), None)
    return found


def call(debugger, tensor=None, op="all_reduce", **labels):
    tensor = torch.ones(2, 3) if tensor is None else tensor
    with debugger.scope(**labels):
        debugger.record(Group(), op, lambda group, tensors, opts: None, ([tensor], None), {})


def test_it_stops_at_the_call_that_was_named_and_at_no_other(stops, capsys):
    debugger = follow("1B all_reduce nth=2")
    for microbatch in (0, 1):
        for phase in ("forward", "backward"):
            for _ in range(3):
                call(debugger, phase=phase, microbatch=microbatch)
    debugger.finished()
    (prompt,) = stops
    assert (prompt.call.microbatch, prompt.call.phase) == (1, "backward")
    assert "all_reduce #11 of" in prompt.line
    prompt.where()
    prompt.calls(2)
    said = capsys.readouterr().out
    assert "member 0 of 2: 4,5" in said
    assert "1 of them virtual: they hold what this rank holds" in said
    assert said.count("norm 2.44949") == 2


def test_it_stops_at_the_call_of_a_number_that_dumps_print(stops):
    debugger = follow(f"all_reduce #3 of {TP}")
    for op in ("all_reduce", "all_gather", "all_reduce", "all_reduce"):
        call(debugger, op=op, phase="forward", microbatch=0)
    (prompt,) = stops
    assert "all_reduce #3 of" in prompt.line


def test_the_prompt_goes_on_to_the_next_call_or_to_another_one(stops):
    debugger = follow("0F")
    call(debugger, phase="forward", microbatch=0)
    stops[0].step()
    call(debugger, phase="forward", microbatch=1)
    stops[1].until("3F after")
    for microbatch in (2, 3, 3):
        call(debugger, phase="forward", microbatch=microbatch)
    assert [prompt.call.microbatch for prompt in stops] == [0, 1, 3]


def test_a_call_that_never_came_fails_the_run_and_names_calls_that_did(stops):
    debugger = follow("7B broadcast group=tp")
    call(debugger, phase="forward", microbatch=0)
    with pytest.raises(UsageError, match="never reached") as error:
        debugger.finished()
    assert f"0F all_reduce {TP}" in error.value.fix


def test_memory_of_one_buffer_is_shared_out(stops, capsys):
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 32, bias=False)
    )
    buffer = torch.zeros(64 * 96 + 64)
    model[0].weight.main_grad = buffer[: 64 * 64].view(64, 64)
    model[1].weight.main_grad = buffer[64 * 64 : 64 * 96].view(32, 64)
    debugger = follow("0F nth=1")
    debugger.iteration_started(1, 1, model, None)
    call(debugger, phase="forward", microbatch=0)
    stops[0].memory()
    said = capsys.readouterr().out
    assert re.search(r"16 KiB +grad 0\.weight", said)
    assert re.search(r"8 KiB +grad 1\.weight", said)
    assert re.search(r"256 B +grad padding", said)


# -- values ---------------------------------------------------------------------------------------
def watched(what, model, value):
    """What is said of a forward and a backward of ``model`` on ``value``."""
    watch = ValueWatch(what, "cpu")
    watch.iteration_started(1, 1, model, None)
    try:
        with watch.scope(phase="forward", microbatch=0):
            out = model(value)
        with watch.scope(phase="backward", microbatch=0):
            out.sum().backward()
        watch.finished()
    except PrismError as error:
        return error.message
    finally:
        watch.stop()
    return ""


class Root(torch.nn.Module):
    """Its backward divides by zero where its input is 0."""

    def forward(self, x):
        return x.sqrt()


def test_the_first_operator_with_a_bad_value_is_named():
    model = torch.nn.Sequential(torch.nn.Identity(), Root())
    said = watched("nan", model, torch.tensor([-1.0]))
    assert "iteration 1, 0F: aten.sqrt" in said
    assert "module  1" in said
    assert "none of them has it" in said


def test_a_bad_gradient_is_named_with_the_module_whose_backward_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Root())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    said = watched("inf", model, torch.ones(2))
    assert "0B:" in said
    assert "module  1, in SqrtBackward0" in said


def test_good_values_and_fresh_memory_are_let_pass():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert watched("nan", model, torch.ones(2)) == ""
    assert "norm>0.1" in watched("norm>0.1", model, torch.ones(2))


@pytest.mark.parametrize(("what", "tier"), [("huge", "cpu"), ("nan", "meta"), ("norm>", "cpu")])
def test_what_cannot_be_watched_is_refused(what, tier):
    with pytest.raises(PrismError):
        ValueWatch(what, tier)


# -- a whole job ----------------------------------------------------------------------------------
@pytest.mark.megatron
@pytest.mark.slow
@TRAINING
def test_a_stock_job_stops_steps_and_trains_on():
    command = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", "16",
               "--prism-ranks", "8", "--prism-tier", "cpu", "--prism-break",
               "1F all_reduce group=tp nth=2", "--", str(SCRIPT), *JOB]  # fmt: skip
    status, said = typed(command, ["prism.where()", "n", "prism.step()", "c"])
    assert status == 0, said[-3000:]
    assert "stops before 1F all_reduce" in said
    assert "1 of them virtual" in said
    assert said.count("mappings.py(") >= 3  # at the call, a line further, at the next call
    assert "3 optimizer steps applied of 3" in said
