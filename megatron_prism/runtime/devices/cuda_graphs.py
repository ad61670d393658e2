"""CUDA graphs on tier ``meta``: what is captured runs once, and a replay runs nothing again.

torch's, Megatron's and Transformer Engine's Python captures as on a GPU: static inputs, what a
capture keeps, and what the graphs before it have freed.  To the allocator each stream of a graph's
pool is a stream of its own, with a negative number, whose segments stay until the end.
A recorder hears what a graph launches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.devices.remap import address

replays = 0  # so far
creating = False  # a job makes its graphs: static buffers, what warms up, captures
_handles = itertools.count(1)
_open: list[tuple[int, int]] = []  # pools that requests go to: the last one
_numbers: dict[tuple[tuple[int, int], int], int] = {}  # pool, stream -> the allocator's stream


class CUDAGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: tuple[int, int] = (0, 0)
        self._launches: Any = None  # what a recorder wrote of the capture

    def capture_begin(self, pool: tuple[int, int] | None = None, **options: object) -> None:
        self._pool = pool or graph_pool_handle()
        cuda.capturing.append(self)
        _open.append(self._pool)
        if cuda.watcher is not None:
            cuda.watcher.graph_begun()

    def capture_end(self) -> None:
        if cuda.watcher is not None:
            self._launches = cuda.watcher.graph_ended()
        cuda.capturing.remove(self)
        _open.pop()

    def pool(self) -> tuple[int, int]:
        return self._pool

    def replay(self) -> None:
        """The kernels of the capture, of which nobody here has values."""
        global replays
        replays += 1
        if cuda.watcher is not None:
            cuda.watcher.graph_launched(self._launches)

    def reset(self) -> None:
        """Its memory is the allocator's again once no graph of the pool is left."""

    def register_generator_state(self, generator: object) -> None:
        """No kernel draws numbers."""


@contextlib.contextmanager
def creation() -> Iterator[None]:
    """What is asked for inside is a job's graphs' own."""
    global creating
    outer, creating = creating, True
    try:
        yield
    finally:
        creating = outer


def graph_pool_handle() -> tuple[int, int]:
    """Return a handle that no other pool has, as ``torch.cuda.graph_pool_handle`` does."""
    return (0, next(_handles))


def current_stream() -> int:
    """Whose blocks a request gets: the current stream's, of the pool of the graph that is being
    captured if there is one.
    """
    stream = cuda.current_stream()
    return _numbers.setdefault((_open[-1], stream), -1 - len(_numbers)) if _open else stream


def weak_references(tensors: Any) -> Any:
    """Tensors at the addresses of ``tensors`` (nested), which they do not keep alive."""

    def weak(tensor: torch.Tensor) -> torch.Tensor:
        size, stride = tensor.shape, tensor.stride()
        reference = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        reference.untyped_storage().address = address(tensor)  # type: ignore[attr-defined]
        return reference

    with _disable_current_modes():
        return tree_map_only(torch.Tensor, weak, tensors)


def replace_functions(changes: ProcessChanges) -> None:
    """Put them into torch.cuda until ``changes`` are undone."""
    # both modules hold the names
    for module in (torch.cuda, torch.cuda.graphs):
        changes.set(module, "CUDAGraph", CUDAGraph)
        changes.set(module, "graph_pool_handle", graph_pool_handle)
    bindings: dict[str, Any] = {
        "_graph_pool_handle": graph_pool_handle,
        "_host_emptyCache": lambda: None,
        "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: _open.append(pool),
        "_cuda_endAllocateToPool": lambda device, pool: _open.pop(),
    }
    for name, answer in bindings.items():
        changes.set(torch._C, name, answer)
    changes.on_undo(_open.clear)
    changes.on_undo(_numbers.clear)
