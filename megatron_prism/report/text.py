"""A timeline on one page of a terminal: plain text, no colours, columns aligned."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prism.core import job_settings
from megatron_prism.core.units import format_bytes, format_ns
from megatron_prism.replay.costs.host import MODELLED
from megatron_prism.replay.interval import Uncertainty
from megatron_prism.replay.timeline import Timeline
from megatron_prism.report.metrics import ClassMetrics, Metrics, Value, timeline_metrics

__all__ = ["render"]

_BLOCK = 8  # classes side by side
_CLASSES = 24  # classes at all
_PARTS = 14  # rows of the critical path
_VARIES = 0.03  # of a host's time: from here on a single number misleads
_LINKS = 2  # of a kind
# of where the programs are from, what only scripts compare
_DETAILS = (*job_settings.KEYS, "tokens_per_iteration", "model_flops_per_iteration",
            "host_index")  # fmt: skip
_SHORT = 100  # characters of a provenance that fits in a line


def render(timeline: Timeline, verbose: bool = False) -> str:
    """The summary, ending in a newline; ``verbose``: also what the data are based on."""
    found = timeline_metrics(timeline)
    parts = [_head(found, verbose), _accounts(found), _path(found), _calls(found)]
    parts.append(_sources(found, verbose))
    return "\n\n".join(part for part in parts if part) + "\n"


def render_verbose(timeline: Timeline) -> str:
    """``render`` with everything."""
    return render(timeline, verbose=True)


def format_flops(flops: float) -> str:
    """``412.3 TFLOP/s``."""
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:,.3g} GFLOP/s"


def _head(found: Metrics, verbose: bool) -> str:
    lines = [found.sizes, found.world]
    source = {**found.source}
    what_if = source.pop("what-if", None)
    keys = [key for key in source if verbose or key not in _DETAILS]
    said = "; ".join(f"{key} {source[key]}" for key in keys)
    rows = [("slices", said or "do not say where they are from")]
    if what_if is not None:
        rows.append(("what if", what_if))
    rows.append(("iteration", f"{format_ns(found.iteration_ns)}  ({_basis(found)})"))
    if found.high_ns > found.low_ns:
        between = f"{format_ns(found.low_ns)} to {format_ns(found.high_ns)}"
        what = "; what is not measured:" if found.uncertainties else ""
        rows.append(("between", f"{between}, nine times in ten{what}"))
        for one in found.uncertainties:
            rows += [("", line) for line in _uncertainty(one)]
    if found.iteration_ns:
        rows.append(("computing", f"{found.computing:.1%} of all ranks' time"))
        rows.append(("exposed", f"{found.exposed:.1%} communication that nothing hides"))
        rows.append(("bubble", f"{found.bubble:.1%} waiting for other ranks, or idle"))
        rows += [("links" if not i else "", text) for i, text in enumerate(_links(found))]
        if found.host is not None:
            rows.append(("host", f"{found.host:.1%} of the critical path: GPUs wait for Python"))
        if found.host_unknown:
            size = sum(one.count for one in found.classes)
            ranks = (
                f"slices of {found.host_unknown:,} of {size:,} ranks hold their host's delays in"
            )
            rows.append(("", f"{ranks} the segments: capture them again with this release"))
        if found.host and (found.host_spread or 0) >= _VARIES:
            varies = f"a host varies by {found.host_spread:.0%} from iteration to iteration"
            rows.append(("", f"{varies}, and the slowest rank's counts: prism predict"))
    rows.append(("tokens/s", _value(found.tokens_per_s, lambda v: f"{v:,.0f}")))
    rows.append(("per GPU", _value(found.flops_per_gpu, format_flops)))
    rows.append(("MFU", _value(found.mfu, lambda v: f"{v:.1%}")))
    return "\n".join([*lines, *(f"  {name:<12} {text}" for name, text in rows)])


def _links(found: Metrics) -> list[str]:
    """The busiest links of every kind."""
    lines = []
    for network in (True, False):
        mine = [one for one in found.links if one.network == network][:_LINKS]
        for one in mine:
            name = next(c.name for c in found.classes if c.index == one.owner)
            where = "NIC" if network else "NVLinks"
            way = "into" if one.into else "out of"
            shared = f", {one.shared:.1%} shared by several calls" if one.shared else ""
            lines.append(f"{where} {way} {name} busy {one.busy:.1%} of the time{shared}")
    return lines


def _uncertainty(one: Uncertainty) -> list[str]:
    """What it may do to the iteration, why, and what to type."""
    less, more = (format_ns(ns) if ns else "0" for ns in (one.low_ns, one.high_ns))
    lines = [f"{one.what:<9} −{less} to +{more}: {one.why}".replace("−0 ", "0 ")]
    return lines + ([f"{'':<9} {one.fix}"] if one.fix else [])


def _basis(found: Metrics) -> str:
    kinds: dict[str, float] = {}
    for source in found.sources:
        kind = source.text.partition(":")[0]
        kind += " on a CPU" if source.text.endswith("(cpu)") else ""
        kinds[kind] = kinds.get(kind, 0) + source.path_ns
    total = sum(kinds.values())
    if not total:
        return "nothing takes time"
    shares = [f"{ns / total:.0%} {kind}" for kind, ns in kinds.items() if ns]
    modelled = any(MODELLED in source.text for source in found.sources)
    late = "as their kernels let expect" if modelled else "as in the slices"
    late = "host never late" if found.host is None else f"hosts as late {late}"
    links = "links shared" if found.links else "no contention"
    return f"{', '.join(shares)}; {links}, {late}"


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
    blocks = [shown[i : i + _BLOCK] for i in range(0, len(shown), _BLOCK)]
    lines = [f"where each rank's iteration went, {unit}"]
    for block in blocks:
        lines += _account_block(found, block, scale)
        lines.append("")
    if len(shown) < len(found.classes):
        lines += [f"… and {len(found.classes) - len(shown)} classes more: --json has all", ""]
    return "\n".join(lines[:-1])


def _account_block(found: Metrics, block: Sequence[ClassMetrics], scale: int) -> list[str]:
    rows: list[list[str]] = [
        ["", *(one.name for one in block)],
        ["ranks", *(f"{one.count:,}" for one in block)],
        ["compute", *(_scaled(one.compute, scale) for one in block)],
    ]
    for what in ("exposed", "waiting"):
        for group in found.mean(what):
            values = [getattr(one, what).get(group, 0) for one in block]
            if any(values):
                rows.append([f"{what} {group}", *(_scaled(v, scale) for v in values)])
    rows.append(["idle", *(_scaled(one.idle, scale) for one in block)])
    rows.append(["= total", *(_scaled(one.total, scale) for one in block)])
    rows.append(["compute on critical path", *(_scaled(one.critical, scale) for one in block)])
    rows.append(["least slack", *(_scaled(one.slack, scale) for one in block)])
    peaks = [one.peak_bytes for one in block]
    rows.append(["peak live memory", *("unknown" if p is None else format_bytes(p) for p in peaks)])
    return _columns(rows)


def _path(found: Metrics) -> str:
    if not found.path:
        return ""
    total = sum(part.ns for part in found.path)
    sums: dict[str, list[int]] = {}  # of all provenances together, which the next table tells apart
    for part in found.path:
        one = sums.setdefault(f"{part.phase} {part.what} {part.group}".rstrip(), [0, 0])
        one[0] += part.ns
        one[1] += part.count
    parts = sorted(sums.items(), key=lambda item: -item[1][0])
    rows = [["what the critical path is made of", "share", "steps", ""]]
    for name, (ns, count) in parts[:_PARTS]:
        rows.append([name, f"{ns / total:.1%}", f"{count:,}", format_ns(ns)])
    rest = sum(ns for _, (ns, _) in parts[_PARTS:])
    if rest:
        rows.append(["other", f"{rest / total:.1%}", "", format_ns(rest)])
    return "\n".join(_columns(rows))


def _calls(found: Metrics) -> str:
    if not found.calls:
        return ""
    head = ["communication of a rank that does it", "ranks", "calls", "bytes", "moves", "waits"]
    rows = [
        [
            f"{call.name} {call.group}",
            f"{call.ranks:,}",
            f"{call.calls:,.1f}".removesuffix(".0"),
            format_bytes(round(call.bytes)),
            format_ns(round(call.moving)),
            format_ns(round(call.waiting)),
        ]
        for call in found.calls
    ]
    rows.insert(0, head)
    return "\n".join(_columns(rows))


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
        lines.append(f"  {source.path_ns / total:6.1%}  {what}")
        details.setdefault(detail.removesuffix(")"))
    said = [f"  {detail}" for detail in details if detail]
    return "\n".join([*lines, *(said if verbose or not said else ["  -v says what these are"])])


def _unit(ns: int) -> tuple[str, int]:
    """The unit in which a column of times is written."""
    for unit, scale in (("s", 10**10), ("ms", 10**6), ("us", 10**3)):
        if ns >= scale:
            return unit, scale if unit != "s" else 10**9
    return "ns", 1


def _scaled(ns: int, scale: int) -> str:
    if not ns:
        return "0"
    return f"{ns / scale:,.2f}" if scale > 1 else f"{ns:,}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
