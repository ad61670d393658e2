"""What changes between two sizes of a job: its groups, and where it may compute something else.

In : two priced worlds.  Out: ``ScaleChange``s: groups and the nodes they span, calls by line of
code, their types and elements, NCCL's modelled choice.  Stages are compared with each other: all of
them, or the first and the last where there are more in one.  Elements are those of the larger side
of a call, before a split or after a gather, so a shard that is smaller because its group is larger
is no change, and padding is; calls of a microbatch are compared, not how many microbatches are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.graph.world_graph import CallKind
from megatron_prism.replay.costs.collectives import EXPERT_CALLS, fastest
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, parse
from megatron_prism.replay.costs.prices import shape_of
from megatron_prism.replay.priced_graph import PricedGraph

_MAX_SIZES = 4  # sizes of one line's calls
_NO_GROUP = "none"  # where a world has no such group


@dataclass(frozen=True)
class _Line:
    """A line of code that makes calls: name of the call, its group, site."""

    call: str
    group: str
    site: str


@dataclass(frozen=True)
class ScaleChange:
    """A change beside sizes.

    Attributes:
        kind: group, code, type, elements or way.
        what: The group, or the line of code.
        a: In A.
        b: In B.
        stages: In which it is, of A; () is all that were compared.
    """

    kind: str
    what: str
    a: str
    b: str
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Say the change in a line."""
        stages = f" (stage {format_ranks(self.stages)})" if self.stages else ""
        return f"{self.kind}: {self.what}{stages}: {self.a} -> {self.b}"


@dataclass
class _Calls:
    """The calls of one line of code, of one stage.

    Attributes:
        types: Of elements.
        ways: How NCCL would move them.
        elements: Microbatch -> how many calls there are of each size.
    """

    types: set[str] = field(default_factory=set)
    ways: set[str] = field(default_factory=set)
    elements: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def sizes(self) -> str:
        """Sizes of every microbatch whose calls are not those of another."""
        distinct = {tuple(sorted(counts.items())) for counts in self.elements.values()}
        return " or ".join(_sizes(counts) for counts in sorted(distinct))

    def words(self) -> dict[str, str]:
        """Return what they are, by the ``kind`` of a change of them."""
        return {
            "type": ", ".join(sorted(self.types)),
            "elements": self.sizes,
            "way": ", ".join(sorted(self.ways)),
        }


def _sizes(counts: tuple[tuple[int, int], ...]) -> str:
    """Say how many calls there are of each size; of many sizes a few, and all others together."""
    words: list[str] = []
    for size, count in counts:
        text = f"{size:,}"
        if count > 1:
            text = f"{count:,} x {text}"
        words.append(text)
    if len(words) > _MAX_SIZES:
        total = sum(size * count for size, count in counts)
        calls = sum(count for _, count in counts)
        words = [*words[: _MAX_SIZES - 1], f"… {calls:,} calls of {total:,} in all"]
    return " + ".join(words)


def scale_changes(a: PricedGraph, b: PricedGraph) -> tuple[ScaleChange, ...]:
    """Find what else than the sizes differs between two worlds."""
    stage_count = a.graph.programs.world.pp
    other_count = b.graph.programs.world.pp
    stages = {stage: stage for stage in range(stage_count)}
    # of other pipelines the first and the last
    if stage_count != other_count:
        stages = {0: 0, stage_count - 1: other_count - 1}
    stages_of_change: dict[ScaleChange, list[int]] = defaultdict(list)
    for stage, other_stage in stages.items():
        for change in _changes_of_stage(_calls(a, stage), _calls(b, other_stage)):
            stages_of_change[change].append(stage)
    changes = list(_changes_of_groups(a, b))
    for change, changed_stages in stages_of_change.items():
        is_everywhere = len(changed_stages) == len(stages)
        changes.append(replace(change, stages=() if is_everywhere else tuple(changed_stages)))
    return tuple(changes)


def _changes_of_groups(a: PricedGraph, b: PricedGraph) -> Iterable[ScaleChange]:
    """Yield groups with other sizes, or that span other numbers of nodes."""
    extents_of_a, extents_of_b = _extents(a), _extents(b)
    for group in sorted({**extents_of_a, **extents_of_b}):
        in_a = extents_of_a.get(group, _NO_GROUP)
        in_b = extents_of_b.get(group, _NO_GROUP)
        if in_a != in_b:
            yield ScaleChange("group", group, in_a, in_b)


def _extents(priced: PricedGraph) -> dict[str, str]:
    """Say of each group how many ranks and nodes it has."""
    graph = priced.graph
    shapes_of_group: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for kind in graph.call_kinds.kinds:
        members = np.array(graph.groups[kind.group].group(int(kind.ranks[0])))
        shape = shape_of(CallKind(kind.name, kind.group, members, False), priced.machine)
        shapes_of_group[kind.group].add((shape.size, shape.nodes))
    extents: dict[str, str] = {}
    for group, shapes in shapes_of_group.items():
        words: list[str] = []
        for size, nodes in sorted(shapes):
            words.append(f"{counted(size, 'rank')} on {counted(nodes, 'node')}")
        extents[group] = " or ".join(words)
    return extents


def _calls(priced: PricedGraph, stage: int) -> dict[_Line, _Calls]:
    """Return the calls of a stage's first rank."""
    graph = priced.graph
    matched_calls, call_kinds = graph.matched_calls, graph.call_kinds
    first_rank = graph.programs.world.rank_at(pp=stage)
    index = int(graph.classes.of[first_rank])
    program = graph.program_list[index]
    nccl = _Ways(priced)
    calls_of_line: dict[_Line, _Calls] = defaultdict(_Calls)
    for entry in np.flatnonzero(matched_calls.classes == index).tolist():
        op = program[int(matched_calls.ops[entry])]
        calls = calls_of_line[_Line(op.name, op.group, op.site)]
        calls.types.add(op.dtype)
        _count_elements(calls, op)
        kind = call_kinds.kinds[int(call_kinds.of[entry])]
        calls.ways.add(nccl.of(op.name, kind, int(call_kinds.num_bytes[entry])))
    return calls_of_line


def _count_elements(calls: _Calls, op: Op) -> None:
    """Count a call by its size."""
    # how many rows go where is the routing's matter
    if op.name in ("all_to_all", *EXPERT_CALLS):
        return
    size = max(op.num_in, op.num_out)
    # how many messages there are follows from the microbatches
    if op.name in ("send", "recv"):
        calls.elements[-1][size] = 1
    else:
        calls.elements[op.microbatch][size] += 1


class _Ways:
    """How NCCL would move calls; asked once for equal ones."""

    def __init__(self, priced: PricedGraph) -> None:
        self._machine = priced.machine
        self._settings = parse(priced.graph.programs.source.get(NCCL_ENV, ""))
        self._way_of_call: dict[tuple[int, int], str] = {}

    def of(self, name: str, kind: CallKind, num_bytes: int) -> str:
        """Return how a call is moved."""
        key = (id(kind), num_bytes)
        if key not in self._way_of_call:
            self._way_of_call[key] = self._choose(name, kind, num_bytes)
        return self._way_of_call[key]

    def _choose(self, name: str, kind: CallKind, num_bytes: int) -> str:
        shape = shape_of(kind, self._machine)
        # a group of one rank moves nothing
        if shape.size == 1:
            return "alone"
        # a kernel that moves tokens itself, without NCCL
        if name in EXPERT_CALLS:
            return "HybridEP"
        algorithm, _ = fastest(name, shape, num_bytes, self._machine, self._settings)
        return algorithm


def _changes_of_stage(
    a: Mapping[_Line, _Calls], b: Mapping[_Line, _Calls]
) -> Iterable[ScaleChange]:
    """Yield lines of code that one stage has alone, or whose calls differ."""
    for line in {**a, **b}:
        place = f"{line.call} of {line.group}"
        if line.site:
            place += f" at {line.site}"
        # one of the two does not run the line
        if line not in a or line not in b:
            yield ScaleChange("code", place, _sizes_of_line(a, line), _sizes_of_line(b, line))
            continue
        words_of_b = b[line].words()
        for kind, words in a[line].words().items():
            if words != words_of_b[kind]:
                yield ScaleChange(kind, place, words, words_of_b[kind])


def _sizes_of_line(calls_of_line: Mapping[_Line, _Calls], line: _Line) -> str:
    """Say the sizes of a line's calls; those of an all-to-all are not counted."""
    if line not in calls_of_line:
        return "none"
    return calls_of_line[line].sizes or "some"
