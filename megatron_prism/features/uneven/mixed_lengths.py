"""Programs of iterations whose microbatches have different lengths.

In : captures of one job at several lengths.  Out: programs in which each microbatch does what the
capture of its length does.  Only where all captures do the same ops in the same order can one
microbatch be taken from one and the next from another; where they do not, that is refused.  Calls
of other lengths have sizes that follow from the captured ones (``between_lengths``), or are
refused.  Such programs have no times.

Messages between stages have no microbatch of their own; ``stage_messages`` says which one they are
of.  Without ``variable_seq_lengths`` a stage receives tensors of ``--seq-length`` whatever is sent
(core/pipeline_parallel/schedules.py:1946 get_tensor_shapes @0.16.1); with it, the shape goes ahead
(p2p_communication.py:165 _communicate_shapes).  The counts of an all-to-all follow what other ranks
send, since dispatchers exchange them first (core/transformer/moe/token_dispatcher.py), so they are
left out; ``expert_dispatch`` has the rules of the flex dispatcher.  Of a tensor-parallel group the
first rank broadcasts the batch, and the others receive it into tensors of ``--seq-length``
(core/utils.py:2167 get_batch_on_this_tp_rank @0.19.2, training/utils.py:517 @0.16.1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from megatron_prism.core.errors import ProgramError, UnsupportedError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import CODE, IS_CALL, Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.features.uneven.between_lengths import op_between
from megatron_prism.features.uneven.expert_dispatch import (
    DispatchRule,
    dispatch_rule,
    is_routing_map,
)
from megatron_prism.features.uneven.stage_messages import Crossing, StageMessages, read_messages

# settings that follow from the length
_OF_LENGTH = (
    "seq_length",
    "max_position_embeddings",
    "encoder_seq_length",
    "decoder_seq_length",
    "max_sequence_length",
)
# columns that are alike in captures of one job, whatever the length
_ALIKE = (
    "name",
    "dtype",
    "reduce",
    "phase",
    "microbatch",
    "chunk",
    "peer",
    "root",
    "batch",
    "handle",
)
_ALIKE_TEXTS = ("group", "stream")
_BATCH_FILES = ("core/utils.py", "training/utils.py")  # of get_batch_on_this_tp_rank
_FIX = "capture the job at one length for each of these ranks: programs=RANKS:DIR"


class LengthCaptures:
    """Captures of one job at several lengths.

    Attributes:
        captured: The capture whose ``--seq-length`` is that of the job.
        by_length: Tokens of a sample -> the capture.
        microbatches: Of an iteration.
        lengths_vary: Whether stages send shapes ahead of tensors (``variable_seq_lengths``).
        dispatch_rule: What the flex dispatcher does with other counts of tokens.
    """

    def __init__(self, captured: Programs, others: Sequence[Programs]) -> None:
        """Check that all are one job.

        Args:
            captured: The capture whose ``--seq-length`` is that of the job.
            others: The same job at other lengths.

        Raises:
            ProgramError: Captures are of different jobs, or of one length.
        """
        self.captured = captured
        settings = _settings(captured)
        self.by_length = {sequence_length(captured): captured}
        for other in others:
            length = sequence_length(other)
            if length in self.by_length:
                raise ProgramError(
                    f"two captures are of {length} tokens", fix="leave one of them out"
                )
            _check_same_job(captured, other)
            self.by_length[length] = other
        self._readable: dict[int, list[Op]] = {}  # by id of a captured program
        self.microbatches = captured.num_microbatches
        self.lengths_vary = settings.get("variable_seq_lengths", "").lower() == "true"
        self.dispatch_rule = dispatch_rule(settings)
        self._messages: dict[int, StageMessages] = {}  # by rank of a captured program
        self._of_count: dict[int, LengthCaptures] = {}  # by number of microbatches

    def of_count(
        self, count: int, scheduler: Callable[[Programs, int], Programs]
    ) -> LengthCaptures:
        """Return captures of the job with another number of microbatches.

        Args:
            count: Microbatches of an iteration.
            scheduler: Puts captured steps into the order of that many.

        Raises:
            PrismError: As the scheduler does.
        """
        if count == self.microbatches:
            return self
        if count not in self._of_count:
            others: list[Programs] = []
            for capture in self.by_length.values():
                if capture is not self.captured:
                    others.append(scheduler(capture, count))
            self._of_count[count] = LengthCaptures(scheduler(self.captured, count), others)
        return self._of_count[count]

    def programs_of(self, lengths: Sequence[int]) -> Programs:
        """Make the world in which microbatches have these lengths.

        Args:
            lengths: Tokens of a sample of each microbatch; one: of all of them.

        Raises:
            ProgramError: There is no capture of a length, their number is not that of the
                microbatches, or the captures do different ops.
        """
        wanted = list(lengths)
        self.check_lengths(wanted)
        if len(wanted) == 1:
            wanted = wanted * self.microbatches
        if len(wanted) != self.microbatches:
            raise ProgramError(
                f"{len(wanted)} lengths for {self.microbatches} microbatches",
                fix="a length for each microbatch, or one for all",
            )
        between = [length for length in wanted if length not in self.by_length]
        # what lies between is read from two captures at least
        if between and len(self.by_length) < 2:
            length = between[0]
            sorted_lengths = sorted(self.by_length)
            captured = ", ".join(map(str, sorted_lengths))
            raise ProgramError(
                f"no capture is of {length} tokens; there are {captured}",
                fix=f"prism capture … seq_length={length} -o DIR, then capture=DIR",
            )
        mixed: list[Program] = []
        receiving: list[Program] = []
        for number, base in enumerate(self.captured.programs):
            # a length between captures needs all of them
            programs = {
                length: capture.programs[number]
                for length, capture in self.by_length.items()
                if between or length in wanted
            }
            mixed_program = self._mixed(base, programs, wanted)
            mixed.append(mixed_program)
            receiving.append(self._receiving_batches(mixed_program, base))
        # without broadcast batches all ranks of a class do the same
        if all(program is mixed[number] for number, program in enumerate(receiving)):
            return dataclasses.replace(self.captured, programs=tuple(mixed))
        program_of = self.captured.program_of + len(mixed)
        roots = self.captured.world.matching(tp=0)
        program_of[roots] = self.captured.program_of[roots]
        all_programs = (*mixed, *receiving)
        return dataclasses.replace(self.captured, programs=all_programs, program_of=program_of)

    def check_lengths(self, lengths: Iterable[int]) -> None:
        """Check that Megatron can cut samples of these lengths into equal parts.

        A sample is cut into two parts for each rank of context parallelism
        (core/utils.py:2027 get_batch_on_this_cp_rank @0.16.1), and what such a rank has into one
        for each rank of a tensor-parallel group with sequence parallelism
        (core/tensor_parallel/mappings.py:67 @0.16.1).

        Args:
            lengths: Tokens of samples.

        Raises:
            ProgramError: A length is no multiple of the parts.
        """
        world = self.captured.world
        parts = 1
        reasons: list[str] = []
        if world.cp > 1:
            parts = 2 * world.cp
            reasons.append(f"2 x cp = {parts}")
        if world.tp > 1 and _settings(self.captured).get("sequence_parallel", "").lower() == "true":
            of_sequence = world.cp * world.tp
            parts = math.lcm(parts, of_sequence)
            reasons.append(f"cp x tp = {of_sequence}, for sequence parallelism")
        for length in lengths:
            if length % parts:
                raise ProgramError(
                    f"{length} tokens cannot be cut into equal parts: Megatron needs a multiple of "
                    f"{' and of '.join(reasons)}",
                    fix=f"samples padded to {-(-length // parts) * parts} tokens",
                )

    def _receiving_batches(self, mixed: Program, base: Program) -> Program:
        """Make the program of ranks that receive broadcast batches; the same if there are none."""
        mixed_ops = list(mixed)
        ops = mixed_ops.copy()
        for place in np.flatnonzero(base.ops["name"] == CODE["broadcast"]).tolist():
            own_op = self._ops(base)[place]
            if is_batch(own_op):
                ops[place] = own_op
        if ops == mixed_ops:
            return mixed
        return Program.from_ops(base.rank, ops)

    def check_aligned(self) -> None:
        """Raise ProgramError unless all captures do the same ops, of any sizes."""
        for length, capture in self.by_length.items():
            for number, base in enumerate(self.captured.programs):
                program = capture.programs[number]
                _check_aligned(base, program, length)

    def microbatch_of_ops(self, base: Program) -> np.ndarray:
        """Say which microbatch each op belongs to: int64 [ops], -1: none.

        Raises:
            UnsupportedError: A message is of no one microbatch.
        """
        messages = self.messages_of(base)
        is_tensor = (messages.microbatch >= 0) & ~messages.is_shape
        return np.where(is_tensor, messages.microbatch, base.ops["microbatch"])

    def messages_of(self, base: Program) -> StageMessages:
        """Say what each message of a captured program carries.

        Raises:
            UnsupportedError: A message is of no one microbatch.
        """
        rank = base.rank
        if rank not in self._messages:
            messages = read_messages(base, self.captured)
            highest = int(messages.microbatch.max(initial=-1))
            if highest >= self.microbatches:
                raise UnsupportedError(
                    f"rank {rank} has a message of microbatch {highest} and {self.microbatches} "
                    "microbatches, so lengths of messages are not known",
                    fix=_FIX,
                )
            self._messages[rank] = messages
        return self._messages[rank]

    def crossings(self) -> list[tuple[int, Crossing]]:
        """List each rank's first receive of a tensor that gets another one than it is for."""
        crossings: list[tuple[int, Crossing]] = []
        for base in self.captured.programs:
            messages = self.messages_of(base)
            for crossing in messages.crossed:
                # a shape that crossed shows in the size of what is received
                if not messages.is_shape[crossing.receive]:
                    crossings.append((base.rank, crossing))
                    break
        return crossings

    def _ops(self, program: Program) -> list[Op]:
        """Read all ops of a captured program once."""
        key = id(program)
        if key not in self._readable:
            self._readable[key] = list(program)
        return self._readable[key]

    def _mixed(self, base: Program, programs: Mapping[int, Program], wanted: list[int]) -> Program:
        """Make one program of which each microbatch comes from the program of its length."""
        for length, program in programs.items():
            _check_aligned(base, program, length)
        messages = self.messages_of(base)
        microbatch_of_op = self.microbatch_of_ops(base)
        base_ops = self._ops(base)
        ops_of_length: dict[int, list[Op]] = {}
        for length, program in programs.items():
            ops_of_length[length] = self._ops(program)
        ops: list[Op] = []
        for place, microbatch in enumerate(microbatch_of_op.tolist()):
            own_op = base_ops[place]
            # outside of microbatches nothing may depend on lengths
            if microbatch < 0:
                for length, other_ops in ops_of_length.items():
                    _check_equal_call(own_op, other_ops[place], length)
                ops.append(own_op)
                continue
            length = wanted[microbatch]
            # a receive is as long as the shape that came ahead
            shape_from = int(messages.shape_from[place])
            if self.lengths_vary and shape_from >= 0:
                length = wanted[shape_from]
            if length in programs:
                op = ops_of_length[length][place]
            else:
                op = op_between(ops_of_length, place, length)
            # the buffer of a receive is as long as --seq-length says
            is_between_stages = messages.microbatch[place] >= 0
            if op.name == "recv" and is_between_stages and not self.lengths_vary:
                op = own_op
            # padded to the longest of the group: alike on all its ranks
            if self.dispatch_rule is DispatchRule.PADDED and is_routing_map(op):
                op = own_op
            # splits follow what other ranks send, which dispatchers exchange first
            if op.name == "all_to_all":
                op = dataclasses.replace(op, splits=None)
            ops.append(op)
        return Program.from_ops(base.rank, ops)


def is_batch(op: Op) -> bool:
    """Whether a call broadcasts a part of the batch that others expect to have --seq-length.

    What describes packed documents (int32) has a size that is sent ahead.
    """
    if op.name != "broadcast" or op.phase != "forward" or op.dtype == "int32":
        return False
    return op.site.startswith(_BATCH_FILES)


def sequence_length(programs: Programs) -> int:
    """Say how many tokens a sample of a capture has.

    Raises:
        ProgramError: The capture does not say it.
    """
    length = _settings(programs).get("seq_length", "")
    if not length.isdecimal():
        raise ProgramError(
            f"{programs.path or 'a capture'} does not say how long its sequences are",
            fix="programs that prism capture wrote, of a job with --seq-length",
        )
    return int(length)


def _settings(programs: Programs) -> dict[str, str]:
    """Return the settings of a capture by Megatron's names."""
    return job_settings.of_source(programs.source)


def _check_same_job(captured: Programs, other: Programs) -> None:
    """Raise ProgramError if two captures differ in more than their lengths."""
    fix = "capture the same job with another --seq-length and nothing else"
    if other.world != captured.world:
        message = f"{other.path} is of another world: {other.world}, not {captured.world}"
        raise ProgramError(message, fix=fix)
    settings, other_settings = _settings(captured), _settings(other)
    for name in sorted({*settings, *other_settings} - {*_OF_LENGTH}):
        value, other_value = settings.get(name), other_settings.get(name)
        if value != other_value:
            texts = [text or "its default" for text in (other_value, value)]
            message = f"{other.path} has {name} {texts[0]}, not {texts[1]}"
            raise ProgramError(message, fix=fix)
    if not np.array_equal(captured.program_of, other.program_of):
        raise ProgramError(f"{other.path} has other equivalent ranks", fix=fix)


def _check_aligned(base: Program, program: Program, length: int) -> None:
    """Raise ProgramError unless two programs do the same ops, of any sizes."""
    if len(base) != len(program):
        message = f"with {length} tokens rank {base.rank} does {len(program)} ops, not {len(base)}"
        raise ProgramError(message, fix=_FIX)
    is_unlike = np.zeros(len(base), dtype=bool)
    for name in _ALIKE:
        is_unlike |= base.ops[name] != program.ops[name]
    for name in _ALIKE_TEXTS:
        texts, other_texts = np.array(base.strings), np.array(program.strings)
        codes, other_codes = base.ops[name], program.ops[name]
        is_unlike |= texts[codes] != other_texts[other_codes]
    places = np.flatnonzero(is_unlike)
    if places.size:
        op = base[int(places[0])]
        message = f"with {length} tokens rank {base.rank} does another op than {op.label} {op.name}"
        raise ProgramError(message, fix=_FIX)


def _check_equal_call(op: Op, other: Op, length: int) -> None:
    """Raise ProgramError if a call outside of microbatches has another size."""
    is_call = bool(IS_CALL[CODE[op.name]])
    if is_call and (op.num_in, op.num_out) != (other.num_in, other.num_out):
        raise ProgramError(
            f"{op.name} in {op.group} @{op.site} belongs to no microbatch and is another one with "
            f"{length} tokens",
            fix=_FIX,
        )
