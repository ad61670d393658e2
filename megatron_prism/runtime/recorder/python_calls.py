"""How long a host takes to issue a segment whose kernels do not run: by what Python does for it.

On tier meta the job's own Python runs, Megatron's and Transformer Engine's, so its calls are
counted (``sys.monitoring``; ``sys.setprofile``, which doubles their time, before Python 3.12),
without those that only stand in for a GPU.  What each takes on a host of index 0.7 is fitted to
NVIDIA's own tests on one kind of host and to jobs of one GPU (``python -m
benchmarks.accuracy.host_constants``; docs/measurements.md).
"""

from __future__ import annotations

import inspect
import sys
from threading import get_ident
from types import CodeType, FrameType

from megatron_prism.core import code_files
from megatron_prism.core.programs.ops import STEPS

CALL_NS = 1_550  # of a function of Python
KERNEL_NS = 42_500  # of a kernel of a forward or backward, with its operator and autograd's node
LOOP_NS = 2_000  # of one that C++ or the optimizer launches in a loop, or that fills an allocation
PRODUCT_NS = 8_300  # of a matrix product that C++ launches in a loop
# Of a product for whose shape cuBLASLt chooses a kernel, more (te_kernels/product_shapes.py).  In a
# traced iteration the choice took 0.1 to 0.35 ms on a host of index 0.9 to 1.7
UNSEEN_NS = 100_000
# Of a backward that begins, more: the thread of Python hands it to that of the device, and hears of
# its end.  The quickest tenth of the traced rank with the least Python around its backwards
# (benchmarks/results/h100_backwards.json), for that counts apart; the median is 186 us
BACKWARD_NS = 150_000

_COUNTED, _PASSED, _ASIDE = range(3)  # counts; only what it calls counts; neither
_ASIDE_IN = ("runtime/te_kernels/", "runtime/process_group.py", "runtime/recorder/")
_REPEATS = "runtime/recorder/repeats.py"  # runs the job's steps
# torch calls them because operators are watched here
_OF_MODES = ("_library/", "utils/_pytree", "utils/_python_", "overrides.py")  # files of torch
if sys.version_info >= (3, 12):
    _TOOL = sys.monitoring.PROFILER_ID
    _ENDS = sys.monitoring.events.PY_RETURN | sys.monitoring.events.PY_YIELD
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _kind(code: CodeType) -> int:
    file = code.co_filename
    # our own frames: stand-ins also hide what they call, other frames hide themselves alone
    if code_files.is_ours(file):
        inside = code_files.below_prism(file)
        stands_in = code.co_name == "__torch_dispatch__" or inside.startswith(_ASIDE_IN)
        return _ASIDE if stands_in and inside != _REPEATS else _PASSED
    # what is resumed was counted when it began
    if code.co_flags & _RESUMED:
        return _PASSED
    in_torch = code_files.below_package("torch", file)
    if in_torch is not None and in_torch.startswith(_OF_MODES):
        return _PASSED
    return _COUNTED


class PythonCalls:
    """Counts between ``start`` and ``stop``, in the thread that starts it.

    counts : false where another profiler is at work
    """

    def __init__(self) -> None:
        self._count = self._aside = 0
        self._thread = get_ident()
        self.counts = False
        self._kinds: dict[CodeType, int] = {}

    def start(self) -> None:
        self._count = self._aside = 0
        # only one profiler is possible: with another one nothing is counted
        self.counts = sys.getprofile() is None
        if sys.version_info >= (3, 12):
            self.counts = self.counts and sys.monitoring.get_tool(_TOOL) is None
            if self.counts:
                self._monitor()
        elif self.counts:
            sys.setprofile(self._profile)

    def stop(self) -> None:
        if sys.version_info < (3, 12):
            if sys.getprofile() == self._profile:
                sys.setprofile(None)
        elif self.counts:
            self._watch(0)
            sys.monitoring.set_events(_TOOL, 0)
            sys.monitoring.free_tool_id(_TOOL)
            sys.monitoring.restart_events()  # what others want to hear of

    def take(self) -> int:
        """Calls since the last ``take``."""
        count, self._count = self._count, 0
        return count

    if sys.version_info >= (3, 12):

        def _monitor(self) -> None:
            events, register = sys.monitoring.events, sys.monitoring.register_callback
            sys.monitoring.use_tool_id(_TOOL, "prism")
            # each call is heard of at its beginning, and where a generator resumes
            for event in (events.PY_START, events.PY_RESUME):
                register(_TOOL, event, self._enter)
            register(_TOOL, events.PY_THROW, lambda *where: self._enter(*where[:2]) and None)
            for event in (events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND):
                register(_TOOL, event, self._leave)
            # ends are asked for only of what hides its calls
            self._watch(_ENDS)
            self._thread = get_ident()
            entered = events.PY_START | events.PY_RESUME | events.PY_THROW
            sys.monitoring.set_events(_TOOL, entered | events.PY_UNWIND)

        def _watch(self, events: int) -> None:
            """Hear ``events`` of what stands in for a GPU alone."""
            for code in [code for code, kind in self._kinds.items() if kind == _ASIDE]:
                sys.monitoring.set_local_events(_TOOL, code, events)

        def _enter(self, code: CodeType, offset: int) -> object:
            kind = self._kinds.get(code)
            # a code is asked about once: from then on it comes no more, or its end comes, too
            if kind == _PASSED:
                return sys.monitoring.DISABLE
            if kind is None:
                kind = self._kinds[code] = _kind(code)
                if kind == _ASIDE:
                    sys.monitoring.set_local_events(_TOOL, code, _ENDS)
                return self._enter(code, offset)
            # other threads do not hold up the thread that launches
            if get_ident() == self._thread:
                if kind == _ASIDE:
                    self._aside += 1
                elif not self._aside:
                    self._count += 1
            return None

        def _leave(self, code: CodeType, offset: int, value: object) -> None:
            if self._aside and self._kinds.get(code) == _ASIDE and get_ident() == self._thread:
                self._aside -= 1

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        # inside of what hides its calls, only their depth counts
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


def host_ns(
    calls: int,
    kernels: int,
    phase: str,
    *,
    looped: int = 0,
    products: int = 0,
    unseen: float = 0,
    backwards: int = 0,
) -> tuple[int, int]:
    """Estimate what a host of index 0.7 takes for a segment.

    Args:
        calls: of Python's functions.
        kernels: that are launched.
        phase: of the segment.
        looped: of the kernels, those that C++ launches behind others within one operator.
        products: of the kernels, the matrix products that C++ launches so.
        unseen: matrix products for whose shape the library chooses a kernel; an expectation.
        backwards: that begin, but those inside of another.

    Returns:
        ns of the host, and ns of it until its first kernel may begin.
    """
    # the optimizer launches its kernels in loops
    if phase not in STEPS:
        looped = kernels - products
    by_python = kernels - products - looped
    whole_ns = calls * CALL_NS + by_python * KERNEL_NS
    whole_ns += looped * LOOP_NS + products * PRODUCT_NS + round(unseen * UNSEEN_NS)
    whole_ns += backwards * BACKWARD_NS
    return whole_ns, whole_ns // max(kernels, 1)
