"""What does a checkpoint take of the device, where none may be written?  On tier ``meta``.

A torch_dist checkpoint is made until its state dict is complete.  Until then nothing is written
(checkpointing.py:752 @0.19.0), and what comes after it is host memory, tensor by tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_prism.emulate.monitor import TrainingMonitor

__all__ = ["weigh"]


class _Complete(Exception):
    """The state dict is there."""


def weigh(module: ModuleType, proof: TrainingMonitor, save: Callable[[], object]) -> None:
    """The part ``checkpoint`` of the rank's memory; ``save`` is Megatron's save_checkpoint with all
    its arguments, ``module`` its module.  Stays unknown, and says so, where a stand-in lacks what
    only checkpoints ask for.
    """
    complete = module.generate_state_dict

    def generate(*args: object, **kwargs: object) -> None:
        complete(*args, **kwargs)
        raise _Complete

    module.generate_state_dict = generate  # type: ignore[attr-defined]
    try:
        with proof.part("checkpoint"):
            save()
    except _Complete:
        return
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"prism: what a checkpoint takes is unknown: {why}\n")
        proof.peak_source.parts.pop("checkpoint", None)
    finally:
        module.generate_state_dict = complete  # type: ignore[attr-defined]
