"""Ops, kernels and steps in words, for whoever points at them on a page.

In : fields of ops, what the recorder noted.  Out: words.
"""

from __future__ import annotations

import re

from megatron_prism.core import groups
from megatron_prism.core.programs.ops import HOST_WORK, Op
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.replay.costs.kernels import KERNEL

_KERNELS = {
    "mm": "matrix product",
    "addmm": "matrix product",
    "gemm": "matrix product",
    "_scaled_mm": "matrix product",
    "gemm_wgrad": "matrix product of a weight's gradient",
    "gemm_block": "matrix product in blocks of FP8",
    "gemm_wgrad_block": "matrix product of a weight's gradient in blocks of FP8",
    "bmm": "batched matrix product",
    "baddbmm": "batched matrix product",
    "norm": "normalization",
    "norm_backward": "backward of a normalization",
    "swiglu": "SwiGLU",
    "swiglu_back": "backward of SwiGLU",
    "rope": "rotary embedding",
    "embedding": "look-up of embeddings",
    "add": "addition",
    "add_": "addition in place",
    "mul": "multiplication",
    "zero_": "zeroing",
    "copy_": "copy",
    "clone": "copy",
    "clone_dense": "copy",
    "_multi_tensor_adam": "Adam",
    "multi_tensor_adam": "Adam",
    "_fused_adam_": "Adam",
    "multi_tensor_l2norm": "norm of gradients",
    "multi_tensor_scale": "scaling of gradients",
    "host_memory": "steps on the host",
    "host_copy": "copies between device and host",
    "host_copy_unpinned": "copies from unpinned memory",
    "host_copy_beside": "copies between device and host",
}
_LAYER = re.compile(r"(?:chunk(\d+)\.)?(?:(.*?)\.)?layers\.(\d+)(?:\.(.*))?$")
_MAX_MODULES = 3  # of a segment


def step(phase: str, microbatch: int, chunk: int) -> str:
    """Say a step: ``forward of microbatch 2, chunk 0``."""
    text = phase or "outside of steps"
    if microbatch >= 0:
        text += f" of microbatch {microbatch}"
    if chunk >= 0:
        text += f", chunk {chunk}"
    return text


def kernels(note: str) -> str:
    """Say the largest kernel of a segment with its sizes, and how many others there are."""
    matches = list(KERNEL.finditer(note))
    if not matches:
        return note
    largest = max(matches, key=lambda match: (int(match["flops"]), int(match["bytes"])))
    name = largest["name"].strip()
    sizes = []
    if name not in HOST_WORK:  # those have threads there
        sizes = [_size(shape) for shape in largest["shapes"].split(",") if shape]
    # of a product both operands, of other kernels the first
    operand_count = 2 if int(largest["flops"]) else 1
    operands = " by ".join(sizes[:operand_count])
    text = _KERNELS.get(name, name.strip("_").replace("_", " "))
    text = f"{text} {operands}".strip()
    kernel_count = sum(int(match["count"] or 1) for match in matches)
    if kernel_count > 1:
        text += f", and {counted(kernel_count - 1, 'kernel')} more"
    return text


def _size(shape: str) -> str:
    """Write a shape as ``4,096 x 128``."""
    sides = shape.rstrip("t").replace("x", " x ")
    return re.sub(r"\d+", lambda number: f"{int(number[0]):,}", sides)


def modules(names: list[str]) -> str:
    """Say whose a segment's tensors are: ``layer 12's mlp.linear_fc1 (counted in chunk 0)``."""
    modules_of_layer: dict[tuple[str, str], list[str]] = {}  # (layer, chunk) -> modules
    for name in dict.fromkeys(names):
        # a module of a layer, or of the model as a whole
        match = _LAYER.fullmatch(name)
        if match is not None:
            layer = (match[3], match[1] or "")
            modules_of_layer.setdefault(layer, []).append(match[4] or "output")
        elif name:
            modules_of_layer.setdefault(("", ""), []).append(name)
    parts: list[str] = []
    for (layer_number, chunk), inside in modules_of_layer.items():
        text = ", ".join(inside[:_MAX_MODULES])
        if len(inside) > _MAX_MODULES:
            text += ", …"
        if layer_number:
            text = f"layer {layer_number}'s {text}"
            if chunk:
                text += f" (counted in chunk {chunk})"
        parts.append(text)
    return "; ".join(parts[:_MAX_MODULES])


def op(operation: Op, num_bytes: int) -> str:
    """Say what an op does."""
    if operation.name == "compute":
        return kernels(operation.note) if operation.note else "kernels"
    text = operation.name.replace("_", "-")
    if num_bytes:
        text += f" of {format_bytes(num_bytes)}"
    if operation.group:
        text += f" over {groups.short_name(operation.group)} ({operation.group})"
    if operation.note:
        text += f": {operation.note}"
    return text
