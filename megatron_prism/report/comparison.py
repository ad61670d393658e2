"""How does a browser show layouts side by side?  One page without scripts, as ``distribution``'s.

In : a Comparison.  Out: HTML.  Names are a user's and hostile: all text is escaped.
"""

from __future__ import annotations

from megatron_prism.predict.compare import Chance, Comparison
from megatron_prism.report import distribution
from megatron_prism.report.distribution import _ms

__all__ = ["render"]

_COLOURS = ("#2f6fd0", "#c2483d", "#3a8f4e", "#8a5fc0", "#b07d1a", "#4a8f95", "#8b949e")


def render(found: Comparison) -> str:
    """The page."""
    said = f"{found.samples:,} iterations of each, one network for all, seed {found.seed}"
    parts = [
        f"<h1>{distribution._text(' or '.join(one.name for one in found.layouts))}</h1>",
        f"<p class=quiet>{distribution._text(said)}</p>",
        distribution._section("Iteration time", _quantiles(found)),
        distribution._section("Chance of at most", _curves(found)),
        distribution._section("Who is faster", _chances(found)),
    ]
    if found.note:
        parts.append(f"<p>Beware: {distribution._text(found.note)}.</p>")
    return distribution.whole("prism predict --against", parts)


def _quantiles(found: Comparison) -> str:
    head = ["layout", "ranks", "without variation"]
    head += [f"p{100 * one.level:g}" for one in found.layouts[0].quantiles]
    rows = []
    for one in found.layouts:
        cells = [
            _ms(q.ns) + (f" ({_ms(q.low)} to {_ms(q.high)})" if q.ns else "") for q in one.quantiles
        ]
        rows.append((one.name, f"{one.ranks:,}", _ms(one.steady), *cells))
    return distribution._rows(head, rows)


def _curves(found: Comparison) -> str:
    low = min(one.times[0] for one in found.layouts)
    high = max(one.times[-1] for one in found.layouts)
    plot = distribution._Plot((low, high), (0, 1))
    for place, one in enumerate(found.layouts):
        colour = _COLOURS[place % len(_COLOURS)]
        plot.line(one.times, distribution._levels().tolist(), colour)
        at = (place + 1) / (len(found.layouts) + 1)
        plot.label(one.times[min(198, int(at * 199))], at, one.name, "start", up=-4)
    shares = [(y, f"{100 * y:g} %") for y in (0, 0.25, 0.5, 0.75, 1)]
    plot.ticks(distribution._ticks_ms(low, high), shares)
    return plot.svg("chance of at most so much time, by layout")


def _chances(found: Comparison) -> str:
    head = ("layout", f"{found.layouts[0].name} is faster", "fastest of all")
    rows = [(one.name, _said(one.slower), _said(one.fastest)) for one in found.layouts]
    return distribution._rows(head, rows)


def _said(one: Chance | None) -> str:
    if one is None:
        return ""
    return f"{100 * one.share:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f} %)"
