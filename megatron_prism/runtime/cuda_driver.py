"""libcuda, as pacing calls it: launches, events, and memory that torch does not allocate."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.core.errors import PrismError

if TYPE_CHECKING:
    import torch

Function = Callable[..., int]  # answers a status

_P, _U, _I, _N = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t
_CALLS = {
    "cuLaunchKernelEx": [_P, _P, _P, _P],
    "cuEventCreate": [_P, _U],
    "cuEventRecord": [_P, _P],
    "cuEventQuery": [_P],
    "cuStreamWaitEvent": [_P, _P, _U],
    "cuStreamSynchronize": [_P],
    "cuMemAlloc_v2": [_P, _N],
    "cuMemsetD8_v2": [_P, ctypes.c_ubyte, _N],
    "cuMemcpyAsync": [_P, _P, _N, _P],
    "cuMemcpyHtoD_v2": [_P, _P, _N],
    "cuMemcpyDtoH_v2": [_P, _P, _N],
    "cuMemHostRegister_v2": [_P, _N, _U],
    "cuMemHostGetDevicePointer_v2": [_P, _P, _U],
}
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NOT_READY = 600  # CUDA_ERROR_NOT_READY
_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP


class Driver:
    """libcuda, loaded once; the current context is torch's.

    ``launch``, ``record``, ``wait`` and ``query`` are the bare functions, which answer a status;
    the methods raise PrismError unless that is 0.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[str, Function] = {}
        for name, types in _CALLS.items():
            function = getattr(library, name)
            function.argtypes = types
            self._functions[name] = function
        # these four are called in every paced call: no lookup by name
        self.launch = self._functions["cuLaunchKernelEx"]
        self.record = self._functions["cuEventRecord"]
        self.wait = self._functions["cuStreamWaitEvent"]
        self.query = self._functions["cuEventQuery"]

    def _call(self, name: str, *args: object) -> None:
        if status := self._functions[name](*args):
            raise PrismError(f"the CUDA driver refused {name} (status {status})")

    def event(self) -> int:
        """A new event, without a time."""
        handle = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(handle), _NO_TIMING)
        return handle.value or 0

    def synchronize(self, stream: int) -> None:
        """The host waits for everything on ``stream``."""
        self._call("cuStreamSynchronize", stream)

    def allocate(self, num_bytes: int) -> int:
        """Zeroed device memory that nobody else counts, until the process ends."""
        address = ctypes.c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        self._call("cuMemsetD8_v2", address, 0, num_bytes)
        return address.value or 0

    def words(self, num_bytes: int, device: torch.device | str) -> torch.Tensor:
        """The same as a uint8 tensor on torch's ``device``."""
        import torch

        return torch.as_tensor(_Outside(self.allocate(num_bytes), num_bytes), device=device)

    def write(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous ``array`` to the device; waits for it."""
        self._call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: np.ndarray) -> None:
        """Fill a contiguous ``array`` from the device; waits for its default stream."""
        self._call("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """On ``stream``; ``to`` or ``source`` may be of another device that this one reaches."""
        self._call("cuMemcpyAsync", to, source, num_bytes, stream)

    def map_host(self, address: int, num_bytes: int) -> int:
        """The device's address of host memory, page-locked from now on."""
        self._call("cuMemHostRegister_v2", address, num_bytes, _PORTABLE_MAPPED)
        device_address = ctypes.c_void_p()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device_address), address, 0)
        return device_address.value or 0


class _Outside:
    """Device memory that torch's allocator does not know, as torch reads it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
