"""What if the job had more replicas?  The same programs in a world of another data-parallel size.

In : Programs, and the new size.  Out: Programs.  Every rank runs what the rank at its place runs,
with the same microbatches, so that the global batch grows with the world.  What is certain is
scaled, the rest is left as captured and named in ``Programs.source["what-if"]``:

* buckets of gradients and parameters are sharded over the new group, and padded as Megatron pads
  them: to a multiple of lcm(group, 128) (core/distributed/param_and_grad_buffer.py:654
  @core_v0.16.1).  Exact if the new size is a multiple of the old one
* their boundaries stay, although Megatron's default bucket, max(40 M, 1 M x group) parameters,
  grows with groups above 40 (core/distributed/distributed_data_parallel.py @core_v0.16.1)
* other gathers and scatters keep what each rank gives; reductions and broadcasts stay as they are
* segments (the optimizer works on a shard) and memory stay
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.membership import WORLD_GROUP
from megatron_prism.core.ops import CODE, IS_PAIR, NAMES
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.core.world import World
from megatron_prism.graph.classes import memberships, partition
from megatron_prism.replay.whatif import assumed, used

__all__ = ["data_parallel"]

_BUCKETS = "param_and_grad_buffer.py"  # the site of a bucket's calls
_ALIGN = 128
_BUCKET_GROWS = 40  # ranks
_GROWS = {"tokens_per_iteration", "model_flops_per_iteration"}  # with the global batch


def data_parallel(programs: Programs, dp: int) -> Programs:
    """The world with data-parallel size ``dp``.

    WorldError if there is no such world, ProgramError if the replicas are not alike or a call's
    size in the new world is not known.
    """
    old = programs.world
    if dp < 1:
        raise UsageError(f"a data-parallel size of {dp}", fix="1 or more")
    if dp == old.dp:
        return programs
    if programs.groups:
        raise ProgramError(
            f"the groups {', '.join(programs.groups)} are lists of ranks, which say nothing of a "
            "larger world",
            fix="capture a world of that size",
        )
    world = dataclasses.replace(old, size=old.size // old.dp * dp)
    same = np.array(partition(programs).programs, dtype=np.int32)
    running = same[partition(programs).of]
    first = _places(old)[:, :, 0]  # [pp, others]: the ranks of the first replica
    _check_alike(running, _places(old))
    of = np.empty(world.size, dtype=np.int32)
    of[_places(world)] = running[first][:, :, None]
    bare = dataclasses.replace(programs, world=world, program_of=of)
    before, after = memberships(programs), memberships(bare)
    made, widths = list(programs.programs), set()
    for index in np.unique(of).tolist():
        place = tuple(np.argwhere(running[first] == index)[0])
        here, there = int(first[place]), int(_places(world)[(*place, 0)])
        sizes = {
            name: (len(before[name].group(here)), len(after[name].group(there)))
            for name in programs.programs[index].groups()
        }
        resized = _Resizer(programs.programs[index], sizes, old, world, here, there)
        made[index] = resized.program()
        widths |= resized.buckets
    source = {**programs.source}
    for key in (k for k in _GROWS & set(source) if source[k].isdecimal()):
        source[key] = str(int(source[key]) * dp // old.dp)
    scaled = used(dataclasses.replace(bare, programs=tuple(made), source=source))
    return assumed(scaled, _said(old.dp, dp, widths))


def _said(old: int, new: int, widths: set[tuple[int, int]]) -> str:
    text = f"data-parallel size {new} instead of {old}: segments and memory as captured"
    if any(b % a for a, b in widths):
        text += ", buckets up to their padding too large"
    if any(max(pair) > _BUCKET_GROWS for pair in widths):
        text += ", boundaries of buckets as captured"
    return text


def _places(world: World) -> np.ndarray:
    """int64 [pp, cp x tp, dp]: the rank at every place."""
    ranks = np.arange(world.size)
    where = [np.asarray(world._along(axis, ranks)) for axis in ("pp", "cp", "tp", "dp")]
    found = np.empty((world.pp, world.cp, world.tp, world.dp), dtype=np.int64)
    found[tuple(where)] = ranks
    return found.reshape(world.pp, world.cp * world.tp, world.dp)


def _check_alike(running: np.ndarray, places: np.ndarray) -> None:
    differ = np.argwhere(running[places] != running[places][:, :, :1])
    if differ.size:
        stage, other, replica = differ[0]
        ranks = places[stage, other, [0, replica]].tolist()
        raise ProgramError(
            f"ranks {ranks[0]} and {ranks[1]} differ in nothing but the replica, and run different "
            "programs",
            fix="change the size first and slow ranks down after that; uneven experts need a "
            "capture of the new size",
        )


class _Resizer:
    """One program, and the sizes of its groups before and after."""

    def __init__(
        self,
        program: Program,
        sizes: dict[str, tuple[int, int]],
        old: World,
        new: World,
        here: int,
        there: int,
    ) -> None:
        self.given, self.sizes, self.old, self.new = program, sizes, old, new
        self.here, self.there = here, there
        self.buckets: set[tuple[int, int]] = set()

    def program(self) -> Program:
        """The program in the new world."""
        ops = self.given.ops.copy()
        for name, indices in self.given.groups().items():
            if self.sizes[name][0] != self.sizes[name][1]:
                for i in indices.tolist():
                    self._resize(ops[i], name)
        return dataclasses.replace(self.given, ops=ops, rank=self.there)

    def _resize(self, row: np.void, group: str) -> None:
        before, after = self.sizes[group]
        name = int(row["name"])
        if IS_PAIR[name]:
            row["peer"] = self._peer(int(row["peer"]), group)
        elif name == CODE["all_to_all"] or row["splits"] >= 0:
            raise ProgramError(
                f"who sends what in an {NAMES[name]} of {group} with {after} ranks is not known",
                fix="capture a world of that size",
            )
        elif name in (CODE["all_gather"], CODE["gather"]) and row["num_out"] > 0:
            row["num_in"], row["num_out"] = self._shard(row, "num_in", "num_out", before, after)
        elif name in (CODE["reduce_scatter"], CODE["scatter"]) and row["num_in"] > 0:
            row["num_out"], row["num_in"] = self._shard(row, "num_out", "num_in", before, after)

    def _shard(
        self, row: np.void, part: str, whole: str, before: int, after: int
    ) -> tuple[int, int]:
        """(elements of one rank, of all) in the new group."""
        if _BUCKETS not in self.given.strings[row["site"]]:
            return int(row[part]), int(row[part]) * after
        self.buckets.add((before, after))
        align = math.lcm(after, _ALIGN)
        total = -(-int(row[whole]) // align) * align
        return total // after, total

    def _peer(self, offset: int, group: str) -> int:
        """How far the same stage is in the new world."""
        if group == WORLD_GROUP:
            other = (self.here + offset) % self.old.size
            mine, theirs = self.old.coordinates(self.here), self.old.coordinates(other)
            if mine._replace(pp=0) == theirs._replace(pp=0):
                at = self.new.coordinates(self.there)._replace(pp=theirs.pp)
                return self.new.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) - self.there
        raise ProgramError(
            f"a message goes {offset} places along {group}, which changes its size",
            fix="capture a world of that size",
        )
