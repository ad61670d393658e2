"""pretrain_tiny.py, emulated, which leaves a snapshot of its allocations as torch writes them."""

import os
import pathlib
import pickle
import runpy
import sys

import megatron_prism
from megatron_prism.runtime.devices import live_bytes

# the package's own folder: a clone of any name may hold the environment with Megatron, too
_PACKAGE = os.path.dirname(megatron_prism.__file__) + os.sep
_EVENTS = []
_SIZES = {}  # address -> bytes in use


def _stack():
    """Python's frames without those of the emulation."""
    frames = []
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            frames.append(
                {"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno}
            )
        frame = frame.f_back
    return frames


class _Traced(live_bytes.LiveBytes):
    original_notify = live_bytes.LiveBytes._notify
    original_free = live_bytes.LiveBytes._free

    def notify(self, number, change, tensor=None):
        if change > 0:
            address = number << 40
            _SIZES[address] = change
            _add("alloc", address, change, _stack())
        _Traced.original_notify(self, number, change, tensor)

    def free(self, gone):
        address = self._alive[gone.key][1] << 40
        _Traced.original_free(self, gone)
        size = _SIZES.pop(address, 0)
        if size:
            _add("free_requested", address, size, [])
            _add("free_completed", address, size, [])


def _add(action, address, size, frames):
    _EVENTS.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": frames})


def run(path):
    """Run the script with the words of this process; its snapshot is ``path``."""
    live_bytes.LiveBytes._notify = _Traced.notify
    live_bytes.LiveBytes._free = _Traced.free
    # Megatron-FSDP refuses a single queue
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    script = pathlib.Path(__file__).with_name("pretrain_tiny.py")
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        snapshot = {"segments": [], "device_traces": [_EVENTS]}
        pathlib.Path(path).write_bytes(pickle.dumps(snapshot))
