"""Counts, lengths and loaders of the same ranks, and lengths that Megatron cannot cut."""

import dataclasses

import numpy as np
import pytest
from helpers.uneven_worlds import length_job, pipeline, some, sources

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.world import World
from megatron_prism.features.uneven.drawn import examine_run, steps_of_run
from megatron_prism.features.uneven.input_ranges import read_range, search
from megatron_prism.features.uneven.inputs import InputKind, UnevenInput, join_counts
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.outcome import examine
from megatron_prism.features.uneven.rank_programs import Sources, apply_inputs
from megatron_prism.features.uneven.samples import Batches

VARIES = {"variable_seq_lengths": "true"}


def both_lengths():
    captured = pipeline(8, settings=VARIES)
    others = [pipeline(2, settings=VARIES)]
    return dataclasses.replace(
        sources(captured=captured, lengths=LengthCaptures(captured, others)),
        with_microbatches=lambda programs, count: pipeline(
            int(programs.path[1:]), settings=VARIES, microbatches=count
        ),
    )


def test_a_loader_that_ends_keeps_the_lengths_that_are_drawn():
    few = both_lengths()
    world = few.captured.world
    words = ("lengths=dp=1:1-9", "loader=dp=1:1-2", "microbatches=dp=1:3-4")
    ranges = []
    for word in words:
        key, _, text = word.partition("=")
        ranges.append(read_range(InputKind(key), text, world))
    seen = []

    def with_microbatches(programs, count):
        seen.append(count)
        return few.with_microbatches(programs, count)

    watched = Sources(few.captured, with_microbatches, few.open_capture, few.lengths)
    result = search(watched, [], ranges, iterations=60, seed=1)
    # all end early, with three microbatches or four
    assert result.stopping == result.drawn == 60
    assert set(seen) == {4}
    # one length or two of three and four, with a loader of one or two: far more than four
    assert result.examined > 30
    assert str(result.outcome.smallest[0]) == "loader=1,3:2"
    assert "StopIteration" in result.outcome.advice


def test_words_of_the_same_ranks_are_one_input():
    world = World(4, pp=2)
    words = ["loader=dp=1:2", "lengths=dp=1:8,2,8,2", "microbatches=dp=1:4", "microbatches=dp=0:2"]
    joined = join_counts([some(word, world) for word in words])
    assert joined == [
        UnevenInput(InputKind.LENGTHS, (1, 3), 4, lengths=(8, 2, 8, 2), loader=2),
        UnevenInput(InputKind.MICROBATCHES, (0, 2), 2),
    ]
    assert str(joined[0]) == "microbatches=1,3:4 lengths=1,3:8,2,8,2 loader=1,3:2"
    # the same words are read again
    again = join_counts([some(word, world) for word in str(joined[0]).split()])
    assert again == joined[:1]


def test_a_rank_stops_in_the_program_of_its_lengths():
    few = both_lengths()
    uneven_input = UnevenInput(InputKind.LENGTHS, (1, 3), lengths=(8, 2, 8), loader=2)
    uneven_world = apply_inputs(few, [uneven_input])
    assert set(uneven_world.faults) == {1, 3}
    program = uneven_world.programs.of(1)
    stop = uneven_world.faults[1].host
    # it stops before the forward of the third microbatch, behind messages of both lengths
    assert program[stop].microbatch == 2
    sent = [op.num_in for op in list(program)[:stop] if op.name == "send" and op.dtype == "bf16"]
    assert sent == [8 * 4, 2 * 4]
    assert examine(few, [uneven_input]).verdict == "waits"


# -- lengths that cannot be cut --------------------------------------------------------------------
def of_world(world, length, **settings):
    programs = length_job(length, world=world)
    line = job_settings.as_text({"seq_length": str(length), **VARIES, **settings})
    return dataclasses.replace(programs, source={"settings": line})


@pytest.mark.parametrize(
    ("world", "settings", "good", "bad", "reason"),
    [
        (World(8, cp=2, pp=2), {}, 20, 18, r"2 x cp = 4"),
        (World(8, tp=2, pp=2), {"sequence_parallel": "true"}, 18, 17, "cp x tp = 2"),
        (World(16, tp=4, cp=2, pp=2), {"sequence_parallel": "true"}, 24, 20, "cp x tp = 8"),
        (World(8, tp=2, pp=2), {}, 17, None, ""),
    ],
)
def test_lengths_that_megatron_cannot_cut_are_refused(world, settings, good, bad, reason):
    captured = [of_world(world, length, **settings) for length in (64, 16, 40)]
    captures = LengthCaptures(captured[0], captured[1:])
    sources_of_run = Sources(captures.captured, None, None, captures)
    captures.programs_of((good,))
    shape = 1000, world.dp, captures.microbatches
    tokens = np.full(shape, 64)
    tokens[:, 0, 0] = good
    batches = Batches(tokens, tokens.astype(float) ** 2, False, "")
    assert steps_of_run(sources_of_run, batches).count == 1000
    if bad is None:
        return
    with pytest.raises(ProgramError, match=reason):
        captures.programs_of((bad,))
    # one in a thousand iterations, whose calls are not examined
    tokens[789, 0, 1] = bad
    for answer in (steps_of_run, examine_run):
        with pytest.raises(ProgramError, match=f"{bad} tokens cannot be cut"):
            answer(sources_of_run, Batches(tokens, tokens.astype(float) ** 2, False, ""))
