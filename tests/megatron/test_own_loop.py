"""Programs that start torch.distributed themselves and step an optimizer in a loop of their own."""

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

pytestmark = [pytest.mark.megatron, TRAINING]

LOOP = """
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load, save
dist.init_process_group({arguments})
parallel_state.initialize_model_parallel(tensor_model_parallel_size={tp})
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
    optimizer.step()
state = model.state_dict()
save(state, "checkpoint")
model.load_state_dict(load(state, "checkpoint"))
print("tp", parallel_state.get_tensor_model_parallel_group().rank(), "ranks", dist.get_world_size())
"""
GRID = """
import torch, torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear
dist.init_process_group("nccl")
grid = HyperCommGrid([2, 1, 2, 2], ["tp", "cp", "dp", "pp"])
tp, dp, pp = grid.create_pg("tp"), grid.create_pg(["cp", "dp"]), grid.create_pg("pp")
config = ModelParallelConfig(tensor_model_parallel_size=2, perform_initialization=False)
layer = dict(config=config, init_method=None, bias=False, gather_output=True, tp_group=tp)
model = ColumnParallelLinear(64, 64, **layer).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    output, _ = model(torch.randn(8, 64, device="cuda", requires_grad=True))
    dist.isend(output, group=pp, group_dst=1 - pp.rank()).wait()
    output.sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=dp)
    optimizer.step()
print("tp", tp.rank(), "dp", dist.get_process_group_ranks(dp))
"""
STORE = "import torch.distributed as d\nd.TCPStore('localhost', 29573, 8, True)\n"


def program(folder, name, text=LOOP, arguments="'nccl'", tp=2, steps=3):
    file = folder / f"{name}.py"
    file.write_text(text.format(arguments=arguments, tp=tp, steps=steps))
    return file


def test_programs_are_hosted_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    meta = ("--prism-world-size", "8", "--prism-tier", "meta", "--prism-ranks", "5")
    jobs = {
        "hosted": (meta, {}),
        "recorded": ((*meta, "--prism-capture", str(tmp_path / "slices")), {}),
        "grid": (meta, {"text": GRID}),
        "size": (meta, {"arguments": "'nccl', world_size=16, rank=5"}),
        "rank": (meta, {"arguments": "'nccl', world_size=8, rank=3"}),
        "sizes": (meta, {"tp": 3}),
        "idle": (meta, {"steps": 0}),
        "store": (meta, {"text": STORE}),
    }
    ran = stock_jobs.run(
        [[*flags, "--", program(tmp_path, name, **more)] for name, (flags, more) in jobs.items()]
    )
    found = dict(zip(jobs, ran, strict=True))
    for name in ("hosted", "recorded"):
        status, said = found[name]
        assert status == 0, said
        assert "tp 1 ranks 8" in said, said
        assert "dp=2 tp=1" in said
        assert "3 optimizer steps applied of 3" in said
        assert "6 calls    48.75 KiB  DATA_PARALLEL_GROUP (4)" in said
    status, said = found["grid"]  # no parallel_state, which would know the sizes
    assert status == 0, said
    assert "tp 1 dp [5, 7]" in said
    assert "pp=1 dp=0 tp=1" in said
    for calls in ("24 KiB  DATA_PARALLEL_GROUP_WITH_CP", "6 KiB  TENSOR_MODEL_PARALLEL_GROUP",
                  "6 KiB  PIPELINE_MODEL_PARALLEL_GROUP"):  # fmt: skip
        assert f" {calls} (2)" in said, said
    assert not (tmp_path / "checkpoint").exists()
    assert (tmp_path / "slices/slice-000005.prism").exists()
    for name, fix in (
        ("size", "--prism-world-size 16"),
        ("rank", "--prism-ranks 3"),
        ("sizes", "--prism-world-size"),
        ("idle", "train step"),
        ("store", "init_process_group"),
    ):
        status, said = found[name]
        assert status, name
        assert "prism: error:" in said, said
        assert fix in said
