"""Other numbers of microbatches: op by op what Megatron's own scheduler gives for them."""

import contextlib
import dataclasses

import numpy as np
import pytest

import megatron_prism as prism
from megatron_prism.core.errors import PrismError, ProgramError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs import program
from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program_text import dump, parse
from megatron_prism.graph import world_graph
from megatron_prism.replay.microbatches.order import fewest_microbatches
from megatron_prism.replay.uncertainty.plausibility import check_plausible

schedule = pytest.importorskip("megatron_prism.emulate.schedule")


def ops_of(programs):
    """Every program's ops as values, batches by their first op."""
    return [list(program) for program in programs.programs]


@pytest.mark.parametrize(
    ("sizes", "given", "wanted"),
    [
        ({"pp": 4}, 8, 9),
        ({"pp": 4}, 5, 33),
        ({"pp": 1}, 2, 9),
        ({"pp": 2, "vpp": 2}, 6, 16),
        ({"pp": 4, "vpp": 5}, 12, 24),
        ({"pp": 4, "vpp": 2, "group_size": 6}, 23, 29),
        ({"pp": 4, "vpp": 2, "group_size": 6}, 18, 30),
        ({"pp": 4, "vpp": 2, "overlap_p2p": False}, 12, 24),
        ({"pp": 4, "vpp": 2, "warmup_flush": True}, 12, 16),
        ({"pp": 4, "vpp": 2, "variable_lengths": True}, 12, 16),
        ({"pp": 2, "variable_lengths": True}, 4, 16),
        ({"pp": 4}, 8, 32),
        ({"pp": 4}, 16, 8),
        ({"pp": 1}, 4, 7),
        ({"pp": 2}, 5, 64),
        ({"pp": 4, "vpp": 2}, 16, 24),
        ({"pp": 4, "vpp": 3}, 16, 64),
        ({"pp": 4, "vpp": 2, "overlap_p2p": True}, 16, 32),
        ({"pp": 2, "vpp": 4, "overlap_p2p": True}, 24, 12),
        ({"pp": 4, "vpp": 2, "ep_overlap": True}, 12, 20),
        ({"pp": 1, "ep_overlap": True}, 3, 8),
        ({"pp": 4, "vpp": 5}, 8, 24),  # a steady state that was not captured, of single messages
    ],
)
def test_it_is_the_schedule_of_that_number(sizes, given, wanted):
    made = schedule.with_microbatches(schedule.schedules(microbatches=given, **sizes), wanted)
    real = schedule.schedules(microbatches=wanted, **sizes)
    assert ops_of(made) == ops_of(real)
    assert world_graph.build(made).check() == []
    assert f"{wanted} microbatches instead of {given}" in made.source["what-if"]
    assert made.source["microbatches"] == str(wanted)


@pytest.mark.parametrize(("limit", "refused"), [("0", True), ("8", True), ("6", False)])
def test_gradients_that_every_microbatch_leaves_to_the_end_are_refused(limit, refused):
    given = {"--defer-embedding-wgrad-compute": "", "--wgrad-deferral-limit": limit}
    programs = schedule.schedules(pp=2, microbatches=8)
    source = {**programs.source, "arguments": job_settings.as_text(given)}
    programs = dataclasses.replace(programs, source=source)
    expected = pytest.raises(ProgramError, match=f"--wgrad-deferral-limit {limit} each of 8")
    with expected if refused else contextlib.nullcontext():
        schedule.with_microbatches(programs, 12)


def test_programs_that_name_no_microbatch_are_refused():
    text = "prism-program 1\nworld size=1\nprogram ranks=0\n- compute ns=5\n"
    with pytest.raises(ProgramError, match="no op of the programs names a microbatch"):
        schedule.with_microbatches(parse(text), 8)


@pytest.mark.parametrize(
    ("sizes", "given", "wanted", "fewest"),
    [
        ({"pp": 4}, 2, 16, 7),
        ({"pp": 4}, 4, 10, 7),
        ({"pp": 4}, 10, 2, 2),
        ({"pp": 2, "variable_lengths": True}, 2, 16, 5),
        ({"pp": 2, "vpp": 2}, 2, 12, 8),
        ({"pp": 8, "vpp": 5}, 8, 24, 24),
        ({"pp": 4, "vpp": 2, "overlap_p2p": False}, 4, 24, 16),
        ({"pp": 4, "vpp": 2, "variable_lengths": True}, 4, 16, 16),
    ],
)
def test_too_few_say_how_many_it_takes(sizes, given, wanted, fewest):
    """What a stage does between a backward and the forward behind it is not what it does between
    its last backward and the end of the iteration, nor is a send alone one beside a receive."""
    with pytest.raises(ProgramError, match=r"microbatches have no \w+ .*behind") as caught:
        schedule.with_microbatches(schedule.schedules(microbatches=given, **sizes), wanted)
    assert f"with {fewest} microbatches" in caught.value.fix


def test_a_kind_of_step_that_was_not_captured_is_named():
    sizes = {"pp": 4, "vpp": 2, "ep_overlap": True}
    with pytest.raises(ProgramError, match="no forward of chunk 0 with backward of") as caught:
        schedule.with_microbatches(schedule.schedules(microbatches=8, **sizes), 20)
    assert "with 16 microbatches" in caught.value.fix
    with pytest.raises(ProgramError, match="1 microbatches have no backward, which 3"):
        schedule.with_microbatches(schedule.schedules(pp=1, microbatches=1), 3)
    with pytest.raises(ProgramError, match="ops, too many"):
        schedule.with_microbatches(schedule.schedules(pp=2, microbatches=16), 1 << 22)
    same = schedule.schedules(pp=2, microbatches=4)
    assert schedule.with_microbatches(same, 4) is same


def test_what_megatron_refuses_is_refused_in_its_words():
    given = schedule.schedules(pp=4, vpp=2, microbatches=16)
    with pytest.raises(UsageError, match="The remainder of M .* but it is 2") as caught:
        schedule.with_microbatches(given, 18)
    assert caught.value.fix == "microbatches=16 or microbatches=20"


def test_an_order_that_is_not_megatrons_is_refused():
    given = schedule.schedules(pp=2, microbatches=4)
    one = given.programs[0]
    ops = one.ops[::-1].copy()
    changed = dataclasses.replace(one, ops=ops)
    programs = dataclasses.replace(given, programs=(changed, *given.programs[1:]))
    with pytest.raises(ProgramError, match="not in the order of Megatron's scheduler"):
        schedule.with_microbatches(programs, 8)


@pytest.mark.parametrize(
    ("pp", "vpp", "fewest"), [(1, None, 4), (2, None, 5), (4, None, 7), (2, 2, 8), (4, 3, 16)]
)
def test_a_sweep_captures_as_few_as_have_every_kind_of_step(pp, vpp, fewest):
    assert fewest_microbatches(pp, vpp, 3 * fewest, schedule.schedules) == fewest
    given, real = (schedule.schedules(pp=pp, vpp=vpp, microbatches=n) for n in (fewest, 3 * fewest))
    assert ops_of(schedule.with_microbatches(given, 3 * fewest)) == ops_of(real)


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
    made = schedule.with_microbatches(dataclasses.replace(given, programs=tuple(timed)), wanted)
    for one in made.programs:
        ns = one.ops["ns"][one.ops["name"] == CODE["compute"]]
        assert (one.samples == [ns, 2 * ns]).all()
    program.save(made, tmp_path / "x.prism")
    assert program.load(tmp_path / "x.prism") == made


def body(flops, steps):
    """A rank without a pipeline: a step is (label, flops, what follows)."""
    lines = ["prism-program 1", "world size=1", "source tokens_per_iteration=400",
             "program ranks=0", "- compute ns=7"]  # fmt: skip
    for label, part, *more in steps:
        lines += [f"{label} compute flops={int(flops * part)}", *more]
    return parse("\n".join(lines) + "\n")


REDUCE = "reduce_scatter default_pg fp32 in=8 out=8 reduce=sum"
GATHER = "all_gather default_pg bf16 in=8 out=8"


def overlapped(count):
    """Gradients are reduced within the last backward, parameters gathered in the first forward."""
    steps = []
    for i in range(count):
        steps += [(f"{i}F", 1, *([f"{i}F {GATHER}", f"{i}F compute flops=9"] if i == 0 else []))]
        if i < count - 1:
            steps += [(f"{i}B", 2)]
        else:  # a bucket is full before the end
            steps += [(f"{i}B", 1, f"{i}B {REDUCE}", f"{i}B compute flops=60", f"{i}B {REDUCE}")]
    return body(60, steps)


@pytest.mark.parametrize("given", [2, 3, 4, 5])
@pytest.mark.parametrize("wanted", [2, 3, 8, 64])
def test_first_and_last_microbatches_keep_their_own_bodies(given, wanted):
    made = schedule.with_microbatches(overlapped(given), wanted)
    assert list(made.of(0)) == list(overlapped(wanted).of(0))
    if wanted != given:
        assert made.source["tokens_per_iteration"] == str(400 * wanted // given)


def test_the_first_microbatches_that_defer_a_gradient_stay_as_many():
    def deferring(count):
        parts = [1 if i < 3 else 4 for i in range(count)]
        steps = [one for i in range(count) for one in [(f"{i}F", 1), (f"{i}B", parts[i])]]
        return body(10, steps)

    made = schedule.with_microbatches(deferring(6), 9)
    assert list(made.of(0)) == list(deferring(9).of(0))
    given = {"--defer-embedding-wgrad-compute": "", "--wgrad-deferral-limit": "3"}
    known = dataclasses.replace(deferring(5), source={"arguments": job_settings.as_text(given)})
    made = schedule.with_microbatches(known, 6)  # as many defer as are left
    assert list(made.of(0)) == list(deferring(6).of(0))
    known = dataclasses.replace(deferring(4), source=known.source)
    with pytest.raises(ProgramError, match="every backward has other ops"):
        schedule.with_microbatches(known, 6)


def test_steps_that_never_repeat_are_refused():
    steps = [one for i in range(4) for one in [(f"{i}F", 1), (f"{i}B", 1, *[f"{i}B {GATHER}"] * i)]]
    with pytest.raises(ProgramError, match="every backward has other ops"):
        schedule.with_microbatches(body(1, steps), 8)


def test_measured_times_are_those_of_captured_steps():
    text = "".join(f"{i}F compute ns={10 + i}\n{i}B compute ns={20 + i}\n" for i in range(4))
    given = parse(f"prism-program 1\nworld size=1\nprogram ranks=0\n{text}")
    ns = [op.ns for op in schedule.with_microbatches(given, 8).of(0)]
    assert (ns[0], ns[-1]) == (10, 23)
    assert set(ns[2::2]) == {11, 12, 13}
    assert set(ns[1:-1:2]) == {20, 21, 22}


def test_what_products_take_may_differ_from_period_to_period():
    text = dump(schedule.schedules(pp=2, microbatches=8))
    lines, count = [], 0
    for line in text.splitlines():
        if " compute " in f"{line} ":
            count += 1
            line += f" ns={100 + count} products={count}"
        lines.append(line)
    assert count > 16
    made = schedule.with_microbatches(parse("\n".join(lines)), 12)
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
        made = schedule.with_microbatches(given, wanted).programs[0]
        assert made.live_bytes().max() == 64
        assert made.live_bytes()[-1] == 0
        assert made.allocations["before"].max() < len(made)


@pytest.mark.parametrize(("part", "wrong"), [(1, ""), (0.5, "ms for each other one")])
def test_another_microbatch_that_takes_another_time_is_a_fault_of_ours(part, wrong):
    def steps(count, flops):
        return [one for i in range(count) for one in [(f"{i}F", flops), (f"{i}B", 2 * flops)]]

    few = prism.replay(body(10**12, steps(4, 1)), machine="h200")
    more = steps(4, 1) + [(label, part * flops) for label, flops in steps(8, 1)[8:]]
    many = prism.replay(body(10**12, more), machine="h200")
    expected = pytest.raises(PrismError, match=wrong) if wrong else contextlib.nullcontext()
    with expected:
        check_plausible(many, few)


@pytest.mark.parametrize(
    ("vpp", "given", "is_doubted"), [(2, 8, True), (2, 16, False), (None, 8, False)]
)
def test_few_rounds_of_chunks_leave_a_doubt_about_messages(vpp, given, is_doubted):
    few = schedule.schedules(pp=4, vpp=vpp, microbatches=given)
    assumed = schedule.with_microbatches(few, 32).source["what-if"]
    assert ("two buffers of messages" in assumed) == is_doubted


def test_two_rounds_of_chunks_show_no_steady_state():
    text = "\n".join(
        line + " ns=1000000" * (" compute " in f"{line} ")
        for line in dump(schedule.schedules(pp=4, vpp=5, microbatches=8)).splitlines()
    )
    few = parse(text)
    many = schedule.with_microbatches(few, 24)
    check_plausible(*(prism.replay(one, machine="h200") for one in (many, few)))


def test_a_rate_above_the_machines_peak_is_a_fault_of_ours():
    few, many = body(10**12, [("0F", 1), ("0B", 2)]), body(10**12, [("0F", 1), ("0B", 2)] * 2)
    source = {"model_flops_per_iteration": str(10**14), "tier": "meta"}
    many = dataclasses.replace(many, source=source)
    with pytest.raises(PrismError, match="a fault of ours: .* TFLOP/s a GPU, of which it has 989"):
        check_plausible(*(prism.replay(one, machine="h200") for one in (many, few)))
