"""pretrain_tiny.py for jobs with --overlap-moe-expert-parallel-comm, which ask for a plan."""

from functools import partial

import pretrain_tiny
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def forward_step(data, model, return_schedule_plan=False):
    """As pretrain_gpt.py:286 @core_v0.19.0."""
    if not return_schedule_plan:
        return pretrain_tiny.forward_step(data, model)
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    batch = pretrain_tiny.get_batch(data, inner.vp_stage)
    plan = inner.build_schedule_plan(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return plan, partial(pretrain_tiny.loss_func, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        pretrain_tiny.datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
