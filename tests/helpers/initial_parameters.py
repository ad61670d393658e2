"""pretrain_tiny.py, which ends where its model is built and writes a rank's parameters to --save.

{name in the whole model: (values, the dimension that tp or etp ranks share or None, whether the
two halves of a gated layer are shared apart)}; --no-warm-up leaves Megatron's warm-up out.
"""

import os
import re
import runpy
import sys
from pathlib import Path

import torch
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from megatron.training import get_args, initialize
from megatron.training.models import gpt

build = gpt.unimodal_build_distributed_models


def named(chunk):
    """(name in the whole model, parameter): layers and experts by their global numbers."""
    layers = {path: m.layer_number - 1 for path, m in chunk.named_modules()
              if path.rpartition(".")[0].endswith("layers")}  # fmt: skip
    ranks, rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
    first = (chunk.config.num_moe_experts or 0) // ranks * rank
    for name, parameter in chunk.named_parameters():
        for path, number in layers.items():
            if name.startswith(f"{path}."):
                name = f"{path.rpartition('.')[0]}.{number}{name[len(path) :]}"
        name = re.sub(r"(\.experts\..*(?:weight|local_experts\.))(\d+)",
                      lambda match: f"{match[1]}{int(match[2]) + first}", name)  # fmt: skip
        yield name, parameter


def write(*args, **kwargs):
    found = {}
    for chunk in map(unwrap_model, build(*args, **kwargs)):
        gated = chunk.config.gated_linear_unit
        for name, one in named(chunk):
            shared = getattr(one, "tensor_model_parallel", False)
            dim = one.partition_dim if shared else None
            found[name] = one.detach().clone(), dim, gated and "linear_fc1" in name
    torch.save(found, get_args().save)
    os._exit(0)


gpt.unimodal_build_distributed_models = write
if "--no-warm-up" in sys.argv:
    sys.argv.remove("--no-warm-up")
    initialize._warmup_jit_function = lambda *args, **kwargs: None
runpy.run_path(str(Path(__file__).with_name("pretrain_tiny.py")), run_name="__main__")
