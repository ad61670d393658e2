"""The loops of replay that visit every node, in a form that runs interpreted and compiled.

In : flat lists or arrays.  Out: the same.  Small graphs run in Python, at once; large ones, and
those after them, are compiled by numba on first use (seconds, kept on disk after that).  One
source, so one result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from megatron_prism.core.errors import UsageError

SMALL = 1_000_000  # elements of all loops up to which compiling (or importing numba) is slower
SHORT = 3  # times as many for loops that do little with an element; numba takes 0.5 s to load
# types of constants that are frozen in compiled functions
_FROZEN = (bool, int, float, complex, str, tuple, np.generic, np.ndarray)
_interpreted = 0  # elements that this process has visited in Python


def run(
    function: Callable[..., None],
    inputs: Sequence[Any],
    changed: Sequence[np.ndarray],
    short: int = 1,
) -> None:
    """``function(*inputs, *changed)`` the fastest way; it changes the arrays ``changed``.

    ``short``: how many times SMALL is still small for this loop.
    """
    global _interpreted
    arguments = (*inputs, *changed)
    size = sum(a.size for a in arguments if isinstance(a, np.ndarray))
    if _interpreted + size // short > SMALL:  # what is small each time adds up
        compiled_function(function)(*arguments)
        return
    _interpreted += size // short
    # Python reads elements of a list faster than those of an array
    lists = list(arguments)
    for place, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            lists[place] = argument.tolist()
    function(*lists)
    for array, values in zip(changed, lists[len(inputs) :], strict=True):
        array[:] = values


@cache
def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` and the functions that it calls, once.

    numba keeps what it compiled on disk, for as long as the file of ``function`` is unchanged.
    Constants are frozen in it, also those of other files, so they are part of its name there.

    Raises:
        UsageError: numba cannot be imported.
    """
    try:
        import numba
    except ImportError as error:
        message = f"numba, which replays large graphs, cannot be imported: {error}"
        raise UsageError(message, fix="pip install numba") from error
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        helper = function.__globals__.get(name)
        if isinstance(helper, FunctionType):
            names[name] = compiled_function(helper)
    linked = FunctionType(function.__code__, names, function.__name__)
    linked.__qualname__ = f"{function.__qualname__}_{_digest_of_reads(function)}"
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(cache=True, nogil=True)(linked)
    except RuntimeError:  # neither the package's folder nor the user's may be written
        compiled = numba.njit(nogil=True)(linked)
    return compiled


def _digest_of_reads(function: Callable[..., object]) -> str:
    """Give a short word for all that a function reads of its module: constants and functions.

    Args:
        function: A function of a module.

    Returns:
        16 hexadecimal digits.
    """
    reads: list[str] = []
    names = sorted(function.__code__.co_names)
    for name in names:
        value = function.__globals__.get(name)
        reads.append(name)
        # it may be of another file, whose changes numba does not see either
        if isinstance(value, FunctionType):
            code = value.__code__
            reads.append(code.co_code.hex())
            reads.append(_constants_of(code))
            reads.append(_digest_of_reads(value))
        elif isinstance(value, _FROZEN):
            reads.append(repr(value))
    text = "\n".join(reads)
    digest = sha256(text.encode())
    return digest.hexdigest()[:16]


def _constants_of(code: CodeType) -> str:
    """Write the constants of a function; code of functions in it has an address."""
    constants: list[str] = []
    for constant in code.co_consts:
        if isinstance(constant, _FROZEN):
            constants.append(repr(constant))
    return " ".join(constants)


def transposed(start: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, after): after[first[i]:first[i + 1]] are the nodes whose predecessor is i."""
    n = len(start) - 1
    first = np.concatenate(([0], np.cumsum(np.bincount(before, minlength=n))))
    followers = np.repeat(np.arange(n, dtype=np.int64), np.diff(start))
    return first, followers[np.argsort(before, kind="stable")]


def order(waiting: np.ndarray, first: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Nodes, predecessors first (Kahn); nodes on and behind a cycle are left out.

    ``waiting`` is how many predecessors each node has.
    """
    return timed(waiting, first, after, np.zeros(len(waiting), dtype=np.int64))[0]


def timed(
    waiting: np.ndarray, first: np.ndarray, after: np.ndarray, durations: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``order`` and, on the way, what ``longest`` finds of its nodes: (order, begin, end)."""
    order = np.full(len(waiting) + 1, -1, dtype=np.int64)
    begin, end = np.zeros_like(durations), np.zeros_like(durations)
    stack = np.zeros_like(order)
    changed = [waiting.copy(), stack, order, begin, end]
    run(_timed, [first, after, durations], changed, SHORT)
    return order[: order[-1]], begin, end


def _timed(first, after, durations, waiting, stack, order, begin, end):  # type: ignore[no-untyped-def]
    n = len(waiting)
    top = count = 0
    for node in range(n):
        if waiting[node] == 0:
            stack[top] = node
            top += 1
    while top:
        top -= 1
        node = stack[top]
        order[count] = node
        count += 1
        ended = begin[node] + durations[node]
        end[node] = ended
        for edge in range(first[node], first[node + 1]):
            follower = after[edge]
            if begin[follower] < ended:
                begin[follower] = ended
            waiting[follower] -= 1
            if waiting[follower] == 0:
                stack[top] = follower
                top += 1
    order[n] = count


def longest(
    order: np.ndarray, start: np.ndarray, before: np.ndarray, durations: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) of every node: it begins when the last of its predecessors has ended."""
    begin, end = np.zeros_like(durations), np.zeros_like(durations)
    run(_longest, [order, start, before, durations], [begin, end], SHORT)
    return begin, end


def _longest(order, start, before, durations, begin, end):  # type: ignore[no-untyped-def]
    for node in order:
        latest = 0
        for edge in range(start[node], start[node + 1]):
            ended = end[before[edge]]
            if ended > latest:
                latest = ended
        begin[node] = latest
        end[node] = latest + durations[node]


def path(start: np.ndarray, before: np.ndarray, end: np.ndarray, node: int) -> np.ndarray:
    """Nodes from the beginning to ``node``, each the last of the predecessors of the next to end
    (the first one of several).
    """
    nodes, count = np.zeros_like(end), np.zeros(1, dtype=np.int64)
    run(_path, [start, before, end, node], [nodes, count], SHORT)
    return nodes[: count[0]][::-1]


def _path(start, before, end, node, nodes, count):  # type: ignore[no-untyped-def]
    nodes[0], length = node, 1
    while start[node] < start[node + 1]:
        latest = before[start[node]]
        for edge in range(start[node] + 1, start[node + 1]):
            if end[before[edge]] > end[latest]:
                latest = before[edge]
        node = latest
        nodes[length] = node
        length += 1
    count[0] = length
