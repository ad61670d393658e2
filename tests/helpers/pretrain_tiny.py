"""A training script in the manner of pretrain_gpt.py for megatron-core 0.19: mock data, a tiny GPT.

With ``--sft`` every sample is two documents packed into one sequence.  Everything comes from the
installed wheel (megatron.training); arguments are Megatron's own.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
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
    batch = get_batch_on_this_tp_rank(
        dict.fromkeys(FIELDS) | batch if tp_rank == 0 else batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=args.sft,
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
    return flatten_batch_for_packed_sequences(batch)


def loss_func(mask, output):
    total = torch.sum(output.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data, model):
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    b = get_batch(data, inner.vp_stage)
    packed = None
    if b["cu_seqlens"] is not None:  # as pretrain_gpt.py:311 @core_v0.19.0
        cu, longest = b["cu_seqlens"].squeeze(0), int(b["max_seqlen"].item())
        packed = PackedSeqParams("thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(
        b["tokens"],
        b["position_ids"],
        b["attention_mask"],
        labels=b["labels"],
        packed_seq_params=packed,
    )
    return output, partial(loss_func, b["loss_mask"])


def is_dataset_built_on_rank(vp_stage=None):
    ends = mpu.is_pipeline_first_stage(ignore_virtual=True) or mpu.is_pipeline_last_stage(
        ignore_virtual=True
    )
    return ends and mpu.get_tensor_model_parallel_rank() == 0


class Packed(torch.utils.data.Dataset):
    """Two documents in every sample, as megatron.training's SFTDataset hands them over."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        n = self.length
        ends = torch.full((n + 1,), n, dtype=torch.int32)  # padded to one length for all samples
        ends[:2] = torch.tensor([0, n // 2], dtype=torch.int32)
        tokens = torch.arange(n) + index % 7
        return {
            "tokens": tokens,
            "labels": tokens + 1,
            "loss_mask": torch.ones(n),
            "position_ids": torch.arange(n) % (n // 2),
            "cu_seqlens": ends,
            "max_seqlen": torch.tensor(n // 2, dtype=torch.int32),
        }


def datasets(num_samples, vp_stage=None):
    args = get_args()
    if args.sft:
        return [Packed(args.seq_length) if is_dataset_built_on_rank(vp_stage) else None] * 3
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
