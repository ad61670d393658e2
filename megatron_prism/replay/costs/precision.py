"""In which type a job's products compute, and whether its launch line forgot ``--bf16``.

In : programs.  Out: ``Precision``.  Kernels in the notes of segments say it; where no note has a
product, as in programs by hand, the job's settings do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.replay.costs.kernels import KERNEL, product_type

WIDE = ("tf32", "fp32")  # of fp32 operands
_HALF = ("bf16", "fp16")  # settings without which Megatron computes in fp32
_OFF = ("false", "none", "")


@dataclass(frozen=True)
class Precision:
    """The type in which a job computes.

    products : type of most of its matrix flops: bf16, fp16, fp8, tf32 or fp32
    asks     : a sentence for a job whose settings leave it at Megatron's default, fp32; "" else
    """

    products: str
    asks: str = ""

    @property
    def peak(self) -> str:
        """The type whose peak of the data sheet MFU is a share of: as usual bf16 for FP8, too."""
        return self.products if self.products in WIDE else "bf16"


def precision_of(programs: Programs) -> Precision:
    """Say in which type the products of a job compute."""
    flops = _product_flops(programs)
    set_half = _is_half(programs.source)
    if flops:
        products = max(flops, key=flops.__getitem__)
    elif set_half is False:
        products = _type_of_fp32(programs.source)
    else:
        products = "bf16"
    asks = ""
    if products in WIDE and not set_half:
        flag = "bf16=true" if "settings" in programs.source else "--bf16"
        as_tf32 = ", its products in TF32" if products == "tf32" else ""
        asks = f"computes in fp32{as_tf32}: is `{flag}` missing?"
    return Precision(products, asks)


def _product_flops(programs: Programs) -> dict[str, float]:
    """Type -> flops of all ranks' kernels that multiply in it."""
    of = programs.program_of
    ranks = np.bincount(of[of >= 0], minlength=len(programs.programs))
    total: dict[str, float] = {}
    for program, count in zip(programs.programs, ranks.tolist(), strict=True):
        for kind, flops in _of_program(program).items():
            total[kind] = total.get(kind, 0.0) + flops * count
    return total


def _of_program(program: Program) -> dict[str, int]:
    segments = program.ops[program.ops["name"] == CODE["compute"]]
    # many segments have one note: each is read once
    notes, times = np.unique(segments["note"], return_counts=True)
    flops: Counter[str] = Counter()
    for note, count in zip(notes.tolist(), times.tolist(), strict=True):
        for kernel in KERNEL.finditer(program.strings[note]):
            own = int(kernel["flops"]) * int(kernel["count"] or 1)
            if own:
                kind = product_type(kernel["name"].strip(), kernel["dtype"])
                flops[kind] += own * count
    return dict(flops)


def _type_of_fp32(source: Mapping[str, str]) -> str:
    """The type of products of fp32 operands: TF32 with Transformer Engine, Megatron's default."""
    settings = job_settings.of_source(source)
    return "fp32" if settings.get("transformer_impl") == "local" else "tf32"


def _is_half(source: Mapping[str, str]) -> bool | None:
    """Whether the job's settings say bf16 or fp16; None where there are no settings."""
    settings = job_settings.of_source(source)
    if not settings:
        return None
    return any(settings.get(name, "").lower() not in _OFF for name in _HALF)
