"""What is a chunk of the model made of, as far as a schedule asks?  Config, layout, stand-ins.

In : ScheduleSettings.  Out: Megatron's TransformerConfig, chunks that hold it, and a note per chunk
about the layers that Megatron would put there.  Layers change what a chunk costs, never the order;
the exception is an MTP layer on a stage of its own, which makes stages exchange shapes
(mtp_standalone, core/pipeline_parallel/p2p_communication.py:301 @core_v0.16.1).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.schedule_settings import ScheduleSettings

__all__ = ["Chunk", "chunk_layers", "chunk_note", "configuration", "layout_chunks"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def layout_chunks(layout: str) -> int:
    """How many chunks a pipeline_model_parallel_layout makes in all."""
    try:
        return PipelineParallelLayerLayout.get_num_stages_from_str(layout)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"layout {layout}: {error}", fix='layout="Et*2|t*3|t*3|t*2L"') from error


class Chunk(torch.nn.Module):
    """A model chunk that the schedule can hold and ask for its config; it has no parameters."""

    def __init__(self, config: Any, index: int, layers: list[str], interleaved: bool) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.vp_stage = index if interleaved else None
        self.layers, self.input_tensor = layers, None

    def set_input_tensor(self, tensors: Any) -> None:
        """What forward will take."""
        self.input_tensor = tensors


def configuration(settings: ScheduleSettings) -> TransformerConfig:
    """Megatron's configuration with these switches, as core_transformer_config_from_args makes it
    (training/arguments.py:1306 @core_v0.16.1)."""
    s, dtype = settings, _DTYPES[settings.dtype]
    layers = s.layers or s.pp * s.chunks
    if s.layout is not None:
        rows = PipelineParallelLayerLayout.parse_str_to_list(s.layout)
        layers = sum(row.count(LayerType.decoder) for row in rows)
    moe = {
        "num_moe_experts": 2,
        "expert_model_parallel_size": 2,
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": s.delay_wgrad,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TransformerConfig(
                num_layers=layers,
                hidden_size=s.shape[2] if s.shape else 1,
                num_attention_heads=1,
                pipeline_model_parallel_size=s.pp,
                virtual_pipeline_model_parallel_size=s.vpp,
                pipeline_dtype=dtype,
                params_dtype=dtype,
                bf16=s.dtype == "bf16",
                fp16=s.dtype == "fp16",
                overlap_p2p_comm=bool(s.overlap_p2p),
                batch_p2p_comm=not s.overlap_p2p,
                overlap_p2p_comm_warmup_flush=s.warmup_flush,
                microbatch_group_size_per_vp_stage=s.group_size,
                variable_seq_lengths=s.variable_lengths,
                moe_token_dispatcher_type="alltoall",  # its default refuses variable lengths
                deallocate_pipeline_outputs=True,
                pipeline_model_parallel_layout=s.layout,
                num_layers_in_first_pipeline_stage=s.first_layers,
                num_layers_in_last_pipeline_stage=s.last_layers,
                mtp_num_layers=s.mtp or None,
                **(moe if s.ep_overlap else {}),
            )
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise UsageError(f"Megatron refuses: {error}", fix="change what it names") from error


def chunk_layers(settings: ScheduleSettings, config: Any, stage: int, chunk: int) -> list[str]:
    """``embedding decoder decoder``: what Megatron puts into the chunk, in order."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return [layer.name for layer in layout.layout[stage][chunk]]
    vp_stage = chunk if settings.vpp is not None else None
    try:
        count = get_num_layers_to_build(config, vp_stage, stage)
    except AssertionError as error:
        words = " ".join(str(error).split())
        raise UsageError(f"Megatron refuses: {words}", fix="change layers") from error
    first = stage == 0 and chunk == 0
    last = stage == settings.pp - 1 and chunk == settings.chunks - 1
    tail = (["mtp"] * settings.mtp + ["loss"]) * last
    return ["embedding"] * first + ["decoder"] * count + tail


def chunk_note(names: list[str]) -> str:
    """The same in words: ``embedding, 2 decoder``."""
    shown = []
    for name in dict.fromkeys(names):
        single = name in ("embedding", "loss")
        shown.append(name if single else f"{names.count(name)} {name}")
    return ", ".join(shown) or "nothing"
