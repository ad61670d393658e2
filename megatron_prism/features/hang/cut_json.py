"""Read what stands before the cut of a JSON object.

In : bytes that end too early, as of a disk that was full or a transfer that was broken off.  Out:
the object with its values that are whole, and of its last value, if that is a list or an object,
the items that are whole.
"""

from __future__ import annotations

import re

from megatron_prism.core import foreign

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{},"]', re.DOTALL)
_CLOSING = {b"{": b"}", b"[": b"]"}
_DEPTH = 2  # the object, and a list or an object in it


def before_cut(data: bytes) -> dict[object, object]:
    """Return what stands before the cut.

    Raises:
        ValueError: Nothing whole does, or it is damaged in another way than by a cut.
    """
    open_brackets: list[bytes] = []
    whole_end = 0  # what stands before this place is whole, but for closing brackets
    missing_brackets = b""
    for match in _TOKEN.finditer(data):
        token = match[0]
        end = match.start()
        if token == b'"':
            # the cut is in this text
            break
        if token in _CLOSING:
            open_brackets.append(_CLOSING[token])
            continue
        if open_brackets and token == open_brackets[-1]:
            open_brackets.pop()
            end = match.end()
        elif token != b",":
            continue
        if len(open_brackets) <= _DEPTH:
            whole_end = end
            missing_brackets = b"".join(reversed(open_brackets))
    if not open_brackets:
        raise ValueError("it is not cut")
    value: object = foreign.value_of_json(data[:whole_end] + missing_brackets)
    if not isinstance(value, dict):
        raise ValueError("it is cut off before its first value")
    return value
