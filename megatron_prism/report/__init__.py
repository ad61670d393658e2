"""Results as text, HTML pages and traces; no analysis, and nothing is measured or simulated here.

    metrics.py       the numbers that all renderers print, as one value
    text.py          a timeline for the terminal
    replay.py        a timeline as one self-contained page (page.html, *.css, *.js)
    predict.py       a prediction, or several layouts side by side, as a page
    hang.py          a verdict on a hang as Markdown and as a page
    chrome_trace.py  a timeline or a verdict for ui.perfetto.dev

What is in no program and no price is printed as unknown.
"""

from __future__ import annotations
