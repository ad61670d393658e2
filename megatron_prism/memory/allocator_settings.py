"""What of PYTORCH_CUDA_ALLOC_CONF decides how much is reserved?  Options as values; the rest is
refused by name, because leaving one out silently would be a wrong figure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_prism.core.errors import UnsupportedError, UsageError

__all__ = ["MIB", "ROUND", "Settings"]

MIB = 1 << 20
ROUND = 512  # bytes that every size is a multiple of
UNLIMITED = 1 << 62
_INTERVALS = 16  # of roundup_power2_divisions: 1 MiB, 2 MiB, … 64 GiB
_HARMLESS = (  # they move time, or work on what is not modelled
    "garbage_collection_threshold",  # collects only under a memory fraction, which is refused
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)
_KNOWN = (
    "backend",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "per_process_memory_fraction",
)


@dataclass(frozen=True)
class Settings:
    """The allocator's options.

    expandable    : one growing segment per pool and stream
    divisions     : 16 numbers, into how many parts sizes from 1, 2, 4 … MiB up to the next power of
                    two are divided before they are rounded up; 0: multiples of 512 B
    max_split     : bytes from which a block is neither split nor given to smaller requests
    max_non_split : bytes by which such a block may exceed its request
    """

    expandable: bool = False
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    max_split: int = UNLIMITED
    max_non_split: int = 20 * MIB

    @staticmethod
    def parse(text: str) -> Settings:
        """``expandable_segments:True,max_split_size_mb:128`` as in PYTORCH_CUDA_ALLOC_CONF."""
        found: dict[str, object] = {}
        for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):
            key, colon, value = (word.strip() for word in part.partition(":"))
            if not colon or not key or not value:
                raise UsageError(f"{part!r} is no option:value", fix="expandable_segments:True")
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise UsageError(
                        f"expandable_segments cannot be {value}", fix="expandable_segments:True"
                    )
                found["expandable"] = value == "True"
            elif key == "max_split_size_mb":
                found["max_split"] = _whole(key, value, 21) * MIB
            elif key == "max_non_split_rounding_mb":
                found["max_non_split"] = _whole(key, value, 21) * MIB
            elif key == "roundup_power2_divisions":
                found["divisions"] = _divisions(key, value)
            elif key == "backend" and value == "native" or key in _HARMLESS:
                continue
            elif key in _KNOWN:
                raise UnsupportedError(
                    f"{key} of PYTORCH_CUDA_ALLOC_CONF is not modelled", fix="leave it out"
                )
            else:
                raise UsageError(
                    f"PYTORCH_CUDA_ALLOC_CONF has no {key}", fix="expandable_segments:True"
                )
        return Settings(**found)  # type: ignore[arg-type]

    def rounded(self, num_bytes: int) -> int:
        """What a request of ``num_bytes`` takes at least."""
        if num_bytes < ROUND:
            return ROUND
        interval = min(max(num_bytes.bit_length() - 21, 0), _INTERVALS - 1)
        parts = self.divisions[interval]
        if parts > 1 and num_bytes > ROUND * parts:
            step = (1 << (num_bytes.bit_length() - 1)) // (1 << (parts.bit_length() - 1))
            return -(-num_bytes // step) * step
        return -(-num_bytes // ROUND) * ROUND


def _whole(key: str, value: str, least: int) -> int:
    if not value.isdecimal() or len(value) > 18 or int(value) < least:
        raise UsageError(f"{key} cannot be {value}", fix=f"{key}:{max(least, 128)}")
    return int(value)


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """``4`` for all sizes, or ``[256:1,512:2,>:4]``: up to 256 MB, 512 MB, beyond."""
    inner = re.fullmatch(r"\[(.*)\]", value)
    if inner is None:
        return (_power(key, value),) * _INTERVALS
    found = [0] * _INTERVALS
    last, given = 0, ""
    for part in inner[1].split(","):
        size, colon, given = (word.strip() for word in part.partition(":"))
        if size == ">":
            break
        if not colon:
            raise UsageError(f"{key} cannot be {value}", fix=f"{key}:[256:1,512:2,>:4]")
        end = _power(key, size).bit_length()  # 1 MB is interval 0
        for interval in range(last, min(end, _INTERVALS)):
            found[interval] = _power(key, given)
        last = end
    for interval in range(last, _INTERVALS):  # beyond the last one named, too
        found[interval] = _power(key, given)
    return tuple(found)


def _power(key: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 18 or int(value).bit_count() != 1:
        raise UsageError(
            f"{key}: {value} is no power of two", fix=f"{key}:4, or {key}:[256:1,512:2,>:4]"
        )
    return int(value)
