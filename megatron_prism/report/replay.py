"""A timeline as text of one page of a terminal, and as a page: what replay.js draws.

In : Timeline, or two of them.  Out: plain text, columns aligned; HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.groups import short_name
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.gpu_state import states_of
from megatron_prism.core.programs.ops import PHASE_NAMES, label
from megatron_prism.core.programs.program import Program
from megatron_prism.core.programs.slices import OF_RANKS
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes, format_ns, format_share
from megatron_prism.memory.peaks import module_of
from megatron_prism.replay.costs.host import MODELLED
from megatron_prism.replay.rates import Value
from megatron_prism.replay.timeline import Timeline, mean_parts
from megatron_prism.replay.uncertainty.interval import Uncertainty
from megatron_prism.report import words
from megatron_prism.report.chrome_trace import render_timeline
from megatron_prism.report.memory import largest, timeline_memory
from megatron_prism.report.metrics import (
    Metrics,
    PathPart,
    sources_of,
    timeline_metrics,
    to_json,
)
from megatron_prism.report.page import Data, render_page

_SCRIPT = Path(__file__).with_name("replay.js")
_MAX_CLASSES = 24  # columns of classes
_MAX_PARTS = 14  # rows of the critical path
_SHOWN = 5e-4  # of an iteration: less is 0.0 %
_VARIES = 0.03  # of a host's time: from here on a single number misleads
_MAX_LINKS = 2  # of a kind
# of where the programs are from, what only scripts compare
_DETAILS = (
    *job_settings.KEYS,
    "tokens_per_iteration",
    "model_flops_per_iteration",
    # what each rank says of its own host, GPU and process has rows, or is a part of another answer
    *OF_RANKS,
)
_ABOUT = ("recipe", "megatron_core", "torch", "tier", "device")  # below the title of a page
_SHORT = 100  # characters of a provenance that fits in a line
_LABEL = 12  # characters of a row's name
_CONTINUED = 15  # blanks before what continues a row
_INDENTED = 25  # blanks before what continues a row without a name


def render_text(timeline: Timeline, verbose: bool = False) -> str:
    """Write the summary, ending in a newline; ``verbose``: also what the data are based on."""
    metrics = timeline_metrics(timeline)
    parts = (
        _head(metrics, verbose),
        _accounts(metrics),
        _critical_path(metrics),
        _calls(metrics),
        _sources(metrics, verbose),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def format_flops(flops: float) -> str:
    """Write a rate as ``412.3 TFLOP/s``."""
    if flops >= 1e11:
        return f"{flops / 1e12:,.1f} TFLOP/s"
    return f"{flops / 1e9:,.3g} GFLOP/s"


# -- the head: the iteration in a few rows --------------------------------------------------------
@dataclass(frozen=True)
class _Row:
    """A row of the head; one without a name continues the row above it."""

    name: str
    text: str


def _named(name: str, texts: Iterable[str]) -> list[_Row]:
    """Return rows of which the first has the name."""
    rows: list[_Row] = []
    for text in texts:
        # the rows below the first continue it
        rows.append(_Row("" if rows else name, text))
    return rows


def _head(metrics: Metrics, verbose: bool) -> str:
    lines = folded(f"{metrics.sizes}, {metrics.headline.assumes}")
    lines += folded(metrics.world)
    rows = _source_rows(metrics, verbose)
    rows += _iteration_rows(metrics)
    # an iteration without time has no shares
    if metrics.iteration_ns:
        rows += _share_rows(metrics)
        rows += _host_rows(metrics)
    rows += _named("clock", _clocks(metrics.source))
    rows.append(_Row("tokens/s", _value(metrics.tokens_per_s, "{:,.0f}".format)))
    rows.append(_Row("per GPU", _value(metrics.flops_per_gpu, format_flops)))
    rows.append(_Row("MFU", _value(metrics.mfu, format_share)))
    if metrics.precision:
        rows.append(_Row("precision", metrics.precision))
    for row in rows:
        indent = _CONTINUED if row.name else _INDENTED
        lines += folded(f"  {row.name:<{_LABEL}} {row.text}", indent)
    return "\n".join(lines)


def _source_rows(metrics: Metrics, verbose: bool) -> list[_Row]:
    """Say where the programs are from, and what was changed."""
    source = dict(metrics.source)
    what_if = source.pop("what-if", None)
    without = source.pop("without", None)
    texts: list[str] = []
    for key, text in source.items():
        # settings are long, and are asked for with -v
        if verbose or key not in _DETAILS:
            texts.append(f"{key} {text}")
    rows = [_Row("slices", "; ".join(texts) or "do not say where they are from")]
    if without is not None:
        rows.append(_Row("without", without))
    if what_if is not None:
        rows.append(_Row("assumed", what_if))
    return rows


def _iteration_rows(metrics: Metrics) -> list[_Row]:
    """Say how long the iteration is, and between which bounds it lies."""
    rows = [_Row("iteration", f"{metrics.headline.text}  ({_basis(metrics)})")]
    # a machine that is measured throughout has no range
    if metrics.high_ns > metrics.low_ns:
        text = f"{format_ns(metrics.low_ns)} and {format_ns(metrics.high_ns)}, nine times in ten"
        if metrics.uncertainties:
            text += "; what is not measured:"
        rows.append(_Row("between", text))
        for uncertainty in metrics.uncertainties:
            rows += _named("", _uncertainty(uncertainty))
    return rows


def _share_rows(metrics: Metrics) -> list[_Row]:
    """Say where the time of all ranks goes, and which links are busy."""
    computing = f"{format_share(metrics.computing)} of all ranks' time"
    exposed = f"{format_share(metrics.exposed)} communication that nothing hides"
    bubble = f"{format_share(metrics.bubble)} waiting for other ranks"
    rows = [_Row("computing", computing), _Row("exposed", exposed), _Row("bubble", bubble)]
    # parts too small to show are left out
    if metrics.idle >= _SHOWN:
        rows.append(_Row("idle", f"{format_share(metrics.idle)} GPUs waiting for their hosts"))
    return rows + _named("links", _links(metrics))


def _host_rows(metrics: Metrics) -> list[_Row]:
    """Say how much hosts delay the iteration, and how well that is known."""
    rows: list[_Row] = []
    # delays too small to show are left out
    if metrics.host is not None and metrics.host >= _SHOWN:
        text = f"{format_share(metrics.host)} of the critical path: the host launches kernels late"
        rows.append(_Row("host", text))

    # the first answer is of the fastest host
    if metrics.hosts:
        _, fastest_ns = metrics.hosts[0]
        _, slowest_ns = metrics.hosts[-1]
        if slowest_ns > (1 + _SHOWN) * fastest_ns:
            answers = ", ".join(f"{index}: {format_ns(ns)}" for index, ns in metrics.hosts)
            rows.append(_Row("", f"by the host's index {answers}"))
    # slices of older releases count the host's delays as work
    if metrics.host_unknown:
        rank_count = sum(figures.count for figures in metrics.classes)
        text = f"slices of {metrics.host_unknown:,} of {rank_count:,} ranks hold their host's "
        text += "delays in the segments: capture them again with this release"
        rows.append(_Row("", text))
    # the slowest rank of many is far above the median
    spread = metrics.host_spread or 0
    if metrics.host and spread >= _VARIES:
        text = f"a host varies by {format_share(spread, 0)} from iteration to iteration, and the "
        rows.append(_Row("", text + "slowest rank's counts: prism predict"))
    return rows


_LIMITED = 0.5  # of the time: from here on a GPU is at its limit


def _clocks(source: Mapping[str, str]) -> list[str]:
    """Say at which clocks GPUs captured: those of the lowest and of the highest."""
    by_clock = sorted(states_of(source).items(), key=lambda item: item[1].mhz)
    if not by_clock:
        return []
    # one entry where all ranks ran at one clock
    extremes = dict([by_clock[0], by_clock[-1]])
    texts: list[str] = []
    for rank, state in extremes.items():
        relation = "at" if state.limited >= _LIMITED else "below"
        clock = f"{state.mhz:,} of {state.most_mhz:,} MHz"
        power = f"{state.watts} of {state.limit_watts} W, {state.celsius} C"
        limit = f"rank {rank:,} was captured {relation} its GPU's limit"
        texts.append(f"{clock}, {power}: {limit}")
    return texts


def _links(metrics: Metrics) -> list[str]:
    """Say which links are the busiest: first of the network, then inside nodes."""
    name_of_class = {figures.index: figures.name for figures in metrics.classes}
    texts: list[str] = []
    for is_network in (True, False):
        busiest = [link for link in metrics.links if link.network == is_network][:_MAX_LINKS]
        for link in busiest:
            kind = "NIC" if is_network else "NVLinks"
            direction = "into" if link.into else "out of"
            text = f"{kind} {direction} {name_of_class[link.owner]} busy "
            text += f"{format_share(link.busy)} of the time"
            if link.shared:
                text += f", {format_share(link.shared)} shared by several calls"
            texts.append(text)
    return texts


def _uncertainty(uncertainty: Uncertainty) -> list[str]:
    """Say what it may do to the iteration, why, and what to type."""
    below = f"−{format_ns(uncertainty.low_ns)}" if uncertainty.low_ns else "0"
    above = format_ns(uncertainty.high_ns) if uncertainty.high_ns else "0"
    lines = [f"{uncertainty.what:<9} {below} to +{above}: {uncertainty.why}"]
    if uncertainty.fix:
        lines.append(f"{'':<9} {uncertainty.fix}")
    return lines


def shares_of_kinds(metrics: Metrics) -> str:
    """Say what the critical path rests on: ``80 % measured, 20 % modelled``."""
    ns_of_kind: dict[str, float] = {}
    for source in metrics.sources:
        # measured, modelled, assumed: what stands before the colon
        kind, _, _ = source.text.partition(":")
        if source.text.endswith("(cpu)"):
            kind += " on a CPU"
        ns_of_kind[kind] = ns_of_kind.get(kind, 0) + source.path_ns
    total_ns = sum(ns_of_kind.values())
    shares: list[str] = []
    for kind, ns in ns_of_kind.items():
        if ns:
            shares.append(f"{format_share(ns / total_ns, 0)} {kind}")
    return ", ".join(shares) or "nothing takes time"


def _basis(metrics: Metrics) -> str:
    """Say what the iteration's time rests on."""
    shares = shares_of_kinds(metrics)
    # a path without time rests on nothing
    if not any(source.path_ns for source in metrics.sources):
        return shares
    hosts = "hosts as late as in the slices"
    if any(MODELLED in source.text for source in metrics.sources):
        hosts = "hosts as late as calls of Python and kernels let expect"
    if metrics.host is None:
        hosts = "host never late"
    links = "links shared" if metrics.links else "no contention"
    return f"{shares}; {links}, {hosts}"


def _value(value: Value, write: Callable[[float], str]) -> str:
    """Write a figure with its basis, or why it is not known."""
    if value.value is None:
        return f"unknown: {value.basis}"
    return f"{write(value.value)}  ({value.basis})"


# -- tables ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Unit:
    """The unit in which a column of times is written, and its length in ns."""

    name: str
    ns: int

    def write(self, ns: int) -> str:
        """Write a time without the unit."""
        if not ns:
            return "0"
        # a nanosecond has no parts
        return f"{ns / self.ns:,.2f}" if self.ns > 1 else f"{ns:,}"


def _unit(ns: int) -> _Unit:
    """Choose the unit for a column of times whose largest is ``ns``."""
    if ns >= 10**10:
        return _Unit("s", 10**9)
    if ns >= 10**6:
        return _Unit("ms", 10**6)
    if ns >= 10**3:
        return _Unit("us", 10**3)
    return _Unit("ns", 1)


def _accounts(metrics: Metrics) -> str:
    """Say where each class's iteration went: a column per class, whose parts sum to the total."""
    if not metrics.iteration_ns:
        return ""
    shown = metrics.classes[:_MAX_CLASSES]
    unit = _unit(metrics.iteration_ns)

    def times(name: str, values: Iterable[int]) -> list[str]:
        return [name, *map(unit.write, values)]

    rows = [
        ["", *(figures.name for figures in shown)],
        ["ranks", *(f"{figures.count:,}" for figures in shown)],
        times("compute", [figures.compute for figures in shown]),
    ]
    # groups in which some class that is shown waits, or communicates
    for group in metrics.mean("exposed"):
        values = [figures.exposed.get(group, 0) for figures in shown]
        if any(values):
            rows.append(times(f"exposed {short_name(group)}", values))
    for group in metrics.mean("waiting"):
        values = [figures.waiting.get(group, 0) for figures in shown]
        if any(values):
            rows.append(times(f"waiting {short_name(group)}", values))
    rows.append(times("idle", [figures.idle for figures in shown]))
    rows.append(times("= total", [figures.total for figures in shown]))
    rows.append(times("compute on critical path", [figures.critical for figures in shown]))
    rows.append(times("least slack", [figures.slack for figures in shown]))
    peaks = [figures.peak_bytes for figures in shown]
    rows.append(["peak live memory", *map(_bytes, peaks)])
    lines = [f"where each rank's iteration went, {unit.name}", *columns(rows)]
    hidden_count = len(metrics.classes) - len(shown)
    if hidden_count:
        lines += ["", f"… and {hidden_count} classes more: --json has all"]
    return "\n".join(lines)


def _bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def merged_path(metrics: Metrics) -> list[PathPart]:
    """Return the critical path with the steps of all provenances together, the largest first.

    The table of sources tells provenances apart.
    """
    merged: dict[tuple[str, str, str], PathPart] = {}
    for part in metrics.path:
        key = (part.phase, part.what, part.group)
        before = merged.get(key)
        if before is None:
            merged[key] = part
        else:
            ns, count = before.ns + part.ns, before.count + part.count
            merged[key] = replace(before, ns=ns, count=count)
    return sorted(merged.values(), key=lambda part: -part.ns)


def _critical_path(metrics: Metrics) -> str:
    if not metrics.path:
        return ""
    parts = merged_path(metrics)
    total_ns = sum(part.ns for part in metrics.path)
    rows = [["the critical path", "share", "steps", ""]]
    for part in parts[:_MAX_PARTS]:
        name = f"{part.phase} {part.what} {short_name(part.group)}".rstrip()
        share = format_share(part.ns / total_ns)
        rows.append([name, share, f"{part.count:,}", format_ns(part.ns)])
    # what is not shown by itself adds up to the rest of the path
    other_ns = sum(part.ns for part in parts[_MAX_PARTS:])
    if other_ns:
        rows.append(["other", format_share(other_ns / total_ns), "", format_ns(other_ns)])
    return "\n".join(columns(rows))


def _calls(metrics: Metrics) -> str:
    if not metrics.calls:
        return ""
    rows = [["calls of a rank that does them", "ranks", "calls", "bytes", "moves", "waits"]]
    for call in metrics.calls:
        row = [
            f"{call.name} {short_name(call.group)}",
            f"{call.ranks:,}",
            f"{call.calls:,.1f}".removesuffix(".0"),
            format_bytes(round(call.bytes)),
            format_ns(round(call.moving)),
            format_ns(round(call.waiting)),
        ]
        rows.append(row)
    return "\n".join(columns(rows))


def _sources(metrics: Metrics, verbose: bool) -> str:
    """Say what times rest on: shares first, and what the data are based on once, below."""
    if not metrics.sources:
        return ""
    # 1: nothing takes time, and each share is 0
    total_ns = sum(source.path_ns for source in metrics.sources) or 1
    lines = ["where the times are from (share of the critical path)"]
    details: list[str] = []
    for source in metrics.sources:
        text, detail = source.text, ""
        # a long one has its details in brackets
        if len(source.text) >= _SHORT:
            text, _, detail = source.text.partition(" (")
            detail = detail.removesuffix(")")
        lines += folded(f"  {format_share(source.path_ns / total_ns):>7}  {text}", 11)
        if detail and detail not in details:
            details.append(detail)
    if details and not verbose:
        lines.append("  -v says what these are")
    elif verbose:
        for detail in details:
            lines += folded(f"  {detail}", 4)
    return "\n".join(lines)


# -- spans of a page ------------------------------------------------------------------------------
# first: index of the first span that it stands for; times in ns
MERGED = np.dtype(
    [("first", "i4"), ("count", "i4"), ("ready", "i8"), ("start", "i8"), ("end", "i8")]
)


def step_codes(timeline: Timeline, index: int, spans: np.ndarray) -> np.ndarray:
    """Return a number for every span, equal for spans of one phase, microbatch and chunk."""
    rows = timeline.graph.program_list[index].ops[spans["op"]]
    codes = rows["phase"].astype(np.int64)
    for name in ("microbatch", "chunk"):
        # -1 (none) becomes 0, so that each column has its own digits
        column = rows[name].astype(np.int64)
        codes = codes * (int(column.max(initial=0)) + 2) + column + 1
    return np.asarray(codes)


def merge(spans: np.ndarray, codes: np.ndarray, epsilon: int) -> np.ndarray:
    """Merge short spans that share lane, step and slice of time.

    Args:
        spans: Of one class.
        codes: Of their steps.
        epsilon: ns below which a span is short, and length of a slice; 0: nothing is merged.

    Returns:
        MERGED [n], by time.
    """
    single = np.empty(len(spans), dtype=MERGED)
    single["first"] = np.arange(len(spans))
    single["count"] = 1
    for name in ("ready", "start", "end"):
        single[name] = spans[name]
    if not epsilon or not len(spans):
        return single

    # short ones, sorted by what they share and by time
    is_short = spans["end"] - spans["ready"] < epsilon
    short = np.flatnonzero(is_short)
    ready = spans["ready"][short]
    lane = spans["lane"][short]
    order = short[np.lexsort((ready, ready // epsilon, codes[short], lane))]
    # neighbours with equal keys are merged
    keys = np.stack([spans["lane"][order], codes[order], spans["ready"][order] // epsilon])
    differs = (np.diff(keys, axis=1) != 0).any(axis=0)
    begin = np.flatnonzero(np.append(True, differs)[: len(order)])

    # the first of each group stands for it
    merged = single[order[begin]]
    if len(begin):
        merged["count"] = np.diff(np.append(begin, len(order)))
        merged["start"] = np.minimum.reduceat(spans["start"][order], begin)
        merged["end"] = np.maximum.reduceat(spans["end"][order], begin)
    together = np.concatenate([single[~is_short], merged])
    return together[np.argsort(together["ready"], kind="stable")]


@dataclass
class _PathRow:
    """A stretch of the critical path in one class; times in ns."""

    owner: int
    start: int
    end: int


def path_rows(timeline: Timeline) -> list[_PathRow]:
    """Return the critical path by classes; a call is shown where it was reached.

    Steps that follow each other in one class are one row.
    """
    matched_calls = timeline.graph.matched_calls
    rows: list[_PathRow] = []
    for owner, number, start, end, _ in timeline.critical_path():
        # a call is of all its members
        if owner < 0:
            # the class that the path came from, if it takes part; else the first
            members = [index for index, _ in matched_calls.members(number)]
            owner = members[0]
            if rows and rows[-1].owner in members:
                owner = rows[-1].owner
        if rows and rows[-1].owner == owner and rows[-1].end == start:
            rows[-1].end = end
        elif end > start:
            rows.append(_PathRow(owner, start, end))
    return rows


# -- page -----------------------------------------------------------------------------------------
ROWS = 64  # classes that are drawn
TABLE = 256  # classes in tables
SPANS = 90_000  # spans of a page, about 2 MB


def page_data(timeline: Timeline) -> Data:
    """Return the whole page as one value."""
    metrics = timeline_metrics(timeline)
    programs = timeline.graph.programs
    memory = timeline_memory(programs)
    drawn = _drawn_classes(metrics)
    spans_of_class = {index: timeline.spans(index) for index in drawn}
    merged = _merged_spans(timeline, spans_of_class)
    names = _Names(timeline)
    rows: list[Data] = []
    for index in drawn:
        lanes = names.lanes(index, spans_of_class[index], merged.spans[index])
        rows.append({"name": metrics.classes[index].name, "lanes": lanes})
    return {
        "figures": {**_figures(metrics), "memory_bytes": largest(memory)},
        "title": job_settings.title(programs.source, programs.world),
        "lanes": list(timeline.lanes),
        "rows": rows,
        "kinds": list(names.kinds),
        "steps": list(names.steps),
        "sources": list(timeline.prices.sources),
        "path": _path(timeline, drawn),
        "merged": merged.epsilon,
        "missing": len(metrics.classes) - len(drawn),
        "parts": list(mean_parts(map(vars, metrics.classes)).items()),
        "memory": memory,
    }


@dataclass(frozen=True)
class _MergedSpans:
    """Spans that are few enough for a page.

    Attributes:
        spans: Class -> MERGED.
        epsilon: ns below which spans were merged; 0: none were.
    """

    spans: Mapping[int, np.ndarray]
    epsilon: int


def _merged_spans(timeline: Timeline, spans_of_class: Mapping[int, np.ndarray]) -> _MergedSpans:
    """Merge spans, shorter ones first, until all fit on a page."""
    codes: dict[int, np.ndarray] = {}
    for index, spans in spans_of_class.items():
        codes[index] = step_codes(timeline, index, spans)
    epsilon = 0
    while True:
        merged: dict[int, np.ndarray] = {}
        for index, spans in spans_of_class.items():
            merged[index] = merge(spans, codes[index], epsilon)
        fits = sum(map(len, merged.values())) <= SPANS
        # longer spans are to be seen, however many there are
        if fits or epsilon > timeline.iteration_ns // 64:
            return _MergedSpans(merged, epsilon)
        # first spans below an 8,192nd of the iteration, then of twice the length each time
        if epsilon:
            epsilon *= 2
        else:
            epsilon = max(1, timeline.iteration_ns // 8192)


def _drawn_classes(metrics: Metrics) -> list[int]:
    """Return the classes that are drawn: those most on the critical path, in their order."""
    ranked = sorted(metrics.classes, key=lambda figures: (-figures.critical, figures.index))
    return sorted(figures.index for figures in ranked[:ROWS])


def _figures(metrics: Metrics) -> Data:
    """Return all figures, with those of the most classes that a table has."""
    value = asdict(metrics)
    value["exposed_by_group"] = metrics.mean("exposed")
    value["waiting_by_group"] = metrics.mean("waiting")
    value["path"] = list(map(asdict, merged_path(metrics)))
    value["basis"] = shares_of_kinds(metrics)
    value["all_classes"] = len(metrics.classes)
    value["classes"] = value["classes"][:TABLE]
    return value


def _path(timeline: Timeline, drawn: Sequence[int]) -> list[list[int]]:
    """Return columns of the critical path: place of the drawn class (-1: none), start, length."""
    place_of_class = {index: place for place, index in enumerate(drawn)}
    rows = path_rows(timeline)
    places = [place_of_class.get(row.owner, -1) for row in rows]
    starts = [row.start for row in rows]
    lengths = [row.end - row.start for row in rows]
    return [places, starts, lengths]


class _Names:
    """Interns what spans are called, over all classes.

    Attributes:
        timeline: Of the spans.
        kinds: What an op is -> its number.
        steps: (label, words) of a step -> its number.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.kinds: dict[tuple[object, ...], int] = {}
        self.steps: dict[tuple[str, str], int] = {}

    def lanes(self, index: int, spans: np.ndarray, merged: np.ndarray) -> list[Data]:
        """Return the columns of every lane of a class."""
        first_spans = spans[merged["first"]]
        kinds, steps = self._numbers(index, first_spans)
        lanes = first_spans["lane"]
        values: list[Data] = []
        for lane in np.unique(lanes).tolist():
            is_on_lane = lanes == lane
            on_lane = merged[is_on_lane]
            counts: list[int] = []
            # no column where each stands for itself
            if (on_lane["count"] > 1).any():
                counts = on_lane["count"].tolist()
            value: Data = {
                "lane": lane,
                "count": counts,
                "kind": kinds[is_on_lane].tolist(),
                "step": steps[is_on_lane].tolist(),
                "ready": np.diff(on_lane["ready"], prepend=0).tolist(),
                "wait": (on_lane["start"] - on_lane["ready"]).tolist(),
                "run": (on_lane["end"] - on_lane["start"]).tolist(),
            }
            values.append(value)
        return values

    def _numbers(self, index: int, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of each span's kind and step."""
        program = self.timeline.graph.program_list[index]
        ops = spans["op"]
        rows = program.ops[ops]
        looks = rows[_LOOKS].tolist()
        step_keys = rows[_STEP].tolist()
        sizes = program.num_bytes[ops].tolist()
        sources = sources_of(self.timeline, index, ops).tolist()
        notes_of_op = _notes(program)
        kind_of_look: dict[tuple[object, ...], int] = {}
        kinds: list[int] = []
        for op, look, size, source in zip(ops.tolist(), looks, sizes, sources, strict=True):
            # ops that look alike are one kind
            notes = notes_of_op.get(op, ())
            key = (size, source, notes, *look)
            if key not in kind_of_look:
                kind_of_look[key] = self._kind(program, op, size, source, notes)
            kinds.append(kind_of_look[key])
        steps: list[int] = []
        for phase, microbatch, chunk in step_keys:
            steps.append(self._step(PHASE_NAMES[phase], microbatch, chunk))
        return np.array(kinds, dtype=np.int64), np.array(steps, dtype=np.int64)

    def _kind(
        self, program: Program, index: int, size: int, source: int, notes: Iterable[int]
    ) -> int:
        """Return the number of what an op is."""
        op = program[index]
        modules = words.modules([module_of(program.strings[note]) for note in notes])
        kind = (words.op(op, size), op.phase, modules, op.site, source)
        return self.kinds.setdefault(kind, len(self.kinds))

    def _step(self, phase: str, microbatch: int, chunk: int) -> int:
        """Return the number of a step."""
        step = (label(phase, microbatch, chunk), words.step(phase, microbatch, chunk))
        return self.steps.setdefault(step, len(self.steps))


_LOOKS = ["phase", "name", "group", "site", "note"]  # fields of an op that a page shows
_STEP = ["phase", "microbatch", "chunk"]


def _notes(program: Program) -> dict[int, tuple[int, ...]]:
    """Return notes of what each op allocates, as numbers, each once."""
    events = program.allocations[program.allocations["bytes"] > 0]
    notes_of_op: dict[int, dict[int, None]] = {}
    for op, note in zip(events["before"].tolist(), events["note"].tolist(), strict=True):
        notes_of_op.setdefault(op, {})[note] = None
    return {op: tuple(notes) for op, notes in notes_of_op.items()}


def render_html(
    timeline: Timeline,
    name: str = "",
    other: tuple[str, Timeline] | None = None,
    tables: Sequence[object] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write the page.

    Args:
        timeline: What it is of.
        name: Of it, where there is another.
        other: What it is compared with, and its name.
        tables: (title, head, rows) of what the two differ in, beside that.
        notes: On the comparison.
    """
    data = page_data(timeline)
    text = render_text(timeline)
    title = data["title"]
    lanes = list(data["lanes"])
    data |= {"name": name, "other": None, "tables": tables, "notes": notes}
    # the other job's page is a part of this one
    if other is not None:
        other_name, other_timeline = other
        other_data = {**page_data(other_timeline), "name": other_name}
        del other_data["memory"]
        data["other"] = other_data
        lanes += other_data["lanes"]
        title += f", against {other_name}"
        if other_data["title"] != data["title"]:
            title += f": {other_data['title']}"
        text += f"\n{other_name}\n\n{render_text(other_timeline)}"
    data["groups"] = [lane for lane in dict.fromkeys(lanes) if lane != "main"]
    source = timeline.graph.programs.source
    about = [f"{key} {source[key]}" for key in _ABOUT if key in source]
    subtitle = " · ".join([str(timeline.graph), *about])
    command = "prism compare" if tables else "prism replay"
    scripts = ("memory.js", "diagram.js")
    return render_page(command, title, subtitle, _SCRIPT, data, text, scripts)


@renders(Timeline)
class TimelineRenderer(Renderer):
    """Writes timelines; ``values`` are for JSON, ``metrics`` the same as one value."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
    trace = staticmethod(render_timeline)
    values = staticmethod(to_json)
    metrics = staticmethod(timeline_metrics)
