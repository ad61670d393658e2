"""Plans against real ranks: each pair of layouts is saved and loaded over gloo on tier cpu.

What a plan says is what happens: the same stored bytes are read from the same files and every
tensor comes back bit for bit, or Megatron ends the job for the reason that was foreseen.
"""

import json
import shutil

import pytest
import torch
from helpers import needs, real_checkpoints
from torch.distributed import checkpoint

pytestmark = [needs.TRAINING, pytest.mark.ci, pytest.mark.megatron, pytest.mark.slow]

JOB = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3
--lr-decay-iters 10 --mock-data --vocab-size 1000 --transformer-impl local --bf16
--use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 1000
--log-interval 1 --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--attention-backend unfused --num-workers 0 --save-interval 7
""".split()
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
NAMES = ("--dist-ckpt-optim-fully-reshardable",)
# Megatron refuses it with learned positions
MTP = ("--mtp-num-layers", 1, "--position-embedding-type", "rope")
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall"
).split()

VPP2 = (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)
GQA = ("--group-query-attention", "--num-query-groups", 1)
ETP2 = (*TP2, "--expert-tensor-parallel-size", 2, "--sequence-parallel")

# name of a layout that saves -> ranks, flags
SAVED = {
    "tp2": (2, (*TP2, *NAMES)),
    "dp2 by buckets": (2, ()),
    "ep2": (2, ("--expert-model-parallel-size", 2, *NAMES, *MOE)),
    "pp2": (2, (*PP2, *NAMES)),
    "one query group": (1, (*NAMES, *GQA)),
    "multi-token prediction": (1, (*NAMES, *MTP)),
}
# layout that saved, ranks and flags that load, a part of the refusal ("": none)
PAIRS = {
    "tp2 to one": ("tp2", 1, NAMES, ""),
    "tp2 to pp2": ("tp2", 2, (*PP2, *NAMES), ""),
    "tp2 to dp2": ("tp2", 2, NAMES, ""),
    "tied to untied": (
        "tp2",
        1,
        (*NAMES, "--untie-embeddings-and-output-weights"),
        "output_layer.weight",
    ),
    "with two layers more": ("tp2", 1, (*NAMES, "--num-layers", 6), "shape mismatch"),
    "with multi-token prediction": ("tp2", 1, (*NAMES, *MTP), "mtp."),
    "another padding of the vocabulary": (
        "tp2",
        1,
        (*NAMES, "--make-vocab-size-divisible-by", 384),
        "",
    ),
    # a bucket of one layer is padded, and Megatron saves the embedding's states behind it shifted
    "tp2 to vpp2": ("tp2", 2, (*VPP2, *NAMES), ""),
    "pp2 to vpp2": ("pp2", 2, (*VPP2, *NAMES), ""),
    "pp2 to tp2": ("pp2", 2, (*TP2, *NAMES), ""),
    "more tensor-parallel ranks than query groups": (
        "one query group",
        2,
        (*TP2, *NAMES, *GQA),
        "",
    ),
    # the last stage alone ends: Megatron 0.19 has no name for its copy of tied embeddings
    "multi-token prediction to pp2": (
        "multi-token prediction",
        2,
        (*PP2, *NAMES, *MTP),
        "output_layer.weight",
    ),
    "multi-token prediction to tp2": ("multi-token prediction", 2, (*TP2, *NAMES, *MTP), ""),
    "ep2 to etp2": ("ep2", 2, (*ETP2, *NAMES, *MOE), "KeyError"),
    "ep2 to dp2 of all experts": ("ep2", 2, (*NAMES, *MOE), "KeyError"),
    "dp2 to one by buckets": ("dp2 by buckets", 1, (), ""),
    "dp2 to tp2 by buckets": ("dp2 by buckets", 2, TP2, "(TP, PP) mismatch"),
    # with expert parallelism Megatron has an optimizer more, for experts
    "ep2 to one": ("ep2", 1, (*NAMES, *MOE), "KeyError"),
}
# with expert parallelism Megatron has an optimizer more, which names of tensors do not say
OTHER_OPTIMIZERS = {"ep2 to etp2", "ep2 to dp2 of all experts", "ep2 to one"}
REFUSED_BY_SOME = {"multi-token prediction to pp2"}  # of whose ranks some could load


@pytest.fixture(scope="module")
def worlds():
    with real_checkpoints.Worlds() as running:
        yield running


@pytest.fixture(scope="module")
def saved(worlds, tmp_path_factory):
    """Name of a layout -> folder of its checkpoint, saved when it is first asked for."""
    folders = {}

    def save(name):
        if name not in folders:
            size, flags = SAVED[name]
            folder = tmp_path_factory.mktemp("saved")
            answers = worlds.real(size, [*JOB, *flags, "--save", folder / "ck"], folder)
            assert all(status == 0 for status, _ in answers), answers[0][1][-3000:]
            folders[name] = folder / "ck"
        return folders[name]

    return save


def tensors_of(folder):
    """Name -> whole tensor of the last checkpoint in a folder."""
    number = int((folder / "latest_checkpointed_iteration.txt").read_text())
    reader = checkpoint.FileSystemReader(folder / f"iter_{number:07d}")
    whole = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if hasattr(entry, "size"):
            whole[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    checkpoint.load(whole, storage_reader=reader, no_dist=True)
    return whole


@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_is_what_happens(name, worlds, saved, tmp_path):
    layout, size, flags, refusal = PAIRS[name]
    words = [*JOB, *flags, "--load", saved(layout)]
    plans = [worlds.plan(size, rank, words, tmp_path / "plan") for rank in range(size)]
    answers = worlds.real(size, [*words, "--save", tmp_path / "ck"], tmp_path / "real")
    refusals = [plan["refusal"] for plan in plans if plan["refusal"]]
    if name not in REFUSED_BY_SOME:
        assert len(refusals) == (size if refusal else 0), refusals
    # a job of no iteration more is untrained, whatever it has loaded and saved
    tracker = tmp_path / "ck" / "latest_checkpointed_iteration.txt"
    assert tracker.is_file() != bool(refusal), answers[0][1][-3000:]
    if refusal:
        assert refusals
        assert all(refusal in told for told in refusals)
        assert any(refusal in said for _, said in answers)
        return

    reads = [json.loads((tmp_path / "real" / f"reads-{rank}.json").read_text())
             for rank in range(size)]  # fmt: skip
    assert [plan["file_bytes"] for plan in plans] == reads
    before, after = tensors_of(saved(layout)), tensors_of(tmp_path / "ck")
    states = [key for key in after if key.startswith("optimizer.state.")]
    assert states or "buckets" in layout
    shifts = {}
    for plan in plans:
        shifts |= plan["shifted_states"]
    assert bool(shifts) == ("vpp2" in name)
    for key in before.keys() & after.keys():
        if before[key].shape != after[key].shape:
            continue
        parameter = key.removeprefix("optimizer.state.").partition(".")[2]
        elements = shifts.get(parameter, 0) if key.startswith("optimizer.state.") else 0
        stored, saved = before[key].flatten(), after[key].flatten()
        # what Megatron's save has lost was foreseen: shifted, with zeros behind
        if elements:
            assert not torch.equal(stored, saved), key
            stored = torch.cat([stored[elements:], torch.zeros(elements)])
        assert torch.equal(stored, saved), key


@pytest.mark.parametrize("name", sorted(PAIRS.keys() - OTHER_OPTIMIZERS))
def test_the_metadata_alone_plan_the_same(name, worlds, saved, tmp_path):
    """Arguments of the checkpoint's job are in its first file, which is not there."""
    layout, size, flags, _ = PAIRS[name]
    whole = saved(layout)
    number = int((whole / "latest_checkpointed_iteration.txt").read_text())
    place = f"iter_{number:07d}"
    copy = tmp_path / "copy"
    (copy / place).mkdir(parents=True)
    for file in (
        "latest_checkpointed_iteration.txt",
        f"{place}/.metadata",
        f"{place}/metadata.json",
    ):
        shutil.copyfile(whole / file, copy / file)
    plans = []
    for folder in (whole, copy):
        words = [*JOB, *flags, "--load", folder]
        plans.append(worlds.plan(size, size - 1, words, tmp_path / "plan"))
    assert [plan.pop("stand_in") for plan in plans] == [False, True]
    refusals = [plan.pop("refusal").partition(":")[0] for plan in plans]
    assert refusals[0] == refusals[1]
    if not refusals[0]:
        assert plans[0] == plans[1]
