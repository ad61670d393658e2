"""The end of a captured job: one more train step, saving, one iteration of evaluation.

A worker of a capture ends as soon as its slice is complete.  Here the job goes on to its own end
instead, which its arguments bring nearer.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.runtime.listeners import TrainingListener

if TYPE_CHECKING:
    from megatron_prism.emulate.rank.session import Run


class EndOfLife(TrainingListener):
    """Keeps what is allocated when the job has ended.

    Args:
        run: of this rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def finished(self) -> None:
        """Make what is alive now the part ``end``."""
        live = self._run.tier.live
        if live is not None:
            with live.part("end"):
                pass


def add_to(run: Run) -> None:
    """Have the job of ``run`` go on to its end once its slice is complete."""

    def go_on(number: int) -> bool:
        settings = job_arguments.parsed()
        # a program without Megatron's arguments has no end that is known
        if settings is None or not hasattr(settings, "curr_iteration"):
            return False
        shorten(settings)
        return True

    run.on_captured.append(go_on)
    run.follow_training(EndOfLife(run))


def shorten(settings: argparse.Namespace) -> None:
    """End a job behind the train step that begins, with all that it does at its end.

    Args:
        settings: Megatron's parsed arguments; its training loop looks at them in every iteration.
    """
    last = settings.curr_iteration + 1
    settings.train_iters = last
    # it would end the process there (sys.exit, megatron/training/training.py:4155 @0.19.0),
    # before the evaluation behind the loop
    settings.exit_interval = None
    # saved in the loop, where --save says where
    settings.save_interval = last
    # evaluated behind the loop, on as many samples as one iteration takes
    settings.eval_interval = last + 1
    settings.full_validation = False
    settings.do_test = False
    # a count for each of several validation sets (megatron/training/training.py:4386 @0.19.0)
    if isinstance(settings.eval_iters, list):
        settings.eval_iters = [1] * len(settings.eval_iters)
    elif settings.eval_iters:
        settings.eval_iters = 1
