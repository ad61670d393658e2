"""A stock job with few layers, from which an estimate of the whole job follows.

In : Megatron's validated arguments.  Out: the same with one or two *periods* of layers in each
chunk, or why that says nothing of the whole.  A period is one layer where all are equal, and what
repeats itself where layers of two kinds take turns.
"""

from __future__ import annotations

import gc
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_prism.core.jobs.megatron_flags import UNEVEN_STAGES
from megatron_prism.runtime.listeners import TrainingListener

LEAST_PERIODS = 5  # of a chunk: with fewer an estimate takes most of the time that the job takes
_PERIODS = (  # arguments that say how often another kind of layer comes; a list says it of each
    "moe_layer_freq",
    "linear_attention_freq",
    "no_rope_freq",
    "window_attn_skip_freq",
)
_UNLIKE_LAYERS = (  # arguments with which layers differ in another way
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "cpu_offloading_num_layers",
    "decoder_num_layers",
    "cross_layer_parameter_sharing",
)


@dataclass(frozen=True)
class ChunkLayers:
    """Layers of a chunk.

    Attributes:
        period: layers after which their kinds repeat themselves.
        whole: layers of a chunk of the job.
        fewest: periods of the smallest job that says something of the whole.
        reason: why few of them say nothing of the whole; "" if they do.
    """

    period: int = 1
    whole: int = 0
    fewest: int = 1
    reason: str = ""


def chunk_layers(args: Namespace) -> ChunkLayers:
    """Look at the layers of a job's chunks.

    Args:
        args: of Megatron, validated.
    """
    if not getattr(args, "num_layers", None):
        return ChunkLayers(reason="the job does not say how many layers it has")
    for name in (*UNEVEN_STAGES, *_UNLIKE_LAYERS):
        value = getattr(args, name, None)
        # validate_args repeats the layers under an older name
        if value and not (name == "encoder_num_layers" and value == args.num_layers):
            return ChunkLayers(reason=f"--{name.replace('_', '-')} makes layers or stages unequal")
    chunks = _count_chunks(args)
    whole, rest = divmod(args.num_layers, chunks)
    if rest:
        return ChunkLayers(reason="chunks have unequal numbers of layers")

    # kinds of layers that take turns
    period = 1
    for name in _PERIODS:
        value = getattr(args, name, None)
        if isinstance(value, list) and len(set(value)) > 1:
            return ChunkLayers(reason=f"--{name.replace('_', '-')} lists layers of several kinds")
        if isinstance(value, int) and value > 0:
            period = math.lcm(period, value)

    # recomputation of some layers, or of several at once
    recomputed = getattr(args, "recompute_num_layers", None)
    if recomputed and getattr(args, "recompute_method", None) == "uniform":
        period = math.lcm(period, recomputed)
    elif recomputed and recomputed < whole:
        return ChunkLayers(reason="--recompute-num-layers recomputes some layers of a chunk")
    if whole % period:
        return ChunkLayers(reason=f"a chunk has no whole number of {period} layers that repeat")
    # the last layer of a chunk keeps its activations here, and one alone ends in an assertion
    # (fine_grained_activation_offload.py:1161 @0.19.0)
    fewest = 1
    if getattr(args, "fine_grained_activation_offloading", False):
        fewest = 2
        # tensors of a peak follow from few layers, but the allocator's free blocks do not
        if chunks > 1:
            return ChunkLayers(
                reason="activations that are offloaded on several stages leave free blocks of "
                "memory, which few layers do not show"
            )
    if whole < (LEAST_PERIODS + fewest - 1) * period:
        return ChunkLayers(reason=f"a chunk has {whole} layers, too few to leave some out")
    return ChunkLayers(period, whole, fewest)


def short_layers(layers: ChunkLayers, periods: int) -> int:
    """Count the layers of a chunk of a job with few layers.

    Args:
        layers: of the job's chunks.
        periods: 1 for the smallest job that says something of the whole, one more for the next.
    """
    return (layers.fewest + periods - 1) * layers.period


def _count_chunks(args: Namespace) -> int:
    """Count the chunks of all stages together."""
    chunks: int = args.pipeline_model_parallel_size
    return chunks * (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1)


def configurations() -> list[Any]:
    """Find the configurations of models that this process has made of its arguments.

    Scripts of 0.19 make them in front of ``torch.distributed``, those of 0.16 behind it.
    """
    module = sys.modules.get("megatron.core.transformer.transformer_config")
    if module is None:
        return []
    # by type: isinstance asks each object for __class__, at which some of torch's warn
    config = module.TransformerConfig
    return [thing for thing in gc.get_objects() if issubclass(type(thing), config)]


def shorten(args: Namespace, layers: int, configs: Iterable[Any] = ()) -> None:
    """Give each chunk of a job so many layers.

    Args:
        args: of Megatron, validated; changed in place.
        layers: of a chunk.
        configs: configurations that were made of ``args``; changed in place.
    """
    whole = args.num_layers
    args.num_layers = layers * _count_chunks(args)
    # validate_args copies the number of layers there
    if getattr(args, "encoder_num_layers", None) == whole:
        args.encoder_num_layers = args.num_layers
    for settings in (args, *configs):
        if settings.num_layers == whole:
            settings.num_layers = args.num_layers
        # lists with an entry a layer
        for name in _PERIODS:
            value = getattr(settings, name, None)
            if isinstance(value, list):
                setattr(settings, name, value[: args.num_layers])


class LayerCheck(TrainingListener):
    """Sees that the chunks of a model have the layers that they should have.

    Args:
        layers: of a chunk.
        refuse: gets why there is no estimate, and ends the process.
    """

    def __init__(self, layers: int, refuse: Callable[[str], None]) -> None:
        self._layers = layers
        self._refuse = refuse

    def iteration_started(self, number: int, wanted: int, model: Any, optimizer: Any) -> None:
        """Count the layers of each chunk; a model whose layers are elsewhere is refused."""
        for chunk in model or (None,):
            counts = []
            if chunk is not None:
                for name, module in chunk.named_modules():
                    if name.endswith("decoder.layers"):
                        counts.append(len(module))
            if counts != [self._layers]:
                self._refuse("the script gives its model other layers than its arguments say")
