"""What a rank keeps of its training: losses, gradients, norms, parameters, Adam's states, routing,
and what Megatron reports to TensorBoard.

Gradients and parameters are named, and their place in the whole is said, by Megatron's own
``sharded_state_dict``: for the time of that call every parameter holds its gradient, so whatever
splits and renames parameters for a checkpoint does it with gradients.  Megatron's code is
unmodified; one wrapper of ``train_step`` sees what goes in and comes out.
"""

from __future__ import annotations

import inspect
import json
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from megatron_prism.emulate.patch import Original, PatchContext, Patches
from megatron_prism.emulate.patches.startup import megatron_args
from megatron_prism.emulate.workers import Json
from megatron_prism.verify import shrink
from megatron_prism.verify.compare import LAST_BIT
from megatron_prism.verify.shrink import SmallRun

Shard = tuple[str, list[int], list[int], np.ndarray]  # key, offset, shape of the whole, data
Model = Sequence[Any]  # of Megatron: chunks of a stage
Parameter = torch.nn.Parameter
Tensors = dict[Parameter, torch.Tensor]
STATES = ("exp_avg", "exp_avg_sq")  # of Adam


class StepRecorder:
    """Collects what one rank does, and writes it as two files.

    ``tensors``: [what, iteration, key, offset, shape of the whole], one for each array.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.place = folder / f"rank-{rank}"
        self.iteration = 0
        self.facts: Json = {
            "rank": rank, "losses": [], "norms": {}, "routed": {}, "reported": [], "changes": [],
            "parts": [], "tensors": [], "unnamed": 0,
        }  # fmt: skip
        self.arrays: list[np.ndarray] = []
        self.trains = False  # since its first step
        self.training = False  # now

    def tensor(self, what: str, key: str, offset: object, whole: object, data: object) -> None:
        self.facts["tensors"].append([what, self.iteration, key, offset, whole])
        self.arrays.append(np.asarray(data))

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Keep a figure, as TensorBoard's writer of the last rank does."""
        self.facts["reported"].append([iteration, name, float(value)])

    def flush(self) -> None:
        """As TensorBoard's writer: nothing is written before ``write``."""

    def write(self) -> None:
        np.savez(f"{self.place}.npz", *self.arrays)
        Path(f"{self.place}.json").write_text(json.dumps(self.facts))


def whole_buffers(model: Model, of_gradients: bool) -> Tensors:
    """Gradients, or parameters, of every parameter as copies that are complete on this rank.

    With the distributed optimizer a rank has reduced, or updated, its part of each bucket alone;
    the others' parts are gathered.
    """
    found: Tensors = {}
    for group, bucket in _buckets(model):
        kept = bucket.grad_data if of_gradients else bucket.param_data
        if kept is None:  # parameters stay where they were made
            found.update((p, p.detach().clone()) for p in bucket.params)
            continue
        data = kept.detach().clone()
        if group.ddp_config.use_distributed_optimizer:
            owners = group.intra_distributed_optimizer_instance_group
            parts = list(data.chunk(owners.size()))
            mine = parts[owners.rank()].clone()
            torch.distributed.all_gather(parts, mine, group=owners)
            data = torch.cat(parts)
        for parameter in bucket.params:
            view = parameter.main_grad if of_gradients else parameter.data
            start = view.storage_offset() - kept.storage_offset()
            found[parameter] = data[start : start + view.numel()].view(view.shape)
    return found


def whole_states(model: Model, optimizer: Any, name: str) -> Tensors:
    """One of Adam's states of every parameter as copies that are complete on this rank."""
    own: dict[Parameter, tuple[int, torch.Tensor]] = {}  # from which element on, what is here
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(one, "model_param_gbuf_map"):  # the distributed one
            for parameter in one.model_param_gbuf_map:
                start = one._get_model_param_range_map(parameter)["param"].start
                state = one._get_main_param_and_optimizer_states(parameter)
                own[parameter] = start, state[name]
        else:
            own |= {parameter: (0, state[name]) for parameter, state in one.optimizer.state.items()}
    found: Tensors = {}
    for group, bucket in _buckets(model):
        for parameter in bucket.params_list:
            whole = torch.zeros(parameter.numel())
            if parameter in own:
                start, part = own[parameter]
                whole[start : start + part.numel()] = part.reshape(-1)
            if group.ddp_config.use_distributed_optimizer:
                owners = group.intra_distributed_optimizer_instance_group
                torch.distributed.all_reduce(whole, group=owners)
            found[parameter] = whole.view(parameter.shape)
    return found


def _buckets(model: Model) -> Iterator[tuple[Any, Any]]:
    """(group, bucket) of every chunk."""
    for chunk in model:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            yield from ((group, bucket) for bucket in group.buckets)


def shards(model: Model, values: Tensors, only: bool) -> Iterator[Shard]:
    """What a checkpoint would have of ``values`` in place of the parameters; ``only``: less what
    are no parameters."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from torch.utils._pytree import tree_leaves

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in model:
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        before = {p: p.data for p in inner.parameters() if p in values}
        try:
            for parameter in before:
                parameter.data = values[parameter]
            storages = {p.untyped_storage()._cdata for p in before}
            metadata = {"non_homogeneous_layers": True, "dp_cp_group": group}
            state = {"model": inner.sharded_state_dict(metadata=metadata)}
            apply_factories(state)
            for one in tree_leaves(state):
                if not isinstance(one, ShardedTensor) or one.data is None:
                    continue
                if only and one.data.untyped_storage()._cdata not in storages:
                    continue
                data = one.data.detach().to(torch.float64).numpy().copy()
                shape = list(one.local_shape)
                data = data.reshape([1] * one.prepend_axis_num + shape)
                yield one.key, list(one.global_offset), list(one.global_shape), data
        finally:
            for parameter, data in before.items():
                parameter.data = data


def patches_of(recorder: StepRecorder, run: SmallRun) -> Patches:
    """What makes this rank's job the small one, and keeps what it does."""
    patches = Patches()
    if run.saves:  # in its own folder: no other path of the job is left
        PatchContext.writes = lambda *_: True  # type: ignore[method-assign]

    @patches.instead("megatron.training.arguments:parse_args", at=":88 @0.16.1; :116 @0.19.0")
    def small(context: PatchContext, original: Original, *args: object, **kwargs: object) -> object:
        """A small copy of the job trains."""
        parsed = original(*args, **kwargs)
        changes = shrink.shrink(parsed, run.job, run.copy, run.iterations, run.layers)
        parts = shrink.parts_of(parsed, run.copy)
        recorder.facts |= {"changes": changes, "parts": parts, "precise": run.precise}
        shrink.lay_out(parsed, run.here, run.left_out)
        if run.saves:
            parsed.save, parsed.save_interval = str(run.folder), 1
        if run.resumed:
            parsed.load, parsed.ckpt_step = run.resumed
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
        if not recorder.trains:
            recorder.trains, recorder.iteration = True, megatron_args().iteration
            _keep_parameters(recorder, model, optimizer)
            if run.rounded:
                _round_otherwise(model, LAST_BIT[run.precise])
        recorder.iteration += 1
        schedule, update = call.arguments["forward_backward_func"], optimizer.step

        def scheduled(*args: object, **kwargs: object) -> object:
            recorder.training = True
            losses = schedule(*args, **kwargs)
            recorder.training = False
            for number, one in enumerate(losses or ()):
                values = {key: value.reshape(-1).tolist() for key, value in one.items()}
                recorder.facts["losses"].append([recorder.iteration, number, values])
            return losses

        def updated(*args: object, **kwargs: object) -> object:
            gradients = whole_buffers(model, True)
            unnamed = sum(one.numel() for one in gradients.values())
            for found in shards(model, gradients, True):
                recorder.tensor("gradient", *found)
                unnamed -= found[3].size
            recorder.facts["unnamed"] = unnamed
            return update(*args, **kwargs)

        call.arguments["forward_backward_func"] = scheduled
        optimizer.step = updated
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            optimizer.step = update
        norm = None if result[5] is None else float(result[5])
        recorder.facts["norms"][recorder.iteration] = norm
        _keep_parameters(recorder, model, optimizer)
        return result

    @patches.patch("megatron.training.training", at=":2588 @0.19.0")
    def report(module: ModuleType, context: PatchContext) -> None:
        """What Megatron reports to TensorBoard is compared with another layout's."""
        if context.rank == run.here.size - 1:
            context.changes.set(module, "get_tensorboard_writer", lambda: recorder)

    @patches.instead(
        "megatron.core.transformer.moe.router:TopKRouter.routing", at=":545 @0.16.1; :741 @0.19.0"
    )
    def route(
        context: PatchContext, original: Original, self: object, *args: object, **kwargs: object
    ) -> object:
        """To which experts tokens go is compared with another layout's."""
        result = original(self, *args, **kwargs)
        if recorder.training:
            counts = result[1].sum(dim=0).tolist()
            key = f"{recorder.iteration} {vars(self)['layer_number']}"
            before = recorder.facts["routed"].get(key, [0] * len(counts))
            recorder.facts["routed"][key] = [a + b for a, b in zip(before, counts, strict=True)]
        return result

    return patches


def _keep_parameters(recorder: StepRecorder, model: Model, optimizer: Any) -> None:
    for found in shards(model, whole_buffers(model, False), False):
        recorder.tensor("parameter", *found)
    for name in STATES if optimizer.config.optimizer == "adam" and recorder.iteration else ():
        for found in shards(model, whole_states(model, optimizer, name), True):
            recorder.tensor(name, *found)


def _round_otherwise(model: Model, last_bit: float) -> None:
    """Move every parameter by one rounding, up or down at random."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_(1 + 2 * last_bit * sign)
