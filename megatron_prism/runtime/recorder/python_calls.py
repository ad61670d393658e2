"""How long a host takes to issue a segment whose kernels do not run: by what Python does for it.

On tier meta the job's own Python runs, Megatron's and Transformer Engine's, so its calls are
counted (``sys.setprofile``), without those that only stand in for a GPU.  What a call and a kernel
take is of DGX H100 hosts: least squares over 43 of NVIDIA's own tests (docs/measurements.md).
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType

import megatron_prism
from megatron_prism.core.ops import STEPS

# of a function of Python; of a kernel of a forward or backward, with its operator and autograd's
# node; of one that C++ or the optimizer launches in a loop, or that fills what is allocated
CALL_NS, KERNEL_NS, LOOP_NS = 1_900, 35_000, 6_000

_COUNTED, _PASSED, _ASIDE = range(3)  # counts; only what it calls counts; neither
_PACKAGE = Path(megatron_prism.__file__).parent.as_posix()
_ASIDE_IN = ("runtime/te_kernels/", "runtime/process_group.py", "runtime/recorder/")
_REPEATS = "runtime/recorder/repeats.py"  # runs the job's steps
# torch calls them because operators are watched here
_OF_MODES = ("torch/_library/", "torch/utils/_pytree", "torch/utils/_python_", "torch/overrides.py")
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _kind(code: CodeType) -> int:
    place = code.co_filename.replace("\\", "/")
    if place.startswith(_PACKAGE):
        inside = place[len(_PACKAGE) + 1 :]
        stands_in = code.co_name == "__torch_dispatch__" or inside.startswith(_ASIDE_IN)
        return _ASIDE if stands_in and inside != _REPEATS else _PASSED
    passed = code.co_flags & _RESUMED or any(part in place for part in _OF_MODES)
    return _PASSED if passed else _COUNTED


class PythonCalls:
    """Counts between ``start`` and ``stop``, in the thread that starts it.

    counts : false where another profiler is at work
    """

    def __init__(self) -> None:
        self._count = self._aside = 0
        self.counts = False
        self._kinds: dict[CodeType, int] = {}

    def start(self) -> None:
        self._count = self._aside = 0
        self.counts = sys.getprofile() is None
        if self.counts:
            sys.setprofile(self._profile)

    def stop(self) -> None:
        if sys.getprofile() == self._profile:
            sys.setprofile(None)

    def take(self) -> int:
        """Calls since the last ``take``."""
        count, self._count = self._count, 0
        return count

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            if self._aside:
                self._aside += 1
                return
            kind = self._kinds.get(frame.f_code)
            if kind is None:
                kind = self._kinds[frame.f_code] = _kind(frame.f_code)
            if kind == _COUNTED:
                self._count += 1
            elif kind == _ASIDE:
                self._aside = 1
        elif event == "return" and self._aside:
            self._aside -= 1


def host_ns(calls: int, kernels: int, looped: int, phase: str) -> tuple[int, int]:
    """(ns of the host for a segment, of it until its first kernel may begin).

    calls  : of Python's functions
    looped : of the kernels, those that C++ launches behind others within one operator
    """
    looped = looped if phase in STEPS else kernels
    whole = calls * CALL_NS + (kernels - looped) * KERNEL_NS + looped * LOOP_NS
    return whole, whole // max(kernels, 1)
