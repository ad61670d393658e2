"""What do people see of a timeline?  One renderer a file, each a function (timeline) -> text.

    figures.py     the numbers that all renderers print, computed once, as one value
    parts.py       what the critical path and the communication are made of
    curves.py      live memory over time; spans of a class, tiny ones merged
    text.py        a page for the terminal
    perfetto.py    a Chrome trace for ui.perfetto.dev, one process per class
    html.py        one self-contained page: diagram, tables, provenance (page.html, *.css, *.js)
    page_data.py   the JSON that the page draws
    distribution.py  what prism predict found; comparison.py: several layouts side by side
    hang.py        a verdict on a hang as Markdown and as a page

Renderers neither measure nor simulate: what is in no program and no price is printed as unknown.
"""

from __future__ import annotations
