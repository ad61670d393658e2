"""The virtual world in one process: values, handles, groups, patches, and how it leaves.

Answers of groups with several local ranks are compared with gloo in ``conformance/``.
"""

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.recorder.recorder import _splits
from megatron_prism.runtime.values import (
    BalancedExpertCounts,
    LocalVocabularySum,
    PartialLookup,
    Values,
    rms,
)

NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
# torch 2.13 renames what Megatron still calls by the old names
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated. Please use:FutureWarning", "ignore:Running all_reduce on global rank"
)


def start(size=16, rank=5, policy="mirror", device="cpu"):
    return virtual_world.start(
        virtual_world.VirtualWorld(size, rank, (rank,), Values(policy), torch.device(device))
    )


@pytest.fixture
def world():
    yield start()
    virtual_world.stop()


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    originals = {name: getattr(dist, name) for name in ("new_group", "all_gather_object")}
    yield
    virtual_world.stop()
    assert not dist.is_initialized()
    assert virtual_world.current() is None
    assert {name: getattr(dist, name) for name in originals} == originals
    assert c10d.new_group is dist.new_group


# -- answers --------------------------------------------------------------------------------------


def numbers(numel, first=1):
    return torch.arange(first, first + numel, dtype=torch.float32)


def test_a_reduce_op_without_an_answer_is_refused_by_name(world):
    with pytest.raises(UnsupportedError, match="has no virtual answer"):
        dist.all_reduce(numbers(2), op=dist._make_nccl_premul_sum(2.0))


def test_a_parameter_can_take_part(world):
    parameter = torch.nn.Parameter(numbers(3))
    dist.all_reduce(parameter)
    assert torch.equal(parameter.detach(), numbers(3) * 16)
    dist.broadcast(parameter, 0)
    dist.recv(parameter, 4)
    assert parameter.grad_fn is None


class Allocations(TorchDispatchMode):
    """Names of the operators that return memory which was not there before."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                address = tensor.untyped_storage().data_ptr()
                if address not in self.known:
                    self.names.append(str(function))
        return out


@pytest.mark.slow  # the first dispatch mode of a process takes a second
def test_nothing_is_allocated_by_an_answer(world):
    whole, other, shard = torch.zeros(16 * 64), numbers(16 * 64), numbers(64)
    with Allocations(whole, other, shard) as allocations:
        dist.all_gather_into_tensor(whole, shard)
        dist.all_gather(list(whole.chunk(16)), shard)
        dist.reduce_scatter_tensor(shard, whole)
        dist.reduce_scatter(shard, list(whole.chunk(16)))
        dist.all_reduce(shard)
        dist.all_to_all_single(whole, other)
        dist.all_to_all_single(
            whole, other[:100], [64] * 16, [2] * 5 + [64] + [2] * 5 + [3, 4, 3, 3, 3]
        )
        dist.broadcast(shard, 0)
        dist.recv(shard, 4)
    assert allocations.names == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mirror", "noise"])
def test_a_sum_of_parts_is_a_lookup_without_a_temporary(policy):
    world = start(policy=policy)
    table, tokens = numbers(12).view(3, 4), torch.arange(32) + 5
    whole, chunk, other = torch.zeros(32, 4), torch.zeros(2, 4), numbers(16)
    expected = table[tokens % 3]
    with world.values.of_parts(PartialLookup(table, tokens)):
        with Allocations(table, tokens, whole, chunk, other) as allocations:
            dist.all_reduce(whole)
            dist.reduce_scatter_tensor(chunk, torch.zeros(32, 4))
        dist.all_reduce(other)  # no lookup of these tokens
    assert torch.equal(whole, expected)
    assert torch.equal(chunk, expected.view(16, 2, 4)[5])
    assert [name for name in allocations.names if "zeros" not in name] == [
        "aten.remainder.Scalar"
    ] * 2, "nothing but indices"
    after = numbers(16)
    dist.all_reduce(after)
    if policy == "mirror":
        assert torch.equal(other, numbers(16) * 16)
        assert torch.equal(after, other), "the block has ended"
    else:
        assert rms(other).item() < 3 * 16**0.5 * 10


@pytest.mark.parametrize(
    ("desc", "policy", "dtype", "expected"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "mirror", torch.float32, [1 + 3 + 5 + 7, 2 + 4 + 6 + 8]),
        ("TENSOR_MODEL_PARALLEL_GROUP", "mirror", torch.int64, [3 * 4, 4 * 4]),
        ("DATA_PARALLEL_GROUP", "mirror", torch.float32, [3 * 4, 4 * 4]),
        ("TENSOR_MODEL_PARALLEL_GROUP", "noise", torch.float32, None),
    ],
)
def test_chunks_of_a_sequence_are_added_up(desc, policy, dtype, expected):
    start(policy=policy)
    group = dist.new_group(range(4, 8), group_desc=desc)
    out, whole = torch.zeros(2, dtype=dtype), numbers(8).to(dtype)
    dist.reduce_scatter_tensor(out, whole, group=group)
    assert whole.tolist() == list(range(1, 9))
    if expected is None:
        assert torch.isfinite(out).all()
        assert out.tolist() not in ([16, 20], [12, 16])
    else:
        assert out.tolist() == expected
    inside = whole[2:4]  # in place: gradients, whose chunks are of different parameters
    dist.reduce_scatter_tensor(inside, whole, group=group)
    if expected is not None:
        assert inside.tolist() == [12, 16]


@pytest.mark.parametrize("policy", ["mirror", "noise"])
def test_sums_of_the_local_members_alone(policy):
    world = start(policy=policy)  # rank 5 of 16
    total, most, gathered = numbers(4), numbers(4), torch.full((64,), 9.0)
    with world.values.of_parts(LocalVocabularySum()):
        dist.all_reduce(total)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(gathered, numbers(4))
    assert torch.equal(total, numbers(4))
    assert torch.equal(most, numbers(4))
    assert gathered.view(16, 4)[5].tolist() == numbers(4).tolist()
    others = torch.cat((gathered[:20], gathered[24:]))
    assert others.max() < -1000, "no maximum"
    assert others.exp().count_nonzero() == 0
    dist.all_reduce(total)
    assert not torch.equal(total, numbers(4)), "the block has ended"


@pytest.mark.parametrize("ways", [1, 2])
def test_virtual_ranks_send_what_they_are_sent(ways):
    world = start()
    experts, block, place = 16 // ways * 3, 3, 5 // ways
    counts = torch.arange(experts)
    got, tokens = torch.empty(16 * experts, dtype=torch.int64), torch.empty(16 * 4)
    with world.values.of_parts(BalancedExpertCounts(experts, block, ways)):
        dist.all_gather_into_tensor(got, counts)
        dist.all_gather_into_tensor(tokens, numbers(4))
    sent = counts.view(-1, block)  # to every rank's experts
    received = got.view(-1, ways, 16 // ways, block)[:, :, place]
    for way in range(ways):
        assert torch.equal(received[:, way], sent)
    assert torch.equal(got.view(16, experts)[5], counts), "its own stay"
    assert all(row.sum() == counts.sum() for row in got.view(16, experts))
    assert torch.equal(tokens, numbers(4).repeat(16)), "payloads stay mirrored"
    routes = torch.arange(5 * experts).view(5, experts) % 7 < 2
    maps = torch.empty(16 * 5, experts, dtype=torch.bool)
    with world.values.of_parts(BalancedExpertCounts(experts, block, ways)):
        dist.all_gather_into_tensor(maps, routes)
    for member, found in enumerate(maps.view(16, 5, experts)):
        assert torch.equal(found, routes.roll((place - member // ways) * block, -1))


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mirror", "noise"])
def test_the_job_keeps_its_random_numbers(policy):
    start(policy=policy)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    dist.all_reduce(numbers(5))
    dist.all_gather_into_tensor(torch.zeros(80), numbers(5))
    dist.reduce_scatter_tensor(torch.zeros(5), numbers(80))
    dist.recv(torch.zeros(5), 4)
    dist.scatter(torch.zeros(5), src=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_received_tensors_have_the_scale_of_their_kind(world):
    activation, gradient, unknown = (torch.zeros(64, 2, 256) for _ in range(3))
    with world.values.expecting(activation=activation, gradient=gradient):
        for tensor in (activation, gradient, unknown):
            dist.recv(tensor, 4)
    assert rms(activation).item() == pytest.approx(1, rel=0.05)
    assert rms(unknown).item() == pytest.approx(1, rel=0.05)
    assert rms(gradient).item() == pytest.approx(1 / (64 * 2 * 256**0.5), rel=0.05)
    dist.recv(gradient, 4)
    assert rms(gradient).item() == pytest.approx(1, rel=0.05), "the announcement has ended"


def test_received_gradients_carry_the_loss_scale(world):
    """Either factor alone leaves the range of fp16: 1e-5 has few digits there, 2^20 is infinite."""
    scale = torch.full((1,), 2.0**20)
    world.values.loss_scale = lambda: scale
    activation, gradient = (torch.zeros(4096, 1, 1024, dtype=torch.float16) for _ in range(2))
    for now in (2.0**20, 2.0**19):
        scale.fill_(now)
        with world.values.expecting(activation=activation, gradient=gradient):
            dist.recv(activation, 4)
            dist.recv(gradient, 4)
        assert rms(activation).item() == pytest.approx(1, rel=0.01)
        assert rms(gradient).item() == pytest.approx(now / (4096 * 32), rel=0.01)


def ring(policy="mirror", desc="CONTEXT_PARALLEL_GROUP"):
    start(policy=policy)
    return dist.new_group(range(4, 8), group_desc=desc)


@pytest.mark.parametrize("receives_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_round_a_ring_comes_what_is_sent(receives_first, batched):
    group = ring()
    for sent in (numbers(6), numbers(12).view(2, 6), -numbers(6)):
        got = torch.zeros_like(sent)
        calls = [(dist.isend, sent, 6), (dist.irecv, got, 4)]
        calls = calls[::-1] if receives_first else calls
        if batched:
            dist.batch_isend_irecv([dist.P2POp(*call, group) for call in calls])
        else:
            for call, tensor, peer in calls:
                call(tensor, peer, group)
        assert torch.equal(got, sent)
    # this is rank 5 of 4 to 7
    ways = {("send", 1), ("recv", 3)}
    desc = group.group_desc
    assert set(group.world.tally.ways()) == {(desc, 4, op, far, batched) for op, far in ways}
    assert not group.world.tally.batched


def test_round_a_ring_of_noise_comes_noise_of_each_parts_scale():
    group = ring("noise")
    sent = torch.stack([torch.full((4096,), 3.0), torch.full((4096,), 1e-6)])
    got = torch.zeros_like(sent)
    dist.isend(sent, 6, group)
    dist.irecv(got, 4, group)
    assert rms(got[0]).item() == pytest.approx(3, rel=0.1)
    assert rms(got[1]).item() == pytest.approx(1e-6, rel=0.1)
    assert not torch.equal(got[0], sent[0])


@pytest.mark.parametrize("desc", ["CONTEXT_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"])
def test_elsewhere_and_without_a_counterpart_comes_noise(desc):
    group, size = ring(desc=desc), 4096 if desc.startswith("PIPE") else 2048
    got = torch.zeros(4096)
    dist.isend(torch.zeros(size), 6, group)
    dist.irecv(got, 4, group)
    assert rms(got).item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_received_integers_are_zero(world, dtype):
    tensor = torch.ones(4, dtype=dtype)
    dist.recv(tensor, 4)
    assert not tensor.any()


@pytest.mark.parametrize("contiguous", [True, False])
def test_noise_adds_up_like_independent_members(contiguous):
    start(policy="noise")
    base = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 3
    tensor = base.clone() if contiguous else base.clone().t()
    dist.all_reduce(tensor)
    assert rms(tensor).item() == pytest.approx(3 * 16**0.5, rel=0.05), "sqrt(n), not n"
    out = torch.zeros(16, 100)
    dist.all_gather_into_tensor(out, base[0, :100].contiguous())
    assert torch.equal(out[5], base[0, :100])
    assert rms(out[6]).item() == pytest.approx(rms(out[5]).item(), rel=0.5)
    assert not torch.equal(out[6], out[7])
    counts = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(counts)
    assert counts.tolist() == [16, 16, 16], "integers are mirrored"


# -- meta tensors ---------------------------------------------------------------------------------


def test_shapes_only():
    world = start(device="meta")
    one, whole = torch.ones(4, device="meta"), torch.ones(64, device="meta")
    dist.all_reduce(one)
    dist.all_gather_into_tensor(whole, one)
    dist.all_gather([torch.ones(4, device="meta") for _ in range(16)], one)
    dist.reduce_scatter_tensor(one, whole)
    dist.reduce_scatter(one, list(whole.chunk(16)))
    dist.all_to_all_single(whole, one, [4] * 16, [1, 1, 1, 1] + [0] * 12)
    dist.all_to_all([one] * 16, [one] * 16)
    dist.broadcast(one, 0)
    dist.reduce(one, 5)
    dist.gather(one, dst=0)
    dist.scatter(one, src=0)
    dist.isend(one, 1).wait()
    assert dist.irecv(one, 1).is_completed()
    dist.barrier()
    assert sum(row.calls for row in world.tally.rows()) == 14
    assert {row.group for row in world.tally.rows()} == {"default_pg"}


# -- handles --------------------------------------------------------------------------------------


def test_torchs_own_data_parallel_modules_work(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    data = torch.ones(2, 16)
    plain = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 3))
    plain(data).sum().backward()
    assert torch.equal(plain.module.bias.grad, torch.full((3,), 2.0)), "the mean of equal gradients"
    sharded = fully_shard(torch.nn.Linear(16, 16), mesh=init_device_mesh("cpu", (16,)))
    sharded(data).sum().backward()
    assert sharded.weight.grad.to_local().shape == (1, 16)


# -- groups ---------------------------------------------------------------------------------------


def test_what_torch_says_of_a_group(world):
    group = dist.new_group([9, 1, 5], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    assert dist.get_process_group_ranks(group) == [1, 5, 9]
    assert [dist.get_global_rank(group, i) for i in range(3)] == [1, 5, 9]
    assert [dist.get_group_rank(group, rank) for rank in (1, 5, 9)] == [0, 1, 2]
    assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 3)
    assert (dist.get_rank(), dist.get_world_size()) == (5, 16)
    assert group.group_desc == "TENSOR_MODEL_PARALLEL_GROUP"
    assert dist.get_backend(group) == dist.get_backend() == "gloo"
    assert group.name() == "prism"
    for wrong in (lambda: dist.get_group_rank(group, 2), lambda: dist.get_global_rank(group, 3)):
        with pytest.raises(ValueError, match="not part of group"):
            wrong()


def test_groups_of_others_are_not_made(world):
    before = len(c10d._world.pg_map)
    assert dist.new_group([1, 2]) == NOT_A_MEMBER
    assert len(c10d._world.pg_map) == before
    assert dist.all_reduce(numbers(1), group=NOT_A_MEMBER) is None  # as torch: a warning, no call


def test_device_meshes_work_although_they_copied_new_group(world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [4, 5, 6, 7]
    assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [1, 5, 9, 13]


def test_a_group_costs_nothing_to_those_who_are_not_in_it():
    start(size=65_536, rank=40_000)
    everyone = dist.group.WORLD
    assert dist.get_global_rank(everyone, 65_535) == 65_535
    assert dist.get_group_rank(everyone, 40_000) == 40_000
    assert not isinstance(c10d._world.pg_group_ranks[everyone], dict)


# -- starting and stopping ------------------------------------------------------------------------


def test_torch_distributed_is_up_already():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(UsageError, match="already initialised") as caught:
        start()
    assert "before anything calls init_process_group" in caught.value.fix
    assert virtual_world.current() is None
    dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "local"), [(16, (16,)), (-1, (-1,)), (3, (4,))])
def test_a_rank_that_is_not_there(rank, local):
    with pytest.raises(UsageError, match="not a local rank"):
        virtual_world.start(
            virtual_world.VirtualWorld(16, rank, local, Values(), torch.device("cpu"))
        )
    assert virtual_world.current() is None


def test_several_local_ranks_need_a_store():
    world = virtual_world.VirtualWorld(4, 1, (1, 2), Values(), torch.device("cpu"))
    with pytest.raises(UsageError, match="need a store"):
        virtual_world.start(world)
    assert virtual_world.current() is None


@pytest.mark.parametrize(("local", "ranks", "met"), [
    ((0, 1), (0, 1), [0, 1]), ((0, 1), (0, 1, 2), [0, 1]), ((0, 6), (0, 2, 6), [0, 2]),
    ((0, 1), (0, 2), [0]), ((0,), (0, 1), [0]), ((0,), (0,), [0]),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_who_has_a_process_here_does_not_depend_on_the_backend(
    local, ranks, met, backend, monkeypatch
):
    world = virtual_world.VirtualWorld(8, 0, local, Values(), torch.device("cpu"), backend=backend)
    monkeypatch.setattr(world, "_real_group", lambda *args: object())
    group = world.build_group(ranks, "g", "EXPERT_MODEL_PARALLEL_GROUP")
    assert list(group.local) == met
    assert group.has_virtual == (len(met) < len(ranks))
    opts, rows = dist.AllToAllOptions(), [1] * len(ranks)
    splits = _splits(group, (torch.ones(1), torch.ones(1), rows, rows, opts))
    assert (splits is None) == group.has_virtual


# -- collectives without a row, tally, observer ---------------------------------------------------


@pytest.mark.parametrize("method", ["monitored_barrier", "allreduce_sparse"])
def test_a_collective_without_a_row_is_refused_by_name(world, method):
    with pytest.raises(UnsupportedError, match=f"'{method}' on default_pg has no row") as caught:
        getattr(dist.group.WORLD, method)([numbers(1)])
    assert "collectives.py" in caught.value.fix


# -- objects --------------------------------------------------------------------------------------


def test_objects_are_mirrored_without_pickling(world):
    thing = {"unpicklable in bulk": [1, 2]}
    gathered = [None] * 16
    dist.all_gather_object(gathered, thing)
    assert gathered == [thing] * 16
    gathered[0]["unpicklable in bulk"].append(3)
    assert thing == {"unpicklable in bulk": [1, 2]}, "the caller's own object was handed out"
    things = ["mine", 2]
    dist.broadcast_object_list(things, src=0)
    assert things == ["mine", 2], "a virtual source has nothing else"
    roots = [None] * 16
    dist.gather_object(thing, roots, dst=5)
    assert roots == [thing] * 16
    dist.gather_object(thing, None, dst=0)
    # as torch calls: sizes, then objects
    world.tally.add("ep", 2, "dispatch", 8)  # which NCCL does not count
    assert sum(world.tally.collectives().values()) == 2 * 4


def test_noise_keeps_sums_of_squares_positive():
    """Gradient norms and softmax denominators feed roots and logarithms."""
    values = Values("noise")
    squares = torch.rand(1000) * 1e-3
    values.add_peers(squares, 63)
    assert (squares >= 0).all()
    signed = torch.randn(1000)
    values.add_peers(signed, 63)
    assert (signed < 0).any()
