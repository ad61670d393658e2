"""What an emulated job does not write among the real job's files; a job of local ranks does.

Megatron's modules are stand-ins that have the one function; whether these are Megatron's names is
for ``tests/megatron/test_copied_command_lines.py``.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_prism.emulate.monitor import TrainingMonitor
from megatron_prism.emulate.patch import PatchContext
from megatron_prism.emulate.patches import outputs
from megatron_prism.emulate.patches import training as seams_training

EMULATED, REAL = (1,), (0, 1, 2, 3)


@pytest.fixture
def module(monkeypatch):
    """A module with functions that remember their calls, in a world of four ranks."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    calls = []

    def names(*wanted):
        functions = {name: lambda *args, name=name: calls.append((name, *args)) for name in wanted}
        return SimpleNamespace(**functions)

    return names, calls


def context(local, meta=False):
    return PatchContext(lambda: None, TrainingMonitor(), meta, local, local[0])


def test_a_job_is_real_when_no_rank_is_virtual_and_values_are_there(module):
    assert context(REAL).is_real()
    assert not context(REAL, meta=True).is_real()
    assert not context(EMULATED).is_real()
    assert context(EMULATED).is_real(world_size=1)


def test_gradients_are_not_saved_and_that_is_said_once(module, capsys):
    names, calls = module
    emulated, real = names("save_grads"), names("save_grads")
    outputs._no_gradients(emulated, context(EMULATED))
    for iteration in (1, 2):
        assert emulated.save_grads("real", {}, iteration, "wgrads") is None
    assert calls == []
    assert capsys.readouterr().err.count("gradients are not written") == 1
    outputs._no_gradients(real, context(REAL))
    real.save_grads("own", {}, 1, "dgrads")
    assert calls == [("save_grads", "own", {}, 1, "dgrads")]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("local", "profiler", "left"),
    [(EMULATED, True, False), (EMULATED, False, True), (REAL, True, True)],
)
def test_pytorchs_profiler_is_off_where_ranks_are_virtual(
    local, profiler, left, module, monkeypatch, capsys
):
    names, calls = module
    settings = SimpleNamespace(profile=True, use_pytorch_profiler=profiler)
    monkeypatch.setattr(outputs, "_get_args", lambda: settings)
    training = names("train")
    outputs._no_traces(training, context(local))
    training.train("model")
    assert calls == [("train", "model")]
    assert settings.profile is left
    said = capsys.readouterr().err
    assert ("--use-pytorch-profiler is off" in said and "\n  fix: " in said) is not left
    assert bool(said) is not left


def test_an_iteration_that_megatron_skips_is_counted(module):
    names, calls = module
    training, here = names("dummy_train_step"), context(EMULATED)
    seams_training._prove(training, here)
    training.dummy_train_step("data")
    assert calls == [("dummy_train_step", "data")]
    assert here.monitor.skipped == 1


PLACES = {
    "moe_routing_trace_path": "routes",
    "logits_save_dir": "logits",
    "dump_param_to_param_group_map": "map",
}


@pytest.mark.parametrize("local", [EMULATED, REAL])
def test_other_files_of_the_real_job_are_left_alone(local, module, capsys):
    """A trace of routing begins by emptying the file of its rank."""
    names, calls = module
    variables = names("set_global_variables")
    outputs._no_others(variables, context(local))
    args = SimpleNamespace(world_size=4, save="own", **PLACES)
    variables.set_global_variables(args)
    assert calls == [("set_global_variables", args)]
    assert args.save == "own"
    left = {name: getattr(args, name) for name in PLACES}
    said = capsys.readouterr().err
    if local == REAL:
        assert (left, said) == (PLACES, "")
    else:
        assert set(left.values()) == {None}
        assert "--moe-routing-trace-path, --logits-save-dir" in said
    variables.set_global_variables(SimpleNamespace(world_size=4))  # 0.16 has none of them
    assert capsys.readouterr().err == ""


def test_gpus_are_not_sniffed_where_there_are_none(module, capsys):
    names, calls = module
    test = names("run_gpu_sniff_test")
    outputs._no_sniffing(test, context(EMULATED))
    for _ in range(2):
        test.run_gpu_sniff_test("before training")
    assert calls == []
    assert capsys.readouterr().err.count("--gpu-sniff-test-interval") == 1
