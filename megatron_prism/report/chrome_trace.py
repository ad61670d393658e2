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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.jobs.job_settings import short
from megatron_prism.core.programs.ops import NAMES, PHASE_NAMES, label
from megatron_prism.core.programs.program import Program
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

_MAX_CHARACTERS = 300  # of a note or a list of ranks
_PLACES = 1000  # more threads than one lane ever needs


def render_timeline(timeline: Timeline) -> str:
    """Write the last iteration as a Chrome trace."""
    num_classes = len(timeline.graph.classes)
    rows = [TrackOf(timeline, index) for index in range(num_classes)]
    tracks = _tracks_of(rows)
    provenance = [text for text in timeline.prices.sources if not text.startswith("none")]
    slices = {}
    for key, value in timeline.graph.programs.source.items():
        slices[f"slices_{key}"] = short(value)
    about = {
        "made_by": "prism replay",
        "world": str(timeline.graph),
        "iteration_ns": timeline.iteration_ns,
        "iteration_begins_ns": max((track.early for track in tracks), default=0),
        "provenance": provenance,
        **slices,
    }
    return trace_file(about, (*_events_of(tracks), *_arrows(timeline, tracks)))


def render_tracks(rows: Iterable[TrackOf], about: Mapping[str, object]) -> str:
    """Write classes of several timelines as one Chrome trace, one below the other.

    Args:
        rows: The tracks, from above.
        about: What the trace says of itself.
    """
    tracks = _tracks_of(rows)
    begins_ns = max((track.early for track in tracks), default=0)
    return trace_file({**about, "iteration_begins_ns": begins_ns}, _events_of(tracks))


@dataclass(frozen=True)
class TrackOf:
    """What a track is of.

    Attributes:
        timeline: The timeline.
        index: The class.
        title: Of the track; "" is that of the class.
    """

    timeline: Timeline
    index: int
    title: str = ""


@dataclass(frozen=True)
class _Drawn:
    """Where the span of an op is drawn; times in ns."""

    index: int
    thread: int
    start: int
    ready: int
    end: int

    @property
    def middle(self) -> int:
        """Surely inside the span, not on an edge."""
        return (self.start + self.end) // 2


class Track:
    """One class as one process; times are ``early`` ns later than the timeline's."""

    def __init__(self, track_of: TrackOf) -> None:
        timeline, index = track_of.timeline, track_of.index
        self.timeline = timeline
        self.index = index
        self.title = track_of.title
        self.process = index
        self.early = 0
        self.program: Program = timeline.graph.program_list[index]
        self.spans = timeline.spans(index).copy()
        self.hosts = timeline.host_spans(index)
        self.threads: dict[int, str] = {}
        self.thread_of = self._spread()
        self.host_thread = len(timeline.lanes) * _PLACES
        # without the host's times it has no track
        if len(self.hosts):
            self.threads[self.host_thread] = "host"

    def begins(self) -> int:
        """Return when it begins: with the iteration, at 0, at the latest."""
        first_ready = self.spans["ready"].min(initial=0)
        first_issue = self.hosts[:, 1].min(initial=0)
        return int(min(first_ready, first_issue))

    def move(self, early: int, process: int) -> None:
        """Put all spans later, by ``early`` ns, and number the process."""
        self.early = early
        self.process = process
        self.hosts[:, 1:] += early
        for column in ("ready", "start", "end"):
            self.spans[column] += early

    def _spread(self) -> np.ndarray:
        """Return a thread for every span: its lane and the first place that is free."""
        order = np.lexsort((-self.spans["end"], self.spans["ready"]))
        threads = np.zeros(len(self.spans), dtype=np.int64)
        lanes = self.spans["lane"].tolist()
        readies = self.spans["ready"].tolist()
        ends = self.spans["end"].tolist()
        ends_of_lane: dict[int, list[int]] = {}  # lane -> when each of its places is free
        for number in order.tolist():
            lane = lanes[number]
            place_ends = ends_of_lane.setdefault(lane, [])
            place = _first_free(place_ends, readies[number])
            # all places are taken until later: there is one more
            if place == len(place_ends):
                place_ends.append(0)
            place_ends[place] = ends[number]
            thread = lane * _PLACES + place
            threads[number] = thread
            name = self.timeline.lanes[lane]
            self.threads[thread] = f"{name} ({place + 1})" if place else name
        return threads

    def names(self) -> Iterator[Event]:
        """Yield process and thread names, sorted as classes and lanes are."""
        graph = self.timeline.graph
        title = self.title
        if not title:
            ranks = _cut(format_ranks(graph.classes.ranks(self.index).tolist()))
            count = counted(graph.classes.counts[self.index], "rank")
            title = f"{graph.class_name(self.index)}: {count} ({ranks})"
        yield metadata("process_name", self.process, 0, name=title)
        yield metadata("process_sort_index", self.process, 0, sort_index=self.process)
        for thread, name in sorted(self.threads.items()):
            yield from thread_name(self.process, thread, name, thread)

    def events(self) -> Iterator[Event]:
        """Yield the spans, each before what lies inside it."""
        sources = sources_of(self.timeline, self.index, self.spans["op"]).tolist()
        rows = zip(self.spans.tolist(), self.thread_of.tolist(), sources, strict=True)
        for (op, _, ready, start, end), thread, source in rows:
            yield self._span(op, thread, ready, end, source)
            # the rank was ready before the call began: it waited
            if start > ready:
                yield span(self.process, thread, ready, start, "waiting", "waiting")
        for op, start, end in self.hosts.tolist():
            row = self.program.ops[op]
            step = label(PHASE_NAMES[row["phase"]], int(row["microbatch"]), int(row["chunk"]))
            name = f"issues {NAMES[row['name']]} {step}".removesuffix(" -")
            yield span(self.process, self.host_thread, start, end, name, "host", {"op": op})

    def _span(self, index: int, thread: int, ready: int, end: int, source: int) -> Event:
        """Return the span of an op, with what there is to say of it."""
        op, program = self.program[index], self.program
        step = label(op.phase, op.microbatch, op.chunk)
        num_bytes = int(max(program.bytes_in[index], program.bytes_out[index]))
        provenance, _, _ = self.timeline.prices.sources[source].partition(" (")
        fields = {
            "step": step,
            "group": op.group,
            "peer": op.peer or None,
            "bytes": num_bytes or None,
            "dtype": op.dtype,
            "shape": op.shape,
            "site": op.site,
            "flops": max(op.flops, 0) or None,
            "kernels": max(op.kernels, 0) or None,
            "note": _cut(op.note),
            "duration is": provenance,
        }
        about: dict[str, object] = {}
        for key, value in fields.items():
            if value not in (None, ""):
                about[key] = value
        about["op"] = index
        name = f"{op.name} {step}" if op.phase else op.name
        return span(self.process, thread, ready, end, name, op.phase or "outside", about)

    def drawn(self) -> dict[int, _Drawn]:
        """Return where the span of every op is drawn."""
        drawn_of_op: dict[int, _Drawn] = {}
        rows = zip(self.spans.tolist(), self.thread_of.tolist(), strict=True)
        for (op, _, ready, start, end), thread in rows:
            drawn_of_op[op] = _Drawn(self.index, thread, start, ready, end)
        return drawn_of_op


def _first_free(ends: Sequence[int], ready: int) -> int:
    """Return the first place that is free from ``ready`` on; a new one if none is."""
    for place, end in enumerate(ends):
        if end <= ready:
            return place
    return len(ends)


def _tracks_of(rows: Iterable[TrackOf]) -> list[Track]:
    """Return tracks, none of which begins before 0."""
    tracks = [Track(row) for row in rows]
    early = max((-track.begins() for track in tracks), default=0)
    for process, track in enumerate(tracks):
        track.move(early, process)
    return tracks


def _events_of(tracks: Sequence[Track]) -> Iterator[Event]:
    """Make the events of all tracks, names first."""
    for track in tracks:
        yield from track.names()
    for track in tracks:
        yield from track.events()


def _arrows(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[Event]:
    """Yield pairs of s and f events between classes; spans without duration get none."""
    matched_calls = timeline.graph.matched_calls
    drawn_of_class = [track.drawn() for track in tracks]
    numbers = itertools.count(1)
    for call in np.flatnonzero(np.diff(matched_calls.start) > 1).tolist():
        members: list[_Drawn] = []
        # only spans that are drawn can have arrows
        for index, op in matched_calls.members(call):
            drawn = drawn_of_class[index].get(op)
            if drawn is not None and drawn.end > drawn.start:
                members.append(drawn)
        if len(members) < 2:
            continue
        first_op = matched_calls.ops[matched_calls.start[call]]
        name = NAMES[tracks[members[0].index].program.ops[first_op]["name"]]

        # a message goes to its receive, a call waits for the member that came last
        if name in ("send", "recv"):
            title, origin = "message", members[0]
        else:
            title, origin = "came last", max(members, key=lambda member: member.ready)
        for member in members:
            if member.index != origin.index:
                start = (origin.index, origin.thread, origin.middle)
                end = (member.index, member.thread, member.middle)
                yield from arrow(next(numbers), title, "flow", start, end)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " …"
