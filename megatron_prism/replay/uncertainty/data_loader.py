"""What a job's data loader may take where it makes attention masks of sequence x sequence.

pretrain_gpt.py's loader gives each sample a mask of booleans unless
``--no-create-attention-mask-in-dataloader`` is given (training/arguments.py:2505 @0.16.1).  Workers
of the loader copy each mask into shared memory, and another thread from there into pinned memory.
With long sequences a step waits for that.  No capture of shapes runs it.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program import Programs

NO_MASK = "--no-create-attention-mask-in-dataloader"
# bytes per second of masks that the loader of a rank made with two workers, each one byte a number:
# ``two_cp`` of benchmarks/results/h200_x2_six.json, whose step waits for them
MASK_RATE = 1.73e9
_LIKELY = 2.0  # times as long on other hosts: fewer cores, more ranks beside


class LoadedMasks(NamedTuple):
    """Masks of an iteration.

    bytes_of_sample: of one mask.
    longest_ns: that a rank's loader may take for all of an iteration.
    """

    bytes_of_sample: int
    longest_ns: int


def loaded_masks(programs: Programs) -> LoadedMasks | None:
    """Say which masks a rank's loader makes in an iteration; None where it makes none, or where the
    slices do not say.
    """
    # a recipe's own loader makes no mask
    if "arguments" not in programs.source:
        return None
    settings = job_settings.of_source(programs.source)
    # the job computes its masks on the device, or has none
    if settings.get("no_create_attention_mask_in_dataloader", "False") == "True":
        return None
    length = settings.get("seq_length", "")
    samples = settings.get("micro_batch_size", "1")
    if not (length.isdecimal() and samples.isdecimal()):
        return None
    bytes_of_sample = int(length) ** 2
    num_samples = int(samples) * programs.num_microbatches
    took_s = bytes_of_sample * num_samples / MASK_RATE
    return LoadedMasks(bytes_of_sample, round(1e9 * _LIKELY * took_s))
