"""A program cut into steps, and into what the scheduler does between them."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from megatron_prism.core.programs.ops import CODE, DTYPE_NAMES, IS_PAIR, PHASE_NAMES, STEPS
from megatron_prism.core.programs.program import Program
from megatron_prism.core.world import World

Member = tuple[int, int]  # phase, chunk
Kind = tuple[object, ...]

FORWARD, BACKWARD, _WEIGHT = map(PHASE_NAMES.index, STEPS)
_SHAPE = DTYPE_NAMES.index("int64")  # of what messages say of tensors to come
_SYNCS = [CODE[name] for name in ("grad_sync", "param_sync", "mark", "host_wait")]


class Cut:
    """A program cut into pieces: steps, and what lies between them, cut behind every message.

    A step is the span of the ops of one forward or backward; spans that overlap are one step.  A
    message is a send or receive of the pipeline, or the wait for one.

    Attributes:
        members: Of every step the microbatch by phase and chunk.
        shapes: Of every step its phases and chunks, sorted.
        bounds: int64 [pieces + 1], the op at which each piece begins, and the end.
        places: Of a step (number of the step, -1); of another piece (number of the step behind it,
            its place between the two steps).
        steps: The piece of every step.
        messages_before: Of every step how many messages come before its begin and before its end.
        is_synced: bool [messages], whether the host waits for the device behind each.
    """

    def __init__(self, program: Program, world: World, like: Cut | None = None) -> None:
        """Cut a program.

        Args:
            program: The program of one rank.
            world: Its world.
            like: The same order as the scheduler has it, whose steps have the messages that these
                steps shall have: a forward beside a backward reads its batch before the wait that
                the scheduler has ahead of both.
        """
        self.program = program
        self.is_pipeline = _find_pipeline_messages(program)
        self.stages = _stages_to_peers(program, world)
        self.members: list[dict[Member, int]] = []
        spans = self._find_steps()
        # the steps of the scheduler say what of the program is in a step
        if like is not None:
            self.members = like.members
            self._move_spans(spans, like)
        span_array = np.array(spans).reshape(-1, 2)
        before = np.searchsorted(self.message_ops, span_array)
        self.messages_before: list[list[int]] = before.tolist()
        self.shapes = [tuple(sorted(members)) for members in self.members]

        # behind a batch of messages the scheduler waits for the device
        host_waits = np.flatnonzero(program.ops["name"] == CODE["host_wait"])
        self.is_synced = np.isin(self.message_ops + 1, host_waits)
        if like is not None:
            self.is_synced = like.is_synced
        self.places: list[tuple[int, int]] = []
        self.bounds = self._cut_at(spans, host_waits)
        self.steps = [piece for piece, (_, place) in enumerate(self.places) if place < 0]

    def _find_steps(self) -> list[list[int]]:
        """Fill ``members``, and find the span [first op, op behind] of every step."""
        ops = self.program.ops
        phase = phases_of_steps(ops)
        is_work = np.isin(phase, (FORWARD, BACKWARD)) & ~self.is_pipeline
        is_labelled = ops["microbatch"] >= 0
        work_ops = np.flatnonzero(is_labelled & is_work)
        work = ops[work_ops]
        columns = [work["microbatch"], work["chunk"], phase[work_ops]]
        labels = np.stack(columns, axis=1).astype(np.int64)
        keys, key_of_op = np.unique(labels, axis=0, return_inverse=True)

        # first and last op of every label (microbatch, chunk, phase)
        keys_of_ops = key_of_op.ravel()
        first_ops = np.full(len(keys), len(ops))
        last_ops = np.full(len(keys), -1)
        np.minimum.at(first_ops, keys_of_ops, work_ops)
        np.maximum.at(last_ops, keys_of_ops, work_ops)

        # in order of their begin; one that begins within the step before belongs to it
        spans: list[list[int]] = []
        for label in np.argsort(first_ops).tolist():
            first_op = int(first_ops[label])
            end = int(last_ops[label]) + 1
            if not spans or first_op >= spans[-1][1]:
                self.members.append({})
                spans.append([first_op, end])
            microbatch, chunk, step_phase = keys[label].tolist()
            step_members = self.members[-1]
            step_members[step_phase, chunk] = microbatch
            spans[-1][1] = max(spans[-1][1], end)
        return spans

    def _move_spans(self, spans: list[list[int]], like: Cut) -> None:
        """Move the ends of spans until as many messages are before each as in another cut."""
        ends_of_messages = (1 + self.message_ops).tolist()
        end = len(self.program.ops) + 1
        limits = [0, *ends_of_messages, end]
        for step, span in enumerate(spans):
            for side, before in enumerate(like.messages_before[step]):
                earliest = limits[before]
                latest = limits[before + 1] - 1
                later = max(span[side], earliest)
                span[side] = min(later, latest)

    def _cut_at(self, spans: Sequence[Sequence[int]], host_waits: np.ndarray) -> np.ndarray:
        """Fill ``places``, and find where every piece begins, and the end.

        Args:
            spans: Of every step its first op and the op behind it.
            host_waits: The ops at which the host waits for the device.
        """
        bounds = [0]
        for step, (start, end) in enumerate(spans):
            self._cut_between(bounds, step, start, host_waits)
            bounds.append(end)
            self.places.append((step, -1))
        self._cut_between(bounds, len(spans), len(self.program.ops), host_waits)
        return np.array(bounds, dtype=np.int64)

    def _cut_between(
        self, bounds: list[int], step: int, start: int, host_waits: np.ndarray
    ) -> None:
        """Cut what lies between the last bound and a step, behind each message and host wait."""
        last_bound = bounds[-1]
        first, behind = np.searchsorted(self.message_ops, [last_bound, start]).tolist()
        cuts: list[int] = []
        for message in range(first, behind):
            message_end = int(self.message_ops[message]) + 1
            cuts.append(message_end)
            if not self.is_synced[message]:
                continue

            # the host's wait is a piece of its own, empty if the program has none
            stop = start
            if message + 1 < behind:
                stop = int(self.message_ops[message + 1])
            wait_end = message_end
            next_wait = int(np.searchsorted(host_waits, message_end))
            if next_wait < len(host_waits) and host_waits[next_wait] < stop:
                wait_end = int(host_waits[next_wait]) + 1
            cuts.append(wait_end)
        bounds += cuts
        bounds.append(start)
        self.places += [(step, place) for place in range(len(cuts) + 1)]

    def __len__(self) -> int:
        """Count the pieces."""
        return len(self.places)

    def is_step(self, piece: int) -> bool:
        """Say whether a piece is a step, or lies between steps."""
        _, place = self.places[piece]
        return place < 0

    def shape(self, piece: int) -> Kind:
        """Give the phases and chunks of a step; of another piece those of the steps around it."""
        step, _ = self.places[piece]
        if self.is_step(piece):
            return self.shapes[step]
        before = self.shape_of_step(step - 1)
        behind = self.shape_of_step(step)
        return before, behind

    def shape_of_step(self, step: int) -> tuple[Member, ...]:
        """Give the phases and chunks of a step; nothing if there is no such step."""
        is_in_iteration = 0 <= step < len(self.shapes)
        if is_in_iteration:
            return self.shapes[step]
        return ()

    @cached_property
    def issuers(self) -> np.ndarray:
        """int64 [n]: the op that made the handle that each op has or waits for; -1: none."""
        ops = self.program.ops
        issuers = np.full(len(ops), -1, dtype=np.int64)
        # handle -> the last op that made it
        last_issuers: dict[int, int] = {}
        has_handle = ops["handle"] >= 0
        is_wait = ops["name"] == CODE["wait"]
        for op in np.flatnonzero(has_handle).tolist():
            handle = int(ops["handle"][op])
            if not is_wait[op]:
                last_issuers[handle] = op
            issuers[op] = last_issuers.get(handle, -1)
        return issuers

    @cached_property
    def message_ops(self) -> np.ndarray:
        """int64: sends and receives of the pipeline and the waits for them."""
        names, issuers = self.program.ops["name"], self.issuers
        is_wait = names == CODE["wait"]
        is_issued = issuers >= 0
        is_for_message = self.is_pipeline[issuers]
        is_wait_for_message = is_wait & is_issued & is_for_message
        return np.flatnonzero(self.is_pipeline | is_wait_for_message)

    @cached_property
    def messages(self) -> list[list[int]]:
        """Of every piece its messages: between steps at most one."""
        return self._by_piece(self.message_ops)

    @cached_property
    def syncs(self) -> list[list[int]]:
        """Of every piece what the scheduler asks for: gradients, parameters."""
        is_sync = np.isin(self.program.ops["name"], _SYNCS)
        return self._by_piece(np.flatnonzero(is_sync))

    def _by_piece(self, ops: np.ndarray) -> list[list[int]]:
        """Give the ops of every piece."""
        ops_of_piece: list[list[int]] = [[] for _ in range(len(self))]
        pieces = self.piece_of(ops).tolist()
        for op, piece in zip(ops.tolist(), pieces, strict=True):
            ops_of_piece[piece].append(op)
        return ops_of_piece

    def piece_of(self, ops: np.ndarray) -> np.ndarray:
        """int64: the piece in which each op lies; the last one for what is behind all ops."""
        places = np.searchsorted(self.bounds, ops, side="right") - 1
        last_piece = len(self) - 1
        return np.asarray(np.clip(places, 0, last_piece))

    def describe_messages(self, ops: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Say of messages what each is and how many stages it goes."""
        names = self.program.ops["name"]
        messages: list[tuple[int, int]] = []
        for op in ops:
            name, stages = int(names[op]), int(self.stages[op])
            messages.append((name, stages))
        return tuple(messages)

    @cached_property
    def requests_between(self) -> list[Kind]:
        """All that the scheduler does before each step, and behind the last."""
        requests: list[Kind] = [()] * (len(self.members) + 1)
        for piece, (step, _) in enumerate(self.places):
            if not self.is_step(piece):
                requests[step] += (self.requests(piece),)
        return requests

    @cached_property
    def most_alive(self) -> Counter[int | None]:
        """Forwards of every chunk, and of all (None), whose backwards have not come, at most."""
        alive = Counter[int | None]()
        peaks = Counter[int | None]()
        members = itertools.chain(*self.members)
        for phase, chunk in members:
            # a forward comes, a backward takes one away
            change = -1
            if phase == FORWARD:
                change = 1
            for key in (chunk, None):
                alive[key] += change
                peaks[key] = max(peaks[key], alive[key])
        return peaks

    def requests(self, piece: int) -> Kind:
        """Give all that the scheduler does in a piece.

        Shapes are other messages than tensors, and so are messages that have others beside them in
        their batch.
        """
        ops, strings = self.program.ops, self.program.strings
        message_ops = self.messages[piece]
        requests: list[object] = [self.describe_messages(message_ops)]

        # messages: tensors or shapes, and the batch of each
        message_rows = ops[message_ops]
        is_shape = message_rows["dtype"] == _SHAPE
        requests += is_shape.tolist()
        for batch in message_rows["batch"].tolist():
            requests.append(self._batches.get(batch, ()))

        # gradients and parameters: which, and of which chunk
        for op in self.syncs[piece]:
            row = ops[op]
            name, chunk = int(row["name"]), int(row["chunk"])
            note = strings[row["note"]]
            requests.append((name, chunk, note))
        return tuple(requests)

    @cached_property
    def _batches(self) -> Mapping[int, Kind]:
        """The messages of every batch, by its number."""
        batches = defaultdict[int, Kind](tuple)
        batch_of_op = self.program.ops["batch"]
        for op in np.flatnonzero(batch_of_op >= 0).tolist():
            batches[int(batch_of_op[op])] += self.describe_messages([op])
        return batches

    def same_order(self, schedule: Cut) -> bool:
        """Say whether a schedule has the same steps and messages in the same order.

        What a forward and a backward of the schedule do at once may count as one of them.
        """
        # the same steps
        if len(self.members) != len(schedule.members):
            return False
        for members, scheduled in zip(self.members, schedule.members, strict=True):
            if not members.items() <= scheduled.items():
                return False

        # the same messages
        messages = self.describe_messages(self.message_ops)
        if messages != schedule.describe_messages(schedule.message_ops):
            return False

        # a forward beside a backward reads its batch before a wait that the schedule has ahead
        is_combined = any(len(members) > 1 for members in schedule.members)
        return is_combined or self.messages_before == schedule.messages_before


def phases_of_steps(ops: np.ndarray) -> np.ndarray:
    """Give the phase of every op; gradients of weights count as backwards."""
    return np.where(ops["phase"] == _WEIGHT, BACKWARD, ops["phase"])


def starts_of_forwards(program: Program, world: World) -> tuple[dict[int, int], int]:
    """Find the first op of the first forward of every microbatch.

    Args:
        program: The program of one rank.
        world: Its world.

    Returns:
        Microbatch -> op, and how many microbatches follow each other through one chunk.
    """
    cut = Cut(program, world)
    all_members = itertools.chain(*cut.members)
    forwards = [member for member in all_members if member[0] == FORWARD]
    if not forwards:
        return {}, 1

    # the first forward of a microbatch is that of the first chunk
    first_forward = min(forwards)
    starts: dict[int, int] = {}
    for members, piece in zip(cut.members, cut.steps, strict=True):
        if first_forward in members:
            microbatch = members[first_forward]
            starts[microbatch] = int(cut.bounds[piece])

    # without chunks microbatches take turns
    _, chunk = first_forward
    if chunk < 0:
        return starts, 1
    return starts, microbatch_group_size(cut)


def microbatch_group_size(cut: Cut) -> int:
    """Count the microbatches that follow each other through one chunk, by order of forwards."""
    members = itertools.chain(*cut.members)
    chunks = [chunk for phase, chunk in members if phase == FORWARD]
    size = 0
    for chunk in chunks:
        if chunk != chunks[0]:
            break
        size += 1
    return size


def _find_pipeline_messages(program: Program) -> np.ndarray:
    """bool [n]: sends and receives between stages."""
    ops = program.ops
    names_pipeline: list[bool] = []
    for text in program.strings:
        is_group = "PIPELINE_MODEL_PARALLEL" in text
        is_file = "p2p_communication.py" in text
        names_pipeline.append(is_group or is_file)

    # by the group of a message, or by where it was called
    by_string = np.array(names_pipeline, dtype=bool)
    is_of_group, is_of_site = by_string[ops["group"]], by_string[ops["site"]]
    is_pair = IS_PAIR[ops["name"]]
    return np.asarray(is_pair & (is_of_group | is_of_site))


def _stages_to_peers(program: Program, world: World) -> np.ndarray:
    """int64 [n]: how many stages ahead the peer of each message is, modulo pp; 0 for other ops.

    ``peer`` is an offset from the own place in the message's group.  Two stages exchange in two
    groups, one of them everybody's, in which peers are farther away
    (core/pipeline_parallel/p2p_communication.py:65 @0.16.1).
    """
    ops, rank = program.ops, program.rank
    is_pipeline_group = ["PIPELINE_MODEL_PARALLEL" in text for text in program.strings]
    by_string = np.array(is_pipeline_group, dtype=bool)
    in_pipeline_group = by_string[ops["group"]]

    # in a group of stages a peer counts stages, in the group of all ranks it counts ranks
    own_stage = world.coordinates(rank).pp
    peer = ops["peer"].astype(np.int64)
    peer_rank = (rank + peer) % world.size
    peer_stage = np.asarray(world._along("pp", peer_rank))
    distance = np.where(in_pipeline_group, peer, peer_stage - own_stage)
    stages = distance % world.pp
    return np.asarray(np.where(IS_PAIR[ops["name"]], stages, 0))
