"""Ops of lengths between captured ones.

In : the ops of one place in captures of several lengths.  Out: the op of another length, without
times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.ops import Op


def op_between(ops_of_length: Mapping[int, list[Op]], place: int, length: int) -> Op:
    """Make the op of a length that was not captured.

    Args:
        ops_of_length: Tokens of a sample -> the ops of that length; two lengths at least.
        place: The op's index.
        length: Tokens of a sample.

    Raises:
        ProgramError: Its sizes are on no straight line or parabola, or no whole numbers there.
    """
    lower, upper = lengths_around(sorted(ops_of_length), length)
    sizes_in: dict[int, int] = {}
    sizes_out: dict[int, int] = {}
    for captured, all_ops in ops_of_length.items():
        captured_op = all_ops[place]
        sizes_in[captured] = captured_op.num_in
        sizes_out[captured] = captured_op.num_out
    op = ops_of_length[lower][place]
    upper_op = ops_of_length[upper][place]
    # even loads are rounded to whole tokens at each length
    is_rounded = op.name in ("dispatch", "combine")
    num_in = _on_line(sizes_in, lower, upper, length, is_rounded=is_rounded)
    num_out = _on_line(sizes_out, lower, upper, length, is_rounded=is_rounded)
    shape = _shape_between(op.shape, upper_op.shape, length - lower, upper - lower)
    if num_in is None or num_out is None:
        raise ProgramError(
            f"the size of {op.name} in {op.group} @{op.site} follows lengths on no line or "
            f"parabola, so it is not known for {length} tokens",
            fix=f"prism capture … seq_length={length} -o DIR, then capture=DIR",
        )
    return dataclasses.replace(
        op,
        num_in=num_in,
        num_out=num_out,
        shape=shape,
        # splits of another length do not add up to these sizes
        splits=None,
        # nobody measured this length
        ns=-1,
        flops=-1,
        traffic=-1,
        host=-1,
        lead=-1,
        products=-1,
        kernels=-1,
    )


def _on_line(
    sizes: Mapping[int, int], lower: int, upper: int, length: int, *, is_rounded: bool
) -> int | None:
    """Find the size at a length from sizes at captured lengths.

    Args:
        sizes: Tokens of a sample -> the size in that capture.
        lower: The capture below.
        upper: The capture above.
        length: Tokens of a sample.
        is_rounded: Whether captured sizes are rounded, so that they need not be on the line.

    Returns:
        The size on the straight line through the captures below and above, or on the parabola
        through them and 0 (masks are as long as they are wide).  None: another capture is beside
        both, or the size is no whole number.
    """
    lower_size = sizes[lower]
    upper_size = sizes[upper]
    run = upper - lower
    slope = Fraction(upper_size - lower_size, run)

    def on_line(tokens: int) -> Fraction:
        beyond = tokens - lower
        return lower_size + slope * beyond

    if is_rounded:
        return round(on_line(length))

    # size = (bend * tokens + lean) * tokens
    lower_ratio = Fraction(lower_size, lower)
    upper_ratio = Fraction(upper_size, upper)
    bend = (upper_ratio - lower_ratio) / run
    lean = lower_ratio - bend * lower

    def on_parabola(tokens: int) -> Fraction:
        ratio = bend * tokens + lean
        return ratio * tokens

    # two captures are on a line
    for curve in (on_line, on_parabola):
        if any(curve(captured) != size for captured, size in sizes.items()):
            continue
        own_size = curve(length)
        if own_size.denominator > 1:
            return None
        return int(own_size)
    return None


def _shape_between(lower: str, upper: str, part: int, whole: int) -> str:
    """Write the shape of a length between two captures.

    Args:
        lower: The shape in the capture below.
        upper: The shape in the capture above.
        part: How far the length is from the one below, tokens.
        whole: How far the captures are from each other, tokens.

    Returns:
        "" if dimensions are not known.
    """
    lower_dims = lower.split("x")
    upper_dims = upper.split("x")
    if len(lower_dims) != len(upper_dims):
        return ""
    dims: list[str] = []
    for lower_text, upper_text in zip(lower_dims, upper_dims, strict=True):
        if not lower_text.isdecimal() or not upper_text.isdecimal():
            return ""
        lower_dim = int(lower_text)
        rise = int(upper_text) - lower_dim
        own_rise, rest = divmod(rise * part, whole)
        if rest:
            return ""
        dim = lower_dim + own_rise
        dims.append(str(dim))
    return "x".join(dims)


def lengths_around(captured: Sequence[int], length: int) -> tuple[int, int]:
    """Find the two captured lengths next to a length; the outermost two of a length outside.

    Args:
        captured: Tokens of a sample, ascending; two at least.
        length: Tokens of a sample.
    """
    place = int(np.searchsorted(captured, length))
    last = len(captured) - 1
    place = min(place, last)
    place = max(place, 1)
    return captured[place - 1], captured[place]
