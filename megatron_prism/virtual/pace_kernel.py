"""How does a device wait until a virtual peer would have answered?  With two kernels.

``arrive`` writes down when a call's turn has come; ``release`` works out when the call ends, tells
the calls after it, and holds its stream (and as many blocks as NCCL would) until then.  Nothing
here synchronises with the host.  Times are of the device's %globaltimer, ns (32 ns a tick on H200).

NVRTC through ``torch.cuda._compile_kernel``, so there is no build step; launches go straight to the
driver, because torch's own wrapper builds its arguments anew each time
(``benchmarks/pacing_overhead.py`` has what a call costs).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from megatron_prism.errors import PrismError, UnsupportedError

__all__ = ["RING", "Launcher"]

RING = 4  # iterations whose ends are remembered
_TIMEOUT_NS = 60_000_000_000
_THREADS = 32
# What a block of NCCL holds (profiler, NCCL 2.28.9 on H200): no block of a matrix product fits
# beside it on its SM.  Its 544 threads need not be there for that.
_SHARED_BYTES = 103_808

_SOURCE = r"""
#define RING %(ring)d
#define TIMEOUT %(timeout)dLL
struct Table {
  const int* part;          // launch -> slice of members
  const int* member;        // interactions of each launch
  const long long* own;     // per interaction
  const int* start;         // per interaction: slice of terms
  const int* cause;
  const int* back;
  const long long* weight;
  volatile long long* end;  // [RING][interactions]
  volatile int* tag;        // [RING][interactions]: iteration + 1 once ``end`` holds
  volatile long long* came; // [RING][launches]
  volatile long long* went; // [RING][launches]: when release was about to hold the stream
  int* stuck;               // the first launch that waited for longer than TIMEOUT, + 1
  int interactions, launches;
};
static __device__ __forceinline__ long long now() {
  long long t; asm volatile("mov.u64 %%0, %%globaltimer;" : "=l"(t)); return t;
}
extern "C" __global__ void prism_arrive(Table* t, int launch, int iteration) {
  t->came[(iteration %% RING) * t->launches + launch] = now();
}
// One warp of block 0 works the ends out; the other blocks wait for the last of them.
extern "C" __global__ void prism_release(
    Table* t, int launch, int iteration, int first, int fresh) {
  int lane = threadIdx.x, slot = iteration %% RING, n = t->interactions;
  long long begin = now(), until = 0;
  long long* came = (long long*)&t->came[slot * t->launches + launch];
  if (blockIdx.x == 0) {
    if (fresh && lane == 0) *came = begin;
    long long arrived = fresh ? begin : *(volatile long long*)came;
    arrived = __shfl_sync(0xffffffffu, arrived, 0);
    for (int m = t->part[launch]; m < t->part[launch + 1]; ++m) {
      int j = t->member[m];
      long long best = arrived + t->own[j];
      for (int k = t->start[j] + lane; k < t->start[j + 1]; k += 32) {
        int then = iteration - t->back[k];
        if (then < first) continue;
        int at = (then %% RING) * n + t->cause[k];
        while (t->tag[at] != then + 1) {
          if (now() - begin > TIMEOUT) { atomicCAS(t->stuck, 0, launch + 1); break; }
          __nanosleep(100);
        }
        __threadfence();
        long long other = t->end[at] + t->weight[k];
        if (other > best) best = other;
      }
      for (int o = 16; o; o >>= 1) {
        long long other = __shfl_xor_sync(0xffffffffu, best, o);
        if (other > best) best = other;
      }
      if (lane == 0) {
        t->end[slot * n + j] = best;
        __threadfence();
        t->tag[slot * n + j] = iteration + 1;
      }
      if (best > until) until = best;
    }
    if (lane == 0) t->went[slot * t->launches + launch] = now();
  } else {
    for (int m = t->part[launch]; m < t->part[launch + 1]; ++m) {
      int at = slot * n + t->member[m];
      while (t->tag[at] != iteration + 1) {
        if (now() - begin > TIMEOUT) break;
        __nanosleep(200);
      }
      __threadfence();
      if (t->end[at] > until) until = t->end[at];
    }
  }
  if (until - begin < TIMEOUT) while (now() < until) __nanosleep(40);
}
"""


class _Table(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("part", "member", "own", "start", "cause", "back", "weight", "end", "tag",
                     "came", "went", "stuck")
    ] + [("interactions", ctypes.c_int), ("launches", ctypes.c_int)]  # fmt: skip


class Launcher:
    """The table of releases on the device, and the launches of the two kernels.

    table    : a ``replay.release.Releases``
    launches : per launch the interactions that it ends
    """

    def __init__(self, table: Any, launches: list[list[int]], device: torch.device) -> None:
        if not hasattr(torch.cuda, "_compile_kernel"):
            raise UnsupportedError(
                f"torch {torch.__version__} cannot compile kernels at run time",
                fix="use torch 2.9 or later, or run without --prism-pace",
            )
        self.launches = launches
        part = np.concatenate(([0], np.cumsum([len(one) for one in launches])))
        member = np.array([j for one in launches for j in one], dtype=np.int32)
        ring = (RING, len(table))
        self._arrays = {
            "part": _put(part, torch.int32, device),
            "member": _put(member, torch.int32, device),
            "own": _put(table.own, torch.int64, device),
            "start": _put(table.start, torch.int32, device),
            "cause": _put(table.cause, torch.int32, device),
            "back": _put(table.back, torch.int32, device),
            "weight": _put(table.weight, torch.int64, device),
            "end": torch.zeros(ring, dtype=torch.int64, device=device),
            "tag": torch.zeros(ring, dtype=torch.int32, device=device),
            "came": torch.zeros((RING, len(launches)), dtype=torch.int64, device=device),
            "went": torch.zeros((RING, len(launches)), dtype=torch.int64, device=device),
            "stuck": torch.zeros(1, dtype=torch.int32, device=device),
        }
        pointers = {name: tensor.data_ptr() for name, tensor in self._arrays.items()}
        packed = _Table(**pointers, interactions=len(table), launches=len(launches))
        raw = np.frombuffer(bytes(packed), dtype=np.uint8).copy()
        self._packed = torch.from_numpy(raw).to(device)
        source = _SOURCE % {"ring": RING, "timeout": _TIMEOUT_NS}
        self._functions = {
            name: torch.cuda._compile_kernel(source, f"prism_{name}")
            for name in ("arrive", "release")
        }
        properties = torch.cuda.get_device_properties(device)
        most = getattr(properties, "shared_memory_per_block_optin", 49_152)
        self._shared = min(_SHARED_BYTES, most)
        self._functions["release"].set_shared_memory_config(self._shared)
        torch.cuda.synchronize(device)
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._prepare()

    def _prepare(self) -> None:
        """Arguments that are written in place: the driver copies them at every launch."""
        driver = ctypes.CDLL("libcuda.so.1")
        self._launch = driver.cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        self._pointer = ctypes.c_void_p(self._packed.data_ptr())
        self._numbers = [ctypes.c_int(0) for _ in range(4)]  # launch, iteration, first, fresh
        words = [self._pointer, *self._numbers]
        self._args = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        self._arrive_at = self._functions["arrive"].func
        self._release_at = self._functions["release"].func

    def arrive(self, launch: int, iteration: int) -> None:
        """Write down, on the current stream, when the turn of ``launch`` has come."""
        self._numbers[0].value, self._numbers[1].value = launch, iteration
        self._go(self._arrive_at, 1, 1, 0)

    def release(self, launch: int, iteration: int, first: int, fresh: bool, blocks: int) -> None:
        """Hold the current stream until ``launch`` ends; ``fresh``: there was no ``arrive``.

        ``first`` is the first iteration whose ends are known.
        """
        numbers = self._numbers
        numbers[0].value, numbers[1].value = launch, iteration
        numbers[2].value, numbers[3].value = first, int(fresh)
        self._go(self._release_at, blocks, _THREADS, self._shared)

    def _go(self, function: Any, blocks: int, threads: int, shared: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        status = self._launch(
            function, blocks, 1, 1, threads, 1, 1, shared, stream, self._args, None
        )
        if status:
            raise PrismError(f"the CUDA driver refused a pacing kernel (status {status})")

    def stamps(self) -> dict[str, np.ndarray]:
        """What the last RING iterations wrote down; waits for the device.

        end, tag [RING, interactions]; came, went [RING, launches]; stuck [1]
        """
        names = ("end", "tag", "came", "went", "stuck")
        return {name: self._arrays[name].cpu().numpy() for name in names}


def _put(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # an empty tensor has no address
    array = np.asarray(values)
    return torch.as_tensor(array if array.size else np.zeros(1), dtype=dtype).to(device)
