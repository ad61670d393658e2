"""Pages of predictions: one distribution, or several layouts side by side, drawn as SVG.

In : a Prediction, and its Study and RunPrediction if there are.  Out: HTML.  Labels come from
programs and are hostile: all text is escaped, and the content security policy lets nothing but our
own style in.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_prism.predict import Prediction, RunPrediction, Study
from megatron_prism.predict.compare import Chance, Comparison

_W, _H, _LEFT, _BELOW, _TOP = 720, 260, 70, 36, 14
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em;
color:#1b1f24;background:#fff}svg{width:100%;height:auto}h2{font-size:1.1em;margin-top:2em}
text{font:12px system-ui,sans-serif;fill:#1b1f24}.quiet{color:#59636e;fill:#59636e}
table{border-collapse:collapse}td,th{padding:2px 14px 2px 0;text-align:right}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}text{fill:#e6edf3}text.on{fill:#1b1f24}}"""
_BLUE, _RED, _GREY = "#2f6fd0", "#c2483d", "#8b949e"


def render_distribution(prediction: Prediction) -> str:
    """The page."""
    title, study, run = prediction.world, prediction.study, prediction.run
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p class=quiet>{prediction.samples:,} iterations drawn; {_text(prediction.source)}</p>",
        _quantiles(prediction),
        _section("Distribution of the iteration time", _histogram(prediction)),
        _section("Chance of at most", _cdf(prediction)),
    ]
    if study is not None:
        said = f"<p class=quiet>{_text(study.note)}</p>"
        parts += [
            _section("p95 and what varies: half and twice its spread", _tornado(study)),
            _section("p95 with one slow GPU, by class", _heat(study)),
            _section(
                f"p95 with a hot node ({study.hot[0].ranks} GPUs), one of each kind", _hot(study)
            ),
            _section("Scale", (_scale(study) if study.scale else "") + said),
        ]
    if run is not None:
        parts.append(_section(f"{run.plan.iterations:,} iterations", _run(run)))
    return whole(f"prism predict: {title}", parts)


def whole(title: str, parts: Sequence[str]) -> str:
    """A page of ``parts``, which nothing but our own style may enter."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\">"
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _section(title: str, body: str) -> str:
    return f"<h2>{_text(title)}</h2>{body}"


def _ms(ns: float | None) -> str:
    return "unknown" if ns is None else f"{ns / 1e6:,.1f} ms"


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{_text(c)}</td>' for c in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _quantiles(one: Prediction) -> str:
    rows = [("without variation", _ms(one.steady), "")]
    for q in one.quantiles:
        between = (
            f"needs {q.needed:,} samples" if q.ns is None else f"{_ms(q.low)} to {_ms(q.high)}"
        )
        rows.append((f"p{100 * q.level:g}", _ms(q.ns), between))
    return _rows(("", "iteration", "95 % interval"), rows)


class _Plot:
    """Axes from (x0, y0) to (x1, y1), and what is drawn on them."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int = _H) -> None:
        self.x, self.y, self.height = x, y, height
        self.parts: list[str] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        tall = self.height - _BELOW - _TOP
        return _LEFT + across * (_W - _LEFT - 44), _TOP + (1 - up) * tall

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
        points = " ".join("{:.1f},{:.1f}".format(*self.at(*p)) for p in zip(xs, ys, strict=True))
        self.parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )

    def bar(self, x0: float, x1: float, y0: float, y1: float, colour: str) -> None:
        (left, low), (right, high) = self.at(x0, y0), self.at(x1, y1)
        self.parts.append(
            f'<rect x="{min(left, right):.1f}" y="{min(low, high):.1f}" fill="{colour}" '
            f'width="{abs(right - left):.1f}" height="{abs(low - high):.1f}"/>'
        )

    def label(self, x: float, y: float, text: str, anchor: str = "middle", up: float = 0) -> None:
        across, down = self.at(x, y)
        self.text(across, down - up, text, anchor)

    def text(self, across: float, down: float, text: str, anchor: str, kind: str = "") -> None:
        """Text at a place of the picture, not of the axes."""
        place = f'x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}" class="{kind}"'
        self.parts.append(f"<text {place}>{_text(text)}</text>")

    def ticks(self, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]] = ()) -> None:
        for x, text in xs:
            self.label(x, self.y[0], text, up=-20)
        for y, text in ys:
            across, down = self.at(self.x[0], y)
            self.text(across - 6, down + 4, text, "end")

    def svg(self, name: str) -> str:
        return (
            f'<svg viewBox="0 0 {_W} {self.height}" role="img" aria-label="{_text(name)}">'
            f"{''.join(self.parts)}</svg>"
        )


def _ticks_ms(low: float, high: float, count: int = 6) -> list[tuple[float, str]]:
    return [(x, f"{x / 1e6:,.4g} ms") for x in np.linspace(low, high, count).tolist()]


def _levels() -> np.ndarray:
    return np.linspace(0.005, 0.995, 199)


def _histogram(one: Prediction) -> str:
    edges = np.linspace(one.times[0], one.times[-1], 41)
    if edges[0] == edges[-1]:
        return "<p>Every iteration takes the same time.</p>"
    share = np.diff(np.interp(edges, one.times, _levels()))
    plot = _Plot((edges[0], edges[-1]), (0, float(share.max())))
    for left, right, part in zip(edges[:-1], edges[1:], share, strict=True):
        plot.bar(left, right - (right - left) * 0.1, 0, float(part), _BLUE)
    plot.ticks(_ticks_ms(edges[0], edges[-1]))
    return plot.svg("distribution of the iteration time")


def _cdf(one: Prediction) -> str:
    low, high = one.times[0], one.times[-1]
    plot = _Plot((low, high), (0, 1))
    plot.line(one.times, _levels().tolist(), _BLUE)
    plot.ticks(_ticks_ms(low, high), [(y, f"{100 * y:g} %") for y in (0, 0.25, 0.5, 0.75, 1)])
    return plot.svg("chance of at most so much time")


def _tornado(study: Study) -> str:
    bars = study.tornado[:14]
    if not bars:
        return "<p>Nothing varies.</p>"
    values = [v for bar in bars for v in (bar.halved, bar.doubled, bar.base)]
    low, high = min(values), max(values)
    height = 46 * len(bars) + _BELOW + _TOP
    plot = _Plot((low, high), (0, len(bars)), height)
    for place, bar in enumerate(bars):
        y = len(bars) - place - 1
        plot.bar(bar.base, bar.halved, y + 0.1, y + 0.5, _BLUE)
        plot.bar(bar.base, bar.doubled, y + 0.1, y + 0.5, _RED)
        said = f"{bar.what}: {_ms(bar.halved)} / {_ms(bar.doubled)}"
        plot.label(low, y + 0.6, said, "start")
    plot.ticks(_ticks_ms(low, high, 4))
    return plot.svg("tornado of sensitivities")


def _heat(study: Study) -> str:
    placed = study.placement
    most = max(max(row) for row in placed.p95) / study.base - 1
    rows, columns = len(placed.factors), len(placed.classes)
    plot = _Plot((0, columns), (0, rows), 34 * rows + _BELOW + _TOP)
    for i, row in enumerate(placed.p95):
        for j, value in enumerate(row):
            over = value / study.base - 1
            depth = max(0.0, min(1.0, over / most)) if most > 0 else 0.0
            colour = (
                f"rgb({255 - int(61 * depth)},{245 - int(173 * depth)},{240 - int(179 * depth)})"
            )
            plot.bar(j, j + 0.96, i + 0.04, i + 1, colour)
            if columns <= 16:
                across, down = plot.at(j + 0.48, i + 0.5)
                plot.text(across, down + 4, f"{100 * over:+.1f}", "middle", "on")
    every = math.ceil(columns / 16)
    plot.ticks(
        [(j + 0.48, str(c)) for j, c in enumerate(placed.classes) if j % every == 0],
        [(i + 0.5, f"x {factor:g}") for i, factor in enumerate(placed.factors)],
    )
    gains = ", ".join(f"x {f:g}: {g:.3f}" for f, g in zip(placed.factors, placed.gain, strict=True))
    where = f"Worst over best class: {gains}" if columns > 1 else "There is one class"
    said = f"<p class=quiet>Percent over p95 without it. {_text(where)}.</p>"
    return plot.svg("placement of a slow GPU") + said


def _hot(study: Study) -> str:
    rows = []
    for at, (factor, _) in enumerate(study.hot[0].p95):
        found = [node.p95[at][1] for node in study.hot]
        shown = [f"{_ms(ns)} ({100 * (ns / study.base - 1):+.1f} %)" for ns in found]
        gain = [f"{max(found) / min(found):.3f}"] if len(found) > 1 else []
        rows.append((f"x {factor:g}", *shown, *gain))
    last = ["worst over best"] if len(study.hot) > 1 else []
    return _rows(("slower", *(f"node {n.node}" for n in study.hot), *last), rows)


def _scale(study: Study) -> str:
    points = study.scale
    xs = [math.log2(point.ranks) for point in points]
    values = [v for p in points for v in (p.steady, p.p50, p.p95)]
    low, high = min(values), max(values)
    plot = _Plot((xs[0], xs[-1]), (low, high))
    for name, colour in (("steady", _GREY), ("p50", _BLUE), ("p95", _RED)):
        plot.line(xs, [getattr(point, name) for point in points], colour)
        plot.label(xs[-1], getattr(points[-1], name), name, "end", up=6)
    every = math.ceil(len(xs) / 8)
    plot.ticks(
        [(x, f"{p.ranks:,}") for x, p in list(zip(xs, points, strict=True))[::every]],
        _ticks_ms(low, high, 4),
    )
    return plot.svg("iteration time over ranks")


def _run(run: RunPrediction) -> str:
    def days(ns: float) -> str:
        return f"{ns / 86_400e9:,.2f} days"

    rows: list[tuple[Any, ...]] = [("iterations alone", days(run.work)), ("mean", days(run.mean))]
    rows += [(f"p{100 * level:g}", days(ns)) for level, ns in run.quantiles]
    rows.append(("failures", f"{run.failures:,.1f}"))
    if run.chance is not None:
        low, high = 100 * (run.chance_low or 0), 100 * (run.chance_high or 0)
        said = f"{100 * run.chance:.1f} % ({low:.1f} to {high:.1f} %)"
        rows.append((f"within {days(run.plan.deadline or 0)}", said))
    return _rows(("", ""), rows)


_COLOURS = ("#2f6fd0", "#c2483d", "#3a8f4e", "#8a5fc0", "#b07d1a", "#4a8f95", "#8b949e")


def render_comparison(found: Comparison) -> str:
    """The page."""
    said = f"{found.samples:,} iterations of each, one network for all, seed {found.seed}"
    parts = [
        f"<h1>{_text(' or '.join(one.name for one in found.layouts))}</h1>",
        f"<p class=quiet>{_text(said)}</p>",
        _section("Iteration time", _layout_quantiles(found)),
        _section("Chance of at most", _curves(found)),
        _section("Who is faster", _chances(found)),
    ]
    if found.note:
        parts.append(f"<p>Beware: {_text(found.note)}.</p>")
    return whole("prism predict --against", parts)


def _layout_quantiles(found: Comparison) -> str:
    head = ["layout", "ranks", "without variation"]
    head += [f"p{100 * one.level:g}" for one in found.layouts[0].quantiles]
    rows = []
    for one in found.layouts:
        cells = [
            _ms(q.ns) + (f" ({_ms(q.low)} to {_ms(q.high)})" if q.ns else "") for q in one.quantiles
        ]
        rows.append((one.name, f"{one.ranks:,}", _ms(one.steady), *cells))
    return _rows(head, rows)


def _curves(found: Comparison) -> str:
    low = min(one.times[0] for one in found.layouts)
    high = max(one.times[-1] for one in found.layouts)
    plot = _Plot((low, high), (0, 1))
    for place, one in enumerate(found.layouts):
        colour = _COLOURS[place % len(_COLOURS)]
        plot.line(one.times, _levels().tolist(), colour)
        at = (place + 1) / (len(found.layouts) + 1)
        plot.label(one.times[min(198, int(at * 199))], at, one.name, "start", up=-4)
    shares = [(y, f"{100 * y:g} %") for y in (0, 0.25, 0.5, 0.75, 1)]
    plot.ticks(_ticks_ms(low, high), shares)
    return plot.svg("chance of at most so much time, by layout")


def _chances(found: Comparison) -> str:
    head = ("layout", f"{found.layouts[0].name} is faster", "fastest of all")
    rows = [(one.name, _said(one.slower), _said(one.fastest)) for one in found.layouts]
    return _rows(head, rows)


def _said(one: Chance | None) -> str:
    if one is None:
        return ""
    return f"{100 * one.share:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f} %)"
