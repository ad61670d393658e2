"""Chrome traces (JSON) of a timeline or of a hang, for ui.perfetto.dev and chrome://tracing.

In : Timeline or Diagnosis.  Out: text.  Of a timeline, one process per class, one thread per stream
and per group; threads that would need spans to overlap get a second one (a Chrome thread's spans
must nest), and one shows what the host issues when, if the slices say how long that takes.  A call
is a span from when the rank was ready to its end, with a span ``waiting`` inside while others had
not come.  Arrows go from a send to its receive, and from the class that came last to a call to the
others.

Format: "Trace Event Format" (Google, 2016): X complete events, s/f flows, M names.  ``ts`` and
``dur`` are microseconds with three decimals, so nothing is rounded.  Perfetto drops what is before
0 (``TraceSorter::Stream::Push``, trace_sorter.h), and ranks may begin before the last iteration has
ended elsewhere: so 0 is when the first of them begins, and ``iteration_begins_ns`` says when the
iteration does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.job_settings import short
from megatron_prism.core.ops import NAMES, PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.hang.verdict import Diagnosis, Waiting
from megatron_prism.replay.timeline import Timeline
from megatron_prism.traces.compare import TraceComparison

_MOST = 4
_LENGTH = 1_000_000.0  # us


def render_hang(found: Diagnosis) -> str:
    """Who waits for whom: a thread per rank, an arrow per wait."""
    about = {"made_by": "prism hang", "verdict": found.headline(), "confidence": found.confidence,
             "evidence": list(found.evidence), "missing": list(found.missing)}  # fmt: skip
    return _file(about, [json.dumps(event) for event in (*_tracks(found), *_wait_arrows(found))])


def _tracks(found: Diagnosis) -> Iterator[dict[str, object]]:
    """Culprits above victims, each in the order of ranks."""
    culprits = {culprit.rank: culprit for culprit in found.culprits}
    victims = {victim.rank: victim for victim in found.victims}
    for place, rank in enumerate([*sorted(culprits), *sorted(victims.keys() - culprits)]):
        name = f"rank {rank}" + " (culprit)" * (rank in culprits)
        yield _meta("thread_name", 0, rank, name=name)
        yield _meta("thread_sort_index", 0, rank, sort_index=place)
        if rank in culprits:
            culprit = culprits[rank]
            yield _span(rank, culprit.kind, "culprit", {"why": culprit.why})
        else:
            victim = victims[rank]
            args = {"group": victim.group, "waits for": format_ranks(sorted(victim.waits_for))}
            yield _span(rank, _call(victim), "victim", args)
    yield _meta("process_name", 0, 0, name="ranks")


def _call(victim: Waiting) -> str:
    return f"{victim.op} #{victim.seq} of {victim.group}"


def _span(rank: int, name: str, kind: str, args: dict[str, str]) -> dict[str, object]:
    return {"ph": "X", "pid": 0, "tid": rank, "ts": 0.0, "dur": _LENGTH, "name": name, "cat": kind,
            "args": args}  # fmt: skip


def _wait_arrows(found: Diagnosis) -> Iterator[dict[str, object]]:
    culprits = {culprit.rank for culprit in found.culprits}
    shown = culprits | {victim.rank for victim in found.victims}
    number = 0
    for victim in found.victims:
        others = [rank for rank in victim.waits_for if rank in shown]
        for other in sorted(others, key=lambda rank: (rank not in culprits, rank))[:_MOST]:
            number += 1
            for phase, rank, at in (("s", victim.rank, 0.4), ("f", other, 0.6)):
                yield {"ph": phase, "pid": 0, "tid": rank, "ts": at * _LENGTH, "id": number,
                       "name": "waits for", "cat": "waits", "bp": "e"}  # fmt: skip


_NOTE = 300  # characters of a note or a list of ranks
_PLACES = 1000  # more threads than one lane ever needs


def render_timeline(timeline: Timeline) -> str:
    """The last iteration as a Chrome trace."""
    indices = range(len(timeline.graph.classes))
    early = max((-_earliest(timeline, i) for i in indices), default=0)
    tracks = [_Track(timeline, index, early) for index in indices]
    lines = [json.dumps(event) for track in tracks for event in track.names()]
    for track in tracks:
        lines += track.events()
    lines += _arrows(timeline, tracks)
    about = {
        "made_by": "prism replay",
        "world": str(timeline.graph),
        "iteration_ns": timeline.iteration_ns,
        "iteration_begins_ns": early,
        "provenance": [text for text in timeline.prices.sources if not text.startswith("none")],
        **{f"slices_{key}": short(value) for key, value in timeline.graph.programs.source.items()},
    }
    return _file(about, lines)


def render_pairs(comparison: TraceComparison) -> str:
    """The predicted and the real timeline of every traced rank, one below the other."""
    lines: list[str] = []
    found = comparison.compared
    both = (("predicted", found.predicted), ("real", found.real))
    tracks = [
        (timeline, int(timeline.graph.classes.of[one.rank]), f"rank {one.rank}, {what}")
        for one in found.ranks
        for what, timeline in both
    ]
    early = max((-_earliest(timeline, index) for timeline, index, _ in tracks), default=0)
    for number, (timeline, index, title) in enumerate(tracks):
        track = _Track(timeline, index, early, number, title)
        lines += [json.dumps(event) for event in track.names()]
        lines += track.events()
    about = {
        "made_by": "prism compare",
        "predicted_ns": found.predicted_ns,
        "real_ns": found.real_ns,
        "iteration_begins_ns": early,
    }
    return _file(about, lines)


def _file(about: Mapping[str, object], events: list[str]) -> str:
    head = f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n"traceEvents": [\n'
    return head + ",\n".join(events) + "\n]}\n"


def _earliest(timeline: Timeline, index: int) -> int:
    """When a class begins with the iteration; 0 at the latest."""
    starts = (
        timeline.spans(index)["ready"].min(initial=0),
        timeline.host_spans(index)[:, 1].min(initial=0),
    )
    return int(min(starts))


@dataclass(frozen=True)
class _Place:
    """Where a span lies: for arrows."""

    thread: int
    start: int
    ready: int
    end: int


class _Track:
    """One class as one process; times are ``early`` ns later than the timeline's."""

    def __init__(
        self, timeline: Timeline, index: int, early: int, process: int = -1, title: str = ""
    ) -> None:
        self.timeline, self.index, self.title = timeline, index, title
        self.process = index if process < 0 else process
        self.program: Program = timeline.graph.program_list[index]
        self.spans = timeline.spans(index).copy()
        for column in ("ready", "start", "end"):
            self.spans[column] += early
        self.hosts = timeline.host_spans(index)
        self.hosts[:, 1:] += early
        self.threads: dict[int, str] = {}
        self.thread_of = self._spread()
        self.host_thread = len(timeline.lanes) * _PLACES
        if len(self.hosts):
            self.threads[self.host_thread] = "host"

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

    def names(self) -> Iterator[dict[str, object]]:
        """Process and thread names, sorted as classes and lanes are."""
        classes = self.timeline.graph.classes
        ranks = format_ranks(classes.ranks(self.index).tolist())
        count = classes.counts[self.index]
        name = self.timeline.graph.class_name(self.index)
        title = f"{name}: {counted(count, 'rank')} ({_cut(ranks)})"
        yield _meta("process_name", self.process, 0, name=self.title or title)
        yield _meta("process_sort_index", self.process, 0, sort_index=self.process)
        for thread, name in sorted(self.threads.items()):
            yield _meta("thread_name", self.process, thread, name=name)
            yield _meta("thread_sort_index", self.process, thread, sort_index=thread)

    def events(self) -> Iterator[str]:
        """The spans, each before what lies inside it."""
        known: dict[tuple[int, ...], str] = {}
        columns = ("name", "phase", "microbatch", "chunk", "group", "peer", "site", "note", "shape",
                   "dtype", "num_in", "num_out")  # fmt: skip
        keys = zip(*(self.program.ops[c][self.spans["op"]].tolist() for c in columns), strict=True)
        sources = self._sources()
        rows = zip(self.spans.tolist(), self.thread_of.tolist(), keys, sources, strict=True)
        for (op, _, ready, start, end), thread, key, source in rows:
            body = known.get((*key, source))
            if body is None:
                body = known[(*key, source)] = self._body(op, source)
            at = f'"pid": {self.process}, "tid": {thread}'
            when = f'"ts": {_us(ready)}, "dur": {_us(end - ready)}'
            yield f'{{"ph": "X", {at}, {when}, {body}, "op": {op}}}}}'
            if start > ready:
                yield (
                    f'{{"ph": "X", {at}, "ts": {_us(ready)}, "dur": {_us(start - ready)}, '
                    f'"name": "waiting", "cat": "waiting"}}'
                )

        for op, start, end in self.hosts.tolist():
            row = self.program.ops[op]
            step = label(PHASE_NAMES[row["phase"]], int(row["microbatch"]), int(row["chunk"]))
            name = json.dumps(f"issues {NAMES[row['name']]} {step}".removesuffix(" -"))
            yield (
                f'{{"ph": "X", "pid": {self.process}, "tid": {self.host_thread}, '
                f'"ts": {_us(start)}, "dur": {_us(end - start)}, "name": {name}, '
                f'"cat": "host", "args": {{"op": {op}}}}}'
            )

    def _sources(self) -> list[int]:
        """Provenance of every span, index into prices.sources."""
        prices, of = self.timeline.prices, self.timeline.graph.matched_calls.of
        ops = self.spans["op"]
        if not len(ops):
            return []
        meeting = of[self.index][ops]
        called = prices.collective_source[meeting] if len(prices.collective_source) else 0
        found: list[int] = np.where(
            meeting >= 0, called, prices.compute_source[self.index][ops]
        ).tolist()
        return found

    def _body(self, at: int, source: int) -> str:
        """Name, category, and the arguments as far as the last brace."""
        op, program = self.program[at], self.program
        size = int(max(program.bytes_in[at], program.bytes_out[at]))
        args = {
            "step": label(op.phase, op.microbatch, op.chunk),
            "group": op.group,
            "peer": op.peer or None,
            "bytes": size or None,
            "dtype": op.dtype,
            "shape": op.shape,
            "site": op.site,
            "flops": max(op.flops, 0) or None,
            "kernels": max(op.kernels, 0) or None,
            "note": _cut(op.note),
            "duration is": self.timeline.prices.sources[source].partition(" (")[0],
        }
        kept = {key: value for key, value in args.items() if value not in (None, "")}
        step = f" {args['step']}" if op.phase else ""
        name = json.dumps(f"{op.name}{step}")
        category = json.dumps(op.phase or "outside")
        return f'"name": {name}, "cat": {category}, "args": {json.dumps(kept)[:-1]}'

    def places(self) -> dict[int, _Place]:
        """Where the span of every op lies."""
        columns = (self.spans[n].tolist() for n in ("op", "start", "ready", "end"))
        return {
            op: _Place(thread, start, ready, end)
            for op, start, ready, end, thread in zip(*columns, self.thread_of.tolist(), strict=True)
        }


def _arrows(timeline: Timeline, tracks: list[_Track]) -> Iterator[str]:
    """Pairs of s and f events between classes; spans without duration get none."""
    meet = timeline.graph.matched_calls
    places = [track.places() for track in tracks]
    number = 0
    for first in np.flatnonzero(np.diff(meet.start) > 1).tolist():
        ends = [(c, places[c].get(op)) for c, op in meet.members(first)]
        there = [(c, place) for c, place in ends if place is not None and place.end > place.start]
        if len(there) < 2:
            continue
        row = tracks[there[0][0]].program.ops[meet.ops[meet.start[first]]]
        pair = NAMES[row["name"]] in ("send", "recv")
        last = there[0] if pair else max(there, key=lambda item: item[1].ready)
        for other in there:
            if other[0] == last[0]:
                continue
            number += 1
            name = "message" if pair else "came last"
            for phase, (index, place) in (("s", last), ("f", other)):
                bind = ', "bp": "e"' if phase == "f" else ""
                at = _us((place.start + place.end) // 2)  # surely inside the span, not on its edge
                yield (
                    f'{{"ph": "{phase}", "pid": {index}, "tid": {place.thread}, "ts": {at}, '
                    f'"id": {number}, "name": "{name}", "cat": "flow"{bind}}}'
                )


def _meta(what: str, process: int, thread: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _us(ns: int) -> str:
    """Microseconds with all three decimals; never negative."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _cut(text: str) -> str:
    return text if len(text) <= _NOTE else text[:_NOTE] + " …"
