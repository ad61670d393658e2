"""Blocks whose kind no single stack says: masks of a loader, master weights, caches."""

import pickle

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING
from helpers.pretrain import JOB

from megatron_prism.features.snapshots import owners, snapshot
from megatron_prism.memory import peaks

MIB = 1 << 20
FORWARD = ("x/megatron/core/pipeline_parallel/schedules.py", "forward_step", 1)
STEP = ("x/megatron/core/optimizer/optimizer.py", "step", 1)
GET_BATCH = ("x/pretrain_gpt.py", "get_batch", 128)
FSDP = "x/megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py"
ADAM = "x/transformer_engine/pytorch/optimizers/fused_adam.py"


def alloc(address, size, *frames):
    rows = [{"filename": file, "name": name, "line": line} for file, name, line in frames]
    return {
        "action": "alloc", "addr": address, "size": size, "stream": 0, "frames": rows,
    }  # fmt: skip


def kinds(tmp_path, sizes_and_frames):
    """Bytes of each kind of blocks that all stay."""
    events = []
    for number, (size, *frames) in enumerate(sizes_and_frames):
        events.append(alloc(number << 30, size, *frames))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
    by_kind = peaks.known_peak(snapshot.read(path).program).by_kind
    return {kind: size for kind, size in by_kind.items() if size}


def batch(*functions, samples=2, length=1024, ranks=1):
    """Blocks of a batch: tokens, labels, loss mask, attention mask, positions."""
    tokens = 8 * samples * length // ranks
    mask = samples * length**2 // ranks
    stack = [("x/utils.py", function, 1) for function in functions]
    sizes = tokens, tokens, tokens // 2, mask, tokens
    return [(size, *stack, GET_BATCH, FORWARD) for size in sizes]


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_the_mask_of_a_batch_is_the_block_of_sequence_by_sequence(tmp_path, samples):
    found = kinds(tmp_path, [*batch(samples=samples), (512, FORWARD)])
    assert found["mask"] == samples * 1024**2


def test_a_context_parallel_ranks_rows_of_a_mask_are_one(tmp_path):
    whole = batch("get_batch_on_this_tp_rank")
    rows = batch("get_batch_on_this_cp_rank", ranks=4)
    index = [(16, ("x/utils.py", "get_batch_on_this_cp_rank", 2), GET_BATCH, FORWARD)] * 10
    found = kinds(tmp_path, [*whole, *index, *rows, (512, FORWARD)])
    assert found["mask"] == 2 * 1024**2 * 5 // 4


@pytest.mark.parametrize(
    ("size", "function"),
    [
        # pictures beside the tokens
        (3 * 224 * 224 * 4, "get_batch"),
        # of n·s² bytes, and no function gets a batch
        (2 * 1024**2, "forward"),
    ],
)
def test_what_else_is_large_is_no_mask(tmp_path, size, function):
    without_mask = [row for row in batch() if row[0] != 2 * 1024**2]
    other = (size, ("x/a.py", function, 3), FORWARD)
    assert "mask" not in kinds(tmp_path, [*without_mask, other, (512, FORWARD)])


def fsdp(line, function="_init_each_parameter_group_buffers"):
    return (FSDP, function, line), ("x/megatron/training/training.py", "get_model", 9)


@pytest.mark.parametrize("groups", [1, 3])
def test_megatron_fsdp_makes_weights_master_weights_and_gradients(tmp_path, groups):
    loop = [(2 * MIB, *fsdp(2845)), (4 * MIB, *fsdp(2876))] * groups
    gradients = [(4 * MIB * groups, *fsdp(3028)), (MIB, *fsdp(3034))][: 1 + (groups > 1)]
    found = kinds(tmp_path, [*loop, *gradients])
    assert found["param"] == 2 * MIB * groups
    assert found["master"] == 4 * MIB * groups
    assert found["grad"] == sum(size for size, *_ in gradients)


def test_without_buffers_of_weights_megatron_fsdp_makes_master_weights(tmp_path):
    """no_shard: the parameters stay where they are."""
    loop = [(4 * MIB, *fsdp(2876))] * 3
    assert kinds(tmp_path, [*loop, (12 * MIB, *fsdp(3028))]) == {
        "master": 12 * MIB,
        "grad": 12 * MIB,
    }


def test_without_master_weights_megatron_fsdps_buffers_are_of_weights(tmp_path):
    loop = [(2 * MIB, *fsdp(2845))] * 3
    found = kinds(tmp_path, [*loop, (12 * MIB, *fsdp(3028))])
    assert found == {"param": 6 * MIB, "grad": 12 * MIB}


def test_fused_adams_parameters_in_fp32_are_master_weights(tmp_path):
    inner = (ADAM, "_initialize_state", 430)
    moments = [(MIB, inner, (ADAM, "initialize_state", line), STEP) for line in (463, 464)]
    master = (3 * MIB, inner, (ADAM, "initialize_state", 466), STEP)
    assert kinds(tmp_path, [*moments, master]) == {"optim": 2 * MIB, "master": 3 * MIB}
    assert kinds(tmp_path, moments) == {"optim": 2 * MIB}


def test_copies_of_parameters_are_master_weights_and_scalars_are_not(tmp_path):
    optimizer = "x/megatron/core/optimizer/optimizer.py"
    scalar = (4, (optimizer, "__init__", 600))
    copy = (MIB, (optimizer, "__init__", 1012))
    assert kinds(tmp_path, [scalar, copy]) == {"optim": 512, "master": MIB}
    shards = "x/megatron/core/optimizer/distrib_optimizer.py"
    shard = (MIB, (shards, "_build_model_and_main_param_groups", 445))
    assert kinds(tmp_path, [scalar, shard]) == {"optim": 512, "master": MIB}


def test_what_a_forward_leaves_to_the_next_iteration_is_no_activation(tmp_path):
    """Transformer Engine keeps weights in FP8 that the first forward makes."""
    te = ("x/transformer_engine/pytorch/module/base.py", "get_weight_workspace", 5)
    first = [(MIB, te, FORWARD), (512, STEP)]
    assert kinds(tmp_path, [*first, (2 * MIB, te, FORWARD), (512, STEP)]) == {
        "other": MIB,
        "act": 2 * MIB,
        "optim": 1024,
    }


def test_no_line_is_of_no_kind():
    assert owners.kinds_of_makers([]) == {}


@pytest.mark.megatron
@TRAINING
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_a_snapshot_and_slices_of_megatron_fsdp_agree(tmp_path, strategy):
    """Of one emulated rank: stacks as torch keeps them, beside its slice."""
    path = tmp_path / "rank5.pickle"
    plain = [word for word in JOB if word != "--use-distributed-optimizer"]
    flags = (
        f"--use-distributed-optimizer --use-megatron-fsdp --ckpt-format fsdp_dtensor "
        f"--data-parallel-sharding-strategy {strategy} --transformer-impl transformer_engine "
        f"--pipeline-model-parallel-size 1 --seq-length 64 --max-position-embeddings 64"
    )
    words = f"--prism-world-size 64 --prism-tier meta --prism-ranks 5 --prism-capture {tmp_path}/s"
    helpers = stock_jobs.TINY.parents[1]
    script = tmp_path / "traced.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(helpers)!r})\n"
        f"from helpers import traced_allocations\ntraced_allocations.run({str(path)!r})\n"
    )
    ((status, said),) = stock_jobs.run([[*words.split(), "--", script, *plain, *flags.split()]])
    assert status == 0, said[-3000:]
    import megatron_prism as prism

    comparison = snapshot.compare(snapshot.read(path), prism.load(tmp_path / "s"))
    real, sliced = comparison.real.by_kind, comparison.emulated.by_kind
    assert real["master"] > 0
    assert real["grad"] > 0
    # where weights are gathered the peak is behind the forward
    if strategy != "optim_grads_params":
        assert real["mask"] == 64**2
    for kind in ("param", "grad", "optim", "master", "mask", "act"):
        assert real[kind] == sliced[kind], kind
