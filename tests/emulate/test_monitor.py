"""The verdict: a run that did not train is an error, whatever the job's own exit code was."""

import types

import pytest
import torch

from megatron_prism.core.errors import NotTrainedError
from megatron_prism.emulate.rank.monitor import TrainingMonitor


def args(train_iters=3, **more):
    return types.SimpleNamespace(train_iters=train_iters, iteration=0, **more)


def run(monitor, steps, skipped=(), wanted=3, move=True, end=None, **more):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = types.SimpleNamespace(param_groups=[{"params": [weight]}])
    with monitor.training(lambda: args(wanted, **more)):
        for step in range(steps):
            with monitor.iteration(optimizer, [torch.nn.Linear(2, 2)]):
                if move and step not in skipped:
                    weight.data.add_(1)
                monitor.stepped({"lm loss": 1.5}, skipped=step in skipped, grad_norm=0.5)
        if end is not None:
            raise end if isinstance(end, BaseException) else SystemExit(end)


def test_a_trained_run_passes_and_remembers():
    monitor = TrainingMonitor()
    run(monitor, 3)
    assert (monitor.steps, monitor.expected, monitor.moved) == (3, 3, True)
    assert monitor.num_parameters == 6
    assert [entry.losses["lm loss"] for entry in monitor.iterations] == [1.5] * 3


def test_parameters_that_did_not_move_are_noticed():
    monitor = TrainingMonitor()
    run(monitor, 3, move=False)
    assert monitor.moved is False


@pytest.mark.parametrize(
    ("steps", "skipped", "words"),
    [
        (0, (), "without a single train step"),
        (2, (), "only 2 updates of 3"),
        (3, (1,), "only 2 updates of 3"),
        (3, (0, 1, 2), "only 0 updates of 3"),
    ],
)
def test_a_run_that_did_not_train_is_an_error(steps, skipped, words):
    with pytest.raises(NotTrainedError, match=words) as caught:
        run(TrainingMonitor(), steps, skipped)
    assert caught.value.exit_code == 1
    assert caught.value.fix


def test_iterations_that_the_job_skips_are_not_asked_for():
    """--iterations-to-skip: what was passed over counts, not the flag, which releases number
    differently: [0] is none of 0.19's iterations, [3] none of 0.16's three."""
    monitor = TrainingMonitor()
    monitor.skipped = 1
    run(monitor, 2, iterations_to_skip=[0, 7])
    assert monitor.expected == 2
    with pytest.raises(NotTrainedError, match="only 2 updates of 3"):
        run(TrainingMonitor(), 2, iterations_to_skip=[3])


def test_exit_0_from_inside_training_is_judged_and_other_codes_are_not():
    with pytest.raises(NotTrainedError):
        run(TrainingMonitor(), 0, end=0)
    with pytest.raises(SystemExit) as ended:
        run(TrainingMonitor(), 0, end=3)
    assert ended.value.code == 3


def test_a_run_that_ends_early_needs_its_own_steps():
    """An interval says how many these are; of a clock or a signal nobody knows."""
    for steps in (1, 2):
        run(TrainingMonitor(), steps, exit_interval=steps)
        with pytest.raises(NotTrainedError):
            run(TrainingMonitor(), steps - 1, exit_interval=steps)
    for ended in ("exit_duration_in_mins", "exit_signal_handler"):
        run(TrainingMonitor(), 1, **{ended: 1})
        with pytest.raises(NotTrainedError):
            run(TrainingMonitor(), 0, **{ended: 1})


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ({}, 500),
        ({"iteration": 490}, 10),  # what a checkpoint leaves
        ({"iteration": 500}, 0),
        ({"exit_interval": 2}, 2),
        ({"exit_interval": 600}, 500),
        ({"exit_interval": 100, "iteration": 300}, 100),
        ({"phase_transition_iterations": [20, 40], "iteration": 20}, 20),
    ],
)
def test_the_steps_of_a_run_end_where_megatron_leaves(more, steps):
    """--prism-capture, --prism-world and memory take their iterations by that number."""
    assert (
        TrainingMonitor().steps_to_make(
            types.SimpleNamespace(**{"train_iters": 500, "iteration": 0, **more})
        )
        == steps
    )


def test_a_job_that_left_before_its_first_step_is_asked_why():
    with pytest.raises(NotTrainedError) as caught:  # --exit-on-missing-checkpoint
        run(TrainingMonitor(), 0, end=0)
    assert "log above" in caught.value.fix


def test_a_job_that_was_told_not_to_train_did_not():
    with pytest.raises(NotTrainedError) as caught:
        run(TrainingMonitor(), 0, skip_train=True)
    assert "--skip-train" in caught.value.fix


def test_backward_gets_the_labels_of_its_forward():
    monitor = TrainingMonitor()
    monitor.new_schedule({"num_microbatches": 2, "seq_length": 8, "micro_batch_size": 3})
    outputs = [torch.ones(1), torch.ones(1)]
    for output in outputs:
        labels = monitor.forward_labels(chunk=1)
        monitor.remember_output([output], labels)
    assert monitor.backward_labels(outputs[1]) == {"phase": "backward", "microbatch": 1, "chunk": 1}
    assert monitor.backward_labels([outputs[0]])["microbatch"] == 0
    assert monitor.tokens_per_iteration() == 48
