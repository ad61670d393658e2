"""Slices: what is finished is kept, what is another job's is refused."""

import pytest
from helpers.small_slices import SOURCE, TP, WORLD, program, store_in

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, load, save
from megatron_prism.core.programs.program_text import dump, parse
from megatron_prism.core.programs.slices import SliceStore, assemble, open_programs, stand_in_for
from megatron_prism.core.world import World


def test_a_ring_of_context_parallel_ranks_wants_a_slice_of_each_place(tmp_path):
    """MTP's shift of tokens sends without a group, first, middle and last rank otherwise."""
    world = World(16, tp=2, cp=2, pp=2)
    others = [Op("compute", ns=1), Op("all_reduce", TP, "bf16", 4, 4, "sum")]

    def stored(folder, ranks, peer):
        store = SliceStore(tmp_path / folder, world, SOURCE)
        store.prepare(False)
        for rank in ranks:
            ring = Op("send", "default_pg", "int64", num_in=1, peer=peer)
            store.put(Program.from_ops(rank, [*others, ring] if rank < 8 else others))
        return assemble(tmp_path / folder)

    with pytest.raises(ProgramError, match="ranks 2 have no slice") as caught:
        stored("a", [0, 8], peer=2)  # cp 1
    assert 2 in caught.value.ranks
    assert stored("b", [0, 2, 8], peer=2).program_of[2] == 1
    assert stored("c", [0, 8], peer=8).program_of[2] == 0  # to the next stage


def test_a_gather_of_uneven_shares_wants_a_slice_of_each_rank_that_differs(tmp_path):
    """dist_muon: whole parameters belong to single ranks, whose optimizers differ with them."""
    world, shares = World(4), (4, 6, 4, 7)

    def stored(folder, ranks):
        store = SliceStore(tmp_path / folder, world, SOURCE)
        store.prepare(False)
        for rank in ranks:
            own = shares[rank]
            gather = Op("all_gather", "DATA_PARALLEL_GROUP", "bf16", own, 21,
                        splits=((own,) * 4, shares))  # fmt: skip
            store.put(Program.from_ops(rank, [gather]))
        return assemble(tmp_path / folder)

    with pytest.raises(ProgramError, match=r"2 ranks \(1,3\) differ") as caught:
        stored("a", [0])
    assert 1 in caught.value.ranks
    assert stored("b", [0, 1, 3]).program_of[2] == 0


STEP = """prism-program 1
world size=4 pp=2
program rank={rank} ranks=0-3
-    alloc storage=1 bytes=4096 note="param:[2]"
-    alloc storage=2 bytes={state} note="optim:exp_avg"
0F   compute flops={flops} traffic=1000 kernels=1
G    reduce_scatter DATA_PARALLEL_GROUP fp32 in=8 out=4 reduce=avg @a/param_and_grad_buffer.py:7
O    compute flops=0 traffic={state} kernels={kernels} note=cut@{rank}
"""


def test_ranks_that_differ_in_their_shards_alone_are_one_class(tmp_path):
    """The one with the longest step stands for its stage; other work is not taken for a shard."""

    def assembled(name, *ranks):
        for rank, state, kernels, flops in ranks:
            text = STEP.format(rank=rank, state=state, kernels=kernels, flops=flops)
            (one,) = parse(text).programs
            store = SliceStore(tmp_path / name, World(4, pp=2), SOURCE)
            store.folder.mkdir(exist_ok=True)
            store.put(one)
        return assemble(tmp_path / name)

    alike = assembled("a", (0, 600, 3, 9), (1, 700, 2, 9), (2, 600, 3, 9))
    assert [one.rank for one in alike.programs] == [1, 2]  # other stages stay apart
    assert alike.program_of.tolist() == [0, 0, 1, 1]
    assert alike.source["alike"] == "rank 1 for 0"
    other = assembled("b", (0, 600, 3, 9), (1, 600, 3, 8), (2, 600, 3, 9))
    assert other.program_of.tolist() == [0, 1, 2, 2]
    assert "alike" not in other.source


# -- the store ------------------------------------------------------------------------------------
def test_finished_slices_are_kept(tmp_path):
    store_in(tmp_path / "a" / "b", (0,))
    again = SliceStore(tmp_path / "a" / "b", WORLD, SOURCE)
    again.prepare(False)
    assert again.ranks() == [0]
    again.put(program(4))
    assert again.ranks() == [0, 4]
    assert load(again.path(4)).programs == (program(4),)


def test_groups_that_the_sizes_do_not_give_are_kept(tmp_path):
    """As those of several instances of the distributed optimizer."""
    store, groups = store_in(tmp_path, (0,)), {TP: ((0, 2), (1, 3), (4, 6), (5, 7))}
    store.put(program(4), groups)
    assert dict(assemble(tmp_path).groups) == groups
    store.put(program(0), {TP: ((0, 3), (1, 2), (4, 7), (5, 6))})
    with pytest.raises(ProgramError, match="other groups TENSOR_MODEL_PARALLEL_GROUP"):
        assemble(tmp_path)


@pytest.mark.parametrize(
    ("source", "world", "says"),
    [
        ({**SOURCE, "settings": "xyz"}, WORLD, "settings abc, not xyz"),
        ({**SOURCE, "megatron_core": "0.19.2"}, WORLD, "megatron_core 0.16.1, not 0.19.2"),
        ({**SOURCE, "seed": "1"}, WORLD, "seed unknown, not 1"),
        (SOURCE, World(16, tp=2, pp=2), "a world of 8 ranks"),
    ],
)
def test_slices_of_another_job_are_refused_by_what_differs(tmp_path, source, world, says):
    store_in(tmp_path)
    with pytest.raises(UsageError, match="slice-000000.prism is a slice of another job") as caught:
        SliceStore(tmp_path, world, source).prepare(False)
    assert says in caught.value.message
    assert "--force" in caught.value.fix
    assert SliceStore(tmp_path, WORLD, SOURCE).ranks() == [0, 4]


def test_force_drops_the_old_slices_and_their_world(tmp_path):
    store_in(tmp_path)
    save(assemble(tmp_path), tmp_path / "world.prism")
    other = SliceStore(tmp_path, WORLD, {**SOURCE, "settings": "xyz"})
    other.prepare(True)
    assert list(tmp_path.iterdir()) == []


def test_a_new_slice_outdates_the_world_that_was_made_without_it(tmp_path):
    store = store_in(tmp_path)
    save(assemble(tmp_path), tmp_path / "world.prism")
    store.put(program(1, ns=7))
    assert open_programs(tmp_path).of(1)[0].ns == 7


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_other_things_is_left_alone(tmp_path, force):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"no slices: thesis\.txt"):
        SliceStore(tmp_path, WORLD, SOURCE).prepare(force)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


# -- worlds ---------------------------------------------------------------------------------------
def test_captured_ranks_run_their_own_and_the_others_the_nearest():
    world = World(16, tp=2, pp=2, cp=2)
    captured = [0, 1, 8, 14]
    of = stand_in_for(world, captured)
    assert [of[rank] for rank in captured] == [0, 1, 2, 3]
    for rank in range(16):
        mine = world.coordinates(rank)
        assert world.coordinates(captured[of[rank]]).pp == mine.pp
        if rank not in captured:
            alike = [
                sum(a == b for a, b in zip(mine, world.coordinates(c), strict=True))
                for c in captured
                if world.coordinates(c).pp == mine.pp
            ]
            chosen = world.coordinates(captured[of[rank]])
            assert sum(a == b for a, b in zip(mine, chosen, strict=True)) == max(alike)
    assert of[3] == 1  # tp 1, as rank 1 is


@pytest.mark.parametrize("missing", [0, 4])
def test_a_missing_stage_is_named(tmp_path, missing):
    store_in(tmp_path, (4 - missing,))
    with pytest.raises(ProgramError, match=f"stages {missing // 4} have no slice"):
        assemble(tmp_path)
    found = assemble(tmp_path, partial=True)
    assert found.absent == list(range(missing, missing + 4))


@pytest.mark.parametrize(
    ("other", "says"),
    [({"tier": "cpu"}, "tier cpu, not meta"),
     ({"transformer_engine": "2.20.2"}, "transformer_engine 2.20.2, not 2.17.1")],
)  # fmt: skip
def test_slices_of_two_jobs_make_no_world(tmp_path, other, says):
    store_in(tmp_path, (0,))
    SliceStore(tmp_path, WORLD, {**SOURCE, **other}).put(program(4))
    with pytest.raises(UsageError, match=says):
        assemble(tmp_path)


def test_a_slice_under_another_name_is_refused(tmp_path):
    store_in(tmp_path, (0, 4))
    (tmp_path / "slice-000004.prism").rename(tmp_path / "slice-000005.prism")
    with pytest.raises(ProgramError, match="slice-000005.prism holds the slice of rank 4"):
        assemble(tmp_path)


def test_programs_are_opened_wherever_they_are(tmp_path):
    store_in(tmp_path / "d")
    made = open_programs(tmp_path / "d")
    assert made.program_of.tolist() == [0] * 4 + [1] * 4
    assert dict(made.source) == SOURCE
    save(made, tmp_path / "w.prism")
    (tmp_path / "w.txt").write_text(dump(made))
    assert open_programs(tmp_path / "w.prism") == made
    assert open_programs(tmp_path / "w.txt") == made
    (tmp_path / "d" / "world.prism").write_bytes((tmp_path / "w.prism").read_bytes())
    assert open_programs(tmp_path / "d") == made


def test_a_calibration_may_lie_beside_the_slices(tmp_path):
    (tmp_path / "calibration.json").write_text("{}")
    SliceStore(tmp_path, World(2), {}).prepare(force=False)
