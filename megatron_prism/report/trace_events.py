"""Chrome trace events (JSON), for ui.perfetto.dev and chrome://tracing.

Format: "Trace Event Format" (Google, 2016): X complete events, s/f flows, M names.  ``ts`` and
``dur`` are microseconds; their three decimals are whole ns.  Perfetto drops what is before 0
(``TraceSorter::Stream::Push``, trace_sorter.h).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

Event = dict[str, object]


def trace_file(about: Mapping[str, object], events: Iterable[Event]) -> str:
    """Write a trace.

    Args:
        about: what the viewer shows as metadata.
        events: in the order in which spans nest.
    """
    head = f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n"traceEvents": [\n'
    return head + ",\n".join(map(json.dumps, events)) + "\n]}\n"


def span(
    process: int,
    thread: int,
    start_ns: int,
    end_ns: int,
    name: str,
    category: str,
    args: Mapping[str, object] | None = None,
) -> Event:
    """Make a complete event; ``args`` are shown when it is selected."""
    event: Event = {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "name": name,
        "cat": category,
    }
    if args is not None:
        event["args"] = args
    return event


def arrow(
    number: int,
    name: str,
    category: str,
    start: tuple[int, int, float],
    end: tuple[int, int, float],
) -> Iterator[Event]:
    """Make the two events of an arrow.

    Args:
        number: of the arrow, unique in the trace.
        name: of the arrow.
        category: of both events.
        start: process, thread and ns where it begins.
        end: the same where it ends.
    """
    for phase, (process, thread, at_ns) in (("s", start), ("f", end)):
        yield {
            "ph": phase,
            "pid": process,
            "tid": thread,
            "ts": at_ns / 1000,
            "id": number,
            "name": name,
            "cat": category,
            "bp": "e",
        }


def thread_name(process: int, thread: int, name: str, place: int) -> Iterator[Event]:
    """Name a thread; ``place`` is where it stands among the threads of its process."""
    yield metadata("thread_name", process, thread, name=name)
    yield metadata("thread_sort_index", process, thread, sort_index=place)


def metadata(kind: str, process: int, thread: int, **args: object) -> Event:
    """Make a metadata event, such as ``process_name``."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
