"""Ops, kernels and steps in words, for whoever points at them on a page.

In : fields of ops, what the recorder noted.  Out: words.
"""

from __future__ import annotations

import re

from megatron_prism.core import groups
from megatron_prism.core.ops import Op
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.replay.costs.kernels import KERNEL

_KERNELS = {
    **dict.fromkeys(("mm", "addmm", "gemm", "_scaled_mm"), "matrix product"),
    "gemm_wgrad": "matrix product of a weight's gradient",
    **dict.fromkeys(("bmm", "baddbmm"), "batched matrix product"),
    "norm": "normalization", "norm_backward": "backward of a normalization",
    "swiglu": "SwiGLU", "swiglu_back": "backward of SwiGLU", "rope": "rotary embedding",
    "embedding": "look-up of embeddings", "add": "addition", "add_": "addition in place",
    "mul": "multiplication", "zero_": "zeroing", "copy_": "copy",
    "clone": "copy", "clone_dense": "copy",
    "_multi_tensor_adam": "Adam", "multi_tensor_adam": "Adam", "_fused_adam_": "Adam",
    "multi_tensor_l2norm": "norm of gradients", "multi_tensor_scale": "scaling of gradients",
}  # fmt: skip
_LAYER = re.compile(r"(?:chunk(\d+)\.)?(?:(.*?)\.)?layers\.(\d+)(?:\.(.*))?$")
_MOST = 3  # modules of a segment


def step(phase: str, microbatch: int, chunk: int) -> str:
    """``forward of microbatch 2, chunk 0``."""
    text = phase or "outside of steps"
    if microbatch >= 0:
        text += f" of microbatch {microbatch}"
    if chunk >= 0:
        text += f", chunk {chunk}"
    return text


def kernels(note: str) -> str:
    """The largest kernel of a segment with its sizes, and how many others."""
    found = list(KERNEL.finditer(note))
    if not found:
        return note
    one = max(found, key=lambda match: (int(match["flops"]), int(match["bytes"])))
    name = one["name"].strip()
    shapes = [text.rstrip("t").replace("x", " x ") for text in one["shapes"].split(",") if text]
    sizes = [re.sub(r"\d+", lambda n: f"{int(n[0]):,}", text) for text in shapes]
    operands = " by ".join(sizes[: 2 if int(one["flops"]) else 1])
    more = sum(int(match["count"] or 1) for match in found) - 1
    others = f", and {counted(more, 'kernel')} more" if more else ""
    return f"{_KERNELS.get(name, name.strip('_').replace('_', ' '))} {operands}".strip() + others


def modules(names: list[str]) -> str:
    """``layer 12's mlp.linear_fc1 (chunk 0)``: whose a segment's tensors are."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        if match := _LAYER.fullmatch(name):
            layers.setdefault((match[3], match[1] or ""), []).append(match[4] or "output")
        elif name:
            layers.setdefault(("", ""), []).append(name)
    parts = []
    for (layer, chunk), inside in layers.items():
        own = ", ".join(inside[:_MOST]) + ", …" * (len(inside) > _MOST)
        of = f" (counted in chunk {chunk})" if chunk else ""
        parts.append(f"layer {layer}'s {own}{of}" if layer else own)
    return "; ".join(parts[:_MOST])


def op(one: Op, num_bytes: int) -> str:
    """What an op does."""
    if one.name == "compute":
        return kernels(one.note) if one.note else "kernels"
    name = one.name.replace("_", "-")
    size = f" of {format_bytes(num_bytes)}" if num_bytes else ""
    over = f" over {groups.short_name(one.group)} ({one.group})" if one.group else ""
    return f"{name}{size}{over}{f': {one.note}' if one.note else ''}"
