"""A timeline as text of one page of a terminal, and as a page: what replay.js draws.

In : Timeline, or two of them.  Out: plain text, columns aligned; HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megatron_prism.core import job_settings
from megatron_prism.core.columns import columns, folded
from megatron_prism.core.gpu_state import GPU_CLOCK, states_of
from megatron_prism.core.groups import short_name
from megatron_prism.core.ops import PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes, format_ns, format_share
from megatron_prism.memory.peaks import module_of
from megatron_prism.replay.costs.host import MODELLED
from megatron_prism.replay.interval import Uncertainty
from megatron_prism.replay.rates import Value
from megatron_prism.replay.timeline import Timeline, mean_parts
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
_CLASSES = 24  # classes at all
_PARTS = 14  # rows of the critical path
_SHOWN = 5e-4  # of an iteration: less is 0.0 %
_VARIES = 0.03  # of a host's time: from here on a single number misleads
_LINKS = 2  # of a kind
# of where the programs are from, what only scripts compare
_DETAILS = (*job_settings.KEYS, "tokens_per_iteration", "model_flops_per_iteration",
            "host_index", GPU_CLOCK)  # fmt: skip
_ABOUT = ("recipe", "megatron_core", "torch", "tier", "device")  # below the title of a page
_SHORT = 100  # characters of a provenance that fits in a line


def render_text(timeline: Timeline, verbose: bool = False) -> str:
    """The summary, ending in a newline; ``verbose``: also what the data are based on."""
    found = timeline_metrics(timeline)
    parts = [_head(found, verbose), _accounts(found), _critical_path(found), _calls(found)]
    parts.append(_sources(found, verbose))
    return "\n\n".join(part for part in parts if part) + "\n"


def format_flops(flops: float) -> str:
    """``412.3 TFLOP/s``."""
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:,.3g} GFLOP/s"


def _head(found: Metrics, verbose: bool) -> str:
    first = found.headline
    lines = folded(f"{found.sizes}, {first.assumes}")
    lines += folded(found.world)
    source = {**found.source}
    what_if = source.pop("what-if", None)
    keys = [key for key in source if verbose or key not in _DETAILS]
    said = "; ".join(f"{key} {source[key]}" for key in keys)
    rows = [("slices", said or "do not say where they are from")]
    if what_if is not None:
        rows.append(("what if", what_if))
    rows.append(("iteration", f"{first.text}  ({_basis(found)})"))
    if found.high_ns > found.low_ns:
        between = f"{format_ns(found.low_ns)} and {format_ns(found.high_ns)}"
        what = "; what is not measured:" if found.uncertainties else ""
        rows.append(("between", f"{between}, nine times in ten{what}"))
        for one in found.uncertainties:
            rows += [("", line) for line in _uncertainty(one)]
    if found.iteration_ns:
        rows.append(("computing", f"{format_share(found.computing)} of all ranks' time"))
        rows.append(("exposed", f"{format_share(found.exposed)} communication that nothing hides"))
        rows.append(("bubble", f"{format_share(found.bubble)} waiting for other ranks, or idle"))
        rows += [("links" if not i else "", text) for i, text in enumerate(_links(found))]
        if found.host is not None and found.host >= _SHOWN:
            late = f"{format_share(found.host)} of the critical path"
            rows.append(("host", f"{late}: the host launches kernels late"))
        if found.hosts and found.hosts[-1][1] > (1 + _SHOWN) * found.hosts[0][1]:
            each = ", ".join(f"{index}: {format_ns(ns)}" for index, ns in found.hosts)
            rows.append(("", f"by the host's index {each}"))
        if found.host_unknown:
            size = sum(one.count for one in found.classes)
            ranks = f"slices of {found.host_unknown:,} of {size:,} ranks"
            rows.append(("", f"{ranks} hold their host's delays in the segments: capture them "
                         "again with this release"))  # fmt: skip
        if found.host and (spread := found.host_spread or 0) >= _VARIES:
            varies = f"a host varies by {format_share(spread, 0)} from iteration to iteration"
            rows.append(("", f"{varies}, and the slowest rank's counts: prism predict"))
    rows += [("clock" if not i else "", text) for i, text in enumerate(_clocks(source))]
    rows.append(("tokens/s", _value(found.tokens_per_s, lambda v: f"{v:,.0f}")))
    rows.append(("per GPU", _value(found.flops_per_gpu, format_flops)))
    rows.append(("MFU", _value(found.mfu, format_share)))
    if found.precision:
        rows.append(("precision", found.precision))
    for name, text in rows:
        lines += folded(f"  {name:<12} {text}", 15 + 10 * (not name))
    return "\n".join(lines)


_LIMITED = 0.5  # of the time: from here on a GPU is at its limit


def _clocks(source: Mapping[str, str]) -> list[str]:
    """The GPUs that captured, by their clock: of the lowest and of the highest rank's."""
    states = sorted(states_of(source).items(), key=lambda one: one[1].mhz)
    found = []
    for rank, one in dict(states[:1] + states[-1:]).items() if states else ():
        at = "at" if one.limited >= _LIMITED else "below"
        text = f"{one.mhz:,} of {one.most_mhz:,} MHz, {one.watts} of {one.limit_watts} W"
        found.append(f"{text}, {one.celsius} C: rank {rank:,} was captured {at} its GPU's limit")
    return found


def _links(found: Metrics) -> list[str]:
    """The busiest links of every kind."""
    lines = []
    for network in (True, False):
        mine = [one for one in found.links if one.network == network][:_LINKS]
        for one in mine:
            name = next(c.name for c in found.classes if c.index == one.owner)
            where = "NIC" if network else "NVLinks"
            way = "into" if one.into else "out of"
            shared = f", {format_share(one.shared)} shared by several calls" if one.shared else ""
            lines.append(f"{where} {way} {name} busy {format_share(one.busy)} of the time{shared}")
    return lines


def _uncertainty(one: Uncertainty) -> list[str]:
    """What it may do to the iteration, why, and what to type."""
    less, more = (format_ns(ns) if ns else "0" for ns in (one.low_ns, one.high_ns))
    lines = [f"{one.what:<9} −{less} to +{more}: {one.why}".replace("−0 ", "0 ")]
    return lines + ([f"{'':<9} {one.fix}"] if one.fix else [])


def shares_of_kinds(found: Metrics) -> str:
    """``80 % measured, 20 % modelled`` of the critical path."""
    kinds: dict[str, float] = {}
    for source in found.sources:
        kind = source.text.partition(":")[0] + " on a CPU" * source.text.endswith("(cpu)")
        kinds[kind] = kinds.get(kind, 0) + source.path_ns
    total = sum(kinds.values())
    shares = [f"{format_share(ns / total, 0)} {kind}" for kind, ns in kinds.items() if ns]
    return ", ".join(shares) or "nothing takes time"


def _basis(found: Metrics) -> str:
    if not any(source.path_ns for source in found.sources):
        return shares_of_kinds(found)
    modelled = any(MODELLED in source.text for source in found.sources)
    late = "as calls of Python and kernels let expect" if modelled else "as in the slices"
    late = "host never late" if found.host is None else f"hosts as late {late}"
    links = "links shared" if found.links else "no contention"
    return f"{shares_of_kinds(found)}; {links}, {late}"


def _value(value: Value, write: object) -> str:
    if value.value is None:
        return f"unknown: {value.basis}"
    return f"{write(value.value)}  ({value.basis})"  # type: ignore[operator]


def _accounts(found: Metrics) -> str:
    """Where each class's iteration went: one column per class, whose parts add up to the total."""
    if not found.iteration_ns:
        return ""
    shown = found.classes[:_CLASSES]
    unit, scale = _unit(found.iteration_ns)

    def scaled(ns: int) -> str:
        return "0" if not ns else f"{ns / scale:,.2f}" if scale > 1 else f"{ns:,}"

    rows: list[list[str]] = []

    def row(what: str, cells: Iterable[int | None], write: Callable[[int], str] = scaled) -> None:
        rows.append([what, *("unknown" if one is None else write(one) for one in cells)])

    row("ranks", (one.count for one in shown), "{:,}".format)
    row("compute", (one.compute for one in shown))
    for what in ("exposed", "waiting"):
        for group in found.mean(what):
            values = [getattr(one, what).get(group, 0) for one in shown]
            if any(values):
                row(f"{what} {short_name(group)}", values)
    for name, field in (("idle", "idle"), ("= total", "total"), ("compute on critical path",
                        "critical"), ("least slack", "slack")):  # fmt: skip
        row(name, (getattr(one, field) for one in shown))
    row("peak live memory", (one.peak_bytes for one in shown), format_bytes)
    rows.insert(0, ["", *(one.name for one in shown)])
    lines = [f"where each rank's iteration went, {unit}", *columns(rows)]
    if len(shown) < len(found.classes):
        lines += ["", f"… and {len(found.classes) - len(shown)} classes more: --json has all"]
    return "\n".join(lines)


def merged_path(found: Metrics) -> list[PathPart]:
    """The critical path with the steps of all provenances together, the largest first; the next
    table tells those apart.
    """
    sums: dict[tuple[str, str, str], PathPart] = {}
    for part in found.path:
        key = part.phase, part.what, part.group
        first = sums.get(key, replace(part, ns=0, count=0))
        sums[key] = replace(first, ns=first.ns + part.ns, count=first.count + part.count)
    return sorted(sums.values(), key=lambda part: -part.ns)


def _critical_path(found: Metrics) -> str:
    if not found.path:
        return ""
    parts, total = merged_path(found), sum(part.ns for part in found.path)
    rows = [["the critical path", "share", "steps", ""]]
    for one in parts[:_PARTS]:
        name = f"{one.phase} {one.what} {short_name(one.group)}".rstrip()
        rows.append([name, format_share(one.ns / total), f"{one.count:,}", format_ns(one.ns)])
    if rest := sum(one.ns for one in parts[_PARTS:]):
        rows.append(["other", format_share(rest / total), "", format_ns(rest)])
    return "\n".join(columns(rows))


def _calls(found: Metrics) -> str:
    if not found.calls:
        return ""
    head = ["calls of a rank that does them", "ranks", "calls", "bytes", "moves", "waits"]
    rows = [[f"{call.name} {short_name(call.group)}", f"{call.ranks:,}",
             f"{call.calls:,.1f}".removesuffix(".0"), format_bytes(round(call.bytes)),
             format_ns(round(call.moving)), format_ns(round(call.waiting))]
            for call in found.calls]  # fmt: skip
    return "\n".join(columns([head, *rows]))


def _sources(found: Metrics, verbose: bool) -> str:
    """Shares first; what the data themselves are based on (in brackets) once, below."""
    if not found.sources:
        return ""
    total = sum(source.path_ns for source in found.sources) or 1
    lines = ["where the times are from (share of the critical path)"]
    details: dict[str, None] = {}
    for source in found.sources:
        what, _, detail = source.text.partition(" (")
        if len(source.text) < _SHORT:
            what, detail = source.text, ""
        lines += folded(f"  {format_share(source.path_ns / total):>7}  {what}", 11)
        details.setdefault(detail.removesuffix(")"))
    said = [line for detail in details if detail for line in folded(f"  {detail}", 4)]
    return "\n".join([*lines, *(said if verbose or not said else ["  -v says what these are"])])


def _unit(ns: int) -> tuple[str, int]:
    """The unit in which a column of times is written."""
    for unit, scale in (("s", 10**10), ("ms", 10**6), ("us", 10**3)):
        if ns >= scale:
            return unit, scale if unit != "s" else 10**9
    return "ns", 1


# first: index of the first span that it stands for
MERGED = np.dtype([("first", "i4"), ("count", "i4"),
                   *((name, "i8") for name in ("ready", "start", "end"))])  # fmt: skip


def step_codes(timeline: Timeline, index: int, spans: np.ndarray) -> np.ndarray:
    """A number for every span that is equal for spans of one phase, microbatch and chunk."""
    rows = timeline.graph.program_list[index].ops[spans["op"]]
    codes = rows["phase"].astype(np.int64)
    for name in ("microbatch", "chunk"):
        column = rows[name].astype(np.int64)
        codes = codes * (int(column.max(initial=0)) + 2) + column + 1
    return np.asarray(codes)


def merge(spans: np.ndarray, codes: np.ndarray, epsilon: int) -> np.ndarray:
    """MERGED [n], by time; spans shorter than ``epsilon`` ns that share lane, step and slice of
    that width become one.  With 0 nothing is merged.
    """
    found = np.empty(len(spans), dtype=MERGED)
    found["first"], found["count"] = np.arange(len(spans)), 1
    for name in ("ready", "start", "end"):
        found[name] = spans[name]
    if not epsilon or not len(spans):
        return found
    tiny = spans["end"] - spans["ready"] < epsilon
    small = np.flatnonzero(tiny)
    slot = spans["ready"][small] // epsilon
    order = small[np.lexsort((spans["ready"][small], slot, codes[small], spans["lane"][small]))]
    keys = np.stack([spans["lane"][order], codes[order], spans["ready"][order] // epsilon])
    first = np.append(True, (np.diff(keys, axis=1) != 0).any(axis=0))[: len(order)]
    begin = np.flatnonzero(first)
    one = found[order[begin]]
    if len(begin):
        one["count"] = np.diff(np.append(begin, len(order)))
        one["start"] = np.minimum.reduceat(spans["start"][order], begin)
        one["end"] = np.maximum.reduceat(spans["end"][order], begin)
    together = np.concatenate([found[~tiny], one])
    return together[np.argsort(together["ready"], kind="stable")]


def path_rows(timeline: Timeline) -> np.ndarray:
    """int64 [n, 3]: (class, start, end) of the critical path; a call is shown where it was reached.

    Steps that follow each other in one class are one row.
    """
    meet = timeline.graph.matched_calls
    rows: list[list[int]] = []
    for owner, number, start, end, _ in timeline.critical_path():
        if owner < 0:
            members = [index for index, _ in meet.members(number)]
            owner = rows[-1][0] if rows and rows[-1][0] in members else members[0]
        if rows and rows[-1][0] == owner and rows[-1][2] == start:
            rows[-1][2] = end
        elif end > start:
            rows.append([owner, start, end])
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


ROWS = 64  # classes that are drawn
TABLE = 256  # classes in tables
SPANS = 90_000  # spans of a page, about 2 MB


def page_data(timeline: Timeline) -> Data:
    """The whole page as one value."""
    found, programs = timeline_metrics(timeline), timeline.graph.programs
    memory = timeline_memory(programs)
    drawn = _drawn(found)
    names = _Names(timeline)
    spans = {index: timeline.spans(index) for index in drawn}
    codes = {index: step_codes(timeline, index, spans[index]) for index in drawn}
    epsilon, merged = 0, {i: merge(spans[i], codes[i], 0) for i in drawn}
    while sum(map(len, merged.values())) > SPANS and epsilon <= timeline.iteration_ns // 64:
        epsilon = 2 * epsilon or max(1, timeline.iteration_ns // 8192)
        merged = {i: merge(spans[i], codes[i], epsilon) for i in drawn}
    rows = [{"name": found.classes[index].name,
             "lanes": names.lanes(index, spans[index], merged[index])}
            for index in drawn]  # fmt: skip
    return {
        "figures": {**_figures(found), "memory_bytes": largest(memory)},
        "title": job_settings.title(programs.source, programs.world),
        "lanes": list(timeline.lanes),
        "rows": rows,
        "kinds": list(names.kinds),
        "steps": list(names.steps),
        "sources": list(timeline.prices.sources),
        "path": _path(timeline, drawn),
        "merged": epsilon,
        "missing": len(found.classes) - len(drawn),
        "parts": list(mean_parts(map(vars, found.classes)).items()),
        "memory": memory,
    }


def _drawn(found: Metrics) -> list[int]:
    """The classes that are drawn: those most on the critical path, in their order."""
    ranked = sorted(found.classes, key=lambda one: (-one.critical, one.index))
    return sorted(one.index for one in ranked[:ROWS])


def _figures(found: Metrics) -> Data:
    value = asdict(found)
    value["exposed_by_group"] = found.mean("exposed")
    value["waiting_by_group"] = found.mean("waiting")
    value["path"] = list(map(asdict, merged_path(found)))
    value["basis"] = shares_of_kinds(found)
    value["all_classes"] = len(found.classes)
    value["classes"] = value["classes"][:TABLE]
    return value


def _path(timeline: Timeline, drawn: list[int]) -> list[list[int]]:
    place = {index: row for row, index in enumerate(drawn)}
    rows = path_rows(timeline)
    owners = [place.get(owner, -1) for owner in rows[:, 0].tolist()]
    return [owners, rows[:, 1].tolist(), (rows[:, 2] - rows[:, 1]).tolist()]


class _Names:
    """Interns what spans are called, over all classes."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.kinds: dict[tuple[object, ...], int] = {}
        self.steps: dict[tuple[str, str], int] = {}

    def lanes(self, index: int, spans: np.ndarray, merged: np.ndarray) -> list[Data]:
        """The columns of every lane of class ``index``."""
        names = np.array(list(self._names(index, spans[merged["first"]])), dtype=np.int64)
        kinds, steps = names.reshape(-1, 2).T
        lanes = spans["lane"][merged["first"]]
        found = []
        for lane in np.unique(lanes).tolist():
            mine = np.flatnonzero(lanes == lane)
            one = merged[mine]
            count = one["count"].tolist() if (one["count"] > 1).any() else []
            columns = {"kind": kinds[mine], "step": steps[mine],
                       "ready": np.diff(one["ready"], prepend=0),
                       "wait": one["start"] - one["ready"],
                       "run": one["end"] - one["start"]}  # fmt: skip
            lists = {name: column.tolist() for name, column in columns.items()}
            found.append({"lane": lane, "count": count, **lists})
        return found

    def _names(self, index: int, spans: np.ndarray) -> Iterator[tuple[int, int]]:
        """(kind, step) of every span."""
        program = self.timeline.graph.program_list[index]
        rows, size = program.ops[spans["op"]], program.num_bytes[spans["op"]]
        source = sources_of(self.timeline, index, spans["op"])
        names = ("phase", "microbatch", "chunk", "name", "group", "site", "note")
        columns = (spans["op"], size, source, *(rows[name] for name in names))
        owners, known = _notes(program), dict[tuple[object, ...], int]()
        for op, num_bytes, code, phase, microbatch, chunk, *fields in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            notes = owners.get(op, ())
            key = (num_bytes, code, phase, notes, *fields)
            if key not in known:
                one = program[op]
                where = words.modules([module_of(program.strings[note]) for note in notes])
                kind = words.op(one, num_bytes), one.phase, where, one.site, code
                known[key] = self.kinds.setdefault(kind, len(self.kinds))
            step = PHASE_NAMES[phase], microbatch, chunk
            both = label(*step), words.step(*step)
            yield known[key], self.steps.setdefault(both, len(self.steps))


def _notes(program: Program) -> dict[int, tuple[int, ...]]:
    """Op -> notes of what it allocates, as numbers, each once."""
    events = program.allocations[program.allocations["bytes"] > 0]
    found: dict[int, dict[int, None]] = {}
    for op, note in zip(events["before"].tolist(), events["note"].tolist(), strict=True):
        found.setdefault(op, {})[note] = None
    return {op: tuple(notes) for op, notes in found.items()}


def render_html(
    timeline: Timeline,
    name: str = "",
    other: tuple[str, Timeline] | None = None,
    tables: Sequence[object] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        timeline: what it is of.
        name: of it, where there is another.
        other: what it is compared with, and its name.
        tables: (title, head, rows) of what the two differ in, beside that.
        notes: on the comparison.
    """
    data, said = page_data(timeline), render_text(timeline)
    title, lanes = data["title"], data["lanes"]
    data |= {"name": name, "other": None, "tables": tables, "notes": notes}
    if other is not None:
        data["other"] = {**page_data(other[1]), "name": other[0]}
        data["other"].pop("memory")
        title, lanes = f"{title}, against {other[0]}", [*lanes, *data["other"]["lanes"]]
        if data["other"]["title"] != data["title"]:
            title += f": {data['other']['title']}"
        said += f"\n{other[0]}\n\n{render_text(other[1])}"
    data["groups"] = [lane for lane in dict.fromkeys(lanes) if lane != "main"]
    source = timeline.graph.programs.source
    shown = [str(timeline.graph), *(f"{key} {source[key]}" for key in _ABOUT if key in source)]
    scripts = ("memory.js", "diagram.js")
    command = "prism compare" if tables else "prism replay"
    return render_page(command, title, " · ".join(shown), _SCRIPT, data, said, scripts)


@renders(Timeline)
class TimelineRenderer(Renderer):
    """Writes timelines; ``values`` are for JSON, ``metrics`` the same as one value."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
    trace = staticmethod(render_timeline)
    values = staticmethod(to_json)
    metrics = staticmethod(timeline_metrics)
