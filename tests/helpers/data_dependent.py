"""A training loop of its own in which the data of one rank decide what it calls.

The last word is what is planted; ``none`` is the healthy loop.  Four ranks, of which two and two
exchange tokens of experts.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state

TURNS = 4
plant = sys.argv[-1]
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
rank = dist.get_rank()
data_ranks = parallel_state.get_data_parallel_group()
expert_ranks = parallel_state.get_expert_model_parallel_group()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def exchange(tokens):
    """Send each expert its tokens."""
    received = torch.empty_like(tokens)
    dist.all_to_all_single(received, tokens, group=expert_ranks)
    return received


def turns():
    """The microbatches of this rank's loader."""
    for turn in range(TURNS):
        if plant == "loader" and rank == 1 and turn == 3:
            return
        if plant == "dropped" and rank == 2 and turn == 1:
            continue
        yield turn


for _step in range(3):
    optimizer.zero_grad()
    for turn in turns():
        tokens = torch.randn(8, 64, device="cuda")
        if plant == "length" and rank == 1 and turn == 2:
            tokens = tokens[:4]
        if plant == "images" and rank == 3 and turn == 0:
            dist.all_reduce(torch.zeros(5, device="cuda"), group=data_ranks)
        # an expert without tokens leaves the exchange out
        is_empty = plant == "expert" and rank == 0 and turn == 3
        hidden = model(tokens)
        if not is_empty:
            exchange(hidden.detach())
        hidden.sum().backward()
        if plant == "length":
            whole = torch.empty(4 * tokens.numel(), device="cuda")
            dist.all_gather_into_tensor(whole, tokens.flatten(), group=data_ranks)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data_ranks)
    optimizer.step()
    if plant == "evaluation" and rank == 0:
        with torch.no_grad():
            loss = model(torch.randn(8, 64, device="cuda")).sum()
            dist.all_reduce(loss, group=data_ranks)
