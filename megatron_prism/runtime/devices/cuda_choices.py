"""Make torch choose on tier ``meta`` as it does on a GPU.

* ``rms_norm``: torch >= 2.9 has a fused kernel on CUDA (``aten::_fused_rms_norm``), which keeps its
  input and one number a row; elsewhere the same call is a row of small ones, whose fp32 copies of
  the input stay alive until backward: 93 MB a layer 4,096 wide, of 2,048 tokens
* ``dropout``: on CUDA one kernel that keeps a mask of bool; elsewhere a product with a mask of the
  input's type, two or four times the bytes (aten/src/ATen/native/Dropout.cpp)
* ``scaled_dot_product_attention``: flash attention on CUDA, or with a mask or in fp32 the kernel
  that saves memory; elsewhere products, whose scores stay alive until backward
* optimizers of ``torch.optim`` take all parameters at once on CUDA (``foreach``): AdamW then holds
  a temporary of every one, 4 bytes each, where the loop of other devices holds one at a time
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.devices.live_bytes import LiveBytes

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads

P = ParamSpec("P")
R = TypeVar("R")
_OBJECTS_DEEP = 2  # a method's own object, and what that delegates to
_live: LiveBytes | None = None
_library: torch.library.Library | None = None


def replace_compile(live: LiveBytes, changes: ProcessChanges) -> None:
    """Replace ``torch.compile``; what was compiled before stays as it is."""
    changes.set(sys.modules[__name__], "_live", live)
    changes.set(torch, "compile", _compile)


def _compile(model: object = None, **options: object) -> object:
    if model is None:
        return functools.partial(_compile, **options)
    return _as_one_kernel(model) if isinstance(model, types.FunctionType) else model


def _as_one_kernel(function: Callable[P, R]) -> Callable[P, R]:
    def one(*args: P.args, **kwargs: P.kwargs) -> R:
        # no meter: nothing counts kernels
        if kernels.meter is None:
            return function(*args, **kwargs)
        with kernels.meter.held() as held:
            out = function(*args, **kwargs)
            # several kernels without a matrix product: torch.compile makes one kernel of them
            if len(held) > 1 and not any(flops for _, flops, _, _ in held):
                drops = any(name == "native_dropout" for name, *_ in held)
                held.clear()
                values, _ = tree_flatten((args, kwargs, out))
                tensors = [value for value in values if isinstance(value, torch.Tensor)]
                kernels.fused(function.__name__ + "_dropout" * drops, 0, *tensors)
        return out

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # no live bytes are counted, so that it does not matter when tensors go
        if _live is None:
            return one(*args, **kwargs)
        values, form = tree_flatten((args, kwargs))
        # no backward comes, so nothing stays alive for it
        if not torch.is_grad_enabled() or not any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in values
        ):
            with _live.inside():
                return one(*args, **kwargs)
        shape = _ResultShape()
        outputs = _Compiled.apply(one, form, shape, *values)
        # what the function left in its objects are tensors inside of the node: outputs replace them
        for (container, key), number in shape.left_behind:
            container[key] = outputs[number]
        return tree_unflatten(outputs[: shape.form.num_leaves], shape.form)

    return run


class _ResultShape:
    """What a compiled function gave back beside its flat outputs.

    form        : of the results, which are the first outputs
    left_behind : places in the function's objects, each with the output that belongs there
    """

    form: TreeSpec

    def __init__(self) -> None:
        self.left_behind: list[tuple[_Place, int]] = []


_Container = dict[object, object]  # or a list, whose keys are its indices
_Place = tuple[_Container, object]  # and a key of it


def _tensors_within(values: Sequence[object]) -> Iterator[tuple[_Place, torch.Tensor]]:
    """Yield tensors in attributes of the objects among ``values``, and of these objects' objects.

    A method's ``self`` and the managers that it delegates to are such objects.  Lists and dicts in
    them are entered; a tuple cannot be changed.
    """
    # depth counts objects inside of objects; lists and dicts on the way are free
    visited: set[int] = set()
    waiting: list[tuple[object, int]] = [(value, 0) for value in values]
    while waiting:
        holder, depth = waiting.pop()
        # each object once; tensors, classes and modules hold nothing of the call
        if id(holder) in visited or isinstance(holder, (torch.Tensor, type, types.ModuleType)):
            continue
        visited.add(id(holder))
        if isinstance(holder, (dict, list)):
            container = cast(_Container, holder)
        elif hasattr(holder, "__dict__") and depth < _OBJECTS_DEEP:
            container, depth = cast(_Container, vars(holder)), depth + 1
        else:
            continue
        keys: Iterable[object] = range(len(container))
        if isinstance(container, dict):
            keys = list(container)
        # tensors are yielded, other holders are looked into
        for key in keys:
            entry = container[key]
            if isinstance(entry, torch.Tensor):
                yield (container, key), entry
            elif isinstance(entry, (dict, list)) or hasattr(entry, "__dict__"):
                waiting.append((entry, depth))


class _Compiled(torch.autograd.Function):
    """A compiled function is compiled backward, too: one node, which keeps what its parts keep."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        function: Callable[..., object],
        form: TreeSpec,
        shape: _ResultShape,
        *values: object,
    ) -> tuple[object, ...]:
        """Run ``function``, and make all that it computes outputs of one node.

        Tensors that it leaves in its objects (a dispatcher's probabilities) are outputs as results
        are: with a way of their own into the function's parts, a backward through them would free
        what the node keeps.

        Args:
            ctx: autograd's.
            function: what is compiled.
            form: of ``values``.
            shape: gets the form of the results, and where outputs are left behind.
            values: the flat arguments.

        Returns:
            The flat results, then what is left behind and is no result.
        """
        assert _live is not None, "compiled functions are nodes on tier meta alone"
        edge = torch.autograd.graph.get_gradient_edge
        inputs = list(values)
        into: dict[int, GradientEdge] = {}
        out: list[tuple[int, GradientEdge]] = []
        argument_of: dict[int, object] = {}  # id of a view -> the argument that it stands for
        with _live.inside(), torch.enable_grad():
            # a leaf the graph would hold, so the function gets a view of each
            for number, value in enumerate(values):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    inputs[number] = view = value.view_as(value)
                    into[number] = edge(view)
                    argument_of[id(view)] = value
            args, kwargs = tree_unflatten(inputs, form)
            oldest = min(view_edge.node._sequence_nr() for view_edge in into.values())
            outputs, shape.form = tree_flatten(function(*args, **kwargs))
            number_of = {id(output): number for number, output in enumerate(outputs)}
            for place, tensor in _tensors_within(values):
                # what was there before the function ran has an older node, or none
                if tensor.grad_fn is None or tensor.grad_fn._sequence_nr() < oldest:
                    continue
                # it kept an argument: its object holds that very tensor
                if id(tensor) in argument_of:
                    container, key = place
                    container[key] = argument_of[id(tensor)]
                    continue
                if id(tensor) not in number_of:
                    number_of[id(tensor)] = len(outputs)
                    outputs.append(tensor)
                shape.left_behind.append((place, number_of[id(tensor)]))
            for number, output in enumerate(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    out.append((number, edge(output)))
                    outputs[number] = output.detach()
        learned = {number for number, _ in out}
        unlearned = [output for number, output in enumerate(outputs) if number not in learned]
        ctx.mark_non_differentiable(
            *(output for output in unlearned if isinstance(output, torch.Tensor))
        )
        ctx.inputs, ctx.outputs, ctx.count = into, out, len(values)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor | None) -> Grads:
        assert _live is not None
        assert ctx.outputs is not None, "a second backward needs retain_graph=True in the first"
        input_grads: list[torch.Tensor | None] = [None] * (ctx.count + 3)
        # outputs that the loss does not depend on take no part
        outputs_with_grads = [
            (of, grads[number]) for number, of in ctx.outputs if grads[number] is not None
        ]
        if outputs_with_grads:
            with _live.inside():  # what was kept for it is there until its results are
                grads_of_inputs = torch.autograd.grad(
                    [of for of, _ in outputs_with_grads],
                    list(ctx.inputs.values()),
                    [g for _, g in outputs_with_grads],
                    retain_graph=True,
                    allow_unused=True,
                )
            for number, grad in zip(ctx.inputs, grads_of_inputs, strict=True):
                input_grads[number + 3] = grad
        # as autograd frees a graph that is not retained
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.inputs = ctx.outputs = None
        return tuple(input_grads)


def choose_as_cuda(changes: ProcessChanges) -> None:
    """Choose as on CUDA until ``changes`` are undone."""
    _rms_norm(changes)
    _composite_operators(changes)
    _foreach(changes)


def _composite_operators(changes: ProcessChanges) -> None:
    """Replace operators on meta, whoever calls them, except in inference mode."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, "AutogradMeta")
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
    changes.set(sys.modules[__name__], "_library", library)  # or it goes with its name
    changes.on_undo(library._destroy)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not x.numel():
        return x
    return torch.native_dropout(x, p, train)[0] if p < 1 else x * torch.zeros_like(x[:0].sum())


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel of an H100 that torch prefers (sdp_utils.cpp: flash, memory-efficient, products).

    query, key, value : [batch, heads, tokens, size]
    """
    sizes = {t.shape[-1] for t in (query, key, value)}
    plain = all(t.dim() == 4 and t.numel() for t in (query, key, value))
    half = query.dtype in (torch.float16, torch.bfloat16)
    wide = not all(size % 8 == 0 and size <= 256 for size in sizes)
    grouped = key.shape[-3:-2] != query.shape[-3:-2]
    # flash attention: 16 bit, one size of heads, no mask
    if plain and half and not wide and attn_mask is None and len(sizes) == 1:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    # memory-efficient attention: any type and mask, but as many heads of keys as of queries
    if plain and not wide and not grouped:
        keeps = any(t.requires_grad for t in (query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # convert_boolean_attn_mask
        mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
        )[0]
    # matrix products, which keep all scores
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _foreach(changes: ProcessChanges) -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "meta"]
    for module in (optimizer, _foreach_utils):
        changes.set(module, "_get_foreach_kernels_supported_devices", lambda: devices)


def _rms_norm(changes: ProcessChanges) -> None:
    """Replace ``torch.nn.functional.rms_norm`` where CUDA would have the fused kernel."""
    original = torch.nn.functional.rms_norm

    def rms_norm(
        input: torch.Tensor,  # noqa: A002 - torch's name
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        mixed = weight is not None and weight.dtype != input.dtype
        if not input.is_meta or mixed or input.is_complex():
            return original(input, normalized_shape, weight, eps)
        return _fused_rms_norm(input, weight, len(normalized_shape))

    changes.set(torch.nn.functional, "rms_norm", rms_norm)


@kernels.differentiable
def _fused_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> Any:
    """Shapes only: out and one fp32 number a row."""
    rows = torch.empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels.fused("_fused_rms_norm", 0, x, weight, out, rows)
    return out, (x, weight, rows), _fused_rms_norm_backward


def _fused_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rows: torch.Tensor
) -> Grads:
    into = torch.empty_like(x)
    of_weight = None if weight is None else torch.empty_like(weight)
    kernels.fused("_fused_rms_norm_backward", 0, grad, x, weight, rows, into, of_weight)
    return into, of_weight, None
