"""Patches applied by hand: what an emulated job does not write among the real job's files, refuses,
or leaves out.

Megatron's modules are stand-ins that have the one function; whether these are Megatron's names is
for ``tests/megatron/test_copied_command_lines.py``.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import patching

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.patch import PatchContext
from megatron_prism.emulate.patches import checkpoints
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.runtime.recorded_values import ValueRecorder

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


def context(local, meta=False, recorded=None, **more):
    recorded = local == REAL if recorded is None else recorded
    recording = ValueRecorder(Path(), local[0], {}) if recorded else None
    monitor = TrainingMonitor()
    return PatchContext(lambda: None, monitor, meta, local, local[0], recording=recording, **more)


def test_gradients_are_not_saved_and_that_is_said_once(module, capsys):
    names, calls = module
    emulated, real = names("save_grads"), names("save_grads")
    patching.apply("no-gradients", emulated, context(EMULATED))
    for iteration in (1, 2):
        assert emulated.save_grads("real", {}, iteration, "wgrads") is None
    assert calls == []
    assert capsys.readouterr().err.count("gradients are not written") == 1
    patching.apply("no-gradients", real, context(REAL))
    real.save_grads("own", {}, 1, "dgrads")
    assert calls == [("save_grads", "own", {}, 1, "dgrads")]
    assert capsys.readouterr().err == ""


def test_an_iteration_that_megatron_skips_is_counted(module):
    names, calls = module
    training, here = names("dummy_train_step"), context(EMULATED)
    patching.apply("monitor", training, here)
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
    for name in ("files-are-here", "no-others", "leave-out"):  # as they are applied, one by one
        patching.apply(name, variables, context(local))
    args = SimpleNamespace(world_size=4, save="own", tokenizer_type="NullTokenizer", **PLACES)
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
    # 0.16 has none of them
    without = SimpleNamespace(world_size=4, tokenizer_type="NullTokenizer")
    variables.set_global_variables(without)
    assert capsys.readouterr().err == ""


def test_a_rank_takes_its_own_states_where_the_first_of_its_group_is_virtual(module):
    """As --ckpt-format torch has them: the first rank reads all and scatters."""

    class DistributedOptimizer:
        data_parallel_group = data_parallel_group_gloo = SimpleNamespace(
            rank=lambda: 1, size=lambda: 2
        )

        def load_parameter_state(self, filename):
            group, own = self.data_parallel_group_gloo, torch.zeros(2)
            whole = torch.arange(4.0) if self.data_parallel_group.rank() == 0 else None
            parts = None if whole is None else list(whole.split(2))
            ranks = torch.distributed.get_process_group_ranks(group)
            torch.distributed.scatter(own, parts, ranks[0], group)
            return filename, own.tolist()

    scatter, group = torch.distributed.scatter, DistributedOptimizer.data_parallel_group
    place = SimpleNamespace(
        __name__="megatron.core.optimizer.distrib_optimizer",
        DistributedOptimizer=DistributedOptimizer,
    )
    patching.apply("own-optimizer-states", place, context(EMULATED))
    optimizer = DistributedOptimizer()
    assert optimizer.load_parameter_state("file") == ("file", [2.0, 3.0])
    assert torch.distributed.scatter is scatter
    assert optimizer.data_parallel_group is optimizer.data_parallel_group_gloo is group


@pytest.mark.parametrize(
    ("wanted", "chosen", "found"), [(13, None, 12), (12, None, 8), (99, 8, 8), (8, None, None),
                                    (9, 12, None)],
)  # fmt: skip
def test_an_iteration_goes_on_from_the_last_checkpoint_before_it(wanted, chosen, found, tmp_path):
    for name in ("iter_0000008", "iter_0000012", "iter_x", "release"):
        (tmp_path / name).mkdir()
    if found is not None:
        assert checkpoints._last_before(str(tmp_path), wanted, chosen) == found
        return
    with pytest.raises(UsageError) as error:
        checkpoints._last_before(str(tmp_path), wanted, chosen)
    assert "8, 12" in error.value.message
    assert "--prism-iteration 9" in error.value.fix
