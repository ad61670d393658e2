"""Transformer Engine's own Python, on kernels that have shapes, and on tier cpu values.

Its package runs as it is installed; a module of ours takes the place of its compiled library,
``transformer_engine_torch``.

    table.py             rows: kernel -> shapes, types, temporaries, values; what rows share;
                         the library made of them
    quantization.py      casts to FP8, and the objects that C++ builds: shapes alone
    products.py          cuBLASLt
    product_shapes.py    how many products of experts have a shape that its cache has lost
    rows.py              norms, softmax, activations, rotary embeddings
    attention.py         cuDNN and flash-attn
    experts.py           the router
    optimizers.py        multi-tensor kernels
    triton_values.py     permutation and cross entropy, which are triton's
    hooks.py             where its Python asks for a device, each with its reason

``install(changes, device, live)`` imports it; ``changes.undo()`` takes it away again.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING

from megatron_prism.core.jobs.megatron_source import engine_version
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import triton
from megatron_prism.runtime.te_kernels import (  # noqa: F401  (their rows enter the table)
    attention,
    experts,
    hooks,
    optimizers,
    products,
    quantization,
    rows,
    table,
    triton_values,
)

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.live_bytes import LiveBytes

__all__ = ["install"]

_PACKAGE, _LIBRARY = "transformer_engine", "transformer_engine_torch"


def install(changes: ProcessChanges, device: str, live: LiveBytes | None) -> str:
    """Import the installed Transformer Engine onto our kernels; returns its release.

    device : ``meta``, shapes, or ``cpu``, values
    live   : counts its tensors on ``meta``, but not the wrappers round them
    """
    version = engine_version()
    major, minor = (int(part) for part in version.split(".")[:2])
    changes.on_undo(lambda: table.adopt((0, 0)))
    table.adopt((major, minor), device)
    changes.set_item(os.environ, "NVTE_PROJECT_BUILDING", "1")  # its core library stays away
    changes.set_item(sys.modules, _LIBRARY, table.Library(_LIBRARY))
    changes.set(triton, "COMPUTED", triton.COMPUTED | triton_values.COMPUTED)
    _import(version, changes)
    hooks.set_up(changes, live)
    return version


def _import(version: str, changes: ProcessChanges) -> None:
    """Its ``__init__`` would load the library as it imports ``pytorch``; here both come in turn."""
    before = set(sys.modules)
    changes.on_undo(
        lambda: [
            sys.modules.pop(name)
            for name in set(sys.modules) - before
            if name.partition(".")[0] == _PACKAGE
        ]
    )
    changes.set_item(sys.modules, _PACKAGE, types.ModuleType(_PACKAGE))
    del sys.modules[_PACKAGE]  # hidden without a library (``_attach``)
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    package = types.ModuleType(_PACKAGE)
    package.__spec__, package.__file__, package.__path__ = spec, spec.origin, []
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__version__ = version  # type: ignore[attr-defined]
    sys.modules[_PACKAGE] = package
    hooks.before_import(changes)
    package.common = importlib.import_module(f"{_PACKAGE}.common")  # type: ignore[attr-defined]
    changes.set(package.common, "load_framework_extension", lambda framework: None)
    with hooks.operators_in_sight():
        package.pytorch = importlib.import_module(f"{_PACKAGE}.pytorch")  # type: ignore[attr-defined]
