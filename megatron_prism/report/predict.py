"""Pages of predictions: one distribution, or several layouts side by side; predict.js draws them.

In : a Prediction, or a Comparison.  Out: HTML (page.py is its frame, predict.js fills it).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prism.predict import Prediction
from megatron_prism.predict.distributions import Quantile
from megatron_prism.predict.predict import Comparison
from megatron_prism.report.page import render_page


def render_distribution(prediction: Prediction) -> str:
    """The page; with a study and a whole run if the prediction has them."""
    classes = {str(index): name for index, name in prediction.classes.items()}
    data = {**prediction.to_json(), "classes": classes}
    text = _lines("without variation", prediction.steady, prediction.quantiles)
    spreads = f"{prediction.graph}; spreads: {prediction.source.partition(':')[0]}"
    return render_page("prism predict", prediction.world, spreads, "predict", data, text)


def render_comparison(found: Comparison) -> str:
    """The page."""
    title = " or ".join(one.name for one in found.layouts)
    text = "\n".join(_lines(one.name, one.steady, one.quantiles) for one in found.layouts)
    drawn = f"{found.samples:,} iterations of each, one network for all, seed {found.seed}"
    return render_page("prism predict --against", title, drawn, "predict", found.to_json(), text)


def _lines(name: str, steady: float, quantiles: Sequence[Quantile]) -> str:
    """For browsers without scripts."""
    rows = [f"{name}  {steady / 1e6:,.1f} ms"]
    rows += [f"p{100 * q.level:g}  {q.ns / 1e6:,.1f} ms" for q in quantiles if q.ns is not None]
    return "\n".join(rows) + "\n"
