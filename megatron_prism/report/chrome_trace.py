"""Chrome traces (JSON) of timelines, for ui.perfetto.dev and chrome://tracing.

In : Timeline.  Out: text.  One process per class, one thread per stream
and per group; threads that would need spans to overlap get a second one (a Chrome thread's spans
must nest), and one shows what the host issues when, if the slices say how long that takes.  A call
is a span from when the rank was ready to its end, with a span ``waiting`` inside while others had
not come.  Arrows go from a send to its receive, and from the class that came last to a call to the
others.

Nothing may be before 0 (``trace_events``), and ranks may begin before the last iteration has
ended elsewhere: so 0 is when the first of them begins, and ``iteration_begins_ns`` says when the
iteration does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_prism.core.job_settings import short
from megatron_prism.core.ops import NAMES, PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.replay.timeline import Timeline
from megatron_prism.report.metrics import sources_of
from megatron_prism.report.trace_events import (
    Event,
    arrow,
    metadata,
    span,
    thread_name,
    trace_file,
)

_NOTE = 300  # characters of a note or a list of ranks
_PLACES = 1000  # more threads than one lane ever needs


def render_timeline(timeline: Timeline) -> str:
    """The last iteration as a Chrome trace."""
    tracks = tracks_of([(timeline, index, "") for index in range(len(timeline.graph.classes))])
    about = {
        "made_by": "prism replay",
        "world": str(timeline.graph),
        "iteration_ns": timeline.iteration_ns,
        "iteration_begins_ns": max((track.early for track in tracks), default=0),
        "provenance": [text for text in timeline.prices.sources if not text.startswith("none")],
        **{f"slices_{key}": short(value) for key, value in timeline.graph.programs.source.items()},
    }
    return trace_file(about, (*events_of(tracks), *_arrows(timeline, tracks)))


class Track:
    """One class as one process; times are ``early`` ns later than the timeline's."""

    def __init__(self, timeline: Timeline, index: int, title: str) -> None:
        self.timeline, self.index, self.title = timeline, index, title
        self.process, self.early = index, 0
        self.program: Program = timeline.graph.program_list[index]
        self.spans = timeline.spans(index).copy()
        self.hosts = timeline.host_spans(index)
        self.threads: dict[int, str] = {}
        self.thread_of = self._spread()
        self.host_thread = len(timeline.lanes) * _PLACES
        if len(self.hosts):
            self.threads[self.host_thread] = "host"

    def begins(self) -> int:
        """With the iteration; 0 at the latest."""
        return int(min(self.spans["ready"].min(initial=0), self.hosts[:, 1].min(initial=0)))

    def move(self, early: int, process: int) -> None:
        self.early, self.process = early, process
        self.hosts[:, 1:] += early
        for column in ("ready", "start", "end"):
            self.spans[column] += early

    def _spread(self) -> np.ndarray:
        """A thread for every span: its lane and the first place that is free."""
        order = np.lexsort((-self.spans["end"], self.spans["ready"]))
        found = np.zeros(len(self.spans), dtype=np.int64)
        free: dict[int, list[int]] = {}
        lanes, readies, ends = (self.spans[n].tolist() for n in ("lane", "ready", "end"))
        for i in order.tolist():
            busy = free.setdefault(lanes[i], [])
            place = next((p for p, until in enumerate(busy) if until <= readies[i]), len(busy))
            if place == len(busy):
                busy.append(0)
            busy[place] = ends[i]
            found[i] = lanes[i] * _PLACES + place
            name = self.timeline.lanes[lanes[i]]
            self.threads[int(found[i])] = f"{name} ({place + 1})" if place else name
        return found

    def names(self) -> Iterator[Event]:
        """Process and thread names, sorted as classes and lanes are."""
        graph = self.timeline.graph
        ranks = _cut(format_ranks(graph.classes.ranks(self.index).tolist()))
        count = counted(graph.classes.counts[self.index], "rank")
        title = self.title or f"{graph.class_name(self.index)}: {count} ({ranks})"
        yield metadata("process_name", self.process, 0, name=title)
        yield metadata("process_sort_index", self.process, 0, sort_index=self.process)
        for thread, name in sorted(self.threads.items()):
            yield from thread_name(self.process, thread, name, thread)

    def events(self) -> Iterator[Event]:
        """The spans, each before what lies inside it."""
        sources = sources_of(self.timeline, self.index, self.spans["op"]).tolist()
        rows = zip(self.spans.tolist(), self.thread_of.tolist(), sources, strict=True)
        for (op, _, ready, start, end), thread, source in rows:
            yield span(self.process, thread, ready, end, *self._said(op, source))
            if start > ready:
                yield span(self.process, thread, ready, start, "waiting", "waiting")
        for op, start, end in self.hosts.tolist():
            row = self.program.ops[op]
            step = label(PHASE_NAMES[row["phase"]], int(row["microbatch"]), int(row["chunk"]))
            name = f"issues {NAMES[row['name']]} {step}".removesuffix(" -")
            yield span(self.process, self.host_thread, start, end, name, "host", {"op": op})

    def _said(self, at: int, source: int) -> tuple[str, str, Mapping[str, object]]:
        """Name, category and arguments of a span."""
        op, program = self.program[at], self.program
        args = {
            "step": label(op.phase, op.microbatch, op.chunk),
            "group": op.group,
            "peer": op.peer or None,
            "bytes": int(max(program.bytes_in[at], program.bytes_out[at])) or None,
            "dtype": op.dtype,
            "shape": op.shape,
            "site": op.site,
            "flops": max(op.flops, 0) or None,
            "kernels": max(op.kernels, 0) or None,
            "note": _cut(op.note),
            "duration is": self.timeline.prices.sources[source].partition(" (")[0],
        }
        kept = {key: value for key, value in args.items() if value not in (None, "")}
        name = f"{op.name} {args['step']}" if op.phase else op.name
        return name, op.phase or "outside", {**kept, "op": at}

    def places(self) -> dict[int, tuple[int, int, int, int]]:
        """(thread, start, ready, end) of the span of every op."""
        columns = (self.spans[n].tolist() for n in ("op", "start", "ready", "end"))
        rows = zip(*columns, self.thread_of.tolist(), strict=True)
        return {op: (thread, start, ready, end) for op, start, ready, end, thread in rows}


def tracks_of(wanted: Sequence[tuple[Timeline, int, str]]) -> list[Track]:
    """A track of each (timeline, class, title), none of which begins before 0."""
    tracks = [Track(*one) for one in wanted]
    early = max((-track.begins() for track in tracks), default=0)
    for process, track in enumerate(tracks):
        track.move(early, process)
    return tracks


def events_of(tracks: Sequence[Track]) -> Iterator[Event]:
    """Make the events of all tracks, names first."""
    for track in tracks:
        yield from track.names()
    for track in tracks:
        yield from track.events()


def _arrows(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[Event]:
    """Pairs of s and f events between classes; spans without duration get none."""
    meet = timeline.graph.matched_calls
    places, numbers = [track.places() for track in tracks], itertools.count(1)
    for first in np.flatnonzero(np.diff(meet.start) > 1).tolist():
        spans = [(c, *places[c][op]) for c, op in meet.members(first) if op in places[c]]
        there = [one for one in spans if one[-1] > one[2]]
        if len(there) < 2:
            continue
        row = tracks[there[0][0]].program.ops[meet.ops[meet.start[first]]]
        pair = NAMES[row["name"]] in ("send", "recv")
        last = there[0] if pair else max(there, key=lambda one: one[3])
        name = "message" if pair else "came last"
        for other in there:
            if other[0] != last[0]:  # surely inside the spans, not on their edges
                both = (last, other)
                ends = [(c, thread, (start + end) // 2) for c, thread, start, _, end in both]
                yield from arrow(next(numbers), name, "flow", ends[0], ends[1])


def _cut(text: str) -> str:
    return text if len(text) <= _NOTE else text[:_NOTE] + " …"
