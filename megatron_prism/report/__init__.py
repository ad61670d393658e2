"""Results as text, HTML pages and traces; no analysis, and nothing is measured or simulated here.

    metrics.py       the numbers that all renderers print, as one value
    page.py          the shell of every page: page.html, page.css, page.js, terms.js, charts.js
    words.py         ops, kernels and steps in words
    replay.py        a timeline as text; one, or two side by side, as a page
    memory_tables.py peaks of memory, as text
    memory.py        memory over an iteration, as pages draw it
    chrome_trace.py  timelines for ui.perfetto.dev
    trace_events.py  the format of such traces

NAME.js fills the page NAME (explain.js memory's); diagram.js draws timelines, memory.js memory.
What is in no program and no price is printed as unknown.
"""

from __future__ import annotations

RENDERERS = ("replay", "memory_tables")
