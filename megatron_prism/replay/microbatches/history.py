"""The requests of a process since it began, with those of a new iteration at their end."""

from __future__ import annotations

import numpy as np

from megatron_prism.core.programs.program import Program
from megatron_prism.replay.microbatches.storages import MemoryChanges

_STORAGE, _BYTES, _LAUNCHES = 0, 1, 3  # columns of a history


def with_new_iteration(program: Program, new: MemoryChanges) -> np.ndarray:
    """Give all requests since the process began, its last iteration replaced by a new one.

    The requests before the iteration stay as captured; storages of the new one get numbers that no
    earlier one has.  What a history has between two requests (the host waits, a stream uses a
    storage) comes with the one before it, and so do launches.

    Args:
        program: The captured program.
        new: The changes of the new program.  Their storages are renumbered in place: those that
            live on from before the iteration have the numbers that the history has for them.
    """
    history, old = program.history, program.allocations
    requests = np.flatnonzero(history[:, _BYTES])
    request_rows = history[requests, :2]
    captured_rows = np.stack([old["storage"], old["bytes"]], axis=1)
    common = _count_equal_ends(request_rows, captured_rows)
    # the history does not end with the iteration
    if not common:
        return history
    first_change = len(old) - common
    _renumber(new, first_change, program)

    # entries of every captured change: its request and what follows
    entry_bounds = np.append(requests[-common:], len(history))
    entry_counts = np.diff(entry_bounds)
    entry_starts = entry_bounds[:-1]

    # launches until every captured change
    launches = history[:, _LAUNCHES]
    launch_starts = launches[entry_starts]
    launch_counts = np.diff(launch_starts, append=launches[-1])

    # changes that the history has; an extra one has a request and no launches
    is_in_history = new.captured >= first_change
    allocations = new.allocations[is_in_history]
    captured = new.captured[is_in_history]
    is_extra = new.is_extra[is_in_history]
    change = captured - first_change
    lengths = np.where(is_extra, 1, entry_counts[change])
    launch_lengths = np.where(is_extra, 0, launch_counts[change])

    # copy the entries
    ends = np.cumsum(lengths)
    starts = ends - lengths
    offsets = entry_starts[change] - starts
    places = np.arange(lengths.sum())
    source = places + np.repeat(offsets, lengths)
    entries = history[source]

    # count launches anew
    launched = np.cumsum(launch_lengths)
    launched_before = launched - launch_lengths
    first_launch = launch_starts[0]
    moved = launched_before + first_launch - launch_starts[change]
    entries[:, _LAUNCHES] += np.repeat(moved, lengths)

    # name the new storages
    entries[starts, _STORAGE] = allocations["storage"]
    entries[starts, _BYTES] = allocations["bytes"]
    captured_storages = history[source, _STORAGE]
    _rename_between(entries, captured_storages, starts)
    before_iteration = history[: entry_starts[0]]
    return np.concatenate([before_iteration, entries])


def _renumber(new: MemoryChanges, first_change: int, program: Program) -> None:
    """Give storages numbers that no earlier one of the process has.

    Args:
        new: The new changes, which get the numbers.
        first_change: The first captured change that the history has.
        program: The captured program.
    """
    # the first change of a storage says whether it lives on from before the iteration
    storages = new.allocations["storage"]
    old_storages = program.allocations["storage"]
    last_number = int(storages.max())
    numbers = np.full(last_number + 1, -1)
    unique_storages, first_changes = np.unique(storages, return_index=True)
    captured_changes = new.captured[first_changes]
    lives_on = captured_changes < first_change
    earlier_storages = old_storages[captured_changes]
    numbers[unique_storages] = np.where(lives_on, earlier_storages, -1)

    # the others are new to the process
    history_storages = program.history[:, _STORAGE]
    last_of_history = int(history_storages.max())
    last_captured = int(old_storages.max())
    fresh = 1 + max(last_of_history, last_captured)
    new_numbers = fresh + np.arange(len(numbers))
    is_new = numbers < 0
    numbers[is_new] = new_numbers[is_new]
    new.allocations["storage"] = numbers[storages]


def _rename_between(entries: np.ndarray, old_storages: np.ndarray, starts: np.ndarray) -> None:
    """Give entries between requests the new storage in place of the captured one.

    Args:
        entries: The new entries; those of requests have their new storages.
        old_storages: The captured storage of each.
        starts: Where the requests are.
    """
    is_between = np.ones(len(entries), dtype=bool)
    is_between[starts] = False
    # captured storage -> the new one that stands for it now
    new_storages: dict[int, int] = {}
    for entry, storage in enumerate(old_storages.tolist()):
        if not is_between[entry]:
            new_storages[storage] = entries[entry, _STORAGE]
        elif storage in new_storages:
            entries[entry, _STORAGE] = new_storages[storage]


def _count_equal_ends(left: np.ndarray, right: np.ndarray) -> int:
    """Count how many last rows of two arrays are equal."""
    count = min(len(left), len(right))
    left_ends = left[::-1][:count]
    right_ends = right[::-1][:count]
    is_unlike = (left_ends != right_ends).any(axis=1)
    unlike = np.flatnonzero(is_unlike)
    if len(unlike):
        return int(unlike[0])
    return count
