"""The page of a prediction, which predict.js draws.

In : a Prediction.  Out: HTML (page.py is its frame, predict.js fills it).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.features.predict.distributions import Quantile
from megatron_prism.features.predict.predict import Prediction
from megatron_prism.report.page import render_page

_SCRIPT = Path(__file__).with_name("predict.js")


def render_distribution(prediction: Prediction) -> str:
    """Write the page."""
    classes = {str(index): name for index, name in prediction.classes.items()}
    data = {**prediction.to_json(), "classes": classes}
    text = _lines("without variation", prediction.steady, prediction.quantiles)
    spreads = f"{prediction.graph}; spreads: {prediction.source.partition(':')[0]}"
    return render_page("prism predict", prediction.world, spreads, _SCRIPT, data, text)


def _lines(name: str, steady: float, quantiles: Sequence[Quantile]) -> str:
    """Write the quantiles for browsers without scripts."""
    rows = [f"{name}  {steady / 1e6:,.1f} ms"]
    for quantile in quantiles:
        if quantile.ns is not None:
            rows.append(f"p{100 * quantile.level:g}  {quantile.ns / 1e6:,.1f} ms")
    return "\n".join(rows) + "\n"


@renders(Prediction)
class PredictionRenderer(Renderer):
    """Writes predictions."""

    page = staticmethod(render_distribution)
