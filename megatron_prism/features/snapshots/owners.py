"""Whose blocks of a snapshot are, where a single stack does not say it.

In : allocations of one process in order, with the Python frames of each.  Out: kinds of blocks as
in memory/peaks.py.  A snapshot has no types of tensors, so what one function makes is told apart by
lines, order and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Megatron-FSDP makes all buffers of a model in this function: for each group of parameters those of
# its weights, then of its main weights; behind that loop those of all gradients
FSDP_FILE = "megatron_fsdp/param_and_grad_buffer.py"
_FSDP_FUNCTION = "_init_each_parameter_group_buffers"
# Transformer Engine's FusedAdam makes in this function two moments of a parameter, then, with
# master weights, the parameter in FP32
_ADAM_FILE = "optimizers/fused_adam.py"
_ADAM_FUNCTION = "initialize_state"
# Megatron's distributed optimizer copies its shards of parameters here, and its other optimizers
# all parameters, beside scalars
_SHARDS_FILE = "core/optimizer/distrib_optimizer.py"
_SHARDS_FUNCTION = "_build_model_and_main_param_groups"
_COPIES_FILE = "core/optimizer/optimizer.py"
_COPIES_FUNCTION = "__init__"
_MAKERS = {
    (FSDP_FILE, _FSDP_FUNCTION),
    (_ADAM_FILE, _ADAM_FUNCTION),
    (_SHARDS_FILE, _SHARDS_FUNCTION),
    (_COPIES_FILE, _COPIES_FUNCTION),
}
_SCALAR_BYTES = 4
_TOKEN_BYTES = 8  # of a token: int64


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Maker:
    """The line of a function that makes blocks of several kinds.

    Attributes:
        function: Its name.
        line: In its file.
        nested: Whether another function, which it calls, asks for the block.
    """

    function: str
    line: int
    nested: bool


def maker_of(frames: Sequence[Frame]) -> Maker | None:
    """Return the line of a function that makes blocks of several kinds; None: no such function.

    Args:
        frames: Innermost first.
    """
    for depth, frame in enumerate(frames):
        for file, function in _MAKERS:
            if frame.function == function and frame.file.endswith(file):
                return Maker(frame.function, frame.line, depth > 0)
    return None


def gets_batch(function: str) -> bool:
    """Say whether a function's name is that of one which gets a batch of the data loader."""
    return function.startswith("get_batch")


def kinds_of_makers(blocks: Sequence[tuple[Maker, int]]) -> dict[Maker, str]:
    """Return the kind of what each line makes.

    Args:
        blocks: (line, bytes) of each block, in the order in which they came.
    """
    kinds: dict[Maker, str] = {}
    # buffers of Megatron-FSDP; a block that another function asks for is a bucket of weights
    buffers: list[tuple[Maker, int]] = []
    has_buckets = False
    lines_of_adam: set[int] = set()
    for maker, size in blocks:
        if maker.function == _ADAM_FUNCTION:
            lines_of_adam.add(maker.line)
        elif maker.function == _FSDP_FUNCTION and maker.nested:
            has_buckets = True
        elif maker.function == _FSDP_FUNCTION:
            buffers.append((maker, size))
    kinds.update(_kinds_of_fsdp(buffers, has_buckets))

    # without a third line there are no master weights
    lines_of_masters = sorted(lines_of_adam)[2:]
    for maker, size in blocks:
        if maker.function == _SHARDS_FUNCTION:
            kinds[maker] = "master"
        elif maker.function == _ADAM_FUNCTION:
            kinds[maker] = "master" if maker.line in lines_of_masters else "optim"
        # what one line makes is scalars, or copies of parameters
        elif maker.function == _COPIES_FUNCTION and size > _SCALAR_BYTES:
            kinds[maker] = "master"
    return kinds


def _kinds_of_fsdp(blocks: Sequence[tuple[Maker, int]], has_buckets: bool) -> dict[Maker, str]:
    """Return the kind of each line of Megatron-FSDP that makes buffers.

    Args:
        blocks: (line, bytes) of each buffer, in the order in which they came.
        has_buckets: Whether buckets of weights are gathered there: weights have buffers.
    """
    makers = sorted({maker for maker, _ in blocks}, key=lambda maker: maker.line)
    # no buffers of Megatron-FSDP
    if not makers:
        return {}
    positions: dict[Maker, list[int]] = {maker: [] for maker in makers}
    num_bytes: Counter[Maker] = Counter()
    for position, (maker, size) in enumerate(blocks):
        positions[maker].append(position)
        num_bytes[maker] += size

    # lines of the loop over groups take turns; of a single group all but the last line are its own
    masters = makers[-2] if len(makers) > 1 else makers[0]
    for lower, higher in pairwise(makers):
        if positions[higher][0] < positions[lower][-1]:
            masters = higher

    # one line alone in front of the gradients: the weights' own, where there are no main weights
    is_alone = masters is makers[0]
    smaller_than_gradients = num_bytes[masters] < num_bytes[makers[-1]]
    has_masters = not (is_alone and (has_buckets or smaller_than_gradients))

    kinds: dict[Maker, str] = {}
    for maker in makers:
        # lines behind the main weights make gradients
        if maker.line > masters.line:
            kinds[maker] = "grad"
        elif maker is masters and has_masters:
            kinds[maker] = "master"
        else:
            kinds[maker] = "param"
    return kinds


@dataclass
class LoadedBatch:
    """Blocks that functions which get a batch make, one behind the other.

    Attributes:
        whole: (block, bytes) of whole samples.
        of_rank: The same, of the part that a context-parallel rank takes of them.
    """

    whole: list[tuple[int, int]] = field(default_factory=list)
    of_rank: list[tuple[int, int]] = field(default_factory=list)

    def add(self, number: int, num_bytes: int, functions: frozenset[str]) -> None:
        """Add a block."""
        blocks = self.whole
        if "get_batch_on_this_cp_rank" in functions:
            blocks = self.of_rank
        blocks.append((number, num_bytes))

    def masks(self) -> Iterator[int]:
        """Yield the blocks that are masks of sequence x sequence, a byte an element.

        With n samples of s tokens, tokens take 8·n·s bytes and a mask n·s².
        """
        sizes = Counter(size for _, size in self.whole)
        token_bytes = _token_bytes(sizes)
        mask_bytes = 0
        for number, size in self.whole:
            if _is_mask(size, token_bytes):
                mask_bytes = size
                yield number

        # a context-parallel rank takes as much of the mask's rows as of the tokens
        sizes_of_rank = Counter(size for _, size in self.of_rank)
        token_bytes_of_rank = _token_bytes(sizes_of_rank)
        if not mask_bytes or not token_bytes_of_rank:
            return
        num_ranks = token_bytes // token_bytes_of_rank
        for number, size in self.of_rank:
            if size * num_ranks == mask_bytes:
                yield number


def _token_bytes(sizes: Counter[int]) -> int:
    """Return bytes of a batch's tokens, 0 where nothing is of their size.

    Labels and positions are as large, the loss mask is half as large.

    Args:
        sizes: How many blocks of a batch have each size.
    """
    candidates = [0]
    for size, count in sizes.items():
        if count > 1 and size % _TOKEN_BYTES == 0 and size // 2 in sizes:
            candidates.append(size)
    return max(candidates)


def _is_mask(num_bytes: int, token_bytes: int) -> bool:
    """Say whether a block has as many elements as a mask of whole samples."""
    num_tokens = token_bytes // _TOKEN_BYTES
    if not num_tokens or num_bytes <= token_bytes:
        return False
    length, rest = divmod(num_bytes, num_tokens)
    return rest == 0 and num_tokens % length == 0
