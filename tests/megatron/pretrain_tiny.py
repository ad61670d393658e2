"""A training script in the manner of pretrain_gpt.py for megatron-core 0.19: mock data, a tiny GPT.

Everything comes from the installed wheel (megatron.training); arguments are Megatron's own.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

FIELDS = (
    "attention_mask cu_seqlens cu_seqlens_padded hybrid_cp_group labels local_cp_size loss_mask "
    "max_seqlen position_ids tokens"
).split()


def get_batch(data, vp_stage=None):
    """Megatron's own way from tp rank 0 to the others, as pretrain_gpt.py:99 @core_v0.19.0."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(FIELDS)
    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        batch = {key: value.cuda(non_blocking=True) for key, value in next(data).items()}
    return get_batch_on_this_tp_rank(
        dict.fromkeys(FIELDS) | batch if tp_rank == 0 else batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )


def loss_func(mask, output):
    total = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data, model):
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    b = get_batch(data, inner.vp_stage)
    output = model(b["tokens"], b["position_ids"], b["attention_mask"], labels=b["labels"])
    return output, partial(loss_func, b["loss_mask"])


def is_dataset_built_on_rank(vp_stage=None):
    ends = mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(
        ignore_virtual=True
    )
    return ends and mpu.get_tensor_model_parallel_rank() == 0


def datasets(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="99,1,0",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, num_samples, is_dataset_built_on_rank, config
    ).build()


datasets.is_distributed = True

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
