"""Initial parameters that do not depend on the layout: ``--use-cpu-initialization`` on tier cpu.

Megatron seeds tp, pp and ep ranks apart, so jobs of two layouts start from other weights; with this
flag it draws whole weights and takes each tp rank's part, but pipeline stages and experts still
differ.  Here every parameter is drawn whole from a seed of its own name, and each rank keeps the
shard that Megatron's distributed checkpoint says it has: the one-rank job, resharded bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_prism.emulate.checkpoint_names import sharded_state
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.patch import Original, PatchContext, Patches
from megatron_prism.emulate.patches.startup import megatron_args
from megatron_prism.runtime.virtual_world import values_of

PATCHES = Patches()
Fill = Callable[[torch.Tensor], torch.Tensor]
Args = Sequence[Any]
Options = Mapping[str, Any]
_OVERWRITE = ("zero_", "fill_", "copy_", "constant_")  # nothing that was drawn before is left


class _Fills(TorchFunctionMode):
    """What fills storages with random numbers while a model is built: functions that draw, that
    change their first argument alone, or that make a tensor of drawn ones, element by element.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, tuple[torch.dtype, list[Fill]]] = {}  # by storage
        self._kept: list[torch.Tensor] = []  # so that no other storage gets the same address

    def of(self, tensor: object) -> tuple[torch.dtype, list[Fill]]:
        """(of what type the numbers were drawn, the calls)."""
        key = tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None
        return self._of.get(key, (torch.float32, []))  # type: ignore[arg-type]

    def _keep(self, tensor: torch.Tensor, calls: list[Fill]) -> None:
        self._of[tensor.untyped_storage()._cdata] = tensor.dtype, calls
        self._kept.append(tensor.detach())

    def _again(self, value: Any, shape: torch.Size) -> Any:
        """``value`` if it is not of drawn numbers of this shape; else what draws it as a whole."""
        dtype, calls = self.of(value)
        if not calls or value.shape != shape:
            return lambda full: value
        return functools.partial(_filled, dtype=dtype, calls=tuple(calls))

    def __torch_function__(
        self, func: Original, types: object, args: Args = (), kwargs: Options | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = torch.default_generator.get_state()
        answer = func(*args, **kwargs)
        if not isinstance(answer, torch.Tensor):
            return answer
        name = getattr(func, "__name__", "")
        # a generator of its own, or the default one that has moved on
        draws = kwargs.get("generator") is not None
        draws = draws or not torch.equal(before, torch.default_generator.get_state())
        redrawn = [self._again(value, answer.shape) for value in args]
        if name.endswith("_") and name[-2:] != "__":
            self._note_in_place(func, name, args, kwargs, redrawn, draws)
        elif draws and name in ("rand", "randn"):
            self._keep(answer, [lambda full: func(full.shape, **kwargs)])
        elif any(map(_is_drawn, redrawn)) and not self.of(answer)[1]:
            # computed from drawn numbers, element by element
            self._keep(answer, [lambda full: func(*(draw(full) for draw in redrawn), **kwargs)])
        return answer

    def _note_in_place(
        self,
        func: Original,
        name: str,
        args: Args,
        kwargs: Options,
        redrawn: Sequence[Fill],
        draws: bool,
    ) -> None:
        """Note what a function has done to its first argument."""
        if args:
            tensor, *operands = args
        else:
            tensor, operands = kwargs["tensor"], []
        options = {
            key: value
            for key, value in kwargs.items()
            if value is not tensor and key != "generator"
        }
        calls = list(self.of(tensor)[1])
        # it copies what was drawn elsewhere; it forgets what was there, or depends on a tensor that
        # nobody drew; or it is one more step of the drawing
        if name == "copy_" and _is_drawn(redrawn[1]):
            calls = [redrawn[1]]
        elif name in _OVERWRITE or any(map(torch.is_tensor, (*operands, *options.values()))):
            calls = []
        elif draws or calls:
            calls.append(lambda full: func(full, *operands, **options))
        self._keep(tensor, calls)


def _is_drawn(redrawn: object) -> bool:
    """Whether ``_Fills._again`` has found that a value is of drawn numbers."""
    return isinstance(redrawn, functools.partial)


def _filled(full: torch.Tensor, dtype: torch.dtype, calls: Sequence[Fill]) -> torch.Tensor:
    """A tensor like ``full`` of what ``calls`` draw from the generator's seed."""
    torch.manual_seed(torch.initial_seed())
    out = torch.empty(full.shape, dtype=dtype)
    for call in calls:
        out = call(out)
    return out


def _draw_by_name(model: Any, fills: _Fills, seed: int) -> list[str]:
    """Fill each random parameter of ``model`` with its shard; names of those that stay as Megatron
    has drawn them, because it does not draw them in place.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from torch.utils._pytree import tree_leaves

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": sharded_state(model, {"dp_cp_group": group})}  # 0.16's MTP asks for it
    apply_factories(state)
    filled = set[int]()
    for shard in tree_leaves(state):
        if not isinstance(shard, ShardedTensor) or shard.data is None:
            continue
        dtype, calls = fills.of(shard.data)
        if not calls:
            continue
        # the seed follows from the name, and from the layer where a name has all of them stacked
        along = shard.prepend_axis_num
        place = f"{seed} {shard.key} {shard.global_offset[:along]}"
        digest = hashlib.sha256(place.encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            full = _filled(torch.empty(shard.global_shape[along:]), dtype, calls)
            starts = zip(shard.global_offset[along:], shard.local_shape, strict=True)
            shard.data.copy_(full[tuple(slice(start, start + n) for start, n in starts)])
        filled.add(shard.data.untyped_storage()._cdata)
    left_names = []
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage()._cdata in filled or parameter.numel() <= 1:
            continue
        # zeros and ones are the same in each layout
        if bool((parameter != parameter.reshape(-1)[0]).any()):
            left_names.append(name)
    return left_names


@PATCHES.instead(
    "megatron.training.training:get_model", at=":1161 @0.16.1; :1706 @0.19.0", tiers=("cpu",)
)
@PATCHES.instead(
    "megatron.training.models.dist_utils:unimodal_build_distributed_models",
    at=":53 @0.19.0",
    releases=">=0.19",
    tiers=("cpu",),
)
def _same_parameters(
    context: PatchContext, original: Original, provider: Original, *args: object, **kwargs: object
) -> object:
    """Layouts start from other weights; with ``--use-cpu-initialization`` they have the same."""

    def build(*words: object, **more: object) -> object:
        with _Fills() as fills:
            model = provider(*words, **more)
        left_names = _draw_by_name(model, fills, megatron_args().seed)
        if left_names:
            context.say(f"--use-cpu-initialization leaves as they are: {', '.join(left_names)}")
        group = getattr(model, "embd_group", None)
        ends = group is not None and (model.pre_process or model.post_process)
        if ends and values_of(group) is None:  # the last stage takes the first one's embedding
            model.setup_embeddings_and_output_layer()
        return model

    # Megatron does not see that flag: what it asks for is made by this function
    asked = job_arguments.left_out.get("use_cpu_initialization")
    return original(build if asked else provider, *args, **kwargs)
