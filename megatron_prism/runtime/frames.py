"""Where in the job's Python is this call made?  Frames of Megatron and the job's own code."""

from __future__ import annotations

import sys

__all__ = ["frames"]

_MOST = 12


def frames(depth: int = 1) -> list[str]:
    """``file:line function``, innermost first, from ``depth`` callers above; at most 12."""
    found: list[str] = []
    frame = sys._getframe(depth)
    while frame is not None and len(found) < _MOST:
        path = frame.f_code.co_filename.replace("\\", "/")
        megatron = path.rfind("/megatron/")
        foreign = "site-packages/" in path or "/megatron_prism/" in path or path.startswith("<")
        if megatron >= 0 or not foreign:
            short = path[megatron + 1 :] if megatron >= 0 else "/".join(path.rsplit("/", 2)[-2:])
            found.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return found
