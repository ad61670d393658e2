"""Whose tensors the messages between stages carry.

In : a captured program and its world.  Out: ``StageMessages``: the microbatch of each message.

A stage sends what its steps make, in the order of the steps, and receives what its steps need: the
output of a forward goes to the next stage (from the last stage's chunk to the first stage's next
one), the gradient of a backward to the one before.  With three stages and more the direction says
which of the two a message is.  Two stages with chunks are each other's next and previous one, and
exchange both with one rank: there a message carries what is ready and was not sent yet, and of two
sends of one batch the gradient comes first (core/pipeline_parallel/p2p_communication.py:22
_batched_p2p_ops @0.16.1).

Messages between two ranks have no names; NCCL pairs them in their order.  ``crossed`` are receives
that this order pairs with the other kind of tensor: each side's batch has a send and a receive of
both kinds, and both list the gradient's send first and the gradient's receive last.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.programs.ops import CODE, IS_PAIR, PHASE_NAMES
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.graph.matching import Finding

PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
_SITE = "p2p_communication.py"
_FORWARD = PHASE_NAMES.index("forward")
_BACKWARD = PHASE_NAMES.index("backward")
_SHAPE = "int64"  # of what goes ahead of a tensor
_FIX = "capture the job at one length for each of these ranks: programs=RANKS:DIR"


@dataclass(frozen=True)
class StageTensor:
    """What a message carries: the output of a forward, or the gradient of a backward.

    Attributes:
        phase: forward or backward.
        chunk: Of the step that makes it (of what is received: that takes it); -1: there are no
            chunks.
        microbatch: Of that step.
    """

    phase: str
    chunk: int
    microbatch: int

    @property
    def step(self) -> str:
        """The step that makes it, or that takes it."""
        words = f"{self.phase} of microbatch {self.microbatch}"
        if self.chunk >= 0:
            words += f" of chunk {self.chunk}"
        return words


@dataclass(frozen=True)
class Crossing:
    """A receive that the order of messages pairs with another tensor than the one it is for.

    Attributes:
        receive: The op.
        expected: The tensor that the step of the receiver needs.
        send: The op of the other stage that it is paired with.
        sent: The tensor that comes.
    """

    receive: int
    expected: StageTensor
    send: int
    sent: StageTensor


@dataclass(frozen=True)
class StageMessages:
    """What the messages of one program carry.

    Attributes:
        microbatch: int64 [ops], of the tensor, or of the tensor that a shape goes ahead of; -1:
            no message between stages.
        is_shape: bool [ops], whether it is a shape that goes ahead.
        shape_from: int64 [ops], of receives of tensors the microbatch whose shape came ahead.
        crossed: Receives that get another tensor than they are for.
    """

    microbatch: np.ndarray
    is_shape: np.ndarray
    shape_from: np.ndarray
    crossed: tuple[Crossing, ...]


def read_messages(program: Program, programs: Programs) -> StageMessages:
    """Find what each message of a program carries.

    Args:
        program: Of a class of ranks.
        programs: Of all ranks.

    Raises:
        UnsupportedError: A message is of none of the microbatches, or of more than one.
    """
    world = programs.world
    microbatch = np.full(len(program), -1, dtype=np.int64)
    shape_from = np.full(len(program), -1, dtype=np.int64)
    places = _messages(program)
    is_shape = np.zeros(len(program), dtype=bool)
    for place in places:
        is_shape[place] = _is_shape(program, place)
    if not places:
        return StageMessages(microbatch, is_shape, shape_from, ())
    sent = _sent_tensors(program, world)
    if _meet_twice(world):
        received, paired = _received_of_two_stages(program, programs)
    else:
        received, paired = _received_by_direction(program, world), {}
    for place, tensor in {**sent, **received}.items():
        microbatch[place] = tensor.microbatch
    crossed: list[Crossing] = []
    for place, (send, tensor) in paired.items():
        if tensor.phase != received[place].phase:
            crossed.append(Crossing(place, received[place], send, tensor))

    # a receive has the shape that came ahead of it
    shapes: dict[str, deque[int]] = {"forward": deque(), "backward": deque()}
    for place, tensor in sorted(received.items()):
        if is_shape[place]:
            _, source = paired.get(place, (-1, tensor))
            shapes[tensor.phase].append(source.microbatch)
        else:
            shape_from[place] = tensor.microbatch
            if shapes[tensor.phase]:
                shape_from[place] = shapes[tensor.phase].popleft()
    return StageMessages(microbatch, is_shape, shape_from, tuple(crossed))


def crossing_finding(programs: Programs, rank: int, crossing: Crossing) -> Finding:
    """Show a receive that gets another tensor than it is for.

    Args:
        programs: Of all ranks.
        rank: The receiver.
        crossing: What it gets.
    """
    program = programs.of(rank)
    row = program.ops[crossing.receive]
    group = program.strings[row["group"]]
    members = programs.world.group(rank, group) or ()
    sender = members[(members.index(rank) + int(row["peer"])) % len(members)]
    sending_op = programs.of(sender)[crossing.send]
    receiving_op = program[crossing.receive]

    # its number among all receives of that group
    of_group = program.ops["group"][: crossing.receive + 1] == row["group"]
    is_receive = program.ops["name"][: crossing.receive + 1] == CODE["recv"]
    number = int((of_group & is_receive).sum())
    lines = (
        f"  rank {sender}: what its {crossing.sent.step} made, sent @{sending_op.site}",
        f"  rank {rank}: takes it for its {crossing.expected.step}, received @{receiving_op.site}",
    )
    likely = (
        f"both stages send two messages to each other in one batch, and the first receive of rank "
        f"{rank} meets the first send of rank {sender}; of one length the values are wrong, of "
        "different ones the shapes, too"
    )
    return Finding("order", group, (sender, rank), number, "\n".join(lines), likely)


def _meet_twice(world: World) -> bool:
    """Whether the next stage is the one before, too, and both get outputs and gradients."""
    return world.pp == 2 and world.chunks > 1


def _messages(program: Program) -> list[int]:
    """List the messages between stages."""
    ops = program.ops
    of_pipeline: list[bool] = []
    for text in program.strings:
        of_pipeline.append(text == PIPELINE or _SITE in text)
    is_of_pipeline = np.array(of_pipeline, dtype=bool)
    is_message = IS_PAIR[ops["name"]] & (ops["microbatch"] < 0)
    is_message &= is_of_pipeline[ops["group"]] | is_of_pipeline[ops["site"]]
    return np.flatnonzero(is_message).tolist()


def _is_shape(program: Program, place: int) -> bool:
    """Whether a message is the shape of a tensor that follows."""
    return program[place].dtype == _SHAPE


def _goes_on(program: Program, world: World, place: int) -> bool:
    """Whether a message goes to the next stage, or comes from it; else it is the one before."""
    row = program.ops[place]
    own_stage = world.coordinates(program.rank).pp
    peer = int(row["peer"])
    # in a group of stages a peer counts stages, in that of all ranks it counts ranks
    if program.strings[row["group"]] == PIPELINE:
        distance = peer
    else:
        peer_rank = (program.rank + peer) % world.size
        distance = world.coordinates(peer_rank).pp - own_stage
    distance %= world.pp
    # of two stages without chunks the first one's other is the next
    if world.pp == 2:
        return own_stage == 0
    return distance == 1


# -- steps -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Step:
    """A step of the schedule.

    Attributes:
        tensor: What it makes.
        first: Its first op.
        last: Its last op.
    """

    tensor: StageTensor
    first: int
    last: int


def _steps(program: Program) -> list[_Step]:
    """List forwards and backwards in the order of their ends."""
    ops = program.ops
    is_step = np.isin(ops["phase"], (_FORWARD, _BACKWARD)) & (ops["microbatch"] >= 0)
    first_op: dict[StageTensor, int] = {}
    last_op: dict[StageTensor, int] = {}
    for place in np.flatnonzero(is_step).tolist():
        row = ops[place]
        phase = PHASE_NAMES[row["phase"]]
        tensor = StageTensor(phase, int(row["chunk"]), int(row["microbatch"]))
        first_op.setdefault(tensor, place)
        last_op[tensor] = place
    steps = [_Step(tensor, first_op[tensor], last) for tensor, last in last_op.items()]
    steps.sort(key=lambda step: step.last)
    return steps


def _is_end_of_model(world: World, rank: int, tensor: StageTensor, *, first: bool) -> bool:
    """Whether a step is of the first layers of the model (else: of the last ones)."""
    stage = world.coordinates(rank).pp
    if first:
        return stage == 0 and tensor.chunk <= 0
    return stage == world.pp - 1 and tensor.chunk in (-1, world.chunks - 1)


def _is_sent(world: World, rank: int, tensor: StageTensor) -> bool:
    """Whether what a step makes goes to another stage."""
    return not _is_end_of_model(world, rank, tensor, first=tensor.phase == "backward")


def _needs_message(world: World, rank: int, tensor: StageTensor) -> bool:
    """Whether a step needs what another stage made."""
    return not _is_end_of_model(world, rank, tensor, first=tensor.phase == "forward")


# -- sends -----------------------------------------------------------------------------------------
def _sent_tensors(program: Program, world: World) -> dict[int, StageTensor]:
    """Find the tensor of each send, and of each shape that is sent ahead.

    Raises:
        UnsupportedError: Nothing is ready, or two tensors are and no order says which one it is.
    """
    rank = program.rank
    steps = _steps(program)
    sent: dict[int, StageTensor] = {}
    # a shape does not take the tensor off the queue of its kind
    for is_shape in (False, True):
        ready: dict[str, deque[StageTensor]] = {"forward": deque(), "backward": deque()}
        ended = 0
        for batch in _batches(program, "send", is_shape):
            while ended < len(steps) and steps[ended].last < batch[0]:
                tensor = steps[ended].tensor
                if _is_sent(world, rank, tensor):
                    ready[tensor.phase].append(tensor)
                ended += 1
            phases = _phases_of_sends(program, world, batch, ready)
            for place, phase in zip(batch, phases, strict=True):
                if not ready[phase]:
                    raise _unknown(program, place)
                sent[place] = ready[phase].popleft()
    return sent


def _phases_of_sends(
    program: Program, world: World, batch: Sequence[int], ready: dict[str, deque[StageTensor]]
) -> list[str]:
    """Say of each send of a batch whether it is of a forward or of a backward."""
    if not _meet_twice(world):
        phases: list[str] = []
        for place in batch:
            phase = "backward"
            if _goes_on(program, world, place):
                phase = "forward"
            phases.append(phase)
        return phases
    # a batch lists what goes to the previous stage first
    if len(batch) == 2:
        return ["backward", "forward"]
    if len(batch) > 2:
        raise _unknown(program, batch[0])
    waiting = [phase for phase, tensors in ready.items() if tensors]
    if len(waiting) != 1:
        raise _unknown(program, batch[0])
    return waiting


def _batches(program: Program, name: str, is_shape: bool) -> list[list[int]]:
    """List messages of one kind, those of a batch together."""
    ops = program.ops
    batches: list[list[int]] = []
    last_batch = -1
    for place in _messages(program):
        row = ops[place]
        if row["name"] != CODE[name] or _is_shape(program, place) != is_shape:
            continue
        number = int(row["batch"])
        if number >= 0 and number == last_batch:
            batches[-1].append(place)
        else:
            batches.append([place])
        last_batch = number
    return batches


def _unknown(program: Program, place: int) -> UnsupportedError:
    """Make the refusal of a message whose microbatch is not known."""
    op = program[place]
    return UnsupportedError(
        f"{op.name} @{op.site} (op {place} of rank {program.rank}) is of no one microbatch, so its "
        "length is not known",
        fix=_FIX,
    )


# -- receives --------------------------------------------------------------------------------------
def _steps_in_need(program: Program, world: World) -> dict[str, deque[_Step]]:
    """List steps that need what another stage made, in their order, by phase."""
    needed: dict[str, deque[_Step]] = {"forward": deque(), "backward": deque()}
    steps = sorted(_steps(program), key=lambda step: step.first)
    for step in steps:
        if _needs_message(world, program.rank, step.tensor):
            needed[step.tensor.phase].append(step)
    return needed


def _take(program: Program, needed: dict[str, deque[_Step]], phase: str, place: int) -> StageTensor:
    """Take the next tensor that steps need; UnsupportedError if none needs one after this."""
    if not needed[phase] or needed[phase][0].first < place:
        raise _unknown(program, place)
    return needed[phase].popleft().tensor


def _received_by_direction(program: Program, world: World) -> dict[int, StageTensor]:
    """Find for which step each receive is, where its direction says of which kind it is."""
    received: dict[int, StageTensor] = {}
    for is_shape in (False, True):
        needed = _steps_in_need(program, world)
        for place in itertools.chain(*_batches(program, "recv", is_shape)):
            phase = "forward"
            if _goes_on(program, world, place):
                phase = "backward"
            received[place] = _take(program, needed, phase, place)
    return received


def _received_of_two_stages(
    program: Program, programs: Programs
) -> tuple[dict[int, StageTensor], dict[int, tuple[int, StageTensor]]]:
    """Find for which step each receive is, and what comes.

    Returns:
        Receive -> the tensor that its step needs, and receive -> the send of the other stage that
        it is paired with and what that one carries.
    """
    world = programs.world
    pair = world.group(program.rank, PIPELINE) or ()
    (other_rank,) = [rank for rank in pair if rank != program.rank]
    other = programs.of(other_rank)
    sent = _sent_tensors(other, world)

    # by group the n-th receive meets the n-th send, shapes and tensors in one order
    sends_of_group: dict[str, deque[int]] = {}
    for place in sorted(sent):
        group = other.strings[other.ops["group"][place]]
        sends_of_group.setdefault(group, deque()).append(place)
    paired: dict[int, tuple[int, StageTensor]] = {}
    for place in _messages(program):
        if program.ops["name"][place] != CODE["recv"]:
            continue
        sends = sends_of_group.get(program.strings[program.ops["group"][place]])
        if not sends:
            raise _unknown(program, place)
        send = sends.popleft()
        paired[place] = send, sent[send]

    received: dict[int, StageTensor] = {}
    for is_shape in (False, True):
        needed = _steps_in_need(program, world)
        for batch in _batches(program, "recv", is_shape):
            # a batch lists what comes from the previous stage first
            phases = ["forward", "backward"]
            if len(batch) == 1:
                phases = [paired[batch[0]][1].phase]
            for place, phase in zip(batch, phases, strict=True):
                received[place] = _take(program, needed, phase, place)
    return received, paired
