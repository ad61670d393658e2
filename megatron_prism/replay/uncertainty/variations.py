"""The iteration of a timeline if some of its durations were others.

In : a timeline.  Out: Variations, which evaluates its graph again.  ``interval`` asks it how far
off an iteration may be, ``headline`` what the iteration takes on other hosts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_prism.core.programs.ops import CODE, NAMES
from megatron_prism.graph.issue_graph import COMPUTE, HOST, LEAD
from megatron_prism.replay.costs.host import MODELLED, ON_TARGET
from megatron_prism.replay.timeline import Timeline, durations_of, of_nodes

_LONGEST = 16  # parts of a source: the others take little
_OF_SEGMENTS = "note", "flops", "traffic", "ns"  # what two segments that are alike have in common


class Variations:
    """Evaluates the graph of a timeline again with some of the durations changed.

    Attributes:
        timeline: what was replayed.
        durations: int64 [nodes], ns of every node as priced.
        codes: int64 [nodes], index into ``prices.sources`` of segments and calls; -1 of others.
        host_nodes: bool [nodes], in which a host issues an op.
        tier: of the slices: cuda, cpu, meta.
        knows_host: whether some slices say how long their host takes.
        has_named_host: whether the replay is of a host that somebody named.
        has_modelled_host: whether hosts take what calls of Python and kernels let expect.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Price every node once."""
        self.timeline = timeline
        self.dag = timeline.dag
        self.prices = timeline.prices
        self.durations = durations_of(self.dag, self.prices)
        # where calls share links, all variations are compared without sharing
        self.base_ns = timeline.iteration_ns
        if timeline.links is not None:
            self.base_ns = timeline.iteration_with(self.durations)
        programs = timeline.graph.programs
        self.tier = programs.source.get("tier", "")
        self.knows_host = any(program.knows_host for program in programs.programs)
        source_columns = {COMPUTE: self.prices.compute_source}
        self.codes = of_nodes(self.dag, self.prices.collective_source, source_columns, -1)
        self.host_nodes = np.isin(self.dag.kind, (LEAD, HOST))
        self.has_named_host = any(ON_TARGET in text for text in self.prices.sources)
        self.has_modelled_host = any(MODELLED in text for text in self.prices.sources)

    @property
    def has_delayed_segments(self) -> bool:
        """Whether segments were timed with their host's delays in them."""
        return self.tier in ("cuda", "cpu") and not self.knows_host

    @property
    def nodes_of_hosts(self) -> np.ndarray:
        """bool [nodes]: nodes that take longer on a slower host."""
        if self.has_delayed_segments:
            return np.asarray(self.host_nodes | (self.dag.kind == COMPUTE))
        return self.host_nodes

    def longer_ns(self, durations: np.ndarray) -> int:
        """Evaluate by how many ns the iteration is longer if nodes take ``durations``."""
        return self.timeline.iteration_with(durations) - self.base_ns

    def with_hosts(self, factors: Sequence[float]) -> int:
        """Evaluate the iteration (ns) if the hosts of each program take ``factors`` times as long.

        Args:
            factors: one of each program.
        """
        factor_of_class = np.array(factors)[list(self.timeline.graph.classes.programs)]
        # the host's delays are in the segments, and nothing tells them apart
        if self.has_delayed_segments:
            factor_of_node = factor_of_class[self.dag.owner]
            other_ns = np.rint(self.durations * factor_of_node).astype(np.int64)
            durations = np.where(self.nodes_of_hosts, other_ns, self.durations)
            return self.timeline.iteration_with(durations)

        on_hosts = self.prices.on_hosts(factor_of_class.tolist())
        durations = durations_of(self.dag, on_hosts)
        return self.timeline.iteration_with(durations)

    def longest_parts(self, chosen: np.ndarray) -> dict[int, int]:
        """Sum up what most of the time of the ``chosen`` nodes goes to.

        Returns:
            ns by number of what nodes do (``numbers``), of the parts that take longest.
        """
        numbers, part_of_node = np.unique(self.numbers[chosen], return_inverse=True)
        total_ns = np.bincount(part_of_node, self.durations[chosen]).astype(np.int64)
        order = np.argsort(-total_ns, kind="stable")[:_LONGEST]
        return dict(zip(numbers[order].tolist(), total_ns[order].tolist(), strict=True))

    @cached_property
    def numbers(self) -> np.ndarray:
        """int64 [nodes]: a number of what a node does, by its text; the same in every job."""
        graph = self.timeline.graph
        # calls: kind, distances of their ranks, size
        call_kinds = graph.call_kinds
        first_members = graph.matched_calls.start[:-1]
        call_texts = []
        for kind in call_kinds.kinds:
            call_texts.append(f"{kind.name} {(kind.ranks - kind.ranks[0]).tolist()}")
        call_columns = call_kinds.of[first_members], call_kinds.num_bytes[first_members]
        numbers_of_calls = _numbered(call_columns, call_texts)
        # what a host issues is a segment of these kernels, or a call of this kind
        numbers_of_segments = []
        numbers_of_issued = []
        for program in graph.program_list:
            ops = program.ops
            by_kernels = _numbered([ops[key] for key in _OF_SEGMENTS], program.strings)
            by_name = _numbered([ops["name"]], NAMES)
            is_segment = ops["name"] == CODE["compute"]
            numbers_of_segments.append(by_kernels)
            numbers_of_issued.append(np.where(is_segment, by_kernels, by_name))
        columns = {
            COMPUTE: numbers_of_segments,
            LEAD: numbers_of_issued,
            HOST: numbers_of_issued,
        }
        return of_nodes(self.dag, numbers_of_calls, columns)


def _numbered(columns: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
    """Number rows by their content.

    Args:
        columns: int [rows] each; the first is an index into ``texts``.
        texts: what stands for the first column's numbers, which differ from job to job.

    Returns:
        int64 [rows]: equal where the first column's text and all other columns are equal.
    """
    rows = np.stack([column.astype(np.int64) for column in columns])
    distinct_rows, which = np.unique(rows, axis=1, return_inverse=True)
    checksums = []
    for text_index, *other_columns in distinct_rows.T.tolist():
        content = repr((texts[text_index], *other_columns))
        checksums.append(zlib.crc32(content.encode()))
    return np.array(checksums, dtype=np.int64)[which.ravel()]
