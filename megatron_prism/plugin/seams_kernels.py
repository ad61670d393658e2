"""What becomes, without a CUDA device, of what only such a device can run, and why.

Same form as ``seams``: a stand-in where there is one, else a refusal that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prism.errors import UnsupportedError
from megatron_prism.plugin.seams import Context, Seam, _wrap, refused
from megatron_prism.tiers import mla_rope

__all__ = ["SEAMS"]


def _mla_rope(module: ModuleType, context: Context) -> None:
    """The rotary embedding of multi-latent attention is four triton kernels by default."""
    for name, kernel in mla_rope.KERNELS.items():
        if hasattr(module, name):
            setattr(module, name, kernel)


def _no_triton(module: ModuleType, context: Context) -> None:
    """A triton kernel without a stand-in: triton's own words are that libcuda.so is missing."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(self, "__name__", None) or getattr(self.base_fn, "__name__", "?")
            raise UnsupportedError(
                f"the triton kernel {name} needs a GPU, and has no stand-in here",
                fix="leave out the flag that asks for this fusion, or --prism-tier cuda",
            )

        return call

    owner = module.Autotuner if hasattr(module, "Autotuner") else module.JITFunction
    _wrap(owner, "run", make)


def _no_fsdp2(module: ModuleType, context: Context) -> None:
    """torch shards what it has moved to the CUDA device itself."""
    what = "--use-torch-fsdp2 shards parameters on a CUDA device"
    make = refused(what, "leave it out, or --prism-tier cuda")
    _wrap(module.TorchFullyShardedDataParallel, "__init__", make)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "no-fsdp2",
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "torch's FSDP2 wants its parameters on a CUDA device",
        "core/distributed/torch_fully_sharded_data_parallel.py:45 @0.19.0",
        _no_fsdp2,
    ),
    Seam(
        "mla-rope",
        "megatron.core.fusions.fused_mla_yarn_rope_apply",
        "multi-latent attention launches triton kernels unless --no-rope-fusion",
        "core/fusions/fused_mla_yarn_rope_apply.py:258 @0.19.0",
        _mla_rope,
    ),
    Seam(
        "no-triton",
        "triton.runtime.jit",
        "a kernel without a stand-in is named",
        "triton/runtime/jit.py (JITFunction.run) @3.6",
        _no_triton,
    ),
    Seam(
        "no-autotuning",
        "triton.runtime.autotuner",
        "the same where triton would time a kernel first",
        "triton/runtime/autotuner.py (Autotuner.run) @3.6",
        _no_triton,
    ),
)
