"""What changes between two sizes of a job beside its sizes: where it may compute something else.

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

from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.graph.world_graph import CallKind
from megatron_prism.replay.costs.collectives import EXPERT_CALLS, fastest
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, parse
from megatron_prism.replay.costs.prices import shape_of
from megatron_prism.replay.priced_graph import PricedGraph

_SHOWN = 4  # sizes of one line's calls
_Line = tuple[str, str, str]  # of code: call, group, site


@dataclass(frozen=True)
class ScaleChange:
    """``kind``: group, code, type, elements or way; ``stages`` in which it is, of A."""

    kind: str
    what: str
    a: str
    b: str
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" (stage {format_ranks(self.stages)})" if self.stages else ""
        return f"{self.kind}: {self.what}{where}: {self.a} -> {self.b}"


@dataclass
class _Calls:
    """The calls of one line of code, of one stage."""

    types: set[str] = field(default_factory=set)
    ways: set[str] = field(default_factory=set)
    elements: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def sizes(self) -> str:
        """Of every microbatch whose calls are not those of another."""
        distinct = {tuple(sorted(one.items())) for one in self.elements.values()}
        return " or ".join(_sizes(one) for one in sorted(distinct))

    def words(self) -> dict[str, str]:
        """By the ``kind`` of a change of them."""
        types, ways = (", ".join(sorted(some)) for some in (self.types, self.ways))
        return {"type": types, "elements": self.sizes, "way": ways}


def _sizes(some: tuple[tuple[int, int], ...]) -> str:
    words = [f"{count:,} x {size:,}" if count > 1 else f"{size:,}" for size, count in some]
    if len(words) > _SHOWN:
        total = sum(size * count for size, count in some)
        calls = sum(count for _, count in some)
        words = [*words[: _SHOWN - 1], f"… {calls:,} calls of {total:,} in all"]
    return " + ".join(words)


def scale_changes(a: PricedGraph, b: PricedGraph) -> tuple[ScaleChange, ...]:
    """What else than the sizes differs between two worlds."""
    stages = [one.graph.programs.world.pp for one in (a, b)]
    pairs = {stage: stage for stage in range(stages[0])}
    if stages[0] != stages[1]:
        pairs = {0: 0, stages[0] - 1: stages[1] - 1}
    where: dict[ScaleChange, list[int]] = defaultdict(list)
    for stage, other in pairs.items():
        for change in _of_stage(_calls(a, stage), _calls(b, other)):
            where[change].append(stage)
    of_stages = (
        replace(change, stages=() if len(some) == len(pairs) else tuple(some))
        for change, some in where.items()
    )
    return (*_of_groups(a, b), *of_stages)


def _of_groups(a: PricedGraph, b: PricedGraph) -> Iterable[ScaleChange]:
    """Sizes of groups, and how many nodes they span."""
    both: list[dict[str, str]] = []
    for one in (a, b):
        shapes: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for kind in one.graph.call_kinds.kinds:
            members = np.array(one.graph.groups[kind.group].group(int(kind.ranks[0])))
            shape = shape_of(CallKind(kind.name, kind.group, members, False), one.machine)
            shapes[kind.group].add((shape.size, shape.nodes))
        words = {
            group: [
                f"{counted(size, 'rank')} on {counted(nodes, 'node')}"
                for size, nodes in sorted(some)
            ]
            for group, some in shapes.items()
        }
        both.append({group: " or ".join(some) for group, some in words.items()})
    for group in sorted({**both[0], **both[1]}):
        of_a, of_b = (one.get(group, "none") for one in both)
        if of_a != of_b:
            yield ScaleChange("group", group, of_a, of_b)


def _calls(one: PricedGraph, stage: int) -> dict[_Line, _Calls]:
    """The calls of a stage's first rank."""
    graph, world = one.graph, one.graph.programs.world
    c = int(graph.classes.of[world.rank_at(pp=stage)])
    program, meet, kinds = graph.program_list[c], graph.matched_calls, graph.call_kinds
    nccl, known = parse(graph.programs.source.get(NCCL_ENV, "")), dict[tuple[int, int], str]()
    lines: dict[_Line, _Calls] = defaultdict(_Calls)
    for entry in np.flatnonzero(meet.classes == c).tolist():
        op, of = program[int(meet.ops[entry])], int(kinds.of[entry])
        line = lines[op.name, op.group, op.site]
        line.types.add(op.dtype)
        pair = op.name in ("send", "recv")
        if op.name not in ("all_to_all", *EXPERT_CALLS):  # the routing's matter
            counts = line.elements[-1 if pair else op.microbatch]
            size = max(op.num_in, op.num_out)
            counts[size] = 1 if pair else counts[size] + 1
        call = of, int(kinds.num_bytes[entry])
        if call not in known:
            shape = shape_of(kinds.kinds[of], one.machine)
            known[call] = "alone" if shape.size == 1 else "HybridEP"
            if shape.size > 1 and op.name not in EXPERT_CALLS:
                known[call], _ = fastest(op.name, shape, call[1], one.machine, nccl)
        line.ways.add(known[call])
    return lines


def _of_stage(a: Mapping[_Line, _Calls], b: Mapping[_Line, _Calls]) -> Iterable[ScaleChange]:
    for line in {**a, **b}:
        name, group, site = line
        what = f"{name} of {group}" + f" at {site}" * bool(site)
        if line not in a or line not in b:
            sizes, others = (one[line].sizes or "some" if line in one else "none" for one in (a, b))
            yield ScaleChange("code", what, sizes, others)
            continue
        of_b = b[line].words()
        for kind, words in a[line].words().items():
            if words != of_b[kind]:
                yield ScaleChange(kind, what, words, of_b[kind])
