"""What is changed where values of virtual ranks come in, and why.  Same form as ``seams``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.emulate.patch import Context, Patch, refused
from megatron_prism.runtime.world import current, values_of

__all__ = ["PATCHES", "tokens_of"]


def tokens_of(labels: torch.Tensor, length: int, place: int, parts: int) -> torch.Tensor | None:
    """Tokens [length, b] of a local stretch, read off ``labels`` [b, s]; None if they do not fit.

    A label is the token that follows, so tokens are the labels before.  The first of a sequence (of
    each chunk, with context parallelism) gets the last label, and what has no label (prompts, in
    fine-tuning) a number of its own place.  With sequence parallelism a rank holds one of ``parts``
    stretches, that at ``place``.
    """
    if labels.dim() != 2:
        return None
    tokens = labels.roll(1, -1)
    own = torch.arange(tokens.shape[-1], device=tokens.device, dtype=tokens.dtype)
    tokens = torch.where(tokens < 0, own, tokens)
    if length * parts == labels.shape[-1] and parts > 1:
        tokens = tokens.chunk(parts, -1)[place]
    return tokens.t() if tokens.shape[-1] == length else None


def _tell(model: Any, labels: torch.Tensor) -> None:
    """Give what ``model`` has received as noise the vectors of its tokens."""
    world, received = current(), getattr(model.decoder, "input_tensor", None)
    if world is None or received is None or not world.values.is_noise(received):
        return
    from megatron.core import parallel_state

    parts, place = 1, 0
    if model.config.sequence_parallel:
        parts = parallel_state.get_tensor_model_parallel_world_size()
        place = parallel_state.get_tensor_model_parallel_rank()

    def fill() -> None:
        tokens = tokens_of(labels, received.shape[0], place, parts)
        if tokens is not None and tokens.shape == received.shape[:-1]:
            world.values.told(received, tokens)

    world.aside(fill)  # the real job has it from another rank


def _received_tokens(module: ModuleType, context: Context) -> None:
    """A stage with labels learns from vectors of tokens; from noise it could not."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels", args[4] if len(args) > 4 else None)
            if labels is not None:
                _tell(self, labels)
            return original(self, *args, **kwargs)

        return call

    for model in filter(None, map(vars(module).get, ("GPTModel", "HybridModel", "MambaModel"))):
        context.replace(model, "forward", make)
        if "build_schedule_plan" in vars(model):  # --overlap-moe-expert-parallel-comm
            context.replace(model, "build_schedule_plan", make)


class _Zeroed:
    """While entered, ``torch.empty`` gives zeros for shapes (2, ...); several threads may enter."""

    def __init__(self) -> None:
        self._lock, self._inside, self._empty = threading.Lock(), 0, torch.empty

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._empty = torch.empty
                torch.empty = self._zeros
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.empty = self._empty

    def _zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self._empty(*args, **kwargs)
        pair = bool(args) and isinstance(args[0], tuple) and args[0][:1] == (2,)
        return made.zero_() if pair else made


def _whole_ring(module: ModuleType, context: Context) -> None:
    """Where gradients of keys and values go round, the last rank writes half of what it sends."""
    if context.meta:
        return
    zeroed = _Zeroed()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(ctx: Any, *gradients: Any) -> Any:
            group = ctx.cp_group
            if values_of(group) is None or group.rank() + 1 < group.size():
                return original(ctx, *gradients)
            with zeroed:  # keys and values, and behind them their gradients
                return original(ctx, *gradients)

        return backward

    if (attention := getattr(module, "AttnFuncWithCPAndKVP2P", None)) is not None:
        context.set(attention, "backward", staticmethod(make(attention.backward)))


def _own_broadcasts(module: ModuleType, context: Context) -> None:
    """Scripts other than GPT's send a batch and its sizes by ``broadcast_data``.  A rank that reads
    the batch itself, because its source is virtual, has both; on shapes the sizes could not be read
    back.  The calls stay, and so does the one buffer that all tensors are views of."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(keys: Any, data: Any, datatype: Any, tp_group: Any = None) -> Any:
            group = module.get_tensor_model_parallel_group_if_none(tp_group)
            source = torch.distributed.get_process_group_ranks(group)[0]
            if not data or source in context.local_ranks and not context.meta:
                return original(keys, data, datatype, tp_group=tp_group)
            module._check_data_types(keys, data, datatype)
            sizes = torch.zeros(len(keys) * module._MAX_DATA_DIM, dtype=torch.long, device="cuda")
            torch.distributed.broadcast(sizes, source, group=group)
            flat = torch.cat([data[key].cuda().contiguous().view(-1) for key in keys], dim=0)
            torch.distributed.broadcast(flat, source, group=group)
            parts = flat.split([data[key].numel() for key in keys])
            return {key: part.view(data[key].shape) for key, part in zip(keys, parts, strict=True)}

        return call

    context.replace(module, "broadcast_data", make)


def _images_have_places(module: ModuleType, context: Context) -> None:
    """LLaVA's sequences are as long as the values of its tokens say: refused before it is built."""
    if context.meta:
        what = "LLaVA puts images where the tokens say, and tier meta has no values"
        context.replace(module.LLaVAModel, "__init__", refused(what, "use --prism-tier cpu"))


PATCHES: tuple[Patch, ...] = (
    Patch(
        "images-have-places",
        "megatron.core.models.multimodal.llava_model",
        "lengths of sequences are values, and shapes have none",
        "core/models/multimodal/llava_model.py:482 @0.19.0",
        _images_have_places,
        targets=("LLaVAModel.__init__",),
    ),
    Patch(
        "own-broadcasts",
        "megatron.core.tensor_parallel.data",
        "a virtual source sends no sizes, and shapes have none to read: batches had no dimensions",
        "core/tensor_parallel/data.py:64 @0.16.1 and @0.19.0",
        _own_broadcasts,
        targets=("broadcast_data",),
    ),
    *(
        Patch(
            f"received-tokens{where}",
            module,
            "nothing but a direction shared by all tokens can be learned from noise",
            "core/pipeline_parallel/schedules.py:415 @0.16.1; :501 @0.19.0 (set_input_tensor)",
            _received_tokens,
            targets=targets,
            releases=releases,
        )
        for where, module, targets, releases in (
            (
                "",
                "megatron.core.models.gpt.gpt_model",
                ("GPTModel.forward", "GPTModel.build_schedule_plan"),
                "",
            ),
            (
                "-hybrid",
                "megatron.core.models.hybrid.hybrid_model",
                ("HybridModel.forward",),
                ">=0.19",
            ),
            ("-mamba", "megatron.core.models.mamba.mamba_model", ("MambaModel.forward",), "<0.19"),
        )  # fmt: skip
    ),
    Patch(
        "whole-ring",
        "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
        "the real neighbour overwrites the half that stays unwritten; a mirrored one adds it up",
        "transformer_engine/pytorch/.../context_parallel.py:3030 @2.20.2",
        _whole_ring,
        targets=("AttnFuncWithCPAndKVP2P.backward",),
    ),
)
