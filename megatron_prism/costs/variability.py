"""How much do durations vary?  Spreads of the factors on computing and calls, from a data file.

Every factor is lognormal with median 1; a spread is the standard deviation of its logarithm, about
the relative deviation for small ones.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.costs import data_file
from megatron_prism.errors import UsageError

__all__ = ["PARTS", "Variability", "variability"]

FOLDER = Path(__file__).with_name("variability")
PARTS = ("gpu", "step", "call", "network")


@dataclass(frozen=True)
class Variability:
    """Spreads.

    gpu     : between GPUs: a rank computes slower or faster for the whole run
    step    : of a rank from iteration to iteration
    call    : of a call; one draw for all that take part
    network : of all calls of an iteration together (a regime)
    """

    name: str
    gpu: float
    step: float
    call: float
    network: float
    source: str


def variability(name: str | os.PathLike[str]) -> Variability:
    """The spreads of that name or in that file.  UsageError says what is wrong with them."""
    names = [field.name for field in dataclasses.fields(Variability)]
    path, fields = data_file.read(name, FOLDER, "variability", names)
    for part in PARTS:
        value = fields[part]
        if not isinstance(value, (int, float)) or not 0 <= value <= 1 or math.isnan(value):
            raise UsageError(f"{path}: {part} is {value!r}", fix="a spread is from 0 to 1")
    return Variability(**fields)
