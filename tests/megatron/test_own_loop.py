"""Programs that start torch.distributed themselves and step an optimizer in a loop of their own."""

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.cli.main import main
from megatron_prism.core.programs.slices import open_programs

pytestmark = [pytest.mark.megatron, TRAINING]

LOOP = """
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load, save
dist.init_process_group({arguments})
parallel_state.initialize_model_parallel(tensor_model_parallel_size={tp})
dist.broadcast_object_list(["without a source: rank 0"])
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
from megatron.core import parallel_state
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
assert not parallel_state.model_parallel_is_initialized()
print("tp", tp.rank(), "dp", dist.get_process_group_ranks(dp))
"""
FRAMEWORK = """
import argparse
import torch, torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int)
layers = parser.parse_args().layers
dist.init_process_group("nccl")
model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
grid = HyperCommGrid([2, 1, 2, 2], ["tp", "cp", "dp", "pp"])
groups = ProcessGroupCollection()
for name in ("tp", "cp", "dp", "pp"):
    setattr(groups, name, grid.create_pg(name))
groups.dp_cp, groups.mp = grid.create_pg(["cp", "dp"]), grid.create_pg(["tp", "pp"])
groups.tp_cp = grid.create_pg(["tp", "cp"])
alone = dist.new_subgroups_by_enumeration([[rank] for rank in range(8)])[0]
groups.embd = groups.pos_embd = groups.ep = groups.expt_tp = groups.tp_ep = alone
stage = groups.pp.rank()
config = TransformerConfig(
    num_layers=layers, hidden_size=64, num_attention_heads=4, tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
    use_cpu_initialization=False)
model = GPTModel(
    config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=256, max_sequence_length=32,
    pre_process=stage == 0, post_process=stage == 1, share_embeddings_and_output_weights=False,
    pg_collection=groups).cuda()
optimizer = torch.optim.AdamW(model.parameters())
place = torch.arange(32, device="cuda").unsqueeze(0)
def forward_step(data, model):
    tokens = next(data)
    loss = model(tokens, place, None, labels=tokens)
    return loss, lambda out: (out.mean(), {"loss": out.detach().mean()})
def batches():
    while True:
        yield torch.randint(256, (1, 32), device="cuda")
for _ in range(1000):
    optimizer.zero_grad()
    losses = schedules.get_forward_backward_func(2)(
        forward_step_func=forward_step, data_iterator=batches(), model=[model],
        num_microbatches=32, seq_length=32, micro_batch_size=1, forward_only=False,
        p2p_communicator=P2PCommunicator(groups.pp, config), pg_collection=groups)
    assert len(losses) == 32 * stage
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups.dp_cp)
    optimizer.step()
"""
RAGGED = """
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
class Stage(torch.nn.Linear):
    given = model_type = None
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2,
        sequence_parallel=True, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    def set_input_tensor(self, tensors):
        self.given = tensors[0]
def forward_step(lengths, model):
    mine = torch.randn(next(lengths), 1, 8, device="cuda")
    return model(mine if model.given is None else model.given), lambda out: (out.mean(), {{}})
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(2, 2)
model = Stage(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter([5, 3, 9, 2]), model=model,
        num_microbatches=4, seq_length=1, micro_batch_size=1, forward_only=False)
    optimizer.step()
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
        "ragged": ((*meta[:-1], "1"), {"text": RAGGED}),
        "later": (meta, {"text": RAGGED}),
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
    status, said = found["ragged"]  # gradients are as long as what was sent
    assert status == 0, said
    assert "3 optimizer steps applied of 3" in said, said
    assert not (tmp_path / "checkpoint").exists()
    assert (tmp_path / "slices/slice-000005.prism").exists()
    for name, fix in (
        ("size", "--prism-world-size 16"),
        ("rank", "--prism-ranks 3"),
        ("sizes", "--prism-world-size"),
        ("idle", "train step"),
        ("later", "emulate the first stage"),
        ("store", "init_process_group"),
    ):
        status, said = found[name]
        assert status, name
        assert "prism: error:" in said, said
        assert fix in said


@pytest.mark.slow
def test_a_framework_of_its_own_is_captured_with_few_microbatches(tmp_path, monkeypatch, capsys):
    """Its parser knows no flag of ours, its loop has a thousand steps, and its grid the sizes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FRAMEWORK)
    ours = ["--prism-tier", "meta", "--prism-world-size", "8"]
    assert main(["capture", "-o", "d", *ours, "--", "train.py", "--layers", "4"]) == 0
    assert "5 of 32 microbatches run" in "".join(capsys.readouterr())
    whole = open_programs("d")
    world = whole.world
    assert (world.size, world.tp, world.pp, [one.rank for one in whole.programs]) == (
        8, 2, 2, [0, 4])  # fmt: skip
    assert whole.num_microbatches == 32
