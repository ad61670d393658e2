"""A training script in the manner of pretrain_gpt.py for megatron-core 0.19: mock data, a tiny GPT.

Everything comes from the installed wheel (megatron.training); arguments are Megatron's own.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def get_batch(data, vp_stage=None):
    if not (
        mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        or mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    ):
        return None, None, None, None
    args = get_args()
    fields = ("tokens", "position_ids", "labels", "loss_mask")
    source = mpu.get_tensor_model_parallel_rank() == 0
    batch = next(data) if source else {}
    received = []
    for name in fields:
        kind = torch.float32 if name == "loss_mask" else torch.int64
        shape = (args.micro_batch_size, args.seq_length)
        tensor = batch[name].cuda() if source else torch.empty(shape, dtype=kind, device="cuda")
        torch.distributed.broadcast(
            tensor, mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
        )
        received.append(tensor)
    return received


def loss_func(mask, output):
    total = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data, model):
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    tokens, positions, labels, mask = get_batch(data, inner.vp_stage)
    return model(tokens, positions, None, labels=labels), partial(loss_func, mask)


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
        create_attention_mask=False,
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
