"""Vectors of tokens on a real GPU: gathered as by hand, without memory the job does not have."""

import torch

from megatron_prism.runtime.values import COUNT, TokenVectors


def test_vectors_are_windows_and_torchs_peak_stays():
    target = torch.empty(2048, 2, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    tokens = torch.randint(0, 128_000, (2048, 2), device="cuda")
    before = torch.cuda.memory_allocated()
    vectors = TokenVectors()
    row = vectors.row(target)
    assert torch.cuda.memory_allocated() == before  # it is the driver's
    torch.cuda.reset_peak_memory_stats()
    vectors.fill(target, tokens)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * 8 * tokens.numel()
    assert torch.cuda.memory_allocated() == before
    whole, rows = row.cpu(), target.detach().cpu()
    for place in (0, 17, 2047):
        for sample in (0, 1):
            begin = int(tokens[place, sample]) * 40_503 % COUNT * 8
            assert torch.equal(rows[place, sample], whole[begin : begin + 4096])
