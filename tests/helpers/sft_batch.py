"""A2: one SFT batch through ``get_batch`` of a stock ``pretrain_gpt.py`` on every local rank.

A job for ``prism run`` with a Megatron-LM checkout on PYTHONPATH; the rank that reads is handed one
packed sample.  Release 0.16.1 makes 10 broadcasts there and 8 on its peers (M#3268).
"""

import contextlib

import pretrain_gpt
import torch
from megatron.training import get_args, initialize

SAMPLE = {
    "tokens": torch.zeros(1, 32, dtype=torch.int64),
    "labels": torch.zeros(1, 32, dtype=torch.int64),
    "loss_mask": torch.ones(1, 32),
    "position_ids": torch.arange(32).unsqueeze(0),
    "cu_seqlens": torch.tensor([[0, 16, 32]], dtype=torch.int32),
    "max_seqlen": torch.tensor([16], dtype=torch.int32),
}

if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # 0.19 parses before it initialises
        from megatron.training.arguments import parse_and_validate_args

        parse_and_validate_args()
    initialize.initialize_megatron()
    assert get_args().sft
    pretrain_gpt.get_batch(iter([SAMPLE]))
    print("every broadcast of the batch was made", flush=True)
