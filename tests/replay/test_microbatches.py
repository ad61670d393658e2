"""Other numbers of microbatches: op by op what Megatron's own scheduler gives for them."""

import dataclasses

import numpy as np
import pytest

from megatron_prism.core import program
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.ops import CODE
from megatron_prism.core.program_text import dump, parse
from megatron_prism.graph import world_graph
from megatron_prism.replay import whatif

schedule = pytest.importorskip("megatron_prism.emulate.schedule")


def ops_of(programs):
    """Every program's ops as values, batches by their first op."""
    return [list(program) for program in programs.programs]


@pytest.mark.parametrize(
    ("sizes", "given", "wanted"),
    [
        ({"pp": 4}, 8, 9),
        ({"pp": 4}, 8, 32),
        ({"pp": 4}, 16, 8),
        ({"pp": 1}, 4, 7),
        ({"pp": 2}, 5, 64),
        ({"pp": 4, "vpp": 2}, 16, 24),
        ({"pp": 4, "vpp": 3}, 16, 64),
        ({"pp": 4, "vpp": 2, "overlap_p2p": True}, 16, 32),
        ({"pp": 2, "vpp": 4, "overlap_p2p": True}, 24, 12),
    ],
)
def test_it_is_the_schedule_of_that_number(sizes, given, wanted):
    made = whatif.with_microbatches(schedule.schedules(microbatches=given, **sizes), wanted)
    real = schedule.schedules(microbatches=wanted, **sizes)
    assert ops_of(made) == ops_of(real)
    assert world_graph.build(made).check() == []
    assert f"{wanted} microbatches instead of {given}" in made.source["what-if"]
    assert made.source["microbatches"] == str(wanted)


def test_programs_that_name_no_microbatch_are_refused():
    text = "prism-program 1\nworld size=1\nprogram ranks=0\n- compute ns=5\n"
    with pytest.raises(ProgramError, match="no op of the programs names a microbatch"):
        whatif.with_microbatches(parse(text), 8)


def test_what_does_not_repeat_is_refused():
    with pytest.raises(ProgramError, match="too few to make") as caught:
        whatif.with_microbatches(schedule.schedules(pp=4, microbatches=4), 16)
    assert caught.value.fix.endswith("--global-batch-size N, 4 times what it is now")
    with pytest.raises(ProgramError, match="periods of 4") as caught:  # and none of them is equal
        whatif.with_microbatches(schedule.schedules(pp=4, vpp=5, microbatches=8), 7)
    assert caught.value.fix.endswith("N, 12/8 times what it is now")
    with pytest.raises(ProgramError, match="periods of 4") as caught:
        whatif.with_microbatches(schedule.schedules(pp=4, vpp=2, microbatches=16), 18)
    assert caught.value.fix == "microbatches=20"
    with pytest.raises(ProgramError, match="ops, too many"):
        whatif.with_microbatches(schedule.schedules(pp=2, microbatches=16), 1 << 24)
    same = schedule.schedules(pp=2, microbatches=4)
    assert whatif.with_microbatches(same, 4) is same


@pytest.mark.parametrize("wanted", [5, 12])
def test_times_of_single_iterations_are_those_of_the_segments(wanted, tmp_path):
    given = schedule.schedules(pp=2, microbatches=8)
    timed = []
    for one in given.programs:
        ops = one.ops.copy()
        where = np.flatnonzero(ops["name"] == CODE["compute"])
        ops["ns"][where] = 1000 + np.arange(len(where))
        samples = np.stack([ops["ns"][where], 2 * ops["ns"][where]]).astype(np.int64)
        timed.append(dataclasses.replace(one, ops=ops, samples=samples))
    made = whatif.with_microbatches(dataclasses.replace(given, programs=tuple(timed)), wanted)
    for one in made.programs:
        ns = one.ops["ns"][one.ops["name"] == CODE["compute"]]
        assert (one.samples == [ns, 2 * ns]).all()
    program.save(made, tmp_path / "x.prism")
    assert program.load(tmp_path / "x.prism") == made


TEXT = """prism-program 1
world size=1
source tokens_per_iteration=400
program ranks=0
- compute ns=7
""" + "".join(
    f"{i}F compute ns={10 + i}\n{i}B compute ns={20 + i}\n" for i in range(4)
) + "G all_reduce default_pg fp32 n=4 reduce=sum\n"  # fmt: skip


def test_measured_times_of_the_last_equal_period_are_repeated():
    made = whatif.with_microbatches(parse(TEXT), 6)
    assert [op.ns for op in made.of(0)][1:-1] == [10, 20, 11, 21, 12, 22, 13, 23, 13, 23, 13, 23]
    assert [op.microbatch for op in made.of(0)][1:-1:2] == list(range(6))
    assert made.source["tokens_per_iteration"] == "600"
    fewer = whatif.with_microbatches(parse(TEXT), 2)
    assert [op.ns for op in fewer.of(0)][1:-1] == [10, 20, 11, 21]


def test_what_products_take_may_differ_from_period_to_period():
    text = dump(schedule.schedules(pp=2, microbatches=8))
    lines, count = [], 0
    for line in text.splitlines():
        if " compute " in f"{line} ":
            count += 1
            line += f" ns={100 + count} products={count}"
        lines.append(line)
    assert count > 16
    made = whatif.with_microbatches(parse("\n".join(lines)), 12)
    assert "12 microbatches instead of 8" in made.source["what-if"]


def test_memory_keeps_its_peak():
    programs = schedule.schedules(pp=2, microbatches=8)
    one = programs.programs[0]
    memory = np.zeros(2 * len(one), dtype=one.allocations.dtype)
    memory["before"] = np.repeat(np.arange(len(one)), 2)
    memory["storage"] = np.repeat(np.arange(len(one)), 2)
    memory["bytes"] = np.tile([64, -64], len(one))
    kept = dataclasses.replace(one, allocations=memory)
    given = dataclasses.replace(programs, programs=(kept, *programs.programs[1:]))
    for wanted in (4, 12):
        made = whatif.with_microbatches(given, wanted).programs[0]
        assert made.live_bytes().max() == 64
        assert made.live_bytes()[-1] == 0
        assert made.allocations["before"].max() < len(made)
