"""What comes of uneven inputs: every call matched, a mismatch, or ranks that wait for ever.

In : where programs come from, and inputs.  Out: Outcome, with the smallest example: the fewest
inputs, ranks and changed microbatches with which the job still stops in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.programs.ops import IS_CALL
from megatron_prism.core.programs.program import Program
from megatron_prism.core.world import World, ranks_text
from megatron_prism.features.hang.diagnose import diagnose_stall
from megatron_prism.features.hang.verdict import Diagnosis
from megatron_prism.features.uneven.expert_dispatch import DispatchRule
from megatron_prism.features.uneven.inputs import UnevenInput
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.mixed_lengths import sequence_length
from megatron_prism.features.uneven.rank_programs import Sources, UnevenWorld, apply_inputs
from megatron_prism.graph import stall, world_graph
from megatron_prism.graph.matching import Finding

_MOST_TRIALS = 200  # of the search for a smaller example


@dataclass(frozen=True)
class Outcome:
    """What comes of inputs.

    Attributes:
        inputs: What the ranks get.
        verdict: matched, mismatch, or waits.
        findings: Of a mismatch, what does not fit.
        diagnosis: Of ranks that wait, who waits for whom; None otherwise.
        counts: A sentence for each input that changes how many calls its ranks issue.
        advice: What to change in the job; "": nothing is known.
        smallest: The smallest example; none if every call is matched.
    """

    inputs: tuple[UnevenInput, ...]
    verdict: str
    findings: tuple[Finding, ...] = ()
    diagnosis: Diagnosis | None = None
    counts: tuple[str, ...] = ()
    advice: str = ""
    smallest: tuple[UnevenInput, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether the job hangs or its calls do not fit."""
        return self.verdict != "matched"


def examine(sources: Sources, inputs: Sequence[UnevenInput]) -> Outcome:
    """Judge a job whose ranks get these inputs; if it stops, look for fewer that stop it alike.

    Args:
        sources: Where programs come from; calls of the captured ones fit together.
        inputs: What the ranks get.

    Returns:
        The findings are those of the smallest example; inputs and counts of calls are of the job.

    Raises:
        UsageError: A rank has two inputs.
        ProgramError: A program cannot be had.
    """
    uneven_world = apply_inputs(sources, inputs)
    outcome = dataclasses.replace(
        judge(uneven_world),
        inputs=tuple(inputs),
        counts=tuple(_counts(sources, uneven_world, inputs)),
    )
    if not outcome.stops:
        return outcome

    # of many inputs the first mismatch may be a consequence: the smallest example has the cause
    smallest_inputs = _smallest(sources, outcome)
    smallest_outcome = judge(apply_inputs(sources, smallest_inputs))
    return dataclasses.replace(
        smallest_outcome,
        inputs=outcome.inputs,
        counts=outcome.counts,
        smallest=smallest_inputs,
        advice=advice(sources, smallest_outcome, smallest_inputs),
    )


def judge(uneven_world: UnevenWorld) -> Outcome:
    """Compare the calls of all ranks, then run them until no rank can go on."""
    programs = uneven_world.programs
    findings = tuple(world_graph.build(programs).check()) or uneven_world.broken_rules
    if findings:
        return Outcome((), "mismatch", findings)
    state = stall.run_until_stalled(programs, uneven_world.faults)
    if state.finished:
        return Outcome((), "matched")
    return Outcome((), "waits", diagnosis=diagnose_stall(state))


def _counts(
    sources: Sources, uneven_world: UnevenWorld, inputs: Sequence[UnevenInput]
) -> Iterator[str]:
    """Say how many calls more or fewer ranks issue in each group because of their input."""
    for uneven_input in inputs:
        rank = uneven_input.ranks[0]
        captured, changed = sources.captured.of(rank), uneven_world.programs.of(rank)
        captured_counts, changed_counts = _calls_by_group(captured), _calls_by_group(changed)
        differences: list[str] = []
        for group in sorted({*captured_counts, *changed_counts}):
            surplus = changed_counts.get(group, 0) - captured_counts.get(group, 0)
            if surplus:
                differences.append(f"{surplus:+} in {group}")
        if differences:
            yield f"{uneven_input}: rank {rank} issues {', '.join(differences)} calls"


def _calls_by_group(program: Program) -> dict[str, int]:
    """Count the calls of a program in every group."""
    counts: dict[str, int] = {}
    for group, places in program.groups().items():
        counts[group] = int(IS_CALL[program.ops["name"][places]].sum())
    return counts


# -- the smallest example --------------------------------------------------------------------------
def _smallest(sources: Sources, outcome: Outcome) -> tuple[UnevenInput, ...]:
    """Take parts of the inputs away as long as the job stops in the same way."""
    key = _key(outcome)
    trials = 0

    def still_stops(candidate: tuple[UnevenInput, ...]) -> bool:
        """Say whether a smaller example ends as the whole does."""
        nonlocal trials
        trials += 1
        try:
            return _key(judge(apply_inputs(sources, candidate))) == key
        except (PrismError, UsageError):  # such programs cannot be had
            return False

    inputs = outcome.inputs
    reduced = True
    while reduced and trials < _MOST_TRIALS:
        reduced = False
        for candidate in _smaller(sources, inputs):
            if trials >= _MOST_TRIALS:
                break
            if still_stops(candidate):
                inputs = candidate
                reduced = True
                break
    return inputs


def _key(outcome: Outcome) -> tuple[object, ...]:
    """Say in which way a job stops: the first call that does not fit, or that ranks wait."""
    if outcome.findings:
        return outcome.verdict, outcome.findings[0].kind, outcome.findings[0].group
    if outcome.diagnosis is not None:
        return outcome.verdict, outcome.diagnosis.verdict
    return (outcome.verdict,)


def _smaller(
    sources: Sources, inputs: tuple[UnevenInput, ...]
) -> Iterator[tuple[UnevenInput, ...]]:
    """Make the examples that are one step smaller, the smallest first."""
    # without one of the inputs
    if len(inputs) > 1:
        for place in range(len(inputs)):
            yield (*inputs[:place], *inputs[place + 1 :])

    # with a smaller input in the place of one
    for place, uneven_input in enumerate(inputs):
        for smaller_input in _smaller_inputs(sources, uneven_input):
            yield (*inputs[:place], smaller_input, *inputs[place + 1 :])


def _smaller_inputs(sources: Sources, uneven_input: UnevenInput) -> Iterator[UnevenInput]:
    """Make what is smaller than one input."""
    # fewer replicas of the model; ranks of one replica get one batch and stay together
    world = sources.captured.world
    for ranks in _fewer_replicas(world, uneven_input.ranks):
        yield dataclasses.replace(uneven_input, ranks=ranks)

    # a count that is as near to the captured one as possible
    usual_count = sources.captured.num_microbatches
    nearest_count = usual_count - 1
    if uneven_input.count > usual_count:
        nearest_count = usual_count + 1
    is_count = uneven_input.kind in (InputKind.MICROBATCHES, InputKind.LOADER)
    if is_count and nearest_count not in (0, uneven_input.count):
        yield dataclasses.replace(uneven_input, count=nearest_count)

    # with all its data, and with the end of its data alone
    if uneven_input.loader >= 0:
        yield dataclasses.replace(uneven_input, loader=-1)
        if uneven_input.loader < usual_count:
            yield UnevenInput(InputKind.LOADER, uneven_input.ranks, uneven_input.loader)

    # another number of microbatches, without lengths
    own_count = usual_count
    if uneven_input.kind is InputKind.LENGTHS and uneven_input.count >= 0:
        own_count = uneven_input.count
        yield UnevenInput(
            InputKind.MICROBATCHES, uneven_input.ranks, own_count, loader=uneven_input.loader
        )

    # fewer microbatches that differ from the capture
    if uneven_input.kind is InputKind.LENGTHS:
        usual_length = sequence_length(sources.captured)
        lengths = uneven_input.lengths
        if len(lengths) == 1:
            lengths = lengths * own_count
        for place, length in enumerate(lengths):
            if length != usual_length:
                restored = (*lengths[:place], usual_length, *lengths[place + 1 :])
                if set(restored) != {usual_length}:
                    yield dataclasses.replace(uneven_input, lengths=restored)


def _fewer_replicas(world: World, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Make the ranks of the first half of the replicas, and of all but one."""
    replicas = sorted({world.coordinates(rank).dp for rank in ranks})
    if len(replicas) < 2:
        return
    for kept in (replicas[: len(replicas) // 2], replicas[:-1]):
        yield tuple(rank for rank in ranks if world.coordinates(rank).dp in kept)


# -- what to change --------------------------------------------------------------------------------
def advice(sources: Sources, outcome: Outcome, inputs: Sequence[UnevenInput]) -> str:
    """Say what to change in the job; "" if that is not known."""
    kinds = {uneven_input.kind for uneven_input in inputs}
    if not outcome.findings and all(uneven_input.ends_early for uneven_input in inputs):
        ranks = ranks_text(inputs[0].ranks)
        return (
            f"the iterator of {ranks} raises StopIteration at next(data_iterator): give all dp "
            "ranks as many microbatches (drop_last, an endless sampler), or let all stop together"
        )
    if not outcome.findings:
        return ""
    finding = outcome.findings[0]
    is_of_lengths = kinds == {InputKind.LENGTHS}
    # messages of a two-stage pipeline that cross
    if finding.kind == "order" and is_of_lengths:
        return (
            "overlap_p2p_comm sends each message in a call of its own; Megatron's arguments refuse "
            "two stages with chunks without it (training/arguments.py:1007 @main)"
        )
    # two stages with chunks send one direction in the group of all ranks
    is_message = "p2p_communication.py" in finding.picture
    is_message |= finding.group == "PIPELINE_MODEL_PARALLEL_GROUP"
    if is_of_lengths and is_message:
        return (
            "a stage receives tensors of --seq-length (core/pipeline_parallel/schedules.py "
            "get_tensor_shapes): variable_seq_lengths of the model's configuration, which no flag "
            "of Megatron sets, sends the shape ahead"
        )
    if is_of_lengths and "broadcast" in finding.picture and finding.group.startswith("TENSOR"):
        return (
            "get_batch_on_this_tp_rank receives batches of --seq-length: pad samples to it, or use "
            "broadcast_data (core/tensor_parallel/data.py), which sends their sizes ahead"
        )
    captures = sources.lengths
    if captures is not None and captures.dispatch_rule is DispatchRule.EQUAL:
        return (
            "moe_hybridep_pad_uneven_dispatch_inputs (Megatron 0.19 and later) pads the tokens of "
            "all ranks of the group to the largest count"
        )
    if is_of_lengths and "EXPERT" in finding.group and "all_to_all" not in finding.picture:
        return (
            "the allgather dispatcher takes equal counts of tokens on all ranks: "
            "--moe-token-dispatcher-type alltoall"
        )
    if kinds == {InputKind.MICROBATCHES}:
        return (
            f"{finding.group} has ranks with other numbers of microbatches, and each microbatch "
            "calls it: pad the last microbatches instead of leaving them out"
        )
    return ""
