"""What a rank keeps of its training: losses, gradients, norms, parameters, Adam's states, routing,
and what Megatron reports to TensorBoard.

Gradients and parameters are named, and their place in the whole is said, by Megatron's own
``sharded_state_dict``: for the time of that call every parameter holds its gradient, so whatever
splits and renames parameters for a checkpoint does it with gradients.  Megatron's code is
unmodified; one wrapper of ``train_step`` sees what goes in and comes out.
"""

from __future__ import annotations

import bisect
import inspect
import json
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from megatron_prism.emulate.checkpoint_names import sharded_state
from megatron_prism.emulate.patch import Original, PatchContext, Patches
from megatron_prism.emulate.patches.startup import megatron_args
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.features.verify import shrink
from megatron_prism.features.verify.compare import LAST_BIT
from megatron_prism.features.verify.kept import COUNTED, STATES
from megatron_prism.features.verify.shrink import SmallRun

Model = Sequence[Any]  # of Megatron: chunks of a stage
Parameter = torch.nn.Parameter
Tensors = dict[Parameter, torch.Tensor]


@dataclass(frozen=True)
class NamedPart:
    """A part of a tensor under the name that a checkpoint gives it.

    parameter : of which it is a value; None for a buffer
    """

    key: str
    offset: list[int]
    global_shape: list[int]
    data: np.ndarray
    parameter: Parameter | None


@dataclass(frozen=True)
class NormCall:
    """One call of Megatron's function of the gradient norm.

    ranks    : of the group over which it sums
    counts   : parameter -> how often each of its elements is in this rank's sum
    nameless : elements in this rank's sum that are in no parameter's gradient
    """

    ranks: tuple[int, ...]
    counts: Tensors
    nameless: int


class GradientPlaces:
    """Where the gradients of a model lie in memory, so that a view of one has a parameter."""

    def __init__(self, model: Model) -> None:
        self.parameters: list[Parameter] = []
        # storage -> (first element, one behind the last, parameter), ascending
        self._places: dict[int, list[tuple[int, int, Parameter]]] = {}
        for _, bucket in _buckets(model):
            for parameter in bucket.params:
                gradient = parameter.main_grad
                start = int(gradient.storage_offset())
                place = start, start + gradient.numel(), parameter
                self._places.setdefault(_storage(gradient), []).append(place)
                self.parameters.append(parameter)
        for places in self._places.values():
            places.sort(key=lambda place: place[0])

    def find(self, view: torch.Tensor) -> tuple[Parameter, int] | None:
        """Return the parameter of a view of its gradient, and the view's first element there.

        Returns None for a tensor that is not wholly in one parameter's gradient.
        """
        # the last parameter that begins at or before the view
        places = self._places.get(_storage(view), [])
        start = int(view.storage_offset())
        number = bisect.bisect_right(places, start, key=lambda place: place[0]) - 1
        if number < 0 or not view.is_contiguous():
            return None
        first, behind, parameter = places[number]
        # it reaches into the gradient of the next parameter
        if start + view.numel() > behind:
            return None
        return parameter, start - first

    def counted(self, gradients: Sequence[torch.Tensor], group: Any) -> NormCall:
        """Return how often each element is among ``gradients``, whose norm is summed over
        ``group``; None is the whole world.
        """
        counts = {parameter: torch.zeros(parameter.numel()) for parameter in self.parameters}
        nameless = 0
        for gradient in gradients:
            place = self.find(gradient)
            if place is None:
                # a copy, or several gradients in one: nobody knows whose
                nameless += gradient.numel()
                continue
            parameter, start = place
            counts[parameter][start : start + gradient.numel()] += 1
        if group is None:
            ranks = tuple(range(torch.distributed.get_world_size()))
        else:
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
        shaped = {parameter: count.view(parameter.shape) for parameter, count in counts.items()}
        return NormCall(ranks, shaped, nameless)


class StepRecorder:
    """Collects what one rank does, and writes it as two files.

    ``tensors``: [kind, iteration, key, offset, global shape], one for each array.
    ``norm_calls``: [iteration, what its counts are called, ranks of the group, nameless elements].
    ``unnamed``: name of a parameter that no checkpoint names -> [elements, whether its gradient
    was 0 in each iteration].
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.place = folder / f"rank-{rank}"
        self.iteration = 0
        self.facts: Json = {
            "rank": rank,
            "losses": [],
            "norms": {},
            "norm_calls": [],
            "routed": {},
            "reported": [],
            "changes": [],
            "parts": [],
            "tensors": [],
            "unnamed": {},
        }
        self.arrays: list[np.ndarray] = []
        self.trains = False  # since its first step
        self.training = False  # now
        self.places: GradientPlaces | None = None  # while the optimizer steps
        self.norm_calls: list[NormCall] = []  # of this step

    def tensor(self, kind: str, part: NamedPart) -> None:
        """Keep a part of a tensor."""
        self.facts["tensors"].append(
            [kind, self.iteration, part.key, part.offset, part.global_shape]
        )
        self.arrays.append(np.asarray(part.data))

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Keep a figure, as TensorBoard's writer of the last rank does."""
        self.facts["reported"].append([iteration, name, float(value)])

    def flush(self) -> None:
        """As TensorBoard's writer: nothing is written before ``write``."""

    def write(self) -> None:
        """Write both files; the facts last, so that a rank that has them has all."""
        np.savez(f"{self.place}.npz", *self.arrays)
        Path(f"{self.place}.json").write_text(json.dumps(self.facts))

    def keep_gradients(self, model: Model) -> None:
        """Keep the gradients as the optimizer reads them, and the names that some lack."""
        gradients = whole_buffers(model, True)
        # elements that no checkpoint names: those that stay when all named are taken off
        unnamed = {parameter: parameter.numel() for parameter in gradients}
        for part in shards(model, gradients, True):
            self.tensor("gradient", part)
            if part.parameter is not None:
                unnamed[part.parameter] -= part.data.size
        for name, parameter in _names(model):
            if unnamed.get(parameter, 0) <= 0:
                continue
            _, was_zero = self.facts["unnamed"].get(name, [0, True])
            is_zero = not bool(gradients[parameter].any())
            self.facts["unnamed"][name] = [unnamed[parameter], was_zero and is_zero]

    def keep_norm_calls(self, model: Model) -> None:
        """Keep which elements of which parameters are in the gradient norm."""
        for number, call in enumerate(self.norm_calls):
            kind = f"{COUNTED} {number}"
            self.facts["norm_calls"].append([self.iteration, kind, list(call.ranks), call.nameless])
            # how often each element is counted, as a tensor like the gradient
            for part in shards(model, call.counts, True):
                self.tensor(kind, replace(part, data=part.data.astype(np.uint8)))
        self.norm_calls = []

    def keep_parameters(self, model: Model, optimizer: Any) -> None:
        """Keep the parameters, and the optimizer's states behind a step."""
        for part in shards(model, whole_buffers(model, False), False):
            self.tensor("parameter", part)
        # before the first step there are no states
        if not self.iteration:
            return
        # an optimizer has some of these
        for name in STATES:
            for part in shards(model, whole_states(model, optimizer, name), True):
                self.tensor(name, part)


def _storage(tensor: torch.Tensor) -> int:
    """Return what two views of the same memory have alike."""
    return int(tensor.untyped_storage()._cdata)


def _inner(chunk: Any) -> Any:
    """Return a chunk without its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _names(model: Model) -> Iterator[tuple[str, Parameter]]:
    """Yield Megatron's own names of parameters, with the chunk's number if there are several."""
    for number, chunk in enumerate(model):
        before = ""
        # one chunk needs no number
        if len(model) > 1:
            before = f"chunk {number} "
        for name, parameter in _inner(chunk).named_parameters():
            yield before + name, parameter


def whole_buffers(model: Model, of_gradients: bool) -> Tensors:
    """Return gradients, or parameters, of every parameter as copies that are complete here.

    With the distributed optimizer a rank has reduced, or updated, its part of each bucket alone;
    the others' parts are gathered.
    """
    copies: Tensors = {}
    for group, bucket in _buckets(model):
        buffer = bucket.param_data
        if of_gradients:
            buffer = bucket.grad_data
        # parameters stay where they were made: only the distributed optimizer has a buffer of them
        if buffer is None:
            for parameter in bucket.params:
                copies[parameter] = parameter.detach().clone()
            continue
        data = buffer.detach().clone()
        if group.ddp_config.use_distributed_optimizer:
            owners = group.intra_distributed_optimizer_instance_group
            parts = list(data.chunk(owners.size()))
            own_part = parts[owners.rank()].clone()
            torch.distributed.all_gather(parts, own_part, group=owners)
            data = torch.cat(parts)
        for parameter in bucket.params:
            view = parameter.data
            if of_gradients:
                view = parameter.main_grad
            # the place of the parameter in its bucket
            start = view.storage_offset() - buffer.storage_offset()
            copies[parameter] = data[start : start + view.numel()].view(view.shape).clone()
    return copies


def whole_states(model: Model, optimizer: Any, name: str) -> Tensors:
    """Return one of the optimizer's states of every parameter that has it, complete here."""
    own_parts = _own_states(optimizer, name)
    states: Tensors = {}
    for group, bucket in _buckets(model):
        for parameter in bucket.params_list:
            full_state = torch.zeros(parameter.numel())
            # 1 where some rank has a state of the element
            held = torch.zeros(parameter.numel())
            if parameter in own_parts:
                start, part = own_parts[parameter]
                full_state[start : start + part.numel()] = part.reshape(-1)
                held[start : start + part.numel()] = 1
            if group.ddp_config.use_distributed_optimizer:
                owners = group.intra_distributed_optimizer_instance_group
                torch.distributed.all_reduce(full_state, group=owners)
                torch.distributed.all_reduce(held, group=owners)
            # an optimizer may have this state for some of its parameters alone
            if bool(held.all()):
                states[parameter] = full_state.view(parameter.shape)
    return states


def _own_states(optimizer: Any, name: str) -> dict[Parameter, tuple[int, torch.Tensor]]:
    """Return parameter -> (its first element that this rank has a state of, these states)."""
    own_parts: dict[Parameter, tuple[int, torch.Tensor]] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # the distributed one has states of parts of parameters
        if hasattr(part, "model_param_gbuf_map"):
            for parameter in part.model_param_gbuf_map:
                start = part._get_model_param_range_map(parameter)["param"].start
                states = part._get_main_param_and_optimizer_states(parameter)
                if isinstance(states.get(name), torch.Tensor):
                    own_parts[parameter] = start, states[name]
            continue
        # a rank without parameters has no optimizer
        if part.optimizer is None:
            continue
        for parameter, states in part.optimizer.state.items():
            if isinstance(states.get(name), torch.Tensor):
                own_parts[parameter] = 0, states[name]
    return own_parts


def _buckets(model: Model) -> Iterator[tuple[Any, Any]]:
    """Yield (group, bucket) of every chunk."""
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                yield group, bucket


def shards(model: Model, values: Tensors, only: bool) -> Iterator[NamedPart]:
    """Yield what a checkpoint would have of ``values`` in place of the parameters.

    Args:
        model: chunks of the model.
        values: parameter -> the tensor to take in its place.
        only: leave out what is no value of a parameter.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from torch.utils._pytree import tree_leaves

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in model:
        inner = _inner(chunk)
        # parameters hold the values while Megatron says where each is in the whole
        before = {p: p.data for p in inner.parameters() if p in values}
        try:
            owners: dict[int, Parameter] = {}
            for parameter in before:
                parameter.data = values[parameter]
                owners[_storage(parameter)] = parameter
            # names with the number of the layer, the same in every layout
            metadata = {"non_homogeneous_layers": True, "dp_cp_group": group}
            state = {"model": sharded_state(inner, metadata)}
            apply_factories(state)
            for leaf in tree_leaves(state):
                # extra states are objects, and some leaves have no data
                if not isinstance(leaf, ShardedTensor) or leaf.data is None:
                    continue
                owner = owners.get(_storage(leaf.data))
                if only and owner is None:
                    continue
                data = leaf.data.detach().to(torch.float64).numpy().copy()
                # axes that the checkpoint adds in front, such as that of layers
                data = data.reshape([1] * leaf.prepend_axis_num + list(leaf.local_shape))
                offset, global_shape = list(leaf.global_offset), list(leaf.global_shape)
                yield NamedPart(leaf.key, offset, global_shape, data, owner)
        finally:
            for parameter, data in before.items():
                parameter.data = data


def patches_of(recorder: StepRecorder, run: SmallRun) -> Patches:
    """What makes this rank's job the small one, and keeps what it does."""
    patches = Patches()
    # an emulated job may not write; these checkpoints are for the next run
    if run.saves:  # in its own folder: no other path of the job is left
        PatchContext.writes = lambda *_: True  # type: ignore[method-assign]

    @patches.instead("megatron.training.arguments:parse_args", at=":88 @0.16.1; :116 @0.19.0")
    def small(context: PatchContext, original: Original, *args: object, **kwargs: object) -> object:
        """A small copy of the job trains."""
        parsed = original(*args, **kwargs)
        changes = shrink.shrink(parsed, run.job, run.copy, run.iterations, run.layers)
        parts = shrink.parts_of(parsed, run.copy)
        recorder.facts |= {"changes": changes, "parts": parts, "precise": run.precise}
        shrink.lay_out(parsed, run.world, run.left_out)
        if run.saves:
            parsed.save, parsed.save_interval = str(run.folder), 1
        # a run that goes on from another layout's checkpoint
        if run.resumed:
            parsed.load, parsed.ckpt_step = run.resumed
        # other layouts read it, so it may not depend on this one
        if run.saves or run.resumed:
            parsed.ckpt_format = "torch_dist"
        return parsed

    @patches.patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async", at=":48 @0.16.1; @0.19.0"
    )
    def queue_of_results(module: ModuleType, context: PatchContext) -> None:
        """A save that is waited for needs no process of its own, which would outlive the rank."""
        context.changes.set(module, "_results_queue", queue.Queue())

    @patches.instead("megatron.training.training:train_step", at=":1603 @0.16.1; :2336 @0.19.0")
    def step(context: PatchContext, original: Original, *args: object, **kwargs: object) -> object:
        """What goes into a step and comes out is compared with another layout's."""
        call = inspect.signature(original).bind(*args, **kwargs)
        model, optimizer = call.arguments["model"], call.arguments["optimizer"]
        # the first step: what the job starts from
        if not recorder.trains:
            recorder.trains, recorder.iteration = True, megatron_args().iteration
            recorder.keep_parameters(model, optimizer)
            if run.rounded:
                _round_otherwise(model, LAST_BIT[run.precise])
        recorder.iteration += 1
        schedule, update = call.arguments["forward_backward_func"], optimizer.step

        def scheduled(*args: object, **kwargs: object) -> object:
            recorder.training = True
            losses = schedule(*args, **kwargs)
            recorder.training = False
            for number, microbatch in enumerate(losses or ()):
                values = {key: value.reshape(-1).tolist() for key, value in microbatch.items()}
                recorder.facts["losses"].append([recorder.iteration, number, values])
            return losses

        def updated(*args: object, **kwargs: object) -> object:
            # gradients are complete here, and not yet clipped or used
            recorder.keep_gradients(model)
            recorder.places = GradientPlaces(model)
            try:
                return update(*args, **kwargs)
            finally:
                recorder.places = None

        call.arguments["forward_backward_func"] = scheduled
        optimizer.step = updated
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            optimizer.step = update
        # the sixth of what train_step returns (training/training.py:1603 @0.16.1)
        norm = result[5]
        if norm is not None:
            norm = float(norm)
        recorder.facts["norms"][recorder.iteration] = norm
        recorder.keep_norm_calls(model)
        recorder.keep_parameters(model, optimizer)
        return result

    @patches.instead(
        "megatron.core.optimizer.clip_grads:get_grad_norm_fp32", at=":51 @0.16.1; :55 @0.19.0"
    )
    def gradient_norm(
        context: PatchContext, original: Original, *args: object, **kwargs: object
    ) -> object:
        """Which parameters are in the gradient norm is compared with another layout's."""
        if recorder.places is not None:
            call = inspect.signature(original).bind(*args, **kwargs)
            gradients = call.arguments["grads_for_norm"]
            # Megatron takes one tensor, or a list
            if isinstance(gradients, torch.Tensor):
                gradients = [gradients]
            group = call.arguments.get("grad_stats_parallel_group")
            recorder.norm_calls.append(recorder.places.counted(gradients, group))
        return original(*args, **kwargs)

    @patches.patch("megatron.training.training", at=":2588 @0.19.0")
    def report(module: ModuleType, context: PatchContext) -> None:
        """What Megatron reports to TensorBoard is compared with another layout's."""
        # Megatron's writer is on the last rank (training/global_vars.py)
        if context.rank == run.world.size - 1:
            context.changes.set(module, "get_tensorboard_writer", lambda: recorder)

    @patches.instead(
        "megatron.core.transformer.moe.router:TopKRouter.routing", at=":545 @0.16.1; :741 @0.19.0"
    )
    def route(
        context: PatchContext, original: Original, self: object, *args: object, **kwargs: object
    ) -> object:
        """To which experts tokens go is compared with another layout's."""
        result = original(self, *args, **kwargs)
        # evaluations route, too, and do not count
        if recorder.training:
            counts = result[1].sum(dim=0).tolist()
            key = f"{recorder.iteration} {vars(self)['layer_number']}"
            before = recorder.facts["routed"].get(key, [0] * len(counts))
            recorder.facts["routed"][key] = [a + b for a, b in zip(before, counts, strict=True)]
        return result

    return patches


def _round_otherwise(model: Model, last_bit: float) -> None:
    """Move every parameter by one rounding, up or down at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_(1 + 2 * last_bit * sign)
